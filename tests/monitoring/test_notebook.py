"""What a run shows in a notebook's cell."""

import base64
import re
import sys
import types

import IPython
import IPython.display
import pytest

from jaxrl_llm.monitoring import display as screen
from jaxrl_llm.monitoring.display import Display, NotebookDisplay, open_display
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


@pytest.mark.parametrize("is_broken", [True, False])
def test_where_plots_can_not_be_drawn_there_are_lines(cells, monkeypatch, caplog, is_broken):
    def broken(metrics):
        raise RuntimeError("latex could not be found")

    if is_broken:
        monkeypatch.setattr(screen, "draw_metrics", broken)
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    display = NotebookDisplay("training", 2)
    for number in (1, 2):
        display.advance(f"step {number}/2")
        display.plot(number, step(number))
    assert "step 2/2" in cells.shown[1][-1] and "<img" not in cells.shown[1][-1]
    assert len(caplog.records) == is_broken, "told once"


def test_elsewhere_a_run_shows_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    display = open_display("training", 2, 0)
    assert type(display) is Display
    display.close()


ROWS = [
    {
        "prompt": '[{"role": "user", "content": "7<3="}]',
        "answer": text,
        "tokens": [ord(c) for c in text],
        "score": score,
        "advantage": advantage,
        "logprobs": [-0.5] * len(text),
        "rollout_logprobs": [-0.5] * (len(text) - 1) + [-0.75],
    }
    for text, score, advantage in (("ab", 1.0, 0.5), ("[c]", 0.0, -1.0))
]


@pytest.fixture
def answers():
    return AnswerTable(ROWS, lambda tokens: "".join(map(chr, tokens)))


def test_the_same_tables_as_text_and_for_pandas(answers):
    text = str(answers)
    assert "7<3=" in text and "[c]" in text and "0.25" in text
    assert len(answers) == 2 and str(answers[1:]).count("7<3=") == 1
    metrics = MetricsTable([{"step": 1, **step(1)}, {"step": 2, **step(2)}])
    assert "0.2" in str(metrics) and "<td>0.2</td>" in metrics._repr_html_()
    with pytest.raises(KeyError, match="entropy"):
        metrics.curve("actor/entrpy")
    pandas = pytest.importorskip("pandas")
    assert pandas.DataFrame(metrics)["critic/score/mean"].tolist() == [0.1, 0.2]
