"""Calls of tools in a model's answers, told apart from text that only looks like one.

Where a tokenizer has a format's marker as a token of its own, such as `<tool_call>`, only that
token counts: the same characters drawn as ordinary pieces are text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data import call_formats as formats
from jaxrl_llm.data import harmony
from jaxrl_llm.data.call_text import CLOSE, OPEN, ToolCall, Tools, count_common
from jaxrl_llm.data.chat_template import PROBE, USER, ChatTemplate


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


def mark(tokens: Sequence[int], tokenizer: Any, markers: Sequence[str]) -> str:
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


def marker_signs(
    tokenizer: Any, markers: Sequence[str]
) -> tuple[Mapping[int, str], Mapping[str, str]]:
    """Return the surrogates that stand for markers: by token id, and of the others by text.

    Args:
        tokenizer: of which some markers are added tokens.
        markers: in the order of the surrogates.
    """
    added = tokenizer.get_added_vocab()
    signs = {text: chr(0xD800 + i) for i, text in enumerate(markers)}
    by_id = {added[text]: sign for text, sign in signs.items() if text in added}
    return by_id, {text: sign for text, sign in signs.items() if text not in added}


def opens_reasoning(prompt: Sequence[int], tokenizer: Any) -> bool:
    """Tell whether a prompt ends in an open `<think>`, so that an answer begins as reasoning."""
    return mark(prompt[-16:], tokenizer, ["<think>"]).rstrip().endswith(OPEN)


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


def choose_format(template: ChatTemplate) -> str:
    """Return the name of the format in which a chat template writes calls.

    Args:
        template: of the chats.

    Raises:
        ValueError: the template writes no calls, or none or several of the formats give back the
            call that it has written.
    """
    known, tokenizer = ", ".join(FORMATS), template.tokenizer
    if template.style is None:
        raise ValueError(
            "call_format: the chat template writes no calls of tools, so their format can't be "
            f"found; expected the name of one (known: {known})"
        )
    chat = [USER, template.style.message([PROBE])]
    before = template.ids(template.render(chat[:1], generation=True))
    tokens = template.ids(template.render(chat, generation=False))
    written = tokens[count_common(before, tokens) :]
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
