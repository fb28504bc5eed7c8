"""Tools and environments of episodes, as the trainer sees them."""

import json
import math
import weakref
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.answers import ToolAnswer, ToolboxSpec, ToolRequest
from jaxrl_llm.rollout.tools.code import starts_processes
from jaxrl_llm.rollout.tools.crew import Crew, InProcess, Job
from jaxrl_llm.rollout.tools.failures import FailureLog
from jaxrl_llm.rollout.tools.journal import Journal
from jaxrl_llm.rollout.tools.loading import (
    TOOLS_KEY,
    LoadedTool,
    load_environment,
    load_tools,
    prepare_tool,
)
from jaxrl_llm.rollout.tools.results import ToolError, ToolResult
from jaxrl_llm.rollout.tools.session import Session, SessionParts
from jaxrl_llm.rollout.tools.signature import tool_schema
from jaxrl_llm.workers.limits import DEFAULT_LIMITS, Limits, check_limits

__all__ = ["Session", "SessionPool", "SessionSettings", "ToolError", "ToolResult"]


class SessionSettings(NamedTuple):
    """What episodes may call, and how it is run.

    Attributes:
        tools: functions; bare names are those of `jaxrl_llm.rollout.tools.functions`.
        environment: a generator function; a bare name is one of `jaxrl_llm.rollout.environments`.
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
