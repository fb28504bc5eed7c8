"""The `config.json` of Hugging Face directories: what we read from it, and what we write."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models.spec import ModelSpec

LANGUAGE_MODEL = "Qwen3ForCausalLM"
VALUE_MODEL = "Qwen3ForTokenClassification"  # with one label: the value
VALUE_CONFIG = {
    "architectures": [VALUE_MODEL],
    "num_labels": 1,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "classifier_dropout": 0.0,
}
SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "rope_scaling": None,
    "quantization_config": None,
}
SUPPORTED_ROPE = {"rope_type": "default", "partial_rotary_factor": 1.0}
SPEC_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_width",
    "intermediate_size": "ff_width",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
}


def read_spec(directory: str | Path) -> ModelSpec:
    """Read the spec of a model from the `config.json` of its directory.

    Args:
        directory: Holds `config.json`, in the form of transformers 4 (`rope_theta`) or 5
            (`rope_parameters`).

    Returns:
        The spec; a token classifier with one label has a value head.

    Raises:
        ValueError: The architecture, the number of labels or the value of a key is not supported;
            or a key is missing.
        FileNotFoundError: There is no `config.json`.

    >>> import tempfile
    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "config.json").write_text(json.dumps(make_config(spec)))
    ...     read_spec(directory) == spec
    True
    """
    path = Path(directory) / "config.json"
    config = read_json(path)
    architectures = config.get("architectures")
    if architectures not in ([LANGUAGE_MODEL], [VALUE_MODEL]):
        raise ValueError(
            f"{path}: architectures {architectures!r}; supported are "
            f"[{LANGUAGE_MODEL!r}] and [{VALUE_MODEL!r}]"
        )
    value_head = architectures == [VALUE_MODEL]
    if value_head:
        _check_labels(path, config)
    for key, supported in SUPPORTED_VALUES.items():
        if config.get(key, supported) != supported:
            raise ValueError(f"{path}: {key}={config[key]!r}; supported is {supported!r}")
    other_layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise ValueError(
            f"{path}: layer_types has {sorted(other_layers)}; supported is 'full_attention'"
        )
    missing = sorted(SPEC_KEYS.keys() - config.keys())
    if missing:
        raise ValueError(f"{path}: the keys {missing} are missing")
    return ModelSpec(
        **{ours: config[theirs] for theirs, ours in SPEC_KEYS.items()},
        rope_theta=_read_rope_theta(path, config),
        tied_embeddings=config.get("tie_word_embeddings", False),
        init_std=config.get("initializer_range", 0.02),
        value_head=value_head,
    )


def make_config(spec: ModelSpec) -> dict[str, Any]:
    """Make the `config.json` of a model that has no Hugging Face ancestor.

    Args:
        spec: The model; `qk_norm` must be True, as no supported architecture lacks it.

    Returns:
        The config as a dict, readable by transformers 4 and 5.

    Raises:
        ValueError: `qk_norm` is False.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> make_config(spec)["hidden_size"]
    4
    """
    if not spec.qk_norm:
        raise ValueError("Qwen3 norms queries and keys, got a spec with qk_norm=False")
    return {
        "architectures": [LANGUAGE_MODEL],
        "model_type": "qwen3",
        **{theirs: getattr(spec, ours) for theirs, ours in SPEC_KEYS.items()},
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied_embeddings,
        "initializer_range": spec.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        **(VALUE_CONFIG if spec.value_head else {}),
    }


def config_to_save(spec: ModelSpec, source: str | Path | None, dtype: np.dtype) -> dict[str, Any]:
    """Make the `config.json` that goes with saved parameters.

    Args:
        spec: The model.
        source: The directory the model came from, whose config is kept but for the dtype; a model
            with a value head may come from a language model. None makes a new config.
        dtype: Of the saved arrays.

    Returns:
        The config as a dict.

    Raises:
        ValueError: The spec does not fit the source.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32, value_head=True)
    >>> config_to_save(spec, None, np.dtype("float32"))["architectures"]
    ['Qwen3ForTokenClassification']
    """
    if source is None:
        return make_config(spec) | {"dtype": dtype.name, "torch_dtype": dtype.name}
    origin = read_spec(source)
    new_head = spec.value_head and not origin.value_head
    if spec != (dataclasses.replace(origin, value_head=True) if new_head else origin):
        raise ValueError(
            f"the model's spec is not that of its source {source}: "
            f"got {spec}, the source has {origin}"
        )
    config = read_json(Path(source) / "config.json")
    # transformers 4 knows only the first
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return config | (VALUE_CONFIG if new_head else {}) | {key: dtype.name}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        ValueError: The file is not valid JSON.
        FileNotFoundError: There is no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "x.json").write_text('{"a": 1}')
    ...     read_json(Path(directory) / "x.json")
    {'a': 1}
    """
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _check_labels(path: Path, config: dict[str, Any]) -> None:
    names = config.get("id2label")
    # transformers leaves both keys out when there are two labels
    labels = config.get("num_labels", 2) if names is None else len(names)
    if labels != 1:
        raise ValueError(f"{path}: {VALUE_MODEL} with {labels} labels; supported is 1, the value")
    if not config.get("token_classification_bias", True):
        raise ValueError(f"{path}: token_classification_bias=False; supported is True")


def _read_rope_theta(path: Path, config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    for key, value in rope.items():
        if key != "rope_theta" and SUPPORTED_ROPE.get(key) != value:
            raise ValueError(
                f"{path}: rope_parameters has {key}={value!r}; "
                f"supported are rope_theta and {SUPPORTED_ROPE}"
            )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError(f"{path}: neither rope_theta nor rope_parameters.rope_theta is given")
    return float(theta)
