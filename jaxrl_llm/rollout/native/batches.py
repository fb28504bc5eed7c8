"""Sequences in the middle of being sampled: their pages, their rows, and what is done in a turn."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.models.cache import Cache
from jaxrl_llm.rollout.native.decode import Drawn, Extras, Pieces, Rows
from jaxrl_llm.rollout.native.pages import Pages
from jaxrl_llm.rollout.native.programs import BIASES, PAGE, STOP_IDS, Programs, touched
from jaxrl_llm.rollout.native.sampler import Chances
from jaxrl_llm.rollout.native.scheduler import Answer, Counts, Scheduler
from jaxrl_llm.sharding import distributed

READ_BETWEEN_CHUNKS = 4096
"""Tokens of prompts read before sequences that decode get their turn again."""


class Batches:
    """What an engine works on.

    Args:
        programs: what runs on the devices.
        slots: the most sequences decoded at once.
        detokenize: from token ids to text, for requests with texts that stop them.

    Attributes:
        scheduler: which sequences wait and which run.
        pool: keys and values of all that run; None before the first turn and after `drop`.
        rows: those of the sequences in `placed`, gathered.
    """

    def __init__(
        self, programs: Programs, slots: int, detokenize: Callable[[Sequence[int]], str] | None
    ) -> None:
        """Hold nothing."""
        self._programs, self._slots, self._detokenize = programs, slots, detokenize
        self.scheduler = self._make_scheduler(Counts())
        self.pool: Cache | None = None
        self.rows: Cache | None = None
        self._placed: list[Answer | None] = []  # whom each of the rows belongs to
        self._width = 0

    def turn(self, params: Any, version: int) -> list[Answer]:
        """Read prompts and decode a chunk; return the sequences that grew.

        Args:
            params: the weights, as `Programs.load` gives them.
            version: of the weights.
        """
        plan = self.scheduler
        plan.drop_cancelled()
        plan.admit()
        self._read_prompts(params)
        ready = plan.ready()
        if not ready:
            return []
        chosen = self._place(ready)
        self._note(*self._decode(params, chosen), version)
        for answer in chosen:
            if answer.finish:
                plan.remove(answer)
        return chosen

    def preempt_all(self) -> None:
        """Let all that runs be read again."""
        for answer in self.scheduler.running[::-1]:
            self.scheduler.preempt(answer)
        self.rows, self._placed = None, []

    def forget(self) -> None:
        """Let no sequence to come use what was computed so far, and gather all rows anew.

        Who is preempted now and read again later is newer in its pages than in its old row.
        """
        self.rows = None
        for pages in self.scheduler.pages:
            pages.forget()

    def drop(self) -> None:
        """Free the cache; what runs waits again."""
        self.preempt_all()
        waiting = self.scheduler.waiting
        self.scheduler = self._make_scheduler(self.scheduler.counts)
        self.scheduler.add(waiting)
        self.pool = None

    def take_all(self) -> list[Answer]:
        """Return all sequences and forget them, and the cache."""
        found = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler = self._make_scheduler(self.scheduler.counts)
        self.pool = self.rows = None
        self._placed = []
        return found

    def _read_prompts(self, params: Any) -> None:
        """Read what was admitted; not all of it while others wait for their next tokens."""
        plan, done = self.scheduler, 0
        while unread := plan.unread():
            if done >= READ_BETWEEN_CHUNKS and len(unread) * 2 <= len(plan.running):
                break
            done += self._read_pieces(params, unread)
            plan.admit()

    def _read_pieces(self, params: Any, unread: Sequence[Answer]) -> int:
        """Read the next piece of as many prompts as one program takes; return its tokens."""
        shapes, pages = self._programs.sizes, self.scheduler.pages
        longest = max(len(s.tokens) - 1 - s.cached for s in unread)
        lengths = sorted({length for _, length in shapes.pieces})
        length = next((n for n in lengths if n >= longest), lengths[-1])
        fitting = [n for n, tokens in shapes.pieces if tokens == length]
        rows = next((n for n in sorted(fitting) if n >= len(unread)), max(fitting))
        chosen = self._spread(unread, rows)
        ends = [0 if s is None else min(s.cached + length, len(s.tokens) - 1) for s in chosen]
        narrow = shapes.width(length)
        width = narrow if max(ends) <= narrow else shapes.widths[-1]
        tokens = np.zeros((rows, length), np.int32)
        start, lengths = np.zeros((2, rows), np.int32)
        table, targets = self._no_pages(rows, width // PAGE), self._no_pages(rows, touched(length))
        for i, (s, end) in enumerate(zip(chosen, ends, strict=True)):
            if s is not None:
                tokens[i, : end - s.cached] = s.tokens[s.cached : end]
                start[i], lengths[i] = s.cached, end - s.cached
                _fill(table[i], pages[s.part].read(s.held, s.cached))
                _fill(targets[i], pages[s.part].write(s.held, s.cached, end))
        columns: Any = (table, tokens, start, lengths, targets)
        pieces = self._put(Pieces(*columns))
        self.pool = self._programs.read(params, self._take_pool(), pieces)
        for s, end in zip(chosen, ends, strict=True):
            if s is not None:
                self.scheduler.read(s, end - s.cached)
        return tokens.size

    def _place(self, ready: list[Answer]) -> list[Answer]:
        """Gather the rows of the sequences to decode, unless they lie there; return them."""
        shapes = self._programs.sizes
        while True:
            width = shapes.width(max(self._end(s) for s in ready))
            in_a_part = max(sum(s.part == p for s in ready) for p in range(shapes.parts))
            rows = next(n for n in shapes.rows if n >= in_a_part * shapes.parts)
            if shapes.fits(rows, width):
                break
            ready = ready[: len(ready) // 2]  # the oldest; others get their turn when these end
        held = self.rows is not None and (len(self._placed), self._width) == (rows, width)
        if not (held and set(ready) <= set(self._placed)):
            self.rows = None  # free it before the next is made
            self._placed = self._spread(ready, rows)
            self._width = width
            table = self._no_pages(rows, width // PAGE)
            for i, s in enumerate(self._placed):
                if s is not None:
                    _fill(table[i], self.scheduler.pages[s.part].read(s.held, s.cached))
            self.pool = self._take_pool()  # there is none yet where no prompt had to be read
            self.rows = self._programs.gather(self.pool, self._put(table))
        return ready

    def _decode(self, params: Any, chosen: Sequence[Answer]) -> tuple[list[Answer | None], Drawn]:
        """Decode a chunk; return whom each row belongs to and what it drew."""
        shapes, going = self._programs.sizes, set(chosen)
        placed = [s if s in going else None for s in self._placed]
        targets = self._no_pages(len(placed), touched(shapes.steps))
        for i, s in enumerate(placed):
            if s is not None:
                pages = self.scheduler.pages[s.part]
                _fill(targets[i], pages.write(s.held, s.cached, self._end(s)))
        extras = None
        if any(s.request.sampling.asks_for_extras for s in chosen):
            extras = self._put(_extras(placed, self._width, self._programs.spec.vocab_size))
        inputs = (self._put(_state(placed)), extras, self._put(targets))
        pool, rows = self._take_pool(), self.rows
        assert rows is not None  # `_place` gathers them
        self.rows = None  # donated
        self.pool, self.rows, drawn = self._programs.decode(params, pool, rows, *inputs)
        return placed, distributed.fetch(drawn)

    def _note(self, placed: Sequence[Answer | None], drawn: Drawn, version: int) -> None:
        """Append what was drawn to the sequences, and end those that have ended."""
        total = 0
        for i, s in enumerate(placed):
            if s is None:
                continue
            n = int(drawn.counts[i])
            total += n
            s.tokens += drawn.tokens[i, :n].tolist()
            s.logprobs += drawn.logprobs[i, :n].tolist()
            s.versions += [version] * n
            if s.request.sampling.top_logprobs and drawn.top_ids is not None:
                assert drawn.top_logprobs is not None  # they come together
                s.top += zip(drawn.top_ids[i, :n], drawn.top_logprobs[i, :n], strict=True)
            s.cached = len(s.tokens) - 1
            if s.tokens[-1] in s.request.sampling.stop_ids:
                s.finish, s.stopped_by = "stop", s.tokens[-1]
            elif s.left == 0:
                s.finish = "length"
            if self._detokenize is not None and s.request.sampling.stop:
                s.stop_at_text(self._detokenize, n)
        counts = self.scheduler.counts
        generated = counts.generated_tokens + total
        self.scheduler.counts = counts._replace(generated_tokens=generated)

    def _end(self, sequence: Answer) -> int:
        """Return how many tokens are cached after the next chunk at most."""
        return sequence.cached + min(self._programs.sizes.steps, sequence.left)

    def _spread(self, sequences: Sequence[Answer], rows: int) -> list[Answer | None]:
        """Give as many sequences as fit a row each, among those of the part in which they are."""
        parts = self._programs.sizes.parts
        placed: list[Answer | None] = []
        for part in range(parts):
            inside = [s for s in sequences if s.part == part][: rows // parts]
            placed += [*inside, *[None] * (rows // parts - len(inside))]
        return placed

    def _no_pages(self, rows: int, pages: int) -> np.ndarray:
        return np.full((rows, pages), self._programs.sizes.pages, np.int32)

    def _put(self, tree: Any) -> Any:
        return distributed.put(tree, self._programs.by_row)

    def _take_pool(self) -> Cache:
        """Return the pool, to be donated; make it after a start, a sleep or a failure."""
        pool, self.pool = self.pool, None
        return self._programs.make_pool() if pool is None else pool

    def _make_scheduler(self, counts: Counts) -> Scheduler:
        shapes = self._programs.sizes
        pages = [Pages(shapes.pages, size=PAGE) for _ in range(shapes.parts)]
        made = Scheduler(pages, slots=self._slots // shapes.parts, steps=shapes.steps)
        made.counts = counts
        return made


def _fill(row: np.ndarray, pages: Sequence[int]) -> None:
    row[: len(pages)] = pages


def _state(placed: Sequence[Answer | None]) -> Rows:
    """Return where each row stands; empty ones have nothing left."""

    def column(dtype: Any, value: Callable[[Answer], Any], empty: Any = 0) -> Any:
        return np.array([empty if s is None else value(s) for s in placed], dtype)

    def number(value: Callable[[Answer], int]) -> Any:
        return column(np.int32, value)

    def how(name: str, dtype: Any, empty: Any) -> Any:
        return column(dtype, lambda s: getattr(s.request.sampling, name), empty)

    none = [-1] * STOP_IDS
    return Rows(
        tokens=number(lambda s: s.tokens[-1]),
        positions=number(lambda s: s.cached),
        generated=number(lambda s: s.generated),
        left=number(lambda s: s.left),
        stop_ids=column(np.int32, lambda s: [*s.request.sampling.stop_ids, *none][:STOP_IDS], none),
        chances=Chances(
            seeds=column(np.uint32, lambda s: s.request.seed),
            temperature=how("temperature", np.float32, 1.0),
            top_p=how("top_p", np.float32, 1.0),
            top_k=number(lambda s: s.request.sampling.top_k),
            min_p=how("min_p", np.float32, 0.0),
        ),
    )


def _extras(placed: Sequence[Answer | None], width: int, nothing: int) -> Extras:
    """Return what else the rows ask for; `nothing` is a number past the vocabulary."""
    biases = len(placed), BIASES
    tokens, penalty = np.full((len(placed), width), nothing, np.int32), np.ones(len(placed))
    bias_ids, bias = np.full(biases, nothing, np.int32), np.zeros(biases, np.float32)
    for i, s in enumerate(placed):
        if s is not None:
            how = s.request.sampling
            tokens[i, : len(s.tokens)] = s.tokens
            penalty[i] = how.repetition_penalty
            for j, (token, shift) in enumerate(how.logit_bias):
                bias_ids[i, j], bias[i, j] = token, shift
    columns: Any = (tokens, penalty.astype(np.float32), bias_ids, bias)
    return Extras(*columns)
