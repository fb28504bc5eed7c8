"""The text of a compiled program, as jax prints it for any backend, taken apart.

`monitoring.trace_reader` reads the protocol buffers of traces, which hold no text.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

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
