"""Models that see images, as checkpoints: read with their towers, saved, read by `transformers`."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.attention import Attending
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.family import INSIDE
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.inputs import patch_rows
from jaxrl_llm.models.kernels import heads_on
from jaxrl_llm.models.parameters import declare, parameter_count
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.parity.vision import FAMILIES, draw_visual, load_seeing, make_seeing

pytestmark = pytest.mark.guards("models/hf/", "models/vision/", "models/context.py")

BY_DEFAULT = ("Qwen3VL", "Qwen2_5_VL", "Gemma3")
each_family = pytest.mark.parametrize(
    "family",
    [
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
        for name in (*FAMILIES, "Gemma3")
    ],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of a family, the directory that transformers saved it in, and what we read there."""

    @functools.cache
    def save(family):
        model, directory = make_seeing(family), tmp_path_factory.mktemp(family)
        return model, directory, *load_seeing(model, directory)

    return save


def reloaded(directory):
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(report.values()), report
    return loaded


def contents(directory):
    """The arrays and the config of a directory."""
    config = json.loads((directory / "config.json").read_text())
    return load_file(directory / "model.safetensors"), config


def rewritten(target, arrays, config):
    """Write a directory with other arrays and another config."""
    target.mkdir()
    save_file(arrays, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


@each_family
def test_what_is_saved_is_what_was_read(family, saved, tmp_path):
    """In the names and dtypes of the files; a tower that was trained is what changes."""
    model, directory, params, spec = saved(family)
    if family != "Gemma3":  # whose tower has a head that is none of ours
        assert parameter_count(spec) == sum(p.numel() for p in model.parameters())
    alone = read_spec(directory)
    assert "vision" not in declare(alone)
    text = dataclasses.replace(spec, vision=None, mrope_sections=None, mrope_interleaved=False)
    assert alone == text
    changed = params | {"vision": {name: x + 1 for name, x in params["vision"].items()}}
    save_params(tmp_path / "x", changed, spec, source=directory, dtype=np.float32)
    (before, config), (after, again) = contents(directory), contents(tmp_path / "x")
    assert before.keys() == after.keys()
    assert again == config
    for name, value in before.items():
        seen = any(part in name for part in ("visual.", "vision_tower.", "multi_modal_"))
        expected = value + (seen and ".head." not in name)
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
    assert type(reloaded(tmp_path / "x")) is type(model)


@each_family
def test_a_new_model_has_a_config(family, saved, tmp_path):
    """It says all that the model is, and transformers makes the same model of it."""
    model, _, params, spec = saved(family)
    save_params(tmp_path / "x", params, spec, source=None, dtype=np.float32)
    read = read_spec(tmp_path / "x", vision=True)
    tower = dataclasses.replace(read.vision, hf_prefix=spec.vision.hf_prefix)
    assert dataclasses.replace(read, vision=tower) == spec
    expected = model.state_dict()
    for name, value in reloaded(tmp_path / "x").state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_published_experts_are_transposed(saved, tmp_path):
    """transformers tells the forms apart by their shapes, and so do we."""
    _, source, expected, _ = saved("Qwen3VLMoe")
    arrays, config = contents(source)
    swapped = {
        name: np.ascontiguousarray(x.swapaxes(1, 2)) if ".experts." in name else x
        for name, x in arrays.items()
    }
    other = rewritten(tmp_path / "other", swapped, config)
    spec = read_spec(other, vision=True)
    params = load_params(other, spec)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    save_params(tmp_path / "x", params, spec, source=other, dtype=np.float32)
    after = load_file(tmp_path / "x" / "model.safetensors")
    assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in swapped.items()}


def test_flat_configs_and_names_in_memory(saved, tmp_path):
    """Published configs of Qwen2.5-VL are flat; some tools save the names that it has in memory."""
    _, source, before, theirs = saved("Qwen2_5_VL")
    arrays, config = contents(source)
    sections = list(theirs.mrope_sections)
    text = config.pop("text_config") | {
        "rope_scaling": {"type": "mrope", "mrope_section": sections}
    }
    text |= {"rope_theta": text.pop("rope_parameters")["rope_theta"]}
    renamed = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", INSIDE): x
        for name, x in arrays.items()
    }
    flat = rewritten(tmp_path / "flat", renamed, text | config)
    spec = read_spec(flat, vision=True)
    params = load_params(flat, spec)
    assert (spec.hf_prefix, spec.vision.hf_prefix) == (INSIDE, "model.visual.")
    tower = dataclasses.replace(spec.vision, hf_prefix="visual.")
    assert dataclasses.replace(spec, hf_prefix="model.", vision=tower) == theirs
    jax.tree.map(np.testing.assert_array_equal, params, before)
    save_params(tmp_path / "x", params, spec, source=flat, dtype=np.float32)
    reloaded(tmp_path / "x")
    assert load_file(tmp_path / "x" / "model.safetensors").keys() == renamed.keys()


def test_names_of_published_files_of_gemma(saved, tmp_path):
    _, directory, expected, theirs = saved("Gemma3")
    arrays, config = contents(directory)
    inner = {name.replace("tower.", "tower.vision_model."): x for name, x in arrays.items()}
    other = rewritten(tmp_path / "x", inner, config)
    spec = read_spec(other, vision=True)
    assert spec.vision.hf_prefix == "vision_tower.vision_model."
    jax.tree.map(np.testing.assert_array_equal, load_params(other, spec), expected)
    text = load_params(other, dataclasses.replace(theirs, vision=None))
    jax.tree.map(np.testing.assert_array_equal, text, {k: expected[k] for k in text})


WRONG = [  # a family, where a key stands, and a value that no tower of ours has
    ("Qwen3VL", "", {"vision_config": None}),
    ("Qwen3VL", "vision_config", {"depth": "2"}),
    ("Qwen3VL", "vision_config", {"num_heads": 3}),
    ("Qwen3VL", "", {"image_token_id": "a"}),
    ("Qwen3VL", "vision_config", {"out_hidden_size": 20}),
    ("Gemma3", "", {"mm_tokens_per_image": 15}),
]
TOLD = {"vision_config": "vision tower", "num_heads": "heads", "out_hidden_size": "20"}
"""What an error names in place of the key."""


def test_what_no_tower_of_ours_has_is_refused(saved, tmp_path, subtests):
    for family, inside, change in WRONG:
        with subtests.test(family, change=change):
            config = json.loads((saved(family)[1] / "config.json").read_text())
            (config[inside] if inside else config).update(change)
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(ValueError) as caught:
                read_spec(tmp_path, vision=True)
            (key,) = change
            assert TOLD.get(key, key) in str(caught.value)


def test_colors_are_those_of_the_image_processor(saved, tmp_path):
    (tmp_path / "config.json").write_text((saved("Qwen3VL")[1] / "config.json").read_text())
    colors = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": colors}))
    tower = read_spec(tmp_path, vision=True).vision
    assert (tower.image_mean, tower.image_std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    wrong = json.dumps(colors | {"do_normalize": False})
    (tmp_path / "preprocessor_config.json").write_text(wrong)
    with pytest.raises(ValueError, match="do_normalize"):
        read_spec(tmp_path, vision=True)


def test_what_images_of_gemma_cannot_be(saved):
    """Of another size than the table of positions, or in rows of many devices."""
    spec = saved("Gemma3")[3]
    with pytest.raises(ValueError, match="positions"):
        patch_rows(spec.vision, [[draw_visual(1, 4, 8, width=12)]], 64)
    assert isinstance(heads_on(spec, Layout(make_mesh({}, jax.devices()[:1]))), str)
    x, ones = jnp.ones((2, 4, 2, 4)), jnp.ones((2, 4), int)
    looking = Attending(ahead=ones)
    shared = Layout(make_mesh({"context": 2}, jax.devices()[:2]))
    with pytest.raises(ValueError, match="context=2"):
        attend_pieces(x, x, x, ones, looking, layout=shared)
