"""The `config.json` of models that see images, too, of which we take the language model.

Its keys are nested under one of them, and its arrays are named after the module that it is.
"""

from typing import Any

from jaxrl_llm.models.hf.family import Family

DTYPE_KEYS = ("dtype", "torch_dtype")


def text_config(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the language model.

    Whether the head is tied is said outside, or in older files inside. The other keys outside are
    about images, which do not matter for text: among them positions by height and width, which
    for text are all the same.

    Args:
        family: The family that the config's architecture names.
        config: The keys of `config.json`.

    Raises:
        ValueError: They are not there.

    >>> from jaxrl_llm.models.hf.families import FAMILIES
    >>> nested = next(family for family in FAMILIES if family.text_key)
    >>> text_config(nested, {"text_config": {"hidden_size": 4}, "tie_word_embeddings": True})
    {'hidden_size': 4, 'tie_word_embeddings': True}
    """
    if family.text_key is None:
        return config
    inner = config.get(family.text_key)
    if not isinstance(inner, dict):
        raise ValueError(f"{family.text_key}={inner!r}; expected the keys of the language model")
    outside = ("tie_word_embeddings", "quantization_config", "num_labels", "id2label")
    return inner | {key: config[key] for key in outside if key in config}


def with_text(family: Family, config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config with other keys of the language model.

    >>> from jaxrl_llm.models.hf.families import FAMILIES
    >>> nested = next(family for family in FAMILIES if family.text_key)
    >>> with_text(nested, {"text_config": {"pad_token_id": 1}}, {"pad_token_id": 2})
    {'text_config': {'pad_token_id': 2}}
    """
    if family.text_key is None:
        return config | changes
    return config | {family.text_key: config[family.text_key] | changes}


def with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Say in which dtype the arrays are saved, also where parts of the config do.

    >>> with_dtype({"text_config": {"torch_dtype": "float32"}}, "bfloat16")
    {'text_config': {'torch_dtype': 'bfloat16'}, 'dtype': 'bfloat16'}
    """

    def inside(part: Any) -> Any:
        given = isinstance(part, dict) and [key for key in DTYPE_KEYS if key in part]
        return part | dict.fromkeys(given, name) if given else part

    changed = {key: inside(value) for key, value in config.items()}
    # transformers 4 knows only the first
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return changed | {key: name}
