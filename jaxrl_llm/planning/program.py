"""Floating-point operations and collectives of a compiled program, loops counted as they run.

XLA's own cost analysis counts the body of a loop once. Here every computation is counted as often
as it is called: a loop as often as its known trip count says, a loop without one once. Of a
conditional the costlier branch counts, and inside a loop it counts in one iteration: the rounds of
`models.moe.expert_parallel` after the first are skipped when experts are balanced.

The text of a program is read, which jax prints for any backend; `monitoring.trace_reader` reads the
protocol buffers of traces, which hold no text.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2}
BYTES |= {"s16": 2, "u16": 2, "pred": 1, "s8": 1, "u8": 1}
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*-> .*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
PASSES: Mapping[str, int | float] = {  # how often a ring of many devices sends the result's bytes
    "all-gather": 1,
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "collective-permute": 1,
}


class Collective(NamedTuple):
    """A kind of collective, the mesh axes that it runs over, and whether it leaves a node."""

    kind: str
    axes: tuple[str, ...]
    leaves_node: bool


class OperationCounts(NamedTuple):
    """What each device does in one run of a program.

    Attributes:
        flops: of its matrix products.
        sent: bytes that it sends, by collective.
    """

    flops: int | float
    sent: Counter[Collective]

    def plus(self, other: "OperationCounts", times: int | float = 1) -> "OperationCounts":
        """Add another count so many times."""
        sent = Counter(self.sent)
        for key, size in other.sent.items():
            sent[key] += size * times  # pyright: ignore[reportArgumentType]  # no count of things
        return OperationCounts(self.flops + times * other.flops, sent)

    @property
    def size(self) -> int | float:
        """Return a number by which branches are compared."""
        return self.flops + sum(self.sent.values())


class Instruction(NamedTuple):
    """One line of a program: its result's type, its operation, and the rest."""

    type: str
    operation: str
    rest: str


Computation = dict[str, Instruction]


def count_operations(text: str, axes: Mapping[str, int], *, per_node: int = 8) -> OperationCounts:
    """Count the matrix products and collectives of one device in a compiled program.

    Args:
        text: of the program, as `compiled.as_text()` gives it.
        axes: sizes of the mesh axes, outermost first; device i of the program is the i-th of them.
        per_node: devices in a node, neighbours in the mesh.

    Returns:
        Operations of matrix products, and bytes sent by collective: a ring's, so of n devices each
        sends (n - 1)/n of the bytes of a result that it gathers, and twice that if it adds up.

    >>> text = '''ENTRY %main (a: f32[2,3], b: f32[3,4]) -> f32[2,4] {
    ...   %a = f32[2,3]{1,0} parameter(0)
    ...   %b = f32[3,4]{1,0} parameter(1)
    ...   ROOT %c = f32[2,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }'''
    >>> count_operations(text, {"data": 1}).flops
    48.0
    """
    computations, entry = _parse(text)
    known: dict[str, tuple[OperationCounts, OperationCounts]] = {}

    def visit(name: str) -> tuple[OperationCounts, OperationCounts]:
        if name not in known:
            known[name] = _sum_up(computations[name], visit, axes, per_node)
        return known[name]

    always, once = visit(entry)
    return always.plus(once)


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := INSTRUCTION.match(line):
            rest = "" if match[3] == "constant" else match[4]
            current[match[1]] = Instruction(match[2], match[3], rest)
    return computations, entry


def _sum_up(
    computation: Computation, visit, axes, per_node
) -> tuple[OperationCounts, OperationCounts]:
    """Return the counts of a computation, and apart from them those of its conditionals."""
    always, once = OperationCounts(0.0, Counter()), OperationCounts(0.0, Counter())
    for line in computation.values():
        kind = line.operation.removesuffix("-start")
        if kind == "dot":
            always = always.plus(OperationCounts(_dot_flops(line, computation), Counter()))
        elif kind in PASSES:
            always = always.plus(
                OperationCounts(0.0, Counter(dict(_sent(kind, line, axes, per_node))))
            )
        elif kind == "conditional":
            names = [
                n
                for group in BRANCHES.findall(line.rest)
                for n in re.split(r",\s*", "".join(group))
            ]
            branches = [sum_ for n in names for sum_ in [_both(visit(n.lstrip("%")))]]
            once = once.plus(max(branches, key=lambda c: c.size))
        elif kind == "while":
            trips = TRIPS.search(line.rest)
            body, inside = visit(CALLED.findall(line.rest)[0])
            always = always.plus(body, int(trips[1]) if trips else 1).plus(inside)
        elif kind in ("call", "fusion", "async"):
            for name in CALLED.findall(line.rest):
                inner, inside = visit(name)
                always, once = always.plus(inner), once.plus(inside)
    return always, once


def _both(parts: tuple[OperationCounts, OperationCounts]) -> OperationCounts:
    return parts[0].plus(parts[1])


def _dot_flops(line: Instruction, computation: Computation) -> int | float:
    operand = re.match(r"\s*(?:[a-z]+\d*\[[^ ]* )?%([\w.\-]+)", line.rest)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
    assert operand is not None
    sizes = _dims(computation[operand[1]].type)
    inner = [sizes[int(i)] for i in contracted[1].split(",") if i] if contracted else []
    return 2.0 * math.prod(_dims(line.type)) * math.prod(inner)


def _dims(text: str) -> list[int]:
    shape = SHAPE.search(text)
    return [int(n) for n in shape[2].split(",") if n] if shape else []


def _bytes(text: str) -> int:
    return sum(
        BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in SHAPE.findall(text)
    )


def _sent(
    kind: str, line: Instruction, axes: Mapping[str, int], per_node: int
) -> Iterator[tuple[Collective, int | float]]:
    size = _bytes(line.type)
    if line.operation.endswith("-start") and kind in ("all-gather", "collective-permute"):
        size -= _bytes(line.type) // 2  # the result's type names the operand, too
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", line.rest.split("source_target_pairs=")[-1])
        moving = [(int(a), int(b)) for a, b in pairs if a != b]
        groups, share = moving, len(moving) / math.prod(axes.values())
    else:
        groups = replica_groups(line.rest, math.prod(axes.values()))
        n = len(groups[0])
        share = PASSES[kind] * (n - 1) / n * (n if kind == "reduce-scatter" else 1)
    if not share:
        return
    places = np.array([np.unravel_index(g, tuple(axes.values())) for g in groups[:64]])
    varies = (places != places[:, :, :1]).any(axis=(0, 2))
    over = tuple(axis for axis, moves in zip(axes, varies, strict=True) if moves)
    leaves_node = any(len({device // per_node for device in group}) > 1 for group in groups)
    yield Collective(kind, over, leaves_node), size * share


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
        return _iota(iota[2], iota[3]).reshape(_ints(iota[1])).tolist()
    if listed := re.search(r"replica_groups=\{(\{[^=]*?\})\}", text):
        return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
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


PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def _iota(shape: str, order: str | None) -> np.ndarray:
    grid = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return (grid.transpose(_ints(order)) if order else grid).reshape(-1)


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
