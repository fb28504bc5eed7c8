"""From what an engine samples to the JSON of OpenAI's two APIs."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.data.token_bytes import AnswerText, Decode, Vocabulary, decode_after
from jaxrl_llm.data.tool_calls import ParsedAnswer
from jaxrl_llm.rollout.types import LEAST_LOGPROB, Completion, ScoredTokens
from jaxrl_llm.serving.answers import AnswerStream, read_answer
from jaxrl_llm.serving.messages import answer_message, finish_reason
from jaxrl_llm.serving.requests import GenerationRequest


class ResponseChoice:
    """One answer on its way: its text so far, and its tokens' count.

    Args:
        request: that it answers.
        index: among the choices.
        vocabulary: single tokens as texts.
        decode: tokens -> text.
    """

    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        vocabulary: Vocabulary,
        decode: Decode,
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
        template, stops, last = self._request.template, self._request.sampling.stop, piece.finish
        if template is not None and whole:
            answer = read_answer(
                template, seen, prompt=self._prompt, index=self._index, stops=stops
            )
            return answer_message(answer), [], bool(answer.calls)
        begins = {"role": "assistant", "content": ""} if first else {}
        if self._stream is not None:
            delta = self._stream.push(seen, last=bool(last))
            return begins | delta, [], self._stream.has_calls
        text, offsets = self._words(tokens, seen, last=bool(last))
        if whole:
            return answer_message(ParsedAnswer(text)), offsets, False
        return begins | ({"content": text} if text else {}), offsets, False

    def _words(self, tokens: list[int], seen: list[int], *, last: bool) -> tuple[str, list[int]]:
        """Return the text that a piece adds, and where the text of each token begins."""
        if not self._request.logprobs:
            return self._text.push(seen, last=last), []
        text, offsets = "", []
        for i, token in enumerate(tokens):
            offsets.append(self._text.length)
            text += self._text.push([token] if i < len(seen) else [])
        return text + self._text.push([], last=last), offsets


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
        return {**self._around, **self._prompt(), "choices": choices, "usage": self.usage(tokens)}

    def chunk(self, choice: dict[str, Any], *, first: bool) -> str:
        """Return an event of a stream."""
        usage = {"usage": None} if self._request.include_usage else {}
        prompt = self._prompt() if first else {}
        return event({**self._around, **prompt, "choices": [choice], **usage})

    def end(self, tokens: int) -> str:
        """Return the events that end a stream."""
        last = {**self._around, "choices": [], "usage": self.usage(tokens)}
        return (event(last) if self._request.include_usage else "") + "data: [DONE]\n\n"

    def usage(self, tokens: int) -> dict[str, int]:
        """Return the count of tokens."""
        prompt = self._request.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt's tokens where a chat asks for them: vLLM has them here."""
        shows = self._request.chat and self._request.token_ids
        return {"prompt_token_ids": list(self._request.prompts[0])} if shows else {}


def event(tree: dict[str, Any]) -> str:
    r"""Return a server-sent event.

    >>> event({"n": 1})
    'data: {"n": 1}\n\n'
    """
    return f"data: {json.dumps(tree)}\n\n"
