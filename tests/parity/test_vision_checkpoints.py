"""Models that see images, as checkpoints: read with their towers, saved, read by `transformers`."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.hf.config import make_config, read_spec
from jaxrl_llm.models.hf.family import INSIDE
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
from tests.specs import tiny_spec

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
    depth=2, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4, out_hidden_size=24
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


def rewritten(source, target, arrays, config):
    """Write a directory with other arrays and another config."""
    target.mkdir()
    save_file(arrays, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (source / name).exists():
            (target / name).write_bytes((source / name).read_bytes())
    return target


def contents(directory):
    """The arrays and the config of a directory."""
    config = json.loads((directory / "config.json").read_text())
    return load_file(directory / "model.safetensors"), config


@pytest.mark.parametrize("saved", ["Qwen3VLMoe"], indirect=True)
def test_published_experts_are_transposed(saved, tmp_path):
    """transformers tells the forms apart by their shapes, and so do we."""
    source, (arrays, config) = saved[1], contents(saved[1])
    swapped = {
        name: np.ascontiguousarray(x.swapaxes(1, 2)) if ".experts." in name else x
        for name, x in arrays.items()
    }
    other = rewritten(source, tmp_path / "other", swapped, config)
    params, spec = read(other)
    jax.tree.map(np.testing.assert_array_equal, params, read(source)[0])
    save_params(tmp_path / "x", params, spec, source=other, dtype=np.float32)
    after = load_file(tmp_path / "x" / "model.safetensors")
    assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in swapped.items()}


@pytest.mark.parametrize("saved", ["Qwen2_5_VL"], indirect=True)
def test_flat_configs_and_names_in_memory(saved, tmp_path):
    """Published configs of Qwen2.5-VL are flat; some tools save the names that it has in memory."""
    source, (arrays, config) = saved[1], contents(saved[1])
    text = config.pop("text_config") | {"rope_scaling": {"type": "mrope", "mrope_section": [1] * 3}}
    text |= {"rope_theta": text.pop("rope_parameters")["rope_theta"]}
    renamed = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", INSIDE): x
        for name, x in arrays.items()
    }
    flat = rewritten(source, tmp_path / "flat", renamed, text | config)
    (params, spec), (before, theirs) = read(flat), read(source)
    assert (spec.hf_prefix, spec.vision.hf_prefix) == (INSIDE, "model.visual.")
    tower = dataclasses.replace(spec.vision, hf_prefix="visual.")
    assert dataclasses.replace(spec, hf_prefix="model.", vision=tower) == theirs
    jax.tree.map(np.testing.assert_array_equal, params, before)
    save_params(tmp_path / "x", params, spec, source=flat, dtype=np.float32)
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "x", output_loading_info=True
    )
    assert not any(report.values()), report
    assert load_file(tmp_path / "x" / "model.safetensors").keys() == renamed.keys()


WRONG = {
    "no keys": (lambda c: c.update(vision_config=None), "expected the keys of the vision tower"),
    "no number": (lambda c: c["vision_config"].update(depth="2"), "'depth': '2'"),
    "unknown": (lambda c: c["vision_config"].update(num_attention_heads=4), "num_attention_heads"),
    "activation": (lambda c: c["vision_config"].update(hidden_act="relu"), "hidden_act='relu'"),
    "channels": (lambda c: c["vision_config"].update(in_channels=1), "in_channels=1"),
    "heads": (lambda c: c["vision_config"].update(num_heads=3), "heads must divide the width"),
    "tokens": (lambda c: c.update(image_token_id="a"), "'image_token_id': 'a'"),
    "width": (lambda c: c["vision_config"].update(out_hidden_size=20), "features .* are 20 wide"),
}


@pytest.mark.parametrize("saved", ["Qwen3VL"], indirect=True)
@pytest.mark.parametrize("name", WRONG)
def test_what_no_tower_of_ours_has_is_refused(saved, name, tmp_path):
    config = json.loads((saved[1] / "config.json").read_text())
    change, message = WRONG[name]
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_spec(tmp_path, vision=True)


@pytest.mark.parametrize("saved", ["Qwen3VL"], indirect=True)
def test_colors_are_those_of_the_image_processor(saved, tmp_path):
    config = (saved[1] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    colors = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": colors}))
    tower = read_spec(tmp_path, vision=True).vision
    assert (tower.image_mean, tower.image_std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    wrong = json.dumps(colors | {"do_normalize": False})
    (tmp_path / "preprocessor_config.json").write_text(wrong)
    with pytest.raises(ValueError, match="do_normalize=False"):
        read_spec(tmp_path, vision=True)


def test_a_model_of_text_has_no_tower(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(make_config(tiny_spec())))
    with pytest.raises(ValueError, match="Qwen3 models have no vision tower"):
        read_spec(tmp_path, vision=True)
