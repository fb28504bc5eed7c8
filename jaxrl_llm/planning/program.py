"""What a compiled program does in one run: matrix products, collectives, kernels and loops.

XLA's own cost analysis counts the body of a loop once, and has none for a GPU that is not there.
Here every computation is counted as often as it is called: a loop as often as its known trip count
says, a loop without one once, and the rounds of `models.moe.mixture` after the first never:
balanced experts need none. Of a conditional the costlier branch counts, and inside a loop it does
in one iteration, the cheaper one in the others.

A GPU's program computes products by calls of cuBLAS, or by fusions that hold a `dot`; a CPU's has
them as `dot`. A kernel is an instruction that a GPU is asked to run: a fusion, a call of a library,
a copy, a sort, or a collective; several sorts and reductions take more than one. What XLA records
as command buffers is launched together; it does so after this text was printed.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.models.moe.mixture import FURTHER_ROUNDS

BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2}
BYTES |= {"s16": 2, "u16": 2, "pred": 1, "s8": 1, "u8": 1}
BYTES |= dict.fromkeys(("f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3"), 1)
SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*-> .*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")


class Instruction(NamedTuple):
    """One line of a program: its result's type, its operation, and the rest."""

    type: str
    operation: str
    rest: str
    is_root: bool = False

    @property
    def operands(self) -> list[str]:
        """Return the names of the instructions whose results it takes."""
        depth = 1
        for end, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if not depth:
                return re.findall(r"%([\w.\-]+)", self.rest[:end])
        return []

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of each array of its result."""
        shapes = SHAPE.findall(self.type)
        return [BYTES.get(kind, 4) * math.prod(parse_ints(dims)) for kind, dims in shapes]

    @property
    def size(self) -> int:
        """Return the bytes of its result."""
        return sum(self.sizes)

    @property
    def dims(self) -> list[int]:
        """Return the shape of its result, of the first one if there are several."""
        shape = SHAPE.search(self.type)
        return parse_ints(shape[2]) if shape else []

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in its attributes; nothing where there is none."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""


Computation = dict[str, Instruction]


class Program(NamedTuple):
    """The computations of a program, by name, and the name of the one that runs."""

    computations: dict[str, Computation]
    entry: str

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """Yield every instruction with its name."""
        for computation in self.computations.values():
            yield from computation.items()


def parse_program(text: str) -> Program:
    """Take a program's text apart.

    >>> text = '''ENTRY %main (a: f32[2,3]) -> f32[3,2] {
    ...   %a = f32[2,3]{1,0} parameter(0)
    ...   ROOT %b = f32[3,2]{1,0} transpose(%a), dimensions={1,0}
    ... }'''
    >>> program = parse_program(text)
    >>> program.computations[program.entry]["b"].operands
    ['a']
    """
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := INSTRUCTION.match(line):
            rest = "" if match[4] == "constant" else match[5]
            current[match[2]] = Instruction(match[3], match[4], rest, bool(match[1]))
    return Program(computations, entry)


def parse_ints(text: str) -> list[int]:
    """Return the numbers of a list with commas, which may be empty.

    >>> parse_ints("2,3"), parse_ints("")
    ([2, 3], [])
    """
    return [int(n) for n in text.split(",") if n]


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


def exchange_of(
    line: Instruction, computation: Computation, axes: Mapping[str, int], per_node: int
) -> tuple[Collective, int | float] | None:
    """Return the collective that an instruction is or ends, and the bytes that a device sends.

    None where it is no collective, or one that sends nothing. A GPU's compiler splits one into
    `-start`, whose type holds the operands, too, and `-done`, which has the result's type: it is
    counted at its end, with the start's attributes.

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
    return Collective(kind, over, leaves_node), line.size * share


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


VIEWS = ("bitcast", "reshape")
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that write into their first operand, and which of their operands is written."""
FUSED = r"calls=%([\w.\-]+)"
ATTEND_PAGES = re.compile("/attend_pages/pallas_call$")
"""The kernel of `models.paged_triton`, by its place in the traced program."""


# Bytes that a kernel of a compiled program reads from and writes to a GPU's memory.
#
# A kernel is taken to read each operand once and to write each result once; what it computes
# between stays on the chip. Of an array that it only takes slices of, it reads these; of one that
# it updates in place, it writes the update. Attention over pages in place reads all pages in its
# table.


def kernel_bytes(line: Instruction, computation: Computation, program: Program) -> int:
    """Return the bytes that an instruction reads and writes, if it launches a kernel.

    Args:
        line: the instruction.
        computation: that it is in, with its operands.
        program: with the computations that it calls.
    """
    operands = [computation[name] for name in line.operands if name in computation]
    if line.operation == "fusion":
        inside = program.computations[line.attribute(FUSED)]
        return _read(inside) + _written(inside)
    if line.operation.endswith("-start"):
        return sum(operand.size for operand in operands)
    if line.operation.endswith("-done"):
        return line.size
    if line.attribute(r'custom_call_target="(__cublas)'):  # the rest of its results is workspace
        return sum(operand.size for operand in operands) + line.sizes[0]
    if is_attention_over_pages(line):
        queries, table, *others = operands
        return queries.size + table.size + _read_by(table, others) + line.size
    return sum(operand.size for operand in operands) + line.size


def is_attention_over_pages(line: Instruction) -> bool:
    """Tell whether an instruction is the call of `models.paged_triton`.

    Its first operands are queries [B, K, G, H] and a table [B, n] of pages.
    """
    source = line.attribute(r'op_name="([^"]*)"')
    return line.operation == "custom-call" and bool(ATTEND_PAGES.search(source))


def _read_by(table: Instruction, arrays: list[Instruction]) -> int:
    """Return the bytes read of arrays [pages, …] by a table; of vectors those of all."""
    pages = math.prod(table.dims)
    return sum(
        x.size if len(x.dims) == 1 else x.size // x.dims[0] * pages  # one page each time
        for x in arrays
    )


def _read(inside: Computation) -> int:
    """Return the bytes that a fused computation reads of its parameters."""
    users: dict[str, list[tuple[Instruction, int, str]]] = {}
    for name, line in inside.items():
        for place, operand in enumerate(line.operands):
            users.setdefault(operand, []).append((line, place, name))

    def read(name: str, whole: int) -> int:
        total = 0
        for line, place, user in users.get(name, ()):
            if line.operation in VIEWS:
                total += read(user, whole)
            elif line.operation in SLICES and place == 0:
                total += line.size
            elif line.operation in UPDATES and place == 0:
                continue
            else:
                return whole
        return min(total, whole)

    return sum(
        read(name, line.size) for name, line in inside.items() if line.operation == "parameter"
    )


def _written(inside: Computation) -> int:
    """Return the bytes that a fused computation writes."""

    def written(line: Instruction) -> int:
        if line.operation == "tuple":
            return sum(written(inside[name]) for name in line.operands)
        if line.operation in VIEWS and line.operands[0] in inside:
            return written(inside[line.operands[0]])
        if line.operation in UPDATES:
            update = inside[line.operands[UPDATES[line.operation]]].size
            return 2 * update if line.operation == "scatter" else update  # it adds to what is there
        return line.size

    return sum(written(line) for line in inside.values() if line.is_root)


CALLED, BODY = r"(?:calls|to_apply)=%([\w.\-]+)", r"body=%([\w.\-]+)"
CONDITION = r"condition=%([\w.\-]+)"
BRANCHES = (
    r"branch_computations=\{([^}]*)\}",
    r"true_computation=%([\w.\-]+)",
    r"false_computation=%([\w.\-]+)",
)
TRIPS = r'"known_trip_count":\{"n":"(\d+)"'
CONTRACTED = r'"lhs_contracting_dimensions":\[([^\]]*)\]'
LIBRARY_PRODUCTS = ("__cublas$", "__cublas$lt$")
"""How the targets of the calls begin that multiply matrices."""

GROUPED = re.compile(r"/[\w(]*\b(multiply_groups|sum_outer_products)\)*/pallas_call$")
"""The kernels of `models.moe.grouped_triton`, by their place in the traced program, where
`transpose(jvp(NAME))` is that of a derivative."""

NOT_LAUNCHED = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|domain|add-dependency|opt-barrier|"
    "while|conditional|call|async-start|async-update|.*-done"
)
"""Operations that run nothing on a GPU themselves."""


class OperationCounts(NamedTuple):
    """What each device does in one run of a program.

    Attributes:
        flops: of its matrix products.
        sent: bytes that it sends, by collective.
        arrays: that its collectives exchange, by collective.
        kernels: that it launches, with the costliest branches of conditionals.
        fewest: kernels that it launches with their shortest branches.
        moved: bytes that its kernels read from and write to memory.
    """

    flops: int | float
    sent: Counter[Collective]
    arrays: Counter[Collective]
    kernels: int | float = 0
    fewest: int | float = 0
    moved: int | float = 0

    def plus(self, other: "OperationCounts", times: int | float = 1) -> "OperationCounts":
        """Add another count so many times."""
        return OperationCounts(
            self.flops + times * other.flops,
            _added(self.sent, other.sent, times),
            _added(self.arrays, other.arrays, times),
            self.kernels + times * other.kernels,
            self.fewest + times * other.fewest,
            self.moved + times * other.moved,
        )

    @property
    def size(self) -> tuple[int | float, int | float]:
        """Return numbers by which branches are compared."""
        return self.flops + sum(self.sent.values()), self.kernels


NOTHING = OperationCounts(0.0, Counter(), Counter())


def _added(one: Mapping[Any, Any], other: Mapping[Any, Any], times: int | float) -> Any:
    total: Any = Counter(one)
    for key, size in other.items():
        total[key] += size * times
    return total


class Loop(NamedTuple):
    """A loop of a program.

    Attributes:
        source: its name in the traced program, as `jit(accumulate)/jvp()/while`.
        depth: how many loops it is in.
        trips: how often it runs; None where that is not known before.
        once: what one iteration does, without conditionals.
        branches: what its conditionals do.
    """

    source: str
    depth: int
    trips: int | None
    once: OperationCounts
    branches: OperationCounts


def count_operations(text: str, axes: Mapping[str, int], *, per_node: int = 8) -> OperationCounts:
    """Count the matrix products, collectives and kernels of one device in a compiled program.

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
    reader = _Reader(parse_program(text), axes, per_node)
    return reader.visit(reader.program.entry).total


def list_loops(text: str, axes: Mapping[str, int], *, per_node: int = 8) -> list[Loop]:
    """List the loops of a compiled program, outer ones before those in them.

    Arguments are as those of `count_operations`.
    """
    reader = _Reader(parse_program(text), axes, per_node)
    loops: list[Loop] = []

    def walk(name: str, depth: int) -> None:
        for line in reader.program.computations[name].values():
            if line.operation == "while":
                body = line.attribute(BODY)
                always, costliest, _ = reader.visit(body)
                source = line.attribute(r'op_name="([^"]*)"')
                loops.append(Loop(source, depth, _trips(line), always, costliest))
                walk(body, depth + 1)
            elif line.operation == "conditional":
                for branch in _branches(line):
                    walk(branch, depth)
            elif line.operation == "call":
                walk(line.attribute(CALLED), depth)

    walk(reader.program.entry, 0)
    return loops


class _Parts(NamedTuple):
    """Counts of a computation, and apart those of its conditionals, by one branch or the other."""

    always: OperationCounts
    costliest: OperationCounts = NOTHING
    cheapest: OperationCounts = NOTHING

    @property
    def total(self) -> OperationCounts:
        return self.always.plus(self.costliest)

    def plus(self, other: "_Parts") -> "_Parts":
        return _Parts(*(one.plus(more) for one, more in zip(self, other, strict=True)))


class _Reader:
    """Counts of a program's computations."""

    def __init__(self, program: Program, axes: Mapping[str, int], per_node: int) -> None:
        self.program, self.axes, self.per_node = program, axes, per_node
        self.known: dict[str, _Parts] = {}

    def visit(self, name: str) -> _Parts:
        if name not in self.known:
            computation, parts = self.program.computations[name], _Parts(NOTHING)
            for line in computation.values():
                parts = parts.plus(self._count(line, computation))
            self.known[name] = parts
        return self.known[name]

    def _count(self, line: Instruction, computation: Computation) -> _Parts:
        launched = int(not NOT_LAUNCHED.fullmatch(line.operation))
        own = OperationCounts(0.0, Counter(), Counter(), launched, launched)
        if launched or re.fullmatch("(?!async).*-done", line.operation):
            own = own._replace(moved=kernel_bytes(line, computation, self.program))
        match line.operation:
            case "dot" | "custom-call":
                own = own._replace(flops=product_flops(line, computation))
            case "fusion":
                inner = self.visit(line.attribute(CALLED)).always
                own = own._replace(flops=inner.flops)
            case "conditional":
                branches = [self.visit(name).total for name in _branches(line)]
                costliest = max(branches, key=lambda c: c.size)
                costliest = costliest._replace(fewest=min(b.fewest for b in branches))
                return _Parts(own, costliest, min(branches, key=lambda c: c.size))
            case "while":
                return _Parts(own.plus(self._loop(line)))
            case "call" | "async-start":
                return self.visit(line.attribute(CALLED))
        if exchange := exchange_of(line, computation, self.axes, self.per_node):
            over, sent = exchange
            arrays = len(SHAPE.findall(line.type))  # a compiler combines several in one instruction
            own = own._replace(sent=Counter({over: sent}), arrays=Counter({over: arrays}))
        return _Parts(own)

    def _loop(self, line: Instruction) -> OperationCounts:
        body, trips = self.visit(line.attribute(BODY)), _trips(line)
        if FURTHER_ROUNDS in line.attribute(r'op_name="([^"]*)"'):
            return self.visit(line.attribute(CONDITION)).always
        if not trips:  # the host asks after each iteration whether there is another
            return body.total.plus(self.visit(line.attribute(CONDITION)).always)
        return body.always.plus(body.costliest).plus(body.always.plus(body.cheapest), trips - 1)


def product_flops(line: Instruction, computation: Computation) -> int | float:
    """Return the operations of a `dot`, of a library's matrix product, or of attention over pages.

    They are 0 for any other call.

    Args:
        line: the instruction.
        computation: that it is in, with its operands.
    """
    if line.operation == "dot":
        contracted = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    elif line.attribute(r'custom_call_target="([^"]*)"').startswith(LIBRARY_PRODUCTS):
        contracted = line.attribute(CONTRACTED).replace('"', "")
    elif GROUPED.search(line.attribute(r'op_name="([^"]*)"')):
        # each row is multiplied by one of the matrices, or with one other row
        return 2.0 * math.prod(computation[line.operands[0]].dims) * line.dims[-1]
    elif is_attention_over_pages(line):
        queries, table, keys = (computation[line.operands[i]].dims for i in (0, 1, 4))
        return 2.0 * math.prod(queries[:3]) * table[1] * keys[3] * (queries[3] + line.dims[-1])
    else:
        return 0.0
    sizes = computation[line.operands[0]].dims
    flops = 2.0
    for size in (*line.dims, *(sizes[int(axis)] for axis in contracted.split(",") if axis)):
        flops *= size
    return flops


def _branches(line: Instruction) -> list[str]:
    names = ",".join(line.attribute(pattern) for pattern in BRANCHES)
    return [name.strip().lstrip("%") for name in names.split(",") if name.strip()]


def _trips(line: Instruction) -> int | None:
    return int(trips) if (trips := line.attribute(TRIPS)) else None
