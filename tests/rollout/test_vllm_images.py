import contextlib
import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.data.chat import encode_prompt, load_tokenizer
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.rollout.engine import EngineError, EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.vllm import process, setup
from jaxrl_llm.rollout.vllm.engine import (
    PendingRequest,
    SidecarImages,
    VllmEngine,
    check_vllm_request,
)
from tests.data.vision_checkpoints import make_tokenizer, write_checkpoint
from tests.rollout.conftest import far_from_uniform
from tests.rollout.test_vllm_parts import sidecar_module

MODEL = Path(__file__).parents[2] / "configs" / "vision" / "model"
SPEC = read_spec(MODEL, vision=True)
TOKENIZER = load_tokenizer(MODEL)
PROCESSOR = VisualProcessor.from_directory(MODEL)
IMAGE = PROCESSOR.placeholders.image_id
SETTINGS = EngineSettings(max_running_sequences=4, max_tokens=256)
SIZES = [(50, 40), (33, 70), (16, 16), (90, 17), (200, 31)]


def image(size, seed=0, processor=PROCESSOR):
    """Return an image of random pixels."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return processor.image(Image.fromarray(pixels))


def asks(*visuals, seed=0, **sampling):
    """Return a request whose prompt shows images."""
    parts = [*({"type": "image"} for _ in visuals), {"type": "text", "text": "hi"}]
    ids = encode_prompt(TOKENIZER, [{"role": "user", "content": parts}])
    tokens = tuple(PROCESSOR.placeholders.expand(ids, visuals, TOKENIZER))
    sampling = SamplingParams(**{"max_new_tokens": 4} | sampling)
    return Request(tokens, sampling, seed, visuals=visuals)


@pytest.fixture(scope="module")
def images():
    return SidecarImages(SPEC, str(MODEL))


@pytest.fixture
def sidecar(monkeypatch):
    """The code that runs in vLLM's environment."""
    monkeypatch.syspath_prepend(process.CODE)
    return sidecar_module("jaxrl_sidecar")


def test_a_sidecar_is_shown_what_the_trainer_reads(images, sidecar):
    visuals = tuple(image(size, seed) for seed, size in enumerate(SIZES))
    request = asks(*visuals)
    pending = PendingRequest(request, None, images)
    message, data = pending.message(), images.pixels(request)
    shown = sidecar.images_of(message["images"], bytes(data))
    assert [PROCESSOR.image(picture).key for picture in shown] == [v.key for v in visuals]
    assert message["prompt"].count(IMAGE) == len(visuals)
    again = PROCESSOR.placeholders.expand(message["prompt"], visuals, TOKENIZER)
    assert again == message["expanded"] == request.prompt


def test_a_sidecar_s_processor_resizes_nothing(images, tmp_path):
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images.write_files(tmp_path, SETTINGS.max_tokens)
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    wide = VisualProcessor.from_directory(MODEL, max_pixels=30_000)  # more than the checkpoint's
    for seed, size in enumerate(SIZES):
        visual = image(size, seed, wide)
        made = theirs([Image.fromarray(PROCESSOR.pixels(visual)[0])], return_tensors="np")
        np.testing.assert_array_equal(made["image_grid_thw"], [visual.grid])
        expected = (visual.patches / 255 - 0.5) / 0.5
        np.testing.assert_allclose(made["pixel_values"], expected, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == TOKENIZER.get_vocab()


def test_what_vllm_can_t_be_shown_is_refused(images, sidecar, tmp_path):
    sidecar.check_expanded([1, 5, 5, 2], (1, 5, 5, 2))
    with pytest.raises(ValueError, match="6"):
        sidecar.check_expanded([1, 5, 5, 5, 5, 2], (1, 5, 5, 2))
    film, seen = PROCESSOR.video([Image.new("RGB", (32, 32))] * 2), image((32, 32))
    good = asks(seen)
    check_vllm_request(good, SPEC, SETTINGS, images)
    for visuals in ((film,), (), (seen, seen)):
        with pytest.raises(EngineError):
            check_vllm_request(dataclasses.replace(good, visuals=visuals), SPEC, SETTINGS, images)
    with pytest.raises(EngineError, match="text"):
        check_vllm_request(good, SPEC, SETTINGS, None)
    with pytest.raises(ValueError, match="float8"):
        setup.check_fp8_vllm(SPEC, VllmConfig(), cpu=False)
    spec, config = setup.language_model(SPEC, str(MODEL), "float32")
    assert spec == SPEC and config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    with pytest.raises(ValueError, match="images"):
        SidecarImages(SPEC, str(write_checkpoint(tmp_path, "gemma3", make_tokenizer("gemma3"))))


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.guards("jaxrl_llm/rollout/", "models/")
def test_log_probs_of_prompts_with_images_are_transformers_after_each_push(tmp_path):
    from transformers import AutoModelForImageTextToText

    probe = [setup.find_python(None), "-c", "import torchvision"]
    if subprocess.run(probe, check=False).returncode:
        pytest.skip("vLLM's environment has no torchvision, which its processors of images need")
    first, second = image(SIZES[0]), image(SIZES[1], 1)
    asked = [(), (first,), (second,), (second, first)]
    requests = [asks(*shown, seed=seed, top_logprobs=5) for seed, shown in enumerate(asked)]
    options = {"source": str(MODEL), "config": VllmConfig(timeout_s=300), "folder": tmp_path}
    with contextlib.closing(VllmEngine(SPEC, SETTINGS, **options)) as engine:
        for version in range(2):
            params = far_from_uniform(SPEC, version, times=4)
            engine.load(params, version)
            answers = engine.sample(requests)
            saved = tmp_path / f"saved{version}"
            save_params(saved, params, SPEC, dtype="float32", source=MODEL)
            theirs = AutoModelForImageTextToText.from_pretrained(saved).eval()
            for request, answer in zip(requests, answers, strict=True):
                expected = first_logprobs(theirs, request)
                ids, logprobs = (part[0] for part in answer.top)
                np.testing.assert_allclose(logprobs, expected[ids], atol=1e-4)
                assert abs(answer.logprobs[0] - expected[answer.tokens[0]]) < 1e-4


def first_logprobs(model, request):
    """Return the log-probs [V] of the first token after a prompt, by transformers."""
    kinds = [int(token == IMAGE) for token in request.prompt]
    inputs = {"input_ids": [request.prompt], "mm_token_type_ids": [kinds]}
    if request.visuals:
        patches = np.concatenate([visual.patches for visual in request.visuals])
        inputs["pixel_values"] = ((patches / 255 - 0.5) / 0.5).astype(np.float32)
        inputs["image_grid_thw"] = [visual.grid for visual in request.visuals]
    model.model.rope_deltas = None
    with torch.no_grad():
        given = {name: torch.tensor(value) for name, value in inputs.items()}
        logits = model(**given).logits[0, -1]
    logits[list(SPEC.vision.never_sampled)] = -torch.inf
    return torch.log_softmax(logits, -1).numpy()
