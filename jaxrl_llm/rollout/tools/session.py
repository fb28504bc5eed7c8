"""The calls of an episode: checked, read from the journal or answered by workers, tried again."""

import asyncio
import copy
import functools
import hashlib
import itertools
import json
import logging
import os
import pickle
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from jaxrl_llm.config.errors import ConfigError, described_error
from jaxrl_llm.config.functions import FunctionSpec, closest
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.call_formats import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.builtin import starts_processes
from jaxrl_llm.rollout.tools.tool import (
    CLEAN_UP,
    ENVIRONMENT,
    INFRASTRUCTURE,
    TOOLS_KEY,
    ArgumentsError,
    LoadedTool,
    MakeToolbox,
    OpenEpisode,
    Toolbox,
    ToolError,
    ToolRequest,
    ToolResult,
    check_arguments,
    decode_tool_result,
    error_text,
    failed_result,
    format_trace,
    load_environment,
    load_tools,
    prepare_tool,
    read_result,
    restore_types,
    to_result,
    tool_schema,
)
from jaxrl_llm.workers.pool import Limits, WorkerPool, WorkerProcess, WorkerProgram, stop_all

log = logging.getLogger(__name__)


# What tools have answered, on disk, so that a step that is drawn again is told the same.
#
# The file has a line of JSON for each result, which is handed to the operating system before the
# result is used. So a process that is killed loses at most the line that it was writing.

VERSION = 2
FIELDS = ToolResult._fields[:-2]
"""What is kept of a result: all but what is reported of an error."""


def call_digest(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a digest by which a call is known again.

    >>> call_digest("add", {"x": 1, "y": 2}) == call_digest("add", {"y": 2, "x": 1})
    True
    """
    text = json.dumps([name, arguments], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Journal:
    """Results of calls by episode and call number, read from a file and appended to it.

    Args:
        path: of the file; an existing one is gone on with.
        config: digest of all that decides what is drawn; a file of another one is refused.

    Raises:
        ToolError: the file is another config's, or is damaged before its last line.
    """

    def __init__(self, path: str | os.PathLike[str], *, config: str) -> None:
        self._path = Path(path)
        self._entries: dict[int, dict[int, tuple[str, ToolResult]]] = {}
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._load(config)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return how many results there are."""
        return sum(len(calls) for calls in self._entries.values())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def find(self, episode: int, call: int, digest: str) -> ToolResult | None:
        """Return the result of a call, if it is here.

        Where it is another call's, the episode is drawn in another way than it was: then this
        result and the later ones of the episode are dropped.

        Args:
            episode: its number.
            call: its number in the episode.
            digest: of `call_digest`.
        """
        entry = self._entries.get(episode, {}).get(call)
        if entry is None:
            return None
        if entry[0] == digest:
            return entry[1]
        log.warning(
            "%s: call %d of episode %d is another one than before; its results from there on are"
            " dropped",
            self._path,
            call,
            episode,
        )
        self._append({"drop": [episode, call]})
        self._drop(episode, call)
        return None

    def record(self, episode: int, call: int, digest: str, result: ToolResult) -> None:
        """Append the result of a call."""
        told = {name: getattr(result, name) for name in FIELDS}
        self._append({"key": [episode, call], "digest": digest, "result": told})
        self._entries.setdefault(episode, {})[call] = digest, result

    def _append(self, entry: dict[str, Any]) -> None:
        data = memoryview(json.dumps(entry).encode() + b"\n")
        while data:
            data = data[os.write(self._file, data) :]

    def _drop(self, episode: int, call: int) -> None:
        calls = self._entries.get(episode, {})
        for number in [number for number in calls if number >= call]:
            del calls[number]

    def _load(self, config: str) -> None:
        content = self._path.read_bytes()
        *lines, rest = content.split(b"\n")
        if rest:
            log.warning("%s: its last line is cut and dropped", self._path)
            os.ftruncate(self._file, len(content) - len(rest))
        header = {"journal": VERSION, "config": config}
        if not lines:
            self._append(header)
            return
        if (recorded := self._parse(lines[0], 1)) != header:
            if set(recorded) != set(header):
                raise ToolError(f"{self._path}: expected a journal of tools, got another file")
            raise ToolError(
                f"{self._path}: got a journal of another config, or of another version of the"
                " library; remove it, to run the tools again"
            )
        for number, line in enumerate(lines[1:], start=2):
            self._take(self._parse(line, number), number)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise self._damaged(number)
        return entry

    def _damaged(self, number: int) -> ToolError:
        return ToolError(
            f"{self._path}: line {number} is damaged; remove the file, to run the tools again"
        )

    def _take(self, entry: dict[str, Any], number: int) -> None:
        """Take in a line."""
        key = entry.get("drop") or entry.get("key")
        if not (isinstance(key, list) and [type(part) for part in key] == [int, int]):
            raise self._damaged(number)
        if entry.keys() == {"drop"}:
            self._drop(*key)
            return
        digest, result = entry.get("digest"), entry.get("result")
        if entry.keys() != {"key", "digest", "result"} or not isinstance(digest, str):
            raise self._damaged(number)
        if not isinstance(result, dict) or result.keys() != {*FIELDS}:
            raise self._damaged(number)
        if (read := read_result(result | {"error": "", "trace": ""})) is None:
            raise self._damaged(number)
        self._entries.setdefault(key[0], {})[key[1]] = digest, read


# The workers of tools and environments, and where the state of each episode lives.
#
# One thread owns all workers. A worker does one task at a time. What an episode keeps lives in one
# worker; where that worker is lost, the next task of the episode builds it up again in another one,
# by the requests of the episode that were answered.

PROGRAM = WorkerProgram("jaxrl_llm.rollout.tools.tool:run_tools", keys="rollout.tool_process.")
CLOSED = "tools: the pool is closed"

Report = Callable[[str, str, str], None]
"""Takes note of an error: of which tool, what kind, and where it was raised."""


class Placement:
    """How much of an episode's state is in its worker. Only the thread of the workers changes it.

    Args:
        episode: its number, one for each placement.
        row: of data.
        seed: of the episode.
    """

    def __init__(self, episode: int, row: EpisodeRow, seed: int) -> None:
        self.opening = ToolRequest("open", episode, row=row, seed=seed)
        self.reset()

    def reset(self) -> None:
        """Build the state up again at the next request, in whatever worker."""
        self.is_open = False
        self.applied = 0  # of the requests that make the state


class ToolTask:
    """A request to workers.

    Args:
        request: to be answered.
        placement: of an episode whose state it needs; None needs none.
        earlier: the episode's requests that made its state.
        is_fresh: whether the state must be made anew.

    Attributes:
        future: gets the result, or `ToolError`.
    """

    def __init__(
        self,
        request: ToolRequest,
        placement: Placement | None = None,
        earlier: Sequence[ToolRequest] = (),
        *,
        is_fresh: bool = False,
    ) -> None:
        self.request, self.placement, self.earlier = request, placement, earlier
        self.is_fresh = is_fresh
        self.future = Future[ToolResult]()
        self._requests: list[ToolRequest] = []
        self._results: list[ToolResult] = []

    def begin(self) -> list[ToolRequest]:
        """Return what a worker must be asked: to catch up first, where it is behind."""
        self._began = time.monotonic()
        place, is_close = self.placement, self.request.kind == "close"
        if place is not None:
            if is_close and not place.is_open:
                return []
            if self.is_fresh:
                place.reset()
            self._requests += [] if place.is_open else [place.opening]
            self._requests += [] if is_close else self.earlier[place.applied :]
        self._requests.append(self.request)
        return self._requests

    def add(self, result: ToolResult) -> bool:
        """Take the result of the next request; return whether there are all."""
        self._results.append(result)
        return len(self._results) == len(self._requests)

    def lose(self, failure: str, message: str) -> None:
        """Take note that its worker is lost: the request it was at is to blame."""
        blamed = self._requests[len(self._results)]
        if blamed.kind == "close":
            lost = ToolResult(error=CLEAN_UP, trace=message)
        elif blamed is not self.request:
            text = error_text(f"its state could not be built up again: {message}")
            lost = ToolResult(text=text, failure="retry", error=failure, trace=message)
        else:
            text = error_text(message)
            lost = ToolResult(text=text, failure=failure, error=failure, trace=message)
        while not self.add(lost):
            pass

    def finish(self, report: Report) -> None:
        """Give the result to who waits for it, and report what went wrong."""
        for request, result in zip(self._requests, self._results, strict=True):
            if result.error and (request is self.request or result.error == CLEAN_UP):
                report(request.name or request.kind, result.error, result.trace)
        *catching_up, result = self._results or [ToolResult()]
        failed = [r for r in catching_up if r.failure in ("retry", "broken")]
        if failed:
            result = failed[0]._replace(failure="retry")
        place = self.placement
        if place is not None and (failed or self.request.kind == "close"):
            place.reset()
        elif place is not None:
            place.is_open = True
            place.applied = len(self.earlier) + (result.failure in (None, "failed"))
        seconds = time.monotonic() - self._began
        self.future.set_result(
            result._replace(name=self.request.name, seconds=seconds, error="", trace="")
        )


class InProcess:
    """Does tasks in this process, at once and without a time limit."""

    def __init__(self, toolbox: Toolbox, report: Report) -> None:
        self._toolbox, self._report, self._closed = toolbox, report, False

    def submit(self, task: ToolTask) -> None:
        """Answer a request."""
        if self._closed:
            raise ToolError(CLOSED)
        for request in pickle.loads(pickle.dumps(task.begin())):  # tools may change what they get
            task.add(self._toolbox.answer(request))
        task.finish(self._report)

    def close(self) -> None:
        """Clean up what is open."""
        self._closed = True
        for error in self._toolbox.close():
            self._report("close", CLEAN_UP, described_error(error))


class ToolWorkers(WorkerPool):
    """Worker processes of tools, and the thread that owns them.

    Args:
        make_toolbox: makes each worker's toolbox.
        size: the number of processes.
        timeout_s: seconds that a call may take.
        limits: of each.
        report: takes note of errors, in the pool's thread.
    """

    def __init__(
        self, make_toolbox: MakeToolbox, size: int, timeout_s: float, limits: Limits, report: Report
    ) -> None:
        program = PROGRAM._replace(limits=limits)
        super().__init__(program, make_toolbox, timeout_s, name="tools", loads="them")
        self._size, self._report = size, report
        self._running: dict[WorkerProcess, ToolTask] = {}
        self._homes: dict[Placement, WorkerProcess] = {}
        self._waiting = deque[ToolTask]()
        self._inbox = SimpleQueue[ToolTask]()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tools", daemon=True)

    def error(self, message: str) -> ToolError:
        """Return what is raised where no worker can start."""
        return ToolError(f"tools: {message}")

    def decode(self, line: bytes, pending: Sequence[int]) -> list[tuple[int, ToolResult]] | None:
        """Return the result of the first pending request; None where the line is another."""
        result = decode_tool_result(line, pending[0]) if pending else None
        return result and [(pending[0], result)]

    def submit(self, task: ToolTask) -> None:
        """Have a request answered, from any thread.

        Raises:
            ToolError: the pool is closed.
        """
        with self._lock:
            if self.closed.is_set():
                raise ToolError(CLOSED)
            self._inbox.put(task)
            if not self._thread.ident:
                self._thread.start()
            self._wake_up()

    def close(self) -> None:
        """End all workers at once, whatever they do; what waits for results gets `ToolError`."""
        with self._lock:
            super().close()
            self._wake_up()
        if self._thread.ident and threading.current_thread() is not self._thread:
            self._thread.join()
        self._woken.close()
        self._wake.close()

    def _wake_up(self) -> None:
        with suppress(OSError):  # it is full: the thread will wake up
            self._wake.send(b"x")

    def _run(self) -> None:
        while not self.closed.is_set():
            try:
                self._turn()
            except ToolError as error:
                self._abort(error)
            except Exception as error:
                log.exception("tools: the workers are ended")
                self._abort(self.error(described_error(error)))
        self._abort(ToolError(CLOSED))

    def _abort(self, error: ToolError) -> None:
        """End all workers, and tell all who wait why."""
        self._take_inbox()
        waiting = [task for task in self._waiting if task.future.set_running_or_notify_cancel()]
        failed = [*self._running.values(), *waiting]
        stop_all(self.workers)
        self._running.clear()
        self._waiting.clear()
        self._homes.clear()
        for task in failed:
            task.future.set_exception(error)

    def _turn(self) -> None:
        self._take_inbox()
        self.start_workers(min(self._size, len(self._running) + len(self._waiting)))
        for _ in range(len(self._waiting)):
            task = self._waiting.popleft()
            if not self._start(task):
                self._waiting.append(task)
        for event in self.poll(woken=self._woken):
            task = self._running.get(event.worker)
            if task is None:  # it had nothing to do
                continue
            is_lost = event.failure is not None
            if is_lost:
                task.lose("timeout" if event.failure == "timeout" else "died", event.message)
            is_done = is_lost or task.add(event.value)
            if is_done:
                del self._running[event.worker]
                self._finish(task)
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _take_inbox(self) -> None:
        with suppress(Empty):
            while True:
                self._waiting.append(self._inbox.get_nowait())

    def _start(self, task: ToolTask) -> bool:
        """Give a task to its worker; return whether it need not wait any more."""
        if task.future.cancelled():
            return True
        place = task.placement
        if place is None:
            worker = next((w for w in self.workers if w.is_idle), None)
        else:
            worker = self._homes.get(place)
            if worker not in self.workers:
                place.reset()
            if task.request.kind == "close" and not place.is_open:
                task.begin()
                self._finish(task)
                return True
            if worker not in self.workers:
                episodes = Counter(self._homes.values())
                worker = min(self.workers, key=lambda w: episodes[w], default=None)
            if worker is not None:
                self._homes[place] = worker
        if worker is None or not worker.is_idle:
            return False
        if task.future.set_running_or_notify_cancel():
            self._running[worker] = task
            worker.submit([(next(self._numbers), request) for request in task.begin()])
        return True

    def _finish(self, task: ToolTask) -> None:
        if task.placement is not None and task.request.kind == "close":
            self._homes.pop(task.placement, None)
        task.finish(self._report)


# The calls of an episode, which the journal knows or workers answer.


class FailureLog:
    """Counts errors by tool and kind, from any thread.

    >>> failures = FailureLog()
    >>> failures.note("search", "KeyError", "Traceback …")
    >>> failures.counts
    Counter({('search', 'KeyError'): 1})
    """

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self._lock = threading.Lock()

    def note(self, name: str, kind: str, trace: str) -> None:
        """Count an error; log where it was raised if it is the first of its kind.

        Args:
            name: of the tool, or what else failed.
            kind: of the error.
            trace: where it was raised.
        """
        with self._lock:
            self.counts[name, kind] += 1
            is_first = self.counts[name, kind] == 1
        if is_first:
            message = "tools: %s failed (%s); others of this kind are counted\n%s"
            log.warning(message, name, kind, trace)

    def log_counts(self) -> None:
        """Log how many there were of each kind."""
        with self._lock:
            counts = sorted(self.counts.items())
        if counts:
            listed = ", ".join(f"{name}: {count} {kind}" for (name, kind), count in counts)
            log.warning("tools: failures in all: %s", listed)


END = "end"
_episode_numbers = itertools.count()  # two sessions may have the same number, one after the other

UNKNOWN_TOOL = "unknown"
"""The name of all tools that there are not, which a model may make up without end."""

Attempt = Callable[[bool], Awaitable[ToolResult]]
"""Runs a call; told whether an earlier attempt has failed."""


class Session:
    """The calls of one episode; all methods run in one event loop.

    Calls and steps are numbered in the order in which they are made. The number decides the random
    numbers that a call gets, and its place in the journal.

    Args:
        pool: that runs what is not async.
        number: of the episode.
        row: that it is about.
        seed: of its random numbers.
        journal: keeps the results; None keeps none.
    """

    def __init__(
        self, pool: "SessionPool", number: int, row: EpisodeRow, seed: int, journal: Journal | None
    ) -> None:
        self._pool, self._number, self._journal = pool, number, journal
        self._row, self._seed = row, seed
        self._timeout_s = pool.config.tool_process.timeout_s
        self._calls = itertools.count()
        self._episode = next(_episode_numbers)
        self._placement = Placement(self._episode, row, seed)
        self._earlier: list[ToolRequest] = []  # that made the state, in order
        self._lock = asyncio.Lock()  # what makes state comes one after the other
        self._is_spoilt = False  # the state may hold a call that nobody waited for
        self._begun = False
        self._last: ToolResult | None = None  # the environment's, after which there is nothing
        self._awaited = OpenEpisode(row, seed)  # of async tools
        self._closed = False

    async def call(self, call: ToolCall) -> ToolResult:
        """Run a tool; what goes wrong is told in the result.

        Args:
            call: of the model; its `error`, an unknown name and wrong arguments are told, too.

        Raises:
            ToolError: tools can't be run at all.
        """
        number = self._next_number()
        try:
            arguments = self._checked(call)
        except ArgumentsError as error:
            name = call.name if call.name in self._pool.tools else UNKNOWN_TOOL
            return ToolResult(name, error_text(str(error)), failure="failed")
        tool = self._pool.tools[call.name]
        request = ToolRequest("call", self._episode, number, tool.name, arguments)
        if tool.is_stateful and not tool.is_async:
            return await self._in_order(request)
        if tool.is_async:
            return await self._journaled(request, lambda _: self._await(tool, request))
        alone = request._replace(episode=-1, seed=self._seed)
        if "row" in tool.injected:
            alone = alone._replace(row=self._row)
        return await self._journaled(alone, lambda _: self._submit(ToolTask(alone)))

    async def step(self, answer: str | None) -> ToolResult:
        """Tell the environment what the model said, and return what it says.

        After its end it says nothing more.

        Args:
            answer: of the model; None to begin.

        Raises:
            ValueError: there is no environment, or it has begun already or not yet.
            ToolError: environments can't be run at all.
        """
        has_environment = self._pool.config.environment is not None
        if not has_environment or (answer is None) == self._begun:
            expected = "step(None) first, then answers" if has_environment else "none"
            raise ValueError(f"environment: got step({answer!r}), expected {expected}")
        number = self._next_number()
        self._begun = True
        if self._last is not None:
            return self._last._replace(text="", reward=0.0, seconds=0.0, images=())
        arguments = {"answer": answer}
        request = ToolRequest("step", self._episode, number, ENVIRONMENT, arguments)
        result = _not_told(await self._in_order(request))
        if result.end or result.failure is not None:
            self._last = result
        return result

    async def end(self) -> ToolResult:
        """Return the rewards that tools have at the end of an episode, after its last call.

        Raises:
            ToolError: tools can't be run at all.
        """
        calls = [request.name for request in self._earlier if request.kind == "call"]
        if not any(self._pool.tools[name].ends for name in calls):
            return ToolResult(END, "")
        request = ToolRequest("end", self._episode, self._next_number(), END)
        return _not_told(await self._in_order(request))

    async def close(self) -> None:
        """Clean up what the episode has opened; once, and whatever has gone wrong."""
        if self._closed:
            return
        self._closed = True
        task = ToolTask(ToolRequest("close", self._episode), self._placement)
        with suppress(ToolError):  # the pool is closed: what was open has ended
            self._pool.backend.submit(task)
            await asyncio.shield(asyncio.wrap_future(task.future))

    def _next_number(self) -> int:
        if self._closed:
            raise ToolError(f"tools: the session of episode {self._number} is closed")
        return next(self._calls)

    def _checked(self, call: ToolCall) -> dict[str, Any]:
        """Return a call's arguments in the types that the tool expects.

        Raises:
            ArgumentsError: the call is none of a tool.
        """
        if call.error is not None:
            raise ArgumentsError(call.error)
        if call.name not in self._pool.tools:
            hint = closest(call.name, self._pool.tools)
            raise ArgumentsError(f"there is no tool {call.name!r}; {hint}")
        return check_arguments(self._pool.schema_of[call.name], call.arguments)

    async def _in_order(self, request: ToolRequest) -> ToolResult:
        """Run what makes state; calls that were made at the same time wait for each other."""
        async with self._lock:
            result = await self._journaled(request, lambda again: self._with_state(request, again))
            if result.failure in (None, "failed"):
                self._earlier.append(request)
            return result

    async def _with_state(self, request: ToolRequest, again: bool) -> ToolResult:
        # an environment that raised can't go on; a tool can
        is_fresh = self._is_spoilt or (again and request.kind == "step")
        self._is_spoilt = True
        task = ToolTask(request, self._placement, tuple(self._earlier), is_fresh=is_fresh)
        result = await self._submit(task)
        self._is_spoilt = False
        return result

    async def _submit(self, task: ToolTask) -> ToolResult:
        self._pool.backend.submit(task)
        return await asyncio.wrap_future(task.future)

    async def _journaled(self, request: ToolRequest, attempt: Attempt) -> ToolResult:
        """Return what the journal has, or run a call and note what came of it."""
        digest = call_digest(request.name, request.arguments or {})
        if self._journal is not None:
            recorded = self._journal.find(self._number, request.number, digest)
            if recorded is not None:
                return recorded
        result = await attempt(False)
        for _ in range(self._pool.config.tool_process.retries):
            if result.failure != "retry":
                break
            result = await attempt(True)
        if result.failure == "retry":
            result = result._replace(failure="broken")
        if self._journal is not None and result.failure != "broken":  # the next may be luckier
            self._journal.record(self._number, request.number, digest, result)
        return result

    async def _await(self, tool: LoadedTool, request: ToolRequest) -> ToolResult:
        """Run an async tool in this event loop."""
        began = time.monotonic()
        arguments = restore_types(tool.definition, copy.deepcopy(request.arguments or {}))
        given = self._awaited.given(tool.injected, self._timeout_s, request.number)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                value = await tool.function(**arguments, **given)
            result = to_result(value)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # we are asked to end, and not the tool
                raise
            result = failed_result(error, failure="failed", trace=format_trace(error))
        except Exception as error:
            if limit.expired() and isinstance(error, TimeoutError):
                text = f"no answer within {self._timeout_s:g} s"
                told = error_text(text)
                result = ToolResult("", told, failure="timeout", error="timeout", trace=text)
            else:
                failure = "retry" if isinstance(error, INFRASTRUCTURE) else "failed"
                result = failed_result(error, failure=failure, trace=format_trace(error))
        if result.error:
            self._pool.failures.note(tool.name, result.error, result.trace)
        seconds = time.monotonic() - began
        return result._replace(name=tool.name, seconds=seconds, error="", trace="")


def _not_told(result: ToolResult) -> ToolResult:
    """Return a result whose failure, if any, is never the model's fault."""
    failed = result.failure in ("timeout", "died", "failed")
    return result._replace(failure="broken") if failed else result


class SessionPool:
    """Runs the tools and environments of episodes; a context manager.

    A tool is a plain function, which runs in worker processes; an `async def`, which runs in the
    trainer's event loop; or a generator function, which is opened once for each episode and yields
    the function to call: what stands before the `yield` is set-up, what follows is clean-up.

        def notes(*, size=10):
            book = []
            def note(text: str) -> str:
                '''Write a note.

                Args:
                    text: of the note.
                '''
                book.append(text)
                return "; ".join(book[-size:])
            yield note
            book.clear()

    Parameters named `state` (a dict for the episode), `row` (an `EpisodeRow`), `rng` (a
    `random.Random` seeded by the episode and the call) and `seconds` (the time limit) are passed by
    the trainer and hidden from the model, as are those that the config gives and those that can
    only be given by keyword. Async tools of an episode share a `state`, and the others another one.

    An environment is a generator function; it asks by name for these and for `ground_truth`,
    `extra_info` and `data_source`, and its other parameters are the config's:

        def guess(ground_truth, rng, *, high=63):
            answer = yield Observation("Guess.")
            while answer != ground_truth:
                answer = yield Observation("No.", reward=-0.1)
            return 1.0

    Args:
        config: what episodes may call, and the processes that run it.
        example_row: with which generator functions are opened to see what they yield.

    Attributes:
        config: the same.
        tools: by name, in the config's order.
        schema_of: what the model is told of each, by name.
        schemas: the same as a list.
        backend: runs what is not async.
        failures: counts of what went wrong.

    Raises:
        ConfigError: a function can't be found, or lacks types, a docstring or a value.
        ToolError: no worker starts.
    """

    def __init__(self, config: AgentConfig, *, example_row: EpisodeRow | None = None) -> None:
        self.config, self.failures = config, FailureLog()
        loaded = [(given, tool) for given in config.tools for tool in load_tools(given)]
        self.tools = {tool.name: tool for _, tool in loaded}
        for _, tool in loaded:
            if self.tools[tool.name] is not tool:
                raise ConfigError(f"{TOOLS_KEY}: got two tools {tool.name!r}, expected one")
        if config.environment is not None:
            load_environment(config.environment)
        for given in config.tools:
            prepare_tool(given)
        process = config.tool_process
        make_toolbox = functools.partial(
            Toolbox,
            tuple(g for g in config.tools if any(of is g and not t.is_async for of, t in loaded)),
            config.environment,
            process.timeout_s,
            example_row or EpisodeRow(0),
        )
        self.backend: ToolWorkers | InProcess
        if process.workers:
            bounds_own = any(starts_processes(tool.definition, of.kwargs) for of, tool in loaded)
            most = None if bounds_own else process.max_processes
            limits = Limits(process.memory_gb, most, process.pass_env)
            self.backend = ToolWorkers(
                make_toolbox, process.workers, process.timeout_s, limits, self.failures.note
            )
        else:
            self.backend = InProcess(make_toolbox(), self.failures.note)
        self._finalizer = weakref.finalize(self, self.backend.close)  # at exit, too
        try:
            self.schema_of = {tool.name: self._schema(tool, given) for given, tool in loaded}
        except BaseException:
            self.close()
            raise
        self.schemas = list(self.schema_of.values())

    def __enter__(self) -> "SessionPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self, number: int, row: EpisodeRow, seed: int, journal: Journal | None) -> Session:
        """Return what an episode calls its tools and its environment by.

        Args:
            number: of the episode, by which the journal knows it.
            row: that it is about.
            seed: of the episode's random numbers.
            journal: keeps the results; None keeps none.
        """
        return Session(self, number, row, seed, journal)

    def close(self) -> None:
        """End all workers at once, whatever they do. Calls that wait get `ToolError`."""
        if self._finalizer.alive:
            self._finalizer()
            self.failures.log_counts()

    def _schema(self, tool: LoadedTool, spec: FunctionSpec) -> dict[str, Any]:
        if tool.schema is not None:
            return tool.schema
        if not tool.is_fixture:
            return tool_schema(tool.definition, tool.name, hidden=spec.kwargs, key=TOOLS_KEY)
        task = ToolTask(ToolRequest("schema", name=tool.name))
        self.backend.submit(task)
        result = task.future.result()
        if result.failure is not None:
            text = result.text.removeprefix("error: ")
            if not text.startswith(TOOLS_KEY):
                text = f"{TOOLS_KEY}: tool {tool.name!r} can't be opened: {text}"
            raise ConfigError(text)
        return json.loads(result.text)
