"""What the benchmarks print: Markdown tables, and the line that names command, date and machine."""

import datetime
import os
import platform
from collections.abc import Sequence


def markdown_row(cells: Sequence[object]) -> str:
    """Return one line of a Markdown table.

    >>> markdown_row(["a", 1])
    '| a | 1 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def markdown_head(names: Sequence[str]) -> str:
    """Return the first two lines of a Markdown table.

    >>> print(markdown_head(["a", "b"]))
    | a | b |
    |---|---|
    """
    return f"{markdown_row(names)}\n|{'---|' * len(names)}"


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    return "\n".join([markdown_head(names), *map(markdown_row, rows)])


def describe_machine() -> str:
    """Return the processor's architecture and the number of cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def describe_run(module: str, arguments: Sequence[str] = ()) -> str:
    """Return the line over the figures: the command, the date and the machine."""
    command = " ".join(["python -m", f"benchmarks.{module}", *arguments])
    return f"`{command}`, {datetime.datetime.now(datetime.UTC).date()}, {describe_machine()}"
