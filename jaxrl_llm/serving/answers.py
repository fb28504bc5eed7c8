"""A chat's answer as its tokens come: reasoning, text, and calls of tools."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.data.call_text import CLOSE, OPEN
from jaxrl_llm.data.tool_calls import marker_signs, opens_reasoning, unmark
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.serving.messages import read_answer, tool_calls
from jaxrl_llm.serving.text import AnswerText, longest_beginning

THINK = ("<think>", "</think>")


class AnswerStream:
    """The deltas of one answer.

    Reasoning and text are given as they come. From where a call may begin on, all is held back
    until the answer ends, and is read then as `read_answer` reads it.

    Args:
        template: knows the tools and how calls are written.
        prompt: what stands before the answer.
        index: the answer's number among those to the prompt.
        stops: texts that end the answer and are no part of it.
    """

    def __init__(
        self,
        template: TurnTemplate,
        *,
        prompt: Sequence[int],
        index: int,
        stops: Sequence[str],
    ) -> None:
        """Begin without a token."""
        form = template.call_format
        self._template, self._stops = template, stops
        self._decode = functools.partial(template.tokenizer.decode, skip_special_tokens=True)
        self._prompt, self._index = prompt, index
        self._markers = (*THINK, *(form.markers if form else ()))
        self._bare = form.bare if form else ""
        self._by_id, self._by_text = marker_signs(template.tokenizer, self._markers)
        self._words = AnswerText(self._decode, stops)
        self._tokens: list[int] = []
        self._unread = ""  # with signs in the places of markers
        self._reasoning = self._content = ""
        self._sent = {"reasoning_content": "", "content": ""}
        self._thinks = opens_reasoning(prompt, template.tokenizer)
        self._thought = self._thinks
        self._holds = False
        self.has_calls = False

    @property
    def stopped(self) -> bool:
        """Tell whether a stop text has ended it."""
        return self._words.stopped

    def push(self, tokens: Sequence[int], *, last: bool = False) -> dict[str, Any]:
        """Take the next tokens and return what is now certain, as fields of a delta.

        Args:
            tokens: any number of them, without the stop token that ends the answer.
            last: nothing follows.
        """
        self._tokens += tokens
        self._unread += self._read(tokens, last)
        for text, sign in self._by_text.items():
            self._unread = self._unread.replace(text, sign)
        self._advance()
        if not (last or self.stopped):
            content = self._content.lstrip() if self._thought else self._content
            return self._fresh("reasoning_content", self._reasoning.strip()) | self._fresh(
                "content", content.rstrip()
            )
        answer = read_answer(
            self._template,
            self._tokens,
            prompt=self._prompt,
            index=self._index,
            stops=self._stops,
        )
        self.has_calls = bool(answer.calls)
        calls = enumerate(tool_calls(answer.calls))
        given = [{"index": number} | call for number, call in calls]
        return (
            self._fresh("reasoning_content", answer.reasoning)
            | self._fresh("content", answer.text)
            | ({"tool_calls": given} if given else {})
        )

    def _read(self, tokens: Sequence[int], last: bool) -> str:
        """Return the text that tokens add, each marker as one sign."""
        text = ""
        for is_marker, run in itertools.groupby(tokens, self._by_id.__contains__):
            if self.stopped:
                break
            if is_marker:
                text += self._words.push([], last=True) + "".join(
                    self._by_id[token] for token in run
                )
                self._words = AnswerText(self._decode, self._stops)
            else:
                text += self._words.push(list(run))
        return text + (self._words.push([], last=True) if last else "")

    def _advance(self) -> None:
        """Move what was read to the reasoning or to the text, up to where a call may begin."""
        while not self._holds:
            others = [chr(0xD800 + i) for i in range(2, len(self._markers))]
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
            if sign in others:
                self._holds = True
            else:
                self._thinks, self._thought = sign == OPEN, True

    def _show(self, text: str) -> None:
        text = unmark(text, self._markers)
        if self._thinks:
            self._reasoning += text
            return
        self._content += text
        if self._bare and self._content.lstrip().startswith(self._bare):
            self._content, self._holds = "", True

    def _fresh(self, name: str, text: str) -> dict[str, str]:
        """Return what a text has beyond what was sent of it."""
        sent = self._sent[name]
        if not text.startswith(sent):
            sent = sent.strip()  # a call came, and the text before it lost the spaces at its ends
        if not text.startswith(sent) or len(text) == len(sent):
            return {}
        self._sent[name] = text
        return {name: text[len(sent) :]}
