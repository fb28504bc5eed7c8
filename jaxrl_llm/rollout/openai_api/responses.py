"""From what an engine samples to the JSON of OpenAI's APIs, also while tokens come."""

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.call_formats import CLOSE, OPEN, count_common
from jaxrl_llm.data.token_bytes import (
    AnswerText,
    Decode,
    Vocabulary,
    decode_after,
    longest_beginning,
    text_decoder,
)
from jaxrl_llm.data.turns import (
    NO_CALLS,
    THINK,
    Answer,
    CallFormat,
    TurnTemplate,
    marker_signs,
    sign_decoder,
    unmark,
)
from jaxrl_llm.rollout.engine import LEAST_LOGPROB, Completion, ScoredTokens
from jaxrl_llm.rollout.openai_api.requests import (
    GenerationRequest,
    answer_message,
    finish_reason,
    tool_calls,
)

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
        self, template: TurnTemplate, *, prompt: Sequence[int], index: int, stops: Sequence[str]
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
        self.answer: Answer | None = None

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

    def _read_answer(self) -> Answer:
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
) -> Answer:
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


class ResponseChoice:
    """One answer on its way: its text so far, and its tokens' count.

    Args:
        request: that it answers.
        index: among the choices.
        vocabulary: single tokens as texts.
        decode: tokens -> text.
    """

    def __init__(
        self, request: GenerationRequest, index: int, vocabulary: Vocabulary, decode: Decode
    ) -> None:
        """Begin without a token."""
        self._request, self._index, self._vocabulary = request, index, vocabulary
        self._prompt = request.prompts[index // request.n]
        self._text = AnswerText(decode_after(self._prompt, decode), request.sampling.stop)
        self._stream = None
        if request.template is not None:
            self._stream = AnswerStream(
                request.template, prompt=self._prompt, index=index, stops=request.sampling.stop
            )
        self.tokens = 0

    def take(self, piece: Completion, *, first: bool, whole: bool) -> dict[str, Any] | None:
        """Return the choice's JSON for a piece; None for a piece that shows nothing yet.

        Args:
            piece: the next one.
            first: whether it is the first one.
            whole: whether it is the only one, and the JSON is an answer's, not a chunk's.
        """
        request, tokens = self._request, piece.tokens.tolist()
        self.tokens += len(tokens)
        shown, offsets, calls = self._read(piece, tokens, first=first, whole=whole)
        finish = piece.finish or ("stop" if self.ended else None)
        if not (shown or finish or first or request.logprobs or request.token_ids):
            return None
        choice: dict[str, Any] = {"index": self._index}
        if not request.chat:
            choice["text"] = shown.get("content", "")
        else:
            choice["message" if whole else "delta"] = shown
        logprobs = chat_logprobs if request.chat else completion_logprobs
        choice["logprobs"] = (
            logprobs(piece, offsets, self._vocabulary) if request.logprobs else None
        )
        choice["finish_reason"] = finish and finish_reason(finish, has_calls=calls)
        if finish:
            choice["stop_reason"] = piece.stopped_by
        if request.token_ids:
            choice["token_ids"] = tokens
            if first:
                choice["prompt_token_ids"] = list(self._prompt)
        return choice

    @property
    def ended(self) -> bool:
        """Tell whether a stop text has ended it."""
        return self._stream.stopped if self._stream else self._text.stopped_by is not None

    def _read(
        self, piece: Completion, tokens: list[int], *, first: bool, whole: bool
    ) -> tuple[dict[str, Any], list[int], bool]:
        """Return what a piece adds, where each token's text begins, and whether there are calls."""
        by_token = piece.finish == "stop" and not isinstance(piece.stopped_by, str)
        seen = tokens[:-1] if by_token else tokens  # the stop token is no text
        last = whole or bool(piece.finish)
        begins = {"role": "assistant", "content": ""} if first else {}
        if self._stream is not None:
            delta, answer = self._stream.push(seen, last=last), self._stream.answer
            told = answer_message(answer) if whole and answer else begins | delta
            return told, [], self._stream.has_calls
        text, offsets = "", []
        for i, token in enumerate(tokens if self._request.logprobs else ()):
            offsets.append(self._text.length)
            text += self._text.push([token] if i < len(seen) else [])
        text += self._text.push([] if self._request.logprobs else seen, last=last)
        if whole:
            return answer_message(Answer(text)), offsets, False
        return begins | ({"content": text} if text else {}), offsets, False


def completion_logprobs(
    piece: Completion, offsets: Sequence[int], vocabulary: Vocabulary
) -> dict[str, Any]:
    """Return log-probs as `/v1/completions` has them."""
    tokens = [vocabulary.text_of(token) for token in piece.tokens.tolist()]
    logprobs = [floor(value) for value in piece.logprobs.tolist()]
    tops = list[dict[str, float]]()
    for token, own, top in zip(tokens, logprobs, top_pairs(piece), strict=True):
        by_text = dict[str, float]()
        for text, logprob in [*((vocabulary.text_of(t), floor(p)) for t, p in top), (token, own)]:
            by_text[text] = max(logprob, by_text.get(text, logprob))  # two tokens may have one text
        tops.append(by_text)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def chat_logprobs(
    piece: Completion, offsets: Sequence[int], vocabulary: Vocabulary
) -> dict[str, Any]:
    """Return log-probs as `/v1/chat/completions` has them, which knows no offsets."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.bytes_of(token)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": floor(logprob), "bytes": list(data)}

    pairs = zip(piece.tokens.tolist(), piece.logprobs.tolist(), strict=True)
    content = [
        entry(token, logprob) | {"top_logprobs": [entry(t, p) for t, p in top]}
        for (token, logprob), top in zip(pairs, top_pairs(piece), strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    scored: ScoredTokens, prompt: Sequence[int], top: int, vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """Return the log-probs of a prompt as vLLM has them.

    The first entry is null. The others have the token itself and the likeliest ones, by id.

    Args:
        scored: what the engine says.
        prompt: token ids.
        top: how many of the likeliest are told.
        vocabulary: single tokens as texts.
    """
    entries: list[dict[str, Any] | None] = [None]
    for place in range(1, len(prompt)):
        told = {prompt[place]: float(scored.logprobs[place])} | {
            int(token): float(logprob)
            for token, logprob in zip(
                scored.top_ids[place, :top], scored.top_logprobs[place, :top], strict=True
            )
        }
        entries.append(
            {
                str(token): {"logprob": floor(logprob), "decoded_token": vocabulary.text_of(token)}
                for token, logprob in told.items()
            }
        )
    return entries


def top_pairs(piece: Completion) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens of each step with their log-probs."""
    if piece.top is None:
        return [[] for _ in piece.tokens]
    return [
        list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
        for tokens, logprobs in zip(*piece.top, strict=True)
    ]


def floor(logprob: float) -> float:
    """Return a log-prob that JSON can hold.

    >>> floor(-float("inf"))
    -9999.0
    """
    return max(logprob, LEAST_LOGPROB)


class Envelope:
    """What stands around the choices of all answers to one request.

    Args:
        request: that the choices answer.
        model: its name.
    """

    def __init__(self, request: GenerationRequest, model: str) -> None:
        """Draw an id."""
        self._request = request
        kind = "chat.completion" if request.chat else "text_completion"
        chunk = ".chunk" if request.chat and request.stream else ""
        self._around = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind + chunk,
            "created": int(time.time()),
            "model": model,
        }

    def answer(self, choices: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
        """Return a whole answer."""
        counted = usage(self._request.prompt_tokens, tokens)
        return {**self._around, **self._prompt(), "choices": choices, "usage": counted}

    def chunk(self, choice: dict[str, Any], *, first: bool) -> str:
        """Return an event of a stream."""
        counted = {"usage": None} if self._request.include_usage else {}
        prompt = self._prompt() if first else {}
        return event({**self._around, **prompt, "choices": [choice], **counted})

    def end(self, tokens: int) -> str:
        """Return the events that end a stream."""
        counted = usage(self._request.prompt_tokens, tokens)
        last = {**self._around, "choices": [], "usage": counted}
        return (event(last) if self._request.include_usage else "") + "data: [DONE]\n\n"

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt's tokens where a chat asks for them: vLLM has them here."""
        shows = self._request.chat and self._request.token_ids
        return {"prompt_token_ids": list(self._request.prompts[0])} if shows else {}


def usage(prompt: int, answer: int) -> dict[str, int]:
    """Return the count of tokens as chats have it."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def event(tree: dict[str, Any]) -> str:
    r"""Return a server-sent event.

    >>> event({"n": 1})
    'data: {"n": 1}\n\n'
    """
    return f"data: {json.dumps(tree)}\n\n"
