"""What every engine that samples from the policy can do."""

import asyncio
import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.models.inputs import Visual


class Receipt(NamedTuple):
    """What an engine answers when it has loaded weights.

    Attributes:
        version: of the weights.
        checksum: of the weights as it holds them; None of an engine that holds arrays of other
            shapes, and has compared the checksum of each with that of what was sent.
        moved_bytes: what had to travel to devices that did not hold it.
    """

    version: int
    checksum: int | None
    moved_bytes: int = 0


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one answer. What is cut is cut in this order: top-k, top-p, min-p.

    Attributes:
        max_new_tokens: the longest answer.
        temperature: softmax temperature; 0 takes the likeliest token.
        top_p: sample from the smallest set of tokens with this mass.
        top_k: sample from the k likeliest tokens; 0 means all.
        min_p: sample from tokens at least this share as likely as the likeliest; 0 means all.
        repetition_penalty: logits of tokens that prompt or answer hold are divided by it where
            positive and multiplied where negative; 1 changes none.
        logit_bias: pairs of a token and what is added to its logit.
        stop_ids: tokens that end the answer; the one that did is part of it.
        stop: texts that end the answer; the token that completes one is the answer's last. One that
            is a special token's is as good as its id among `stop_ids`.
        top_logprobs: how many of the likeliest tokens are reported at each step.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0

    @property
    def asks_for_extras(self) -> bool:
        """Return whether logits are changed or reported, beyond drawing from them."""
        return bool(self.repetition_penalty != 1 or self.logit_bias or self.top_logprobs)


LEAST_LOGPROB = -9999.0
"""What stands for the log-prob of a token of no probability: JSON has no infinity."""


class ScoredTokens(NamedTuple):
    """Log-probs of given tokens, each given those before it, before any temperature.

    The first token has none: its numbers are 0.

    Attributes:
        logprobs: of each token, in nats.
        top_ids: the likeliest tokens in its place, likeliest first.
        top_logprobs: their log-probs.
    """

    logprobs: Float32[np.ndarray, " T"]
    top_ids: Int[np.ndarray, "T K"]
    top_logprobs: Float32[np.ndarray, "T K"]


NOT_DRAWN = -1
"""The turn and the version of a token that the policy did not draw."""


class Completion(NamedTuple):
    """One sampled answer, or a piece of one; in an episode also what the policy observed.

    Attributes:
        tokens: token ids, the stop token included.
        logprobs: log-probs of these tokens under softmax(logits / temperature), before top-k, top-p
            and min-p cut it (at temperature 0: under softmax(logits)).
        versions: of the weights that sampled each token.
        finish: "stop", "length", or "" for a piece that others follow and an answer that is not
            whole.
        stopped_by: the token or the text that ended it, if one did.
        top: the likeliest tokens of each step and their log-probs, likeliest first, where the
            request asks for them.
        routes: the experts to which the engine has sent the tokens of the prompt and of the answer,
            in order and but for the last, of a whole answer where the engine records them
            (`models.moe.routing.replay_routes`); None: it does not.
        drawn: whether the policy drew it; else a tool, an environment or the template told it, and
            `logprobs` are 0 and `versions` -1.
        chain: of an episode that it belongs to, in the order of their first turns.
        visuals: images and videos in what was told, in the order of their placeholder tokens.
    """

    tokens: Int[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    versions: Int[np.ndarray, " T"]
    finish: str
    stopped_by: int | str | None = None
    top: tuple[Int[np.ndarray, "T top"], Float32[np.ndarray, "T top"]] | None = None
    routes: Int[np.ndarray, "N M experts"] | None = None
    drawn: bool = True
    chain: int = 0
    visuals: tuple[Visual, ...] = ()

    @classmethod
    def told(
        cls, tokens: Sequence[int], chain: int = 0, visuals: tuple[Visual, ...] = ()
    ) -> "Completion":
        """Return tokens that the policy did not draw."""
        ids, count = np.array(tokens, np.int32), len(tokens)
        versions = np.full(count, NOT_DRAWN, np.int32)
        arrays = ids, np.zeros(count, np.float32), versions
        return cls(*arrays, "", drawn=False, chain=chain, visuals=visuals)

    def as_piece(self, chain: int = 0) -> "Completion":
        """Return a turn as an episode keeps it, which has the routes of a whole chain."""
        return self._replace(top=None, routes=None, chain=chain)


@dataclass(frozen=True)
class Request:
    """One answer to sample. The answer depends on the seed, not on what else is in flight.

    Attributes:
        prompt: token ids.
        sampling: how to sample.
        seed: of the answer.
        drawn: what has been drawn of the answer, if it was begun before: its tokens are read, and
            it goes on after them. The answer holds them, too.
        visuals: images and videos of the prompt, in the order of their placeholder tokens, of which
            the prompt has one for each token of a visual.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    drawn: Completion | None = field(default=None, compare=False)
    visuals: tuple[Visual, ...] = ()


class EpisodeLimits(NamedTuple):
    """What bounds one episode.

    Attributes:
        new_tokens: tokens after the prompt, drawn and told; of each chain. A later chain and its
            prompt have `prompt_tokens` + `new_tokens` together.
        prompt_tokens: tokens of the prompt, with what an environment says first.
        turns: that the policy draws, in all chains.
        turn_tokens: drawn in one turn; None: as many as are left.
        observation_tokens: of what a tool or an environment says at once; the middle of a longer
            text is left out.
        parallel_calls: in one turn; further ones are answered with an error.
        visual_tokens: of images and videos of a chain, with those of its prompt; None: any number.
    """

    new_tokens: int
    prompt_tokens: int
    turns: int = 8
    turn_tokens: int | None = None
    observation_tokens: int = 512
    parallel_calls: int = 4
    visual_tokens: int | None = None


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
class Engine(Protocol):
    """Token ids in, token ids and log-probs out, under a known version of the weights.

    Attributes:
        scores_tokens: whether it has `score_tokens`.
    """

    scores_tokens: bool = False

    async def generate(self, request: Request) -> Completion:
        """Sample one answer; cancelling the coroutine gives the request up.

        Raises:
            EngineError: the request does not fit, the engine is closed or has no weights.
        """
        raise NotImplementedError

    def stream(self, request: Request) -> AsyncIterator[Completion]:
        """Sample one answer and yield its pieces as they come; the last one has a `finish`.

        Raises:
            EngineError: as `generate`.
        """
        raise NotImplementedError

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order; requests may share their prompt."""
        raise NotImplementedError

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
            EngineError: as `generate`; `needed` is none of 1 to the number of requests, or the
                engine can't leave answers before their end.
        """
        raise EngineError(f"{type(self).__name__} can't leave answers before their end")

    def score_tokens(self, tokens: Sequence[int]) -> ScoredTokens:
        """Return the log-probs of tokens under the weights that it holds, and the likeliest ones.

        Raises:
            EngineError: the tokens do not fit, the engine has no weights or can't score.
        """
        raise EngineError(f"{type(self).__name__} can't score tokens")

    def load(self, params: Any, version: int) -> Receipt:
        """Take new weights into the engine's layout and echo their version and checksum."""
        raise NotImplementedError

    def pause(self) -> None:
        """Start nothing new until `resume`; what has started goes on."""
        raise NotImplementedError

    def resume(self) -> None:
        """Go on after `pause`."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Pause, and free the cache."""
        raise NotImplementedError

    def wake(self) -> None:
        """Allocate the cache again and resume."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop; requests that wait fail."""
        raise NotImplementedError

    def stats(self) -> Any:
        """Return what the engine does and has done; None: it does not count."""
        return None


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
    for name, ids in (("prompt", prompt), ("logit_bias", [i for i, _ in sampling.logit_bias])):
        if ids and not (min(ids) in vocabulary and max(ids) in vocabulary):
            raise EngineError(
                f"{name} holds token id {min(ids) if min(ids) < 0 else max(ids)}, "
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


# Which of several replicas of an engine a request goes to.


BLOCK_TOKENS = 16
MAX_TRACKED_BLOCKS = 2**18
SLACK = 8  # requests


class Router:
    """Sends what shares most of its prompt to one replica, and balances the rest.

    A replica caches what it has prefilled: the samples of one prompt go where the first of them
    went, and a conversation goes on where it began, unless that replica has more left to do than
    another by some requests. All else goes where the fewest tokens are outstanding.

    Args:
        replicas: how many there are.

    >>> router = Router(2)
    >>> first = tuple(range(64))
    >>> router.choose(first, 100), router.choose(first, 100), router.choose((7,) * 64, 100)
    (0, 0, 1)
    """

    def __init__(self, replicas: int) -> None:
        """Know no prompt."""
        self.outstanding = [0] * replicas
        self._seen: OrderedDict[int, int] = OrderedDict()  # replica, by hash of all up to a block

    def choose(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Return a replica for a request, and count its tokens there.

        Args:
            prompt: token ids.
            max_tokens: tokens that prompt and answer have at most; `done` takes them off again.
        """
        blocks = self._blocks(prompt)
        cached = [self._seen[block] for block in blocks if block in self._seen]
        replica = min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
        if len(cached) * 2 > len(blocks):
            busier = self.outstanding[cached[-1]] - self.outstanding[replica]
            replica = cached[-1] if busier <= SLACK * max_tokens else replica
        self.outstanding[replica] += max_tokens
        self._remember(blocks, replica)
        return replica

    def done(self, replica: int, max_tokens: int, tokens: Sequence[int]) -> None:
        """Note the end of a request, and that prompt and answer are known at its replica."""
        self.outstanding[replica] -= max_tokens
        self._remember(self._blocks(tokens), replica)

    def _blocks(self, tokens: Sequence[int]) -> list[int]:
        hashes, before = [], 0
        for start in range(0, len(tokens), BLOCK_TOKENS):
            before = hash((before, *tokens[start : start + BLOCK_TOKENS]))
            hashes.append(before)
        return hashes

    def _remember(self, blocks: list[int], replica: int) -> None:
        for block in blocks:
            self._seen[block] = replica
            self._seen.move_to_end(block)
        while len(self._seen) > MAX_TRACKED_BLOCKS:
            self._seen.popitem(last=False)
