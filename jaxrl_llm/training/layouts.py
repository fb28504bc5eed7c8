"""Where each model of a run stands: meshes, rules, and the shape of micro-batches on them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import closest
from jaxrl_llm.config.sections import (
    BatchConfig,
    MeshConfig,
    MeshSizes,
    RolloutConfig,
    SftMeshConfig,
)
from jaxrl_llm.data.packing import RowShape, row_shape, sequence_cost
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.flops import active_parameters
from jaxrl_llm.models.model import Model
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import (
    AXES,
    DEFAULT_RULES,
    ROLLOUT_RULES,
    Layout,
    Rules,
    batch_shards,
    make_mesh,
)
from jaxrl_llm.training.forward import ForwardConfig

CHEAP_ATTENTION = 0.1
"""Of what a token costs outside attention, the most that long rows may add."""


class Layouts(NamedTuple):
    """Where each model of a run stands."""

    train: Layout
    rollout: Layout
    critic: Layout
    reference: Layout
    reward_model: Layout
    teacher: Layout

    def of(self, role: str) -> Layout:
        """Return where a role's model stands; reward models of both kinds share a mesh."""
        meshes = {"actor": "train", "implicit_reward_model": "reward_model"}
        return getattr(self, meshes.get(role, role))


def overlaps_training(rollout: RolloutConfig, layouts: Layouts) -> bool:
    """Return whether a run's engine samples while its models are trained.

    It does where answers may be stale, and the engine has devices of its own: nodes, a mesh apart
    from all others, or vLLM's.

    Raises:
        ConfigError: it does not, but the config gives it turns to take; or several processes train,
            which would have to take the same turns.
    """
    if rollout.nodes:
        return rollout.staleness > 0
    if rollout.engine == "vllm":
        return rollout.staleness > 0 and not rollout.vllm.sleep
    others = {
        device
        for name in layouts._fields
        if name != "rollout"
        for device in getattr(layouts, name).mesh.devices.flat
    }
    overlaps = rollout.staleness > 0 and others.isdisjoint(layouts.rollout.mesh.devices.flat)
    keys = {"turns": rollout.turns is not None, "at_push": rollout.at_push == "keep"}
    for key in (key for key, is_set in keys.items() if is_set and not overlaps):
        raise ConfigError(
            f"rollout.{key}={getattr(rollout, key)} is of an engine with devices of its own: give "
            "it such by mesh.rollout.first_device and mesh.rollout.devices, and the others by "
            "mesh.train"
        )
    if overlaps and distributed.process_count() > 1:
        raise ConfigError(
            f"rollout.staleness={rollout.staleness} with a mesh of the engine's own (mesh.rollout) "
            f"needs one training process, got {distributed.process_count()}"
        )
    return overlaps


def all_devices() -> Sequence[Any]:
    """Return all devices that jax has.

    A run opens them before it calls a function of a user's, which would be blamed otherwise.

    Raises:
        ConfigError: it can't open the platform that it is to use.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin is not installed
        reason = str(error).strip() or "its plugin is not installed; install it, or name another"
        settings: Any = jax.config
        raise ConfigError(
            f"JAX_PLATFORMS={settings.jax_platforms}: jax can't open this platform: "
            f"{reason.splitlines()[0]}"
        ) from error


def open_layouts(
    config: MeshConfig, devices: Sequence[Any] | None = None, *, has_own_axes: bool = False
) -> Layouts:
    """Lay the devices out as the config says, for each model; by default all that jax has."""
    place = functools.partial(open_layout, config, devices=devices, has_own_axes=has_own_axes)

    def other(name: str, sizes: MeshSizes | None) -> Layout:
        return train if sizes is None else place(name, sizes)

    train = place("train", config.train)
    return Layouts(
        train,
        other("rollout", config.rollout),
        other("critic", config.critic),
        other("reference", config.reference),
        other("reward_model", config.reward_model),
        other("teacher", config.teacher),
    )


def open_layout(
    config: SftMeshConfig,
    name: str,
    sizes: MeshSizes,
    devices: Sequence[Any] | None = None,
    *,
    has_own_axes: bool = False,
) -> Layout:
    """Lay the devices out as one of the config's meshes says; by default all that jax has.

    Args:
        config: of the meshes.
        name: of the mesh.
        sizes: of its axes.
        devices: to take some of.
        has_own_axes: as for `own_rules`.

    Raises:
        ConfigError: the devices don't make up this mesh, leave a process out, or a rule is none.
    """
    devices = all_devices() if devices is None else devices
    end = None if sizes.devices is None else sizes.first_device + sizes.devices
    chosen = devices[sizes.first_device : end]
    if not chosen or (end or 0) > len(devices):
        raise ConfigError(
            f"mesh.{name}: first_device={sizes.first_device} with devices={sizes.devices}, but "
            f"there are {len(devices)} devices"
        )
    if left_out := {d.process_index for d in devices} - {d.process_index for d in chosen}:
        raise ConfigError(
            f"mesh.{name}: first_device={sizes.first_device} with devices={sizes.devices} has no "
            f"device of process {min(left_out)}: name devices of every process, or start one"
        )
    with config_errors_at(f"mesh.{name}"):
        along = {
            "stage": sizes.stage,
            "expert": sizes.expert,
            "data": sizes.data,
            "fsdp": sizes.fsdp,
            "context": sizes.context,
            "tensor": sizes.tensor,
        }
        mesh = make_mesh(along, chosen)
    defaults = ROLLOUT_RULES if name == "rollout" else DEFAULT_RULES
    rules = own_rules(config.rules, defaults, has_own_axes=has_own_axes)
    return Layout(mesh, config.context_by, rules)


def own_rules(
    changed: Mapping[str, Any], defaults: Rules = DEFAULT_RULES, *, has_own_axes: bool = False
) -> Rules:
    """Return rules with a config's own in their place.

    Args:
        changed: the config's rules.
        defaults: the others.
        has_own_axes: whether there may be rules for logical axes of a user's own model.

    >>> own_rules({"embed": None})["embed"]
    >>> own_rules({"vocab": ["tensor"]})["vocab"]
    ('tensor',)

    Raises:
        ConfigError: there is no such logical axis, or the rule is none.
    """
    for axis, rule in changed.items():
        if axis not in DEFAULT_RULES and not has_own_axes:
            raise ConfigError(f"mesh.rules.{axis}: {closest(axis, DEFAULT_RULES)}")
        names = [rule] if isinstance(rule, str) else rule or []
        if not isinstance(names, list) or any(name not in AXES for name in names):
            raise ConfigError(f"mesh.rules.{axis}={rule!r}, expected null or some of {list(AXES)}")
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in changed.items()}
    return {**defaults, **lists}


def packed_shape(
    layout: Layout,
    model: Model,
    *,
    tokens: int,
    longest: int,
    sequences: int,
    long_rows: bool = False,
    visual_tokens: int | None = None,
) -> RowShape:
    """Return the shape of the micro-batches of a pass.

    Args:
        layout: where it runs.
        model: which says what a sequence costs.
        tokens: the most on each device.
        longest: sequence, in tokens; a row is as long, or longer if several devices share it.
        sequences: in all.
        long_rows: whether a row may be several times as long; see `takes_long_rows`.
        visual_tokens: the most on each device that stand for images and videos; None: all.

    Raises:
        ConfigError: a device can't hold its part of a row.
    """
    share = layout.pieces * layout.stages
    length = -(-longest // share) * share
    if tokens * layout.pieces < length:
        raise ConfigError(
            f"batch.max_tokens_per_device={tokens} can't hold a device's part of a row of {length} "
            f"tokens, which context={layout.pieces} share: expected "
            f"{length // layout.pieces} or more"
        )
    shape = row_shape(
        tokens * layout.shards,
        length,
        sequences=sequences,
        multiple_of=batch_shards(layout.mesh),
        cost=sequence_cost(model),
        unit=share,
        long_rows=long_rows,
    )
    return shape._replace(visual_share=min(1.0, (visual_tokens or tokens) / tokens))


def takes_long_rows(forward: ForwardConfig, layout: Layout, longest: int) -> bool:
    """Tell whether rows may be several times as long as the longest sequence.

    Attention then costs up to 2 · `longest` keys for a token, twice as much or more. So it has to
    be cheap, it must be ours, no devices may share a row, and a kernel has its own limits.

    Args:
        forward: how the model is run.
        layout: where.
        longest: sequence, in tokens.
    """
    if not isinstance(forward.model, Decoder) or forward.kernel is not None:
        return False
    spec = forward.model.spec
    pairs = spec.layers * spec.heads * spec.head_dim  # XLA computes those beyond a window, too
    is_cheap = 2 * longest * pairs <= CHEAP_ATTENTION * sum(active_parameters(spec))
    return is_cheap and layout.pieces == layout.stages == 1


def microbatch_shape(
    batch: BatchConfig, forward: ForwardConfig, layout: Layout, *, longest: int, sequences: int
) -> RowShape:
    """Return the shape of the micro-batches of a run's updates and passes in one layout.

    Args:
        batch: of the run.
        forward: how the model is run.
        layout: where it stands.
        longest: sequence, in tokens.
        sequences: of a mini-batch.
    """
    return packed_shape(
        layout,
        forward.model,
        tokens=batch.max_tokens_per_device,
        longest=longest,
        sequences=sequences,
        long_rows=takes_long_rows(forward, layout, longest),
        visual_tokens=batch.max_visual_tokens_per_device,
    )
