"""What a run shows in a notebook's cell."""

import base64
import re
import types
from unittest.mock import Mock

import IPython
import IPython.display
import pytest

from jaxrl_llm.monitoring import display as screen
from jaxrl_llm.monitoring.display import NotebookDisplay, open_display
from jaxrl_llm.monitoring.tables import AnswerTable, MetricsTable


@pytest.fixture
def cells(monkeypatch):
    """The kernel's cells: what each of them shows, newest last; `kernel.execution_count` is set."""
    shown, kernel = {}, types.SimpleNamespace(kernel=None, execution_count=1)

    class Handle:
        def __init__(self, content):
            self.cell = kernel.execution_count
            self.update(content)

        def update(self, content):
            shown.setdefault(self.cell, []).append(content.data)

    monkeypatch.setattr(IPython, "get_ipython", lambda: kernel)
    monkeypatch.setattr(
        IPython.display, "display", lambda content, display_id=False: Handle(content)
    )
    monkeypatch.setattr(screen, "MAX_DRAWING_SHARE", float("inf"))  # drawn at every step
    return types.SimpleNamespace(shown=shown, kernel=kernel)


def step(number):
    return {"critic/score/mean": number / 10, "actor/entropy": 1.0, "val-core/sums/acc": 0.5}


def test_a_cell_shows_plots_that_follow_the_run(cells):
    display = open_display("training", 4, 0)
    assert isinstance(display, NotebookDisplay)
    for number in (1, 2):
        display.advance(f"step {number}/4 <b>")
        display.plot(number, step(number))
    cells.kernel.execution_count = 2
    for number in (3, 4):
        display.advance(f"step {number}/4")
        display.plot(number, step(number))
    display.close()
    assert set(cells.shown) == {1, 2}
    first, second = cells.shown[1][-1], cells.shown[2][-1]
    assert "2/4 steps, about " in first and "step 2/4 &lt;b&gt;" in first
    assert "4/4 steps</div>" in second and "step 3/4" in second
    images = [re.findall(r"base64,([^']+)'", text)[0] for text in (first, second)]
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    assert images[0] != images[1]
    assert "alt='score, entropy (nats per token)'" in second


@pytest.mark.parametrize("is_installed", [True, False])
def test_where_plots_can_not_be_drawn_there_are_lines(cells, monkeypatch, caplog, is_installed):
    if is_installed:
        broken = Mock(side_effect=RuntimeError("latex could not be found"))
        monkeypatch.setattr(screen, "draw_metrics", broken)
    else:
        monkeypatch.setattr(screen, "import_matplotlib", lambda: None)
    display = NotebookDisplay("training", 2)
    for number in (1, 2):
        display.advance(f"step {number}/2")
        display.plot(number, step(number))
    assert "step 2/2" in cells.shown[1][-1] and "<img" not in cells.shown[1][-1]
    assert len(caplog.records) == is_installed, "told once"


def test_the_same_tables_as_text_and_for_pandas():
    row = {"prompt": '[{"role": "user", "content": "7<3="}]', "answer": "[c]", "tokens": [7, 8]}
    row |= {"score": 1.0, "advantage": 0.5, "logprobs": [-0.5] * 2}
    answers = AnswerTable([row | {"rollout_logprobs": [-0.5, -0.75]}] * 2, str)
    assert "7<3=" in str(answers) and "[c]" in str(answers) and "0.25" in str(answers)
    assert len(answers) == 2 and str(answers[1:]).count("7<3=") == 1
    metrics = MetricsTable([{"step": 1, **step(1)}, {"step": 2, **step(2)}])
    assert "0.2" in str(metrics) and "<td>0.2</td>" in metrics._repr_html_()
    with pytest.raises(KeyError, match="entropy"):
        metrics.curve("actor/entrpy")
    pandas = pytest.importorskip("pandas")
    assert pandas.DataFrame(metrics)["critic/score/mean"].tolist() == [0.1, 0.2]
