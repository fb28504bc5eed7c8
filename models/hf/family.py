"""Read and write the `config.json` of one family of models, as its `Family` says."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.models.hf.keys import ACTIVATIONS, WITHOUT_EFFECT, Config, check_whole
from jaxrl_llm.models.hf.quantized import QUANTIZATION, check_quantization
from jaxrl_llm.models.hf.rope import (
    FRACTION_KEY,
    LOCAL_ROPE_KEY,
    ROPE_KEYS,
    Ropes,
    read_fraction,
    read_ropes,
    write_rope,
)
from jaxrl_llm.models.hf.siglip import SiglipForm
from jaxrl_llm.models.hf.unread import without_effect
from jaxrl_llm.models.hf.vision import TowerForm
from jaxrl_llm.models.spec import ModelSpec

log = logging.getLogger(__name__)

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
FLOATS = {"norm_eps", "init_std", "query_scalar", "logit_softcap", "score_softcap"}
NULLABLE = {"final_logit_softcapping", "attn_logit_softcapping"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describe how one family of models is written in `config.json`.

    Args:
        name: What the names of its classes in transformers begin with.
        model_type: Its name in `config.json`.
        keys: Config keys to spec fields, besides those of `SIZES`.
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
            too; `models.hf.nested` takes them from there.
        read_parts: `config -> spec fields` that several keys give together, over all others.
        write_parts: `spec -> config keys`, its inverse, over all others; None for a spec that has
            no such parts.
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
    read_parts: Callable[[Config], dict[str, Any]] = lambda config: {}
    write_parts: Callable[[ModelSpec], dict[str, Any] | None] = lambda spec: {}
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
    check_whole(filled, WHOLE)
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
    return ModelSpec(
        **(values | _read_layers(family, filled) | family.common | family.read_parts(filled)),
        activation=ACTIVATIONS[activation],
        value_head=value_head,
    )


def _refuse_unknown(family: Family, config: Config) -> None:
    check_quantization(config)
    known = {*SIZES, *family.keys, *family.defaults, *family.derived, *family.unread}
    known |= {"layer_types", family.activation_key} | ROPE_KEYS | WITHOUT_EFFECT | {QUANTIZATION}
    if family.local_rope_theta is not None:
        known |= {family.local_rope_key}
    unknown = {key: value for key, value in config.items() if value and key not in known}
    if ignored := unknown and without_effect(family.model_type, unknown):
        _log_ignored(family.name, tuple(sorted(ignored)))
        unknown = {key: value for key, value in unknown.items() if key not in ignored}
    if unknown:
        raise ValueError(
            f"{unknown}: not supported in a {family.name} model; supported are "
            f"{sorted(known - WITHOUT_EFFECT)}. What does not change what the model computes "
            "can be removed from the file"
        )


@functools.cache
def _log_ignored(family: str, keys: tuple[str, ...]) -> None:
    """Log once that keys are ignored: a run reads its config several times."""
    log.info("config.json: ignored %s: transformers' %s does not read it", ", ".join(keys), family)


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


def write_family(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Write a spec as the keys of a `config.json`, readable by transformers 4 and 5.

    Args:
        family: The family to write it as. What the family cannot say is left out, so read it again
            and compare.
        spec: The model.

    Returns:
        The config as a dict.

    >>> from jaxrl_llm.models.hf.families import FAMILIES
    >>> spec = tiny_spec()
    >>> write_family(FAMILIES[0], spec)["model_type"]
    'qwen3'
    """
    values = {theirs: getattr(spec, ours) for theirs, ours in (SIZES | family.keys).items()}
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
        **(family.write_parts(spec) or {}),
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
