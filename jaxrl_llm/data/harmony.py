"""Harmony, the format of gpt-oss: an answer is messages, each in a channel.

`<|channel|>analysis<|message|>` begins reasoning, `final` the text for the user, and `commentary`
with a recipient `to=functions.name` a call, whose message is JSON. `<|end|>` ends a message after
which `<|start|>assistant` begins another; `<|return|>` and `<|call|>` end the answer
(https://developers.openai.com/cookbook/articles/openai-harmony).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.data.call_text import (
    BEGIN,
    END,
    INNER,
    LAST,
    MIDDLE,
    BadCall,
    ToolCall,
    Tools,
    attempt,
    dump_json,
    json_call,
    load_json,
    quote,
)

HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")
FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=(\S+)")


def is_harmony(tokenizer: Any) -> bool:
    """Tell whether a tokenizer has the markers of this format as tokens of their own."""
    return tokenizer.get_added_vocab().keys() >= {*HARMONY}


def split_analysis(marked: str) -> tuple[str, str]:
    """Return what stands in the analysis channel, and the other messages as they are."""
    reasoning, others = list[str](), list[str]()
    for piece in re.split(f"(?<=[{INNER}{MIDDLE}])", marked):
        header, _, body = piece.partition(END)
        is_analysis = header.rpartition(BEGIN)[2].strip() == "analysis"
        if BEGIN in header and is_analysis and not _RECIPIENT.search(header):
            reasoning.append(body.rstrip(INNER).strip())
        else:
            others.append(piece)
    return "\n\n".join(filter(None, reasoning)), "".join(others)


def read_harmony(marked: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Read `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`."""
    texts, calls = list[str](), list[ToolCall]()
    for piece in re.split(f"[{INNER}{MIDDLE}]", marked):
        before, begun, rest = piece.partition(BEGIN)
        header, parted, body = rest.partition(END)
        text = before.partition(LAST)[0]
        recipient = _RECIPIENT.search(f"{before} {header}") if begun else None
        texts.append(_RECIPIENT.sub("", text).strip() if begun else text)
        if recipient is not None:
            whole = body if parted else None
            calls.append(attempt(lambda to=recipient[1], body=whole: _call(to, body)))
        elif parted:
            texts.append(body)
    return "\n\n".join(filter(None, texts)), calls


def _call(recipient: str, body: str | None) -> ToolCall:
    name = recipient.removeprefix(FUNCTIONS)
    if name == recipient or not name:
        raise BadCall(f"got a call to {quote(recipient)}, expected to={FUNCTIONS}<name>")
    if body is None:
        raise BadCall("the call breaks off; expected <|message|> and its arguments", name)
    try:
        arguments = load_json(body, "an object of JSON")
    except BadCall as bad:
        raise BadCall(str(bad), name) from bad
    return json_call({"name": name, "arguments": arguments}, "arguments")


def write_harmony(calls: Sequence[ToolCall]) -> str:
    """Write calls as `read_harmony` reads them; the model itself ends its answer at the first."""
    channel, message, _, start, end = HARMONY
    return f"{start}assistant".join(
        f"{channel}commentary to={FUNCTIONS}{c.name} json{message}{dump_json(c.arguments)}{end}"
        for c in calls
    )


def with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant's message as gpt-oss's template asks for it, reasoning as `thinking`.

    Beside a call it takes either text or reasoning, and writes both in the analysis channel.

    >>> with_thinking({"role": "assistant", "content": "Yes.", "reasoning_content": "Why not?"})
    {'role': 'assistant', 'content': 'Yes.', 'thinking': 'Why not?'}
    """
    told = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message.get("role") != "assistant":
        return told
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    if told.get("tool_calls") and isinstance(text := told.get("content"), str):
        reasoning, told["content"] = f"{reasoning}\n\n{text}".strip(), ""
    return told | ({"thinking": reasoning} if reasoning else {})
