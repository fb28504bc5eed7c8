"""Reading and writing `config.json`; tests/parity has the published ones and transformers."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.hf.families.qwen import DELTA_KEYS, every_nth_attends, read_delta
from jaxrl_llm.models.rope import LinearScaling, YarnScaling

NO_NORM = {"qk_norm": False}
LINEAR = {"rope_scaling": LinearScaling(factor=2.0)}
YARN = {"rope_scaling": YarnScaling(factor=2.0, original_positions=32)}
WINDOWS = {"window": 8, "windowed_layers": (True, False)}
GEMMA = {"unit_offset_norms": True, "post_norms": True, "scaled_embeddings": True} | WINDOWS
GEMMA |= {"activation": "gelu_tanh"}
OLMO = {"whole_qk_norm": True, "pre_norms": False, "post_norms": True}
CRITIC = {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"0": "value"}}
WRITTEN = [
    ({}, "Qwen3"),
    ({"tied_embeddings": True}, "Qwen3"),
    (NO_NORM | {"qkv_bias": True}, "Qwen2"),
    (NO_NORM, "Llama"),
    (NO_NORM | LINEAR | {"mlp_bias": True}, "Llama"),
    (NO_NORM | {"window": 8}, "Mistral"),
    (NO_NORM | GEMMA | {"score_softcap": 5.0, "query_scalar": 9.0}, "Gemma2"),
    (GEMMA | {"local_rope_theta": 100.0, "logit_softcap": 5.0}, "Gemma3"),
    (GEMMA | LINEAR | {"local_rope_theta": 9.0}, "Gemma3"),
    (OLMO | WINDOWS | YARN | {"local_rope_theta": 100.0}, "Olmo3"),
    (OLMO, "Olmo3"),
    (NO_NORM | {"rotary_layers": (True, False)}, "SmolLM3"),
    (NO_NORM | {"rotary_layers": (False, False), "window": 8}, "SmolLM3"),
]


@pytest.fixture
def source(spec, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(make_config(spec)))
    return tmp_path


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_a_model_is_written_as_the_family_that_has_it(spec, tmp_path):
    for changes, architecture in WRITTEN:
        changed = dataclasses.replace(spec, **changes)
        config = make_config(changed)
        assert config["architectures"] == [f"{architecture}ForCausalLM"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_spec(tmp_path) == changed, changes
    critic = dataclasses.replace(spec, value_head=True)
    (tmp_path / "config.json").write_text(json.dumps(make_config(critic)))
    assert read_spec(tmp_path) == critic
    with pytest.raises(ValueError, match="rotary_fraction"):
        make_config(dataclasses.replace(spec, rotary_fraction=0.5))


def test_both_forms_of_rope_and_of_one_label_are_read(spec, source):
    edit_config(source, rope_theta=..., rope_parameters={"rope_theta": 5.0})
    assert read_spec(source).rope_theta == 5.0
    edit_config(source, rope_theta=1e4, rope_parameters=...)
    assert read_spec(source) == spec
    edit_config(source, id2label={"0": "a", "1": "b"})  # of a language model
    assert read_spec(source) == spec
    critic = dataclasses.replace(spec, value_head=True)
    edit_config(source, **CRITIC)
    assert read_spec(source) == critic
    edit_config(source, id2label=..., num_labels=1)
    assert read_spec(source) == critic


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
    for other in (spec, dataclasses.replace(critic, norm_eps=1e-5)):
        with pytest.raises(ValueError, match="source"):
            config_to_save(other, source, np.dtype("float32"))


REFUSED = [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ({"architectures": ...}, "architectures"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
    ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ({"quantization_config": "fp8"}, "quantization_config"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ({"layer_types": 3}, "layer_types"),
    ({"hidden_size": 2.5}, "hidden_size"),
    ({"num_hidden_layers": "3"}, "num_hidden_layers"),
    (CRITIC | {"id2label": {"0": "a", "1": "b", "2": "c"}}, "3"),
    (CRITIC | {"id2label": ..., "num_labels": 4}, "4"),
    (CRITIC | {"id2label": ...}, "2"),
    ({"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}, "3"),
    (CRITIC | {"token_classification_bias": False}, "token_classification_bias"),
    ({"head_dim": ..., "hidden_size": ...}, "head_dim.*hidden_size"),
]


def test_configs_that_do_not_fit_are_refused(source, subtests):
    whole = (source / "config.json").read_text()
    for changes, named in REFUSED:
        with subtests.test(named):
            (source / "config.json").write_text(whole)
            edit_config(source, **changes)
            with pytest.raises(ValueError, match=named):
                read_spec(source)
    (source / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config\.json"):
        read_spec(source)
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_spec(source)


def test_sizes_of_a_deltanet_are_whole_numbers():
    keys = [*DELTA_KEYS, "full_attention_interval"]
    for key in keys:
        config = dict.fromkeys(keys, 2) | {"num_hidden_layers": 2} | {key: None}
        with pytest.raises(ValueError, match=key):
            read_delta(config | {"layer_types": every_nth_attends(config)})
