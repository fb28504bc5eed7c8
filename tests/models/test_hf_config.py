"""Reading and writing `config.json`; tests/parity has the published ones and transformers."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec

CRITIC = {"architectures": ["Qwen3ForTokenClassification"], "id2label": {"0": "value"}}


@pytest.fixture
def source(spec, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(make_config(spec)))
    return tmp_path


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


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


REFUSED = [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ({"architectures": ...}, "architectures"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
    ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    (CRITIC | {"id2label": {"0": "a", "1": "b", "2": "c"}}, "3"),
    (CRITIC | {"token_classification_bias": False}, "token_classification_bias"),
    ({"head_dim": ..., "hidden_size": ...}, "head_dim.*hidden_size"),
]


def test_configs_that_do_not_fit_are_refused(spec, source, subtests):
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
    with pytest.raises(ValueError, match="rotary_fraction"):  # that no family has
        make_config(dataclasses.replace(spec, rotary_fraction=0.5))
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_spec(source)
