"""What a training process tells its launcher."""

import asyncio
import contextlib
import os
from types import SimpleNamespace

import jax
import pytest
import ray
from ray.exceptions import ActorDiedError

from jaxrl_llm.cluster.actors import Coordinator, exiting_on_device_error
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.display import LauncherDisplay, open_display
from jaxrl_llm.monitoring.job_context import JobContext


class Handle:
    """An object whose methods are called by `.remote`; `wrap` makes what comes of a call."""

    def __init__(self, of, wrap=lambda value: value):
        self.object, self.wrap = of, wrap

    def __getattr__(self, name):
        method = getattr(self.object, name)
        return SimpleNamespace(remote=lambda *given: self.wrap(asyncio.run(method(*given))))


@pytest.fixture
def coordinator(monkeypatch):
    """The coordinator of a job whose only process this is."""
    handle = Handle(Coordinator(3, {"reward_retries": 1}))
    job = JobContext(handle, (), 2, 0, engine_devices=0, reward_tasks=3, max_retries=1)
    monkeypatch.setattr(job_context, "_contexts", [job])
    monkeypatch.setattr(ray, "get", lambda value: value)
    return handle


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("a key"), ("ConfigError", "a key")),
        (ZeroDivisionError("a bug"), ("RunError", "ZeroDivisionError('a bug')")),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: reset"), None),
        (ActorDiedError(), None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_launcher_learns_of_errors_that_are_no_other_processs(coordinator, error, told):
    with pytest.raises(type(error)), job_context.reporting_failure():
        raise error
    assert coordinator.get_failure.remote() == told


def test_display_calls_counters_and_objects_reach_the_coordinator(coordinator, monkeypatch):
    display = open_display("training", 5, 2)
    assert isinstance(display, LauncherDisplay)
    display.advance("step 3")
    calls = [("open", ("training", 5, 2)), ("advance", ("step 3",))]
    assert coordinator.take_display_calls.remote() == calls
    assert coordinator.take_display_calls.remote() == []
    job_context.increment("reward_retries", 0)
    job_context.increment("reward_retries", 4)
    assert job_context.metrics() == {"cluster/restarts": 2.0, "cluster/reward_retries": 5.0}
    for index, value in enumerate((["answers"], ["more"])):
        coordinator.put.remote(index, value)
    got = [coordinator.get.remote(index) for index in (0, 1, 0)]
    assert got == ["answers", "more", "answers"]
    assert coordinator.object._objects == {1: ("more", 1)}, "kept until the others have it"
    job = job_context.current()._replace(engine_hosts=("first", "second"))
    monkeypatch.setattr(job_context, "_contexts", [job])
    for index, process in ((0, "a"), (1, "b"), (0, "c")):  # engines, of which one is replaced
        coordinator.register_engine.remote(index, process)
    assert job_context.metrics()["cluster/engine_restarts"] == 1.0
    assert coordinator.get_engines.remote() == ["c", "b"]


def test_a_coordinator_waits_for_all_processes_and_forgets_old_syncs():
    async def run():
        coordinator = Coordinator(2, {})
        await coordinator.publish(0, 0, 1, ["b"])
        waiting = asyncio.create_task(coordinator.get_parts(0, 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await coordinator.publish(0, 0, 0, ["a"])
        assert await waiting == ["a", "b"]
        late = asyncio.create_task(coordinator.get_parts(0, 1))
        await coordinator.publish(1, 0, 0, ["c"])
        with pytest.raises(LookupError):
            await late

    asyncio.run(run())


def test_an_engine_whose_device_fails_ends_for_another_to_come(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for status in ("RESOURCE_EXHAUSTED", "INTERNAL"):
        assert not ended, "any device would have no memory"
        with contextlib.suppress(jax.errors.JaxRuntimeError), exiting_on_device_error():
            raise jax.errors.JaxRuntimeError(f"{status}: of the device")
    assert ended == [1]
