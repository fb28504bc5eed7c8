"""Which sequences run: admission by what fits, preemption where it no longer does.

Pure bookkeeping on the host; it knows pages by number and no devices.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxrl_llm.data.token_bytes import AnswerText, Decode, decode_after
from jaxrl_llm.rollout.engine import Completion, Request, Stop
from jaxrl_llm.rollout.native.images import PromptVisuals
from jaxrl_llm.rollout.native.page_pool import PAGE, PagePool, PageTable, Sizes, StatePagePool


@dataclass(eq=False)
class SequenceState:
    """A request and its answer so far.

    Attributes:
        request: what is asked.
        future: where the answer goes; its caller may cancel it at any time.
        listener: called with each piece of the answer.
        tokens: prompt and what is there of the answer.
        logprobs: of the answer's tokens.
        versions: of the weights that drew each of them.
        top: the likeliest tokens at each of them and their log-probs.
        streamed: how many of them the listener has.
        part: the part of the pool in which it is, if it runs.
        pages: of that part.
        table: those of them that it has.
        cached: how many tokens have their keys and values in these.
        finish: why it ended, or "".
        stopped_by: what ended it.
        withdrawn: whether it was taken out before its end.
        routes: the experts that its first tokens went to, as far as they are noted; each token
            keeps those with which the next one was drawn. None: the engine does not record them.
        visuals: where the prompt holds images and videos, if it does.
        text: of the answer, once it was looked at for texts that stop it.
    """

    request: Request
    future: "Future[Completion]" = field(default_factory=Future)
    listener: Callable[[Completion], None] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    streamed: int = 0
    part: int = 0
    pages: PagePool = field(init=False, repr=False)
    table: PageTable = field(default_factory=PageTable)
    cached: int = 0
    finish: str = ""
    stopped_by: int | str | None = None
    withdrawn: bool = False
    routes: Int[np.ndarray, "N M experts"] | None = None
    visuals: PromptVisuals | None = None
    text: AnswerText | None = None

    def __post_init__(self) -> None:
        """Begin with the prompt, and with what was drawn before."""
        self.tokens = list(self.request.prompt)
        if (drawn := self.request.drawn) is not None:
            self.tokens += drawn.tokens.tolist()
            self.logprobs, self.versions = drawn.logprobs.tolist(), drawn.versions.tolist()
            self.streamed, self.routes = self.generated, drawn.routes

    @property
    def generated(self) -> int:
        """Return the number of the answer's tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def first_version(self) -> int | None:
        """Return the version of the weights that drew the first token, if it was begun before."""
        drawn = self.request.drawn
        return int(drawn.versions[0]) if drawn is not None and len(drawn.versions) else None

    @property
    def left(self) -> int:
        """Return how many tokens may follow."""
        return self.request.sampling.max_new_tokens - self.generated

    @property
    def is_prefilled(self) -> bool:
        """Return whether all tokens but the newest are cached, as a step of decoding wants it."""
        return self.cached == len(self.tokens) - 1

    @property
    def read_to(self) -> int:
        """Return up to which token its tokens are read next."""
        branch = self.table.branch  # a state is kept there for others
        return branch if self.cached < branch else len(self.tokens) - 1

    @property
    def prompt_keys(self) -> tuple[int, ...]:
        """Return what tells the prompt from others: its tokens, and what its images show."""
        return self.request.prompt if self.visuals is None else self.visuals.keys

    def keys(self, count: int) -> list[int]:
        """Return what its first tokens are known by where pages are shared."""
        if self.visuals is None:
            return self.tokens[:count]
        keys = self.visuals.keys
        return [*keys[:count], *self.tokens[len(keys) : count]]

    def stop_at_text(self, decode: Decode, new: int) -> None:
        """End the answer where it holds a text that stops it; what follows is dropped.

        Args:
            decode: from token ids to text.
            new: how many tokens have not been looked at.
        """
        first, seen = len(self.request.prompt), self.generated - new
        if self.text is None:
            decode = decode_after(self.request.prompt, decode)
            self.text = AnswerText(decode, self.request.sampling.stop)
            self.text.push(self.tokens[first : first + seen])
        before = copy.copy(self.text)
        self.text.push(self.tokens[first + seen :])
        if self.text.stopped_by is None:
            return
        count = seen
        while before.stopped_by is None and count < self.generated:  # by which of the new tokens?
            before.push([self.tokens[first + count]])
            count += 1
        self.finish, self.stopped_by = "stop", before.stopped_by or self.text.stopped_by
        del self.tokens[first + count :], self.logprobs[count:], self.versions[count:]
        del self.top[count:]
        self.cached = min(self.cached, len(self.tokens) - 1)

    def completion(self, start: int = 0) -> Completion:
        """Return the answer from a token on."""
        first = len(self.request.prompt) + start
        top = self.request.sampling.top_logprobs
        likeliest = [np.array([pair[i][:top] for pair in self.top[start:]]) for i in range(2)]
        return Completion(
            np.array(self.tokens[first:], np.int32),
            np.array(self.logprobs[start:], np.float32),
            np.array(self.versions[start:], np.int32),
            self.finish,
            self.stopped_by,
            (likeliest[0], likeliest[1]) if top else None,
            self.routes if self.finish or self.withdrawn else None,
        )

    def deliver(self, failure: Exception | None) -> None:
        """Give the caller what is new: pieces to the listener, the end to the future.

        Args:
            failure: what the engine raised, if it did.
        """
        if failure is None and self.listener is not None:
            self.listener(self.completion(self.streamed))
            self.streamed = self.generated
        if failure is None and not self.finish and not self.withdrawn:
            return
        if self.future.set_running_or_notify_cancel():  # else its caller gave up
            if failure is None:
                self.future.set_result(self.completion())
            else:
                self.future.set_exception(failure)


class PartialSampling(NamedTuple):
    """Sequences that may be left before their end.

    Attributes:
        sequences: of one call.
        needed: once the first so many have ended, the others are left.
        stop: once it is set, all that have not ended are left.
    """

    sequences: list[SequenceState]
    needed: int
    stop: Stop | None

    def end_turn(self) -> bool:
        """Count a turn; return whether those that have not ended are left."""
        if self.stop is not None:
            self.stop.count_turn()
            if self.stop.is_set:
                return True
        return all(s.finish or s.future.cancelled() for s in self.sequences[: self.needed])


class EngineStats(NamedTuple):
    """What an engine does now, and has done since it was made.

    Attributes:
        running: sequences that hold pages.
        waiting: sequences that don't yet.
        cached_tokens: room of the pages in use, in tokens.
        cache_tokens: room of all pages.
        cached_states: states in use, where the model has some: of what runs, and those read next.
        cache_states: room for states.
        prompt_tokens: tokens of prompts read.
        generated_tokens: tokens drawn.
        reused_tokens: tokens of prompts that were in the cache already.
        preemptions: how often a sequence gave its pages back.
    """

    running: int
    waiting: int
    cached_tokens: int
    cache_tokens: int
    cached_states: int
    cache_states: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0

    @property
    def in_flight(self) -> int:
        """Return how many requests have no answer yet."""
        return self.running + self.waiting


PREFILL_BETWEEN_CHUNKS = 4096
"""Tokens of prompts that are prefilled before sequences that decode get their turn again."""


class SchedulerOutput(NamedTuple):
    """What the next program reads: prompts to prefill, or sequences to decode.

    Attributes:
        prefills: whether it prefills.
        num_scheduled_tokens: of each sequence in it; where they decode, the most that are drawn.
        rows: of the program, each for a sequence.
        width: tokens that a row prefills, or that it holds where it decodes.
    """

    prefills: bool
    num_scheduled_tokens: dict[SequenceState, int]
    rows: int = 0
    width: int = 0


def assign_rows(
    sequences: Sequence[SequenceState], rows: int, parts: int
) -> list[SequenceState | None]:
    """Give as many sequences as fit a row each, among those of the part in which they are."""
    placed: list[SequenceState | None] = []
    for part in range(parts):
        inside = [s for s in sequences if s.part == part][: rows // parts]
        placed += [*inside, *[None] * (rows // parts - len(inside))]
    return placed


def fewest_rows(sequences: Sequence[SequenceState], sizes: Sizes) -> int:
    """Return the fewest rows that a program has for sequences, or the most of any."""
    in_a_part = max(sum(s.part == part for s in sequences) for part in range(sizes.parts))
    return next((n for n in sizes.rows if n >= in_a_part * sizes.parts), sizes.rows[-1])


class Scheduler:
    """Sequences that wait and that run, and the pages that they hold.

    Args:
        sizes: of the programs and the pool.
        max_running_sequences: the most sequences that run in a part of the pool.
        on_remove: called with a sequence before its pages are taken.

    Attributes:
        pages: of each part of the pool.
        counts: of tokens and preemptions, by their field of `EngineStats`.
    """

    def __init__(
        self,
        sizes: Sizes,
        max_running_sequences: int,
        on_remove: Callable[[SequenceState], None] = lambda _: None,
    ) -> None:
        """Nothing waits."""
        self.sizes, self.max_running_sequences = sizes, max_running_sequences
        self.counts = Counter[str]()
        self._on_remove = on_remove
        self.clear()

    def clear(self) -> None:
        """Forget all sequences and all pages."""
        self.waiting: deque[SequenceState] = deque()
        self.running: dict[SequenceState, None] = {}  # in the order of their admission
        self._prefilling: dict[SequenceState, None] = {}  # of these, in the same order
        self._running_in = [0] * self.sizes.parts
        pages, slots = self.sizes.pages, self.sizes.slots
        self.pages = [
            StatePagePool(pages, size=PAGE, slots=slots) if slots else PagePool(pages, size=PAGE)
            for _ in range(self.sizes.parts)
        ]

    @property
    def is_busy(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Let sequences wait; what is cached of them stays longer than what nobody waits for."""
        for sequence in sequences:
            self.waiting.append(sequence)
            for pages in self.pages:
                pages.touch(sequence.keys(len(sequence.tokens) - 1), sequence.first_version)

    def drop_cancelled(self) -> None:
        """Forget the sequences whose callers gave up."""
        if any(s.future.cancelled() for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if not s.future.cancelled())
        for sequence in [s for s in self.running if s.future.cancelled()]:
            self.remove(sequence)

    def withdraw(self, sequences: Iterable[SequenceState]) -> None:
        """Forget sequences before their end; what is cached of them stays while there is room."""
        for sequence in sequences:
            sequence.withdrawn = True
            if sequence in self.running:
                self.remove(sequence)
        self.waiting = deque(s for s in self.waiting if not s.withdrawn)

    def schedule(self, prefilled: int = 0) -> SchedulerOutput:
        """Admit sequences that fit, then choose what the next program reads.

        Prompts are prefilled first; not all of them while others wait for their next tokens.

        Args:
            prefilled: tokens of prompts that programs have prefilled since others decoded.
        """
        self._admit_waiting()
        prefilling = list(self._prefilling)
        others_wait = prefilled >= PREFILL_BETWEEN_CHUNKS
        if prefilling and not (others_wait and len(prefilling) * 2 <= len(self.running)):
            return self._schedule_prefill(prefilling)
        return self._schedule_decode()

    def mark_prefilled(self, sequence: SequenceState, tokens: int) -> None:
        """Note that so many tokens more are cached; share them once all are, or others can."""
        sequence.cached += tokens
        self.counts["prompt_tokens"] += tokens
        if sequence.is_prefilled:
            del self._prefilling[sequence]
        if sequence.is_prefilled or sequence.cached == sequence.table.branch:
            sequence.pages.cache_prefix(sequence.table, sequence.keys(sequence.cached))

    def preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's pages; it is the next to be admitted, and read again."""
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.counts["preemptions"] += 1

    def preempt_all(self) -> None:
        """Take the pages of all that run."""
        for sequence in list(self.running)[::-1]:
            self.preempt(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence's pages; they stay, for others that begin alike, while there is room."""
        self._on_remove(sequence)
        sequence.pages.retire(sequence.table, sequence.keys(sequence.cached))
        sequence.cached = 0
        del self.running[sequence]
        self._prefilling.pop(sequence, None)
        self._running_in[sequence.part] -= 1

    def _admit_waiting(self) -> None:
        """Let those run that fit, in their order.

        A prompt that is being read is not read a second time: who has the same waits for it.
        """
        if not self.waiting:
            return
        prefilling = {s.prompt_keys for s in self._prefilling}
        passed: list[SequenceState] = []
        while self.waiting and len(self.running) < self.max_running_sequences * len(self.pages):
            sequence = self.waiting.popleft()
            if sequence.prompt_keys in prefilling:
                passed.append(sequence)
            elif self._admit(sequence):
                if not sequence.is_prefilled:
                    prefilling.add(sequence.prompt_keys)
            else:
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(passed))

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a sequence what is cached of its tokens, and pages for the rest."""
        end, keys = self._end(sequence), sequence.keys(len(sequence.tokens) - 1)
        for part in self._parts_with_room(sequence):
            pages, table = self.pages[part], PageTable()
            cached = pages.match_prefix(table, keys, sequence.first_version)
            others = self._running_in[part]  # a page for each of them, which grow too
            has_room = pages.pages_needed(table, end) + others <= pages.available
            if has_room and pages.allocate(table, end):
                sequence.part, sequence.pages = part, pages
                sequence.table, sequence.cached = table, cached
                self.running[sequence] = None
                self._running_in[part] += 1
                if not sequence.is_prefilled:
                    self._prefilling[sequence] = None
                self.counts["reused_tokens"] += cached
                return True
            pages.free(table)
        return False

    def _parts_with_room(self, sequence: SequenceState) -> list[int]:
        """Return the parts that may run one more: most cached first, then fewest running."""
        parts = []
        for part, pages in enumerate(self.pages):
            others, table = self._running_in[part], PageTable()
            if others < self.max_running_sequences:
                several = len(self.pages) > 1
                known = sequence.keys(len(sequence.tokens) - 1) if several else []
                cached = pages.match_prefix(table, known, sequence.first_version)
                pages.free(table)
                parts.append((-cached, others, part))
        return [part for *_, part in sorted(parts)]

    def _schedule_prefill(self, waiting: list[SequenceState]) -> SchedulerOutput:
        """Choose the next part of as many prompts, oldest first, as one program takes."""
        shapes = sorted(self.sizes.prefill_shapes, key=lambda shape: shape[::-1])
        longest = max(len(s.tokens) - 1 - s.cached for s in waiting)
        length = next((n for _, n in shapes if n >= longest), shapes[-1][1])
        fitting = [rows for rows, tokens in shapes if tokens == length]
        rows = next((n for n in fitting if n >= len(waiting)), fitting[-1])
        tokens = {
            s: min(length, s.read_to - s.cached)
            for s in assign_rows(waiting, rows, self.sizes.parts)
            if s is not None
        }
        return SchedulerOutput(True, tokens, rows, length)

    def _schedule_decode(self) -> SchedulerOutput:
        """Choose the sequences to decode, each with pages for its next tokens.

        Where there are not enough, the youngest give theirs back, and are read again later. Where
        rows would take more room than there is, the youngest get their turn when others end.
        """
        sizes = self.sizes
        for sequence in [s for s in self.running if s not in self._prefilling]:
            end = self._end(sequence)
            while sequence in self.running and not sequence.pages.allocate(sequence.table, end):
                youngest = next(s for s in reversed(self.running) if s.part == sequence.part)
                self.preempt(youngest)
        ready = [s for s in self.running if s not in self._prefilling]
        if not ready:
            return SchedulerOutput(False, {})
        while True:
            rows, width = fewest_rows(ready, sizes), sizes.width(max(map(self._end, ready)))
            if sizes.fits(rows, width):
                break
            ready = ready[: len(ready) // 2]
        tokens = {s: min(sizes.steps, s.left) for s in ready}
        return SchedulerOutput(False, tokens, rows, width)

    def _end(self, sequence: SequenceState) -> int:
        """Return how many tokens are cached after the next chunk at most."""
        return len(sequence.tokens) - 1 + min(self.sizes.steps, sequence.left)
