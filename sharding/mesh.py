"""The named device mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("stage", "expert", "data", "fsdp", "context", "tensor")
"""The mesh axes, outermost first: neighbours along the last one are the closest devices."""

BATCH = ("expert", "data", "fsdp")
"""The mesh axes over which a batch is split."""


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices out as a mesh.

    Args:
        sizes: devices along each axis; one of them may be -1 and takes what is left.
        devices: default all of this process's platform.

    Raises:
        ValueError: an unknown axis, or sizes that don't multiply to the number of devices.

    >>> mesh = make_mesh({"data": 1, "fsdp": -1, "tensor": 1}, jax.devices()[:1])
    >>> mesh.shape["fsdp"], mesh.shape["stage"]
    (1, 1)
    """
    unknown = set(sizes) - set(AXES)
    if unknown:
        raise ValueError(f"a mesh has the axes {AXES}, got sizes for {sorted(unknown)}")
    devices = jax.devices() if devices is None else devices
    given = [sizes.get(axis, 1) for axis in AXES]
    fixed = math.prod(s for s in given if s != -1)
    filled = [len(devices) // max(fixed, 1) if s == -1 else s for s in given]
    if min(filled) < 1 or math.prod(filled) != len(devices):
        options = [d for d in range(1, len(devices) + 1) if len(devices) % d == 0]
        asked = ", ".join(f"{a}={s}" for a, s in zip(AXES, given, strict=True) if s != 1)
        raise ValueError(
            f"mesh {asked or 'of one device'} does not cover {len(devices)} devices; each size "
            f"must be one of {options} and their product {len(devices)}"
        )
    grid = np.array(devices, dtype=object).reshape(filled)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
    """Return the number of parts into which a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def over_batch(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits an array's first axis over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
