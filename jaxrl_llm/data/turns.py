"""Token ids of multi-turn chats: the observation tokens between two sampled answers.

A stream of ids only ever grows: answers are kept as they were sampled, and only what the chat
template puts between two of them is encoded. It is found by rendering a short chat with the new
messages at its end, and cutting that after the token that closes the assistant's turn.
"""

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data import call_formats as forms
from jaxrl_llm.data.call_formats import (
    BEGIN,
    CLOSE,
    OPEN,
    ToolCall,
    Tools,
    count_common,
    is_harmony,
)
from jaxrl_llm.data.chat import PROBE, USER, ChatTemplate, Message, read_calls
from jaxrl_llm.data.token_bytes import CONTEXT_TOKENS, Decode, decode_after, text_decoder

# Calls of tools in a model's answers, told apart from text that only looks like one.
#
# Where a tokenizer has a format's marker as a token of its own, such as `<tool_call>`, only that
# token counts: the same characters drawn as ordinary pieces are text.

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
    chat = [USER, template.style([PROBE])]
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


REPLY = "Sure."

Turn = tuple[Answer, list[Message]]
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
    answer = Answer("" if calls else REPLY, tuple(calls), reasoning)
    return answer, new or [{"role": "user", "content": text}]


log = logging.getLogger(__name__)


class TurnTemplate:
    """Encodes what a chat template adds to a stream of sampled tokens, and nothing again.

    Args:
        tokenizer: a `transformers` tokenizer with a chat template.
        stops: the ids that end an answer.
        tools: schemas of the tools, as the opening tells them.
        call_format: in which calls are written, by name; None: the one by which the template's own
            calls are read where there are tools, else no calls are looked for.
        template_kwargs: variables of the template, such as Qwen3's `enable_thinking`.

    Raises:
        ValueError: no stop token; an unknown format, or none can be chosen.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: tuple[int, ...],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        call_format: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not stops:
            raise ValueError("stops: got none, expected at least one id that ends an answer")
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template_kwargs)
        self._special = self.template.special
        self._stops = stops
        self._shown = dict[tuple[str, ...], list[int]]()
        self.tools = list(tools)
        if call_format is None and (tools or is_harmony(tokenizer)):
            call_format = "harmony" if not tools else choose_format(self.template)
        if call_format is not None and call_format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"call_format: got {call_format!r}, expected one of {known}")
        self.call_format = None if call_format is None else FORMATS[call_format]

    def opening(self, messages: Sequence[Message], *, told: Sequence[Message] = ()) -> list[int]:
        """Return the ids of a chat up to where the assistant's answer begins.

        Args:
            messages: the chat. What it says stays as it is, texts of special tokens included.
            told: what an environment says after it; such texts become ordinary tokens in it.

        Raises:
            ValueError: as `ChatTemplate.prompt`.
        """
        hidden, signs = self._special.hide(told)
        text = self.opening_text([*messages, *hidden])
        return self._special.encode(text, signs, after="") if signs else self.template.ids(text)

    def opening_text(self, messages: Sequence[Message]) -> str:
        """Return the text of `opening`.

        Raises:
            ValueError: as there.
        """
        chat = [self._styled(message) for message in messages]
        return self.template.prompt_text(chat, self._told_tools)

    @functools.cached_property
    def _told_tools(self) -> list[Mapping[str, Any]]:
        if not self.tools or self.template.knows_tools:
            return self.tools
        log.warning("the chat template tells no tools: describe them in the data's system prompts")
        return []

    def following(
        self,
        messages: Sequence[Message],
        *,
        calls: Sequence[ToolCall] = (),
        closed: bool = True,
        stop: int | None = None,
    ) -> list[int]:
        """Return the ids that follow a sampled answer, up to where the next one begins.

        Texts of special tokens in the messages become ordinary tokens.

        Args:
            messages: of tools, one for each call in their order, and of the user.
            calls: those of the answer, wrong ones included.
            closed: whether the answer ended in a stop token. Else the one with which the template
                closes its turns comes first.
            stop: the stop token that was sampled. Another one than the template's is followed by
                the template's. None: it was the template's.

        Raises:
            ValueError: no messages; the template refuses them or leaves one out.
        """
        if not messages:
            raise ValueError("messages: got none, expected what is told after the answer")
        hidden, signs = self._special.hide(self.template.prepared(messages, calls))
        self._check_shown(hidden)
        told, end, _ = self._cut(hidden)
        ids = self._special.encode(told, signs, after=end)
        close = self._stop_texts.get(end) or self.template.ids(end)[0]
        return ids if closed and (stop is None or stop == close) else [close, *ids]

    def parse(self, tokens: Sequence[int], *, prompt: Sequence[int] = ()) -> Answer:
        """Take a sampled answer apart.

        Args:
            tokens: as sampled, stop token included or not.
            prompt: what stood before them. Where it ends in an open `<think>`, the answer begins
                as reasoning, and is nothing else if it never says `</think>`.
        """
        form = self.call_format or NO_CALLS
        return form.parse(tokens, self.tokenizer, self.tools, prompt=prompt)

    def message(self, answer: Answer) -> dict[str, Any]:
        """Return the assistant's message of an answer; calls that are wrong are left out."""
        calls = [call for call in answer.calls if call.error is None]
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if calls and self.template.style:
            message = self.template.style(calls, answer.text)
        elif calls and self.call_format:
            message["content"] = f"{answer.text}\n{self.call_format.write(calls)}".strip()
        return message | ({"reasoning_content": answer.reasoning} if answer.reasoning else {})

    def drifts(self, messages: Sequence[Message], tokens: Sequence[int]) -> bool:
        """Return whether the template would write a chat otherwise than its stream of ids has it.

        Texts between special tokens are compared without the spaces at their ends. The template may
        go on after the stream.

        Args:
            messages: the chat; those of answers as `message` returns them.
            tokens: the stream.

        Raises:
            ValueError: the template refuses the chat.
        """
        chat = self.as_rendered(messages)
        waits = bool(chat) and chat[-1]["role"] != "assistant"
        rendered = self.template.render(chat, generation=waits, tools=self._told_tools)
        split = re.compile("|".join(f"({re.escape(text)})" for text in self._added) or "(?!)")
        decode = text_decoder(self.tokenizer, skip_special_tokens=False)
        _, close, is_written = self._usual
        unwritten = () if is_written else self._stop_texts
        stream, whole = (
            [p.strip() for p in split.split(text) if p and p.strip() and p not in unwritten]
            for text in (decode(list(tokens)), rendered)
        )
        if close not in self._stop_texts:  # a sampled one stands before it
            pairs = zip(stream, [*stream[1:], ""], strict=True)
            stream = [p for p, after in pairs if p not in self._stop_texts or after != close]
        opens = len(stream) == len(whole) + 1 and stream[-1] in self._stop_texts
        if opens and whole and whole[-1] not in self._stop_texts:
            stream.pop()  # a stop token that begins the next message
        return stream != whole[: len(stream)]

    def as_rendered(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return a chat as the template asks for it, its calls in the template's style."""
        return self.template.prepared([self._styled(message) for message in messages])

    def check(self) -> None:
        """Try the template on a few chats; warn where it rewrites what stands before.

        Raises:
            ValueError: the template refuses a chat, or writes a message otherwise when more follow.
        """
        probes = probe_turns(
            calls=self.call_format is not None, several=self.template.takes_several_calls
        )
        rewritten = [name for name, turn in probes if self._rewrites(name, turn)]
        if rewritten:
            log.warning(
                "the chat template rewrites an answer when more follows (%s): the stream keeps what"
                " was drawn",
                ", ".join(rewritten),
            )
        if self._moves():
            log.warning(
                "the chat template moves the tools or the system prompt when the user speaks again:"
                " the stream keeps them where they were"
            )

    def _rewrites(self, name: str, turn: Turn) -> bool:
        """Return whether an answer is written otherwise when more follows.

        Raises:
            ValueError: anything else is.
        """
        answer, new = turn
        chat, calls = [USER, self.message(answer)], answer.calls
        told = self.following(new, calls=calls)
        whole = self.template.ids(
            self.template.render([*chat, *self.template.prepared(new, calls)], generation=True)
        )
        text = self.template.render(chat, generation=False)
        asked = text[: count_common(text, self._asked)]
        before = self.template.ids(text)
        head, tail = whole[: len(whole) - len(told)], whole[len(whole) - len(told) :]
        if tail == told and before[: len(head)] in (head, head[:-1]):  # the last may be an opener
            return False
        kept = before[: count_common(before, self.template.ids(self._asked))]
        if tail == told and whole[: len(kept)] == kept and USER["content"] in asked:
            return True
        raise ValueError(
            f"chat template: it is not append-only ({name}): with more messages it writes "
            f"{self.tokenizer.decode(whole)!r}, expected this to begin with "
            f"{self.tokenizer.decode(before)!r} and to end in {self.tokenizer.decode(told)!r}"
        )

    def _moves(self) -> bool:
        more = [{"role": "assistant", "content": REPLY}, {"role": "user", "content": "More."}]
        for chat in ([{"role": "system", "content": "Be brief."}, USER], [USER]):
            try:
                whole = self.template.render(
                    [*chat, *more], generation=True, tools=self._told_tools
                )
                asked = self.template.render(chat, generation=False, tools=self._told_tools)
                opened = self.template.render(chat, generation=True, tools=self._told_tools)
            except ValueError:
                continue  # it takes no system prompt
            return not whole.startswith(asked[: count_common(asked, opened)])
        return False

    @functools.cached_property
    def _usual(self) -> tuple[str, str, bool]:
        return self._cut([{"role": "user", "content": "More."}])

    @functools.cached_property
    def _added(self) -> list[str]:
        return sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)

    @functools.cached_property
    def _asked(self) -> str:
        return self.template.render([USER], generation=False)

    @functools.cached_property
    def _stop_texts(self) -> dict[str, int]:
        """The ids of stop tokens by their texts, the tokenizer's own first, then the template's."""
        added = {token: text for text, token in self.tokenizer.get_added_vocab().items()}
        stops = sorted(self._stops, key=lambda token: token != self.tokenizer.eos_token_id)
        with contextlib.suppress(ValueError):  # a template in which no token ends an answer
            stops += [token for token in self.template.closing_ids if token not in stops]
        decode = text_decoder(self.tokenizer, skip_special_tokens=False)
        return {added.get(token) or decode([token]): token for token in stops}

    def _styled(self, message: Message) -> Message:
        """Return a message whose calls are written as text where the template writes none."""
        given = message.get("tool_calls")
        if not given or self.template.style is not None or self.call_format is None:
            return message
        calls = read_calls(message, "message")
        answer = Answer(message.get("content") or "", tuple(calls))
        return {k: message[k] for k in message if k != "tool_calls"} | self.message(answer)

    def _neutral(self, messages: Sequence[Message]) -> list[Message]:
        """Return a chat whose last answer is one that the messages may follow."""
        calls = [
            ToolCall(message["name"], {}, message["tool_call_id"])
            for message in messages
            if message["role"] == "tool"
        ]
        if not calls or self.template.style is None:
            return [USER, {"role": "assistant", "content": REPLY}]
        several = self.template.takes_several_calls
        return [USER, self.template.style(calls if several else calls[:1])]

    def _check_shown(self, messages: Sequence[Message]) -> None:
        """Raise ValueError if the template leaves out what messages after an answer say.

        Messages of the same roles are rendered once in which each content is a unique sign.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._shown:
            signs = [f"zq{number}sign" for number in range(len(messages))]
            signed = [{**m, "content": s} for m, s in zip(messages, signs, strict=True)]
            told, _, _ = self._cut(signed)
            self._shown[roles] = [i for i, sign in enumerate(signs) if sign not in told]
        for number in self._shown[roles]:
            raise ValueError(
                f"messages[{number}] (role {roles[number]!r}): the chat template leaves it out "
                "after an answer; use a role that it knows, such as user"
            )

    def _cut(self, messages: Sequence[Message]) -> tuple[str, str, bool]:
        """Render a neutral chat with new messages, and cut it after the assistant's turn.

        Returned are the text behind it, that of the stop token which ends the turn, and whether the
        template itself writes this token.

        The turn's end is the last stop token before what the first message says, which is where
        the texts of two chats part that differ in nothing else.
        """
        neutral = self._neutral(messages)
        other = {**messages[0], "content": "zqother"}
        text, second = (
            self.template.render([*neutral, first, *messages[1:]], generation=True)
            for first in (messages[0], other)
        )
        start = count_common(self._asked, text)
        end = count_common(text, second)
        ends = [(text.rfind(stop, start, end), stop) for stop in self._stop_texts]
        position, close = max(ends, key=lambda pair: pair[0])
        if position >= 0:
            return text[position + len(close) :], close, True
        before = self.template.render(neutral, generation=False)
        for stop in filter(before.endswith, self._stop_texts):  # in history it ends otherwise
            kept = before.removesuffix(stop)
            close = next(filter(text[len(kept) :].startswith, self._added), None)
            if text.startswith(kept) and close is not None:
                return text[len(kept) + len(close) :], close, True
        if not text.startswith(before):
            raise ValueError(
                f"chat template: it is not append-only: got {text!r}, expected this to begin with "
                f"{before!r}"
            )
        return text[len(before) :], next(iter(self._stop_texts)), False
