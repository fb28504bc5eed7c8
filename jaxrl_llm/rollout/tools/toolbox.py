"""Tools and environments where they run: opened, called and closed.

Worker processes import this: no array library.
"""

import inspect
import json
import random
from collections.abc import Callable, Generator
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.answers import (
    INFRASTRUCTURE,
    ToolAnswer,
    ToolboxSpec,
    ToolRequest,
    checked_number,
    failed_answer,
    format_trace,
    to_answer,
)
from jaxrl_llm.rollout.tools.loading import (
    ENVIRONMENT_NAMES,
    TOOLS_KEY,
    LoadedTool,
    load_environment,
    load_tools,
)
from jaxrl_llm.rollout.tools.signature import injected_names, restore_types, tool_schema

ENVIRONMENT = "environment"
CLEAN_UP = "clean-up"
DONE = object()


class SetUpError(Exception):
    """A tool that is opened for each episode could not be."""


def make_rng(seed: int, name: str | int) -> random.Random:
    """Return the random numbers of a call, by its number, or of what is opened, by its name."""
    return random.Random(f"{seed} {name}")


class OpenEpisode:
    """What lives in a worker for an episode.

    Args:
        row: of data.
        seed: of the episode.
    """

    def __init__(self, row: EpisodeRow, seed: int) -> None:
        self.row, self.seed = row, seed
        self.state: dict[str, Any] = {}
        self.tools: dict[str, tuple[Generator[Any, None, None], Callable[..., Any]]] = {}
        self.environment: Generator[Any, Any, Any] | None = None

    def given(self, names: tuple[str, ...], seconds: float, key: str | int) -> dict[str, Any]:
        """Return the values of reserved names that a function asks for."""
        row = self.row
        values = {
            **{"state": self.state, "row": row, "seconds": seconds},
            **{"ground_truth": row.ground_truth, "extra_info": row.extra_info},
            **{"data_source": row.data_source},
        }
        if "rng" in names:
            values["rng"] = make_rng(self.seed, key)
        return {name: values[name] for name in names}

    def close(self) -> list[BaseException]:
        """Clean up, once, whatever was opened; return what that raised."""
        errors: list[BaseException] = []
        if self.environment is not None:
            _collect(errors, self.environment.close)
        for generator, _ in reversed(self.tools.values()):
            _collect(errors, lambda generator=generator: _finish(generator))
        self.environment, self.tools = None, {}
        return errors


def _collect(errors: list[BaseException], action: Callable[[], None]) -> None:
    try:
        action()
    except (Exception, SystemExit) as error:
        errors.append(error)


def _finish(generator: Generator[Any, None, None]) -> None:
    if next(generator, DONE) is not DONE:
        generator.close()
        raise RuntimeError("it yields twice; expected one yield, of the function to call")


class Toolbox:
    """The tools and the environment of a worker, and the episodes that live there.

    Args:
        spec: names them.
        memory_gb: what the process may take, for messages; None where nothing limits it.

    Raises:
        ConfigError: a function can't be loaded.
    """

    def __init__(self, spec: ToolboxSpec, *, memory_gb: float | None = None) -> None:
        self._tools = {tool.name: tool for given in spec.tools for tool in load_tools(given)}
        self._environment = spec.environment and load_environment(spec.environment)
        self._seconds, self._example_row = spec.seconds, spec.example_row
        self._memory_gb = memory_gb
        self._episodes: dict[int, OpenEpisode] = {}
        self._traced: set[tuple[str, str]] = set()

    def answer(self, request: ToolRequest) -> ToolAnswer:
        """Do what is asked; whatever the functions raise is part of the answer."""
        try:
            match request.kind:
                case "open":
                    errors = self._close(request.episode)
                    self._episodes[request.episode] = self._new_episode(request)
                    return self._cleaned_up(errors)
                case "close":
                    return self._cleaned_up(self._close(request.episode))
                case "call":
                    return self._call(request)
                case "step":
                    return self._step(request)
                case "end":
                    return self._end(request)
                case _:
                    return self._schema(request)
        except SetUpError as error:
            cause = error.__cause__ or error
            return self._failed(request, cause, failure="broken")
        except (Exception, SystemExit) as error:
            failure = "broken" if request.kind in ("step", "end") else "failed"
            return self._failed(request, error, failure=failure)

    def close(self) -> list[BaseException]:
        """Clean up all episodes; return what that raised."""
        return [error for number in list(self._episodes) for error in self._close(number)]

    def _failed(self, request: ToolRequest, error: BaseException, *, failure: str) -> ToolAnswer:
        if isinstance(error, INFRASTRUCTURE):
            failure = "retry"
        key = (request.name, type(error).__name__)
        trace = "" if key in self._traced else format_trace(error, self._memory_gb)
        self._traced.add(key)
        return failed_answer(error, failure=failure, trace=trace)

    def _cleaned_up(self, errors: list[BaseException]) -> ToolAnswer:
        if not errors:
            return ToolAnswer()
        return ToolAnswer(error=CLEAN_UP, trace="\n".join(format_trace(error) for error in errors))

    def _new_episode(self, request: ToolRequest) -> OpenEpisode:
        return OpenEpisode(request.row or self._example_row, request.seed)

    def _close(self, number: int) -> list[BaseException]:
        episode = self._episodes.pop(number, None)
        return [] if episode is None else episode.close()

    def _call(self, request: ToolRequest) -> ToolAnswer:
        tool = self._tools[request.name]
        episode = self._episodes.get(request.episode) or self._new_episode(request)
        function, names = tool.function, tool.injected
        if tool.is_fixture:
            function = self._opened(episode, tool)
            names = tuple(injected_names(function))
        given = episode.given(names, self._seconds, request.number)
        return to_answer(function(**restore_types(function, request.arguments or {}), **given))

    def _opened(self, episode: OpenEpisode, tool: LoadedTool) -> Callable[..., Any]:
        """Return the function that a tool yields for an episode, after its set-up."""
        if tool.name not in episode.tools:
            try:
                generator = tool.function(**episode.given(tool.injected, self._seconds, tool.name))
                function = next(generator, None)
            except (Exception, SystemExit) as error:
                raise SetUpError from error
            if not callable(function) or inspect.iscoroutinefunction(function):
                generator.close()
                raise SetUpError(f"{tool.name}: expected it to yield a def, got {function!r}")
            episode.tools[tool.name] = generator, function
        return episode.tools[tool.name][1]

    def _step(self, request: ToolRequest) -> ToolAnswer:
        episode = self._episodes[request.episode]
        assert self._environment is not None, "the pool refuses steps without one"
        try:
            if episode.environment is None:
                names = tuple(injected_names(self._environment, ENVIRONMENT_NAMES))
                given = episode.given(names, self._seconds, ENVIRONMENT)
                episode.environment = self._environment(**given)
                value = next(episode.environment)
            else:
                value = episode.environment.send((request.arguments or {})["answer"])
        except StopIteration as stop:
            score = None if stop.value is None else checked_number(stop.value, "score")
            return ToolAnswer(end=True, score=score)
        return to_answer(value)

    def _end(self, request: ToolRequest) -> ToolAnswer:
        """Return the rewards at an episode's end of the tools that it has called."""
        opened = self._episodes[request.episode].tools.items()
        rewards = [
            checked_number(vars(function)["end"](), "reward")
            for name, (_, function) in opened
            if self._tools[name].ends
        ]
        return ToolAnswer(reward=sum(rewards))

    def _schema(self, request: ToolRequest) -> ToolAnswer:
        tool, episode = self._tools[request.name], OpenEpisode(self._example_row, request.seed)
        try:
            schema = tool_schema(self._opened(episode, tool), tool.name, key=TOOLS_KEY)
        except ConfigError as error:
            return ToolAnswer(str(error), failure="failed")
        finally:
            errors = episode.close()
        return self._cleaned_up(errors)._replace(text=json.dumps(schema))
