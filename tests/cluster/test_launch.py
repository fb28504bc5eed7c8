"""Why a job ended: an error that would come again, or a loss after which it can go on."""

import contextlib
from types import SimpleNamespace
from unittest.mock import Mock

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


def raised(cause):
    return RayTaskError("run", "its traceback", cause)


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
        asked = SimpleNamespace(remote=lambda: ("coordinator", failure))
        job = RayJob(SimpleNamespace(get_failure=asked), [], list(tasks))
        check_exit(job, tasks[0], list(tasks))

    return run


def test_an_error_of_the_run_is_raised_as_it_was(ended):
    """A bug keeps the traceback of its process; one that has done its work is no reason."""
    ended("done", ActorDiedError())
    for error in (ConfigError("a key"), RunError("a reward"), OSError("a disk")):
        for tasks in (
            (raised(error), "running"),
            (raised(CONNECTION), raised(error)),  # the others may end first
            (ActorDiedError(), raised(error)),
        ):
            with pytest.raises(type(error), match=str(error)):
                ended(*tasks)
    for error in (ZeroDivisionError("a bug"), MEMORY):  # any devices would have no memory
        with pytest.raises(RayTaskError, match="traceback"):
            ended(raised(error), "running")


def test_a_process_that_is_gone_and_a_device_that_fails_are_losses(ended):
    for error in (
        ActorDiedError(),
        OutOfMemoryError("the node has no memory"),
        raised(CONNECTION),
        raised(ObjectLostError("0" * 40, None, "")),
        raised(ActorDiedError()),
    ):
        with pytest.raises(LostError):
            ended(error, "running")
    with pytest.raises(LostError, match="ECC"):  # also where a job has one process
        ended(raised(jax.errors.JaxRuntimeError("INTERNAL: uncorrectable ECC error")))


def test_the_reason_of_a_process_that_could_not_end_is_at_the_coordinator(ended):
    for kind in (ConfigError, RunError):
        with pytest.raises(kind, match="reason") as caught:
            ended(ActorDiedError(), "running", failure=(kind.__name__, "reason"))
        assert type(caught.value) is kind


def test_counters_and_engines_outlive_their_coordinator(monkeypatch):
    get = Mock(side_effect=lambda value, timeout: value)
    monkeypatch.setattr(ray, "get", get)
    process = ProcessInfo("a" * 56, "10.0.0.1", pid=1, free_port=1, versions={})
    engine = process._replace(pid=2)  # made anew
    coordinator = Mock()
    coordinator.get_counters.remote.return_value = {"engine_restarts": 2}
    coordinator.get_engines.remote.return_value = [engine]
    job = RayJob(coordinator, [process], [])
    assert query_job(job, {}) == ({"engine_restarts": 2}, [process, engine])
    get.side_effect = ActorDiedError()
    assert query_job(job, {"engine_restarts": 1}) == ({"engine_restarts": 1}, [process])


@pytest.fixture
def launched(monkeypatch):
    """Runs a launcher whose starts end as given; returns its restarts and waits, or raises."""

    def run(*ends):
        seen, sleep = [], Mock()

        def running_job(config, cluster, state):
            seen.append(state.restarts)
            return contextlib.nullcontext()

        monkeypatch.setattr(launch, "ray_connection", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(launch, "running_job", running_job)
        monkeypatch.setattr(launch, "watch", Mock(side_effect=ends))
        monkeypatch.setattr("time.sleep", sleep)
        tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
        tree |= {"cluster": {"restarts": 2, "backoff_s": 3}}
        launch.launch(from_tree(TrainConfig, tree | {"reward": {"function": "arithmetic"}}))
        return seen, [call.args[0] for call in sleep.call_args_list]

    return run


def test_a_lost_job_starts_again_and_waits_twice_as_long_each_time(launched):
    assert launched(None) == ([0], [])
    assert launched(LostError("a node"), LostError("a node"), None) == ([0, 1, 2], [3, 6])
    with pytest.raises(RunError, match="3"):
        launched(*[LostError("a node")] * 3, None)
    for kind in (ConfigError, RunError):
        with pytest.raises(kind, match=r"^key$"):
            launched(kind("key"), None)
        with pytest.raises(kind, match=r"^key.*node"):  # which names the loss
            launched(LostError("node"), kind("key"), None)
