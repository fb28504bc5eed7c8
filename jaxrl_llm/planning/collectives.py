"""Collectives of a compiled program: their mesh axes, and the bytes that a device sends."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxrl_llm.planning.hlo import SHAPE, Computation, Instruction, parse_ints

PASSES: Mapping[str, int | float] = {  # how often a ring of many devices sends the result's bytes
    "all-gather": 1,
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "collective-permute": 1,
    "collective-broadcast": 1,
    "ragged-all-to-all": 1,
}
PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


class Collective(NamedTuple):
    """A kind of collective, the mesh axes that it runs over, and whether it leaves a node."""

    kind: str
    axes: tuple[str, ...]
    leaves_node: bool


class Exchange(NamedTuple):
    """One collective instruction: what it is, the bytes that a device sends, and its arrays.

    A compiler combines several arrays in one instruction.
    """

    collective: Collective
    sent: int | float
    arrays: int


def exchange_of(
    line: Instruction, computation: Computation, axes: Mapping[str, int], per_node: int
) -> Exchange | None:
    """Return the collective that an instruction is or ends, if it sends anything.

    A GPU's compiler splits one into `-start`, whose type holds the operands, too, and `-done`,
    which has the result's type: it is counted at its end, with the start's attributes.

    Args:
        line: the instruction.
        computation: that it is in.
        axes: sizes of the mesh axes, outermost first; device i of the program is the i-th of them.
        per_node: devices in a node, neighbours in the mesh.

    Raises:
        ValueError: a collective ends in another computation than it begins.
    """
    kind = line.operation.removesuffix("-done")
    if kind not in PASSES:
        return None
    begun = line
    if line.operation != kind:
        start = line.operands[0]
        if start not in computation:
            raise ValueError(f"got {line.operation} alone, expected {start} in its computation")
        begun = computation[start]
    devices = math.prod(axes.values())
    if kind == "collective-permute":
        listed = begun.rest.split("source_target_pairs=")[-1]
        pairs = re.findall(r"\{(\d+),(\d+)\}", listed)
        groups = [[int(a), int(b)] for a, b in pairs if a != b]
        share = len(groups) / devices
    else:
        groups = replica_groups(begun.rest, devices)
        n = len(groups[0])
        share = PASSES[kind] * (n - 1) / n * (n if kind == "reduce-scatter" else 1)
    if not share:
        return None
    places = np.array([np.unravel_index(g, tuple(axes.values())) for g in groups[:64]])
    varies = (places != places[:, :, :1]).any(axis=(0, 2))
    over = tuple(axis for axis, moves in zip(axes, varies, strict=True) if moves)
    leaves_node = any(len({device // per_node for device in group}) > 1 for group in groups)
    arrays = len(SHAPE.findall(line.type))
    return Exchange(Collective(kind, over, leaves_node), line.size * share, arrays)


def replica_groups(text: str, devices: int) -> list[list[int]]:
    """Read the groups of devices of a collective, in any of the three forms that XLA prints.

    Args:
        text: the instruction's attributes.
        devices: in all, which form one group where none is named.

    >>> replica_groups("replica_groups={{0,2},{1,3}}, x", 4)
    [[0, 2], [1, 3]]
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0), x", 4)
    [[0, 2], [1, 3]]
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x", 4)
    [[0, 2], [1, 3]]
    """
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?) ?\{([^}]*)\}", text):
        return _named_groups(*named.groups())
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(iota[2], iota[3]).reshape(parse_ints(iota[1])).tolist()
    if listed := re.search(r"replica_groups=\{(\{[^=]*?\})\}", text):
        return [parse_ints(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    return [list(range(devices))]


def _named_groups(mesh: str, order: str, over: str) -> list[list[int]]:
    names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", mesh), strict=True)
    shape = [int(s) for s in sizes]
    ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", order)
    flat = _iota(ids[1], ids[2]) if ids else np.arange(math.prod(shape))
    split, grouped = [], []
    parts = {n: (int(a or 1), int(b or 0)) for n, a, b in re.findall(PART, over)}
    for name, size in zip(names, shape, strict=True):
        before, own = parts.get(name, (size, 1))
        own = own or size // before
        if name in parts:
            grouped.append(len(split) + 1)
        split += [before, own, size // before // own] if name in parts else [size]
    grid = flat.reshape(split)
    rest = [i for i in range(grid.ndim) if i not in grouped]
    width = int(np.prod([grid.shape[i] for i in grouped]))
    return grid.transpose(rest + grouped).reshape(-1, width).tolist()


def _iota(shape: str, order: str | None) -> np.ndarray:
    grid = np.arange(math.prod(parse_ints(shape))).reshape(parse_ints(shape))
    return (grid.transpose(parse_ints(order)) if order else grid).reshape(-1)
