"""What workers of tools are asked, and what they answer. Worker processes import this."""

import base64
import io
import json
import sys
import traceback
from typing import Any, NamedTuple

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.observation import BrokenTool, EpisodeRow, FailedTool, Observation
from jaxrl_llm.workers.answers import (
    finite_number,
    memory_limit,
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


class ToolAnswer(NamedTuple):
    """What came of a request.

    Attributes:
        text: told to the model; also of a failure.
        reward: of the turn.
        end: whether the episode ends.
        failure: as of `ToolResult`; also `retry`, where another attempt may do better.
        score: returned by an environment.
        error: what kind of error it was, to be counted; empty for none.
        trace: where it was raised, if this is the first of its kind.
        seconds: that it took; set by who asked.
        images: as of `ToolResult`.
    """

    text: str = ""
    reward: float = 0.0
    end: bool = False
    failure: str | None = None
    score: float | None = None
    error: str = ""
    trace: str = ""
    seconds: float = 0.0
    images: tuple[tuple[int, str], ...] = ()


class ResultError(ValueError):
    """A tool or an environment gave something that can't be told; the message says what."""


def to_answer(value: Any) -> ToolAnswer:
    """Return what a tool or an environment gave as it is told.

    Raises:
        ResultError: it is no text, no image and no plain data, too long, or the reward is no
            finite number.

    >>> to_answer({"sum": 3}).text, to_answer(Observation("no", reward=-1)).reward
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
    return ToolAnswer(text, reward, bool(observation.end), images=images)


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


def failed_answer(error: BaseException, *, failure: str, trace: str = "") -> ToolAnswer:
    """Return the answer for something that was raised."""
    if isinstance(error, FailedTool):
        text = shorten(error.text, MAX_RESULT_CHARS).encode("utf-8", "replace").decode()
        return ToolAnswer(text, failure=failure, error=error.kind, trace=text[-MAX_TRACE_CHARS:])
    if isinstance(error, ResultError):
        return ToolAnswer(error_text(str(error)), failure=failure, error="result", trace=trace)
    kind = type(error).__name__
    message = f"{kind}: {error}" if str(error).strip() else kind
    return ToolAnswer(error_text(message), failure=failure, error=kind, trace=trace)


def format_trace(error: BaseException, memory_gb: float | None = None) -> str:
    """Return a traceback, its middle left out where it is long."""
    traceback.clear_frames(error.__traceback__)  # they may hold all memory that we may take
    text = "".join(traceback.format_exception(error)).rstrip()
    return shorten(text, MAX_TRACE_CHARS) + memory_limit(error, memory_gb, KEYS)
