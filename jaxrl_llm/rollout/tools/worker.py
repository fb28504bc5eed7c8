"""The worker side of the pool of tools: load them, then answer requests until told to stop.

A worker is the child of a fresh interpreter, its supervisor, and runs `run_tools`. It imports
neither jax nor the program that started it.
"""

import json

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rollout.tools.answers import (
    KEYS,
    MAX_IMAGE_CHARS,
    MAX_RESULT_CHARS,
    MAX_TRACE_CHARS,
    ToolAnswer,
    ToolboxSpec,
    ToolRequest,
)
from jaxrl_llm.rollout.tools.results import checked_images
from jaxrl_llm.rollout.tools.toolbox import Toolbox
from jaxrl_llm.workers.answers import (
    Serve,
    answering_in_turn,
    finite_number,
    memory_limit,
    serve_requests,
)

FAILURES = (None, "failed", "broken", "retry")


def encode_tool_answer(number: int, answer: ToolAnswer) -> bytes:
    """Return the line that tells the pool what came of a request.

    >>> encode_tool_answer(3, ToolAnswer("4"))[:35]
    b'{"number": 3, "text": "4", "reward"'
    """
    return json.dumps({"number": number, **answer._asdict()}).encode() + b"\n"


def decode_tool_answer(line: bytes, number: int) -> ToolAnswer | None:
    """Return what a line tells of a request; None where it is no answer to this request.

    Nothing is taken on trust: a tool may have written the line itself.

    >>> decode_tool_answer(encode_tool_answer(3, ToolAnswer("4")), 3).text
    '4'
    >>> decode_tool_answer(b"garbage", 3)
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() != {"number", *ToolAnswer._fields}:
        return None
    if type(fields["number"]) is not int or fields.pop("number") != number:
        return None
    if (images := checked_images(fields.pop("images"))) is None:
        return None
    answer = ToolAnswer(**fields, images=images)
    texts = (answer.text, answer.error, answer.trace)
    numbers = [n for n in (answer.reward, answer.score, answer.seconds) if n is not None]
    sound = (
        all(isinstance(text, str) for text in texts)
        and len(answer.text) <= MAX_RESULT_CHARS
        and sum(len(image) for _, image in images) <= MAX_IMAGE_CHARS
        and all(place <= len(answer.text) for place, _ in images)
        and all(type(n) is float and finite_number(n) is not None for n in numbers)
        and type(answer.reward) is float
        and type(answer.end) is bool
        and answer.failure in FAILURES
    )
    if not sound:
        return None
    trace = answer.trace[-2 * MAX_TRACE_CHARS :]
    return answer._replace(text=answer.text.encode("utf-8", "replace").decode(), trace=trace)


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
            return encode_tool_answer(number, toolbox.answer(request))

        return answering_in_turn(answer)

    def describe(error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error) + memory_limit(error.__cause__, memory_gb, KEYS)
        return f"{type(error).__name__}: {error}{memory_limit(error, memory_gb, KEYS)}"

    serve_requests(fd, load, describe)
