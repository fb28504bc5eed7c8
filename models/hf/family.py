"""Read and write the `config.json` of one family of models, as its `Family` says."""

import dataclasses
import functools
import importlib.util
import logging
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jaxrl_llm.models.hf.quantized import QUANTIZATION, check_quantization
from jaxrl_llm.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
)
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import CHANNELS, ROPE_THETA, TowerKind, VisionSpec

# Keys of `config.json` that mean the same in every family, and those that change nothing.

Config: TypeAlias = Mapping[str, Any]

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Keys that transformers reads, and that do not change what a model computes for given tokens and
# weights. What it does not read is found by `without_effect`.
WITHOUT_EFFECT = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "pretraining_tp",
    "attn_implementation",
    "cache_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "problem_type",
    "num_labels",
    "id2label",
    "label2id",
    "classifier_dropout",
    "token_classification_bias",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    # how to generate, which transformers 4 wrote here too
    "do_sample",
    "max_length",
    "temperature",
    "top_k",
    "top_p",
}


def check_whole(config: Config, keys: Iterable[str]) -> None:
    """Refuse keys that are no whole numbers; specs say which of these they can have.

    >>> check_whole({"head_dim": "8"}, ["head_dim"])
    Traceback (most recent call last):
    ValueError: {'head_dim': '8'}: expected whole numbers
    """
    given = {key: config.get(key) for key in sorted(keys)}
    if wrong := {key: value for key, value in given.items() if type(value) is not int}:
        raise ValueError(f"{wrong}: expected whole numbers")


SHARED = (
    "configuration_utils.py",
    "modeling_utils.py",
    "modeling_rope_utils.py",
    "modeling_layers.py",
    "masking_utils.py",
    "cache_utils.py",
    "integrations/*attention*.py",
    "integrations/moe.py",
)
"""Code that the models of all families run."""


def without_effect(model_type: str, config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a config that transformers' code for its family does not read.

    These are those that begin with an underscore, and those whose names occur nowhere in the
    sources of the family and in the code that all families run. The sources are read as text. Of a
    family that the installed transformers does not have only the former are.

    Args:
        model_type: The family, as in `config.json`.
        config: Its keys.

    >>> config = {"rope_interleaved": True, "_name_or_path": "a/b", "attention_dropout": 0.1}
    >>> sorted(without_effect("llama", config))
    ['_name_or_path', 'rope_interleaved']
    """
    words = _words(model_type)
    return {key for key in config if key.startswith("_") or (words and key not in words)}


def has_sources(model_type: str) -> bool:
    """Return whether the installed transformers has a family, so that its code can be read.

    >>> has_sources("llama"), has_sources("llama_of_tomorrow")
    (True, False)
    """
    return bool(_words(model_type))


@functools.cache
def _words(model_type: str) -> frozenset[str]:
    """Return all names in the sources that a family's models run; none: it is not there to read."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.submodule_search_locations, "the library depends on it"
    root = Path(package.submodule_search_locations[0])
    family = f"models/{model_type.removesuffix('_text')}/*.py"
    if not (files := [*root.glob(family)]):
        return frozenset()
    files += [path for pattern in SHARED for path in root.glob(pattern)]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text("utf-8")))


log = logging.getLogger(__name__)

TEXT = "text_config"
INSIDE = "model.language_model."
"""What names of the language model's arrays begin with in most checkpoints that see images."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ff_width",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tied_embeddings",
    "initializer_range": "init_std",
}
WHOLE = SIZES.keys() - {"rms_norm_eps", "tie_word_embeddings", "initializer_range"}
COUNTS = {f"moe.{name}" for name in ("experts", "experts_per_token", "ff_width", "shared_ff_width")}
COUNTS |= {"moe.dense_layers", "moe.router.groups", "moe.router.top_groups"}
COUNTS |= {f"latent.{name}" for name in ("query_rank", "kv_rank", "nope_width", "rope_width")}
COUNTS |= {"latent.value_width"}
"""Fields of parts that are whole numbers."""

FLOATS = {"norm_eps", "init_std", "query_scalar", "logit_softcap", "score_softcap"}
FLOATS |= {"moe.router.scale", "moe.swiglu.alpha", "moe.swiglu.limit"}
BALANCE_KEYS = frozenset(
    {"router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux"}
)
"""Keys that only training in transformers looks at: the balance loss and what reports it."""
NULLABLE = {"final_logit_softcapping", "attn_logit_softcapping", "q_lora_rank"}
FACTOR = {"factor": "factor"}
ORIGINAL = {"original_max_position_embeddings": "original_positions"}
# rope_type: our class, and its fields by their keys
SCALINGS: dict[str, tuple[type[Any], dict[str, str]]] = {
    "linear": (LinearScaling, FACTOR),
    "dynamic": (DynamicScaling, FACTOR),
    "llama3": (
        Llama3Scaling,
        FACTOR
        | ORIGINAL
        | {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"},
    ),
    "yarn": (
        YarnScaling,
        FACTOR
        | ORIGINAL
        | {
            key: key
            for key in (
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            )
        },
    ),
    "longrope": (
        LongRopeScaling,
        ORIGINAL
        | {"short_factor": "short_factors", "long_factor": "long_factors"}
        | {"attention_factor": "attention_factor"},
    ),
}
FRACTION_KEY = "partial_rotary_factor"
LOCAL_ROPE_KEY = "rope_local_base_freq"
# Which frequencies turn by an image's rows and columns. A text's positions are the same in each.
MROPE_KEYS = {"mrope_section", "mrope_interleaved"}
ROPE_KEYS = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    FRACTION_KEY,
    "original_max_position_embeddings",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describe how one family of models is written in `config.json`.

    Args:
        name: What the names of its classes in transformers begin with.
        model_type: Its name in `config.json`.
        keys: Config keys to spec fields, besides those of `SIZES`: `moe.experts` is one of a part.
        parts: The parts that all its models have, inner ones first, and their classes.
        only: Keys that may be absent, and the one value that is supported.
        defaults: Keys that may be absent, and what transformers takes then.
        derived: Keys that may be absent or null, and what follows from the others then.
        common: Spec fields that all models of the family share.
        activation_key: The key of the activation function.
        layer_types: `config -> list`, what transformers takes for an absent `layer_types`.
        mixed_layers: Whether the family reads `layer_types`.
        layer_kinds: What may stand there.
        unread: Keys that the family's code in transformers does not look at.
        rope_theta: Base of the rotary frequencies if none is given; None if it must be.
        local_rope_theta: The same for layers with a window, if these have their own.
        local_rope_key: Which key gives that base where one entry is given for all layers.
        partial_rotary: Whether the family reads `partial_rotary_factor`.
        language_class: What follows the family's name in that of the class with logits.
        token_classifier: Whether transformers has such a class, which holds a critic.
        sequence_classifier: What follows the family's name in that of the class with one score per
            sequence; None if there is no such class.
        text_key: Where the keys of the language model are, if it is a part of one that sees images,
            too; `models.hf.config.text_config` takes them from there.
        read_more: `config -> spec fields` that several keys give together, over all others.
        write_more: `spec -> config keys`, its inverse, over all others.
        untouched: What names of arrays in a checkpoint begin with that are no part of the language
            model, such as those of a vision tower. They are not loaded; exports take them over.
        tower: How the vision tower is written, of a family whose tower we have.

    >>> from jaxrl_llm.models.hf.config import FAMILIES
    >>> FAMILIES[0].language_model
    'Qwen3ForCausalLM'
    """

    name: str
    model_type: str
    keys: dict[str, str] = field(default_factory=dict)
    parts: dict[str, type[Any]] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Callable[[Config], Any]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    layer_types: Callable[[Config], list[str]]
    mixed_layers: bool = True
    layer_kinds: frozenset[str] = frozenset({FULL, SLIDING})
    unread: frozenset[str] = frozenset()
    rope_theta: float | None = None
    local_rope_theta: float | None = None
    local_rope_key: str = LOCAL_ROPE_KEY
    partial_rotary: bool = False
    language_class: str = "ForCausalLM"
    token_classifier: bool = True
    sequence_classifier: str | None = "ForSequenceClassification"
    text_key: str | None = None
    read_more: Callable[[Config], dict[str, Any]] = lambda config: {}
    write_more: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}
    untouched: tuple[str, ...] = ()
    tower: "TowerForm | SiglipForm | None" = None

    @property
    def language_model(self) -> str:
        """Return the name of the class with logits."""
        return f"{self.name}{self.language_class}"

    @property
    def reward_model(self) -> str | None:
        """Return the name of the class with one score per sequence, if there is one."""
        return f"{self.name}{self.sequence_classifier}" if self.sequence_classifier else None

    @property
    def value_model(self) -> str | None:
        """Return the name of the class that holds a critic, if there is one."""
        return f"{self.name}ForTokenClassification" if self.token_classifier else None


def read_family(family: Family, config: Config, *, value_head: bool = False) -> ModelSpec:
    """Read a spec from the keys of a `config.json`.

    Args:
        family: The family that its architecture names.
        config: Its keys.
        value_head: Whether the architecture ends in one label.

    Returns:
        The spec.

    Raises:
        ValueError: A key is missing, has a value that we do not support, or is one that we do not
            know, that transformers reads, and that is set. An unknown key that is null, false, 0 or
            empty counts as switched off. One that transformers does not read is ignored.

    >>> from jaxrl_llm.models.hf.config import FAMILIES
    >>> spec = tiny_spec()
    >>> read_family(FAMILIES[0], write_family(FAMILIES[0], spec)) == spec
    True
    """
    _refuse_unknown(family, config)
    filled = _fill(family, config)
    counts = {key for key, ours in family.keys.items() if ours in COUNTS}
    check_whole(filled, WHOLE | {key for key in counts if filled[key] is not None})
    check_only(filled, family.only)
    values = {ours: filled[theirs] for theirs, ours in (SIZES | family.keys).items()}
    for name in FLOATS & values.keys():
        values[name] = None if values[name] is None else float(values[name])
    if "qkv_bias" in values:
        values["output_bias"] = values["qkv_bias"]
    if values.get("query_scalar") == values["head_dim"]:
        values["query_scalar"] = None
    activation = filled[family.activation_key]
    if activation not in ACTIVATIONS:
        expected = sorted(ACTIVATIONS)
        raise ValueError(f"{family.activation_key}={activation!r}; supported are {expected}")
    values |= _read_layers(family, filled) | family.common | family.read_more(filled)
    for part, kind in family.parts.items():
        own = [name for name in values if name.rpartition(".")[0] == part]
        values[part] = kind(**{name.rpartition(".")[2]: values.pop(name) for name in own})
    return ModelSpec(**values, activation=ACTIVATIONS[activation], value_head=value_head)


def _refuse_unknown(family: Family, config: Config) -> None:
    check_quantization(config)
    known = {*SIZES, *family.keys, *family.defaults, *family.derived, *family.only, *family.unread}
    known |= {"layer_types", family.activation_key} | ROPE_KEYS | WITHOUT_EFFECT | {QUANTIZATION}
    if family.local_rope_theta is not None:
        known |= {family.local_rope_key}
    unknown = {key: value for key, value in config.items() if value and key not in known}
    if ignored := unknown and without_effect(family.model_type, unknown):
        _log_ignored(family.name, tuple(sorted(ignored)))
        unknown = {key: value for key, value in unknown.items() if key not in ignored}
    if unknown:
        hint = "What does not change what the model computes can be removed from the file"
        if not has_sources(family.model_type):
            hint = (
                f"The installed transformers, which would say, has no {family.model_type!r}. {hint}"
            )
        raise ValueError(
            f"{unknown}: not supported in a {family.name} model; supported are "
            f"{sorted(known - WITHOUT_EFFECT)}. {hint}"
        )


@functools.cache
def _log_ignored(family: str, keys: tuple[str, ...]) -> None:
    """Log once that keys are ignored: a run reads its config several times."""
    log.info("config.json: ignored %s: transformers' %s does not read it", ", ".join(keys), family)


def check_only(config: Config, supported: Config) -> None:
    """Refuse keys that are set to another value than the one that is supported.

    >>> check_only({"ep_size": 1, "topk_method": None}, {"ep_size": 1, "topk_method": "noaux_tc"})
    """
    for key, value in supported.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"{key}={config[key]!r}; supported is {value!r}")


def _fill(family: Family, config: Config) -> dict[str, Any]:
    filled = {"initializer_range": 0.02, "tie_word_embeddings": False} | family.defaults
    filled |= config
    expected = {*SIZES, *family.keys, family.activation_key} - NULLABLE
    missing = sorted(k for k in expected - family.derived.keys() if filled.get(k) is None)
    if missing:
        raise ValueError(f"the keys {missing} are missing")
    check_whole(filled, WHOLE - family.derived.keys())  # what others are derived from
    for key, derive in family.derived.items():
        if filled.get(key) is None:
            filled[key] = derive(filled)
    return filled


def _read_layers(family: Family, config: Config) -> dict[str, Any]:
    """Return the spec's fields on windows and rotations, which may differ between layers."""
    given = config.get("layer_types")
    if given is not None and not isinstance(given, list):
        raise ValueError(f"layer_types={given!r}; expected a list with the kind of each layer")
    types = given if given is not None and family.mixed_layers else family.layer_types(config)
    if given is not None and not family.mixed_layers and given != types:
        raise ValueError(f"layer_types={given}; the code of {family.name} takes {types}")
    if len(types) != config["num_hidden_layers"] or not set(types) <= family.layer_kinds:
        kinds = " and ".join(map(repr, sorted(family.layer_kinds)))
        raise ValueError(f"layer_types={types}; expected {config['num_hidden_layers']} of {kinds}")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if SLIDING in types and window is None:
        raise ValueError(f"layer_types has {SLIDING!r}, but there is no sliding_window")
    theta, scaling, local_theta = read_ropes(
        config,
        theta=family.rope_theta,
        local_theta=family.local_rope_theta,
        local_key=family.local_rope_key,
    )
    mixed = SLIDING in types and len(set(types)) > 1
    if not mixed and local_theta is not None:
        if types[0] == SLIDING:
            theta, scaling = local_theta, None
        local_theta = None
    return {
        "window": window if SLIDING in types else None,
        "windowed_layers": tuple(kind == SLIDING for kind in types) if mixed else (),
        "delta_layers": tuple(kind == LINEAR for kind in types) if LINEAR in types else (),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local_theta,
        "rotary_fraction": read_fraction(config, is_read=family.partial_rotary),
    }


def has_parts(family: Family, spec: ModelSpec) -> bool:
    """Tell whether a spec has the parts that all models of a family have."""

    def find(path: str) -> Any:
        return functools.reduce(lambda part, name: getattr(part, name, None), path.split("."), spec)

    return all(isinstance(find(path), kind) for path, kind in family.parts.items())


def write_family(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Write a spec as the keys of a `config.json`, readable by transformers 4 and 5.

    Args:
        family: The family to write it as, which `has_parts` tells. What the family cannot say is
            left out, so read it again and compare.
        spec: The model.

    Returns:
        The config as a dict.

    >>> from jaxrl_llm.models.hf.config import FAMILIES
    >>> spec = tiny_spec()
    >>> write_family(FAMILIES[0], spec)["model_type"]
    'qwen3'
    """
    keys = SIZES | family.keys
    values = {theirs: operator.attrgetter(ours)(spec) for theirs, ours in keys.items()}
    if "query_pre_attn_scalar" in values:
        scalar = spec.head_dim if spec.query_scalar is None else spec.query_scalar
        values["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
    theirs = {ours: key for key, ours in ACTIVATIONS.items()}
    return {
        "architectures": [family.language_model],
        "model_type": family.model_type,
        **values,
        family.activation_key: theirs[spec.activation],
        **_write_layers(family, spec),
        **family.write_more(spec),
    }


def _write_layers(family: Family, spec: ModelSpec) -> dict[str, Any]:
    windowed = spec.windowed_layers or (spec.window is not None,) * spec.layers
    linear = spec.delta_layers or (False,) * spec.layers
    config: dict[str, Any] = {}
    if family.mixed_layers:
        named = zip(windowed, linear, strict=True)
        kinds = [
            LINEAR if is_linear else SLIDING if slides else FULL for slides, is_linear in named
        ]
        config["layer_types"] = [kind if kind in family.layer_kinds else FULL for kind in kinds]
    if "sliding_window" in family.defaults:
        config["sliding_window"] = spec.window
    if "use_sliding_window" in family.defaults:
        config["use_sliding_window"] = spec.window is not None
        config["max_window_layers"] = windowed.index(True) if True in windowed else spec.layers
    rope = write_rope(spec.rope_theta, spec.rope_scaling)
    config["rope_theta"] = spec.rope_theta
    if family.partial_rotary:
        config[FRACTION_KEY] = rope[FRACTION_KEY] = spec.rotary_fraction
    if spec.rope_scaling:
        apart = {"rope_theta", FRACTION_KEY}
        config["rope_scaling"] = {key: value for key, value in rope.items() if key not in apart}
    if family.local_rope_theta is None:
        return config | {"rope_parameters": rope}
    local = spec.rope_theta if spec.local_rope_theta is None else spec.local_rope_theta
    rope_parameters = {FULL: rope, SLIDING: write_rope(local, None)}
    return {family.local_rope_key: local} | config | {"rope_parameters": rope_parameters}


def seeing(
    family: Family, tower: "TowerForm | SiglipForm", prefix: str = INSIDE, **fields: Any
) -> Family:
    """Return the family of models that see images, too, with the language models of another.

    Args:
        family: Of the language models.
        tower: How the vision tower is written.
        prefix: What names of the language model's arrays begin with.
        fields: Others that differ.

    >>> from jaxrl_llm.models.hf.config import FAMILIES
    >>> seeing(FAMILIES[0], SiglipForm()).language_model
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


def all_full(config: Config) -> list[str]:
    """Return that all layers attend to everything.

    >>> all_full({"num_hidden_layers": 2})
    ['full_attention', 'full_attention']
    """
    return [FULL] * config["num_hidden_layers"]


def all_alike(config: Config) -> list[str]:
    """Return that all layers have the window, unless it reaches over all positions (Mistral)."""
    window = config["sliding_window"]
    reaches_all = window is None or window >= config["max_position_embeddings"]
    return [FULL if reaches_all else SLIDING] * config["num_hidden_layers"]


def width_per_head(config: Config) -> int:
    """Return the width of a head where none is given."""
    return config["hidden_size"] // config["num_attention_heads"]


# ------------------------------------------------------------------------------ rotary positions


def read_ropes(
    config: Config,
    *,
    theta: float | None,
    local_theta: float | None,
    local_key: str = LOCAL_ROPE_KEY,
) -> tuple[float, Scaling | None, float | None]:
    """Read the rotary positions of a model.

    Args:
        config: The keys of `config.json`, in the form of transformers 4 or 5.
        theta: The family's base where the config gives none; None if it has to.
        local_theta: The same for layers with a window, in a family that rotates these otherwise.
        local_key: Which key gives the latter's base where one entry is given for all layers.

    Returns:
        The base of the frequencies, their scaling, and the base in layers with a window, if these
        have their own.

    Raises:
        ValueError: A key or value is not supported, or the base is missing.

    >>> read_ropes({"rope_theta": 5, "rope_scaling": {"type": "linear", "factor": 2}}, theta=None,
    ...            local_theta=None)
    (5.0, LinearScaling(factor=2.0), None)
    """
    given = _one_form(config)
    if local_theta is None:
        if nested := sorted(key for key, value in given.items() if isinstance(value, dict)):
            raise ValueError(f"the rotary positions are given for {nested}; expected one for all")
        return *_read_rope(config, given, theta), None
    if "full_attention" not in given and "sliding_attention" not in given:
        local = config.get(local_key)
        local = local_theta if local is None else float(local)
        if config.get("rope_parameters"):
            raise ValueError(
                f"rope_parameters={config['rope_parameters']!r}; expected one entry for each of "
                "full_attention and sliding_attention"
            )
        return *_read_rope(config, given, theta), local
    if other := given.keys() - {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters has {sorted(other)} beside entries for kinds of layers")
    full = _read_rope(config, given.get("full_attention") or {}, theta)
    local_config = {key: value for key, value in config.items() if key != "rope_theta"}
    local, scaling = _read_rope(local_config, given.get("sliding_attention") or {}, local_theta)
    if scaling is not None:
        raise ValueError(
            f"rope_parameters of sliding_attention have {scaling}; supported is rope_type='default'"
        )
    return *full, local


def read_fraction(config: Config, *, is_read: bool) -> float:
    """Read which share of a head's dimensions is rotated.

    Args:
        config: The keys of `config.json`.
        is_read: Whether the family's code in transformers looks at it.

    Raises:
        ValueError: It is less than the whole head in a family that does not.

    >>> read_fraction({"partial_rotary_factor": 0.5}, is_read=True)
    0.5
    """
    given = _one_form(config)
    entries = [given, *(entry for entry in given.values() if isinstance(entry, dict)), config]
    fractions = [entry[FRACTION_KEY] for entry in entries if entry.get(FRACTION_KEY) is not None]
    if not is_read and (wrong := [fraction for fraction in fractions if fraction != 1.0]):
        raise ValueError(
            f"{FRACTION_KEY}={wrong[0]!r}; this family's code in transformers rotates the whole "
            "head, expected 1.0"
        )
    return float(fractions[0]) if fractions else 1.0


def _one_form(config: Config) -> dict[str, Any]:
    """Return `rope_parameters`, or `rope_scaling` of transformers 4; both must agree."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}

    def scaling(rope: Config) -> dict[str, Any]:
        kind = {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
        named = {"rope_type", "type", "rope_theta", FRACTION_KEY}
        return kind | {key: value for key, value in rope.items() if key not in named}

    if old and new and scaling(old) != scaling(new.get("full_attention") or new):
        raise ValueError(f"rope_scaling={old} and rope_parameters={new} disagree; expected one")
    return {key: value for key, value in (new or old).items() if key not in MROPE_KEYS}


def _read_rope(
    config: Config, given: Config, default_theta: float | None
) -> tuple[float, Scaling | None]:
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    # names of old: Qwen2.5-VL's sections, which the text has no use for, and LongRoPE's first
    kind = {"mrope": "default", "su": "longrope"}.get(kind, kind)
    rope.pop("type", None)
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    theta = default_theta if theta is None else theta
    if theta is None:
        raise ValueError("neither rope_theta nor rope_parameters.rope_theta is given")
    rope.pop(FRACTION_KEY, None)
    if kind != "default" and kind not in SCALINGS:
        raise ValueError(f"rope_type={kind!r}; supported are {['default', *SCALINGS]}")
    made, keys = SCALINGS.get(kind, (None, {}))
    if "original_max_position_embeddings" in keys:
        length = config.get("original_max_position_embeddings")
        if length is not None:
            rope["original_max_position_embeddings"] = length
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = rope.pop("factor", config["max_position_embeddings"] / original)
        growth = math.log(factor) / math.log(original) if factor > 1 else 0.0
        rope.setdefault("attention_factor", math.sqrt(1 + growth))
    unknown = {key: value for key, value in rope.items() if key not in keys and value}
    if unknown:
        raise ValueError(f"rope_type={kind!r} with {unknown}; supported are {sorted(keys)}")
    if made is None:
        return float(theta), None
    return float(theta), _make(made, {keys[key]: rope[key] for key in keys if key in rope}, kind)


def _make(made: type[Any], values: dict[str, Any], kind: str) -> Scaling:
    fields = dataclasses.fields(made)
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ValueError(f"rope_type={kind!r} without {missing}")
    kinds: dict[str, Callable[[Any], Any]] = {"original_positions": int, "truncate": bool}
    kinds |= dict.fromkeys(
        ("short_factors", "long_factors"), lambda given: tuple(map(float, given))
    )
    return made(**{name: kinds.get(name, float)(value) for name, value in values.items()})


def write_rope(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """Write one rotation as an entry of `rope_parameters`.

    >>> write_rope(1e4, LinearScaling(factor=2.0))
    {'rope_type': 'linear', 'rope_theta': 10000.0, 'factor': 2.0}
    """
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    kind, keys = next((k, keys) for k, (made, keys) in SCALINGS.items() if type(scaling) is made)
    values = {theirs: getattr(scaling, ours) for theirs, ours in keys.items()}
    kept = {
        key: [*value] if isinstance(value, tuple) else value
        for key, value in values.items()
        if value is not None
    }
    return {"rope_type": kind, "rope_theta": theta, **kept}


# ---------------------------------------------------------------------------------- vision towers
#
# The keys under `vision_config`, placeholders, and M-RoPE. Either form of a tower, Qwen's or
# Gemma's, reads the fields of a spec from the whole config, and writes them back.

VISION_KEY = "vision_config"
TOWER_KEYS = {
    "depth": "layers",
    "hidden_size": "hidden_size",
    "num_heads": "heads",
    "intermediate_size": "ff_width",
    "patch_size": "patch",
    "temporal_patch_size": "frames_per_patch",
    "spatial_merge_size": "merge",
    "out_hidden_size": "out_size",
}
IMAGE, VIDEO = "image_token_id", "video_token_id"
MARKS = ("vision_start_token_id", "vision_end_token_id")


class Colors(NamedTuple):
    """What pixels are normalized by, in each channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


HALF = Colors((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = Colors((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


class TowerForm(NamedTuple):
    """How a family writes its tower.

    Attributes:
        kind: Of the tower.
        model_type: Of the family, whole.
        defaults: Keys of `vision_config` that may be absent, and what transformers takes then.
        tokens: The same of the placeholders' keys.
        sections: What transformers takes for an absent `mrope_section`.
        interleaved: Whether these alternate.
        colors: What its image processor takes where its file says nothing.
        prefixes: What names of its arrays may begin with; the first is that of published files.
    """

    kind: TowerKind
    model_type: str
    defaults: Mapping[str, Any]
    tokens: Mapping[str, int]
    sections: tuple[int, int, int]
    interleaved: bool
    colors: Colors
    prefixes: tuple[str, ...] = ("model.visual.",)

    def read(self, config: Config, colors: Colors | None) -> dict[str, Any]:
        """Read the spec's fields that only a model with a tower has.

        Args:
            config: The whole `config.json`.
            colors: As the model's image processor has them; None: it does not say.

        Raises:
            ValueError: A key is missing or unknown, or its value is not supported.
        """
        given = config.get(VISION_KEY)
        if not isinstance(given, dict):
            raise ValueError(f"{VISION_KEY}={given!r}; expected the keys of the vision tower")
        keys = dict(self.defaults) | given
        self._check(keys)
        check_whole(keys, TOWER_KEYS)
        mean, std = colors or self.colors
        tokens = dict(self.tokens) | {key: config[key] for key in self.tokens if key in config}
        check_whole(tokens, tokens)
        tower = VisionSpec(
            kind=self.kind,
            **{ours: keys[theirs] for theirs, ours in TOWER_KEYS.items()},
            **self._read_blocks(keys),
            activation=ACTIVATIONS[keys["hidden_act"]],
            init_std=float(keys["initializer_range"]),
            image_mean=mean,
            image_std=std,
            image_id=tokens[IMAGE],
            video_id=tokens[VIDEO],
            marks=tuple(tokens[key] for key in MARKS),
            hf_prefix=self.prefixes[0],
        )
        sections = _sections(config) or self.sections
        return {"vision": tower, "mrope_sections": sections, "mrope_interleaved": self.interleaved}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Write what `read` reads, but for the sections, which stand with the rotary positions."""
        tower = spec.vision
        assert tower is not None
        theirs = {ours: key for key, ours in ACTIVATIONS.items()}
        keys: dict[str, Any] = {key: getattr(tower, ours) for key, ours in TOWER_KEYS.items()}
        keys |= {"hidden_act": theirs[tower.activation], "initializer_range": tower.init_std}
        if tower.kind == "qwen3":
            keys["num_position_embeddings"] = tower.position_side**2
            if "deepstack_visual_indexes" in self.defaults:
                keys["deepstack_visual_indexes"] = [*tower.deep_layers]
        else:
            window = tower.window or 0
            keys["window_size"] = window * tower.merge * tower.patch
            keys["fullatt_block_indexes"] = [*tower.full_layers]
            keys["tokens_per_second"] = tower.tokens_per_second
        ids = (tower.image_id, tower.video_id, *tower.marks)
        return {VISION_KEY: keys} | dict(zip((IMAGE, VIDEO, *MARKS), ids, strict=True))

    def _check(self, keys: Config) -> None:
        check_known(keys, {*TOWER_KEYS, *self.defaults, "rope_parameters"}, self.model_type)
        if keys["hidden_act"] not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act={keys['hidden_act']!r} of the vision tower; supported are "
                f"{sorted(ACTIVATIONS)}"
            )
        rope = keys.get("rope_parameters") or {}
        if keys["in_channels"] != CHANNELS or rope.get("rope_theta", ROPE_THETA) != ROPE_THETA:
            raise ValueError(
                f"a vision tower with in_channels={keys['in_channels']} and rope_parameters={rope};"
                f" supported are {CHANNELS} and a rope_theta of {ROPE_THETA}"
            )

    def _read_blocks(self, keys: Config) -> dict[str, Any]:
        """Read what the blocks of one kind have, and those of another have not."""
        if self.kind == "qwen3":
            places = keys["num_position_embeddings"]
            check_whole(keys, ["num_position_embeddings"])
            if math.isqrt(places) ** 2 != places:
                raise ValueError(f"num_position_embeddings={places}; expected a square number")
            deep = keys.get("deepstack_visual_indexes") or ()
            has_deep = "deepstack_visual_indexes" in self.defaults
            deep = tuple(deep) if has_deep else ()
            return {"position_side": math.isqrt(places), "deep_layers": deep}
        token = keys["patch_size"] * keys["spatial_merge_size"]
        check_whole(keys, ["window_size", "tokens_per_second"])
        if keys["window_size"] % token or not keys["window_size"]:
            raise ValueError(
                f"window_size={keys['window_size']}; expected a multiple of {token}, the side of a "
                "token in pixels"
            )
        return {
            "window": keys["window_size"] // token,
            "full_layers": tuple(keys["fullatt_block_indexes"]),
            "tokens_per_second": keys["tokens_per_second"],
        }


SIGLIP_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "heads",
    "intermediate_size": "ff_width",
    "patch_size": "patch",
}
SIGLIP_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "patch_size": 16,
    "image_size": 224,
    "num_channels": CHANNELS,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
SIGLIP_TOKENS = {
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
}
SIGLIP_UNUSED = {
    "vision_use_head",
    "attention_dropout",
}  # a head beside ours, and what is 0 when sampling


class SiglipForm:
    """How Gemma 3 writes its tower; see `TowerForm`."""

    kind: TowerKind = "siglip"
    model_type = "gemma3"
    prefixes = ("vision_tower.vision_model.", "vision_tower.", "multi_modal_projector.")

    def read(self, config: Config, colors: Colors | None) -> dict[str, Any]:
        """Read the spec's fields that only a model with a tower has.

        Args:
            config: The whole `config.json`.
            colors: As the model's image processor has them; None: it does not say.

        Raises:
            ValueError: A key is unknown, or its value is not supported.
        """
        given = config.get(VISION_KEY)
        if not isinstance(given, dict):
            raise ValueError(f"{VISION_KEY}={given!r}; expected the keys of the vision tower")
        keys = SIGLIP_DEFAULTS | given
        outside = {key: config.get(key, usual) for key, usual in SIGLIP_TOKENS.items()}
        self._check(keys)
        check_whole(outside, outside)
        patches = keys["image_size"] // keys["patch_size"]
        side = math.isqrt(outside["mm_tokens_per_image"])
        if side**2 != outside["mm_tokens_per_image"] or patches % side:
            raise ValueError(
                f"mm_tokens_per_image={outside['mm_tokens_per_image']}; expected the square of a "
                f"divisor of {patches}, the patches of a side of an image"
            )
        mean, std = colors or HALF
        text = {"hidden_size": 2304} | (config.get("text_config") or {})
        tower = VisionSpec(
            kind=self.kind,
            **{ours: keys[theirs] for theirs, ours in SIGLIP_SIZES.items()},
            frames_per_patch=1,
            merge=patches // side,
            out_size=text["hidden_size"],
            position_side=patches,
            activation="gelu_tanh",
            norm_eps=keys["layer_norm_eps"],
            image_mean=mean,
            image_std=std,
            image_id=outside["image_token_index"],
            marks=(outside["boi_token_index"], outside["eoi_token_index"]),
            hf_prefix=self.prefixes[0],
        )
        return {"vision": tower}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Write what `read` reads."""
        tower = spec.vision
        assert tower is not None
        theirs = {ours: key for key, ours in ACTIVATIONS.items()}
        keys: dict[str, Any] = {key: getattr(tower, ours) for key, ours in SIGLIP_SIZES.items()}
        keys |= {
            "model_type": "siglip_vision_model",
            "image_size": tower.position_side * tower.patch,
            "num_channels": CHANNELS,
            "hidden_act": theirs[tower.activation],
            "layer_norm_eps": tower.norm_eps,
            "vision_use_head": False,
        }
        tokens = (tower.position_side // tower.merge) ** 2
        ids = (tokens, tower.image_id, *tower.marks)
        return {VISION_KEY: keys} | dict(zip(SIGLIP_TOKENS, ids, strict=True))

    def _check(self, keys: Config) -> None:
        check_known(keys, {*SIGLIP_DEFAULTS} | SIGLIP_UNUSED, "siglip")
        check_whole(keys, [*SIGLIP_SIZES, "image_size"])
        wanted = {key: SIGLIP_DEFAULTS[key] for key in ("hidden_act", "num_channels")}
        got = {key: keys[key] for key in wanted}
        if got != wanted:
            raise ValueError(f"a vision tower with {got}; supported is {wanted}")
        if keys["image_size"] % keys["patch_size"]:
            raise ValueError(
                f"image_size={keys['image_size']}; expected a multiple of patch_size="
                f"{keys['patch_size']}"
            )


def check_known(keys: Config, known: set[str], model_type: str) -> None:
    """Refuse keys of a tower that may change what it computes, and that we do not know.

    Args:
        keys: Of the tower.
        known: That are read.
        model_type: By which transformers knows the family.

    >>> check_known({"new_norm": True}, {"depth"}, "qwen3_vl")
    Traceback (most recent call last):
    ValueError: vision_config has {'new_norm': True}; supported are ['depth']
    """
    known = known | WITHOUT_EFFECT
    unknown = {key: value for key, value in keys.items() if value and key not in known}
    if unread := unknown.keys() - without_effect(model_type, unknown):
        unknown = {key: unknown[key] for key in sorted(unread)}
        raise ValueError(
            f"{VISION_KEY} has {unknown}; supported are {sorted(known - WITHOUT_EFFECT)}"
        )


def _sections(config: Config) -> tuple[int, int, int] | None:
    """Return how many rotary frequencies turn by time, height and width, if the config says so."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    given = rope.get("mrope_section")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 3 or {type(n) for n in given} != {int}:
        raise ValueError(f"mrope_section={given!r}; expected three whole numbers")
    return given[0], given[1], given[2]


def with_sections(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of a language model with those sections among its rotary positions.

    >>> config = with_sections({"rope_parameters": {}}, tiny_spec(mrope_sections=(1, 0, 0)))
    >>> config["rope_parameters"]
    {'mrope_section': [1, 0, 0]}
    """
    if spec.mrope_sections is None:
        return config
    sections: dict[str, Any] = {"mrope_section": [*spec.mrope_sections]}
    sections |= {"mrope_interleaved": True} if spec.mrope_interleaved else {}
    return config | {"rope_parameters": config["rope_parameters"] | sections}
