"""Gemma 3 with its vision tower, as a checkpoint, and where its images can't be computed."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.attention import Attending
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.models.hf.config import make_config, read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.inputs import patch_rows
from jaxrl_llm.models.kernels import heads_on
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.parity.vision import END, IMAGE, START, draw_visual, load_seeing, make_gemma

pytestmark = pytest.mark.guards("models/hf/", "models/vision/", "models/context.py")

PUBLISHED_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of transformers, its directory, and what we read there."""
    directory = tmp_path_factory.mktemp("gemma")
    model = make_gemma()
    return model, directory, *load_seeing(model, directory)


def reloaded(directory):
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, output_loading_info=True
    )
    return loaded, report


def test_what_is_saved_is_what_was_read(saved, tmp_path):
    """The head of the tower, which is none of ours, too; trained arrays are what changes."""
    model, directory, params, spec = saved
    assert spec.vision.never_sampled == (IMAGE, START, END)
    changed = jax.tree.map(lambda x: x + 1, params["vision"])
    given = params | {"vision": changed}
    save_params(tmp_path / "x", given, spec, source=directory, dtype=np.float32)
    places = directory, tmp_path / "x"
    before, after = (load_file(place / "model.safetensors") for place in places)
    assert before.keys() == after.keys()
    for name, value in before.items():
        moved = name.startswith(("vision_tower.", "multi_modal_")) and ".head." not in name
        np.testing.assert_array_equal(after[name], value + moved, err_msg=name)
    configs = [json.loads((place / "config.json").read_text()) for place in places]
    assert configs[0] == configs[1]
    loaded, report = reloaded(tmp_path / "x")
    assert not any(report.values()), report
    assert type(loaded) is type(model)


def test_a_new_model_has_a_config(saved, tmp_path):
    model, _, params, spec = saved
    save_params(tmp_path / "x", params, spec, source=None, dtype=np.float32)
    read = read_spec(tmp_path / "x", vision=True)
    published = dataclasses.replace(spec.vision, hf_prefix="vision_tower.")
    assert dataclasses.replace(read, vision=published) == spec
    loaded, report = reloaded(tmp_path / "x")
    assert not any(report.values()), report
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert make_config(spec)["mm_tokens_per_image"] == 16


def test_names_of_published_files(saved, tmp_path):
    _, directory, params, _ = saved
    arrays = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value
        for name, value in load_file(directory / "model.safetensors").items()
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    spec = read_spec(tmp_path, vision=True)
    assert spec.vision.hf_prefix == "vision_tower.vision_model."
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, spec), params)
    alone = read_spec(tmp_path)
    text = load_params(tmp_path, alone)
    assert alone == dataclasses.replace(spec, vision=None)
    jax.tree.map(np.testing.assert_array_equal, text, {k: params[k] for k in text})


def test_a_published_config(tmp_path):
    """Absent keys are transformers' defaults; it has the 4,300,079,472 parameters of the hub."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_4B))
    spec = read_spec(tmp_path, vision=True)
    assert parameter_count(spec) == 4_300_079_472
    assert (spec.vision.merge, spec.vision.position_side) == (4, 64)
    assert spec.vision.never_sampled == (255999, 256000, 262144)


WRONG = {
    "tokens": (lambda c: c.update(mm_tokens_per_image=15), "mm_tokens_per_image=15"),
    "no keys": (lambda c: c.update(vision_config=None), "expected the keys of the vision tower"),
    "unknown": (lambda c: c["vision_config"].update(num_heads=4), "num_heads"),
    "size": (lambda c: c["vision_config"].update(image_size=900), "image_size=900"),
    "activation": (lambda c: c["vision_config"].update(hidden_act="gelu"), "'gelu'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_tower_of_ours_has_is_refused(name, tmp_path):
    config = json.loads(json.dumps(PUBLISHED_4B))
    change, message = WRONG[name]
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_spec(tmp_path, vision=True)


def test_images_have_the_size_of_the_table_of_positions(saved):
    spec = saved[3].vision
    with pytest.raises(ValueError, match="positions for 8 x 8"):
        patch_rows(spec, [[draw_visual(1, 4, 8, width=12)]], 64)


def test_kernels_and_shared_rows_are_refused(saved):
    spec = saved[3]
    one = Layout(make_mesh({}, jax.devices()[:1]))
    assert heads_on(spec, one) == "tokens of an image attend to those after them"
    x, ones = jax.numpy.ones((2, 4, 2, 4)), jax.numpy.ones((2, 4), int)
    looking = Attending(ahead=ones)
    shared = Layout(make_mesh({"context": 2}, jax.devices()[:2]))
    with pytest.raises(ValueError, match="got context=2"):
        attend_pieces(x, x, x, ones, looking, layout=shared)
    with pytest.raises(ValueError, match="no kernel"):
        attend_pieces(
            x, x, x, ones, looking, layout=dataclasses.replace(one, kernel=lambda *_: None)
        )
