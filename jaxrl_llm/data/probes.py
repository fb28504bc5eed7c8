"""Turns with which a chat template is tried."""

from collections.abc import Iterator, Sequence

from jaxrl_llm.data.call_text import ToolCall
from jaxrl_llm.data.chat_template import PROBE, Message
from jaxrl_llm.data.tool_calls import ParsedAnswer

REPLY = "Sure."

Turn = tuple[ParsedAnswer, list[Message]]
"""An answer and what is told after it."""


def probe_turns(*, calls: bool, several: bool) -> Iterator[tuple[str, Turn]]:
    """Yield turns, each with its name.

    Args:
        calls: whether some answers are calls of tools.
        several: whether an answer may be two of them.
    """
    if calls:
        both = [PROBE, PROBE._replace(id="call00001")]
        yield "one call", _turn("18 degrees", [PROBE])
        yield "two calls", _turn("18 degrees", both if several else both[:1])
        yield "no argument", _turn("noon", [ToolCall("clock", {}, PROBE.id)])
        yield "unicode", _turn("naïve 東京 🙂", [PROBE])
        yield "code", _turn('def f(x):\n    return {"x": x}\n', [PROBE])
        yield "an error", _turn("Error: no such place: 'Zürich'", [PROBE])
        yield "thinking and a call", _turn("18 degrees", [PROBE], "I look it up.")
    yield "a user turn", _turn("And tomorrow?")
    yield "thinking", _turn("And tomorrow?", reasoning="That is easy.")


def _turn(text: str, calls: Sequence[ToolCall] = (), reasoning: str = "") -> Turn:
    new: list[Message] = [
        {"role": "tool", "name": c.name, "tool_call_id": c.id, "content": text} for c in calls
    ]
    answer = ParsedAnswer("" if calls else REPLY, tuple(calls), reasoning)
    return answer, new or [{"role": "user", "content": text}]
