"""The `config.json` of Hugging Face directories: what we read from it, and what we write."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models.hf.families.deepseek import DEEPSEEK_V3
from jaxrl_llm.models.hf.families.gemma import GEMMA_FAMILIES
from jaxrl_llm.models.hf.families.glm import GLM4_MOE, GLM4_MOE_LITE
from jaxrl_llm.models.hf.families.gpt_oss import GPT_OSS
from jaxrl_llm.models.hf.families.llama import LLAMA, OLMO3, PHI3, SMOLLM3
from jaxrl_llm.models.hf.families.minimax import MINIMAX_M2
from jaxrl_llm.models.hf.families.mistral import MISTRAL, MIXTRAL
from jaxrl_llm.models.hf.families.qwen import (
    QWEN2,
    QWEN3,
    QWEN3_5_FAMILIES,
    QWEN3_MOE,
    QWEN_VL_FAMILIES,
)
from jaxrl_llm.models.hf.family import (
    INSIDE,
    TEXT,
    Colors,
    Config,
    Family,
    has_parts,
    read_family,
    with_sections,
    write_family,
)
from jaxrl_llm.models.hf.files import INDEX, SINGLE, find_arrays, read_json
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.hf.quantized import QUANTIZATION
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import CHANNELS

# A family says which keys of `config.json` give which fields of a spec, what transformers takes for
# a key that is absent, and what all its models have in common. Reading and writing are the same for
# all of them (`models.hf.family`).
FAMILIES: tuple[Family, ...] = (
    *(QWEN3, QWEN2, LLAMA, MISTRAL, *GEMMA_FAMILIES, QWEN3_MOE, MIXTRAL),
    *(DEEPSEEK_V3, GLM4_MOE_LITE, GLM4_MOE, MINIMAX_M2, PHI3, OLMO3, SMOLLM3, GPT_OSS),
    *(*QWEN3_5_FAMILIES, *QWEN_VL_FAMILIES),
)
"""A spec is written as the first of these that has such models."""

ONE_LABEL = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
VALUE_CONFIG = {**ONE_LABEL, "classifier_dropout": 0.0}
DTYPE_KEYS = ("dtype", "torch_dtype")
SCORING = "jaxrl_llm_scoring"
"""Key of `config.json` that says how a reward model was trained to read answers."""


def read_spec(directory: str | Path, *, vision: bool = False) -> ModelSpec:
    """Read the spec of a model from the `config.json` of its directory.

    Args:
        directory: Holds `config.json`, in the form of transformers 4 (`rope_theta`,
            `rope_scaling`) or 5 (`rope_parameters`); or a hub repository, as `resolve` takes it.
        vision: Whether the vision tower is a part of the model; else what it is made of is none of
            ours, and the spec is that of the language model.

    Returns:
        The spec; a token classifier with one label has a value head, and a sequence classifier with
        one label has a reward head.

    Raises:
        ValueError: The architecture, the number of labels, a key or its value is not supported; a
            key is missing; or a tower is asked for that is not there.
        FileNotFoundError: There is no `config.json`.

    >>> import json, tempfile
    >>> spec = tiny_spec()
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "config.json").write_text(json.dumps(make_config(spec)))
    ...     read_spec(directory) == spec
    True
    """
    path = resolve(directory) / "config.json"
    config = read_json(path)
    try:
        family, head = _family_of(config)
        if head:
            _check_labels(config)
        spec = read_family(family, text_config(family, config), value_head=head == "value")
        if vision:
            spec = _with_tower(spec, family, config, read_colors(path.parent))
        spec = dataclasses.replace(spec, reward_head=head == "reward")
        return _with_stored_prefixes(spec, path.parent, family)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def make_config(spec: ModelSpec) -> dict[str, Any]:
    """Make the `config.json` of a model that has no Hugging Face ancestor.

    Args:
        spec: The model. It is written as the first family of `FAMILIES` that has such models.

    Returns:
        The config as a dict, readable by transformers 4 and 5.

    Raises:
        ValueError: No family has such a model.

    >>> spec = tiny_spec()
    >>> make_config(spec)["architectures"], make_config(spec)["hidden_size"]
    (['Qwen3ForCausalLM'], 4)
    """
    spec = spec.for_length(1)
    closest: tuple[Family, dict[str, Any]] | None = None
    for family in FAMILIES:
        if not _may_be_written(family, spec):
            continue
        config, back = _written(family, spec)
        differing = _differing(spec, dataclasses.replace(back, reward_head=spec.reward_head))
        if not differing and spec.reward_head:
            return config | _reward_config(family)
        if not differing:
            return config | (_value_config(family) if spec.value_head else {})
        if closest is None or len(differing) < len(closest[1]):
            closest = family, differing
    if closest is None:
        raise ValueError(f"no supported family has such a vision tower: {spec.vision}")
    raise ValueError(
        f"no supported family has such a model; the closest, {closest[0].name}, has {closest[1]}"
    )


def _may_be_written(family: Family, spec: ModelSpec) -> bool:
    if spec.vision is None:
        is_alike = family.tower is None
    else:
        kind = family.tower.kind if family.tower and family.text_key else None
        is_alike = spec.vision.kind == kind
    return is_alike and has_parts(family, spec)


def _written(family: Family, spec: ModelSpec) -> tuple[dict[str, Any], ModelSpec]:
    """Return the config of a model in a family, and the spec that it says."""
    config = write_family(family, spec)
    if spec.vision is not None:
        config = _nested(config, family, spec)
    back = read_family(family, text_config(family, config), value_head=spec.value_head)
    return config, back if spec.vision is None else _with_tower(back, family, config, None)


def read_scoring(directory: str | Path) -> dict[str, Any]:
    """Return how a reward model was trained to read answers, as its `config.json` says.

    Args:
        directory: As for `read_spec`.

    Returns:
        `{"render": "answer"}` or `{"step_separator": text}` of a model of `jaxrl_llm.prefer`; an
        empty dict where nothing is said.

    Raises:
        ValueError: Something else is said.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "config.json").write_text("{}")
    ...     read_scoring(directory)
    {}
    """
    path = resolve(directory) / "config.json"
    said = read_json(path).get(SCORING, {})
    known = said in ({}, {"render": "answer"})
    if not known and not (isinstance(said, dict) and [*said] == ["step_separator"]):
        raise ValueError(f"{path}: {SCORING}={said!r}; expected render or step_separator")
    return said


def config_to_save(spec: ModelSpec, source: str | Path | None, dtype: np.dtype) -> dict[str, Any]:
    """Make the `config.json` that goes with saved parameters.

    Args:
        spec: The model.
        source: The directory the model came from, whose config is kept but for the dtype, the
            quantization, code on the hub and the layers for multi-token prediction that we do not
            load; a model with a value head may come from a language or reward model. None makes a
            new config.
        dtype: Of the saved arrays.

    Returns:
        The config as a dict.

    Raises:
        ValueError: The spec does not fit the source, or the family has no architecture for it.

    >>> spec = tiny_spec(value_head=True)
    >>> config_to_save(spec, None, np.dtype("float32"))["architectures"]
    ['Qwen3ForTokenClassification']
    """
    if source is None:
        return make_config(spec) | {"dtype": dtype.name, "torch_dtype": dtype.name}
    spec = spec.for_length(1)
    origin = read_spec(source, vision=spec.vision is not None)
    new_head = spec.value_head and not origin.value_head
    new_score = spec.reward_head and not origin.reward_head
    critic = dataclasses.replace(origin, value_head=True, reward_head=False)
    scorer = dataclasses.replace(origin, value_head=False, reward_head=True)
    if spec != (critic if new_head else scorer if new_score else origin):
        raise ValueError(
            f"the model's spec is not that of its source {source}: "
            f"got {spec}, the source has {origin}"
        )
    config = read_json(resolve(source) / "config.json")
    config.pop(SCORING, None)  # of the source, and its training
    config.pop(QUANTIZATION, None)  # what is saved are floats
    family = _family_of(config)[0]
    if new_head:
        config |= _value_config(family)
    if new_score:
        config |= _reward_config(family)
        inner = config[family.text_key] if family.text_key else config
        inner["pad_token_id"] = _unused_token(text_config(family, config))
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if key in config:
            config[key] = 0
    if config.pop("auto_map", None):  # the code that it names is not saved, nor needed
        config["model_type"] = family.model_type
    return with_dtype(config, dtype.name)


def untouched_prefixes(directory: str | Path, *, vision: bool = False) -> tuple[str, ...]:
    """Return what names of arrays begin with that a model's architecture has beside ours.

    Args:
        directory: As for `read_spec`.
        vision: As there.

    Raises:
        ValueError: The architecture is not supported.
    """
    family = _family_of(read_json(resolve(directory) / "config.json"))[0]
    ours = family.tower.prefixes if vision and family.tower else ()
    return tuple(prefix for prefix in family.untouched if prefix not in ours)


def _family_of(config: dict[str, Any]) -> tuple[Family, str]:
    """Return the family that a config's architecture names, and the head: "value", "reward", ""."""
    architectures = config.get("architectures")
    for family in FAMILIES:
        if ((family.text_key or "text_config") in config) != bool(family.text_key):
            continue
        if architectures == [family.language_model]:
            return family, ""
        if family.value_model and architectures == [family.value_model]:
            return family, "value"
        if family.reward_model and architectures == [family.reward_model]:
            return family, "reward"
    language = ", ".join(dict.fromkeys(family.language_model for family in FAMILIES))
    value = ", ".join(family.value_model for family in FAMILIES if family.value_model)
    raise ValueError(
        f"architectures {architectures!r}; supported are one of {language} and, as critics, "
        f"one of {value} and, as reward models, the families' …ForSequenceClassification"
    )


def _value_config(family: Family) -> dict[str, Any]:
    if family.value_model is None:
        raise ValueError(
            f"transformers has no token classifier for {family.name}, so its critics have no "
            "config.json; expected a model without a value head"
        )
    return {"architectures": [family.value_model], **VALUE_CONFIG}


def _reward_config(family: Family) -> dict[str, Any]:
    if family.reward_model is None:
        raise ValueError(
            f"transformers has no sequence classifier for {family.name}, so its reward models have "
            "no config.json; expected a model without a reward head"
        )
    return {"architectures": [family.reward_model], **ONE_LABEL}


def _unused_token(config: dict[str, Any]) -> int | None:
    """Return a token for padding that ends no answer, or transformers would score the one before.

    None, where the config names none: a batch then holds one sequence.
    """
    pad, ends = config.get("pad_token_id"), config.get("eos_token_id")
    return None if pad in (ends if isinstance(ends, list) else [ends]) else pad


def _with_stored_prefixes(spec: ModelSpec, directory: Path, family: Family) -> ModelSpec:
    """Return a spec with what names of arrays begin with in the model's files.

    transformers saves the arrays of a text model that came out of a larger one under their names
    there, beside a config that is not nested. Those of Qwen2.5-VL have other names in memory than
    in published files, and there are tools that save what they have in memory.
    """
    larger = [f for f in FAMILIES if f.name == family.name and f.tower is not None]
    if not larger or not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return spec
    names = find_arrays(directory).keys()

    def stored(prefixes: tuple[str, ...], usual: str) -> str:
        used = (p for p in prefixes if any(name.startswith(p) for name in names))
        return next(used, usual)

    spec = dataclasses.replace(spec, hf_prefix=stored((INSIDE,), spec.hf_prefix))
    if spec.vision is None or family.tower is None:
        return spec
    prefix = stored(family.tower.prefixes, spec.vision.hf_prefix)
    return dataclasses.replace(spec, vision=dataclasses.replace(spec.vision, hf_prefix=prefix))


def _differing(spec: ModelSpec, other: ModelSpec) -> dict[str, Any]:
    """Return the fields in which specs differ, but for names: transformers takes either."""
    theirs = vars(other) | {"hf_prefix": spec.hf_prefix}
    if spec.vision and other.vision:
        prefix = spec.vision.hf_prefix
        theirs["vision"] = dataclasses.replace(other.vision, hf_prefix=prefix)
    return {name: value for name, value in theirs.items() if value != vars(spec)[name]}


def _check_labels(config: dict[str, Any]) -> None:
    names = config.get("id2label")
    # transformers leaves both keys out when there are two labels
    labels = config.get("num_labels", 2) if names is None else len(names)
    if labels != 1:
        name = config["architectures"][0]
        raise ValueError(f"{name} with {labels} labels; supported is 1, the value or score")
    if not config.get("token_classification_bias", True):
        raise ValueError("token_classification_bias=False; supported is True")


# ------------------------------------------------------------ models that see images: nested keys


def _with_tower(
    spec: ModelSpec, family: Family, config: dict[str, Any], colors: Colors | None
) -> ModelSpec:
    """Return the spec of a language model with the vision tower that its config names."""
    if family.tower is None:
        raise ValueError(
            f"{family.name} models have no vision tower that is supported, they read text alone; "
            "docs/models.md lists those that have one"
        )
    return dataclasses.replace(spec, **family.tower.read(config, colors))


def _nested(inner: dict[str, Any], family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Return the config of a model that sees images, given that of its language model."""
    assert family.tower is not None
    inner = with_sections(inner, spec) | {"model_type": f"{family.model_type}_text"}
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


def read_colors(directory: Path) -> Colors | None:
    """Read what an image processor normalizes pixels by; None where no file of it is there.

    Args:
        directory: Of a model.

    Raises:
        ValueError: It does not rescale and normalize as all supported towers expect, or videos are
            normalized otherwise than images.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory) / "preprocessor_config.json"
    ...     _ = path.write_text('{"image_mean": [0, 0, 0.5], "image_std": [1, 1, 1]}')
    ...     read_colors(Path(directory))
    Colors(mean=(0.0, 0.0, 0.5), std=(1.0, 1.0, 1.0))
    """
    configs = [*_processors(directory)]
    colors = {_read_colors(keys) for keys in configs if {"image_mean", "image_std"} <= {*keys}}
    for keys in configs:
        does_both = keys.get("do_rescale", True) and keys.get("do_normalize", True)
        if not does_both or not math.isclose(keys.get("rescale_factor", 1 / 255), 1 / 255):
            raise ValueError(
                f"{directory}: the image processor has do_rescale={keys.get('do_rescale')}, "
                f"do_normalize={keys.get('do_normalize')} and rescale_factor="
                f"{keys.get('rescale_factor')}; supported are True, True and 1/255"
            )
    if len(colors) > 1:
        raise ValueError(f"{directory}: images and videos are normalized by {sorted(colors)}")
    return next(iter(colors), None)


def _processors(directory: Path) -> Iterator[Config]:
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        if (directory / name).exists():
            yield json.loads((directory / name).read_text("utf-8"))
    path = directory / "processor_config.json"
    whole = json.loads(path.read_text("utf-8")) if path.exists() else {}
    yield from (whole[k] for k in ("image_processor", "video_processor") if k in whole)


def _read_colors(keys: Config) -> Colors:
    mean, std = (tuple(map(float, keys[name])) for name in ("image_mean", "image_std"))
    if len(mean) != CHANNELS or len(std) != CHANNELS:
        raise ValueError(f"image_mean={mean}, image_std={std}; expected {CHANNELS} numbers each")
    return Colors((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]))
