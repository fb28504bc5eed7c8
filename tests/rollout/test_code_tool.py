import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.agents.sampler import check_episode_functions
from tests.episodes import config
from tests.refusals import refuses
from tests.rollout.conftest import call_tools
from tests.sandboxes import needs_landlock


@pytest.fixture
def make(open_pool):
    def build(*others, workers=0, timeout_s=60.0, limits=None, **keywords):
        tools = (FunctionSpec("python", keywords), *map(FunctionSpec, others))
        return open_pool(tools, workers=workers, timeout_s=timeout_s, **(limits or {}))

    return build


def run(pool, *codes):
    results = call_tools(pool, *(("python", {"code": code}) for code in codes))
    return [(result.text, result.failure) for result in results]


@needs_landlock
def test_an_episode_keeps_its_names_and_others_do_not_have_them(make):
    pool = make(sandbox="process")
    told = run(pool, "x = 41", "x + 1", "print(x)\nx / 0", "print('out')\nx")
    assert told[:2] == [("(no output)", None), ("42", None)]
    text, failure = told[2]
    assert failure == "failed"
    assert text.startswith("41\nTraceback") and text.endswith("ZeroDivisionError: division by zero")
    assert told[3] == ("out\n41", None)
    assert run(pool, "x")[0][1] == "failed"
    assert pool.failures.counts == {("python", "error"): 2}
    (schema,) = pool.schemas
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["properties"].keys() == {"code"}
    assert run(make(sandbox="process", keep_state=False), "x = 1; x", "x")[1][1] == "failed"
    assert run(make(sandbox="expression"), "2 ** 10", "import os")[0] == ("1024", None)


@needs_landlock
def test_a_limit_is_told_and_what_has_become_of_the_names(make):
    pool = make(sandbox="process", cpu_s=1.0, memory_mb=64)
    told = run(pool, "x = 1", "y = [0] * 10**8", "x", "while True: pass", "x")
    assert [failure for _, failure in told] == [None, "failed", None, "failed", "failed"]
    assert told[1][0].endswith("MemoryError") and told[2][0] == "1"
    assert "1" in told[3][0] and "lost" in told[3][0]
    assert pool.failures.counts == {("python", k): 1 for k in ("timeout", "memory", "error")}
    control = make(sandbox="process", answer="?")
    assert run(control, "1 + 1", "while True: pass") == [("?", None)] * 2


def test_what_can_not_be_run_is_refused_at_the_start(make, monkeypatch):
    for keywords in (
        *({}, {"sandbox": "docker"}, {"sandbox": "service"}, {"sandbox": "process", "memory": 3}),
        *({"sandbox": "process", "url": "http://x"}, {"sandbox": "process", "cpu_s": 0}),
    ):
        with refuses("rollout.tools"):
            make(**keywords)
    with refuses("rollout.tools"):  # before a model is loaded
        check_episode_functions(config(tools=[FunctionSpec("python", {"sandbox": "docker"})]))
    monkeypatch.setattr("jaxrl_llm.sandbox.service.find_spec", lambda name: None)
    with refuses("rollout.tools"):
        make(sandbox="service", url="http://x", keep_state=False)


@needs_landlock
def test_a_broken_level_is_no_fault_of_the_model(make, monkeypatch):
    def no_session(*_):
        raise OSError("too many open files")

    pool = make(sandbox="process")
    monkeypatch.setattr("jaxrl_llm.sandbox.process.CodeSession", no_session)
    assert run(pool, "1")[0][1] == "broken"
