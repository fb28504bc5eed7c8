"""How workers call reward functions: one after another, or several of an `async def` at once.

A call of the latter is tried again where that may help.
"""

import asyncio
import functools
import inspect
import pickle
import queue
import random
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from jaxrl_llm.rewards.worker import (
    Outcome,
    RewardItem,
    RewardJob,
    call_function,
    describe_load_error,
    encode_answer,
    failed_outcome,
    load_reward_function,
    raised_outcome,
    returned_outcome,
)
from jaxrl_llm.workers.answers import Serve, answering_in_turn, serve_requests

FIRST_WAIT_S = 0.5  # before the second try; each wait after it is twice as long
MAX_WAIT_S = 60.0  # before a try, also where a server asks for more
CANCEL_S = 1.0  # for a call to end that is cancelled
POLL_S = 0.2  # how soon a pool notices that another thread has closed it
BEAT_S = 1.0
BEAT = b'{"alive": true}\n'
"""What a worker writes every second while calls run: nothing keeps its event loop from going on."""

PASSING = (408, 425, 429)
"""HTTP statuses, besides those from 500 on, after which a request may succeed later."""

LOST_CONNECTIONS = (
    ("httpx2", "TransportError"),
    ("httpx", "TransportError"),
    ("openai", "APIConnectionError"),
    ("anthropic", "APIConnectionError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("requests", "ConnectionError"),
)
"""Packages, and the error that each raises where a connection fails or is lost."""


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether a reward function is an `async def`, with keywords bound or not.

    >>> async def score(**item): ...
    >>> is_async(functools.partial(score, strict=True)), is_async(print)
    (True, False)
    """
    while isinstance(function, functools.partial):
        function = function.func
    own = type(function).__call__  # of an object that can be called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(own)


def wait_before_retry(error: BaseException, tries: int) -> float | None:
    """Return the seconds to wait before a call is tried again; None where that can't help.

    It can after a lost connection, a time limit, and the HTTP statuses 408, 425, 429 and from 500
    on, which the errors of the usual clients have as `status_code`, `status` or in `response`. The
    wait doubles with each try, and differs from call to call, so that they do not come all at once;
    it is as long as `Retry-After` at least.

    Args:
        error: that the call raised.
        tries: of this call so far.

    >>> wait_before_retry(ValueError("a bug"), 1)
    >>> 0.25 <= wait_before_retry(ConnectionResetError(), 1) <= 0.75
    True
    """
    response = getattr(error, "response", None)
    given = [
        getattr(o, name, None) for o in (error, response) for name in ("status_code", "status")
    ]
    status = next((s for s in given if isinstance(s, int)), None)
    if status is None:
        kinds = [getattr(sys.modules.get(p), name, None) for p, name in LOST_CONNECTIONS]
        lost = [kind for kind in kinds if isinstance(kind, type)]
        if not isinstance(error, (ConnectionError, TimeoutError, *lost)):
            return None
    elif status not in PASSING and status < 500:
        return None
    asked = max(_asked_wait(o) for o in (error, response))
    doubled = FIRST_WAIT_S * 2.0 ** min(tries - 1, 30) * random.uniform(0.5, 1.5)
    return min(max(doubled, asked), MAX_WAIT_S)


def _asked_wait(answered: Any) -> float:
    """Return the seconds of a Retry-After, which may be a date; 0 where there is none."""
    headers = getattr(answered, "headers", None)
    if not isinstance(headers, Mapping):
        return 0.0
    value = str(headers.get("retry-after") or headers.get("Retry-After") or "0")
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # no date, or one without a zone
        return 0.0


async def call_repeatedly(
    function: Callable[..., Any], item: RewardItem, job: RewardJob, memory_gb: float | None = None
) -> Outcome:
    """Call an `async def` reward function on one item, and again where that may help.

    Args:
        function: called with the item's fields as keywords.
        item: the reply.
        job: the seconds of each call, and how often it is tried again.
        memory_gb: what this process may take, for messages.

    Returns:
        The score, or the failure: those of `call_function`, and `timeout`.
    """
    tries, retries = 0, job.calls.retries if job.calls else 0
    while True:
        value, error = await _call(function, item, job.timeout_s)
        tries += 1
        if error is None:
            return returned_outcome(value)
        wait = wait_before_retry(error, tries) if tries <= retries else None
        if wait is None:
            break
        await asyncio.sleep(wait)
    if isinstance(error, _OutOfTime):
        outcome = failed_outcome("timeout", str(error))
    else:
        outcome = raised_outcome(error, memory_gb)
    return outcome if tries == 1 else outcome._replace(message=f"{outcome.message} (try {tries})")


class _OutOfTime(TimeoutError):
    pass


async def _call(
    function: Callable[..., Any], item: RewardItem, timeout_s: float
) -> tuple[Any, BaseException | None]:
    """Return what a call returned, or what it raised; it ends in time, whatever it does.

    One that does not let itself be cancelled is left alone: nobody waits for it.
    """

    async def attempt() -> tuple[Any, BaseException | None]:
        try:
            return await function(**item._asdict()), None
        except (Exception, SystemExit) as error:  # an event loop would end for the latter
            return None, error

    task = asyncio.ensure_future(attempt())
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            return None, _OutOfTime(f"no answer within {timeout_s:g} s")
    finally:
        task.cancel()
    try:
        return task.result()
    except asyncio.CancelledError as error:  # it has cancelled itself
        return None, error


def answering_at_once(
    function: Callable[..., Any], job: RewardJob, memory_gb: float | None
) -> Serve:
    """Return what answers requests in an event loop, each as soon as its call has ended.

    The pool limits how many there are at once.

    Args:
        function: the reward function.
        job: the seconds of each call, and how often it is tried again.
        memory_gb: what this process may take, for messages.
    """

    running = dict[int, asyncio.Task[None]]()

    async def answer(out: BinaryIO, number: int, item: RewardItem) -> None:
        line = encode_answer(number, await call_repeatedly(function, item, job, memory_gb))
        del running[number]  # after the last answer the pool expects nothing, and no sign of life
        out.write(line)
        out.flush()

    async def beat(out: BinaryIO) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if running:
                out.write(BEAT)
                out.flush()

    async def serve(requests: BinaryIO, out: BinaryIO) -> None:
        incoming = _read_in_thread(requests)
        async with asyncio.TaskGroup() as group:  # what can't be answered ends the process
            beating = group.create_task(beat(out))
            while (numbered := await incoming.get()) is not None:
                for number, item in numbered:
                    running[number] = group.create_task(answer(out, number, item))
            for task in (beating, *running.values()):
                task.cancel()

    return lambda requests, out: asyncio.run(serve(requests, out))


def _read_in_thread(requests: BinaryIO) -> asyncio.Queue[Any]:
    """Return the lists of requests as they come, then None."""
    loop, incoming = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def read() -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(incoming.put_nowait, pickle.load(requests))
        finally:
            loop.call_soon_threadsafe(incoming.put_nowait, None)

    threading.Thread(target=read, name="requests", daemon=True).start()
    return incoming


def outcomes_in_thread(
    function: Callable[..., Any],
    items: Sequence[RewardItem],
    job: RewardJob,
    check_open: Callable[[], None],
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield the number and the outcome of every item as they come in, from a thread's event loop.

    This thread may have an event loop of its own, as that of a notebook has.

    Args:
        function: the reward function.
        items: the replies.
        job: the seconds of each call, how many there are at once, and how often each is tried.
        check_open: raises where the pool has been closed.
    """
    results: queue.SimpleQueue[tuple[int, Outcome] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    async def call_all() -> None:
        places = asyncio.Semaphore(job.calls.concurrency if job.calls else 1)

        async def call(number: int, item: RewardItem) -> None:
            async with places:
                try:
                    results.put((number, await call_repeatedly(function, item, job)))
                except Exception as error:  # ours; the loop may have to wait for others to end
                    results.put(error)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(*numbered)) for numbered in enumerate(items)]
            while not (stop.is_set() or all(task.done() for task in tasks)):
                await asyncio.wait(tasks, timeout=POLL_S)
            for task in tasks:
                task.cancel()

    def run() -> None:
        try:
            asyncio.run(call_all())
        except BaseException as error:  # for the thread that waits
            results.put(error)

    thread = threading.Thread(target=run, name="reward function", daemon=True)
    thread.start()
    try:
        for _ in items:
            yield _next_result(results, check_open)
    finally:
        stop.set()
        thread.join(POLL_S + CANCEL_S)


def _next_result(
    results: queue.SimpleQueue[tuple[int, Outcome] | BaseException],
    check_open: Callable[[], None],
) -> tuple[int, Outcome]:
    while True:
        check_open()
        try:
            result = results.get(timeout=POLL_S)
        except queue.Empty:
            continue
        if isinstance(result, BaseException):
            raise result
        return result


def run_worker(fd: int, *, memory_gb: float | None) -> None:
    """Answer lists of `(number, RewardItem)` until the pool closes the connection.

    The pool sends a `RewardJob` first.

    Args:
        fd: the file descriptor of our end of the connection.
        memory_gb: what this process may take, for messages.
    """

    def load(job: RewardJob) -> Serve:
        function = load_reward_function(job.spec)
        if job.calls is not None:
            return answering_at_once(function, job, memory_gb)

        def answer(number: int, item: RewardItem) -> bytes:
            return encode_answer(number, call_function(function, item, memory_gb=memory_gb))

        return answering_in_turn(answer)

    serve_requests(fd, load, lambda error: describe_load_error(error, memory_gb))
