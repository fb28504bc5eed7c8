"""What a run shows on a terminal, and elsewhere."""

import io
import math
import re
import sys

import pytest

from jaxrl_llm.compilation import PendingProgram
from jaxrl_llm.monitoring.clock import reporting_compilation
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.tables import choose_answers, printable
from tests.waiting import wait_until


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal, and returns what it takes."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def make(columns=140):
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        return screen

    return make


def test_without_a_terminal_the_display_prints_plain_lines(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    display = Display("training", 3, 1)
    display.line("step [0]  " + "x" * 200)
    display.advance("step 2/3")
    display.table("title", ["metric", "value"], [["val-core/[/]/acc", "0.5"]])
    display.close()
    printed = screen.getvalue()
    assert printed.startswith("step [0]  " + "x" * 200 + "\nstep 2/3\n")
    assert "val-core/[/]/acc" in printed and "0.5" in printed and "\x1b" not in printed


def plain(screen):
    """Return what is on a terminal, without its control codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_on_a_terminal_there_is_a_bar(terminal):
    screen = terminal()
    display = Display("training", 5, 1)
    display.advance("step 2/5")
    display.advance()  # without a line
    display.plot(3, {"train/loss": 0.5, "perf/throughput": 1234.0, "perf/cpu_memory_used_gb": 1.3})
    with reporting_compilation():
        shown = "compiling 0/1 (decode 8 x 32)"
        PendingProgram("decode 8 x 32", lambda: wait_until(lambda: shown in plain(screen))).result()
    wait_until(lambda: plain(screen).rindex("training") > plain(screen).rindex("compiling"))
    display.close()
    printed = screen.getvalue()
    assert "step 2/5" in printed
    assert "3/5" in printed and "step 3/5" not in printed
    assert "loss 0.5000  1,234 tokens/s  1.3 GiB" in plain(screen)


def row(answer, score=1.0, advantage=0.5, prompt="7+3=", error=None):
    messages = f'[{{"role": "user", "content": {prompt!r}}}]'.replace("'", '"')
    given = {"prompt": messages, "answer": answer, "score": score}
    return given | {"advantage": advantage, "error": error}


HOSTILE = "[bold red]no[/] :smile: \x1b[2Jgone\x9b31m\x07\ud800 ‮txet"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_answers_are_shown_as_they_are_and_control_nothing(terminal, monkeypatch, is_terminal):
    screen = terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    display = Display("training", 5)
    display.answers(3, [row(HOSTILE), row("two\nlines", 0.0, -1.25), row("", 0.0, None)])
    display.answers(4, [row("a", error="exception: \x1b[2J" + "x" * 500)])
    display.line(f"  7+3= → {printable(HOSTILE)}")
    display.close()
    shown = plain(screen)
    assert "answers of step 3" in shown
    assert "[bold red]no[/] :smile: \\x1b[2Jgone\\x9b31m\\x07\\ud800 \\u202etxet" in shown
    assert "two⏎lines" in shown and "-1.25" in shown
    assert "failed:exception:\\x1b[2J" in re.sub(r"[│\s]", "", shown)
    assert "\x1b[2J" not in screen.getvalue() and "\x07" not in screen.getvalue()


def test_long_answers_are_shortened_to_what_fits(terminal):
    """A terminal may have no width; a narrow one has lines instead of tables."""
    for columns in (0, 20, 80, 200):
        screen = terminal(columns)
        display = Display("training", 5)
        display.answers(3, [row(f"begin {'word ' * 5000} end", prompt="p" * 9000)] * 4)
        display.close()
        shown = plain(screen)
        table = [line for line in shown.splitlines() if line.startswith(("│", "┃", "└", "├"))]
        assert all(len(line) <= (columns or 200) for line in table) and len(table) < 250
        assert bool(table) == (columns != 20)
        assert "begin" in shown and "end" in shown, "the middle is left out"


def test_the_best_and_the_worst_answers_of_one_or_two_groups_are_chosen():
    scores = [0.0, 0.2, 0.9, 0.1, 0.5, 0.5, 0.0, -1.0]
    assert choose_answers(scores, 4) == [0, 2, 4, 7]
    assert choose_answers([1.0] * 8, 4) == [0]
    assert choose_answers([math.nan, 0.5, 1.0, math.nan], 2) == [1, 2]
