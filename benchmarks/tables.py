"""What the benchmarks share: their command lines, and what they print.

They print Markdown tables, below a line that names the command, the date and the machine.
"""

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Sequence


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's docstring as it stands."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=formatter)


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


def command_of(module: str, words: Sequence[str] | None) -> str:
    """Return the command of a module below `benchmarks`; words None: those of this process."""
    return " ".join([f"python -m benchmarks.{module}", *(words or sys.argv[1:])])


def describe_machine() -> str:
    """Return the processor's architecture and the number of cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def describe_run(module: str, words: Sequence[str] | None = None) -> str:
    """Return the line over the figures: the command, the date and the machine.

    Args:
        module: below `benchmarks`.
        words: of the command line; None: those that the process was started with.
    """
    today = datetime.datetime.now(datetime.UTC).date()
    return f"`{command_of(module, words)}`, {today}, {describe_machine()}"
