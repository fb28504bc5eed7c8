"""Log-probs of given tokens, from a server that speaks OpenAI's API: vLLM, or `jaxrl_llm.serve`."""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import httpx2
import numpy as np

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.rollout.engine import ScoredTokens
from jaxrl_llm.workers.retries import wait_before_retry
from jaxrl_llm.workers.values import shorten

SAMPLE = 'The sum of 12 and 345 is 357.\n\tdef f(x): return x != "naïve"  # 世界 🙂\n'
"""The known text by which a server's tokens are compared with those that it will be sent."""

SLACK_NATS = 1e-3
"""How far above 0 rounding may lift a log-prob."""


class ScoringError(RunError):
    """A server that gives no log-probs, or none that can be used."""


class ScoringClient:
    """A connection to a server. It works in a thread of its own; `close` ends it.

    Args:
        url: of the API, such as `http://host:8000/v1`.
        model: by which the server knows it; None takes the only one that it has.
        api_key: that the server asks for.
        concurrency: requests at once.
        timeout_s: seconds for an answer to one.
        retries: further tries where a request is refused for now, fails or takes too long.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        concurrency: int = 32,
        timeout_s: float = 120.0,
        retries: int = 4,
    ) -> None:
        """Ask for nothing yet."""
        self.url, self.model = url.rstrip("/"), model
        self._timeout_s, self._retries = timeout_s, retries
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        pool = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx2.AsyncClient(headers=headers, timeout=None, limits=pool)
        self._slots = asyncio.Semaphore(concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="scoring")
        self._thread.start()

    def open(self) -> int | None:
        """Find the model; return the most tokens that it takes, or None where it does not say.

        Raises:
            ScoringError: it can't be reached, or has no such model.
        """
        reply = self._run(self._ask("GET", "/models"))
        try:
            models = {str(model["id"]): model.get("max_model_len") for model in reply["data"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise ScoringError(
                f"{self.url}/models: got {_shown(reply)}, expected models"
            ) from error
        if self.model is None and len(models) == 1:
            self.model = next(iter(models))
        if self.model not in models:
            raise ScoringError(
                f"{self.url} has the models {', '.join(sorted(models))}, expected "
                f"{self.model or 'one alone'}: name one of them (teacher.model)"
            )
        return models[self.model]

    def check_tokens(
        self, encode: Callable[[str], Sequence[int]], *, longest: int | None, top: int
    ) -> None:
        """Score a known text as text and as token ids, and compare the two.

        Args:
            encode: from a text to the ids that the server will be sent.
            longest: the most tokens that the server takes.
            top: as `score`.

        Raises:
            ScoringError: to the server the ids mean another text, or its numbers are not of the
                tokens that they stand at.
        """
        text = SAMPLE if longest is None else SAMPLE[: max(1, (longest - 2) // 4)]
        tokens = list(encode(text))
        by_text = self._run(self._ask_score(text, top))
        try:
            expected = parse_scores(by_text, tokens, top)
        except ScoringError as error:
            raise ScoringError(
                f"{self.url}: its model reads {text!r} as other tokens than these ids: {error}; "
                "name the directory of its tokenizer (teacher.tokenizer)"
            ) from error
        scored = self.score([tokens], top)[0].logprobs
        apart = float(np.abs(scored - expected.logprobs).max())
        if apart > 0.5:  # nats: batches and low precision make less
            raise ScoringError(
                f"{self.url}: log-probs of the same tokens differ by {apart:.3g} nats from one "
                "request to the next: expected the same ones"
            )

    def submit(
        self, sequences: Sequence[Sequence[int]], top: int = 0
    ) -> Future[list[ScoredTokens]]:
        """Begin to score sequences of token ids; see `score`. Cancelling gives all up."""
        return asyncio.run_coroutine_threadsafe(self._score_all(sequences, top), self._loop)

    def score(self, sequences: Sequence[Sequence[int]], top: int = 0) -> list[ScoredTokens]:
        """Return the log-probs of the tokens of each sequence, in their order.

        Args:
            sequences: token ids; of one token or more.
            top: how many of the likeliest tokens are told for each place.

        Raises:
            ScoringError: one has no answer after all tries, or an answer that is not of its tokens.
        """
        return _result(self.submit(sequences, top))

    def close(self) -> None:
        """Give up what is asked for, and end the thread."""
        if self._loop.is_closed():
            return
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return _result(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    async def _score_all(self, sequences: Sequence[Sequence[int]], top: int) -> list[ScoredTokens]:
        async def score(tokens: Sequence[int]) -> ScoredTokens:
            async with self._slots:
                reply = await self._ask_score(list(map(int, tokens)), top)
            return parse_scores(reply, tokens, top)

        tasks = [asyncio.create_task(score(tokens)) for tokens in sequences]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # where one has failed the others are of no use
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_score(self, prompt: str | list[int], top: int) -> Any:
        """Ask for the log-probs of a prompt; a token has to be drawn, and is dropped."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": top}
        return await self._ask("POST", "/completions", body)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask until there is an answer, or the tries are over."""
        tries = 0
        while True:
            try:
                return await self._ask_once(method, path, body)
            except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
                raise ScoringError(f"teacher.url: {self.url!r} is no address: {error}") from error
            except (TimeoutError, httpx2.HTTPError) as error:
                tries += 1
                wait, failure = wait_before_retry(error, tries), self._describe(error)
            if wait is None:
                raise ScoringError(f"{self.url}{path} refused a request, {failure}")
            if tries > self._retries:
                raise ScoringError(
                    f"{self.url}{path} has not answered in {tries} tries; the last: {failure}"
                )
            await asyncio.sleep(wait)

    async def _ask_once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with asyncio.timeout(self._timeout_s):
            reply = await self._http.request(method, self.url + path, json=body)
        reply.raise_for_status()
        try:
            return reply.json()
        except ValueError as error:  # of a proxy, or cut
            raise httpx2.RemoteProtocolError(f"an answer that is no JSON: {error}") from error

    def _describe(self, error: Exception) -> str:
        if isinstance(error, httpx2.HTTPStatusError):
            return f"status {error.response.status_code}: {_message(error.response)}"
        if isinstance(error, TimeoutError):
            return f"no answer in {self._timeout_s:g} s"
        return f"{type(error).__name__}: {error}".rstrip(": ")


def parse_scores(reply: Any, tokens: Sequence[int], top: int) -> ScoredTokens:
    """Read the `prompt_logprobs` of an answer of `/v1/completions`.

    Its first entry is null; the others have the token itself and the likeliest ones, k or k + 1.

    Args:
        reply: the answer's JSON.
        tokens: the prompt's.
        top: k, how many of the likeliest were asked for.

    Raises:
        ScoringError: the answer is not of these tokens.

    >>> entries = [None, {"7": {"logprob": -2.5}, "3": {"logprob": -0.25}}]
    >>> parse_scores({"choices": [{"prompt_logprobs": entries}]}, [1, 7], 1).top_ids.tolist()
    [[0], [3]]
    """
    try:
        entries = reply["choices"][0]["prompt_logprobs"]
    except (KeyError, IndexError, TypeError) as error:
        raise ScoringError(
            f"got an answer without prompt_logprobs, expected those of vLLM or jaxrl_llm.serve: "
            f"{_shown(reply)}"
        ) from error
    if not isinstance(entries, list) or len(entries) != len(tokens):
        got = f"{len(entries)} entries" if isinstance(entries, list) else _shown(entries)
        raise ScoringError(f"prompt_logprobs: got {got}, expected one for each of {len(tokens)}")
    if entries[0] is not None:
        raise ScoringError(
            f"prompt_logprobs: the first entry is {_shown(entries[0])}, expected null: nothing "
            "stands before the first token"
        )
    scored = ScoredTokens(
        np.zeros(len(tokens), np.float32),
        np.zeros((len(tokens), top), np.int32),
        np.zeros((len(tokens), top), np.float32),
    )
    for place, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        if place:
            own, likeliest = _read_entry(entry, token, place, top)
            scored.logprobs[place] = own
            for rank, (other, logprob) in enumerate(likeliest):
                scored.top_ids[place, rank] = other
                scored.top_logprobs[place, rank] = logprob
    return scored


def _read_entry(
    entry: Any, token: int, place: int, top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return a token's log-prob, and the likeliest tokens with theirs."""
    try:
        logprobs = {int(name): float(told["logprob"]) for name, told in entry.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ScoringError(
            f"prompt_logprobs: entry {place} is {_shown(entry)}, expected token ids with logprob"
        ) from error
    if token not in logprobs:
        raise ScoringError(
            f"prompt_logprobs: entry {place} is of the tokens {sorted(logprobs)[:8]}, expected "
            f"token {token}, which stands there"
        )
    if not all(math.isfinite(value) and value <= SLACK_NATS for value in logprobs.values()):
        raise ScoringError(
            f"prompt_logprobs: entry {place} has {_shown(entry)}, expected log-probs: finite, and "
            "at most 0"
        )
    if len(logprobs) < top:
        raise ScoringError(
            f"prompt_logprobs: entry {place} has {len(logprobs)} tokens, expected the {top} "
            "likeliest"
        )
    ranked = sorted(logprobs.items(), key=lambda pair: -pair[1])
    return logprobs[token], ranked[:top]


def _result(future: Future[Any]) -> Any:
    """Wait for what a thread does; give it up where the wait is interrupted."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _message(reply: httpx2.Response) -> str:
    try:
        error = reply.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return _shown(reply.text)


def _shown(value: Any) -> str:
    return shorten(repr(value), 160)
