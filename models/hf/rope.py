"""Rotary positions in `config.json`: `rope_theta` and `rope_scaling`, or `rope_parameters`."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Scaling,
    YarnScaling,
)
from jaxrl_llm.models.spec import ModelSpec

Config = Mapping[str, Any]


class Ropes(NamedTuple):
    """Fields of a spec: the base of the frequencies, their scaling, and the base where local."""

    rope_theta: float
    rope_scaling: Scaling | None
    local_rope_theta: float | None


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
NO_ROPE_KEYS = {"no_rope_layers", "no_rope_layer_interval"}


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


def read_smollm3(config: Config) -> dict[str, Any]:
    """Read which layers of a SmolLM3 model are rotated.

    >>> read_smollm3({"num_hidden_layers": 4, "no_rope_layer_interval": 2})
    {'rotary_layers': (True, False, True, False)}
    """
    layers = config["num_hidden_layers"]
    given, period = config.get("no_rope_layers"), config["no_rope_layer_interval"]
    if given is None:
        given = [(layer + 1) % period for layer in range(layers)]
    if len(given) < layers:
        raise ValueError(f"no_rope_layers={given}; expected one entry for each of {layers} layers")
    rotary = tuple(bool(flag) for flag in given[:layers])
    return {"rotary_layers": () if all(rotary) else rotary}


def write_smollm3(spec: ModelSpec) -> dict[str, Any]:
    """Write what `read_smollm3` reads.

    >>> write_smollm3(tiny_spec())
    {'no_rope_layers': [1], 'pad_token_id': None}
    """
    rotary = spec.rotary_layers or (True,) * spec.layers
    # transformers would take a token of the published models' vocabulary for padding
    return {"no_rope_layers": [int(flag) for flag in rotary], "pad_token_id": None}


def write_phi3(spec: ModelSpec) -> dict[str, Any]:
    """Write what transformers would take from the published Phi-3 models where it is absent.

    >>> write_phi3(tiny_spec())
    {'pad_token_id': None, 'original_max_position_embeddings': 32}
    """
    scaling = spec.rope_scaling
    has_original = isinstance(scaling, LongRopeScaling)
    original = scaling.original_positions if has_original else spec.max_positions
    return {"pad_token_id": None, "original_max_position_embeddings": original}
