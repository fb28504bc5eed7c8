"""The embedded engine: sampling in the trainer's process, by the trainer's own model code.

A worker thread decodes all sequences that run in chunks of a few steps. Between two chunks it takes
in what has come, reads prompts, lets those that end go and gives their places to others.

In a run of several processes each has this thread, and all of them must take the same turns: each
process calls `sample` with the same requests, cancels none, and starts nothing else on the devices
meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxrl_llm.compilation import compiles_ahead, is_gpu
from jaxrl_llm.data.token_bytes import special_stop_ids
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.quantization import is_quantized
from jaxrl_llm.rollout.engine import (
    Completion,
    Engine,
    EngineError,
    EngineSettings,
    Listener,
    Receipt,
    Request,
    SamplingParams,
    ScoredTokens,
    Stop,
    check_needed,
    check_request,
    listened,
    results_of,
    streamed,
)
from jaxrl_llm.rollout.native.decode import MOST_TOP_LOGPROBS
from jaxrl_llm.rollout.native.images import check_visuals, read_prompt
from jaxrl_llm.rollout.native.model_runner import ModelRunner
from jaxrl_llm.rollout.native.programs import BIASES, STOP_IDS, Programs
from jaxrl_llm.rollout.native.scheduler import EngineStats, PartialSampling, SequenceState
from jaxrl_llm.rollout.native.sizes import PAGE, Sizes, choose_sizes, count_parts, with_visuals
from jaxrl_llm.sharding.layout import Layout

FP8_CAPABILITY = 8.9
"""The least compute capability of NVIDIA's GPUs that multiply float8 numbers."""

log = logging.getLogger(__name__)


def check_fp8(model: Model, device: Any) -> None:
    """Refuse a model or a GPU that has no float8 products; log where they are slow.

    Raises:
        ValueError: there are none.
    """
    declared = jax.tree.leaves(model.declare_quantized(), is_leaf=is_quantized)
    if not any(map(is_quantized, declared)):
        raise ValueError(f"expected a model with matrices in float8, got {type(model).__name__}")
    if not is_gpu(device):
        log.warning(
            "rollout.quantization=fp8 on %s: its float8 products are slow, and for tests",
            device.platform,
        )
        return
    capability = float(device.compute_capability)
    if device.platform != "rocm" and capability < FP8_CAPABILITY:
        raise ValueError(
            f"rollout.quantization=fp8 needs GPUs of compute capability {FP8_CAPABILITY} or more "
            f"(Ada, Hopper and later); {device.device_kind} has {capability}"
        )


VISUAL_TOKENS = 8192
"""Of images and videos whose features a part holds at most, if no sequence is longer."""

FEATURES_SHARE = 1 / 8
"""Of the cache that these may take."""

FEWEST_SLOTS = 2
"""Of a part: for a sequence, and for the snapshot that it goes on from."""


def sizes_with_cache(
    model: Model, settings: EngineSettings, layout: Layout, steps: int, *, copies: int
) -> Sizes:
    """Choose the shapes of the programs, with as much as the cache has room for.

    There are two copies of what is cached where pages are gathered into rows, else one.

    A model with states has a slot for each sequence that runs or is kept, and one for the prompt
    that two of them share. Where the cache is too small for all, pages and slots become fewer in
    the same proportion. A model with a vision tower also holds features of images.

    Raises:
        ValueError: the longest sequence has no room.
    """
    running = settings.max_running_sequences
    sizes = choose_sizes(
        parts=count_parts(layout, running),
        max_running_sequences=running,
        max_tokens=settings.max_tokens,
        steps=steps,
    )
    programs = Programs(
        model,
        layout,
        sizes,
        settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        records_routes=settings.record_routes,
    )
    room = None if settings.cache_gb is None else int(settings.cache_gb * 1e9)
    sizes, visual_bytes = _with_visuals(sizes, programs, settings.max_tokens, room)
    page_bytes, slot_bytes = copies * programs.page_bytes(), copies * programs.slot_bytes()
    kept = running if settings.cache_gb is None else max(running, settings.cached_sequences or 0)
    slots = -(-kept // sizes.parts) + -(-running // (2 * sizes.parts)) if slot_bytes else 0
    if room is None:
        return sizes._replace(slots=slots)
    pages, room = sizes.pages * kept // running, room - visual_bytes
    needed = -(-settings.max_tokens // PAGE) + 1
    if slots:
        share = room / (pages * page_bytes + slots * slot_bytes)
        affordable = (room - needed * page_bytes) // slot_bytes
        slots = max(FEWEST_SLOTS, min(slots, int(slots * share), affordable))
    sizes = sizes._replace(pages=min((room - slots * slot_bytes) // page_bytes, pages), slots=slots)
    if sizes.pages < needed:
        least = needed * page_bytes + (FEWEST_SLOTS * slot_bytes if slots else 0) + visual_bytes
        states = f" and {FEWEST_SLOTS} states of {slot_bytes / copies / 1e6:.3g} MB"
        images = f" and {visual_bytes / 1e6:.3g} MB of features of images"
        raise ValueError(
            f"a cache of {settings.cache_gb} GB holds {max(0, sizes.pages) * PAGE} tokens: "
            f"expected at least {least / 1e9:.3g} GB, for a sequence of {settings.max_tokens} "
            f"tokens{states if slots else ''}{images if visual_bytes else ''}"
        )
    return sizes


def _with_visuals(
    sizes: Sizes, programs: Programs, longest: int, room: int | None
) -> tuple[Sizes, int]:
    """Return shapes with those of a vision tower, and the bytes of its features.

    Those of a sequence have room in any case, more of them take no more than their share.
    """
    if programs.vision is None:
        return sizes, 0
    token_bytes, most = programs.feature_bytes(), VISUAL_TOKENS
    if room is not None:
        most = min(most, int(FEATURES_SHARE * room) // token_bytes)
    most = min(sizes.rows[-1] // sizes.parts * longest, max(longest, most))
    sizes = with_visuals(sizes, longest * programs.vision.group, most)
    return sizes, most * token_bytes


STEPS = 16
"""Tokens decoded between two looks at what has ended and what has come."""


class NativeEngine(Engine):
    """An `Engine` in pure JAX. Rows are split over the batch axes of a mesh, weights by rules.

    Args:
        model: what it samples from.
        settings: room and precision. `max_running_sequences` is a multiple of the parts of a
            batch; half of `cache_gb` is for pages, as much for rows gathered from these. Where
            there is a kernel, all of it is for pages.
        layout: how rows and weights are split; the axes `stage` and `context` have one device.
        steps: tokens decoded in a chunk.
        tokenizer: loads one of `transformers`, for requests with texts that stop them.
        kernel: what attends over pages in place (`models.paged_attention`), and the model has
            `extend_pages`; None: pages are gathered into rows.

    Raises:
        ValueError: a number of sequences that the devices can't share evenly, a mesh with stages
            or contexts, a cache in which the longest sequence has no room, a kernel for a model
            without `extend_pages`, a dtype in which the model keeps no cache, a model or GPUs
            without the float8 products that are asked for, or without experts to record.
    """

    scores_tokens = True

    def __init__(
        self,
        model: Model,
        settings: EngineSettings,
        *,
        layout: Layout,
        steps: int = STEPS,
        tokenizer: Callable[[], Any] | None = None,
        kernel: Callable[..., jax.Array] | None = None,
    ) -> None:
        """Compile nothing yet; `compile_ahead` or the first `load` does."""
        quantized = settings.quantization == "fp8"
        if quantized:
            check_fp8(model, layout.mesh.devices.flat[0])
        if kernel is not None and model.extend_pages is None:
            raise ValueError(f"expected a model with extend_pages for a kernel, got {model}")
        if settings.record_routes and not model.has_router:
            raise ValueError(
                "model.router_replay=rollout: expected a model with experts to record their "
                "choice, got one without"
            )
        sizes = sizes_with_cache(model, settings, layout, steps, copies=2 if kernel is None else 1)
        self.model, self.settings = model, settings
        self.programs = Programs(
            model,
            layout,
            sizes,
            settings.dtype,
            kernel,
            quantized=quantized,
            kv_cache_dtype=settings.kv_cache_dtype,
            records_routes=settings.record_routes,
        )
        self._tokenizer = tokenizer and functools.cache(tokenizer)
        self._params: Any = None
        self._version = -1
        self._runner = ModelRunner(self.programs, settings.max_running_sequences, self._tokenizer)
        self._incoming: list[SequenceState] = []
        self._partial: list[PartialSampling] = []
        self._state = threading.Condition()
        self._device = threading.Lock()  # held while weights, pages and sequences are in use
        self._claims = 0  # who wants the device, the worker aside
        self._paused = self._closed = self._is_warm = False
        self._worker = threading.Thread(target=self._work, daemon=True, name="native-engine")
        self._worker.start()

    async def generate(self, request: Request) -> Completion:
        """Sample one answer; cancelling the coroutine gives the request up."""
        return await asyncio.wrap_future(self._submit([request])[0])

    async def stream(self, request: Request) -> AsyncIterator[Completion]:
        """Sample one answer and yield its pieces, one for each chunk; the last has a `finish`.

        A text that stops the answer may begin in one piece and end in another.
        """
        async for piece in streamed(lambda tell: self._submit([request], tell)[0]):
            yield piece

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order; equal prompts are read once."""
        return results_of(self._submit(requests))

    def sample_until(
        self,
        requests: Sequence[Request],
        needed: int,
        stop: Stop | None = None,
        listener: Listener | None = None,
    ) -> list[Completion]:
        """Sample until the first requests have their answers; the others come as they stand.

        They stand where the chunk ended that completed the last of the first ones, or in which
        `stop` was set: the same requests and weights give the same tokens. A turn is a chunk.
        """
        return results_of(listened(self._submit(requests, needed=needed, stop=stop), listener))

    def score_tokens(self, tokens: Sequence[int]) -> ScoredTokens:
        """Score given tokens between two chunks; nothing of the cache is used."""
        self._check(Request(tuple(tokens), SamplingParams(max_new_tokens=1), seed=0))
        with self._claimed():
            if self._closed or self._params is None:
                raise EngineError("the engine is closed or has no weights: call load first")
            return self.programs.score_tokens(self._params, tokens)

    def load(
        self,
        params: Any,
        version: int,
        *,
        recompute: bool = False,
        donate: bool = False,
        keep: bool = False,
    ) -> Receipt:
        """Copy weights into the engine's layout and dtype, between two chunks.

        Sequences in flight go on with them; their answers say which token is of which version.

        Args:
            params: the weights.
            version: of the weights.
            recompute: read what is in flight again; else it keeps the keys and values that it has
                of the weights before.
            donate: delete each array of `params` once it is copied.
            keep: keys and values of answers that were left before their end, for when these go on.
        """
        with self._claimed():
            first = self._params is None and self._version < 0
            self._params = None  # free the old copy before the new one is made
            self._params, moved = self.programs.weights.load(params, donate=donate)
            self._version = version
            receipt = Receipt(version, int(self.programs.weights.checksum(self._params)), moved)
            if recompute:
                self._runner.preempt_all()
            self._runner.reset_prefix_cache(version, keep=keep)
            if first and not self._is_warm:
                self.programs.warm_up()
        return receipt

    def compile_ahead(self, sequences: int | None = None) -> None:
        """Begin to compile the programs, before there are weights, where others can wait.

        Args:
            sequences: how many are to be sampled first; None: as many as may run.
        """
        if compiles_ahead(self.programs.layout.mesh.devices.flat):
            self._is_warm = True
            self.programs.warm_up(sequences)
            self.programs.weights.compile_ahead()

    def unload(self) -> None:
        """Free the weights; nothing may be asked for until the next `load`."""
        with self._claimed():
            self._params = None

    @property
    def weights_layout(self) -> Any:
        """The sharding of each array of the weights, nested as the model's declarations."""
        return self.programs.weights.given_layout

    def pause(self) -> None:
        """Decode nothing until `resume`; what is in flight keeps its place and its cache."""
        with self._state:
            self._paused = True
        with self._claimed():  # the chunk that is being decoded ends
            pass

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    def sleep(self) -> None:
        """Pause, and free the cache; what is in flight is read again after `wake`."""
        self.pause()
        with self._claimed():
            self._runner.free_cache()

    def wake(self) -> None:
        """Resume; the cache is allocated when it is needed."""
        self.resume()

    def close(self) -> None:
        """Stop the worker after its chunk; requests without an answer fail with EngineError."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        self.programs.close()
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def stats(self) -> EngineStats:
        """Return what the engine does and has done."""
        scheduler, shapes = self._runner.scheduler, self.programs.sizes
        in_use = sum(pages.count - pages.available for pages in scheduler.pages) * PAGE
        states = sum(pages.slots - pages.available_slots for pages in scheduler.pages)
        waiting = len(scheduler.waiting) + len(self._incoming)
        room = (in_use, shapes.capacity, states, shapes.parts * shapes.slots)
        return EngineStats(len(scheduler.running), waiting, *room, **scheduler.counts)

    def shapes(self) -> tuple[Any, tuple[Any, ...]]:
        """Return weights and what is held beside them, as shapes; nothing is allocated.

        That is the cache's pages, the most rows, and features of images.
        """
        programs = self.programs
        weights, pool = programs.shapes()
        rows = [programs.row_shapes(*programs.sizes.largest)] if programs.sizes.has_rows else []
        features = [programs.feature_shapes()] if programs.vision is not None else []
        return weights, (pool, *rows, *features)

    def trace(self, name: str) -> Any:
        """Trace the largest program for shapes alone: `prefill` or `decode`."""
        shapes = self.programs.sizes
        if name == "decode":
            return self.programs.trace("decode", *shapes.largest, False)
        prompts = max(shapes.prefill_shapes, key=lambda shape: shape[0] * shape[1])
        return self.programs.trace("prefill", *prompts, shapes.widths[-1] // PAGE)

    def _submit(
        self,
        requests: Sequence[Request],
        listener: Callable[[Completion], None] | None = None,
        *,
        needed: int | None = None,
        stop: Stop | None = None,
    ) -> list[Future[Completion]]:
        requests = [self._with_stop_tokens(request) for request in requests]
        for request in requests:
            self._check(request)
        sequences = [
            SequenceState(request, listener=listener, visuals=read_prompt(self.model, request))
            for request in requests
        ]
        if needed is not None:
            check_needed(needed, len(requests))
            partial = [PartialSampling(sequences, needed, stop)]
        else:
            partial = []
        with self._state:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._params is None and self._version < 0:
                raise EngineError("the engine has no weights: call load first")
            self._incoming += sequences
            self._partial += partial
            self._state.notify_all()
        return [sequence.future for sequence in sequences]

    def _check(self, request: Request) -> None:
        check_request(
            request,
            max_tokens=self.settings.max_tokens,
            vocab_size=self.model.vocab_size,
            limits={
                "top_logprobs": MOST_TOP_LOGPROBS,
                "stop_ids": STOP_IDS,
                "logit_bias": BIASES,
            },
        )
        check_visuals(self.model, request, self.programs.sizes)

    def _with_stop_tokens(self, request: Request) -> Request:
        """Return a request that also stops at its stop texts that are special tokens.

        Raises:
            EngineError: there is no tokenizer, or a stop text can never be found.
        """
        sampling = request.sampling
        if not sampling.stop:
            return request
        if self._tokenizer is None:
            raise EngineError("got texts that stop the answer, but this engine has no tokenizer")
        try:
            more = special_stop_ids(sampling.stop, self._tokenizer())
        except ValueError as error:
            raise EngineError(str(error)) from error
        ids = tuple(dict.fromkeys((*sampling.stop_ids, *more)))
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, stop_ids=ids))

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """Hold the device, before the worker takes its next turn."""
        with self._state:
            self._claims += 1
        try:
            with self._device:
                yield
        finally:
            with self._state:
                self._claims -= 1
                self._state.notify_all()

    def _work(self) -> None:
        while self._wait():
            with self._device:
                try:
                    changed = self._step()
                except Exception as error:  # it reaches whoever waits for an answer
                    changed, failure = self._abort_all(), error
                else:
                    failure = None
            for sequence in changed:
                sequence.deliver(failure)
        with self._device:
            left = self._abort_all()
        for sequence in left:
            sequence.deliver(EngineError("the engine was closed"))

    def _wait(self) -> bool:
        """Block until there is something to do; False when the engine was closed."""

        def may_go_on() -> bool:
            busy = self._incoming or self._runner.scheduler.is_busy
            return self._closed or bool(busy and not self._paused and not self._claims)

        with self._state:
            self._state.wait_for(may_go_on)
            return not self._closed

    def _step(self) -> list[SequenceState]:
        """Take in what came and decode a chunk; return the sequences that grew."""
        with self._state:
            if self._paused:
                return []
            self._runner.scheduler.add(self._incoming)
            self._incoming, partial = [], list(self._partial)
        changed = self._runner.step(self._params, self._version)
        return list(dict.fromkeys([*changed, *self._withdraw(partial)]))

    def _withdraw(self, partial: Sequence[PartialSampling]) -> list[SequenceState]:
        """Take out and return those that are not waited for any more, after a turn with them."""
        ended = [sampling for sampling in partial if sampling.end_turn()]
        for sampling in ended:
            self._partial.remove(sampling)
        left = [s for sampling in ended for s in sampling.sequences if not s.finish]
        self._runner.scheduler.withdraw(left)
        return left

    def _abort_all(self) -> list[SequenceState]:
        """Return all sequences and forget them, and the cache."""
        with self._state:
            incoming, self._incoming, self._partial = self._incoming, [], []
        return self._runner.abort_all() + incoming
