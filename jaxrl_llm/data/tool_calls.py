"""Calls of tools in a model's answers, told apart from text that only looks like one.

Where a tokenizer has a format's marker as a token of its own, such as `<tool_call>`, only that
token counts: the same characters drawn as ordinary pieces are text.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data import call_formats as formats
from jaxrl_llm.data import harmony
from jaxrl_llm.data.call_text import CLOSE, OPEN, ToolCall, Tools, dump_json


class ParsedAnswer(NamedTuple):
    """An answer taken apart.

    Attributes:
        text: what is no call and no reasoning.
        calls: in the order of the text, those that are wrong included.
        reasoning: what stood in `<think>` and `</think>`, or in the analysis channel.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


Read = Callable[[str, Tools], tuple[str, list[ToolCall]]]


def _split_reasoning(marked: str) -> tuple[str, str]:
    """Return what stands in the think tags, and the rest; the first tag may be in the prompt."""
    head, closed, tail = marked.partition(CLOSE)
    before, opened, inside = head.partition(OPEN)
    if opened:
        return inside.strip(), before + tail
    return (head.strip(), tail) if closed else ("", marked)


class CallFormat(NamedTuple):
    """How a family of models writes calls.

    Attributes:
        markers: texts that are tokens of their own in the family's tokenizers, at most five.
        read: takes an answer whose markers are replaced, and the tools' schemas; returns the text
            that is left and the calls.
        write: returns the text of calls.
        first_id: the id of an answer's first call; those of the others are counted on from it.
        bare: with which an answer begins that is a call without a marker; empty: there is none.
        split: takes an answer whose markers are replaced; returns its reasoning and the rest.
    """

    markers: tuple[str, ...]
    read: Read
    write: Callable[[Sequence[ToolCall]], str]
    first_id: str = "call_0"
    bare: str = ""
    split: Callable[[str], tuple[str, str]] = _split_reasoning

    def parse(self, tokens: Sequence[int], tokenizer: Any, tools: Tools = ()) -> ParsedAnswer:
        """Take an answer apart.

        Args:
            tokens: as drawn; a stop token may be left in.
            tokenizer: a `transformers` tokenizer.
            tools: schemas of the tools, by which arguments without a type of their own are read.
        """
        markers = ("<think>", "</think>", *self.markers)
        marked = mark(tokens, tokenizer, markers)
        reasoning, body = self.split(marked)
        text, calls = self.read(unmark(body, markers[:2]), tools)
        if calls or reasoning:
            text = text.strip()
        named = [c if c.id else c._replace(id=self.call_id(i)) for i, c in enumerate(calls)]
        return ParsedAnswer(unmark(text, markers), tuple(named), unmark(reasoning, markers))

    def call_id(self, number: int) -> str:
        """Return the id of an answer's call by its number, counted from 0."""
        digits = self.first_id.removeprefix("call").removeprefix("_")
        return self.first_id.removesuffix(digits) + str(number).zfill(len(digits))


def mark(tokens: Sequence[int], tokenizer: Any, markers: tuple[str, ...]) -> str:
    """Return the text of an answer without its special tokens, each marker as one surrogate.

    Args:
        tokens: of the answer.
        tokenizer: of which those markers that are added tokens are known by id, others by text.
        markers: in the order of the surrogates.
    """
    by_id, by_text = marker_signs(tokenizer, markers)
    parts, run = list[str](), list[int]()
    for token in (*map(int, tokens), None):
        if token is not None and token not in by_id:
            run.append(token)
            continue
        if run:
            parts.append(tokenizer.decode(run, skip_special_tokens=True))
        parts.append("" if token is None else by_id[token])
        run = []
    marked = "".join(parts)
    for text, sign in by_text.items():
        marked = marked.replace(text, sign)
    return marked


@functools.lru_cache(maxsize=64)
def marker_signs(
    tokenizer: Any, markers: tuple[str, ...]
) -> tuple[Mapping[int, str], Mapping[str, str]]:
    """Return the surrogates that stand for markers: by token id, and of the others by text.

    Kept, because a tokenizer such as Gemma's takes 50 ms to list its 6,400 added tokens.

    Args:
        tokenizer: of which some markers are added tokens; it gets no further ones.
        markers: in the order of the surrogates.
    """
    added = tokenizer.get_added_vocab()
    signs = {text: chr(0xD800 + i) for i, text in enumerate(markers)}
    by_id = {added[text]: sign for text, sign in signs.items() if text in added}
    return by_id, {text: sign for text, sign in signs.items() if text not in added}


def opens_reasoning(prompt: Sequence[int], tokenizer: Any) -> bool:
    """Tell whether a prompt ends in an open `<think>`, so that an answer begins as reasoning."""
    return mark(prompt[-16:], tokenizer, ("<think>",)).rstrip().endswith(OPEN)


def unmark(text: str, markers: Sequence[str]) -> str:
    """Return a text with each surrogate of `mark` replaced by its marker."""
    for number, marker in enumerate(markers):
        text = text.replace(chr(0xD800 + number), marker)
    return text


def split_reasoning(tokens: Sequence[int], tokenizer: Any) -> ParsedAnswer:
    """Take an answer apart in which no calls are looked for.

    Args:
        tokens: as drawn; a stop token may be left in.
        tokenizer: a `transformers` tokenizer.
    """
    return CallFormat((), lambda text, _: (text, []), lambda _: "").parse(tokens, tokenizer)


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(formats.HERMES, formats.read_hermes, formats.write_hermes),
    "qwen3_coder": CallFormat(formats.HERMES, formats.read_qwen3_coder, formats.write_qwen3_coder),
    "llama3_json": CallFormat(
        formats.LLAMA, formats.read_llama3_json, formats.write_llama3_json, bare="{"
    ),
    "pythonic": CallFormat(
        formats.PYTHONIC, formats.read_pythonic, formats.write_pythonic, bare="["
    ),
    "mistral": CallFormat(
        formats.MISTRAL, formats.read_mistral, formats.write_mistral, first_id="call00000"
    ),
    "deepseek": CallFormat(formats.DEEPSEEK, formats.read_deepseek, formats.write_deepseek),
    "harmony": CallFormat(
        harmony.HARMONY, harmony.read_harmony, harmony.write_harmony, split=harmony.split_analysis
    ),
}
"""The formats by name."""

PROBE = ToolCall("get_weather", {"place": "Zürich", "days": 3}, "call00000")
"""A call that templates are tried with."""

REFUSALS = (TypeError, ValueError, LookupError, AttributeError)
"""What templates raise, besides their own errors, for messages that they were not written for."""


class CallStyle(NamedTuple):
    """How a chat template wants the message of an assistant that calls tools.

    Attributes:
        as_text: whether arguments are a text of JSON instead of an object.
        content: what stands for no text beside the calls.
    """

    as_text: bool
    content: str | None

    def message(self, calls: Sequence[ToolCall], text: str = "") -> dict[str, Any]:
        """Return an assistant's message.

        Args:
            calls: at least one.
            text: beside them.
        """
        written = []
        for call in calls:
            arguments = dump_json(call.arguments) if self.as_text else call.arguments
            function = {"name": call.name, "arguments": arguments}
            written.append({"id": call.id, "type": "function", "function": function})
        return {"role": "assistant", "content": text or self.content, "tool_calls": written}


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    *,
    generation: bool,
) -> str:
    """Return the text of a chat.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        messages: the chat.
        template_kwargs: variables of the template.
        generation: whether the opening of the assistant's next answer follows.

    Raises:
        ValueError: the template refuses the chat.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation, **template_kwargs
        )
    except (TemplateError, *REFUSALS) as error:
        roles = [message.get("role") for message in messages]
        raise ValueError(f"chat template: it refuses a chat with roles {roles}: {error}") from error


def find_call_style(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> CallStyle | None:
    """Return how a chat template wants calls, or None where it writes none.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        template_kwargs: variables of the template.
    """
    for content in ("", None):
        for as_text in (False, True):
            style = CallStyle(as_text, content)
            chat = [{"role": "user", "content": "Hello."}, style.message([PROBE])]
            try:
                text = render_chat(tokenizer, chat, template_kwargs, generation=False)
            except ValueError:
                continue
            if PROBE.name in text and "Zürich" in text:
                return style
    return None


def choose_format(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """Return the name of the format in which a chat template writes calls.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        template_kwargs: variables of the template.

    Raises:
        ValueError: the template writes no calls, or none or several of the formats give back the
            call that it has written.
    """
    known = ", ".join(FORMATS)
    style = find_call_style(tokenizer, template_kwargs)
    if style is None:
        raise ValueError(
            "call_format: the chat template writes no calls of tools, so their format can't be "
            f"found; expected the name of one (known: {known})"
        )
    user = {"role": "user", "content": "Hello."}
    opening = render_chat(tokenizer, [user], template_kwargs, generation=True)
    chat = [user, style.message([PROBE])]
    whole = render_chat(tokenizer, chat, template_kwargs, generation=False)
    before = tokenizer(opening, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(whole, add_special_tokens=False)["input_ids"]
    same = next((i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), None)
    written = tokens[min(len(before), len(tokens)) if same is None else same :]
    readers = [name for name, form in FORMATS.items() if _gives_back(form, written, tokenizer)]
    if len(readers) != 1:
        raise ValueError(
            f"call_format: the chat template writes a call as {tokenizer.decode(written)!r}; got "
            f"{', '.join(readers) or 'none'} of the known formats that read it, expected one: name "
            f"it (known: {known})"
        )
    return readers[0]


def _gives_back(form: CallFormat, tokens: Sequence[int], tokenizer: Any) -> bool:
    answer = form.parse(tokens, tokenizer)
    read = [(call.name, call.arguments, call.error) for call in answer.calls]
    return read == [(PROBE.name, PROBE.arguments, None)] and not answer.text
