"""Programs are compiled once each, in the order in which they are needed."""

import contextlib
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from jaxrl_llm import compilation
from jaxrl_llm.compilation import CompileQueue, PendingProgram, compile_all
from jaxrl_llm.monitoring.clock import CompileCounter
from tests.waiting import wait_until


@pytest.fixture
def queue():
    made = CompileQueue(threads=1)
    yield made
    made.clear()


class Recorded:
    """Programs that record in which order they were compiled, and wait for a gate to open."""

    def __init__(self):
        self.order, self.gate = [], threading.Event()

    def __call__(self, name, *, slow=False):
        def compile_it():
            if slow:
                assert self.gate.wait(60)
            self.order.append(name)
            return name.upper()

        return PendingProgram(name, compile_it)


def test_who_needs_a_program_compiles_it_once():
    made = Recorded()
    program = made("a")
    assert [program.result(), program.result()] == ["A", "A"]
    assert made.order == ["a"]


def test_who_needs_a_program_waits_for_the_thread_that_compiles_it(queue):
    made = Recorded()
    program = made("a", slow=True)
    queue.add([program])
    results = []
    waiting = threading.Thread(target=lambda: results.append(program.result()))
    waiting.start()
    time.sleep(0.05)
    assert not results
    made.gate.set()
    waiting.join(60)
    assert (results, made.order) == (["A"], ["a"])


def test_what_is_needed_later_comes_later_and_not_while_it_is_held(queue):
    made = Recorded()
    queue.hold()
    queue.add([made("last"), made("very last")], later=True)
    queue.add([made("slow", slow=True)])
    queue.add([made("soon")])
    made.gate.set()
    wait_until(lambda: len(made.order) == 2)
    queue.wait()
    assert made.order == ["slow", "soon"]
    queue.release()
    queue.wait()
    assert made.order == ["slow", "soon", "last", "very last"]
    made.gate.clear()
    queue.add([made("slow", slow=True)])
    queue.add([made("last")], later=True)
    queue.add([made("soon")])
    made.gate.set()
    queue.wait()
    assert made.order[4:] == ["slow", "soon", "last"]


def test_each_program_gets_a_thread_while_there_are_cores():
    queue, made = CompileQueue(threads=2), Recorded()
    queue.add([made("slow", slow=True), made("quick")])
    wait_until(lambda: made.order == ["quick"])
    made.gate.set()
    queue.clear()


def test_a_thread_that_dies_makes_room_for_another(queue, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def end():
        raise SystemExit

    made = Recorded()
    queue.add([PendingProgram("a", end)])
    queue.wait()
    queue.add([made("b")])
    queue.wait()
    assert made.order == ["b"]


ENDING = """
import threading, time
from jaxrl_llm.compilation import CompileQueue, PendingProgram

def outlast():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("begun", flush=True)

queue, begun = CompileQueue(threads=1), threading.Event()
queue.add([PendingProgram("a", lambda: begun.set() or outlast())])
queue.add([PendingProgram("b", lambda: print("needless", flush=True)) for _ in range(3)])
assert begun.wait(60)
"""


def test_the_end_of_a_process_waits_for_what_is_begun_alone():
    words = [sys.executable, "-c", ENDING]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["begun"]


def test_a_failing_listener_leaves_no_one_waiting(monkeypatch):
    events = iter([ValueError("a display is broken")])

    def record(*_, **__):
        if (error := next(events, None)) is not None:
            raise error

    monkeypatch.setattr(compilation.jax.monitoring, "record_event", record)
    program = PendingProgram("a", lambda: "compiled")
    with pytest.raises(ValueError, match="display"):
        program.result()


def test_dropped_programs_are_compiled_by_who_needs_them(queue):
    made = Recorded()
    running, mine, other = made("running", slow=True), made("mine"), made("other")
    queue.add([running, mine, other])
    wait_until(running._lock.locked)
    threading.Timer(0.05, made.gate.set).start()
    queue.drop([running, mine])
    assert running.is_done, "what is compiled now is waited for"
    queue.wait()
    assert made.order == ["running", "other"]
    assert mine.result() == "MINE"


def test_an_error_reaches_who_needs_the_program(queue):
    def fail():
        raise ValueError("no such shape")

    program = PendingProgram("a", fail)
    queue.add([program])
    queue.wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="shape"):
            program.result()
    assert program.has_failed


def test_an_interrupted_program_can_be_compiled_again():
    given = [KeyboardInterrupt(), None]

    def compile_it():
        if (error := given.pop(0)) is not None:
            raise error
        return "compiled"

    program = PendingProgram("a", compile_it)
    with pytest.raises(KeyboardInterrupt):
        program.result()
    assert program.result() == "compiled"


def test_all_are_compiled_where_others_can_not_wait(monkeypatch):
    made = Recorded()
    programs = [made(name) for name in "abc"]
    compile_all(programs)
    assert sorted(made.order) == ["a", "b", "c"] and all(p.is_done for p in programs)
    monkeypatch.setattr(compilation.distributed, "process_count", lambda: 2)
    places = list[str]()
    monkeypatch.setattr(compilation.distributed, "wait_for_all", places.append)
    assert not compilation.compiles_ahead(jax.devices("cpu"))
    compile_all([made(name) for name in "defgh"])
    assert made.order[3:] == list("defgh"), "several processes keep the same order"
    assert places == [f"compiled {name}" for name in "defgh"], "none runs before all have compiled"


def test_only_waits_are_counted_as_such(queue):
    """And the wait for a program once, though jax reports that it is compiled, too."""

    def program(n, seconds=0.0):
        def compile_it():
            time.sleep(seconds)
            return jax.jit(lambda x: x * n).lower(shape).compile()

        return PendingProgram(str(n), compile_it)

    shape = jax.ShapeDtypeStruct((3,), np.float32)

    with contextlib.closing(CompileCounter()) as counter:
        queue.add([program(11, 0.2)])
        queue.wait()
        first = counter.metrics()
        assert first["perf/compilations"] + first["perf/compilation_cache_hits"] == 1
        assert first["perf/compile_wait_s"] == 0
        program(12, 0.2).result()
        second = counter.metrics()
        assert second["perf/compile_wait_s"] > 0.2
        jax.jit(lambda x: x * 13)(np.ones(3, np.float32))
        third = counter.metrics()
        assert third["perf/compile_wait_s"] == third["perf/compile_seconds"] > 0
