"""Array parts on their way from the devices of one layout to those of another."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array


@functools.lru_cache(maxsize=4096)
def transfer_layouts(
    source: Sharding, target: Sharding, shape: tuple[int, ...]
) -> tuple[NamedSharding, NamedSharding]:
    """Return the layouts between which an array is carried from device to device.

    One program runs on one list of devices. So a program on the source's devices brings the array
    into the first layout, and what arrives in the second one a program on the target's devices
    brings into the target, if that is another. On two sets of devices every part in the second
    layout is a part in the first, so that only whole parts are copied.
    """
    source, target = in_device_memory(source), in_device_memory(target)
    here, there = device_order(source, shape), device_order(target, shape)
    if here == there:
        return as_named(target, there), as_named(target, there)
    if set(here) == set(there):
        return as_named(source, here), as_named(target, there)
    source, target, ways = as_named(source, here), as_named(target, there), []
    if len(here) % len(there) == 0:
        ways.append((_copies(target, here), target))
    if len(there) % len(here) == 0:
        ways.append((source, _copies(source, there)))
    ways.append((_replicated(here), _replicated(there)))
    return next(way for way in ways if len(_senders(*way, shape)) == len(there))


def _copies(layout: NamedSharding, devices: Sequence[Any]) -> NamedSharding:
    """Lay an array out over k times the devices: every part k times, on neighbours."""
    grid = np.array(devices).reshape(*layout.mesh.axis_sizes, -1)
    mesh = Mesh(grid, (*layout.mesh.axis_names, "copy"))
    return NamedSharding(mesh, layout.spec)


def as_named(layout: Sharding, devices: Sequence[Any]) -> NamedSharding:
    """Return a layout on a mesh: this one, or else a whole copy on every device."""
    if isinstance(layout, NamedSharding):
        return layout
    return _replicated(devices)


def _replicated(devices: Sequence[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), "device"), PartitionSpec())


def carry(array: Array, layout: NamedSharding) -> Array:
    """Copy the parts of an array, unchanged, to the devices of another layout."""
    if array.sharding.device_set == layout.device_set:
        return jax.device_put(array, layout)
    senders = _senders(array.sharding, layout, array.shape)
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    local = [device for device in senders if device in layout.addressable_devices]
    sent = jax.device_put([parts[senders[device]] for device in local], local)
    return jax.make_array_from_single_device_arrays(array.shape, layout, sent, dtype=array.dtype)


@functools.lru_cache(maxsize=4096)
def _senders(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> dict[Any, Any]:
    """Return which device of its own process sends each device its part, where one has it."""
    held = index_ranges(source, shape)
    chosen = {}
    for i, (device, box) in enumerate(index_ranges(target, shape).items()):
        near = [d for d in held if held[d] == box and d.process_index == device.process_index]
        if near:
            chosen[device] = device if device in near else near[i % len(near)]
    return chosen


def device_order(layout: Sharding, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return a layout's devices in the order of its programs."""
    return tuple(layout.devices_indices_map(shape))


def index_ranges(
    layout: Sharding, shape: tuple[int, ...]
) -> dict[Any, tuple[tuple[int, int], ...]]:
    """Return the first and the last index, plus one, that each device holds of every axis."""

    def box(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))

    return {device: box(index) for device, index in layout.devices_indices_map(shape).items()}


def in_host_memory(layout: Sharding) -> bool:
    """Return whether a layout is in the host's memory."""
    return layout.memory_kind not in (None, _device_memory(layout))


def in_device_memory(layout: Sharding) -> Sharding:
    """Return the same layout in the devices' memory."""
    return layout.with_memory_kind(_device_memory(layout))


def _device_memory(layout: Sharding) -> str:
    return next(iter(layout.addressable_devices)).default_memory().kind
