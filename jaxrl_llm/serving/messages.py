"""Messages and tools of OpenAI's chats, as chat templates want them, and answers as clients do."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.data.call_text import ToolCall, dump_json
from jaxrl_llm.data.row_fields import REASONING
from jaxrl_llm.data.tool_calls import ParsedAnswer
from jaxrl_llm.data.visuals.pictures import PictureError
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.vision.inputs import Visual
from jaxrl_llm.serving.fields import APIError, shown, strict_json

DETAILS = (None, "auto", "low", "high", "original")
"""What a client may say of an image's resolution, which is the server's choice here."""


_UNSHOWN = (
    *("tool_calls", "id", "status", "index", "annotations", "cache_control"),
    "provider_specific_fields",
)
"""Keys that clients send back as they got them, or for other servers: no template shows them."""


def parse_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a chat as templates want it; a tool's message gets the name of the call's tool.

    Args:
        messages: of a request.

    Raises:
        APIError: one of them is wrong.

    >>> call = {"id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}}
    >>> chat = [{"role": "assistant", "tool_calls": [call]}]
    >>> parse_messages([*chat, {"role": "tool", "tool_call_id": "a", "content": "2"}])[1]["name"]
    'add'
    """
    parsed, names = [], dict[str, str]()
    for index, message in enumerate(messages):
        told = parse_message(message, index)
        for call in told.get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"]["name"]
        name = names.get(str(told.get("tool_call_id")))
        parsed.append({"name": name} | told if told["role"] == "tool" and name else told)
    return parsed


def parse_message(message: Any, index: int) -> dict[str, Any]:
    """Return a message as chat templates want it, tools' arguments an object.

    Its content is a text, or where it shows images a list of parts: `{"type": "text", "text": …}`
    and `{"type": "image", "image": …}` with the image's URL; see `read_images`.

    Args:
        message: of a request.
        index: its number, for errors.

    Raises:
        APIError: it is none, or holds something other than text and images.

    >>> parts = [{"type": "text", "text": "Hi"}]
    >>> parse_message({"role": "user", "name": "Jo", "content": parts}, 0)
    {'role': 'user', 'content': 'Hi'}
    >>> parse_message({"role": "assistant", "id": "m1", "content": "4", "reasoning": "2+2"}, 0)
    {'role': 'assistant', 'content': '4', 'reasoning_content': '2+2'}
    """
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise APIError(
            f"{where}: got {shown(message)}, expected an object with a role", param=where
        )
    content = message.get("content")
    if isinstance(content, list):
        content = [_parse_part(part, where) for part in content]
        if all(part["type"] == "text" for part in content):
            content = "\n".join(part["text"] for part in content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise APIError(f"{where}.content: got {shown(content)}, expected a text", param=where)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise APIError(f"{where}.tool_calls: got {shown(calls)}, expected a list", param=where)
    parsed = {k: v for k, v in message.items() if v is not None and k not in _UNSHOWN}
    if parsed["role"] != "tool":
        parsed.pop("name", None)
    parsed |= {"content": content}
    for name in REASONING[1:]:  # as vLLM's newer versions have it, `reasoning`
        text = parsed.get(name)
        if isinstance(text, str) and parsed.setdefault(REASONING[0], text) == text:
            del parsed[name]
    return parsed | ({"tool_calls": [_parse_tool_call(c, where) for c in calls]} if calls else {})


def _parse_part(part: Any, where: str) -> dict[str, Any]:
    """Return a part of a message, which is a text or an image."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    given = part.get("image_url") if kind == "image_url" else None
    image = given if isinstance(given, dict) else {"url": given}
    if not isinstance(image.get("url"), str) or image.get("detail") not in DETAILS:
        raise APIError(
            f"{where}.content: got {shown(part)}, expected parts of text, or of images as "
            '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}',
            param=where,
        )
    return {"type": "image", "image": image["url"]}


def read_images(
    messages: Sequence[Mapping[str, Any]], read: Callable[[str], Visual] | None
) -> tuple[list[dict[str, Any]], tuple[Visual, ...]]:
    """Read the images of a chat.

    Args:
        messages: of `parse_messages`.
        read: (URL of an image) -> the image; None: the model reads none.

    Returns:
        The messages, whose parts only say where an image stands, and the images in order.

    Raises:
        APIError: an image can't be read, or not by this model.
    """
    visuals, told = list[Visual](), list[dict[str, Any]]()
    for index, message in enumerate(messages):
        parts, where = message.get("content"), f"messages[{index}]"
        if not isinstance(parts, list):
            told.append(dict(message))
            continue
        urls = [part["image"] for part in parts if part["type"] == "image"]
        if read is None:
            raise APIError(
                f"{where}: got an image, but the model reads text alone here", param=where
            )
        try:
            visuals += map(read, urls)
        except PictureError as error:
            raise APIError(f"{where}: an image can't be used: {error}", param=where) from error
        shows = [part if part["type"] == "text" else {"type": "image"} for part in parts]
        told.append({**message, "content": shows})
    return told, tuple(visuals)


def image_reader(
    processor: VisualProcessor | None, most_tokens: int, known: dict[bytes, Visual] | None = None
) -> Callable[[str], Visual] | None:
    """Return what reads the images of one request, for `read_images`.

    An image is decoded only if all that came so far may fit into the model.

    Args:
        processor: of images; None: the model reads none.
        most_tokens: of all images together.
        known: images by a digest of their URL, which are not decoded again; new ones are added.
    """
    if processor is None:
        return None
    known, tokens = {} if known is None else known, 0

    def read(url: str) -> Visual:
        nonlocal tokens
        key = hashlib.sha256(url.encode()).digest()
        tokens += (known.get(key) or processor.image_shape(url)).tokens
        if tokens > most_tokens:
            raise APIError(
                f"the images have {tokens} tokens or more, expected at most {most_tokens} of them "
                "and the text",
                param="messages",
                code="context_length_exceeded",
            )
        if key not in known:
            known[key] = processor.image(url)
        return known[key]

    return read


def _parse_tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call whose arguments are an object; OpenAI writes them as a text of JSON."""
    where = f"{where}.tool_calls"
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise APIError(f"{where}: got {shown(call)}, expected a function with a name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError) as error:
            raise APIError(f"{where}: arguments are no JSON: {error}", param=where) from error
    if not isinstance(arguments, dict):
        raise APIError(f"{where}: got {shown(arguments)}, expected an object", param=where)
    return {**call, "function": {**function, "arguments": arguments}}


def parse_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tools of a request as chat templates want them.

    `strict` is left out: what the model writes is not forced to fit a schema.

    Args:
        tools: each with `type` and `function`.

    Raises:
        APIError: one of them is no function with a name.

    >>> parse_tools([{"type": "function", "function": {"name": "add", "strict": True}}])
    [{'type': 'function', 'function': {'name': 'add'}}]
    """
    parsed = []
    for index, tool in enumerate(tools):
        is_function = isinstance(tool, dict) and tool.get("type") == "function"
        function = tool.get("function") if is_function else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise APIError(
                f"tools[{index}]: got {shown(tool)}, expected the type 'function' and a function "
                "with a name",
                param="tools",
            )
        told = {k: v for k, v in function.items() if v is not None and k != "strict"}
        parsed.append({"type": "function", "function": told})
    return parsed


def answer_message(answer: ParsedAnswer) -> dict[str, Any]:
    """Return the message of an answer, as `/v1/chat/completions` has it.

    Args:
        answer: without wrong calls.

    >>> answer_message(ParsedAnswer("Hi", (), "A greeting."))["reasoning_content"]
    'A greeting.'
    """
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message |= {"content": answer.text or None, "tool_calls": tool_calls(answer.calls)}
    return message


def tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return calls as clients want them: arguments a text of JSON."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": dump_json(call.arguments)},
        }
        for call in calls
    ]


def finish_reason(finish: str, *, has_calls: bool) -> str:
    """Return why an answer has ended, in OpenAI's words.

    >>> [finish_reason(why, has_calls=True) for why in ("stop", "length")]
    ['tool_calls', 'length']
    """
    return "tool_calls" if has_calls and finish == "stop" else finish


def answer_delta(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole message as the one delta of a stream.

    Args:
        message: of `answer_message`.
    """
    delta = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in delta:
        calls = enumerate(delta["tool_calls"])
        delta["tool_calls"] = [{"index": number} | call for number, call in calls]
    return delta
