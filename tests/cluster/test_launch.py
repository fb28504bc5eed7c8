"""Why a job ended: an error that would come again, or a loss after which it can go on."""

import contextlib

import jax
import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
)

from jaxrl_llm.cluster import launch
from jaxrl_llm.cluster.actors import ProcessInfo
from jaxrl_llm.cluster.launch import LostError, RayJob, check_exit, query_job
from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig


class Coordinator:
    """A coordinator to which a process may have reported an error."""

    def __init__(self, failure=None):
        self.get_failure = self
        self.value = failure

    def remote(self):
        return ("coordinator", self.value)


def raised(cause):
    return RayTaskError("run", "its traceback", cause)


LOST_OBJECT = ObjectLostError("0" * 40, None, "")
CONNECTION = jax.errors.JaxRuntimeError("UNAVAILABLE: the connection was reset")
MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


@pytest.fixture
def ended(monkeypatch):
    """Lets processes end as given, and returns what the launcher makes of it."""

    def get(task, timeout=None):
        if isinstance(task, tuple):
            return task[1]
        if isinstance(task, Exception):
            raise task
        if task == "running":
            raise GetTimeoutError
        return None

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(launch, "REPORT_GRACE_S", 0.0)

    def run(*tasks, failure=None):
        check_exit(RayJob(Coordinator(failure), [], list(tasks)), tasks[0], list(tasks))

    return run


def test_one_that_has_done_its_work_is_no_reason(ended):
    ended("done", ActorDiedError())


@pytest.mark.parametrize("error", [ConfigError("a key"), RunError("a reward"), OSError("a disk")])
def test_an_error_of_the_run_is_raised_as_it_was(ended, error):
    with pytest.raises(type(error), match=str(error)):
        ended(raised(error), "running")
    with pytest.raises(type(error), match=str(error)):  # the others may end first
        ended(raised(CONNECTION), raised(error))
    with pytest.raises(type(error), match=str(error)):
        ended(ActorDiedError(), raised(error))


def test_a_bug_keeps_the_traceback_of_its_process(ended):
    with pytest.raises(RayTaskError, match="its traceback"):
        ended(raised(ZeroDivisionError("a bug")), "running")


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        OutOfMemoryError("the node has no memory"),
        raised(CONNECTION),
        raised(LOST_OBJECT),
        raised(ActorDiedError()),
    ],
    ids=lambda error: type(getattr(error, "cause", error)).__name__,
)
def test_a_process_that_is_gone_is_a_loss(ended, error):
    with pytest.raises(LostError, match="a training process was lost"):
        ended(error, "running")


def test_the_reason_of_a_process_that_could_not_end_is_at_the_coordinator(ended):
    with pytest.raises(ConfigError, match="a key"):
        ended(ActorDiedError(), "running", failure=("ConfigError", "a key"))
    with pytest.raises(RunError, match="a reward") as caught:
        ended(ActorDiedError(), "running", failure=("RunError", "a reward"))
    assert not isinstance(caught.value, LostError)


def test_an_error_that_any_devices_would_have_is_no_loss(ended):
    with pytest.raises(RayTaskError):
        ended(raised(MEMORY), "running")


def test_a_device_that_fails_is_a_loss(ended):
    """Also where a job has one process, which then starts again."""
    with pytest.raises(LostError, match="ECC"):
        ended(raised(jax.errors.JaxRuntimeError("INTERNAL: uncorrectable ECC error")))


class ReachableCoordinator:
    """A coordinator whose counters and engines the launcher can ask for, until its node is gone."""

    def __init__(self, counters, engines):
        self.get_counters, self.get_engines = Answer(counters), Answer(engines)


class Answer:
    """A method of an actor, which answers at once."""

    def __init__(self, value):
        self.value = value

    def remote(self):
        return self.value


def test_counters_and_engines_outlive_their_coordinator(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    process = ProcessInfo("a" * 56, "10.0.0.1", pid=1, free_port=1, versions={})
    engine = process._replace(pid=2)  # made anew
    job = RayJob(ReachableCoordinator({"engine_restarts": 2}, [engine]), [process], [])
    assert query_job(job, {}) == ({"engine_restarts": 2}, [process, engine])

    def gone(value, timeout):
        raise ActorDiedError

    monkeypatch.setattr(ray, "get", gone)
    assert query_job(job, {"engine_restarts": 1}) == ({"engine_restarts": 1}, [process])


@pytest.fixture
def launched(monkeypatch):
    """Runs a launcher whose starts end as given; returns its restarts and waits, or raises."""

    def run(*ends, restarts=2):
        left, seen, waits = list(ends), [], []

        def watch(job, stall_timeout_s, preemption):
            if (end := left.pop(0)) is not None:
                raise end

        @contextlib.contextmanager
        def running_job(config, cluster, state):
            seen.append(state.restarts)
            yield None

        monkeypatch.setattr(launch, "ray_connection", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(launch, "running_job", running_job)
        monkeypatch.setattr(launch, "watch", watch)
        monkeypatch.setattr("time.sleep", waits.append)
        tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
        tree |= {"cluster": {"restarts": restarts, "backoff_s": 3}}
        launch.launch(from_tree(TrainConfig, tree | {"reward": {"function": "arithmetic"}}))
        return seen, waits

    return run


def test_a_lost_job_starts_again_and_waits_twice_as_long_each_time(launched):
    assert launched(None) == ([0], [])
    assert launched(LostError("a node"), LostError("a node"), None) == ([0, 1, 2], [3, 6])
    with pytest.raises(RunError, match=r"a node \(the job was started 3 times\)"):
        launched(*[LostError("a node")] * 3, None)


@pytest.mark.parametrize("kind", [ConfigError, RunError])
def test_an_error_after_a_loss_names_the_loss(launched, kind):
    with pytest.raises(kind, match=r"^a key$"):
        launched(kind("a key"), None)
    with pytest.raises(kind, match=r"^a key \(before that: a node\)$"):
        launched(LostError("a node"), kind("a key"), None)
