"""A run's progress in a notebook: plots in the cell that trains, drawn anew while it does."""

import base64
import html
import io
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.display import Display, LauncherDisplay
from jaxrl_llm.monitoring.tables import COLUMNS, MetricsTable, answer_cells, html_table
from jaxrl_llm.sharding.distributed import is_first

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
