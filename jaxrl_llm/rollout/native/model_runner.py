"""A step of the engine: admit sequences, prefill their prompts, decode a chunk of tokens."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.inputs import Visual, VisualFeatures, frame_bounds, patch_rows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.rollout.native.decode import DecodeOutput, DecodeState, Extras
from jaxrl_llm.rollout.native.page_pool import PagePool, StatePagePool, StateSlots
from jaxrl_llm.rollout.native.programs import BIASES, STOP_IDS, PrefillChunk, Programs
from jaxrl_llm.rollout.native.sampler import BatchSamplingParams
from jaxrl_llm.rollout.native.scheduler import Counts, Scheduler, SequenceState
from jaxrl_llm.rollout.native.sizes import PAGE, PATCHES_AT_ONCE, touched
from jaxrl_llm.sharding import distributed


def fill_row(row: np.ndarray, pages: Sequence[int]) -> None:
    row[: len(pages)] = pages


def decode_state(placed: Sequence[SequenceState | None], *, has_rotary: bool) -> DecodeState:
    """Return where each row stands; empty ones have nothing left.

    Args:
        placed: whom each row belongs to.
        has_rotary: whether the model is told what to rotate by.
    """

    def column(dtype: Any, value: Callable[[SequenceState], Any], empty: Any = 0) -> Any:
        return np.array([empty if s is None else value(s) for s in placed], dtype)

    def number(value: Callable[[SequenceState], int]) -> Any:
        return column(np.int32, value)

    def setting(name: str, dtype: Any, empty: Any) -> Any:
        return column(dtype, lambda s: getattr(s.request.sampling, name), empty)

    none = [-1] * STOP_IDS
    return DecodeState(
        tokens=number(lambda s: s.tokens[-1]),
        positions=number(lambda s: s.cached),
        generated=number(lambda s: s.generated),
        left=number(lambda s: s.left),
        stop_ids=column(np.int32, lambda s: [*s.request.sampling.stop_ids, *none][:STOP_IDS], none),
        sampling=BatchSamplingParams(
            seeds=column(np.uint32, lambda s: s.request.seed),
            temperature=setting("temperature", np.float32, 1.0),
            top_p=setting("top_p", np.float32, 1.0),
            top_k=number(lambda s: s.request.sampling.top_k),
            min_p=setting("min_p", np.float32, 0.0),
        ),
        rotary_delta=number(rotary_delta) if has_rotary else None,
    )


def rotary_delta(sequence: SequenceState) -> int:
    """Return what is added to positions of what follows a prompt, to rotate by."""
    return 0 if sequence.visuals is None else sequence.visuals.delta


def rotary_of_rows(
    placed: Sequence[SequenceState | None], ends: Sequence[int], length: int
) -> Int[np.ndarray, "B T 3"]:
    """Return by what each row's next tokens are rotated: those from `cached` on.

    Args:
        placed: whom each row belongs to.
        ends: where its tokens end.
        length: of all rows.
    """
    rotary = np.zeros((len(placed), length, 3), np.int32)
    for row, (s, end) in enumerate(zip(placed, ends, strict=True)):
        if s is None:
            continue
        piece = rotary[row, : end - s.cached]
        piece[:] = np.arange(s.cached, end)[:, None] + rotary_delta(s)
        if s.visuals is not None and s.visuals.rotary is not None:
            given = s.visuals.rotary[s.cached : end]
            piece[: len(given)] = given
    return rotary


def extras(placed: Sequence[SequenceState | None], width: int, nothing: int) -> Extras:
    """Return what else the rows ask for; `nothing` is a number past the vocabulary."""
    biases = len(placed), BIASES
    tokens, penalty = np.full((len(placed), width), nothing, np.int32), np.ones(len(placed))
    bias_ids, bias = np.full(biases, nothing, np.int32), np.zeros(biases, np.float32)
    for i, s in enumerate(placed):
        if s is not None:
            sampling = s.request.sampling
            tokens[i, : len(s.tokens)] = s.tokens
            penalty[i] = sampling.repetition_penalty
            for j, (token, shift) in enumerate(sampling.logit_bias):
                bias_ids[i, j], bias[i, j] = token, shift
    columns: Any = (tokens, penalty.astype(np.float32), bias_ids, bias)
    return Extras(*columns)


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
            self.held = self._programs.make_features()
        return shortened

    def slots(
        self, placed: Sequence[SequenceState | None], ends: Sequence[int], length: int
    ) -> Int[np.ndarray, "B T"]:
        """Return where the features of each row's tokens are; -1 for text."""
        table = np.full((len(placed), length), -1, np.int32)
        for row, (s, end) in enumerate(zip(placed, ends, strict=True)):
            if s is None or s.visuals is None:
                continue
            piece = slice(s.cached, end)
            number, index = s.visuals.number[piece], s.visuals.index[piece]
            for visual in s.visuals.within(s.cached, end):
                own = np.flatnonzero(number == visual)
                table[row, own] = self._slots[s.part][s.request.visuals[visual].key][index[own]]
        return table

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
        held = self._programs.make_features() if held is None else held
        self.held = self._programs.encode(params, held, patches, targets, longest)


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


PREFILL_BETWEEN_CHUNKS = 4096
"""Tokens of prompts read before sequences that decode get their turn again."""


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
        self,
        programs: Programs,
        max_running_sequences: int,
        tokenizer: Callable[[], Any] | None,
    ) -> None:
        """Hold nothing."""
        self._programs, self._tokenizer = programs, tokenizer
        self._max_running_sequences = max_running_sequences
        self.scheduler = self._make_scheduler(Counts())
        self.pool: Cache | None = None
        self.rows: Cache | None = None
        self._placed: list[SequenceState | None] = []  # whom each of the rows belongs to
        self._width = 0
        tower = programs.tower
        self._features = None if tower is None else FeatureCache(programs, tower.vision)

    def step(self, params: Any, version: int) -> list[SequenceState]:
        """Prefill prompts and decode a chunk; return the sequences that grew.

        Args:
            params: the weights, as `Programs.load` gives them.
            version: of the weights.
        """
        scheduler = self.scheduler
        scheduler.drop_cancelled()
        scheduler.admit()
        self._prefill(params)
        ready = scheduler.to_decode()
        if not ready:
            return []
        sizes = self._programs.sizes
        chosen = self._gather_rows(ready) if sizes.has_rows else ready
        decode = self._decode if sizes.has_rows else self._decode_pages
        self._append(*decode(params, chosen), version)
        ended = [sequence for sequence in chosen if sequence.finish]
        self._note_routes(ended)
        for sequence in ended:
            scheduler.remove(sequence)
        return chosen

    def preempt_all(self) -> None:
        """Preempt all that runs: its prompts are prefilled again."""
        for sequence in list(self.scheduler.running)[::-1]:
            self.scheduler.preempt(sequence)
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
        self.scheduler = self._make_scheduler(self.scheduler.counts)
        self.scheduler.add(waiting)
        self._free_arrays()

    def abort_all(self) -> list[SequenceState]:
        """Return all sequences and forget them, and the cache."""
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler = self._make_scheduler(self.scheduler.counts)
        self._free_arrays()
        self._placed = []
        return sequences

    def _free_arrays(self) -> None:
        self.pool = self.rows = None
        if self._features is not None:
            self._features.free()

    def _prefill(self, params: Any) -> None:
        """Prefill what was admitted; not all of it while others wait for their next tokens."""
        scheduler, done = self.scheduler, 0
        while waiting := scheduler.to_prefill():
            if done >= PREFILL_BETWEEN_CHUNKS and len(waiting) * 2 <= len(scheduler.running):
                break
            done += self._prefill_chunk(params, waiting)
            scheduler.admit()

    def _prefill_chunk(self, params: Any, waiting: Sequence[SequenceState]) -> int:
        """Prefill the next part of as many prompts as one program takes; return its tokens."""
        shapes, pages = self._programs.sizes, self.scheduler.pages
        longest = max(len(s.tokens) - 1 - s.cached for s in waiting)
        lengths = sorted({length for _, length in shapes.prefill_shapes})
        length = next((n for n in lengths if n >= longest), lengths[-1])
        fitting = [n for n, tokens in shapes.prefill_shapes if tokens == length]
        rows = next((n for n in sorted(fitting) if n >= len(waiting)), max(fitting))
        chosen = self._assign_rows(waiting, rows)
        ends = [0 if s is None else min(s.cached + length, s.read_to) for s in chosen]
        if self._features is not None:
            ends = self._features.encode(params, chosen, ends)
            chosen = [s if s and e > s.cached else None for s, e in zip(chosen, ends, strict=True)]
        narrow = shapes.width(length)
        width = narrow if max(ends) <= narrow else shapes.widths[-1]
        tokens = np.zeros((rows, length), np.int32)
        start, lengths = np.zeros((2, rows), np.int32)
        table, targets = self._no_pages(rows, width // PAGE), self._no_pages(rows, touched(length))
        for i, (s, end) in enumerate(zip(chosen, ends, strict=True)):
            if s is not None:
                tokens[i, : end - s.cached] = s.tokens[s.cached : end]
                start[i], lengths[i] = s.cached, end - s.cached
                fill_row(table[i], pages[s.part].pages_to_read(s.table, s.cached))
                fill_row(targets[i], pages[s.part].pages_to_write(s.table, s.cached, end))
        columns: list[Any] = [table, tokens, start, lengths, targets, self._slots(chosen, ends)]
        held = None
        if self._features is not None:
            held = self._features.held
            columns.append(self._features.slots(chosen, ends, length))
        if self._programs.has_rotary:
            columns.append(rotary_of_rows(chosen, ends, length))
        chunk = self._put(PrefillChunk(*columns))
        self.pool = self._programs.prefill(params, self._take_pool(), chunk, held)
        for s, end in zip(chosen, ends, strict=True):
            if s is not None:
                self.scheduler.mark_prefilled(s, end - s.cached)
        return tokens.size

    def _gather_rows(self, ready: list[SequenceState]) -> list[SequenceState]:
        """Gather the rows of the sequences to decode, unless they lie there; return them."""
        while True:
            rows, width = self._shape_for(ready)
            if self._programs.sizes.fits(rows, width):
                break
            ready = ready[: len(ready) // 2]  # the oldest; others get their turn when these end
        same_shape = self.rows is not None and (len(self._placed), self._width) == (rows, width)
        if not (same_shape and set(ready) <= set(self._placed)):
            self.rows = None  # free it before the next is made
            self._placed = self._assign_rows(ready, rows)
            self._width = width
            table = self._no_pages(rows, width // PAGE)
            for i, s in enumerate(self._placed):
                if s is not None:
                    pages = self.scheduler.pages[s.part]
                    fill_row(table[i], pages.pages_to_read(s.table, s.cached))
            self.pool = self._take_pool()  # there is none yet where no prompt had to be read
            slots = self._slots(self._placed)
            source = None if slots is None else slots.source
            self.rows = self._programs.gather_pages(self.pool, *self._put((table, source)))
        return ready

    def _shape_for(self, ready: Sequence[SequenceState]) -> tuple[int, int]:
        """Return how many rows, and how wide ones, sequences are decoded in."""
        sizes = self._programs.sizes
        width = sizes.width(max(self._end(s) for s in ready))
        in_a_part = max(sum(s.part == p for s in ready) for p in range(sizes.parts))
        return next(n for n in sizes.rows if n >= in_a_part * sizes.parts), width

    def _decode(
        self, params: Any, chosen: Sequence[SequenceState]
    ) -> tuple[list[SequenceState | None], DecodeOutput]:
        """Decode a chunk; return whom each row belongs to and what it drew."""
        shapes, going = self._programs.sizes, set(chosen)
        placed = [s if s in going else None for s in self._placed]
        targets = self._no_pages(len(placed), touched(shapes.steps))
        for i, s in enumerate(placed):
            if s is not None:
                pages = self.scheduler.pages[s.part]
                fill_row(targets[i], pages.pages_to_write(s.table, s.cached, self._end(s)))
        extras = self._extras_of(placed, self._width)
        slots = self._slots(placed, [0 if s is None else self._end(s) for s in placed])
        inputs = (
            self._put(decode_state(placed, has_rotary=self._programs.has_rotary)),
            extras,
            *self._put((targets, slots)),
        )
        pool, rows = self._take_pool(), self.rows
        assert rows is not None  # `_gather_rows` gathers them
        self.rows = None  # donated
        self.pool, self.rows, output = self._programs.decode(params, pool, rows, *inputs)
        return placed, distributed.fetch(output)

    def _decode_pages(
        self, params: Any, chosen: Sequence[SequenceState]
    ) -> tuple[list[SequenceState | None], DecodeOutput]:
        """Decode a chunk in place; return whom each row belongs to and what it drew."""
        rows, width = self._shape_for(chosen)
        placed = self._assign_rows(chosen, rows)
        table, copies = self._no_pages(rows, width // PAGE), self._no_pages(2, rows)
        for i, s in enumerate(placed):
            if s is not None:
                pages = self.scheduler.pages[s.part]
                if s.table.borrowed is not None:
                    copies[:, i] = s.table.borrowed.page, s.table.own[0]
                pages.pages_to_write(s.table, s.cached, self._end(s))
                fill_row(table[i], pages.pages_to_read(s.table, self._end(s)))
        slots = self._slots(placed, [0 if s is None else self._end(s) for s in placed])
        pool = self._take_pool()
        if np.any(copies < self._programs.sizes.pages):
            pool = self._programs.copy_pages(pool, *map(self._put, copies))
        inputs = (
            self._put(decode_state(placed, has_rotary=self._programs.has_rotary)),
            self._extras_of(placed, width),
        )
        at = self._put((table, slots))
        self.pool, output = self._programs.decode_pages(params, pool, *inputs, *at)
        return placed, distributed.fetch(output)

    def _note_routes(self, sequences: Sequence[SequenceState]) -> None:
        """Note the experts that tokens went to, where they are recorded, while pages hold them."""
        shape, sizes = self._programs.routes, self._programs.sizes
        if shape is None:
            return
        new = [s for s in sequences if s.cached > (0 if s.routes is None else len(s.routes))]
        while new:
            in_a_part = max(sum(s.part == p for s in new) for p in range(sizes.parts))
            fitting = (n for n in sizes.rows if n >= in_a_part * sizes.parts)
            placed = self._assign_rows(new, next(fitting, sizes.rows[-1]))
            width = sizes.width(max(s.cached for s in placed if s is not None))
            table = self._no_pages(len(placed), width // PAGE)
            for i, s in enumerate(placed):
                if s is not None:
                    pages = self.scheduler.pages[s.part]
                    fill_row(table[i], pages.pages_to_read(s.table, s.cached))
            assert self.pool is not None  # it holds what is cached
            recorded = distributed.fetch(self._programs.gather_routes(self.pool, self._put(table)))
            for i, s in enumerate(placed):
                if s is not None:
                    known = [] if s.routes is None else [s.routes]
                    more = recorded[i, sum(map(len, known)) : s.cached]
                    more = more.reshape(len(more), shape.layers, shape.top)
                    s.routes = np.concatenate([*known, more])
            new = [s for s in new if s not in placed]

    def _extras_of(self, placed: Sequence[SequenceState | None], width: int) -> Extras | None:
        """Return what else the rows ask for, if any does."""
        if any(s is not None and s.request.sampling.asks_for_extras for s in placed):
            return self._put(extras(placed, width, self._programs.model.vocab_size))
        return None

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
        counts = self.scheduler.counts
        generated = counts.generated_tokens + total
        self.scheduler.counts = counts._replace(generated_tokens=generated)

    def _end(self, sequence: SequenceState) -> int:
        """Return how many tokens are cached after the next chunk at most."""
        return sequence.cached + min(self._programs.sizes.steps, sequence.left)

    def _assign_rows(
        self, sequences: Sequence[SequenceState], rows: int
    ) -> list[SequenceState | None]:
        """Give as many sequences as fit a row each, among those of the part in which they are."""
        parts = self._programs.sizes.parts
        placed: list[SequenceState | None] = []
        for part in range(parts):
            inside = [s for s in sequences if s.part == part][: rows // parts]
            placed += [*inside, *[None] * (rows // parts - len(inside))]
        return placed

    def _no_pages(self, rows: int, pages: int) -> np.ndarray:
        return np.full((rows, pages), self._programs.sizes.pages, np.int32)

    def _slots(
        self, placed: Sequence[SequenceState | None], ends: Sequence[int] | None = None
    ) -> StateSlots | None:
        """Return where the state of each row is read and, if it has an end, written.

        Args:
            placed: whom each row belongs to.
            ends: how many tokens of each are cached then; None: nothing is written.
        """
        if not self._programs.sizes.slots:
            return None
        source, target = np.full((2, len(placed)), self._programs.sizes.slots, np.int32)
        for i, s in enumerate(placed):
            if s is not None:
                pages = self.scheduler.pages[s.part]
                assert isinstance(pages, StatePagePool)  # for pyright; see `_make_scheduler`
                source[i] = pages.slot_to_read(s.table)
                if ends is not None:
                    target[i] = pages.slot_to_write(s.table, ends[i])
        slots: Any = (source, target)
        return StateSlots(*slots)

    def _put(self, tree: Any) -> Any:
        return distributed.put(tree, self._programs.by_row)

    def _take_pool(self) -> Cache:
        """Return the pool, to be donated; make it after a start, a sleep or a failure."""
        pool, self.pool = self.pool, None
        return self._programs.make_pool() if pool is None else pool

    def _make_scheduler(self, counts: Counts) -> Scheduler:
        shapes = self._programs.sizes
        make = functools.partial(PagePool, size=PAGE)
        if shapes.slots:
            make = functools.partial(StatePagePool, size=PAGE, slots=shapes.slots)
        pages = [make(shapes.pages) for _ in range(shapes.parts)]
        in_a_part = self._max_running_sequences // shapes.parts
        scheduler = Scheduler(pages, max_running_sequences=in_a_part, steps=shapes.steps)
        scheduler.counts = counts
        scheduler.on_remove = lambda sequence: self._note_routes([sequence])
        return scheduler
