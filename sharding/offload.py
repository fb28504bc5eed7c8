"""Host memory as a place for arrays between phases."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Sharding

from jaxrl_llm.sharding.reshard import reshard

HOST = "pinned_host"
"""The memory from which a device copies without the operating system's help."""


def to_host(tree: Any) -> Any:
    """Move arrays from their devices' memory to the host's, one array at a time.

    Each part goes to the host of its device; the partition over devices stays as it is. The arrays
    given are deleted, but for those in host memory already, which are returned as they are.
    Neither a move to the host nor one back needs device memory beside the arrays themselves.

    Args:
        tree: arrays.

    Returns:
        The same arrays, bit for bit. A program that is given them copies them to the device, so
        move them back before they are used.

    Raises:
        NotImplementedError: the devices know no pinned host memory.

    >>> to_host({"w": jax.numpy.ones(2)})["w"].sharding.memory_kind
    'pinned_host'
    """
    return jax.tree.map(_move_to_host, tree)


def to_device(tree: Any) -> Any:
    """Move arrays back from the host's memory to their devices', one array at a time.

    The arrays given are deleted, but for those in device memory already, which are returned as
    they are.

    Args:
        tree: arrays.

    Returns:
        The same arrays, bit for bit.

    >>> to_device(to_host({"w": jax.numpy.arange(2)}))["w"]
    Array([0, 1], dtype=int32)
    """
    return jax.tree.map(_move_to_device, tree)


@contextlib.contextmanager
def on_device(tree: Any) -> Iterator[Any]:
    """Copy arrays in host memory to their devices for the time of a block.

    Args:
        tree: arrays; those in device memory are given as they are.

    >>> with on_device(to_host({"w": jax.numpy.arange(2)})) as held:
    ...     held["w"]
    Array([0, 1], dtype=int32)
    """
    copies = jax.tree.map(copy_on_device, tree)
    try:
        yield copies
    finally:
        for copy, array in zip(jax.tree.leaves(copies), jax.tree.leaves(tree), strict=True):
            if copy is not array:
                copy.delete()


def _move_to_host(array: jax.Array) -> jax.Array:
    device = _a_device(array.sharding)
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise NotImplementedError(
            f"can't offload: {device.device_kind} on platform {device.platform!r} knows the "
            f"memories {kinds}, expected {HOST!r}"
        )
    return _move_to(array, HOST)


def copy_on_device(array: jax.Array) -> jax.Array:
    """Return an array in its devices' memory: itself, if it is there.

    >>> copy_on_device(to_host(jax.numpy.arange(2)))
    Array([0, 1], dtype=int32)
    """
    kind = _a_device(array.sharding).default_memory().kind
    if array.sharding.memory_kind == kind:
        return array
    return reshard(array, array.sharding.with_memory_kind(kind))


def _move_to_device(array: jax.Array) -> jax.Array:
    return _move_to(array, _a_device(array.sharding).default_memory().kind)


def _move_to(array: jax.Array, kind: str) -> jax.Array:
    if array.sharding.memory_kind == kind:
        return array
    return reshard(array, array.sharding.with_memory_kind(kind), donate=True)


def _a_device(layout: Sharding) -> Any:
    return next(iter(layout.addressable_devices))
