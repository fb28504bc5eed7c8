"""A run's progress on the screen: of this process, or of the launcher of a job on a cluster."""

import base64
import contextlib
import html
import io
import logging
import sys
import time
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
from jaxrl_llm.monitoring.tables import COLUMNS, MetricsTable, answer_cells, html_table
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


# A run's progress in a notebook: plots in the cell that trains, drawn anew while it does.

PANELS: dict[str, tuple[str, ...]] = {
    "score": ("critic/score/mean", "val-core/"),
    "loss": ("train/loss",),
    "KL (nats)": ("actor/kl", "actor/ppo_kl", "rollout_corr/k3_kl"),
    "entropy (nats per token)": ("actor/entropy",),
    "tokens per answer": ("response_length/mean", "response_length/max"),
    "seconds": ("timing_s/step", "timing_s/gen", "timing_s/update_actor"),
}
"""Metrics of each plot; one that ends in a slash stands for all that begin so."""

FROM_ZERO = ("tokens per answer", "seconds")
LATEST = 8
"""Lines that are shown below the plots."""
MAX_DRAWING_SHARE = 0.05
"""Of the time that a run takes."""

log = logging.getLogger(__name__)


class NotebookDisplay(Display):
    """Plots, the newest lines and the progress, in the cell that takes the steps.

    Where matplotlib is not installed, there are no plots.

    Args:
        title: of the run.
        total: steps in all.
        done: steps before this one was opened.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        """Show nothing yet."""
        self._title, self._total, self._done = title, total, done
        self._metrics, self._lines, self._answers = MetricsTable(), list[str](), ""
        self._handle, self._cell, self._has_plots = None, None, True
        import_matplotlib()  # before drawing is timed
        self._begun, self._drawn, self._cost = time.monotonic(), -float("inf"), 0.0
        self._first = done

    def line(self, text: str) -> None:
        """Show one line more."""
        self._lines = [*self._lines, text][-LATEST:]
        self._show()

    def advance(self, text: str = "") -> None:
        """Count a step, and show its line, if it has one, when it is drawn."""
        self._done += 1
        self._lines = [*self._lines, *([text] if text else [])][-LATEST:]

    def plot(self, step: int, metrics: Mapping[str, float]) -> None:
        """Draw a step's metrics, if drawing does not take too large a part of the time."""
        self._metrics.append({"step": step, **metrics})
        self._show(at_once=step >= self._total)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Show a table below the cell's plots."""
        from IPython.display import HTML, display

        display(HTML(f"<b>{html.escape(title)}</b>{html_table(columns, rows)}"))

    def answers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show some of a step's answers below the lines, in place of those before."""
        table = html_table(COLUMNS, list(answer_cells(rows)))
        self._answers = f"<div>answers of step {step}</div>{table}"
        self._show(at_once=step >= self._total)

    def flush(self) -> None:
        """Show what came last."""
        self._show(at_once=True)

    def close(self) -> None:
        """Show what came last."""
        self.flush()

    def _show(self, *, at_once: bool = False) -> None:
        from IPython import get_ipython
        from IPython.display import HTML, display

        now, cell = time.monotonic(), getattr(get_ipython(), "execution_count", None)
        if (
            not at_once
            and cell == self._cell
            and now - self._drawn < self._cost / MAX_DRAWING_SHARE
        ):
            return
        content = HTML(self._as_html())
        if self._handle is None or cell != self._cell:  # each cell has its own
            self._handle, self._cell = display(content, display_id=True), cell
        else:
            self._handle.update(content)
        self._drawn = time.monotonic()
        self._cost = self._drawn - now

    def _as_html(self) -> str:
        taken = self._done - self._first
        left = ""
        if taken and self._done < self._total:
            seconds = (time.monotonic() - self._begun) / taken * (self._total - self._done)
            time_left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
            left = f", about {time_left} left"
        bar = f"<progress value='{self._done}' max='{self._total}'></progress>"
        head = f"{html.escape(self._title)} {bar} {self._done}/{self._total} steps{left}"
        lines = html.escape("\n".join(self._lines))
        return f"<div>{head}</div>{self._plots()}<pre>{lines}</pre>{self._answers}"

    def _plots(self) -> str:
        """Draw the plots; a run goes on without them where that fails."""
        if not self._has_plots:
            return ""
        try:
            return draw_metrics(self._metrics)
        except Exception:
            self._has_plots = False
            log.warning("the plots can't be drawn; the run goes on without", exc_info=True)
            return ""


def import_matplotlib() -> Any:
    """Return matplotlib, or None where it can't be imported."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure
    except ImportError:
        return None
    return matplotlib


def draw_metrics(metrics: MetricsTable) -> str:
    """Return plots of a run's metrics as an HTML image; empty without steps or matplotlib."""
    panels = {title: _curves(metrics, names) for title, names in PANELS.items()}
    panels = {title: curves for title, curves in panels.items() if curves}
    drawing = import_matplotlib()
    if not panels or drawing is None:
        return ""
    figure = drawing.figure.Figure(figsize=(2.9 * len(panels), 2.4), layout="constrained")
    for number, (title, curves) in enumerate(panels.items(), 1):
        axis: Any = figure.add_subplot(1, len(panels), number)
        for name, (steps, values) in curves.items():
            axis.plot(steps, values, marker="." if len(steps) < 60 else "", label=name)
        if title in FROM_ZERO:
            axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=6)
    image = io.BytesIO()
    drawing.backends.backend_agg.FigureCanvasAgg(figure).print_png(image)
    data = base64.b64encode(image.getvalue()).decode()
    return f"<img src='data:image/png;base64,{data}' alt='{html.escape(', '.join(panels))}'>"


def _curves(
    metrics: MetricsTable, names: Sequence[str]
) -> dict[str, tuple[list[int], list[float]]]:
    known = [
        n
        for name in names
        for n in metrics.names
        if n == name or (name.endswith("/") and n.startswith(name))
    ]
    curves = {name: metrics.curve(name) for name in known}
    return {name: curve for name, curve in curves.items() if curve[0]}


def is_in_notebook() -> bool:
    """Tell whether a Jupyter kernel runs this process.

    >>> is_in_notebook()
    False
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def open_display(title: str, total: int, done: int) -> Display:
    """Show a run's progress: here, in a notebook's cell, or where a cluster's job was launched."""
    kind = Display if job_context.current() is None else LauncherDisplay
    if kind is Display and is_in_notebook() and is_first():
        kind = NotebookDisplay
    return kind(title, total, done)
