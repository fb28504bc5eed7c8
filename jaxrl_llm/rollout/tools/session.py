"""The calls of one episode: checked, answered or read from the journal, tried again."""

import asyncio
import copy
import itertools
import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, closest
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.call_formats import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.builtin import starts_processes
from jaxrl_llm.rollout.tools.journal import Journal, call_digest
from jaxrl_llm.rollout.tools.pool import InProcess, Placement, ToolTask, ToolWorkers
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
    ToolboxSpec,
    ToolRequest,
    error_text,
    failed_result,
    format_trace,
    to_result,
)
from jaxrl_llm.workers.limits import Limits

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
        self,
        pool: "SessionPool",
        number: int,
        row: EpisodeRow,
        seed: int,
        journal: Journal | None,
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
        spec = ToolboxSpec(
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
            self.backend = ToolWorkers(spec, process.workers, limits, self.failures.note)
        else:
            self.backend = InProcess(spec, self.failures.note)
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
