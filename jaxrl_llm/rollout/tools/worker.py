"""The worker side of the pool of tools: load them, then answer requests until told to stop.

A worker is the child of a fresh interpreter, its supervisor, and runs `run_tools`. It imports
neither jax nor the program that started it.
"""

import base64
import functools
import inspect
import io
import json
import random
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.observation import BrokenTool, EpisodeRow, FailedTool, Observation
from jaxrl_llm.rollout.tools.tool import (
    ENVIRONMENT_NAMES,
    TOOLS_KEY,
    LoadedTool,
    ToolResult,
    injected_names,
    load_environment,
    load_tools,
    read_result,
    restore_types,
    tool_schema,
)
from jaxrl_llm.workers.protocol import (
    Serve,
    answering_in_turn,
    finite_number,
    memory_limit,
    serve_requests,
    short_repr,
    shorten,
    to_plain,
)

KEYS = "rollout.tool_process."  # how the config's keys for the limits begin
MAX_RESULT_CHARS = 1_000_000
MAX_IMAGE_CHARS = 16_000_000  # of all images of a result, in base64
MAX_TRACE_CHARS = 4000
INFRASTRUCTURE = (BrokenTool, ConnectionError)
"""What is nobody's fault, and tried again."""


class ToolboxSpec(NamedTuple):
    """What a worker is told first: the tools, the environment, a call's time limit."""

    tools: tuple[FunctionSpec, ...]
    environment: FunctionSpec | None
    seconds: float
    example_row: EpisodeRow


class ToolRequest(NamedTuple):
    """What a worker is asked.

    Attributes:
        kind: `open` or `close` an episode, `call` a tool, `step` the environment, `end` the tools
            that were called, or tell the `schema` of a tool.
        episode: its number.
        number: of the call or step in its episode.
        name: of the tool.
        arguments: of the tool; `answer` of a step.
        row: of the episode, where it is opened, or where a call needs no opened one.
        seed: of the episode, likewise.
    """

    kind: str
    episode: int = -1
    number: int = 0
    name: str = ""
    arguments: dict[str, Any] | None = None
    row: EpisodeRow | None = None
    seed: int = 0


class ResultError(ValueError):
    """A tool or an environment gave something that can't be told; the message says what."""


def to_result(value: Any) -> ToolResult:
    """Return what a tool or an environment gave as it is told.

    Raises:
        ResultError: it is no text, no image and no plain data, too long, or the reward is no
            finite number.

    >>> to_result({"sum": 3}).text, to_result(Observation("no", reward=-1)).reward
    ('{"sum": 3}', -1.0)
    """
    observation = value if isinstance(value, Observation) else Observation(value)
    text, images = _to_parts(observation.text)
    if len(text) > MAX_RESULT_CHARS:
        raise ResultError(f"the result has {len(text)} characters, of {MAX_RESULT_CHARS} allowed")
    if (size := sum(len(image) for _, image in images)) > MAX_IMAGE_CHARS:
        raise ResultError(
            f"the images of the result have {size} characters in base64, of {MAX_IMAGE_CHARS} "
            "allowed"
        )
    reward = checked_number(observation.reward, "reward")
    return ToolResult("", text, reward, bool(observation.end), images=images)


def _to_parts(value: Any) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return what is told as a text, and as images with their places in it."""
    items = [_of_part(item) for item in value] if isinstance(value, list | tuple) else [value]
    if not any(map(_is_image, items)):
        return _to_text(value), ()
    text, images, after_text = "", list[tuple[int, str]](), False
    for item in items:
        if _is_image(item):
            images.append((len(text), _encode_image(item)))
        else:
            text += "\n" * after_text + _to_text(item)
        after_text = not _is_image(item)
    return text, tuple(images)


def _of_part(item: Any) -> Any:
    """Return what a typed part of a message holds; anything else as it is."""
    kind = item.get("type") if isinstance(item, dict) else None
    return item.get(kind, item) if kind in ("text", "image") else item


def _is_image(value: Any) -> bool:
    if isinstance(value, bytes):
        return True
    shape = getattr(value, "shape", ())
    if len(shape) == 3 and shape[2] in (3, 4):
        return str(getattr(value, "dtype", "")) == "uint8"
    pillow = sys.modules.get("PIL.Image")  # where it is not, there are none of its images
    return pillow is not None and isinstance(value, pillow.Image)


def _encode_image(value: Any) -> str:
    """Return an image as the base64 of a file; PIL's and arrays as PNG."""
    if not isinstance(value, bytes):
        from PIL import Image

        try:
            image = value if isinstance(value, Image.Image) else Image.fromarray(value)
            kept = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA")
            file = io.BytesIO()
            (image if kept else image.convert("RGB")).save(file, "PNG", compress_level=1)
        except (OSError, ValueError, TypeError) as error:
            raise ResultError(f"an image of the result can't be encoded: {error}") from None
        value = file.getvalue()
    return base64.b64encode(value).decode()


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=to_plain)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ResultError(
                f"expected text or plain data as result, got a {type(value).__name__}: {error}"
            ) from None
    return value.encode("utf-8", "replace").decode()


def checked_number(value: Any, name: str) -> float:
    """Return a number that a function gave.

    Raises:
        ResultError: it is none, or not finite.

    >>> checked_number(True, "reward")
    1.0
    """
    if (number := finite_number(value)) is None:
        raise ResultError(f"expected a finite number (float32) as {name}, got {short_repr(value)}")
    return number


def error_text(message: str) -> str:
    """Return what the model is told of a failure, on one line.

    >>> error_text("KeyError: 'x'")
    "error: KeyError: 'x'"
    """
    return f"error: {shorten(' '.join(message.split()))}".encode("utf-8", "replace").decode()


def failed_result(error: BaseException, *, failure: str, trace: str = "") -> ToolResult:
    """Return the result where something was raised."""
    if isinstance(error, FailedTool):
        text = shorten(error.text, MAX_RESULT_CHARS).encode("utf-8", "replace").decode()
        trace = text[-MAX_TRACE_CHARS:]
        return ToolResult(text=text, failure=failure, error=error.kind, trace=trace)
    kind, message = type(error).__name__, str(error)
    if isinstance(error, ResultError):
        kind = "result"
    else:
        message = f"{kind}: {error}" if message.strip() else kind
    return ToolResult(text=error_text(message), failure=failure, error=kind, trace=trace)


def format_trace(error: BaseException, memory_gb: float | None = None) -> str:
    """Return a traceback, its middle left out where it is long."""
    traceback.clear_frames(error.__traceback__)  # they may hold all memory that we may take
    text = "".join(traceback.format_exception(error)).rstrip()
    return shorten(text, MAX_TRACE_CHARS) + memory_limit(error, memory_gb, KEYS)


ENVIRONMENT = "environment"
CLEAN_UP = "clean-up"
DONE = object()


class SetUpError(Exception):
    """A tool that is opened for each episode could not be."""


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
        """Return the values of reserved names that a function asks for.

        Args:
            names: that it asks for.
            seconds: the time limit.
            key: of its random numbers: the number of a call, or the name of what is opened.
        """
        values = {"state": self.state, "row": self.row, "seconds": seconds}
        if "rng" in names:
            values["rng"] = random.Random(f"{self.seed} {key}")
        return {n: values[n] if n in values else getattr(self.row, n) for n in names}

    def close(self) -> list[BaseException]:
        """Clean up, once, whatever was opened; return what that raised."""
        actions = [] if self.environment is None else [self.environment.close]
        opened = reversed(self.tools.values())
        actions += [functools.partial(_finish, generator) for generator, _ in opened]
        self.environment, self.tools = None, {}
        errors: list[BaseException] = []
        for action in actions:
            try:
                action()
            except (Exception, SystemExit) as error:
                errors.append(error)
        return errors


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

    def answer(self, request: ToolRequest) -> ToolResult:
        """Do what is asked; whatever the functions raise is part of the result."""
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

    def _failed(self, request: ToolRequest, error: BaseException, *, failure: str) -> ToolResult:
        if isinstance(error, INFRASTRUCTURE):
            failure = "retry"
        key = (request.name, type(error).__name__)
        trace = "" if key in self._traced else format_trace(error, self._memory_gb)
        self._traced.add(key)
        return failed_result(error, failure=failure, trace=trace)

    def _cleaned_up(self, errors: list[BaseException]) -> ToolResult:
        if not errors:
            return ToolResult()
        return ToolResult(error=CLEAN_UP, trace="\n".join(format_trace(error) for error in errors))

    def _new_episode(self, request: ToolRequest) -> OpenEpisode:
        return OpenEpisode(request.row or self._example_row, request.seed)

    def _close(self, number: int) -> list[BaseException]:
        episode = self._episodes.pop(number, None)
        return [] if episode is None else episode.close()

    def _call(self, request: ToolRequest) -> ToolResult:
        tool = self._tools[request.name]
        episode = self._episodes.get(request.episode) or self._new_episode(request)
        function, names = tool.function, tool.injected
        if tool.is_fixture:
            function = self._opened(episode, tool)
            names = tuple(injected_names(function))
        given = episode.given(names, self._seconds, request.number)
        return to_result(function(**restore_types(function, request.arguments or {}), **given))

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

    def _step(self, request: ToolRequest) -> ToolResult:
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
            return ToolResult(end=True, score=score)
        return to_result(value)

    def _end(self, request: ToolRequest) -> ToolResult:
        """Return the rewards at an episode's end of the tools that it has called."""
        opened = self._episodes[request.episode].tools.items()
        rewards = [
            checked_number(vars(function)["end"](), "reward")
            for name, (_, function) in opened
            if self._tools[name].ends
        ]
        return ToolResult(reward=sum(rewards))

    def _schema(self, request: ToolRequest) -> ToolResult:
        tool, episode = self._tools[request.name], OpenEpisode(self._example_row, request.seed)
        try:
            schema = tool_schema(self._opened(episode, tool), tool.name, key=TOOLS_KEY)
        except ConfigError as error:
            return ToolResult(text=str(error), failure="failed")
        finally:
            errors = episode.close()
        return self._cleaned_up(errors)._replace(text=json.dumps(schema))


FAILURES = (None, "failed", "broken", "retry")


def encode_tool_result(number: int, result: ToolResult) -> bytes:
    """Return the line that tells the pool what came of a request.

    >>> encode_tool_result(3, ToolResult("", "4"))[:37]
    b'{"number": 3, "name": "", "text": "4"'
    """
    return json.dumps({"number": number, **result._asdict()}).encode() + b"\n"


def decode_tool_result(line: bytes, number: int) -> ToolResult | None:
    """Return what a line tells of a request; None where it is no answer to this request.

    Nothing is taken on trust: a tool may have written the line itself.

    >>> decode_tool_result(encode_tool_result(3, ToolResult("", "4")), 3).text
    '4'
    >>> decode_tool_result(b"garbage", 3)
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or type(fields.get("number")) is not int:
        return None
    if fields.pop("number") != number or (result := read_result(fields)) is None:
        return None
    sound = (
        len(result.text) <= MAX_RESULT_CHARS
        and sum(len(image) for _, image in result.images) <= MAX_IMAGE_CHARS
        and all(place <= len(result.text) for place, _ in result.images)
        and result.failure in FAILURES
    )
    if not sound:
        return None
    trace = result.trace[-2 * MAX_TRACE_CHARS :]
    return result._replace(text=result.text.encode("utf-8", "replace").decode(), trace=trace)


def run_tools(fd: int, *, memory_gb: float | None) -> None:
    """Answer lists of `(number, ToolRequest)` until the pool closes the connection.

    The pool sends a `ToolboxSpec` first.

    Args:
        fd: the file descriptor of our end of the connection.
        memory_gb: what this process may take, for messages.
    """

    def load(spec: ToolboxSpec) -> Serve:
        toolbox = Toolbox(spec, memory_gb=memory_gb)

        def answer(number: int, request: ToolRequest) -> bytes:
            return encode_tool_result(number, toolbox.answer(request))

        return answering_in_turn(answer)

    def describe(error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error) + memory_limit(error.__cause__, memory_gb, KEYS)
        return f"{type(error).__name__}: {error}{memory_limit(error, memory_gb, KEYS)}"

    serve_requests(fd, load, describe)
