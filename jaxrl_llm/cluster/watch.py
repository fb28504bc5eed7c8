"""Watching a job on a Ray cluster: what it shows, and why its processes end."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from jaxrl_llm.cluster.actors import DUMP_STACKS_SIGNAL, ProcessInfo
from jaxrl_llm.cluster.context import is_permanent
from jaxrl_llm.cluster.job import RPC_TIMEOUT_S, RayJob, query_job, send_signal
from jaxrl_llm.cluster.resources import POLL_INTERVAL_S, LostError, original_error
from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.runs.preemption import Preemption

REPORT_GRACE_S = 15.0  # for other processes to report, too, when one has failed
STACKS_WAIT_S = 5.0  # for stacks to reach the launcher


def watch(job: RayJob, stall_timeout_s: float | None, preemption: Preemption) -> None:
    """Show what a job shows, until it has ended; pass on to it that it is to end.

    Args:
        job: that runs.
        stall_timeout_s: seconds without a step until it counts as hung; None never.
        preemption: listens here.

    Raises:
        LostError: a process was lost, or there was no step for so long.
        RunError: as the run raises; so ConfigError and others.
    """
    running, progressed, stop_sent = list(job.tasks), time.monotonic(), False
    with contextlib.ExitStack() as stack:
        displays: list[Display] = []
        while running:
            ended, running = ray.wait(running, timeout=POLL_INTERVAL_S)
            if update_displays(job, displays, stack):
                progressed = time.monotonic()
            for task in ended:
                check_exit(job, task, [*running, *ended])
            if preemption.is_told() and not stop_sent:
                call_result(job.coordinator.request_stop.remote())
                stop_sent = True
            if stall_timeout_s and time.monotonic() - progressed > stall_timeout_s:
                dump_stacks(query_job(job, {})[1])
                raise LostError(f"there was no step for {stall_timeout_s:g} s (stall_timeout_s)")
        update_displays(job, displays, stack)


def update_displays(job: RayJob, displays: list[Display], stack: contextlib.ExitStack) -> bool:
    """Show what the job's first process has shown since the last time; return if it advanced.

    Args:
        job: that runs.
        displays: those that were opened; one that is new is added.
        stack: closes them.
    """
    calls = call_result(job.coordinator.take_display_calls.remote())
    for method, arguments in calls:
        if method == "open":
            displays.append(Display(*arguments))
            stack.callback(displays[-1].close)
        else:
            getattr(displays[-1], method)(*arguments)
    return any(method in ("open", "advance") for method, _ in calls)


def call_result(task: Any) -> Any:
    """Return the result of a call to the coordinator.

    Raises:
        LostError: it is gone, or can't be reached.
    """
    try:
        return ray.get(task, timeout=RPC_TIMEOUT_S)
    except RayError as error:
        raise LostError(f"the job's first node was lost: {error}") from error


def check_exit(job: RayJob, task: Any, others: list[Any]) -> None:
    """Raise why a process ended, if it failed; the others may know better.

    An error of the library's or the user's is the reason. A process that is gone is a loss, and so
    are jax's and Ray's errors in one that talked to it.
    """
    losses: list[str] = []
    until = time.monotonic() + REPORT_GRACE_S
    for each in [task, *(other for other in others if other is not task)]:
        try:
            ray.get(each, timeout=max(0.0, until - time.monotonic()) if losses else None)
            if each is task:
                return
        except GetTimeoutError:
            continue
        except RayTaskError as error:
            if is_fatal(error.cause):
                raise original_error(error) from error
            losses.append(str(error.cause))
        except RayError as error:
            losses.append(str(error))
    if failure := call_result(job.coordinator.get_failure.remote()):
        kind, text = failure
        raise (ConfigError if kind == "ConfigError" else RunError)(text)
    raise LostError("a training process was lost: " + " ".join(losses[0].split()))


def is_fatal(cause: Any) -> bool:
    """Return whether a process's error would come again.

    >>> is_fatal(ValueError("a bug"))
    True
    >>> is_fatal(jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset"))
    False
    """
    if isinstance(cause, jax.errors.JaxRuntimeError):
        return is_permanent(cause)
    return not isinstance(cause, RayError)


def dump_stacks(processes: Sequence[ProcessInfo]) -> None:
    """Let all processes print the stacks of their threads, as far as they still can."""
    send_signal(processes, DUMP_STACKS_SIGNAL)
    time.sleep(STACKS_WAIT_S)  # what they print comes through Ray
