"""A run's progress on the screen: of this process, or of the launcher of a job on a cluster."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxrl_llm.cluster import context
from jaxrl_llm.monitoring.compiling import CompileProgress
from jaxrl_llm.monitoring.streams import BackgroundFile, Stream
from jaxrl_llm.monitoring.writer import BackgroundWriter
from jaxrl_llm.sharding.distributed import is_first

CLOSE_S = 5.0
"""Seconds that the end of a run waits at most for stdout."""


class Display:
    """A live progress bar on a terminal, plain lines elsewhere; of the first process only.

    What is shown goes to stdout in the background: where nobody reads it, the run goes on.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        """Show the bar."""
        self._writer, file = None, None
        if is_first() and sys.stdout is not None:  # None: there is no stdout
            self._writer = BackgroundWriter(Stream("stdout", sys.stdout))
            file: Any = BackgroundFile(self._writer, sys.stdout)
        self.console = Console(
            file=file, soft_wrap=True, highlight=False, quiet=self._writer is None
        )
        self._progress = None
        if self.console.is_terminal and is_first():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._title = title
            self._task = self._progress.add_task(title, total=total, completed=done)
            self._progress.start()
            self._compiling = CompileProgress(self._tell)

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        self.console.print(text, markup=False)

    def advance(self, text: str = "") -> None:
        """Print a step's line, if it has one, and move the bar."""
        if text:
            self.line(text)
        if self._progress:
            self._progress.advance(self._task)

    def plot(self, step: int, metrics: Mapping[str, float]) -> None:
        """Draw a step's metrics, where that is possible."""

    def flush(self) -> None:
        """Draw what was not drawn yet, where steps are drawn."""

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table."""
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def close(self) -> None:
        """Remove the bar, and wait until all is printed, if it is read."""
        try:
            if self._progress:
                self._compiling.close()
                self._progress.stop()
        finally:
            if self._writer:
                self._writer.close(CLOSE_S)

    def _tell(self, text: str) -> None:
        """Show what goes on before the bar."""
        assert self._progress is not None
        self._progress.update(self._task, description=text or self._title)


class LauncherDisplay(Display):
    """The same at the launcher of a job on a cluster."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        """Show the bar there."""
        context.call_display("open", title, total, done)

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        context.call_display("line", text)

    def advance(self, text: str = "") -> None:
        """Print a step's line, if it has one, and move the bar."""
        context.call_display("advance", text)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table."""
        context.call_display("table", title, columns, rows)

    def close(self) -> None:
        """Remove the bar."""
        context.call_display("close")
