"""A step of the engine: admit sequences, prefill their prompts, decode a chunk of tokens."""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.inputs import Visual, VisualFeatures, frame_bounds, patch_rows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.rollout.native.decode import DecodeOutput
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.scheduler import (
    Scheduler,
    SchedulerOutput,
    SequenceState,
    assign_rows,
    fewest_rows,
)
from jaxrl_llm.rollout.native.sizes import PAGE, PATCHES_AT_ONCE, touched
from jaxrl_llm.sharding import distributed


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
        self,
        programs: Programs,
        max_running_sequences: int,
        tokenizer: Callable[[], Any] | None,
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
        inputs = self._table_of_cached(self._placed, width), slots and slots.source
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
