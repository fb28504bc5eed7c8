"""The keys of device meshes."""

from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.checks import require
from jaxrl_llm.config.load import key, section

MESH_AXES = ("stage", "expert", "data", "fsdp", "context", "tensor")
"""As `sharding.mesh.AXES`, here so that a config can be checked without jax."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """A device mesh: devices along each axis, of which one may be -1 and takes what is left."""

    stage: int = key(1, "stages of layers, one after another")
    expert: int = key(1, "parts of the experts; they split the batch, too")
    data: int = key(1, "copies of the model that share the batch")
    fsdp: int = key(-1, "parts of the batch that split parameters among them")
    context: int = key(1, "parts of each row of tokens")
    tensor: int = key(1, "parts of heads, feed-forward and vocabulary")
    first_device: int = key(0, "index of the first device")
    devices: int | None = key(None, "devices in all; null takes those that are left")


@dataclass(frozen=True, kw_only=True)
class RolloutSizes(MeshSizes):
    """The mesh of the engine: by default every device holds the whole model."""

    data: int = key(-1, "copies of the model that share the sequences")
    fsdp: int = key(1, "parts of the sequences that split parameters among them")


@dataclass(frozen=True, kw_only=True)
class SftMeshConfig:
    """The device mesh, and how arrays lie on it."""

    train: MeshSizes = section(MeshSizes)
    context_by: str = key("heads", "how attention sees rows that devices share: heads or keys")
    rules: dict[str, Any] = key({}, "mesh axes by logical axis, in place of the default rules")


@dataclass(frozen=True, kw_only=True)
class MeshConfig(SftMeshConfig):
    """The device meshes, and how arrays lie on them."""

    rollout: RolloutSizes = section(RolloutSizes)
    critic: MeshSizes | None = key(None, "of the critic; null: as train")
    reference: MeshSizes | None = key(None, "of the reference; null: as train")
    reward_model: MeshSizes | None = key(None, "of reward models; null: as train")


@dataclass(frozen=True, kw_only=True)
class ServeMeshConfig:
    """The device mesh of a server, and how arrays lie on it."""

    rollout: RolloutSizes = section(RolloutSizes)
    rules: dict[str, Any] = key({}, "mesh axes by logical axis, in place of the default rules")


@dataclass(frozen=True, kw_only=True)
class EngineMeshConfig:
    """The device mesh of an engine that stands alone."""

    rollout: RolloutSizes = section(RolloutSizes)


def check_mesh(mesh: SftMeshConfig) -> None:
    """Refuse sizes that are none."""
    require(
        mesh.context_by in ("heads", "keys"),
        f"mesh.context_by={mesh.context_by!r}, wanted heads or keys",
    )
    for name, sizes in vars(mesh).items():
        if isinstance(sizes, MeshSizes):
            check_sizes(name, sizes)


def check_sizes(name: str, sizes: MeshSizes) -> None:
    """Refuse sizes of a mesh that are none."""
    of = {axis: getattr(sizes, axis) for axis in MESH_AXES}
    require(
        list(of.values()).count(-1) <= 1 and all(s >= 1 or s == -1 for s in of.values()),
        f"mesh.{name}: {', '.join(f'{axis}={size}' for axis, size in of.items())}; "
        "wanted sizes of 1 or more, at most one of them -1",
    )
    require(
        sizes.first_device >= 0 and (sizes.devices is None or sizes.devices > 0),
        f"mesh.{name}: first_device={sizes.first_device} and devices={sizes.devices}, "
        "wanted the index of a device, and a number of them or null",
    )
