"""What a compiled program does in one run: matrix products, collectives, kernels and loops.

XLA's own cost analysis counts the body of a loop once, and has none for a GPU that is not there.
Here every computation is counted as often as it is called: a loop as often as its known trip count
says, a loop without one once, and the rounds of `models.moe.expert_parallel` after the first never:
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
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.models.moe.expert_parallel import FURTHER_ROUNDS
from jaxrl_llm.planning.collectives import Collective, exchange_of
from jaxrl_llm.planning.hlo import Computation, Instruction, Program, parse_program
from jaxrl_llm.planning.traffic import is_attention_over_pages, kernel_bytes

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
            over = exchange.collective
            sent, arrays = Counter({over: exchange.sent}), Counter({over: exchange.arrays})
            own = own._replace(sent=sent, arrays=arrays)
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
