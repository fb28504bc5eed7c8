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
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxrl_llm.compilation import compiles_ahead, is_gpu
from jaxrl_llm.data.token_bytes import special_stop_ids, text_decoder
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.inputs import Visual, VisualFeatures, frame_bounds, patch_rows
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.quantization import is_quantized
from jaxrl_llm.models.vision.spec import VisionSpec
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
from jaxrl_llm.rollout.native.images import check_visuals, read_prompt
from jaxrl_llm.rollout.native.page_pool import (
    PAGE,
    PATCHES_AT_ONCE,
    Sizes,
    choose_sizes,
    count_parts,
    touched,
    with_visuals,
)
from jaxrl_llm.rollout.native.programs import (
    BIASES,
    MOST_TOP_LOGPROBS,
    STOP_IDS,
    DecodeOutput,
    Programs,
)
from jaxrl_llm.rollout.native.scheduler import (
    EngineStats,
    PartialSampling,
    Scheduler,
    SchedulerOutput,
    SequenceState,
    assign_rows,
    fewest_rows,
)
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout

# A step of the engine: admit sequences, prefill their prompts, decode a chunk of tokens.


class FeatureSlots:
    """Which slots of one part hold the features of which visuals.

    Args:
        count: slots, each for one token.

    >>> slots = FeatureSlots(4)
    >>> slots.take(b"one", 3, kept=()), slots.take(b"other", 2, kept=(b"one",))
    (True, False)
    >>> slots.take(b"other", 2, kept=()), b"one" in slots
    (True, False)
    """

    def __init__(self, count: int) -> None:
        """All are free."""
        self._free = list(range(count))[::-1]
        self._taken: OrderedDict[bytes, Int[np.ndarray, " tokens"]] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        """Tell whether a visual has slots; it counts as used now."""
        if key in self._taken:
            self._taken.move_to_end(key)
        return key in self._taken

    def __getitem__(self, key: bytes) -> Int[np.ndarray, " tokens"]:
        """Return the slots of a visual's tokens."""
        return self._taken[key]

    def take(self, key: bytes, tokens: int, kept: Container[bytes]) -> bool:
        """Give a visual slots; False if there are not enough.

        Args:
            key: of the visual, which has none.
            tokens: of the visual.
            kept: keys of those that keep theirs; of others those used least recently lose them.
        """
        others = [each for each in self._taken if each not in kept]
        if len(self._free) + sum(len(self._taken[each]) for each in others) < tokens:
            return False
        while len(self._free) < tokens:
            self._free += self._taken.pop(others.pop(0)).tolist()[::-1]
        self._taken[key] = np.array([self._free.pop() for _ in range(tokens)], np.int32)
        return True


class FeatureCache:
    """Runs the tower on what pieces of prompts need, and keeps features while there is room.

    Args:
        programs: of a model that has a tower.
        vision: the tower.

    Attributes:
        held: the features of all parts; None before the first visual and after `free`.
    """

    def __init__(self, programs: Programs, vision: VisionSpec) -> None:
        """Hold nothing."""
        self._programs, self._vision = programs, vision
        self.held: VisualFeatures | None = None
        self.forget()

    def forget(self) -> None:
        """Count what is held as that of other weights, of no use any more."""
        sizes = self._programs.sizes
        self._slots = [FeatureSlots(sizes.visual_tokens) for _ in range(sizes.parts)]

    def free(self) -> None:
        """Free the memory."""
        self.held = None
        self.forget()

    def encode(
        self, params: Any, placed: Sequence[SequenceState | None], ends: Sequence[int]
    ) -> list[int]:
        """Encode what the next pieces of prompts hold and is not there.

        Args:
            params: the weights.
            placed: whose piece each row reads, from `cached` on.
            ends: where it ends.

        Returns:
            Where pieces end so that they split no image that is read whole, and there is room for
            all that they hold. The first one of each part has it.
        """
        parts = range(len(self._slots))
        new: list[list[Visual]] = [[] for _ in parts]
        kept: list[set[bytes]] = [set() for _ in parts]
        shortened = list(ends)
        for row, s in enumerate(placed):
            if s is None or s.visuals is None:
                continue
            shortened[row] = s.visuals.whole_until(s.cached, ends[row])
            for number in s.visuals.within(s.cached, shortened[row]):
                visual = s.request.visuals[number]
                if visual.key not in self._slots[s.part]:
                    if not self._slots[s.part].take(visual.key, visual.tokens, kept[s.part]):
                        shortened[row] = max(s.cached, s.visuals.first(number))
                        break
                    new[s.part].append(visual)
                kept[s.part].add(visual.key)
        at_once = min(PATCHES_AT_ONCE, self._programs.sizes.patch_shapes[-1][0])
        while any(new):
            self._encode(params, [_take_row(visuals, at_once) for visuals in new])
        if self.held is None:
            self.held = self._programs.features()()
        return shortened

    def slots_of(self, sequence: SequenceState, number: int) -> Int[np.ndarray, " tokens"]:
        """Return where the features of one of a sequence's visuals are."""
        return self._slots[sequence.part][sequence.request.visuals[number].key]

    def _encode(self, params: Any, rows: Sequence[Sequence[Visual]]) -> None:
        """Encode a row of each part."""
        sizes = self._programs.sizes
        most = max(sum(len(visual.patches) for visual in row) for row in rows)
        frame = frame_bounds(rows).longest or 0
        length, longest = next(
            (length, longest)
            for length, longest in sizes.patch_shapes
            if length >= most and longest >= frame
        )
        targets = np.full((len(rows), length // self._vision.group), sizes.visual_tokens, np.int32)
        for part, row in enumerate(rows):
            slots = [self._slots[part][visual.key] for visual in row]
            targets[part, : sum(map(len, slots))] = np.concatenate([[], *slots])
        patches = patch_rows(self._vision, rows, length)
        patches, targets = distributed.put((patches, targets), self._programs.by_row)
        held, self.held = self.held, None  # donated
        held = self._programs.features()() if held is None else held
        self.held = self._programs.encode(length, longest)(params, held, patches, targets)


def _take_row(visuals: list[Visual], at_once: int) -> list[Visual]:
    """Take from the front one visual, and more while they have no more patches than these.

    >>> small = [Visual(np.zeros((4, 12), np.uint8), (1, 2, 2), 2, b"") for _ in range(3)]
    >>> len(_take_row(small, 8)), len(_take_row(small, 8))
    (2, 1)
    """
    row = [visuals.pop(0)] if visuals else []
    size = sum(len(visual.patches) for visual in row)
    while visuals and size + len(visuals[0].patches) <= at_once:
        row.append(visuals.pop(0))
        size += len(row[-1].patches)
    return row


class ModelRunner:
    """Runs the programs on the sequences that a scheduler picks, and keeps the cache.

    Args:
        programs: compiled for the devices.
        max_running_sequences: the most sequences decoded at once.
        tokenizer: loads it, for requests with texts that stop them.

    Attributes:
        scheduler: which sequences wait and which run.
        pool: keys, values and states of all that run; None before the first step and after
            `free_cache`.
        rows: those of the sequences in `placed`, gathered.
    """

    def __init__(
        self, programs: Programs, max_running_sequences: int, tokenizer: Callable[[], Any] | None
    ) -> None:
        """Hold nothing."""
        self._programs, self._tokenizer = programs, tokenizer
        self.scheduler = Scheduler(
            programs.sizes,
            max_running_sequences // programs.sizes.parts,
            on_remove=lambda sequence: self._note_routes([sequence]),
        )
        self.pool: Cache | None = None
        self.rows: Cache | None = None
        self._placed: list[SequenceState | None] = []  # whom each of the rows belongs to
        self._width = 0
        vision = programs.vision
        self._features = None if vision is None else FeatureCache(programs, vision)

    def step(self, params: Any, version: int) -> list[SequenceState]:
        """Prefill prompts and decode a chunk; return the sequences that grew.

        Args:
            params: the weights, as `EngineWeights.load` gives them.
            version: of the weights.
        """
        # 1. Prefill the prompts of who is admitted.
        prefilled = 0
        self.scheduler.drop_cancelled()
        while (scheduled := self.scheduler.schedule(prefilled)).prefills:
            self._prefill(params, scheduled)
            prefilled += scheduled.rows * scheduled.width
        if not scheduled.num_scheduled_tokens:
            return []
        # 2. Decode a chunk of who is prefilled, and append what was drawn.
        self._append(*self._decode(params, scheduled), version)
        # 3. Let those go that have ended.
        ended = [sequence for sequence in scheduled.num_scheduled_tokens if sequence.finish]
        self._note_routes(ended)
        for sequence in ended:
            self.scheduler.remove(sequence)
        return list(scheduled.num_scheduled_tokens)

    def preempt_all(self) -> None:
        """Preempt all that runs: its prompts are prefilled again."""
        self.scheduler.preempt_all()
        self.rows, self._placed = None, []

    def reset_prefix_cache(self, version: int, *, keep: bool = False) -> None:
        """Let no sequence to come use what was computed so far, and gather all rows anew.

        With `keep`, those use it that were begun under the weights that have computed it.

        Who is preempted now and read again later is newer in its pages than in its old row.
        """
        self.rows = None
        if self._features is not None:
            self._features.forget()
        for pages in self.scheduler.pages:
            pages.reset_prefix_cache(version, keep=keep)

    def free_cache(self) -> None:
        """Free the cache; what runs waits again."""
        self.preempt_all()
        waiting = self.scheduler.waiting
        self.scheduler.clear()
        self.scheduler.add(waiting)
        self._free_arrays()

    def abort_all(self) -> list[SequenceState]:
        """Return all sequences and forget them, and the cache."""
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler.clear()
        self._free_arrays()
        self._placed = []
        return sequences

    def _free_arrays(self) -> None:
        self.pool = self.rows = None
        if self._features is not None:
            self._features.free()

    def _prefill(self, params: Any, scheduled: SchedulerOutput) -> None:
        """Prefill parts of prompts; where images have no room yet, less of them."""
        programs, tokens = self._programs, scheduled.num_scheduled_tokens
        sizes, rows, length = programs.sizes, scheduled.rows, scheduled.width
        placed = assign_rows(list(tokens), rows, sizes.parts)
        ends = [0 if s is None else s.cached + tokens[s] for s in placed]
        images: list[Any] = []
        if self._features is not None:
            ends = self._features.encode(params, placed, ends)
            placed = [s if s and e > s.cached else None for s, e in zip(placed, ends, strict=True)]
            images = [self._features.slots_of]
        narrow = sizes.width(length)
        pages = (narrow if max(ends) <= narrow else sizes.widths[-1]) // PAGE
        chunk = self._put(programs.prefill_chunk(placed, ends, length, pages, *images))
        held = None if self._features is None else self._features.held
        program = programs.prefill(rows, length, pages)
        self.pool = program(params, self._take_pool(), chunk, held)
        for s, end in zip(placed, ends, strict=True):
            if s is not None:
                self.scheduler.mark_prefilled(s, end - s.cached)

    def _decode(
        self, params: Any, scheduled: SchedulerOutput
    ) -> tuple[list[SequenceState | None], DecodeOutput]:
        """Decode a chunk; return whom each row belongs to and what it drew."""
        programs, sizes = self._programs, self._programs.sizes
        tokens, rows, width = scheduled.num_scheduled_tokens, scheduled.rows, scheduled.width
        if sizes.has_rows:
            self._gather_rows(list(tokens), rows, width)
            placed = [s if s in tokens else None for s in self._placed]
            table = programs.page_table(
                placed,
                touched(sizes.steps),
                lambda s: s.pages.pages_to_write(s.table, s.cached, s.cached + tokens[s]),
            )
        else:
            placed = assign_rows(list(tokens), rows, sizes.parts)
            self._copy_borrowed(placed)
            table = programs.page_table(
                placed,
                width // PAGE,
                lambda s: s.pages.pages_to_read(s.table, s.cached + tokens[s]),
            )
        slots = programs.state_slots(
            placed, [0 if s is None else s.cached + tokens[s] for s in placed]
        )
        asks = any(s is not None and s.request.sampling.asks_for_extras for s in placed)
        extras = programs.extras(placed, width) if asks else None
        inputs = self._put((programs.decode_state(placed), extras, table, slots))
        program, pool = programs.decode(rows, width, asks), self._take_pool()
        if sizes.has_rows:
            gathered, self.rows = self.rows, None  # donated
            self.pool, self.rows, output = program(params, pool, gathered, *inputs)
        else:
            self.pool, output = program(params, pool, *inputs)
        return placed, distributed.fetch(output)

    def _gather_rows(self, ready: list[SequenceState], rows: int, width: int) -> None:
        """Gather the rows of the sequences to decode, unless they lie there."""
        same_shape = self.rows is not None and (len(self._placed), self._width) == (rows, width)
        if same_shape and set(ready) <= set(self._placed):
            return
        self.rows = None  # free it before the next is made
        self._placed = assign_rows(ready, rows, self._programs.sizes.parts)
        self._width = width
        self.pool = self._take_pool()  # there is none yet where no prompt had to be read
        slots = self._programs.state_slots(self._placed)
        inputs = self._table_of_cached(self._placed, width), slots and slots[0]
        program = self._programs.gather(rows, width // PAGE)
        self.rows = program(self.pool, *self._put(inputs))

    def _copy_borrowed(self, placed: Sequence[SequenceState | None]) -> None:
        """Give each sequence that is about to write into a page of others a copy of its own."""
        copies = np.full((2, len(placed)), self._programs.sizes.pages, np.int32)
        for i, s in enumerate(placed):
            if s is not None and s.table.borrowed is not None:
                copies[:, i] = s.table.borrowed.page, s.table.own[0]
                s.pages.pages_to_write(s.table, s.cached, s.cached)  # its own, from now on
        if np.any(copies < self._programs.sizes.pages):
            program = self._programs.copy(len(placed))
            self.pool = program(self._take_pool(), *map(self._put, copies))

    def _note_routes(self, sequences: Sequence[SequenceState]) -> None:
        """Note the experts that tokens went to, where they are recorded, while pages hold them."""
        programs, sizes, shape = self._programs, self._programs.sizes, self._programs.route_shape
        if shape is None:
            return
        new = [s for s in sequences if s.cached > (0 if s.routes is None else len(s.routes))]
        while new:
            rows = fewest_rows(new, sizes)
            placed = assign_rows(new, rows, sizes.parts)
            width = sizes.width(max(s.cached for s in placed if s is not None))
            table = self._put(self._table_of_cached(placed, width))
            assert self.pool is not None  # it holds what is cached
            program = programs.routes(rows, width // PAGE)
            recorded = distributed.fetch(program(self.pool.routes, table))
            for i, s in enumerate(placed):
                if s is not None:
                    known = [] if s.routes is None else [s.routes]
                    more = recorded[i, sum(map(len, known)) : s.cached]
                    more = more.reshape(len(more), shape.layers, shape.top)
                    s.routes = np.concatenate([*known, more])
            new = [s for s in new if s not in placed]

    def _table_of_cached(self, placed: Sequence[SequenceState | None], width: int) -> np.ndarray:
        """Return the pages of each row that hold what is cached."""
        return self._programs.page_table(
            placed, width // PAGE, lambda s: s.pages.pages_to_read(s.table, s.cached)
        )

    def _append(
        self, placed: Sequence[SequenceState | None], output: DecodeOutput, version: int
    ) -> None:
        """Append what was drawn to the sequences, and end those that have ended."""
        total = 0
        for i, s in enumerate(placed):
            if s is None:
                continue
            n = int(output.counts[i])
            total += n
            s.tokens += output.tokens[i, :n].tolist()
            s.logprobs += output.logprobs[i, :n].tolist()
            s.versions += [version] * n
            if s.request.sampling.top_logprobs and output.top_ids is not None:
                assert output.top_logprobs is not None  # they come together
                s.top += zip(output.top_ids[i, :n], output.top_logprobs[i, :n], strict=True)
            s.cached = s.table.written = len(s.tokens) - 1
            if s.tokens[-1] in s.request.sampling.stop_ids:
                s.finish, s.stopped_by = "stop", s.tokens[-1]
            elif s.left == 0:
                s.finish = "length"
            if self._tokenizer is not None and s.request.sampling.stop:
                s.stop_at_text(text_decoder(self._tokenizer()), n)
        self.scheduler.counts["generated_tokens"] += total

    def _put(self, tree: Any) -> Any:
        return distributed.put(tree, self._programs.by_row)

    def _take_pool(self) -> Cache:
        """Return the pool, to be donated; make it after a start, a sleep or a failure."""
        pool, self.pool = self.pool, None
        return self._programs.pool()() if pool is None else pool


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
            limits={"top_logprobs": MOST_TOP_LOGPROBS, "stop_ids": STOP_IDS, "logit_bias": BIASES},
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
