"""What a process of a job on a cluster knows of it. Outside of clusters there is no member."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError, Preempted, RunError

LASTING = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")


class Member(NamedTuple):
    """A training process's place in its job.

    Attributes:
        board: handle of the `Board` actor.
        hosts: handles of the `EngineHost` actors; none where it samples where it trains.
        restarts: how often the job was started again.
        number: which process this is.
        engine_devices: of all engines on nodes of their own.
        reward_tasks: tasks in which this process scores at once; 0 scores in its own workers.
        retries: how often what is lost is tried again.
    """

    board: Any
    hosts: tuple[Any, ...]
    restarts: int
    number: int
    engine_devices: int
    reward_tasks: int
    retries: int


_members: list[Member] = []


def join(member: Member) -> None:
    """Become a member of a job, for as long as the process lives."""
    assert not _members, "a process has one job"
    _members.append(member)


def current() -> Member | None:
    """Return this process's place in a job on a cluster, if it has one.

    >>> current() is None
    True
    """
    return _members[0] if _members else None


def is_restarted() -> bool:
    """Return whether this process continues a job that was started before.

    >>> is_restarted()
    False
    """
    member = current()
    return member is not None and member.restarts > 0


def comes_again(error: Exception) -> bool:
    """Return whether jax's error would come again: else it is a device's fault, or a peer's end.

    >>> comes_again(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    True
    >>> comes_again(RuntimeError("INTERNAL: uncorrectable ECC error"))
    False
    """
    return any(status in str(error) for status in LASTING)


def show(method: str, *arguments: Any) -> None:
    """Let the launcher's display do something, if this is the job's first process."""
    member = current()
    if member is not None and member.number == 0:
        import ray

        ray.get(member.board.show.remote(method, *arguments))


def count(name: str, more: int) -> None:
    """Add to one of the job's counts, if there is something to add."""
    member = current()
    if member is not None and more:
        import ray

        ray.get(member.board.count.remote(name, more))


def is_told_to_end() -> bool:
    """Return whether the job's launcher was told to end; only the first process asks."""
    member = current()
    if member is None or member.number:
        return False
    import ray

    return ray.get(member.board.is_ending.remote())


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Let the launcher know at once of an error that leaves the block: the process may not get to.

    Ray's and jax's own errors are left out, as these may come of another process's end.
    """
    try:
        yield
    except Preempted:  # by all processes
        raise
    except Exception as error:
        member, origin = current(), type(error).__module__.partition(".")[0]
        if member is not None and origin not in ("jax", "jaxlib", "ray"):
            import ray

            kind = "ConfigError" if isinstance(error, ConfigError) else "RunError"
            text = str(error) if isinstance(error, RunError | ConfigError) else repr(error)
            ray.get(member.board.fail.remote((kind, text)))
        raise


def metrics() -> dict[str, float]:
    """Return what was lost and replaced, by name; nothing outside of a cluster."""
    member = current()
    if member is None or member.number:
        return {}
    import ray

    counts: Any = ray.get(member.board.counts.remote())
    found = {"cluster/restarts": float(member.restarts)}
    if member.hosts:
        found["cluster/engine_restarts"] = float(counts.get("engine_restarts", 0))
    if member.reward_tasks:
        found["cluster/reward_retries"] = float(counts.get("reward_retries", 0))
    return found
