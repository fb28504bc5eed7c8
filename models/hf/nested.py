"""The `config.json` of models that see images, too, of which we take the language model.

Its keys are nested under one of them, and its arrays are named after the module that it is.
"""

import dataclasses
from typing import Any

from jaxrl_llm.models.hf.family import Family, read_family, write_family
from jaxrl_llm.models.hf.siglip import SiglipForm
from jaxrl_llm.models.hf.vision import Colors, TowerForm, with_sections
from jaxrl_llm.models.spec import ModelSpec

TEXT = "text_config"
INSIDE = "model.language_model."
"""What names of the language model's arrays begin with in most checkpoints."""
DTYPE_KEYS = ("dtype", "torch_dtype")


def seeing(
    family: Family, tower: TowerForm | SiglipForm, prefix: str = INSIDE, **fields: Any
) -> Family:
    """Return the family of models that see images, too, with the language models of another.

    Args:
        family: Of the language models.
        tower: How the vision tower is written.
        prefix: What names of the language model's arrays begin with.
        fields: Others that differ.

    >>> from jaxrl_llm.models.hf.families import FAMILIES
    >>> from jaxrl_llm.models.hf.vision import qwen3_tower
    >>> seeing(FAMILIES[0], qwen3_tower("qwen3_vl")).language_model
    'Qwen3ForConditionalGeneration'
    """
    return dataclasses.replace(
        family,
        model_type=tower.model_type,
        common=family.common | {"hf_prefix": prefix},
        language_class="ForConditionalGeneration",
        text_key=TEXT,
        untouched=(*tower.prefixes, *family.untouched),
        tower=tower,
        **fields,
    )


def read_seeing(
    family: Family, config: dict[str, Any], colors: Colors | None, *, value_head: bool = False
) -> ModelSpec:
    """Read the spec of a model with its vision tower.

    Args:
        family: The family that the config's architecture names.
        config: The keys of `config.json`.
        colors: As the model's image processor has them, if there is one.
        value_head: Whether the architecture ends in one label.

    Raises:
        ValueError: The family has no tower that we know, or as `read_family`.
    """
    if family.tower is None:
        raise ValueError(
            f"{family.name} models have no vision tower that is supported, they read text alone; "
            "docs/models.md lists those that have one"
        )
    spec = read_family(family, text_config(family, config), value_head=value_head)
    return dataclasses.replace(spec, **family.tower.read(config, colors))


def write_seeing(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Write a spec with a vision tower as the keys of a `config.json`; see `write_family`."""
    assert family.tower is not None and spec.vision is not None
    inner = with_sections(write_family(family, spec), spec)
    inner |= {"model_type": f"{family.model_type}_text"}
    outer = {key: inner.pop(key) for key in ("architectures", "tie_word_embeddings")}
    return outer | {"model_type": family.model_type, TEXT: inner} | family.tower.write(spec)


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
