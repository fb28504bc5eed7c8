"""A reader is told what is compiled."""

import threading

import pytest

from jaxrl_llm.compilation import CompileQueue, PendingProgram
from jaxrl_llm.monitoring.activity import ACTIVITIES
from jaxrl_llm.monitoring.clock import CompileProgress
from tests.waiting import wait_until


@pytest.fixture
def texts(monkeypatch):
    """What was shown, each time that something began or ended."""
    shown = []
    for name in ("begin", "end"):
        call = getattr(ACTIVITIES, name)
        monkeypatch.setattr(
            ACTIVITIES, name, lambda x, call=call: (call(x), shown.append(ACTIVITIES.text))
        )
    return shown


def test_the_text_names_the_program_and_how_many_there_are(texts):
    queue, gate, progress = CompileQueue(), threading.Event(), CompileProgress()
    queue.hold()
    queue.add([PendingProgram("decode 8 x 32", gate.wait)])
    queue.add([PendingProgram("later", lambda: None)], later=True)
    wait_until(lambda: "compiling 0/1 (decode 8 x 32)" in texts)
    queue.add([PendingProgram("update 4 x 16", lambda: None)])
    wait_until(lambda: ACTIVITIES.text == "compiling 1/2 (decode 8 x 32)")
    gate.set()
    queue.wait()
    assert progress.total == 2 and ACTIVITIES.text == "", "what is held is not expected yet"
    queue.release()
    queue.wait()
    assert "compiling 2/3 (later)" in texts
    progress.close()
    queue.clear()
    seen = len(texts)
    PendingProgram("more", lambda: None).result()
    assert len(texts) == seen
