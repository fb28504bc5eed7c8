"""Bytes that a kernel of a compiled program reads from and writes to a GPU's memory.

A kernel is taken to read each operand once and to write each result once; what it computes between
stays on the chip. Of an array that it only takes slices of, it reads these; of one that it updates
in place, it writes the update. Attention over pages in place reads all pages in its table.
"""

import math
import re

from jaxrl_llm.planning.hlo import Computation, Instruction, Program

VIEWS = ("bitcast", "reshape")
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that write into their first operand, and which of their operands is written."""
CALLED = r"calls=%([\w.\-]+)"
ATTEND_PAGES = re.compile("/attend_pages/pallas_call$")
"""The kernel of `models.paged_triton`, by its place in the traced program."""


def kernel_bytes(line: Instruction, computation: Computation, program: Program) -> int:
    """Return the bytes that an instruction reads and writes, if it launches a kernel.

    Args:
        line: the instruction.
        computation: that it is in, with its operands.
        program: with the computations that it calls.
    """
    operands = [computation[name] for name in line.operands if name in computation]
    if line.operation == "fusion":
        inside = program.computations[line.attribute(CALLED)]
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
