"""A reader is told what is compiled, where that takes a while."""

import logging
import threading
import time

import jax
import pytest

from jaxrl_llm.compilation import CompileQueue, PendingProgram
from jaxrl_llm.monitoring import compiling
from jaxrl_llm.monitoring.compiling import CompileProgress, reporting_compilation
from tests.waiting import wait_until


@pytest.fixture
def queue():
    made = CompileQueue()
    yield made
    made.clear()


def test_the_text_names_the_program_and_how_many_there_are(queue):
    texts, gate = [], threading.Event()
    progress = CompileProgress(texts.append)
    queue.hold()
    queue.add([PendingProgram("decode 8 x 32", gate.wait)])
    queue.add([PendingProgram("later", lambda: None)], later=True)
    wait_until(lambda: "compiling decode 8 x 32 (1 of 1)" in texts)
    queue.add([PendingProgram("update 4 x 16", lambda: None)])
    gate.set()
    queue.wait()
    assert progress.total == 2, "what is held is not expected yet"
    assert texts[-1] == ""
    queue.release()
    queue.wait()
    assert "compiling later (3 of 3)" in texts
    progress.close()
    seen = len(texts)
    PendingProgram("more", lambda: None).result()
    assert len(texts) == seen


def test_a_reader_who_comes_late_gets_numbers_that_fit(queue):
    texts, gate = [], threading.Event()
    queue.hold()
    queue.add([PendingProgram("later", gate.wait)], later=True)
    queue.release()
    progress = CompileProgress(texts.append)
    PendingProgram("wanted", lambda: None).try_to_compile()
    gate.set()
    queue.add([PendingProgram("more", lambda: None)])
    queue.wait()
    progress.close()
    assert "compiling wanted (1 of 1)" in texts


def test_one_line_says_that_programs_are_compiled_and_where_they_are_kept(
    queue, monkeypatch, caplog, tmp_path, compiles_alone
):
    monkeypatch.setattr(compiling, "PATIENCE_S", 0.05)
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "kept"))
    with caplog.at_level(logging.INFO, "jaxrl_llm"), reporting_compilation():
        PendingProgram("quick", lambda: None).result()
        time.sleep(0.2)
        assert not caplog.messages, "what is there at once is not worth a line"
    with caplog.at_level(logging.INFO, "jaxrl_llm"), reporting_compilation():
        for event in ("compile_requests_use_cache", "cache_hits"):
            jax.monitoring.record_event(f"/jax/compilation_cache/{event}")
        PendingProgram("kept", lambda: time.sleep(0.2)).result()
        assert not caplog.messages, "what is read from the cache is not compiled"
        jax.monitoring.record_event("/jax/compilation_cache/compile_requests_use_cache")
        PendingProgram("not kept", lambda: wait_until(lambda: caplog.messages)).result()
    assert caplog.messages == ["compiling 2 programs; they are kept in ~/kept for the next run"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "jaxrl_llm"), reporting_compilation():
        gate = threading.Event()
        queue.add([PendingProgram(name, gate.wait) for name in "abc"])
        wait_until(lambda: caplog.messages)
        gate.set()
        queue.wait()
        PendingProgram("slow", lambda: time.sleep(0.2)).result()
    assert caplog.messages == ["compiling 3 programs; they are kept in ~/kept for the next run"]
