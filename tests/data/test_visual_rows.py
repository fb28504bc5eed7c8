import base64
import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from jaxrl_llm.data.dataset import RowVisuals, load_prompts, tokenize_examples, tokenize_prompts
from jaxrl_llm.data.rows import normalize_prompt_row, verl_rows, write_rows
from jaxrl_llm.data.visuals.processor import VisualProcessor
from tests.data.vision_checkpoints import make_tokenizer, write_checkpoint
from tests.refusals import refuses

COLORS = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]


def png(color, size=(64, 32)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


RED, GREEN, BLUE = map(png, COLORS)


def row(content, **columns):
    return {
        "prompt": [{"role": "user", "content": content}],
        "data_source": "test",
        "reward_model": {"ground_truth": "1"},
        **columns,
    }


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("qwen3_5")


@pytest.fixture(scope="module")
def visuals(tmp_path_factory, tokenizer):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5", tokenizer)
    return RowVisuals(processor=VisualProcessor.from_directory(folder))


def colors(prompt):
    """Return the color of each visual of a prompt."""
    return [tuple(v.patches[0].reshape(3, -1)[:, 0].tolist()) for v in prompt.loaded().visuals]


def tokenized(rows, tokenizer, visuals, **limits):
    return tokenize_prompts(
        rows, tokenizer, visuals=visuals, **({"max_prompt_tokens": 999} | limits)
    )


TEXT = {"type": "text", "text": "What?"}
URLS = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (RED, GREEN)]
FORMS = {
    "verl": row("<image><image>What?", images=[{"bytes": RED}, {"bytes": GREEN}]),
    "datasets": row("<image><image>What?", images=[{"bytes": RED, "path": "a"}, {"bytes": GREEN}]),
    "pil": row("<image><image>What?", images=[Image.new("RGB", (64, 32), c) for c in COLORS[:2]]),
    "trl": row([{"type": "image"}, {"type": "image", "text": None}, TEXT], images=[RED, GREEN]),
    "parts": row([{"type": "image", "image": RED}, {"type": "image", "image": GREEN}, TEXT]),
    "mixed": row([{"type": "image"}, {"type": "image", "image": GREEN}, TEXT], images=RED),
    "openai": row([*({"type": "image_url", "image_url": {"url": url}} for url in URLS), TEXT]),
}


def test_forms_of_data_sets_are_one_prompt(tokenizer, visuals, subtests):
    image = "<|vision_start|>" + "<|image_pad|>" * 8 + "<|vision_end|>"  # 64x32 in squares of 16
    text = f"<|im_start|>user\n{image}{image}What?<|im_end|>\n<|im_start|>assistant\n"
    for name, form in FORMS.items():
        with subtests.test(name):
            normalize_prompt_row(form)
            (prompt,), _ = tokenized([form], tokenizer, visuals)
            assert tokenizer.decode(prompt.tokens) == text
            assert prompt.messages[0]["content"] == [{"type": "image"}, {"type": "image"}, TEXT]
            assert prompt.visuals == () and colors(prompt) == COLORS[:2]
            with refuses(rows=(1,)):  # a model of text
                tokenized([row("fine"), form], tokenizer, None)
    for more in ({"images": None}, {}):
        (prompt,), _ = tokenized([row("a text with <image>", **more)], tokenizer, None)
        assert prompt.load is None and prompt.messages[0]["content"] == "a text with <image>"
    (prompt,), _ = tokenized([row("What is <image> in HTML?")], tokenizer, visuals)
    assert "<image>" in tokenizer.decode(prompt.tokens) and prompt.load is None
    named = RowVisuals("pictures", "films", visuals.processor)
    (prompt,), _ = tokenized([row("<image>", pictures=[BLUE])], tokenizer, named)
    assert colors(prompt) == [COLORS[2]]


def test_pictures_are_taken_in_the_order_of_the_chat_and_decoded_in_that_of_the_prompts(
    tokenizer, visuals
):
    chat = row("a<image>b", images=[RED, GREEN, BLUE])
    chat["prompt"] = [
        {"role": "system", "content": "<image>Look."},
        *chat["prompt"],
        *({"role": "assistant", "content": said} for said in ("Yes.", None)),
        {"role": "user", "content": "<image>"},
    ]
    prompts, _ = tokenized([chat, row("none"), FORMS["verl"]], tokenizer, visuals)
    assert [m["content"] for m in prompts[0].messages][2:4] == ["Yes.", None]
    loaded = load_prompts(prompts)
    assert [prompt.index for prompt in loaded] == [0, 1, 2]
    assert [colors(prompt) for prompt in loaded] == [COLORS, [], COLORS[:2]]
    assert all(prompt.load is None for prompt in loaded)


def test_videos(tokenizer, visuals):
    frames = {"frames": [RED, GREEN], "fps": 1}
    for given in (
        row("<video>or<image>?", videos=[frames], images=[BLUE]),
        row([{"type": "video", "video": [RED, GREEN], "fps": 1}, {"type": "image", "image": BLUE}]),
    ):
        normalize_prompt_row(given)
        (prompt,), _ = tokenized([given], tokenizer, visuals)
        video, image = prompt.loaded().visuals
        assert video.is_video and video.seconds == (0.5,) and not image.is_video
        text = tokenizer.decode(prompt.tokens)
        pad = f"<0.5 seconds><|vision_start|>{'<|video_pad|>' * video.tokens}<|vision_end|>"
        assert pad in text and text.count("<|image_pad|>") == image.tokens


def test_files_bring_bytes_or_paths_beside_them(tmp_path, tokenizer, visuals, monkeypatch):
    (tmp_path / "data/pictures").mkdir(parents=True)
    (tmp_path / "data/pictures/red.png").write_bytes(RED)
    url = f"data:image/png;base64,{base64.b64encode(GREEN).decode()}"
    rows = [
        row("<image><image>", images=["pictures/red.png", url]),
        row("<image><image>", images=[{"path": "pictures/red.png"}, {"path": url}]),
        row("none"),
    ]
    (tmp_path / "data/a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stored = [row("<image><image>", images=[{"bytes": RED}, {"bytes": GREEN}]), row("", images=[])]
    write_rows(tmp_path / "b.parquet", stored)
    monkeypatch.chdir(tmp_path)
    for name, counts in (("data/a.jsonl", [2, 2, 0]), ("b.parquet", [2, 0])):
        prompts, _ = tokenized(verl_rows([name]), tokenizer, visuals)
        assert [colors(prompt) for prompt in prompts] == [COLORS[:count] for count in counts]


def test_pictures_are_decoded_when_a_prompt_is_drawn(tokenizer, visuals, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(RED)
    (prompt,), _ = tokenized([row("<image>", images=[str(path)])], tokenizer, visuals)
    assert prompt == pickle.loads(pickle.dumps(prompt)) and prompt.visuals == ()
    loaded = prompt.loaded()
    assert len(loaded.visuals) == 1 and loaded.loaded() is loaded
    assert loaded.visuals[0].key == prompt.loaded().visuals[0].key
    for changed in (png(COLORS[0], (128, 128)), RED[:-30]):  # another size, and damaged
        path.write_bytes(changed)
        with refuses(rows=(0,)):
            prompt.loaded()


def test_a_digest_tells_pictures_of_one_size_apart(tokenizer, visuals, tmp_path):
    """By it a run that goes on finds that its data is another."""

    def digest(*sources, **columns):
        columns = columns or {"images": [*sources]}
        given = row("<image>" * len(sources) or "<video>", **columns)
        return tokenized([given], tokenizer, visuals)[0][0].load.digest()

    path = tmp_path / "a.png"
    path.write_bytes(RED)
    digests = [digest(str(path)), digest(RED), digest({"bytes": RED}), digest(RED, GREEN)]
    assert digests[:2] == [digest(str(path)), digest(RED)]
    path.write_bytes(RED + b"more")
    array = np.zeros((32, 64, 3), np.uint8)
    digests += [digest(str(path)), digest(GREEN), digest(GREEN, RED)]
    digests += [digest(array), digest(array + 1), digest(Image.fromarray(array))]
    films = [{"frames": [RED, GREEN], "fps": rate} for rate in (1, 1.5)]
    digests += [digest(videos=[film]) for film in films]
    assert len({*digests}) == len(digests)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_masks_of_conversations_with_images_are_exact(family, tmp_path):
    """The tokens are those of the text in which each placeholder stands once for each feature."""
    tokenizer = make_tokenizer(family)
    folder = write_checkpoint(tmp_path, family, tokenizer)
    visuals = RowVisuals(processor=VisualProcessor.from_directory(folder))
    asked, said = ["<image>What?", "And <image> now?"], ["It is <image> red.", "Now green."]
    texts = [text for turn in zip(asked, said, strict=True) for text in turn]
    roles = ["user", "assistant"] * 2
    talk = {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]}
    talk |= {"images": [RED, png(COLORS[1], (64, 64))]}
    (example,), _ = tokenize_examples([talk], tokenizer, max_tokens=999, visuals=visuals)
    sampled = [t for t, is_sampled in zip(example.tokens, example.mask, strict=True) if is_sampled]
    end = "<end_of_turn>" if family == "gemma3" else "<|im_end|>"
    assert tokenizer.decode(sampled) == "".join(text + end for text in said)
    loaded, ids = example.load(), visuals.processor.placeholders
    assert sum(t == ids.image_id for t in example.tokens) == sum(v.tokens for v in loaded)
    assert [v.tokens for v in loaded] == list(example.load.tokens) and len(loaded) == 2
    (prompt,), _ = tokenized([row("<image>What?", images=[RED])], tokenizer, visuals)
    assert prompt.tokens == example.tokens[: example.mask.index(True)]


def test_rows_that_are_refused_are_named(tokenizer, visuals, subtests):
    for name, wrong in {
        "too few": row("<image><image>", images=[RED]),
        "too many": row("<image>", images=[RED, GREEN]),
        "not mentioned": row("What?", images=[RED]),
        "no video": row("<video>", videos=[]),
        "a part without a column": row([{"type": "image"}]),
        "damaged": row("<image>", images=[RED[:8]]),
        "no file": row("<image><image>", images=[RED, "x.png"]),
        "one frame": row("<video>", videos=[[RED]]),
        "a mark": row("<image><|image_pad|>", images=[RED]),
    }.items():
        with subtests.test(name), refuses(rows=(1,)):
            tokenized([row("fine"), wrong], tokenizer, visuals)
    for part in ("hi", {"type": "audio"}, {"type": "text", "text": 3}, {"type": "image_url"}):
        with subtests.test(str(part)), pytest.raises(ValueError, match=r"content\[0\]"):
            normalize_prompt_row(row([part]))


def test_responses_hold_no_token_of_images(tokenizer, visuals):
    """A model that reads images gives these no probability: their loss would have no bound."""
    texts = ("4", "a <|image_pad|> here")
    rows = [{"prompt": row("Hi")["prompt"], "response": text} for text in texts]
    with refuses(rows=(1,)):
        tokenize_examples(rows, tokenizer, max_tokens=99, visuals=visuals)
    assert len(tokenize_examples(rows, tokenizer, max_tokens=99)[0]) == 2
