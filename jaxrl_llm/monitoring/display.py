"""A run's progress on the screen: of this process, or of the launcher of a job on a cluster."""

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.activity import ACTIVITIES
from jaxrl_llm.monitoring.tables import COLUMNS, answer_cells
from jaxrl_llm.monitoring.writer import BackgroundFile, BackgroundWriter, Stream
from jaxrl_llm.sharding.distributed import is_first

CLOSE_S = 5.0
"""Seconds that the end of a run waits at most for stdout."""
PIPE_WIDTH = 120
"""Columns of a table where there is no terminal, or one that does not say how wide it is."""
NARROW = 50
"""Columns of a terminal below which the cells of tables stand below each other."""
WIDE = 110
"""Columns of a terminal from which on there is room for metrics beside the bar."""
BESIDE_BAR = {
    "loss {:.4f}": ("train/loss",),
    "{:,.0f} tokens/s": ("perf/throughput",),
    "{:.1f} GiB": ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb"),
}
"""Metrics of the newest step beside a bar: of each kind the first one that the step has."""


class ActivityColumn(ProgressColumn):
    """What goes on now, beside a bar."""

    max_refresh = None

    def render(self, task: Task) -> Text:
        """Return it as one line."""
        del task
        return Text(ACTIVITIES.text, "cyan", no_wrap=True, overflow="ellipsis")


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
            file=file, soft_wrap=True, highlight=False, emoji=False, quiet=self._writer is None
        )
        if not (self.console.is_terminal and self.console.width):  # COLUMNS=0 shows nothing
            self.console.width = PIPE_WIDTH
        self._progress, self._stack = None, contextlib.ExitStack()
        if self.console.is_terminal and is_first():
            is_wide = self.console.width >= WIDE
            newest = (TextColumn("{task.fields[newest]}", markup=False),)
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(20 if is_wide else 8),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                *(newest if is_wide else ()),
                ActivityColumn(Column(ratio=1, no_wrap=True)),
                console=self.console,
                expand=True,  # what goes on gets what is left
            )
            self._task = self._progress.add_task(title, total=total, completed=done, newest="")
            self._progress.start()
            self._stack.enter_context(ACTIVITIES.shown())

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        self.console.print(text, markup=False)
        ACTIVITIES.say()

    def advance(self, text: str = "") -> None:
        """Print a step's line, if it has one, and move the bar."""
        if text:
            self.line(text)
        if self._progress:
            self._progress.advance(self._task)

    def plot(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's newest metrics beside the bar."""
        del step
        if self._progress:
            found = {
                text: next((metrics[name] for name in names if name in metrics), None)
                for text, names in BESIDE_BAR.items()
            }
            shown = [text.format(value) for text, value in found.items() if value is not None]
            self._progress.update(self._task, newest="  ".join(shown))

    def flush(self) -> None:
        """Draw what was not drawn yet, where steps are drawn."""

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table."""
        table = Table(title=title, title_justify="left")
        for name in columns:
            table.add_column(name, overflow="fold")
        self._print(table, columns, rows)

    def answers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print some of a step's answers as a table.

        Args:
            step: whose answers they are.
            rows: of each answer `prompt`, `answer`, `score`, `advantage` and `error`, as in
                `rollouts/step_*.parquet`.
        """
        table = Table(title=f"answers of step {step}", title_justify="left", show_lines=True)
        for name in COLUMNS:
            justify = "right" if name in ("score", "advantage") else "left"
            table.add_column(name, justify=justify, overflow="fold")
        self._print(table, COLUMNS, answer_cells(rows, self.console.width))

    def _print(self, table: Table, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table with its rows, or where there is no room for one, a line for each cell."""
        if self.console.width >= NARROW:
            for cells in rows:
                table.add_row(*map(Text, cells))  # which is not read as markup
            self.console.print(table, soft_wrap=False)
        else:
            self.console.print(table.title, markup=False)
            for cells in rows:
                for name, cell in zip(columns, cells, strict=True):
                    self.console.print(f"  {name}: {cell}", markup=False)
                self.console.print()
        ACTIVITIES.say()

    def close(self) -> None:
        """Remove the bar, and wait until all is printed, if it is read."""
        try:
            if self._progress:
                self._progress.stop()
        finally:
            self._stack.close()
            if self._writer:
                self._writer.close(CLOSE_S)


class LauncherDisplay(Display):
    """The same at the launcher of a job on a cluster."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        """Show the bar there."""
        job_context.call_display("open", title, total, done)

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        job_context.call_display("line", text)

    def advance(self, text: str = "") -> None:
        """Print a step's line, if it has one, and move the bar."""
        job_context.call_display("advance", text)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table."""
        job_context.call_display("table", title, columns, rows)

    def plot(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's newest metrics beside the bar there."""
        known = {name for names in BESIDE_BAR.values() for name in names if name in metrics}
        shown = {name: metrics[name] for name in known}
        job_context.call_display("plot", step, shown)

    def answers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print some of a step's answers as a table there."""
        job_context.call_display("answers", step, [dict(row) for row in rows])

    def close(self) -> None:
        """Remove the bar."""
        job_context.call_display("close")
