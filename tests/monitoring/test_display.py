"""What a run shows on a terminal, and elsewhere."""

import io
import sys
import time

from jaxrl_llm.compilation import PendingProgram
from jaxrl_llm.monitoring.display import Display


def test_without_a_terminal_the_display_prints_plain_lines(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    display = Display("training", 3, 1)
    display.line("step [0]  " + "x" * 200)
    display.advance("step 2/3")
    display.table("title", ["metric", "value"], [["acc", "0.5"]])
    display.close()
    printed = screen.getvalue().splitlines()
    assert printed[0] == "step [0]  " + "x" * 200
    assert printed[1] == "step 2/3"
    assert "metric" in screen.getvalue()
    assert "0.5" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    display = Display("training", 5, 1)
    display.advance("step 2/5")
    display.advance()  # without a line
    PendingProgram("decode 8 x 32", lambda: time.sleep(0.3)).result()
    display.close()
    PendingProgram("decode 16 x 32", lambda: None).result()
    printed = screen.getvalue()
    assert "step 2/5" in printed
    assert "3/5" in printed and "step 3/5" not in printed
    assert "compiling decode 8 x 32 (1 of 1)" in printed
    assert printed.rindex("training") > printed.rindex("compiling"), "it ends"
