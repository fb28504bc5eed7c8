"""What every engine that samples from the policy can do."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.rollout.types import Completion, Receipt, Request, ScoredTokens


class EngineError(RunError):
    """A request that an engine can't serve, or an engine that failed."""


@dataclass(frozen=True)
class EngineSettings:
    """Room and precision of an engine.

    Attributes:
        max_running_sequences: sequences decoded at once, in all.
        max_tokens: the longest sequence, prompt and answer.
        cache_gb: GB of each device for keys, values and states at most; None is enough for the
            longest sequence in every slot.
        record_routes: whether answers say which experts their tokens went to, where the native
            engine samples from a mixture of experts.
        cached_sequences: of how many sequences of the longest length the native engine keeps keys
            and values, running or waiting for a tool, as far as `cache_gb` allows; None: those that
            run.
        dtype: of weights, cache and computation.
        quantization: `fp8` for the layers' matrices in float8; `none`.
        kv_cache_dtype: of the cache, where it is not auto: int8 of the native engine, or vLLM's.
    """

    max_running_sequences: int
    max_tokens: int
    cache_gb: int | float | None = None
    dtype: str = "float32"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    cached_sequences: int | None = None
    record_routes: bool = False


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and log-probs out, under a known version of the weights."""

    async def generate(self, request: Request) -> Completion:
        """Sample one answer; cancelling the coroutine gives the request up.

        Raises:
            EngineError: the request does not fit, the engine is closed or has no weights.
        """
        ...

    def stream(self, request: Request) -> AsyncIterator[Completion]:
        """Sample one answer and yield its pieces as they come; the last one has a `finish`.

        Raises:
            EngineError: as `generate`.
        """
        ...

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order; requests may share their prompt."""
        ...

    def load(self, params: Any, version: int) -> Receipt:
        """Take new weights into the engine's layout and echo their version and checksum."""
        ...

    def pause(self) -> None:
        """Start nothing new until `resume`; what has started goes on."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def sleep(self) -> None:
        """Pause, and free the cache."""
        ...

    def wake(self) -> None:
        """Allocate the cache again and resume."""
        ...

    def close(self) -> None:
        """Stop; requests that wait fail."""
        ...


class Stop:
    """Ends a sampling before all is drawn: when it is told to, or has taken so many turns.

    Args:
        turns: of the engine, after which it ends; None: when `set` is called. A turn is what the
            engine computes between two looks at what has come.

    Attributes:
        taken: turns that the engine has taken.
    """

    def __init__(self, turns: int | None = None) -> None:
        """Nothing has stopped yet."""
        self.turns, self.taken = turns, 0
        self._told, self._callbacks = threading.Event(), list[Callable[[], None]]()
        self._lock = threading.Lock()
        if turns == 0:
            self.set()

    @property
    def is_set(self) -> bool:
        """Return whether the sampling is to end."""
        return self._told.is_set()

    def set(self) -> None:
        """End the sampling."""
        with self._lock:
            self._told.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def count_turn(self) -> None:
        """Count a turn that the engine has taken, also one in which the sampling was stopped."""
        self.taken += 1
        if self.taken == self.turns:
            self.set()

    def on_set(self, callback: Callable[[], None]) -> None:
        """Call a function once the sampling is to end, in any thread."""
        with self._lock:
            if not self._told.is_set():
                self._callbacks.append(callback)
                return
        callback()


Listener = Callable[[int, Completion], None]
"""Called with the number of a request and its answer, in any thread."""


@runtime_checkable
class PartialEngine(Engine, Protocol):
    """An engine that can leave answers before their end, and go on with them later."""

    def sample_until(
        self,
        requests: Sequence[Request],
        needed: int,
        stop: Stop | None = None,
        listener: Listener | None = None,
    ) -> list[Completion]:
        """Sample until the first `needed` requests have their answers, or it is to stop.

        All are returned as they stand: one that is not whole has no `finish`; as `Request.drawn` it
        is gone on with. Requests run in their order as far as there is room. The listener is told
        of each answer that becomes whole.

        Raises:
            EngineError: as `generate`; or `needed` is none of 1 to the number of requests.
        """
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that also says how likely given tokens are."""

    def score_tokens(self, tokens: Sequence[int]) -> ScoredTokens:
        """Return the log-probs of tokens under the weights that it holds, and the likeliest ones.

        Raises:
            EngineError: the tokens do not fit, the engine is closed or has no weights.
        """
        ...


@runtime_checkable
class CountingEngine(Protocol):
    """An engine that says what it does."""

    def stats(self) -> Any:
        """Return what the engine does now, and has done since it was made."""
        ...


def check_needed(needed: int, requests: int) -> None:
    """Refuse a number of requests that can't be waited for.

    Raises:
        EngineError: it is none of 1 to their number.
    """
    if not 1 <= needed <= requests:
        raise EngineError(f"sample_until: got needed={needed}, expected 1 to {requests}")


def images_refused(request: Request) -> EngineError:
    """Return the error of a request with images or videos to an engine of a model of text."""
    return EngineError(
        f"got {len(request.visuals)} images or videos for a model that reads text alone "
        "(model.vision=none); expected model.vision=frozen or model.vision=trained, of a model "
        "with a vision tower"
    )


def check_request(
    request: Request, *, max_tokens: int, vocab_size: int, limits: Mapping[str, int]
) -> None:
    """Refuse a request that no engine, or not this one, can serve.

    Args:
        request: to look at.
        max_tokens: the longest sequence, prompt and answer.
        vocab_size: of the model.
        limits: of `top_logprobs`, and where the engine has limits of `stop_ids` and `logit_bias`.

    Raises:
        EngineError: something is out of range.
    """
    prompt, sampling = request.prompt, request.sampling
    longest = len(prompt) + sampling.max_new_tokens
    if not prompt or sampling.max_new_tokens < 1 or longest > max_tokens:
        raise EngineError(
            f"a prompt of {len(prompt)} tokens with max_new_tokens={sampling.max_new_tokens} does "
            f"not fit: the engine holds sequences of 2 to {max_tokens} tokens"
        )
    if (drawn := request.drawn) is not None and (
        drawn.finish or len(drawn.tokens) >= sampling.max_new_tokens or sampling.top_logprobs
    ):
        raise EngineError(
            f"got an answer of {len(drawn.tokens)} tokens to go on with, finish={drawn.finish!r}; "
            f"expected one that is not whole, of less than {sampling.max_new_tokens} tokens, and "
            "no top_logprobs"
        )
    vocabulary = range(vocab_size)
    for field, ids in (("prompt", prompt), ("logit_bias", [i for i, _ in sampling.logit_bias])):
        if ids and not (min(ids) in vocabulary and max(ids) in vocabulary):
            raise EngineError(
                f"{field} holds token id {min(ids) if min(ids) < 0 else max(ids)}, "
                f"expected 0 to {vocab_size - 1}"
            )
    for name, value, least, greatest in (
        ("seed", request.seed, 0, 2**32 - 1),
        ("temperature", sampling.temperature, 0, np.inf),
        ("top_p", sampling.top_p, 0, 1),
        ("top_k", sampling.top_k, 0, 2**31 - 1),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, np.finfo(np.float32).tiny, np.inf),
        ("top_logprobs", sampling.top_logprobs, 0, min(limits["top_logprobs"], vocab_size)),
        ("number of stop_ids", len(sampling.stop_ids), 0, limits.get("stop_ids", np.inf)),
        ("number of logit_bias", len(sampling.logit_bias), 0, limits.get("logit_bias", np.inf)),
    ):
        if not least <= value <= greatest:
            raise EngineError(f"got {name} {value}, expected {least} to {greatest}")


def results_of(futures: Sequence[Future[Completion]]) -> list[Completion]:
    """Wait for answers, in order; give all of them up where that fails or is interrupted."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def listened(
    futures: list[Future[Completion]], listener: Listener | None
) -> list[Future[Completion]]:
    """Tell a listener of each answer that becomes whole; return the same futures."""

    def tell(number: int, listener: Listener, future: Future[Completion]) -> None:
        if not future.cancelled() and future.exception() is None and future.result().finish:
            listener(number, future.result())

    if listener is not None:
        for number, future in enumerate(futures):
            future.add_done_callback(functools.partial(tell, number, listener))
    return futures


def wait_for_first(futures: Sequence[Future[Completion]], stop: Stop | None) -> None:
    """Wait until all answers have come, one has failed, or it is to stop."""
    ended, left, lock = threading.Event(), len(futures), threading.Lock()

    def count(future: Future[Completion]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if not left or future.cancelled() or future.exception() is not None:
                ended.set()

    for future in futures:
        future.add_done_callback(count)
    if stop is not None:
        stop.on_set(ended.set)
    ended.wait()


async def streamed(
    submit: Callable[[Callable[[Completion], None]], Future[Completion]],
) -> AsyncIterator[Completion]:
    """Yield the pieces of an answer as another thread finds them.

    Args:
        submit: takes what is to be called with each piece, and returns the future answer.

    Raises:
        EngineError: as the future does.
    """
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[Completion | None] = asyncio.Queue()

    def tell(piece: Completion | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    future = submit(tell)
    future.add_done_callback(lambda _: tell(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        future.result()  # raises what went wrong
    finally:
        future.cancel()
