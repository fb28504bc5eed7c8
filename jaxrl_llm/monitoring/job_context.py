"""A process's place in a job on a cluster, and what it tells the job's coordinator.

Outside of clusters there is no context, and nothing is told.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError, Preempted, RunError

PERMANENT_STATUSES = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")


class JobContext(NamedTuple):
    """A training process's place in its job.

    Attributes:
        coordinator: handle of the `Coordinator` actor.
        engine_hosts: handles of the `EngineHost` actors; none where it samples where it trains.
        restarts: how often the job was started again.
        process_index: of this training process.
        engine_devices: of all engines on nodes of their own.
        reward_tasks: tasks in which this process scores at once; 0 scores in its own workers.
        max_retries: how often what is lost is tried again.
    """

    coordinator: Any
    engine_hosts: tuple[Any, ...]
    restarts: int
    process_index: int
    engine_devices: int
    reward_tasks: int
    max_retries: int


_contexts: list[JobContext] = []


def enter_job(context: JobContext) -> None:
    """Take a place in a job, for as long as the process lives."""
    assert not _contexts, "a process has one job"
    _contexts.append(context)


def current() -> JobContext | None:
    """Return this process's place in a job on a cluster, if it has one.

    >>> current() is None
    True
    """
    return _contexts[0] if _contexts else None


def is_restarted() -> bool:
    """Return whether this process continues a job that was started before.

    >>> is_restarted()
    False
    """
    job = current()
    return job is not None and job.restarts > 0


def is_permanent(error: Exception) -> bool:
    """Return whether jax's error would come again: else it is a device's fault, or a peer's end.

    >>> is_permanent(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    True
    >>> is_permanent(RuntimeError("INTERNAL: uncorrectable ECC error"))
    False
    """
    return any(status in str(error) for status in PERMANENT_STATUSES)


def call_display(method: str, *arguments: Any) -> None:
    """Call a method of the launcher's display, if this is the job's first process."""
    job = current()
    if job is not None and job.process_index == 0:
        import ray

        ray.get(job.coordinator.put_display_call.remote(method, *arguments))


def increment(counter: str, amount: int) -> None:
    """Add to one of the job's counters, if there is something to add."""
    job = current()
    if job is not None and amount:
        import ray

        ray.get(job.coordinator.increment.remote(counter, amount))


def is_stop_requested() -> bool:
    """Return whether the job's launcher was told to end; only the first process asks."""
    job = current()
    if job is None or job.process_index:
        return False
    import ray

    return ray.get(job.coordinator.is_stop_requested.remote())


@contextlib.contextmanager
def reporting_failure() -> Iterator[None]:
    """Let the launcher know at once of an error that leaves the block: the process may not get to.

    Ray's and jax's own errors are left out, as these may come of another process's end.
    """
    try:
        yield
    except Preempted:  # by all processes
        raise
    except Exception as error:
        job, origin = current(), type(error).__module__.partition(".")[0]
        if job is not None and origin not in ("jax", "jaxlib", "ray"):
            import ray

            kind = "ConfigError" if isinstance(error, ConfigError) else "RunError"
            text = str(error) if isinstance(error, RunError | ConfigError) else repr(error)
            ray.get(job.coordinator.report_failure.remote((kind, text)))
        raise


def metrics() -> dict[str, float]:
    """Return how often something was lost and replaced, by name; nothing outside of a cluster."""
    job = current()
    if job is None or job.process_index:
        return {}
    import ray

    counters: Any = ray.get(job.coordinator.get_counters.remote())
    values = {"cluster/restarts": float(job.restarts)}
    if job.engine_hosts:
        values["cluster/engine_restarts"] = float(counters.get("engine_restarts", 0))
    if job.reward_tasks:
        values["cluster/reward_retries"] = float(counters.get("reward_retries", 0))
    return values
