"""The calls of one episode: checked, answered or read from the journal, tried again."""

import asyncio
import copy
import itertools
import json
import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, closest
from jaxrl_llm.data.call_formats import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.builtin import starts_processes
from jaxrl_llm.rollout.tools.crew import Crew, InProcess, Job, Seat
from jaxrl_llm.rollout.tools.journal import Journal, call_digest
from jaxrl_llm.rollout.tools.tool import (
    TOOLS_KEY,
    ArgumentsError,
    LoadedTool,
    ToolError,
    ToolResult,
    check_arguments,
    load_environment,
    load_tools,
    prepare_tool,
    restore_types,
    tool_schema,
)
from jaxrl_llm.rollout.tools.worker import (
    ENVIRONMENT,
    INFRASTRUCTURE,
    OpenEpisode,
    ToolAnswer,
    ToolboxSpec,
    ToolRequest,
    error_text,
    failed_answer,
    format_trace,
    to_answer,
)
from jaxrl_llm.workers.limits import DEFAULT_LIMITS, Limits, check_limits

log = logging.getLogger(__name__)


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
_seat_numbers = itertools.count()  # two sessions may have the same number, one after the other

UNKNOWN_TOOL = "unknown"
"""The name of all tools that there are not, which a model may make up without end."""

Attempt = Callable[[bool], Awaitable[ToolAnswer]]
"""Runs a call; told whether an earlier attempt has failed."""


class SessionParts(NamedTuple):
    """What the sessions of a pool share: what runs requests, the tools, limits, counts."""

    backend: Crew | InProcess
    tools: Mapping[str, LoadedTool]
    schemas: Mapping[str, dict[str, Any]]
    has_environment: bool
    timeout_s: float
    retries: int
    failures: FailureLog


class Session:
    """The calls of one episode; all methods run in one event loop.

    Calls and steps are numbered in the order in which they are made. The number decides the random
    numbers that a call gets, and its place in the journal.

    Args:
        parts: of the pool.
        number: of the episode.
        row: that it is about.
        seed: of its random numbers.
        journal: keeps the results; None keeps none.
    """

    def __init__(
        self,
        parts: SessionParts,
        number: int,
        row: EpisodeRow,
        seed: int,
        journal: Journal | None,
    ) -> None:
        self._parts, self._number, self._journal = parts, number, journal
        self._row, self._seed = row, seed
        self._calls = itertools.count()
        self._seat = Seat(next(_seat_numbers), row, seed)
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
            name = call.name if call.name in self._parts.tools else UNKNOWN_TOOL
            return ToolResult(name, error_text(str(error)), failure="failed")
        tool = self._parts.tools[call.name]
        request = ToolRequest("call", self._seat.episode, number, tool.name, arguments)
        if tool.is_stateful and not tool.is_async:
            return await self._in_order(request)
        if tool.is_async:
            return await self._journaled(request, lambda _: self._await(tool, request))
        alone = request._replace(episode=-1, seed=self._seed)
        if "row" in tool.injected:
            alone = alone._replace(row=self._row)
        return await self._journaled(alone, lambda _: self._submit(alone, seat=None))

    async def step(self, answer: str | None) -> ToolResult:
        """Tell the environment what the model said, and return what it says.

        After its end it says nothing more.

        Args:
            answer: of the model; None to begin.

        Raises:
            ValueError: there is no environment, or it has begun already or not yet.
            ToolError: environments can't be run at all.
        """
        if not self._parts.has_environment or (answer is None) == self._begun:
            expected = "step(None) first, then answers" if self._parts.has_environment else "none"
            raise ValueError(f"environment: got step({answer!r}), expected {expected}")
        number = self._next_number()
        self._begun = True
        if self._last is not None:
            return self._last._replace(text="", reward=0.0, seconds=0.0, images=())
        arguments = {"answer": answer}
        request = ToolRequest("step", self._seat.episode, number, ENVIRONMENT, arguments)
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
        if not any(self._parts.tools[name].ends for name in calls):
            return ToolResult(END, "")
        request = ToolRequest("end", self._seat.episode, self._next_number(), END)
        return _not_told(await self._in_order(request))

    async def close(self) -> None:
        """Clean up what the episode has opened; once, and whatever has gone wrong."""
        if self._closed:
            return
        self._closed = True
        future = Future[ToolAnswer]()
        request = ToolRequest("close", self._seat.episode)
        try:
            self._parts.backend.submit(Job(request, future, self._seat))
            await asyncio.shield(asyncio.wrap_future(future))
        except ToolError:
            pass  # the pool is closed: what was open has ended

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
        if call.name not in self._parts.tools:
            hint = closest(call.name, self._parts.tools)
            raise ArgumentsError(f"there is no tool {call.name!r}; {hint}")
        return check_arguments(self._parts.schemas[call.name], call.arguments)

    async def _in_order(self, request: ToolRequest) -> ToolResult:
        """Run what makes state; calls that were made at the same time wait for each other."""
        async with self._lock:
            result = await self._journaled(request, lambda again: self._with_state(request, again))
            if result.failure in (None, "failed"):
                self._earlier.append(request)
            return result

    async def _with_state(self, request: ToolRequest, again: bool) -> ToolAnswer:
        # an environment that raised can't go on; a tool can
        is_fresh = self._is_spoilt or (again and request.kind == "step")
        self._is_spoilt = True
        answer = await self._submit(request, seat=self._seat, is_fresh=is_fresh)
        self._is_spoilt = False
        return answer

    async def _submit(
        self, request: ToolRequest, *, seat: Seat | None, is_fresh: bool = False
    ) -> ToolAnswer:
        future = Future[ToolAnswer]()
        earlier = tuple(self._earlier) if seat is not None else ()
        self._parts.backend.submit(Job(request, future, seat, earlier, is_fresh))
        return await asyncio.wrap_future(future)

    async def _journaled(self, request: ToolRequest, attempt: Attempt) -> ToolResult:
        """Return what the journal has, or run a call and note what came of it."""
        digest = call_digest(request.name, request.arguments or {})
        if self._journal is not None:
            recorded = self._journal.find(self._number, request.number, digest)
            if recorded is not None:
                return recorded
        answer = await attempt(False)
        for _ in range(self._parts.retries):
            if answer.failure != "retry":
                break
            answer = await attempt(True)
        failure = "broken" if answer.failure == "retry" else answer.failure
        result = ToolResult(
            *(request.name, answer.text, answer.reward, answer.end),
            *(failure, answer.score, answer.seconds, answer.images),
        )
        if self._journal is not None and failure != "broken":  # the next attempt may be luckier
            self._journal.record(self._number, request.number, digest, result)
        return result

    async def _await(self, tool: LoadedTool, request: ToolRequest) -> ToolAnswer:
        """Run an async tool in this event loop."""
        began = time.monotonic()
        arguments = restore_types(tool.definition, copy.deepcopy(request.arguments or {}))
        given = self._awaited.given(tool.injected, self._parts.timeout_s, request.number)
        limit = asyncio.timeout(self._parts.timeout_s)
        try:
            async with limit:
                value = await tool.function(**arguments, **given)
            answer = to_answer(value)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # we are asked to end, and not the tool
                raise
            answer = failed_answer(error, failure="failed", trace=format_trace(error))
        except Exception as error:
            answer = self._raised(error, is_late=limit.expired())
        if answer.error:
            self._parts.failures.note(tool.name, answer.error, answer.trace)
        return answer._replace(seconds=time.monotonic() - began)

    def _raised(self, error: Exception, *, is_late: bool) -> ToolAnswer:
        if is_late and isinstance(error, TimeoutError):
            text = f"no answer within {self._parts.timeout_s:g} s"
            return ToolAnswer(error_text(text), failure="timeout", error="timeout", trace=text)
        failure = "retry" if isinstance(error, INFRASTRUCTURE) else "failed"
        return failed_answer(error, failure=failure, trace=format_trace(error))


def _not_told(result: ToolResult) -> ToolResult:
    """Return a result whose failure, if any, is never the model's fault."""
    failed = result.failure in ("timeout", "died", "failed")
    return result._replace(failure="broken") if failed else result


__all__ = ["Session", "SessionPool", "SessionSettings", "ToolError", "ToolResult"]


class SessionSettings(NamedTuple):
    """What episodes may call, and how it is run.

    Attributes:
        tools: functions; bare names are those of `jaxrl_llm.rollout.tools.builtin`.
        environment: a generator function; a bare name is one of
            `jaxrl_llm.rollout.agents.environments`.
        workers: processes that run what is not async; 0 runs it in this process, without time
            limit.
        timeout_s: seconds that one call or step may take.
        retries: how often a call is tried again whose infrastructure failed.
        limits: of each process.
    """

    tools: tuple[FunctionSpec, ...]
    environment: FunctionSpec | None = None
    workers: int = 2
    timeout_s: float = 10.0
    retries: int = 2
    limits: Limits = DEFAULT_LIMITS


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
        settings: what episodes may call.
        example_row: with which generator functions are opened to see what they yield.

    Attributes:
        schemas: what the model is told of the tools, in the config's order.
        failures: counts of what went wrong.

    Raises:
        ConfigError: a function can't be found, or lacks types, a docstring or a value.
        ValueError: a number out of range.
        ToolError: no worker starts.
    """

    schemas: list[dict[str, Any]]

    def __init__(self, settings: SessionSettings, *, example_row: EpisodeRow | None = None) -> None:
        _check_settings(settings)
        self.failures = FailureLog()
        loaded = [(given, load_tools(given)) for given in settings.tools]
        tools = [tool for _, several in loaded for tool in several]
        self._tools = {tool.name: tool for tool in tools}
        for tool in tools:
            if self._tools[tool.name] is not tool:
                raise ConfigError(f"{TOOLS_KEY}: got two tools {tool.name!r}, expected one")
        if settings.environment is not None:
            load_environment(settings.environment)
        for given in settings.tools:
            prepare_tool(given)
        spec = ToolboxSpec(
            tuple(given for given, several in loaded if not all(t.is_async for t in several)),
            settings.environment,
            float(settings.timeout_s),
            example_row or EpisodeRow(0),
        )
        self._settings = settings
        self._backend: Crew | InProcess
        if settings.workers:
            limits = settings.limits
            if any(
                starts_processes(t.definition, s.kwargs) for s, several in loaded for t in several
            ):
                limits = limits._replace(max_processes=None)
            self._backend = Crew(spec, settings.workers, limits, self.failures.note)
        else:
            self._backend = InProcess(spec, self.failures.note)
        self._finalizer = weakref.finalize(self, self._backend.close)  # at exit, too
        try:
            self.schemas = [
                self._schema(tool, given) for given, several in loaded for tool in several
            ]
        except BaseException:
            self.close()
            raise

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
        parts = SessionParts(
            self._backend,
            self._tools,
            {schema["function"]["name"]: schema for schema in self.schemas},
            self._settings.environment is not None,
            float(self._settings.timeout_s),
            self._settings.retries,
            self.failures,
        )
        return Session(parts, number, row, seed, journal)

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
        future = Future[ToolAnswer]()
        self._backend.submit(Job(ToolRequest("schema", name=tool.name), future))
        answer = future.result()
        if answer.failure is not None:
            text = answer.text.removeprefix("error: ")
            if not text.startswith(TOOLS_KEY):
                text = f"{TOOLS_KEY}: tool {tool.name!r} can't be opened: {text}"
            raise ConfigError(text)
        return json.loads(answer.text)


def _check_settings(settings: SessionSettings) -> None:
    check_limits(settings.limits, "rollout")
    timeout_s, workers, retries = settings.timeout_s, settings.workers, settings.retries
    if workers < 0 or retries < 0 or not 0 < timeout_s < math.inf:
        raise ValueError(
            "rollout: expected workers >= 0, retries >= 0 and a positive time limit of tools, got"
            f" workers={workers}, retries={retries}, timeout_s={timeout_s}"
        )
