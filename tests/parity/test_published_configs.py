"""The `config.json` of published models (published.json): read, counted, and as transformers reads.

Keys that every config has and nobody reads, as `eos_token_id`, stand in Qwen3-8B's alone.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from jaxrl_llm.models.hf.config import config_to_save, make_config, read_spec
from jaxrl_llm.models.parameters import parameter_count


def _expand(value):
    """Undo `{"repeat": [...], "times": n}`, which stands for a long list."""
    if not isinstance(value, dict):
        return value
    if "repeat" in value:
        return value["repeat"] * value["times"]
    return {key: _expand(one) for key, one in value.items()}


def _merge(base, changes):
    both = {
        key: _merge(base[key], value) if key.endswith("_config") and key in base else value
        for key, value in changes.items()
    }
    return base | both


def _read_published():
    stored = json.loads(Path(__file__).with_name("published.json").read_text())
    configs = {}
    for name, entry in stored.items():
        given = _expand(entry)
        count, like = given.pop("parameters"), given.pop("like", None)
        base = configs[like][0] if like else {}
        configs[name] = _merge(base, given), count
    return configs


PUBLISHED = _read_published()
"""Of each model its config and its number of parameters."""
SEEING = [name for name in PUBLISHED if "-VL-" in name or name == "Gemma-3-4B"]


def write(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def check_text_model(name, folder):
    config, parameters = PUBLISHED[name]
    spec = read_spec(write(folder, config))
    assert parameter_count(spec) == parameters
    alone = dataclasses.replace(spec, hf_prefix="model.")  # one that no larger model holds
    assert read_spec(write(folder / "ours", make_config(spec))) == alone

    if config["model_type"] == "kimi_k2":  # which transformers has as DeepSeek-V3, as we save it
        write(folder, config_to_save(spec, folder, np.dtype("float32")))
    theirs = transformers.AutoConfig.from_pretrained(folder)  # which fills and renames keys
    theirs.save_pretrained(folder / "theirs")
    saved = json.loads((folder / "theirs" / "config.json").read_text())
    saved["architectures"] = config["architectures"]
    assert read_spec(write(folder / "theirs", saved)) == spec


def test_published_configs_are_read_as_transformers_reads_them(tmp_path, subtests):
    for number, name in enumerate(name for name in PUBLISHED if name not in SEEING):
        with subtests.test(name):
            check_text_model(name, tmp_path / str(number))


def test_models_that_see_images_have_as_many_parameters_as_published(tmp_path, subtests):
    for name in SEEING:
        with subtests.test(name):
            config, parameters = PUBLISHED[name]
            spec = read_spec(write(tmp_path, config), vision=True)
            assert parameter_count(spec) == parameters
            marks = (255999, 256000, 262144) if name == "Gemma-3-4B" else range(151652, 151657)
            assert {*spec.vision.never_sampled} <= {*marks}
            if spec.vision.window is not None:
                assert (spec.vision.window, spec.vision.full_layers) == (4, (7, 15, 23, 31))


FP8 = {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
LINEAR = {"rope_type": "linear", "factor": 2.0}
BY_KIND = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": LINEAR}
LONG = {"type": "longrope", "short_factor": [1.0] * 48}
REFUSED = [  # a model, changes of its config, and what the error names if not their key
    ("Llama-3.2-1B", {"sliding_window": 4096}, "Llama"),
    ("Llama-3.2-1B", {"rope_scaling": LINEAR | {"alpha": 3.0}}, "alpha"),
    ("Llama-3.2-1B", {"rope_parameters": LINEAR}, "rope_scaling"),
    ("Qwen2.5-7B", {"layer_types": ["sliding_attention"] * 28}, "sliding_window"),
    ("Qwen2.5-7B", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
    ("Gemma-2-9B", {"use_bidirectional_attention": True}, ""),
    ("Gemma-3-1B-it", {"rope_parameters": BY_KIND}, "sliding_attention"),
    ("Gemma-3-1B-it", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3For"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, ""),
    ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, ""),
    ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "36"),
    ("Phi-4-mini", {"rope_scaling": LONG}, "long_factors"),
    ("DeepSeek", {"topk_method": "greedy"}, "noaux_tc"),
    ("DeepSeek", {"moe_layer_freq": 2}, ""),
    ("DeepSeek", {"quantization_config": FP8 | {"weight_block_size": None}}, "weight_block_size"),
    ("Qwen3-Next", {"layer_types": ["sliding_attention"] * 48}, "linear_attention"),
]


def find_published(start):
    return next(entry[0] for name, entry in PUBLISHED.items() if name.startswith(start))


def test_what_would_change_the_model_unread_is_refused(tmp_path, subtests):
    for name, changes, named in REFUSED:
        with subtests.test(name, changes=changes):
            write(tmp_path, find_published(name) | changes)
            with pytest.raises(ValueError) as caught:
                read_spec(tmp_path)
            assert (named or next(iter(changes))) in str(caught.value)
