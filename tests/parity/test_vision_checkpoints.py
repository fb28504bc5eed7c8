"""Models that see images, as checkpoints: read with their towers, saved, read by `transformers`."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxrl_llm.models.hf.config import make_config, read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import declare, parameter_count
from tests.parity.reference import (
    assert_near,
    our_logits,
    packed_batch,
    randomize,
    their_packed_logits,
)

pytestmark = pytest.mark.guards("models/hf/", "models/vision/")

TEXT = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
QWEN3 = dict(head_dim=8)
EXPERTS = QWEN3 | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10)
HYBRID = QWEN3 | dict(
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
VISION = dict(
    depth=2,
    hidden_size=16,
    intermediate_size=20,
    num_heads=2,
    patch_size=4,
    out_hidden_size=24,
)
DEEP = dict(num_position_embeddings=25, deepstack_visual_indexes=[0])
INTERLEAVED = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
FAMILIES = {
    "Qwen3VL": (QWEN3, DEEP, INTERLEAVED),
    "Qwen3VLMoe": (EXPERTS, DEEP, INTERLEAVED),
    "Qwen2_5_VL": ({}, dict(window_size=16, fullatt_block_indexes=[1]), {"mrope_section": [1] * 3}),
    "Qwen3_5": (
        HYBRID,
        dict(num_position_embeddings=25),
        {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
    ),
}
NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TOKENS = {name: 57 + i for i, name in enumerate(NAMES)}  # which the rows here do not have


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """A model, and the directory that transformers saved it in."""
    text, tower, sections = FAMILIES[request.param]
    rope = {"rope_type": "default", "rope_theta": 1e4} | sections
    config = getattr(transformers, f"{request.param}Config")(
        text_config=TEXT | text | {"rope_parameters": rope}, vision_config=VISION | tower, **TOKENS
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = randomize(getattr(transformers, f"{request.param}ForConditionalGeneration")(config))
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


def read(directory):
    spec = read_spec(directory, vision=True)
    return load_params(directory, spec), spec


def test_every_parameter_is_there(saved):
    model, directory = saved
    spec = read_spec(directory, vision=True)
    assert parameter_count(spec) == sum(p.numel() for p in model.parameters())
    assert spec.vision.never_sampled == (57, 58, 59, 60)
    assert sum(spec.mrope_sections) > 0
    alone = read_spec(directory)
    assert "vision" not in declare(alone)
    text = dataclasses.replace(spec, vision=None, mrope_sections=None, mrope_interleaved=False)
    assert alone == text


def test_what_is_saved_is_what_was_read(saved, tmp_path):
    """Also in the names and dtypes of the files; a tower that was trained is what changes."""
    model, directory = saved
    params, spec = read(directory)
    changed = jax.tree.map(lambda x: x + 1, params["vision"])
    save_params(
        tmp_path / "x", params | {"vision": changed}, spec, source=directory, dtype=np.float32
    )
    before, after = (
        load_file(place / "model.safetensors") for place in (directory, tmp_path / "x")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value + ("visual." in name))
    configs = [json.loads((p / "config.json").read_text()) for p in (directory, tmp_path / "x")]
    assert configs[0] == configs[1]
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "x", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(loaded) is type(model)


def test_a_new_model_has_a_config(saved, tmp_path):
    """It says all that the model is, and transformers makes the same model of it."""
    params, spec = read(saved[1])
    save_params(tmp_path / "x", params, spec, source=None, dtype=np.float32)
    assert read_spec(tmp_path / "x", vision=True) == spec
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "x", output_loading_info=True
    )
    assert not any(report.values()), report
    expected = saved[0].state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    ours, theirs = make_config(spec), saved[0].config.to_dict()
    assert ours["vision_config"].items() <= theirs["vision_config"].items()


def test_logits_of_text_equal(saved):
    model, directory = saved
    spec = read_spec(directory)
    tokens, positions, segment_ids = packed_batch(57)
    model.config.vocab_size = spec.vocab_size
    theirs, real = their_packed_logits(model, tokens, segment_ids), segment_ids > 0
    ours = our_logits(load_params(directory, spec), spec, tokens, positions, segment_ids)
    assert_near(np.asarray(ours)[real], theirs[real])
