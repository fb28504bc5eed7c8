"""The worker side of the reward pool: a reward function, one call of it, and what came of it.

A worker is the child of a fresh interpreter, its supervisor, and runs `calls.run_worker`. It
imports neither jax nor the program that started it, so it is up in a fraction of a second and
touches no accelerator.
"""

import asyncio
import functools
import inspect
import json
import math
import pickle
import threading
import traceback
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, load_function
from jaxrl_llm.workers.retries import wait_before_retry
from jaxrl_llm.workers.supervisor import MAX_LINE_BYTES, Serve, answering_in_turn, serve_requests
from jaxrl_llm.workers.values import (
    UNSCORED,
    finite_number,
    memory_limit,
    short_repr,
    shorten,
    to_plain,
)

BUILTIN_MODULE = "jaxrl_llm.rewards.functions"
KEYS = "reward."  # how the config's keys for the limits begin


class RewardJob(NamedTuple):
    """What a worker is told first.

    Args:
        spec: the reward function.
        timeout_s: seconds that one call may take.
        is_async: whether it is an `async def`; only such a one has several calls at once.
        concurrency: these.
        retries: how often a call of it is tried again that fails for what may pass.
    """

    spec: FunctionSpec
    timeout_s: float
    is_async: bool
    concurrency: int
    retries: int


class RewardItem(NamedTuple):
    """One reply to score; the fields are the parameters of verl's reward functions."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None


class Unscored(Exception):
    """A reward function raises it where it can't tell the score of a reply; the text says why.

    The reply is left out of its group then, which is no failure of the reward function.

    >>> raise Unscored("the judge said neither yes nor no")
    Traceback (most recent call last):
    jaxrl_llm.rewards.worker.Unscored: the judge said neither yes nor no
    """


class Score(NamedTuple):
    """The reward of one reply, what else was reported of it, and what went wrong, if anything.

    Attributes:
        score: of the reply; NaN where nobody knows it: such a reply is left out of its group.
        extra: what else was reported.
        error: what went wrong: the kind of failure, a colon, and what happened.
        step_rewards: index of a token among those that the policy drew, and its reward, in place
            of the score on the last one.
    """

    score: float
    extra: dict[str, Any]
    error: str | None
    step_rewards: tuple[tuple[int, float], ...] = ()

    @property
    def failure(self) -> str | None:
        """The kind of failure, if it is one.

        >>> Score(math.nan, {}, "timeout: no answer within 5 s").failure
        'timeout'
        """
        return self.error and self.error.partition(":")[0]

    @property
    def is_unscored(self) -> bool:
        """Whether nobody knows the reward.

        >>> Score(math.nan, {}, "unscored: no verdict").is_unscored
        True
        """
        return math.isnan(self.score)

    @property
    def has_failed(self) -> bool:
        """Whether its reward function failed, rather than to say itself that it is unscored.

        >>> Score(math.nan, {}, "unscored: no verdict").has_failed
        False
        """
        return self.error is not None and not self.error.startswith(f"{UNSCORED}:")


def failed_score(failure: str, message: str) -> Score:
    """Return what came of a call that gave no usable score; the runner says which it gets.

    >>> failed_score("timeout", "no answer within 5 s").failure
    'timeout'
    """
    return Score(0.0, {}, f"{failure}: {shorten(message)}")


def load_reward_function(spec: FunctionSpec) -> Callable[..., Any]:
    """Return the reward function that a config names, its keywords bound.

    >>> load_reward_function(FunctionSpec("arithmetic")).__name__
    'arithmetic'
    """
    return load_function(
        spec, home=BUILTIN_MODULE, passed=RewardItem._fields, key="reward.function"
    )


def call_function(
    function: Callable[..., Any], item: RewardItem, *, memory_gb: float | None = None
) -> Score:
    """Call the reward function on one item and bring what it gives into one form.

    Args:
        function: called with the item's fields as keywords. It may return a number, or a dict with
            a number under `score`; the dict's other keys are kept as extra information.
        item: the reply.
        memory_gb: what this process may take, for messages; None where nothing limits it.

    Returns:
        The score, or the failure: `unscored` when the reward function said so, `exception` when it
        raised something else, `invalid` when it returned something else, NaN or infinity.

    >>> call_function(lambda **item: {"score": True, "pred": "4"}, RewardItem("", "4", "4", None))
    Score(score=1.0, extra={'pred': '4'}, error=None, step_rewards=())
    """
    try:
        value = function(**item._asdict())
    except (Exception, SystemExit) as error:
        return raised_score(error, memory_gb)
    return returned_score(value)


def raised_score(error: BaseException, memory_gb: float | None) -> Score:
    """Return what came of a call that raised.

    >>> raised_score(Unscored("no verdict"), None).failure
    'unscored'
    """
    if isinstance(error, Unscored):
        return failed_score(UNSCORED, str(error))
    traceback.clear_frames(error.__traceback__)  # they may hold all memory that we may take
    return failed_score("exception", f"{describe_error(error, memory_gb)} ({_raised_at(error)})")


def returned_score(value: Any) -> Score:
    """Return what came of a call that returned a value, which may be no score.

    >>> returned_score(None).error
    'invalid: expected a finite number (float32) as score, got None'
    """
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    if "score" not in extra:
        return failed_score("invalid", f"expected a dict with 'score', got keys {list(extra)}")
    given = extra.pop("score")
    if (score := finite_number(given)) is None:
        message = f"expected a finite number (float32) as score, got {short_repr(given)}"
        return failed_score("invalid", message)
    try:
        extra = json.loads(json.dumps(extra, default=to_plain))
    except Exception as error:  # also of a class of the user's
        return failed_score("invalid", f"expected plain data, got {short_repr(value)}: {error}")
    return Score(score, extra, None)


def _raised_at(error: BaseException) -> str:
    trace = error.__traceback__
    assert trace is not None, "it was raised"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


ANSWER_FIELDS = ("number", "score", "extra", "error")


def encode_answer(number: int, outcome: Score) -> bytes:
    """Return the line that tells the pool what came of an item.

    >>> encode_answer(3, Score(1.0, {}, None))
    b'{"number": 3, "score": 1.0, "extra": {}, "error": null}\\n'
    """
    values = (number, outcome.score, outcome.extra, outcome.error)
    line = json.dumps(dict(zip(ANSWER_FIELDS, values, strict=True))).encode() + b"\n"
    if len(line) <= MAX_LINE_BYTES:
        return line
    message = f"expected at most {MAX_LINE_BYTES} bytes beside the score, got {len(line)}"
    return encode_answer(number, failed_score("invalid", message))


FAILURES = ("exception", "invalid", UNSCORED)
"""What a worker may say of a call; of what else ends one only the pool knows."""


def decode_numbered(
    line: bytes, pending: Collection[int], failures: Collection[str] = FAILURES
) -> tuple[int, Score] | None:
    """Return of which item a line tells what; None where it is no answer to one that is pending.

    Nothing is taken on trust: the reward function may have written the line itself.
    """
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or answer.keys() != {*ANSWER_FIELDS}:
        return None
    number, score, extra, error = (answer[name] for name in ANSWER_FIELDS)
    plain = isinstance(error, str | None) and type(score) is float and isinstance(extra, dict)
    if not plain or type(number) is not int or number not in pending:
        return None
    if error is None:
        return None if finite_number(score) is None else (number, Score(score, extra, None))
    failure, _, message = error.partition(": ")
    return (number, failed_score(failure, message)) if failure in failures else None


def describe_load_error(error: Exception, memory_gb: float | None) -> str:
    """Return what is told of a reward function that can't be loaded."""
    if isinstance(error, ConfigError):
        text = str(error).removeprefix("reward.function: ")
        return text + memory_limit(error.__cause__, memory_gb, KEYS)
    return describe_error(error, memory_gb)


def describe_error(error: BaseException, memory_gb: float | None) -> str:
    """Return the type and message of an error, and the memory limit where that is its cause."""
    return f"{type(error).__name__}: {error}{memory_limit(error, memory_gb, KEYS)}"


CANCEL_S = 1.0  # for a call to end that is cancelled
POLL_S = 0.2  # how soon a pool notices that another thread has closed it
BEAT_S = 1.0
BEAT = b'{"alive": true}\n'
"""What a worker writes every second while calls run: nothing keeps its event loop from going on."""


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


async def call_repeatedly(
    function: Callable[..., Any], item: RewardItem, job: RewardJob, memory_gb: float | None = None
) -> Score:
    """Call an `async def` reward function on one item, and again where that may help.

    Args:
        function: called with the item's fields as keywords.
        item: the reply.
        job: the seconds of each call, and how often it is tried again.
        memory_gb: what this process may take, for messages.

    Returns:
        The score, or the failure: those of `call_function`, and `timeout`.
    """
    tries = 0
    while True:
        value, error = await _call(function, item, job.timeout_s)
        tries += 1
        if error is None:
            return returned_score(value)
        wait = wait_before_retry(error, tries) if tries <= job.retries else None
        if wait is None:
            break
        await asyncio.sleep(wait)
    if isinstance(error, _OutOfTime):
        outcome = failed_score("timeout", str(error))
    else:
        outcome = raised_score(error, memory_gb)
    return outcome if tries == 1 else outcome._replace(error=f"{outcome.error} (try {tries})")


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


def scores_in_thread(
    function: Callable[..., Any],
    items: Sequence[RewardItem],
    job: RewardJob,
    check_open: Callable[[], None],
) -> Generator[tuple[int, Score], None, None]:
    """Yield the number and the outcome of every item as they come in, from a thread's event loop.

    This thread may have an event loop of its own, as that of a notebook has.

    Args:
        function: the reward function.
        items: the replies.
        job: the seconds of each call, how many there are at once, and how often each is tried.
        check_open: raises where the pool has been closed.
    """
    ready = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
    places = asyncio.Semaphore(job.concurrency)

    async def hold_loop() -> None:
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()  # then what still runs is cancelled

    async def call(number: int, item: RewardItem) -> tuple[int, Score]:
        async with places:
            return number, await call_repeatedly(function, item, job)

    thread = threading.Thread(
        target=lambda: asyncio.run(hold_loop()), name="reward function", daemon=True
    )
    thread.start()
    loop, stop = ready.result()
    ended = SimpleQueue[Future[tuple[int, Score]]]()
    for given in enumerate(items):
        asyncio.run_coroutine_threadsafe(call(*given), loop).add_done_callback(ended.put)
    left = len(items)
    try:
        while left:
            check_open()
            with suppress(Empty):
                yield ended.get(timeout=POLL_S).result()
                left -= 1
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(POLL_S + CANCEL_S)


def run_worker(fd: int, *, memory_gb: float | None) -> None:
    """Answer lists of `(number, RewardItem)` until the pool closes the connection.

    The pool sends a `RewardJob` first.

    Args:
        fd: the file descriptor of our end of the connection.
        memory_gb: what this process may take, for messages.
    """

    def load(job: RewardJob) -> Serve:
        function = load_reward_function(job.spec)
        if job.is_async:
            return answering_at_once(function, job, memory_gb)

        def answer(number: int, item: RewardItem) -> bytes:
            return encode_answer(number, call_function(function, item, memory_gb=memory_gb))

        return answering_in_turn(answer)

    serve_requests(fd, load, lambda error: describe_load_error(error, memory_gb))
