"""A reader is told what is compiled."""

import threading

import jax
import pytest

from jaxrl_llm.compilation import CompileQueue, PendingProgram
from jaxrl_llm.monitoring.activity import ACTIVITIES
from jaxrl_llm.monitoring.clock import CompileProgress, reporting_compilation
from tests.waiting import wait_until


@pytest.fixture
def queue():
    made = CompileQueue()
    yield made
    made.clear()


@pytest.fixture
def texts(monkeypatch):
    """What was shown, each time that something began or ended."""
    shown = []

    def telling(original):
        def call(given):
            original(given)
            shown.append(ACTIVITIES.text)

        return call

    for name in ("begin", "end"):
        monkeypatch.setattr(ACTIVITIES, name, telling(getattr(ACTIVITIES, name)))
    return shown


def test_the_text_names_the_program_and_how_many_there_are(queue, texts):
    gate = threading.Event()
    progress = CompileProgress()
    queue.hold()
    queue.add([PendingProgram("decode 8 x 32", gate.wait)])
    queue.add([PendingProgram("later", lambda: None)], later=True)
    wait_until(lambda: "compiling 0/1 (decode 8 x 32)" in texts)
    queue.add([PendingProgram("update 4 x 16", lambda: None)])
    wait_until(lambda: ACTIVITIES.text == "compiling 1/2 (decode 8 x 32)")
    gate.set()
    queue.wait()
    assert progress.total == 2, "what is held is not expected yet"
    assert ACTIVITIES.text == ""
    queue.release()
    queue.wait()
    assert "compiling 2/3 (later)" in texts
    progress.close()
    seen = len(texts)
    PendingProgram("more", lambda: None).result()
    assert len(texts) == seen


def test_a_reader_who_comes_late_gets_numbers_that_fit(queue, texts):
    gate = threading.Event()
    queue.hold()
    queue.add([PendingProgram("later", gate.wait)], later=True)
    queue.release()
    progress = CompileProgress()
    PendingProgram("wanted", lambda: None).try_to_compile()
    gate.set()
    queue.add([PendingProgram("more", lambda: None)])
    queue.wait()
    progress.close()
    assert "compiling 0/1 (wanted)" in texts


def test_what_is_loaded_is_not_called_compiled_and_where_programs_are_kept_is_told_once(
    monkeypatch, tmp_path, compiles_alone
):
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "kept"))

    def look_up(*events):
        for event in events:
            jax.monitoring.record_event(f"/jax/compilation_cache/{event}")

    def described():
        (progress,) = ACTIVITIES._open
        return progress.label, progress.take_note()

    seen = []
    with reporting_compilation(), reporting_compilation():  # which follows once
        look_up("compile_requests_use_cache", "cache_hits")
        for events in ([], ["compile_requests_use_cache"], []):
            look_up(*events)
            PendingProgram("a program", lambda: seen.append(described())).result()
    note = "; programs are kept in ~/kept for the next run"
    assert seen == [("loading programs", ""), ("compiling", note), ("compiling", "")]
    assert ACTIVITIES.text == ""
