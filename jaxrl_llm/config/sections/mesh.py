"""The keys of device meshes."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Section, Table
from jaxrl_llm.config.rules import check

MESH_AXES = ("stage", "expert", "data", "fsdp", "context", "tensor")
"""As `sharding.mesh.AXES`, here so that a config can be checked without jax."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshSizes(Section):
    """A device mesh: devices along each axis, of which one may be -1 and takes what is left."""

    stage: int = Field(
        default=1, description="pipeline parallelism: stages of layers, one after another"
    )
    expert: int = Field(
        default=1, description="expert parallelism: parts of the experts; they split the batch, too"
    )
    data: int = Field(
        default=1, description="data parallelism: copies of the model that share the batch"
    )
    fsdp: int = Field(default=-1, description="parts of the batch that split parameters among them")
    context: int = Field(default=1, description="context parallelism: parts of each row of tokens")
    tensor: int = Field(
        default=1, description="tensor parallelism: parts of heads, feed-forward and vocabulary"
    )
    first_device: int = Field(default=0, ge=0, description="index of the first device")
    devices: int | None = Field(
        default=None, ge=1, description="devices in all; null takes those that are left"
    )

    def __post_init__(self) -> None:
        """Refuse sizes that are none."""
        check(self, sizes_are_positive_or_one_is_open)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutSizes(MeshSizes):
    """The mesh of the engine: by default every device holds the whole model."""

    data: int = Field(
        default=-1, description="data parallelism: copies of the model that share the sequences"
    )
    fsdp: int = Field(
        default=1, description="parts of the sequences that split parameters among them"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SftMeshConfig(Section):
    """The device mesh, and how arrays lie on it."""

    train: MeshSizes = Field(default_factory=MeshSizes)
    context_by: Literal["heads", "keys", "ring"] = Field(
        default="heads",
        description="attention over rows split by context: heads (Ulysses), keys (gathered), ring",
    )
    rules: Table = Field(
        default={}, description="mesh axes by logical axis, in place of the default rules"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshConfig(SftMeshConfig):
    """The device meshes, and how arrays lie on them."""

    rollout: RolloutSizes = Field(default_factory=RolloutSizes)
    critic: MeshSizes | None = Field(default=None, description="of the critic; null: as train")
    reference: MeshSizes | None = Field(
        default=None, description="of the reference; null: as train"
    )
    reward_model: MeshSizes | None = Field(
        default=None, description="of reward models; null: as train"
    )
    teacher: MeshSizes | None = Field(default=None, description="of teachers; null: as train")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServeMeshConfig(Section):
    """The device mesh of a server, and how arrays lie on it."""

    rollout: RolloutSizes = Field(default_factory=RolloutSizes)
    rules: Table = Field(
        default={}, description="mesh axes by logical axis, in place of the default rules"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineMeshConfig(Section):
    """The device mesh of an engine that stands alone."""

    rollout: RolloutSizes = Field(default_factory=RolloutSizes)


def sizes_are_positive_or_one_is_open(mesh: MeshSizes) -> Iterator[str]:
    """Require sizes of 1 or more, of which at most one is -1."""
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    several_open = list(sizes.values()).count(-1) > 1
    if several_open or any(size < 1 and size != -1 for size in sizes.values()):
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        yield f"expected sizes of 1 or more, at most one of them -1, got {shown}"
