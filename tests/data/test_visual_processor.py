import json
import math
import types

import numpy as np
import pytest
import torch
from PIL import Image

from jaxrl_llm.data.visuals.pictures import PictureError
from jaxrl_llm.data.visuals.processor import Placeholders, VisualProcessor, fit_area
from tests.data.vision_checkpoints import FAMILIES, VIDEO, make_tokenizer, write_checkpoint

SIZES = [(50, 70), (333, 777), (31, 29), (15, 900)]


@pytest.fixture(scope="module")
def tokenizers():
    return {family: make_tokenizer(family) for family in FAMILIES}


@pytest.fixture(scope="module")
def processors(tmp_path_factory, tokenizers):
    made = {}
    for family, tokenizer in tokenizers.items():
        folder = write_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer)
        made[family] = VisualProcessor.from_directory(folder)
    return made


@pytest.fixture(scope="module")
def theirs():
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made = {f: Qwen2VLImageProcessorPil(**s) for f, s in FAMILIES.items() if f != "gemma3"}
    return made | {"gemma3": Gemma3ImageProcessorPil(**FAMILIES["gemma3"])}


@pytest.fixture(scope="module")
def whole_processors(theirs, tokenizers):
    """Return the processors of text and images; their video processors need torchvision."""
    from transformers import Gemma3Processor, ProcessorMixin, Qwen2_5_VLProcessor, Qwen3VLProcessor

    kinds = {"gemma3": Gemma3Processor, "qwen2_5_vl": Qwen2_5_VLProcessor}
    video = {"video_processor": types.SimpleNamespace(merge_size=2, temporal_patch_size=2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: object)
        return {
            family: kinds.get(family, Qwen3VLProcessor)(
                image_processor=theirs[family],
                tokenizer=tokenizers[family],
                **({} if family == "gemma3" else video),
            )
            for family in FAMILIES
        }


def noise(*shape):
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def normalized(family, visual):
    """Return patches as a tower sees them."""
    pixels = visual.patches.reshape(len(visual.patches), 3, -1) / 255.0
    mean, std = (np.array(FAMILIES[family][f"image_{name}"])[:, None] for name in ("mean", "std"))
    return ((pixels - mean) / std).reshape(visual.patches.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_of_transformers(family, processors, theirs):
    processor = processors[family]
    for size in SIZES:
        picture = noise(*size, 3)
        visual = processor.image(picture)
        made = theirs[family]([picture], return_tensors="np")
        expected, grid = made["pixel_values"], (1, 64, 64)
        if family == "gemma3":  # as a convolution of stride 14 reads them, 16 of a token together
            rows = torch.nn.functional.unfold(torch.tensor(expected), 14, stride=14)[0].T.numpy()
            expected = rows.reshape(16, 4, 16, 4, -1).swapaxes(1, 2).reshape(rows.shape)
        else:
            grid = tuple(made["image_grid_thw"][0].tolist())
        assert visual.grid == grid and visual.patches.dtype == np.uint8
        np.testing.assert_allclose(normalized(family, visual), expected, atol=2e-6)
        assert visual.tokens == math.prod(grid) // processor.resizing.merge**2
        shape = processor.image_shape(picture)
        assert (shape.grid, shape.tokens) == (grid, visual.tokens) and not visual.is_video
    (pixels,) = processor.pixels(visual)
    again = processor.image(np.ascontiguousarray(pixels))  # its size is one that stays
    assert again.grid == visual.grid and again.key == visual.key


def test_sizes_are_those_of_transformers(processors):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_videos

    rng = np.random.default_rng(0)
    for unit, least, most in ((28, 3136, 100_000), (32, 65536, 300_000), (16, 256, 5000)):
        for width, height in rng.integers(10, 2000, (300, 2)).tolist():
            expected = smart_resize(height, width, unit, least, most)
            assert fit_area(width, height, unit, (least, most)) == expected[::-1]
    least, most = VIDEO["size"]["shortest_edge"], VIDEO["size"]["longest_edge"]
    sizes = rng.integers((2, 5, 5), (12, 300, 300), (40, 3)).tolist()
    sizes += [[2, 32, 32], [3, 20, 33], [2, 40, 35]]  # less than there is to be
    for count, width, height in sizes:
        shape = processors["qwen3_vl"].video_shape(np.zeros((count, height, width, 3), np.uint8))
        expected = of_videos(count, height, width, 2, 32, least, most)
        assert shape.grid == (-(-count // 2), expected[0] // 16, expected[1] // 16)


@pytest.mark.parametrize(("family", "count"), [("qwen2_5_vl", 4), ("qwen3_vl", 5)])
def test_a_video_is_cut_into_patches(family, count, processors):
    """Against frames that are resized one by one as images are, and the order of the formula."""
    processor, frames = processors[family], noise(count, 64, 96, 3)
    visual = processor.video({"frames": list(frames), "fps": 4.0})
    t, h, w = visual.grid
    p, padded = processor.resizing.patch, [*range(count), *[count - 1] * (count % 2)]
    pixels = processor.pixels(visual)
    assert (t, len(pixels)) == (len(padded) // 2, len(padded))
    for number, frame in enumerate(padded):
        resized = Image.fromarray(frames[frame]).resize((w * p, h * p), Image.Resampling.BICUBIC)
        assert (pixels[number] == np.asarray(resized)).all()
    patches = visual.patches.reshape(t, h // 2, w // 2, 2, 2, 3, 2, p, p)
    assert (patches[1, 1, 0, 0, 1, 2, 1] == pixels[3, 2 * p : 3 * p, p : 2 * p, 2]).all()
    times = [(padded[i] + padded[i + 1]) / 2 / 4 for i in range(0, len(padded), 2)]
    assert visual.is_video and visual.seconds == tuple(times)


def test_a_key_tells_pictures_apart(processors):
    picture, wide = noise(64, 64, 3), np.zeros((32, 64, 3), np.uint8)
    other, tall = picture.copy(), wide.swapaxes(0, 1)
    other[0, 0, 0] ^= 1
    made = [processors["qwen3_5"].image(p).key for p in (picture, other, wide, tall)]
    assert len({*made}) == 4 and processors["qwen3_5"].image(picture).key == made[0]


def test_bounds_of_a_run(tmp_path, tokenizers):
    """The tower of a run is compiled for frames of `max_pixels`, so nothing is larger."""
    folder, most = write_checkpoint(tmp_path, "qwen3_vl", tokenizers["qwen3_vl"]), 64 * 64
    processor = VisualProcessor.from_directory(folder, max_pixels=most)
    for count in range(2, 8):
        _, height, width = processor.video_shape(noise(count, 32, 160, 3)).grid
        assert height * width * 16**2 <= most, count
    for sides in ((10, 10), (45, 20), (70, 60)):  # the family's least area is larger
        _, height, width = processor.image_shape(noise(*sides, 3)).grid
        assert most / 2 <= height * width * 16**2 <= most, sides
    with pytest.raises(PictureError, match="max_pixels"):
        processor.image(noise(10, 2000, 3))
    for bounds in ({"max_pixels": 1000}, {"min_pixels": 300_000}):
        with pytest.raises(ValueError, match=next(iter(bounds))):
            VisualProcessor.from_directory(folder, **bounds)


def test_gemma_has_one_size(tmp_path, tokenizers, processors):
    folder = write_checkpoint(tmp_path, "gemma3", tokenizers["gemma3"])
    with pytest.raises(ValueError, match="896x896"):
        VisualProcessor.from_directory(folder, max_pixels=1000)
    with pytest.raises(PictureError, match="videos"):
        processors["gemma3"].video(noise(2, 8, 8, 3))
    settings = FAMILIES["gemma3"] | {"do_pan_and_scan": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="do_pan_and_scan"):
        VisualProcessor.from_directory(folder)


def test_files_of_a_checkpoint(tmp_path, tokenizers, processors):
    folder = write_checkpoint(tmp_path, "qwen3_vl", tokenizers["qwen3_vl"])
    both = {"image_processor": FAMILIES["qwen3_vl"], "video_processor": VIDEO}
    (folder / "processor_config.json").write_text(json.dumps(both))
    (folder / "preprocessor_config.json").unlink()
    (folder / "video_preprocessor_config.json").unlink()
    assert VisualProcessor.from_directory(folder).resizing == processors["qwen3_vl"].resizing
    (folder / "processor_config.json").unlink()
    with pytest.raises(ValueError, match=r"preprocessor_config.json"):
        VisualProcessor.from_directory(folder)
    ids = json.loads((folder / "config.json").read_text())
    del ids["video_token_id"]
    for text, named in ((json.dumps(ids), "video_token_id"), ('{"model_type": "qwen3"}', "images")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=named):
            Placeholders.from_directory(folder)


def chat(*parts):
    content = [
        {"type": p} if p in ("image", "video") else {"type": "text", "text": p} for p in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family, processors, tokenizers, whole_processors):
    tokenizer, processor = tokenizers[family], processors[family]
    for parts in (("a:", "image", "b\n", "image"), ("Look , now .", "image"), ("What?",)):
        pictures = [noise(40, 90, 3), noise(120, 50, 3)][: parts.count("image")]
        template = {"tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(chat(*parts), **template)
        given = {"images": pictures or None, "add_special_tokens": False}
        made = whole_processors[family](text=[text], **given)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        shapes = [processor.image_shape(picture) for picture in pictures]
        expanded = processor.placeholders.expand(tokens, shapes, tokenizer)
        assert list(expanded) == list(made["input_ids"][0])
        stand_for = processor.placeholders.image_id
        assert expanded.count(stand_for) == sum(processor.image(p).tokens for p in pictures)


def test_tokens_of_videos_are_those_of_transformers(processors, tokenizers, whole_processors):
    """Each pair of frames of Qwen3-VL has its time before it; of Qwen2.5-VL a video is one run."""
    messages, count = chat("see:", "video", "and", "image", "?"), 7
    video = {"frames": list(noise(count, 64, 96, 3)), "fps": 3.0}
    for family in ("qwen3_vl", "qwen2_5_vl"):
        processor, tokenizer = processors[family], tokenizers[family]
        visuals = [processor.video(video), processor.image(noise(40, 90, 3))]
        metadata = types.SimpleNamespace(fps=3.0, frames_indices=[*range(count)])
        inputs = {"video_grid_thw": np.array([visuals[0].grid]), "video_metadata": [metadata]}
        placed = whole_processors[family].replace_video_token(inputs, 0)
        one = "<|vision_start|><|video_pad|><|vision_end|>"
        if family == "qwen2_5_vl":
            placed = one.replace("<|video_pad|>", placed)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        image = whole_processors[family].replace_image_token(
            {"image_grid_thw": np.array([visuals[1].grid])}, 0
        )
        text = text.replace(one, placed).replace("<|image_pad|>", image)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        expanded = processor.placeholders.expand(tokens, visuals, tokenizer)
        assert list(expanded) == expected
        assert expanded.count(processor.placeholders.video_id) == visuals[0].tokens
