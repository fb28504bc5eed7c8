"""How each family of models writes calls of tools: from text to calls, and back.

Markers such as `<tool_call>` are single characters here already (`tool_calls.mark`), so that no
text can be taken for one. A call that is not written as its format says is never mended: it comes
back with what is wrong with it, for the model to read.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE, BEGIN, END, INNER, LAST, MIDDLE = (chr(0xD800 + i) for i in range(7))
"""What stands for markers while an answer is read: surrogates, which no decoded text contains.

The first two are `<think>` and `</think>`, the others a format's markers in order.
"""

Tools = Sequence[Mapping[str, Any]]


class ToolCall(NamedTuple):
    """A call of a tool as a model wrote it.

    Attributes:
        name: of the tool; empty where the text has none.
        arguments: by parameter name.
        id: by which a tool's message names the call.
        error: why the text is no call, and what was expected; told to the model.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""
    error: str | None = None


class BadCall(Exception):
    """Why a text is no call; `name` is the tool's where it could be read."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def attempt(read: Callable[[], ToolCall]) -> ToolCall:
    """Return the call that `read` returns, or one that says why there is none."""
    try:
        return read()
    except BadCall as bad:
        return ToolCall(bad.name, {}, error=str(bad))
    except RecursionError:
        return ToolCall("", {}, error="the call is nested too deep; expected a flatter one")


def read_blocks(
    marked: str, end: str, read: Callable[[str], list[ToolCall]]
) -> tuple[str, list[ToolCall]]:
    """Return the text outside of BEGIN … END, and the calls inside.

    The last block of an answer needs no end marker if it can be read, as in vLLM.

    Args:
        marked: with markers as single characters.
        end: the marker that ends a block, for the error.
        read: from a block to its calls.
    """
    text, *parts = marked.split(BEGIN)
    calls = list[ToolCall]()
    for number, part in enumerate(parts, 1):
        inside, closed, after = part.partition(END)
        found = read(inside)
        if not closed and (number < len(parts) or any(call.error for call in found)):
            reason = f"the call is not closed: expected {end} after {quote(inside)}"
            found = [ToolCall("", {}, error=reason)]
        text, calls = text + after, calls + found
    return text, calls


def load_json(text: str, expected: str) -> Any:
    """Return the value of a text of JSON in which nothing is doubtful.

    Args:
        text: one value and nothing after it.
        expected: what it should look like, for the error.

    Raises:
        BadCall: it is no JSON, has a key twice, a number that is not finite, or half a character.

    >>> load_json('{"a": 1, "a": 2}', "an object")
    Traceback (most recent call last):
    jaxrl_llm.data.call_formats.BadCall: the key 'a' is there twice; expected an object
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict[str, Any]()
        for key, item in pairs:
            if key in value:
                raise BadCall(f"the key {key!r} is there twice; expected {expected}")
            value[key] = item
        return value

    try:
        value = json.loads(text, object_pairs_hook=once)
        check_value(value, expected)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"no JSON: {error}; expected {expected}") from error
    return value


def check_value(value: Any, expected: str) -> None:
    """Refuse numbers that are not finite, and texts that no encoding can write.

    Raises:
        BadCall: there is one in the value.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_value(key, expected)
            check_value(item, expected)
    elif isinstance(value, list):
        for item in value:
            check_value(item, expected)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadCall(f"the number {value} is not finite; expected {expected}")
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise BadCall(f"{value!r} holds half of a surrogate pair; expected {expected}")


def quote(value: Any) -> str:
    """Return the first 80 characters of a value, for an error."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def json_call(value: Any, key: str, optional: Sequence[str] = ()) -> ToolCall:
    """Return the call of `{"name": ..., key: {...}}`.

    Args:
        value: of which JSON.
        key: under which the arguments stand.
        optional: keys that may be there, too.

    Raises:
        BadCall: it is another object, or none.
    """
    expected = f'{{"name": "...", "{key}": {{...}}}}'
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise BadCall(f"got {quote(value)}, expected {expected}")
    if set(value) - {*optional} != {"name", key}:
        raise BadCall(f"got the keys {sorted(value)}, expected {expected}", name)
    if not isinstance(value[key], dict):
        raise BadCall(f"{key}: got {quote(value[key])}, expected an object", name)
    return ToolCall(name, value[key])


def dump_json(value: Any) -> str:
    """Return a value as JSON, every letter as itself."""
    return json.dumps(value, ensure_ascii=False)


def count_common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items two sequences begin with that are the same."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def joined_contents(one: Any, other: Any) -> Any:
    """Return the contents of two messages as those of one; parts follow each other.

    >>> joined_contents("a", "b"), len(joined_contents("a", [{"type": "image"}]))
    ('a\\n\\nb', 2)
    """
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in (one, other))
    return [part for content in parts for part in content]


HERMES = ("<tool_call>", "</tool_call>")
LLAMA = ("<|python_tag|>",)
PYTHONIC = (
    *("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2
    *("<|python_start|>", "<|python_end|>"),  # Llama 4
)
MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)


def read_hermes(marked: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; Qwen2.5, Qwen3, Hermes."""
    expected = '{"name": "...", "arguments": {...}}'

    def read(block: str) -> list[ToolCall]:
        return [attempt(lambda: json_call(load_json(block, expected), "arguments"))]

    return read_blocks(marked, HERMES[1], read)


def write_hermes(calls: Sequence[ToolCall]) -> str:
    """Write calls as `read_hermes` reads them."""
    values = [dump_json({"name": c.name, "arguments": c.arguments}) for c in calls]
    return "\n".join(f"<tool_call>\n{value}\n</tool_call>" for value in values)


_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


def read_qwen3_coder(marked: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Read `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`."""

    def read(block: str) -> list[ToolCall]:
        return [attempt(lambda: _qwen3_coder_call(block.strip(), tools))]

    return read_blocks(marked, HERMES[1], read)


def _qwen3_coder_call(block: str, tools: Tools) -> ToolCall:
    expected = "<function=...> with a <parameter=...>...</parameter> for each, then </function>"
    match = re.fullmatch(r"<function=([^>\n]+)>(.*)</function>", block, re.DOTALL)
    if not match:
        raise BadCall(f"got {quote(block)}, expected {expected}")
    name, rest = match.groups()
    arguments, position = dict[str, Any](), 0
    types = parameter_types(tools, name)
    while parameter := _PARAMETER.match(rest, position):
        key, value = parameter.groups()
        if key in arguments:
            raise BadCall(f"the parameter {key!r} is there twice; expected it once", name)
        arguments[key] = _typed(value, types.get(key))
        position = parameter.end()
    if rest[position:].strip():
        raise BadCall(f"got {quote(rest[position:].strip())}, expected {expected}", name)
    return ToolCall(name, arguments)


def parameter_types(tools: Tools, name: str) -> dict[str, tuple[str, ...]]:
    """Return the JSON types of a tool's parameters, as far as its schema names them.

    >>> parameters = {"properties": {"n": {"type": "integer"}}}
    >>> parameter_types([{"function": {"name": "f", "parameters": parameters}}], "f")
    {'n': ('integer',)}
    """
    functions = [tool.get("function", tool) for tool in tools]
    schemas = [f.get("parameters") or {} for f in functions if f.get("name") == name]
    properties = schemas[0].get("properties", {}) if schemas else {}
    types = {key: schema.get("type") for key, schema in properties.items()}
    return {k: (t,) if isinstance(t, str) else tuple(t) for k, t in types.items() if t}


def _typed(text: str, types: tuple[str, ...] | None) -> Any:
    """Read a value that is written without quotes: a text unless its type says otherwise."""
    if types and "string" in types:
        return text
    written = {"True": True, "False": False, "None": None}
    if text in written:
        return written[text]
    try:
        return load_json(text, "a value")
    except BadCall:
        return text  # whoever checks the arguments against the schema says what is wrong


def write_qwen3_coder(calls: Sequence[ToolCall]) -> str:
    """Write calls as `read_qwen3_coder` reads them."""

    def parameter(key: str, value: Any) -> str:
        shown = value if isinstance(value, str) else dump_json(value)
        return f"<parameter={key}>\n{shown}\n</parameter>\n"

    def call(c: ToolCall) -> str:
        parameters = "".join(parameter(k, v) for k, v in c.arguments.items())
        return f"<tool_call>\n<function={c.name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(map(call, calls))


def read_llama3_json(marked: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Read `{"name": ..., "parameters": {...}}`: the whole answer, or after `<|python_tag|>`."""
    before, tagged, body = marked.partition(BEGIN)
    if not tagged and not re.match(r'\s*\{\s*"(name|type)"\s*:', before):
        return marked, []
    text, rest = (before, body) if tagged else ("", before)
    pieces = _objects(rest.replace(BEGIN, ";"))
    return text, [attempt(lambda p=piece: _llama3_json_call(p)) for piece in pieces]


def _objects(text: str) -> list[str]:
    """Split objects of JSON that follow each other; what can't be read is the last piece."""
    decoder, pieces, position = json.JSONDecoder(), list[str](), 0
    while position < len(text) and (skip := re.compile(r"[\s;]*").match(text, position)):
        start = skip.end()
        if start == len(text):
            break
        try:
            position = decoder.raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            position = len(text)
        pieces.append(text[start:position])
    return pieces


def _llama3_json_call(text: str) -> ToolCall:
    value = load_json(text, '{"name": "...", "parameters": {...}}')
    kind = value.get("type", "function") if isinstance(value, dict) else None
    if kind not in ("function", None):
        raise BadCall(f"type: got {quote(kind)}, expected 'function'")
    return json_call(value, "parameters", optional=["type"])


def write_llama3_json(calls: Sequence[ToolCall]) -> str:
    """Write calls as `read_llama3_json` reads them."""
    return "; ".join(
        f'{{"name": {dump_json(c.name)}, "parameters": {dump_json(c.arguments)}}}' for c in calls
    )


def read_pythonic(marked: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Read `[f(a=1), g(b="x")]`: the whole answer, or what stands between markers."""
    if BEGIN in marked or INNER in marked:
        blocks = marked.replace(INNER, BEGIN).replace(LAST, END)
        return read_blocks(blocks, "the end marker", _pythonic_calls)
    if not re.match(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(", marked):
        return marked, []
    return "", _pythonic_calls(marked)


def _pythonic_calls(block: str) -> list[ToolCall]:
    expected = "[name(parameter=value, ...), ...] with literal values"
    source = block.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of backslashes in the model's texts
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = f"no list of calls: {error}; expected {expected}"
        return [ToolCall("", {}, error=reason)]
    if not isinstance(tree, ast.List) or not tree.elts:
        return [ToolCall("", {}, error=f"got {quote(source)}, expected {expected}")]
    return [attempt(lambda n=node: _pythonic_call(n)) for node in tree.elts]


def _pythonic_call(node: ast.expr) -> ToolCall:
    shown = quote(ast.unparse(node))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise BadCall(f"got {shown}, expected name(parameter=value, ...)")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise BadCall(f"got {shown}, expected every argument as parameter=value", name)
    arguments = {str(k.arg): _literal(k.value, name) for k in node.keywords}
    if len(arguments) < len(node.keywords):
        raise BadCall(f"got {shown}, expected every parameter once", name)
    check_value(arguments, "finite numbers and whole characters")
    return ToolCall(name, arguments)


def _literal(node: ast.expr, name: str) -> Any:
    """Return the value of a literal that JSON has, too, in Python's spelling or in JSON's."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items):
            return [_literal(item, name) for item in items]
        case ast.Dict(keys=keys, values=values):
            texts = [_literal(key, name) if key else None for key in keys]
            if all(isinstance(text, str) for text in texts) and len({*texts}) == len(texts):
                return dict(zip(texts, (_literal(v, name) for v in values), strict=True))
    raise BadCall(
        f"got {quote(ast.unparse(node))}, expected a text, a number, True, False, None, a list or"
        " a dict of such whose keys are different texts",
        name,
    )


def write_pythonic(calls: Sequence[ToolCall]) -> str:
    """Write calls as `read_pythonic` reads them."""

    def call(c: ToolCall) -> str:
        return f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})"

    return f"[{', '.join(map(call, calls))}]"


def read_mistral(marked: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Read `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    text, *blocks = marked.split(BEGIN)
    calls = [call for block in blocks for call in _mistral_calls(block)]
    seen = set[str]()
    for number, call in enumerate(calls):
        if call.id in seen:
            reason = f"the id {call.id!r} is there twice; expected another for each call"
            calls[number] = ToolCall(call.name, {}, error=reason)
        seen |= {call.id} - {""}
    return text, calls


def _mistral_calls(block: str) -> list[ToolCall]:
    name, sep, rest = block.partition(END)
    if sep:
        return [attempt(lambda: _mistral_named_call(name, rest))]
    expected = '[{"name": "...", "arguments": {...}}, ...] or name[ARGS]{...}'
    try:
        values = load_json(block, expected)
    except BadCall as bad:
        return [ToolCall("", {}, error=str(bad))]
    if not isinstance(values, list) or not values:
        return [ToolCall("", {}, error=f"got {quote(values)}, expected {expected}")]
    return [attempt(lambda v=value: _mistral_call(v)) for value in values]


def _mistral_named_call(head: str, rest: str) -> ToolCall:
    name, has_id, identity = (part.strip() for part in head.partition(INNER))
    value = {"name": name, "arguments": load_json(rest, "an object")}
    return _mistral_call(value | ({"id": identity} if has_id else {}))


def _mistral_call(value: Any) -> ToolCall:
    call = json_call(value, "arguments", optional=["id"])
    if "id" not in value:
        return call
    if not isinstance(value["id"], str) or not re.fullmatch("[A-Za-z0-9]{9}", value["id"]):
        raise BadCall(f"id: got {quote(value['id'])}, expected nine letters or digits", call.name)
    return call._replace(id=value["id"])


def write_mistral(calls: Sequence[ToolCall]) -> str:
    """Write calls as `read_mistral` reads them, in its first form."""
    values = []
    for call in calls:
        identity = {"id": call.id} if call.id else {}
        values.append({"name": call.name, "arguments": call.arguments} | identity)
    return "[TOOL_CALLS]" + dump_json(values)


def read_deepseek(marked: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Read name, separator, JSON (V3.1); or `function`, separator, name, a fence of JSON (V3)."""
    before, begun, body = marked.partition(BEGIN)
    inside, _, after = body.partition(END)
    pieces = inside.split(INNER)[1:]
    calls = [attempt(lambda p=piece: _deepseek_call(p)) for piece in pieces]
    if begun and not calls:
        calls.append(ToolCall("", {}, error="the calls break off; expected at least one"))
    return before + after, calls


def _deepseek_call(piece: str) -> ToolCall:
    expected = "a name, the separator, and the arguments as an object of JSON"
    body, closed, after = piece.partition(LAST)
    head, parted, rest = body.partition(MIDDLE)
    if not closed or not parted or after.strip():
        raise BadCall(f"the call is not closed or not parted; expected {expected}")
    if fenced := re.fullmatch(r"([^\n]*)\n```json\n(.*)\n```", rest.strip(), re.DOTALL):
        kind, name, text = head.strip(), *fenced.groups()
        if kind != "function":
            raise BadCall(f"got a call of the kind {kind!r}, expected 'function'", name)
    else:
        name, text = head, rest
    try:
        arguments = load_json(text, "an object of JSON")
    except BadCall as bad:
        raise BadCall(str(bad), name.strip()) from bad
    return json_call({"name": name.strip(), "arguments": arguments}, "arguments")


def write_deepseek(calls: Sequence[ToolCall]) -> str:
    """Write calls as DeepSeek-V3.1 does."""
    begin, end, inner, last, middle = DEEPSEEK
    written = [f"{inner}{c.name}{middle}{dump_json(c.arguments)}{last}" for c in calls]
    return begin + "".join(written) + end


HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")
FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=(\S+)")


# Harmony, the format of gpt-oss: an answer is messages, each in a channel.
#
# `<|channel|>analysis<|message|>` begins reasoning, `final` the text for the user, and
# `commentary` with a recipient `to=functions.name` a call, whose message is JSON. `<|end|>` ends
# a message after which `<|start|>assistant` begins another; `<|return|>` and `<|call|>` end the
# answer (https://developers.openai.com/cookbook/articles/openai-harmony).


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
