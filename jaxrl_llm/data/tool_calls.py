"""Calls of tools in a model's answers, told apart from text that only looks like one.

Where a tokenizer has a format's marker as a token of its own, such as `<tool_call>`, only that
token counts: the same characters drawn as ordinary pieces are text.
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data import call_formats as forms
from jaxrl_llm.data.call_formats import BEGIN, CLOSE, OPEN, ToolCall, Tools, count_common
from jaxrl_llm.data.chat import PROBE, USER, ChatTemplate
from jaxrl_llm.data.token_bytes import CONTEXT_TOKENS, Decode, decode_after, text_decoder

THINK = ("<think>", "</think>")
CALL_SIGN = re.compile(f"[{BEGIN}-\udfff]")
ANY_SIGN = re.compile(f"[{OPEN}{BEGIN}-\udfff]")  # a `</think>` alone is text


class Answer(NamedTuple):
    """One turn of the policy.

    Attributes:
        text: what is no call and no reasoning.
        calls: of tools, in the order of the text; of wrong ones `error` says why.
        reasoning: what stood in `<think>` and `</think>`, or in the analysis channel.
        finish: "stop", or "length" where it was cut.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    finish: str = "stop"


Read = Callable[[str, Tools], tuple[str, list[ToolCall]]]


class CallFormat(NamedTuple):
    """How a family of models writes calls.

    Attributes:
        markers: texts that are tokens of their own in the family's tokenizers, at most five.
        read: takes an answer whose markers are replaced, and the tools' schemas; returns the text
            that is left and the calls.
        write: returns the text of calls.
        first_id: the id of an answer's first call; those of the others are counted on from it.
        bare: with which an answer begins that is a call without a marker; empty: there is none.
        split: takes an answer whose markers are replaced; returns its reasoning and the rest. None:
            reasoning stands in `<think>` and `</think>`.
    """

    markers: tuple[str, ...]
    read: Read
    write: Callable[[Sequence[ToolCall]], str]
    first_id: str = "call_0"
    bare: str = ""
    split: Callable[[str], tuple[str, str]] | None = None

    def parse(
        self,
        tokens: Sequence[int],
        tokenizer: Any,
        tools: Tools = (),
        *,
        prompt: Sequence[int] = (),
    ) -> Answer:
        """Take an answer apart.

        Args:
            tokens: as drawn; a stop token may be left in.
            tokenizer: a `transformers` tokenizer.
            tools: schemas of the tools, by which arguments without a type of their own are read.
            prompt: what stood before them. Where it ends in an open `<think>`, the answer begins
                as reasoning, and is nothing else if it never says `</think>`.
        """
        marked = mark(tokens, tokenizer, (*THINK, *self.markers))
        return self.read_marked(self.opened(prompt, tokenizer) + marked, tools)

    def opened(self, prompt: Sequence[int], tokenizer: Any) -> str:
        """Return the sign of the `<think>` that a prompt has opened, if it has."""
        is_open = self.split is None and opens_reasoning(prompt, tokenizer)
        return OPEN if is_open else ""

    def read_marked(self, marked: str, tools: Tools) -> Answer:
        """Take an answer apart whose markers are replaced.

        Reasoning begins with the first `<think>`, unless a call may have begun before it. Text
        keeps the spaces at its beginning where it is what the answer begins with.
        """
        markers = (*THINK, *self.markers)
        head, opened, rest = marked.partition(OPEN)
        is_open = bool(opened) and not self._may_call(head)
        reasoning, body = "", marked
        if self.split is not None:
            reasoning, body = self.split(marked)
        elif is_open:
            reasoning, _, tail = rest.partition(CLOSE)
            body = head + tail
        text, calls = self.read(unmark(body, THINK), tools)
        if calls or reasoning or is_open:
            is_first = ANY_SIGN.split(marked, 1)[0].strip()
            text = text.rstrip() if is_first else text.strip()
        named = [c if c.id else c._replace(id=self.call_id(i)) for i, c in enumerate(calls)]
        reasoning = unmark(reasoning, markers).strip()
        return Answer(unmark(text, markers), tuple(named), reasoning)

    def _may_call(self, text: str) -> bool:
        is_bare = bool(self.bare) and text.lstrip().startswith(self.bare)
        return is_bare or CALL_SIGN.search(text) is not None

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
    marked = sign_decoder(text_decoder(tokenizer), by_id)(tokens)
    for text, sign in by_text.items():
        marked = marked.replace(text, sign)
    return marked


def sign_decoder(decode: Decode, by_id: Mapping[int, str], prompt: Sequence[int] = ()) -> Decode:
    """Return the function from token ids to their text, with signs for some of them.

    Args:
        decode: token ids -> text, of the others.
        by_id: the signs.
        prompt: what the text is read after.
    """
    first, end = decode_after(prompt, decode), [*prompt[-CONTEXT_TOKENS:]]

    def decode_signs(tokens: Sequence[int]) -> str:
        text, seen = "", list[int]()
        for is_marker, group in itertools.groupby(map(int, tokens), by_id.__contains__):
            run = list(group)
            if is_marker:
                text += "".join(map(by_id.__getitem__, run))
            else:
                text += (decode_after([*end, *seen], decode) if seen else first)(run)
            seen += run
        return text

    return decode_signs


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


NO_CALLS = CallFormat((), lambda text, _: (text, []), lambda _: "")
"""Answers in which no calls are looked for."""

FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(forms.HERMES, forms.read_hermes, forms.write_hermes),
    "qwen3_coder": CallFormat(forms.HERMES, forms.read_qwen3_coder, forms.write_qwen3_coder),
    "llama3_json": CallFormat(
        forms.LLAMA, forms.read_llama3_json, forms.write_llama3_json, bare="{"
    ),
    "pythonic": CallFormat(forms.PYTHONIC, forms.read_pythonic, forms.write_pythonic, bare="["),
    "mistral": CallFormat(
        forms.MISTRAL, forms.read_mistral, forms.write_mistral, first_id="call00000"
    ),
    "deepseek": CallFormat(forms.DEEPSEEK, forms.read_deepseek, forms.write_deepseek),
    "harmony": CallFormat(
        forms.HARMONY, forms.read_harmony, forms.write_harmony, split=forms.split_analysis
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
    same = count_common(before, tokens)
    prompt, written = tokens[:same], tokens[same:]
    readers = [
        name for name, form in FORMATS.items() if _gives_back(form, prompt, written, tokenizer)
    ]
    if len(readers) != 1:
        raise ValueError(
            f"call_format: the chat template writes a call as {tokenizer.decode(written)!r}; got "
            f"{', '.join(readers) or 'none'} of the known formats that read it, expected one: name "
            f"it (known: {known})"
        )
    return readers[0]


def _gives_back(
    form: CallFormat, prompt: Sequence[int], written: Sequence[int], tokenizer: Any
) -> bool:
    answer = form.parse(written, tokenizer, prompt=prompt)
    read = [(call.name, call.arguments, call.error) for call in answer.calls]
    return read == [(PROBE.name, PROBE.arguments, None)] and not answer.text
