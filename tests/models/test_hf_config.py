"""Reading and writing `config.json`; tests/parity has the published ones and transformers."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.hf.families.qwen import DELTA_KEYS, every_nth_attends, read_delta
from jaxrl_llm.models.rope import LinearScaling, YarnScaling

GEMMA = {
    "unit_offset_norms": True,
    "post_norms": True,
    "scaled_embeddings": True,
    "activation": "gelu_tanh",
    "window": 8,
    "windowed_layers": (True, True, False),
}
OLMO = {
    "whole_qk_norm": True,
    "pre_norms": False,
    "post_norms": True,
    "window": 8,
    "windowed_layers": (True, True, False),
    "local_rope_theta": 100.0,
}
CRITIC = {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"0": "value"}}


@pytest.fixture
def source(spec, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(make_config(spec)))
    return tmp_path


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize("value_head", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_is_read(spec, source, tied, value_head):
    spec = dataclasses.replace(spec, tied_embeddings=tied, value_head=value_head)
    (source / "config.json").write_text(json.dumps(make_config(spec)))
    assert read_spec(source) == spec


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "Qwen3"),
        ({"qk_norm": False, "qkv_bias": True}, "Qwen2"),
        ({"qk_norm": False}, "Llama"),
        ({"qk_norm": False, "mlp_bias": True, "rope_scaling": LinearScaling(factor=2.0)}, "Llama"),
        ({"qk_norm": False, "window": 8}, "Mistral"),
        (GEMMA | {"qk_norm": False, "score_softcap": 5.0, "query_scalar": 9.0}, "Gemma2"),
        (GEMMA | {"local_rope_theta": 100.0, "logit_softcap": 5.0}, "Gemma3"),
        (GEMMA | {"local_rope_theta": 9.0, "rope_scaling": LinearScaling(factor=2.0)}, "Gemma3"),
        (OLMO | {"rope_scaling": YarnScaling(factor=2.0, original_positions=32)}, "Olmo3"),
        (OLMO | {"windowed_layers": (), "window": None, "local_rope_theta": None}, "Olmo3"),
        ({"qk_norm": False, "rotary_layers": (True, False, True)}, "SmolLM3"),
        ({"qk_norm": False, "rotary_layers": (False,) * 3, "window": 8}, "SmolLM3"),
    ],
)
def test_a_model_is_written_as_the_family_that_has_it(spec, source, changes, architecture):
    changed = dataclasses.replace(spec, **changes)
    config = make_config(changed)
    assert config["architectures"] == [f"{architecture}ForCausalLM"]
    (source / "config.json").write_text(json.dumps(config))
    assert read_spec(source) == changed


def test_a_model_that_no_family_has_is_refused(spec):
    with pytest.raises(ValueError, match=r"closest, Qwen3, has \{'rotary_fraction': 1.0\}"):
        make_config(dataclasses.replace(spec, rotary_fraction=2 / 3))


def test_both_forms_of_rope_are_read(source):
    edit_config(source, rope_theta=..., rope_parameters={"rope_theta": 5.0})
    assert read_spec(source).rope_theta == 5.0
    edit_config(source, rope_theta=7, rope_parameters=...)
    assert read_spec(source).rope_theta == 7.0
    edit_config(source, rope_theta=..., tie_word_embeddings=...)
    with pytest.raises(ValueError, match=r"neither rope_theta nor rope_parameters\.rope_theta"):
        read_spec(source)


def test_both_forms_of_one_label_are_read(spec, source):
    expected = dataclasses.replace(spec, value_head=True)
    edit_config(source, **CRITIC)
    assert read_spec(source) == expected
    edit_config(source, id2label=..., num_labels=1)
    assert read_spec(source) == expected


def test_labels_of_a_language_model_do_not_matter(spec, source):
    edit_config(source, id2label={"0": "a", "1": "b"})
    assert read_spec(source) == spec


def test_a_value_head_changes_the_config_of_its_source(spec, source):
    edit_config(source, id2label={"0": "a", "1": "b"}, num_labels=2, eos_token_id=7)
    before = json.loads((source / "config.json").read_text())
    critic = dataclasses.replace(spec, value_head=True)
    saved = config_to_save(critic, source, np.dtype("float32"))
    assert saved == before | {
        "architectures": ["Qwen3ForTokenClassification"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "classifier_dropout": 0.0,
        "dtype": "float32",
    }


def test_the_config_of_a_critic_is_kept(spec, source):
    edit_config(source, **CRITIC)
    before = json.loads((source / "config.json").read_text())
    critic = dataclasses.replace(spec, value_head=True)
    saved = config_to_save(critic, source, np.dtype("float32"))
    assert saved == before | {"dtype": "float32"}
    with pytest.raises(ValueError, match="the model's spec is not that of its source"):
        config_to_save(spec, source, np.dtype("float32"))
    with pytest.raises(ValueError, match="the model's spec is not that of its source"):
        config_to_save(dataclasses.replace(critic, norm_eps=1e-5), source, np.dtype("float32"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"\['MambaForCausalLM'\]; supported are .*Qwen3ForCausalLM.*LlamaForCausalLM",
        ),
        ({"architectures": ...}, "architectures None; supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; supported are"),
        ({"attention_dropout": 0.1}, "{'attention_dropout': 0.1}: not supported in a Qwen3 model"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling={'type': 'yarn'} and .* disagree"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"weights are quantized by 'gptq'; expected 'fp8' .e4m3. with .* or a copy of the mod",
        ),
        ({"quantization_config": "fp8"}, "quantization_config='fp8'; expected an object"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "expected 3 of"),
        ({"layer_types": 3}, "layer_types=3; expected a list"),
        ({"hidden_size": 2.5}, "{'hidden_size': 2.5}: expected whole numbers"),
        ({"num_hidden_layers": "3"}, "{'num_hidden_layers': '3'}: expected whole numbers"),
        (
            CRITIC | {"id2label": {"0": "a", "1": "b", "2": "c"}},
            "Qwen3ForTokenClassification with 3 labels; supported is 1",
        ),
        (CRITIC | {"id2label": ..., "num_labels": 4}, "with 4 labels; supported is 1"),
        (CRITIC | {"id2label": ...}, "with 2 labels; supported is 1"),
        (
            CRITIC | {"token_classification_bias": False},
            "token_classification_bias=False; supported is True",
        ),
        ({"head_dim": ..., "hidden_size": ...}, r"keys \['head_dim', 'hidden_size'\] are missing"),
    ],
)
def test_read_spec_refuses(source, changes, message):
    edit_config(source, **changes)
    with pytest.raises(ValueError, match=message):
        read_spec(source)


@pytest.mark.parametrize("key", [*DELTA_KEYS, "full_attention_interval"])
def test_sizes_of_a_deltanet_are_whole_numbers(key):
    config = dict.fromkeys([*DELTA_KEYS, "full_attention_interval"], 2)
    config = config | {"num_hidden_layers": 2} | {key: None}
    with pytest.raises(ValueError, match=f"{key}'?[=:] ?None.*expected .*whole number"):
        read_delta(config | {"layer_types": every_nth_attends(config)})


def test_read_spec_refuses_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_spec(tmp_path)
