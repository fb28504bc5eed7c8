"""From the JSON of OpenAI's APIs to what an engine is asked; what is left over is refused.

Fields are read by hand: pydantic took as many lines, and reordered tool calls' keys.
"""

import functools
import hashlib
import inspect
import json
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.call_formats import ToolCall, dump_json
from jaxrl_llm.data.chat import REFUSALS
from jaxrl_llm.data.rows import REASONING
from jaxrl_llm.data.token_bytes import BYTE_OF
from jaxrl_llm.data.turns import Answer, TurnTemplate
from jaxrl_llm.data.visuals.pictures import PictureError
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.inputs import Visual
from jaxrl_llm.rollout.engine import Request, SamplingParams

NOTHING_CHANGES = {"user", "store", "metadata", "safety_identifier", "service_tier"}
NOTHING_CHANGES |= {"prompt_cache_key", "prompt_cache_retention"}
"""Fields that have no effect on an answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Fields that are not supported, and the values that ask for nothing."""

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
KINDS |= {list: "a list", dict: "an object"}


class APIError(Exception):
    """A request that is answered with an error.

    Args:
        message: what was wrong, what was got and what was expected.
        param: the field.
        status: of HTTP.
        code: OpenAI's word for it, where there is one.
        headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what the answer says."""
        super().__init__(message)
        self.message, self.param = encodable(message), param and encodable(param)
        self.status, self.code = status, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Return the answer in OpenAI's format.

        >>> APIError("n=0, expected 1 or more", param="n").body["error"]["type"]
        'invalid_request_error'
        """
        kinds = {429: "rate_limit_error", 500: "server_error", 504: "timeout_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


class Fields:
    """The fields of a JSON object; `null` is as good as none.

    >>> fields = Fields({"n": 2, "seed": None, "user": "me"})
    >>> fields.take("n", int, 1), fields.take("seed", int)
    (2, None)
    >>> fields.end()
    """

    def __init__(self, tree: Mapping[str, Any], prefix: str = "") -> None:
        """Take an object; `prefix` is said before its names."""
        self._left = {name: value for name, value in tree.items() if value is not None}
        self._prefix = prefix

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field, or the default where there is none.

        Raises:
            APIError: it is of another kind.
        """
        if name not in self._left:
            return default
        value = self._left.pop(name)
        if not is_a(value, kind):
            raise self.refuse(name, value, KINDS[kind])
        return float(value) if kind is float else value

    def between(
        self, name: str, kind: type, default: Any, low: int | float, high: int | float
    ) -> Any:
        """Return a number from `low` to `high`.

        Raises:
            APIError: it is none.
        """
        value = self.take(name, kind, default)
        if value is not None and not low <= value <= high:
            expected = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise self.refuse(name, value, expected)
        return value

    def has(self, name: str) -> bool:
        """Tell whether there is such a field, which was not taken yet."""
        return name in self._left

    def any_of(self, name: str) -> Any:
        """Return a field of any kind, or None."""
        return self._left.pop(name, None)

    def refuse(self, name: str, value: Any, expected: str) -> APIError:
        """Return the refusal of a value."""
        return APIError(
            f"{self._prefix}{name}: got {shown(value)}, expected {expected}",
            param=self._prefix + name,
        )

    def end(self, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
        """Refuse what was not taken, unless it changes nothing.

        Args:
            neutral: fields that are not supported, and the values that ask for nothing.

        Raises:
            APIError: a field is unknown or asks for what is not supported.
        """
        for name, value in self._left.items():
            if name in NOTHING_CHANGES and not self._prefix:
                continue
            if name not in neutral or self._prefix:
                raise APIError(
                    f"unknown field {self._prefix + name!r}: it is not supported; remove it",
                    param=self._prefix + name,
                )
            if value not in neutral[name]:
                raise APIError(
                    f"{name}: got {shown(value)}, but it is not supported; remove it", param=name
                )


def is_a(value: Any, kind: type) -> bool:
    """Tell whether a JSON value is of a kind; numbers must be finite, and true is no number.

    >>> is_a(1, float), is_a(True, int), is_a(float("nan"), float)
    (True, False, False)
    """
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and abs(value) < 1e300
    return isinstance(value, kind)


def encodable(text: str) -> str:
    r"""Return a text without halves of surrogate pairs, which JSON may hold and UTF-8 may not.

    >>> encodable("\ud800")
    '\\ud800'
    """
    return text.encode(errors="backslashreplace").decode()


def shown(value: Any) -> str:
    """Return a value as an error shows it: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


HALF_OF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes half of a surrogate pair."""


def strict_json(text: str | bytes) -> Any:
    r"""Return the value of a JSON text, which the standard allows and UTF-8 can hold.

    Python's own reader also takes NaN, numbers that are too large, and halves of surrogate pairs,
    with which neither a tokenizer nor an answer can do anything.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.

    >>> strict_json(r'["\ud83d\ude00"]')
    ['😀']
    >>> strict_json("1e999")
    Traceback (most recent call last):
    ValueError: got 1e999, expected finite numbers
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    if HALF_OF_PAIR.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"got {text}, expected finite numbers")


async def read_body(request: Any, most: int) -> bytes:
    """Return the body of a request of Starlette's.

    Args:
        request: whose body was not read yet.
        most: bytes that it may have.

    Raises:
        APIError: it is too large.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise APIError(f"the body has more than {most} bytes", status=413)
    return bytes(body)


async def wait_until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client of a request has gone.

    Args:
        receive: of ASGI, with the request's body read to its end.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        APIError: it is none.

    >>> parse_body(b'{"n": 1}')
    {'n': 1}
    """
    try:
        tree = strict_json(body)
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise APIError(f"the body is {shown(tree)}, expected a JSON object")
    return tree


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


def answer_message(answer: Answer) -> dict[str, Any]:
    """Return the message of an answer, as `/v1/chat/completions` has it.

    Args:
        answer: without wrong calls.

    >>> answer_message(Answer("Hi", (), "A greeting."))["reasoning_content"]
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


COMPOSED = 4  # code points that a composing normal form of Unicode makes one of, at most
KEEPING = {"ByteLevel", "Digits", "Lowercase", "Metaspace", "NFD", "NFKD", "Prepend"}
KEEPING |= {"UnicodeScripts"}
"""Steps of a tokenizer after which a text has no fewer characters than before."""

BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""The tokens of bytes into which an unknown character is split."""


@dataclass(frozen=True)
class TextLimit:
    """The characters that a sequence of tokens can stand for.

    A token stands for at most as many characters as the longest one has, if the tokenizer drops
    none. vLLM has this limit, too (`max_chars_per_token`), for all tokenizers alike.

    Attributes:
        tokens: of the longest sequence.
        longest: characters of the longest token.
        composed: characters other than ASCII's that the tokenizer may make one of.
        spaces: whether it keeps white space; if not, other characters are counted.
    """

    tokens: int
    longest: int
    composed: int
    spaces: bool

    def check(self, text: str, param: str) -> None:
        """Refuse a text that can't fit.

        Raises:
            APIError: with the code that a sequence of too many tokens has.

        >>> TextLimit(2, 3, 1, spaces=True).check("abcdef", "prompt")
        """
        most = self.tokens * self.longest
        if len(text) <= most:
            return
        if not text.isascii():
            most *= self.composed
        count = len(text) if self.spaces else len("".join(text.split()))
        if count > most:
            raise APIError(
                f"{param}: got {count} characters, expected at most {most}: the model takes "
                f"{self.tokens} tokens, and none of its tokens is longer than {self.longest}",
                param=param,
                code="context_length_exceeded",
            )


def text_limit(tokenizer: Any, tokens: int) -> TextLimit | None:
    """Return the limit of texts for a tokenizer; None where a token may stand for any number.

    None is it where characters may be dropped or unknown ones joined: for models of words, for
    normalizers that delete, and for tokenizers that are not of the `tokenizers` library.

    Args:
        tokenizer: of `transformers`.
        tokens: of the longest sequence.
    """
    if not tokenizer.is_fast:
        return None
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = [*leaves(parts["normalizer"]), *leaves(parts["pre_tokenizer"])]
    composing = sum(step["type"] in ("NFC", "NFKC") for step in steps)
    others = [step for step in steps if step["type"] not in ("NFC", "NFKC", "Strip")]
    if not all(map(keeps, others)) or not knows_all(parts["model"], steps):
        return None
    strips = any(step["type"] == "Strip" for step in steps)
    strips |= any(added["lstrip"] or added["rstrip"] for added in parts["added_tokens"])
    longest = max(map(len, tokenizer.get_vocab()))
    return TextLimit(tokens, longest, COMPOSED**composing, spaces=not strips)


def leaves(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, which may be sequences.

    >>> [step["type"] for step in leaves({"type": "Sequence", "normalizers": [{"type": "NFC"}]})]
    ['NFC']
    """
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step.get("normalizers", step.get("pretokenizers", ())):
        yield from leaves(part)


def keeps(step: Mapping[str, Any]) -> bool:
    """Tell whether a text has no fewer characters after a step than before.

    >>> keeps({"type": "Replace", "pattern": {"String": " "}, "content": "_"})
    True
    >>> keeps({"type": "Replace", "pattern": {"Regex": " +"}, "content": " "})
    False
    """
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"]) >= len(replaced)
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in KEEPING


def knows_all(model: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> bool:
    """Tell whether a model has a token for every character, or for each one's bytes."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    vocabulary = model["vocab"]
    known = set(vocabulary if model["type"] == "BPE" else (token for token, _ in vocabulary))
    if model["byte_fallback"] and known >= BYTES:
        return True
    return any(step["type"] == "ByteLevel" for step in steps) and known >= set(BYTE_OF)


MOST_LOGPROBS = 20
MOST_STOPS = 16
DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI; a chat's answer may fill what is left


class ServedModel(NamedTuple):
    """The model that is served.

    Attributes:
        name: by which clients ask for it.
        tokenizer: of `transformers`.
        stop_ids: tokens that end an answer.
        vocab_size: token ids are below it.
        max_tokens: the longest sequence, prompt and answer.
        max_answers: the most that one request may ask for.
        text_limit: of prompts, if there is one.
        call_format: in which the model writes calls of tools, by name; None: unknown.
        processor: of images; None: the model reads text alone.
    """

    name: str
    tokenizer: Any
    stop_ids: tuple[int, ...]
    vocab_size: int
    max_tokens: int
    max_answers: int
    text_limit: TextLimit | None
    call_format: str | None = None
    processor: VisualProcessor | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """What one request asks for.

    Attributes:
        prompts: token ids.
        sampling: of every answer.
        n: answers for each prompt.
        seed: of all answers together.
        logprobs: whether log-probs are reported.
        token_ids: whether token ids are.
        stream: whether pieces are sent as they come.
        include_usage: whether a stream ends with a count of tokens.
        chat: whether the answer has the form of a chat's.
        prompt_logprobs: how many of the likeliest tokens are told for each token of the prompts,
            beside its own log-prob; None tells none.
        template: by which a chat's answers are taken apart; None: they are text and nothing else.
        visuals: images of a chat's prompt, in the order of their placeholder tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int
    seed: int
    logprobs: bool
    token_ids: bool
    stream: bool
    include_usage: bool
    chat: bool = False
    prompt_logprobs: int | None = None
    template: TurnTemplate | None = None
    visuals: tuple[Visual, ...] = ()

    def requests(self) -> list[Request]:
        """Return the engine's requests, the answers to one prompt side by side."""
        count = self.n * len(self.prompts)
        seeds = choice_seeds(self.seed, count)
        return [
            Request(self.prompts[i // self.n], self.sampling, seeds[i], visuals=self.visuals)
            for i in range(count)
        ]

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts))


def choice_seeds(seed: int, count: int) -> list[int]:
    """Return the seed of each choice; that of a choice depends on its index and `seed` alone.

    >>> choice_seeds(7, 3)[:2] == choice_seeds(7, 2)
    True
    """
    return np.random.SeedSequence(seed % 2**64).generate_state(count).tolist()


def parse_completion(tree: Mapping[str, Any], served: ServedModel) -> GenerationRequest:
    """Translate a request of `/v1/completions`.

    Raises:
        APIError: a field is wrong, unknown or not supported, or the request does not fit the model.
    """
    fields = Fields(tree)
    check_model_name(fields, served)
    prompts = parse_prompts(fields, served)
    tops = fields.between("logprobs", int, None, 0, MOST_LOGPROBS)
    max_tokens = fields.between("max_tokens", int, DEFAULT_MAX_TOKENS, 1, math.inf)
    told = fields.between("prompt_logprobs", int, None, 0, MOST_LOGPROBS)
    request = parse_common(fields, served, prompts, max_tokens, tops)
    if request.stream and told is not None:
        raise fields.refuse("prompt_logprobs", told, "none, because stream is true")
    return replace(request, prompt_logprobs=told)


def parse_chat(tree: Mapping[str, Any], served: ServedModel) -> GenerationRequest:
    """Translate a request of `/v1/chat/completions`.

    Raises:
        APIError: as `parse_completion`, or the chat template refuses the messages.
    """
    fields = Fields(tree)
    check_model_name(fields, served)
    messages = parse_messages(fields.take("messages", list, []))
    if not messages:
        raise fields.refuse("messages", [], "a list with a message or more")
    kwargs = fields.take("chat_template_kwargs", dict, {})
    for name in not_variables().intersection(kwargs):
        raise fields.refuse(
            f"chat_template_kwargs.{name}",
            kwargs[name],
            "variables that only the chat template knows: what is said and the tools have fields "
            "of their own, and the server sets the rest",
        )
    tools = parse_tools(fields.take("tools", list, []))
    choice = fields.any_of("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise fields.refuse("tool_choice", choice, "auto or none")
    template = open_template(served, tools if choice == "auto" else [], kwargs)
    messages, visuals = read_images(messages, image_reader(served.processor, served.max_tokens))
    try:
        text = template.opening_text(messages)
        if served.text_limit is not None:
            served.text_limit.check(text, "messages")
        prompt = template.template.ids(text)
        if served.processor is not None:
            placeholders = served.processor.placeholders
            prompt = placeholders.expand(prompt, visuals, served.tokenizer)
    except REFUSALS as error:
        raise APIError(f"messages: {error}", param="messages") from error
    tops = fields.between("top_logprobs", int, None, 0, MOST_LOGPROBS)
    if not fields.take("logprobs", bool, False):
        if tops is not None:
            raise fields.refuse("top_logprobs", tops, "none, because logprobs is not true")
    elif tops is None:
        tops = 0
    older = fields.between("max_tokens", int, None, 1, math.inf)
    max_tokens = fields.between("max_completion_tokens", int, older, 1, math.inf)
    if older not in (None, max_tokens):
        raise fields.refuse("max_tokens", older, f"max_completion_tokens={max_tokens}, or none")
    left = max(1, served.max_tokens - len(prompt))
    reads = template.call_format or "</think>" in served.tokenizer.get_chat_template()
    request = parse_common(fields, served, (tuple(prompt),), max_tokens or left, tops)
    return replace(request, chat=True, template=template if reads else None, visuals=visuals)


def parse_common(
    fields: Fields,
    served: ServedModel,
    prompts: tuple[tuple[int, ...], ...],
    max_new_tokens: int,
    tops: int | None,
) -> GenerationRequest:
    """Read the fields that both APIs have, refuse all others, and check that it fits."""
    n = fields.between("n", int, 1, 1, math.inf)
    if n * len(prompts) > served.max_answers:
        count = n * len(prompts)
        raise APIError(f"got {count} answers to give, expected at most {served.max_answers}: see n")
    for prompt in prompts:
        check_fit(len(prompt), max_new_tokens, served.max_tokens)
    stream = fields.take("stream", bool, False)
    options = fields.take("stream_options", dict)
    if options is not None and not stream:
        raise fields.refuse("stream_options", options, "none, because stream is not true")
    streaming = Fields(options or {}, "stream_options.")
    streaming.take("include_obfuscation", bool)
    include_usage = streaming.take("include_usage", bool, False)
    streaming.end()
    request = GenerationRequest(
        prompts=prompts,
        sampling=parse_sampling(fields, served, max_new_tokens, tops or 0),
        n=n,
        seed=fields.take("seed", int, secrets.randbits(64)),
        logprobs=tops is not None,
        token_ids=fields.take("return_token_ids", bool, False),
        stream=stream,
        include_usage=include_usage,
    )
    fields.end()
    return request


def parse_sampling(
    fields: Fields, served: ServedModel, max_new_tokens: int, tops: int
) -> SamplingParams:
    """Read how to sample."""
    top_p = fields.between("top_p", float, 1.0, 0, 1)
    penalty = fields.between("repetition_penalty", float, 1.0, 0, math.inf)
    for name, value in (("top_p", top_p), ("repetition_penalty", penalty)):
        if value == 0:
            raise fields.refuse(name, value, "a number above 0")
    more = fields.take("stop_token_ids", list, [])
    check_tokens("stop_token_ids", more, served)
    known = () if fields.take("ignore_eos", bool, False) else served.stop_ids
    biases = {}  # from token ids to what is added to their logits
    for name, value in fields.take("logit_bias", dict, {}).items():
        if not name.isdecimal() or len(name) > 9 or not is_a(value, float) or abs(value) > 100:
            raise fields.refuse("logit_bias", {name: value}, "token ids and numbers of -100 to 100")
        check_tokens("logit_bias", [int(name)], served)
        biases[int(name)] = float(value)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=fields.between("temperature", float, 1.0, 0, math.inf),
        top_p=top_p,
        top_k=max(0, fields.between("top_k", int, 0, -1, math.inf)),
        min_p=fields.between("min_p", float, 0.0, 0, 1),
        repetition_penalty=penalty,
        logit_bias=tuple(sorted(biases.items())),
        stop_ids=tuple(sorted({*known, *more})),
        stop=parse_stops(fields),
        top_logprobs=tops,
    )


def check_model_name(fields: Fields, served: ServedModel) -> None:
    """Refuse another model's name; none is good, too."""
    name = fields.take("model", str, served.name)
    if name != served.name:
        raise APIError(
            f"model: got {shown(name)}, expected {served.name!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def parse_prompts(fields: Fields, served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Read a text, a list of texts, token ids, or a list of lists of token ids."""
    given = fields.any_of("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and is_a(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise fields.refuse("prompt", given, "a text, token ids, or a list of one of these")
    if len(given) > served.max_answers:
        raise APIError(
            f"got {len(given)} prompts, expected at most {served.max_answers}", param="prompt"
        )
    prompts = []
    for one in given:
        if isinstance(one, str):
            if served.text_limit is not None:
                served.text_limit.check(one, "prompt")
            try:
                ids = served.tokenizer(one, add_special_tokens=True)["input_ids"]
            except (ValueError, TypeError) as error:
                message = f"prompt: {shown(one)} is no text: {error}"
                raise APIError(message, param="prompt") from error
            prompts.append(tuple(ids))
        elif isinstance(one, list):
            check_fit(len(one), 0, served.max_tokens)  # before each of them is looked at
            check_tokens("prompt", one, served)
            prompts.append(tuple(one))
        else:
            message = f"prompt: got {shown(one)}, expected a text or token ids"
            raise APIError(message, param="prompt")
    return tuple(prompts)


def open_template(
    served: ServedModel,
    tools: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> TurnTemplate:
    """Return the template of a chat with tools.

    Raises:
        APIError: there is none, it has no such variable, or nothing says how the model writes
            calls.
    """
    given = json.dumps([tools, template_kwargs])
    try:
        return _template(served.tokenizer, served.stop_ids, given, served.call_format)
    except ValueError as error:
        param = "tools" if tools else "messages"
        raise APIError(f"{param}: {error}", param=param) from error


@functools.lru_cache(maxsize=64)
def _template(
    tokenizer: Any, stops: tuple[int, ...], given: str, call_format: str | None
) -> TurnTemplate:
    tools, kwargs = json.loads(given)
    form = call_format if tools else None
    return TurnTemplate(tokenizer, stops, tools=tools, call_format=form, template_kwargs=kwargs)


def check_tokens(name: str, tokens: Sequence[Any], served: ServedModel) -> None:
    """Refuse what is no token id of the model."""
    for token in tokens:
        if not is_a(token, int) or not 0 <= token < served.vocab_size:
            raise APIError(
                f"{name}: got {shown(token)}, expected token ids from 0 to {served.vocab_size - 1}",
                param=name,
            )


def check_fit(prompt: int, max_new_tokens: int, most: int) -> None:
    """Refuse a prompt without tokens, and a sequence that is too long.

    >>> check_fit(10, 6, 16)
    """
    if prompt == 0:
        raise APIError("a prompt has no token, expected one or more", param="prompt")
    if prompt + max_new_tokens > most:
        raise APIError(
            f"a prompt of {prompt} tokens and an answer of {max_new_tokens} make "
            f"{prompt + max_new_tokens}, expected at most {most}",
            code="context_length_exceeded",
        )


def parse_stops(fields: Fields) -> tuple[str, ...]:
    """Read a stop text or a list of them."""
    given = fields.any_of("stop")
    stops = [given] if isinstance(given, str) else [] if given is None else given
    fits = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not fits or len(stops) > MOST_STOPS:
        raise fields.refuse("stop", given, f"a text, or a list of at most {MOST_STOPS}")
    return tuple(dict.fromkeys(stops))


@functools.cache
def not_variables() -> frozenset[str]:
    """Return the names of what renders a chat, which no variable of a template can have."""
    from transformers import PreTrainedTokenizerBase

    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({"messages", *names} - {"documents", "kwargs"})
