"""Read and write the `config.json` of one family of models, as its `Family` says."""

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl_llm.models.hf.keys import (
    ACTIVATIONS,
    WITHOUT_EFFECT,
    Config,
    check_whole,
    has_sources,
    without_effect,
)
from jaxrl_llm.models.hf.quantized import QUANTIZATION, check_quantization
from jaxrl_llm.models.hf.vision import SiglipForm, TowerForm
from jaxrl_llm.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
)
from jaxrl_llm.models.spec import ModelSpec

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

    >>> from jaxrl_llm.models.hf.families import FAMILIES
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
    tower: TowerForm | SiglipForm | None = None

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

    >>> from jaxrl_llm.models.hf.families import FAMILIES
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
    return ModelSpec(
        **values,
        activation=ACTIVATIONS[activation],
        value_head=value_head,
    )


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
    ropes = read_ropes(
        config,
        theta=family.rope_theta,
        local_theta=family.local_rope_theta,
        local_key=family.local_rope_key,
    )
    mixed = SLIDING in types and len(set(types)) > 1
    if not mixed and ropes.local_rope_theta is not None:
        local = types[0] == SLIDING
        ropes = (
            Ropes(ropes.local_rope_theta, None, None)
            if local
            else ropes._replace(local_rope_theta=None)
        )
    return {
        "window": window if SLIDING in types else None,
        "windowed_layers": tuple(kind == SLIDING for kind in types) if mixed else (),
        "delta_layers": tuple(kind == LINEAR for kind in types) if LINEAR in types else (),
        **ropes._asdict(),
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

    >>> from jaxrl_llm.models.hf.families import FAMILIES
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
    family: Family, tower: TowerForm | SiglipForm, prefix: str = INSIDE, **fields: Any
) -> Family:
    """Return the family of models that see images, too, with the language models of another.

    Args:
        family: Of the language models.
        tower: How the vision tower is written.
        prefix: What names of the language model's arrays begin with.
        fields: Others that differ.

    >>> from jaxrl_llm.models.hf.families import FAMILIES
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


class Ropes(NamedTuple):
    """Fields of a spec: the base of the frequencies, their scaling, and the base where local."""

    rope_theta: float
    rope_scaling: Scaling | None
    local_rope_theta: float | None


def read_ropes(
    config: Config,
    *,
    theta: float | None,
    local_theta: float | None,
    local_key: str = LOCAL_ROPE_KEY,
) -> Ropes:
    """Read the rotary positions of a model.

    Args:
        config: The keys of `config.json`, in the form of transformers 4 or 5.
        theta: The family's base where the config gives none; None if it has to.
        local_theta: The same for layers with a window, in a family that rotates these otherwise.
        local_key: Which key gives the latter's base where one entry is given for all layers.

    Returns:
        The spec's fields.

    Raises:
        ValueError: A key or value is not supported, or the base is missing.

    >>> read_ropes({"rope_theta": 5, "rope_scaling": {"type": "linear", "factor": 2}}, theta=None,
    ...            local_theta=None)
    Ropes(rope_theta=5.0, rope_scaling=LinearScaling(factor=2.0), local_rope_theta=None)
    """
    given = _one_form(config)
    if local_theta is None:
        if nested := sorted(key for key, value in given.items() if isinstance(value, dict)):
            raise ValueError(f"the rotary positions are given for {nested}; expected one for all")
        return Ropes(*_read_rope(config, given, theta), None)
    if "full_attention" not in given and "sliding_attention" not in given:
        local = config.get(local_key)
        local = local_theta if local is None else float(local)
        if config.get("rope_parameters"):
            raise ValueError(
                f"rope_parameters={config['rope_parameters']!r}; expected one entry for each of "
                "full_attention and sliding_attention"
            )
        return Ropes(*_read_rope(config, given, theta), local)
    if other := given.keys() - {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters has {sorted(other)} beside entries for kinds of layers")
    full = _read_rope(config, given.get("full_attention") or {}, theta)
    local_config = {key: value for key, value in config.items() if key != "rope_theta"}
    local, scaling = _read_rope(local_config, given.get("sliding_attention") or {}, local_theta)
    if scaling is not None:
        raise ValueError(
            f"rope_parameters of sliding_attention have {scaling}; supported is rope_type='default'"
        )
    return Ropes(*full, local)


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
