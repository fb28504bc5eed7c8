"""A chat's answer as its tokens come: reasoning, text, and calls of tools."""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.call_text import CLOSE, OPEN, count_common
from jaxrl_llm.data.token_bytes import AnswerText, longest_beginning, text_decoder
from jaxrl_llm.data.tool_calls import (
    NO_CALLS,
    THINK,
    CallFormat,
    ParsedAnswer,
    marker_signs,
    sign_decoder,
    unmark,
)
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.serving.messages import tool_calls

log = logging.getLogger(__name__)


class AnswerStream:
    """The deltas of one answer.

    Reasoning and text are given as they come. From where a call may begin on, all is held back
    until the answer ends, and is read then.

    Args:
        template: knows the tools and how calls are written.
        prompt: what stands before the answer.
        index: the answer's number among those to the prompt.
        stops: texts that end the answer and are no part of it.

    Attributes:
        answer: once it has ended.
    """

    def __init__(
        self,
        template: TurnTemplate,
        *,
        prompt: Sequence[int],
        index: int,
        stops: Sequence[str],
    ) -> None:
        form = template.call_format or NO_CALLS
        self._tools, self._form = template.tools, form
        self._prompt, self._index = prompt, index
        self._markers = (*THINK, *form.markers)
        by_id, self._by_text = marker_signs(template.tokenizer, self._markers)
        decode = sign_decoder(text_decoder(template.tokenizer), by_id, prompt)
        written = {sign: unmark(sign, self._markers) for sign in by_id.values()}
        self._words = AnswerText(decode, stops, written)
        self._marked = form.opened(prompt, template.tokenizer)
        self._unread = ""  # with signs in the places of markers
        self._reasoning = self._content = ""
        self._sent = {"reasoning_content": "", "content": ""}
        self._thinks = self._thought = self._strips = bool(self._marked)
        self._holds = form.split is not None  # its channels are told apart at the end
        self.answer: ParsedAnswer | None = None

    @property
    def stopped(self) -> bool:
        """Tell whether a stop text has ended it."""
        return self._words.stopped_by is not None

    @property
    def has_calls(self) -> bool:
        """Tell whether it has ended and calls tools."""
        return self.answer is not None and bool(self.answer.calls)

    def push(self, tokens: Sequence[int], *, last: bool = False) -> dict[str, Any]:
        """Take the next tokens and return what is now certain, as fields of a delta.

        Args:
            tokens: any number of them, without the stop token that ends the answer.
            last: nothing follows.
        """
        fresh = self._words.push(tokens, last=last)
        self._marked += fresh
        self._unread = self._signed(self._unread + fresh)
        self._advance()
        if not (last or self.stopped):
            content = self._content.lstrip() if self._strips else self._content
            return self._fresh("reasoning_content", self._reasoning.strip()) | self._fresh(
                "content", content.rstrip()
            )
        self.answer = self._read_answer()
        calls = enumerate(tool_calls(self.answer.calls))
        given = [{"index": number} | call for number, call in calls]
        return (
            self._fresh("reasoning_content", self.answer.reasoning)
            | self._fresh("content", self.answer.text)
            | ({"tool_calls": given} if given else {})
        )

    def _signed(self, text: str) -> str:
        for marker, sign in self._by_text.items():
            text = text.replace(marker, sign)
        return text

    def _advance(self) -> None:
        """Move what was read to the reasoning or to the text, up to where a call may begin."""
        others = [chr(0xD800 + i) for i in range(2, len(self._markers))]
        while not self._holds:
            signs = [CLOSE] if self._thinks else others if self._thought else [OPEN, *others]
            places = [place for sign in signs if (place := self._unread.find(sign)) >= 0]
            if not places:
                keep = longest_beginning(self._unread, [*self._by_text])
                self._show(self._unread[: len(self._unread) - keep])
                self._unread = self._unread[len(self._unread) - keep :]
                return
            sign = self._unread[min(places)]
            self._show(self._unread[: min(places)])
            self._unread = self._unread[min(places) + 1 :]
            if sign == OPEN:
                self._strips = not self._content.strip()
            if sign in others:
                self._holds = True
            elif not self._holds:
                self._thinks, self._thought = sign == OPEN, True

    def _show(self, text: str) -> None:
        text = unmark(text, self._markers)
        if self._thinks:
            self._reasoning += text
            return
        self._content += text
        if self._form.bare and self._content.lstrip().startswith(self._form.bare):
            self._content, self._holds = "", True

    def _read_answer(self) -> ParsedAnswer:
        """Take the complete answer apart. If one of its calls is wrong, all stay in the text."""
        form, marked = self._form, self._signed(self._marked)
        answer = form.read_marked(marked, self._tools)
        if any(call.error is not None for call in answer.calls):  # as in vLLM
            return form._replace(read=NO_CALLS.read).read_marked(marked, self._tools)
        calls = tuple(
            call._replace(id=call_id(form, self._prompt, self._index, number))
            if call.id == form.call_id(number)
            else call  # the model has written its id
            for number, call in enumerate(answer.calls)
        )
        return answer._replace(calls=calls)

    def _fresh(self, name: str, text: str) -> dict[str, str]:
        """Return what a text has beyond what was sent of it."""
        sent, self._sent[name] = self._sent[name], text
        if not text.startswith(sent):
            log.error("a stream has sent %r, but the answer's %s is %r", sent, name, text)
        fresh = text[count_common(sent, text) :]
        return {name: fresh} if fresh else {}


def read_answer(
    template: TurnTemplate,
    tokens: Sequence[int],
    *,
    prompt: Sequence[int],
    index: int = 0,
    stops: Sequence[str] = (),
) -> ParsedAnswer:
    """Take a sampled answer apart for a client; the arguments are those of `AnswerStream`."""
    stream = AnswerStream(template, prompt=prompt, index=index, stops=stops)
    stream.push(tokens, last=True)
    assert stream.answer is not None, "it has ended"
    return stream.answer


def call_id(form: CallFormat, prompt: Sequence[int], index: int, number: int) -> str:
    """Return the id of a call, which no other turn of the chat has; the same for the same prompt.

    Args:
        form: ids of some have nine letters or digits.
        prompt: token ids.
        index: the answer's number.
        number: the call's.
    """
    digest = hashlib.sha256(np.asarray([index, number, *prompt], "<i8").tobytes()).hexdigest()
    return f"call_{digest[:24]}" if "_" in form.first_id else digest[: len(form.first_id)]
