"""Which sequences run: admission by what fits, preemption where it no longer does.

Pure bookkeeping on the host; it knows pages by number and no devices.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrl_llm.rollout.native.pages import Held, Pages
from jaxrl_llm.rollout.types import Completion, Request


@dataclass(eq=False)
class Answer:
    """An answer on its way.

    Attributes:
        request: what is asked.
        future: where the answer goes; its caller may cancel it at any time.
        listener: called with each piece of the answer.
        tokens: prompt and what is there of the answer.
        logprobs: of the answer's tokens.
        versions: of the weights that drew each of them.
        top: the likeliest tokens at each of them and their log-probs.
        told: how many of them the listener has.
        part: the part of the pool in which it is.
        held: its pages.
        cached: how many tokens have their keys and values in these.
        finish: why it ended, or "".
        stopped_by: what ended it.
    """

    request: Request
    future: "Future[Completion]" = field(default_factory=Future)
    listener: Callable[[Completion], None] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    told: int = 0
    part: int = 0
    held: Held = field(default_factory=Held)
    cached: int = 0
    finish: str = ""
    stopped_by: int | str | None = None

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        self.tokens = list(self.request.prompt)

    @property
    def generated(self) -> int:
        """Return the number of the answer's tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Return how many tokens may follow."""
        return self.request.sampling.max_new_tokens - self.generated

    @property
    def is_read(self) -> bool:
        """Return whether all tokens but the newest are cached, as a step of decoding wants it."""
        return self.cached == len(self.tokens) - 1

    def stop_at_text(self, detokenize: Callable[[list[int]], str], new: int) -> None:
        """End the answer where it holds a text that stops it; what follows is dropped.

        Args:
            detokenize: from token ids to text.
            new: how many tokens have not been looked at.
        """
        first = len(self.request.prompt)
        if not any(stop in detokenize(self.tokens[first:]) for stop in self.request.sampling.stop):
            return
        for count in range(self.generated - new + 1, self.generated + 1):
            text = detokenize(self.tokens[first : first + count])
            if found := [stop for stop in self.request.sampling.stop if stop in text]:
                break
        else:
            return
        self.finish, self.stopped_by = "stop", min(found, key=text.index)
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
        )


class Counts(NamedTuple):
    """What happened since the start, in tokens and in sequences."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Sequences that wait and that run, and the pages that they hold.

    Args:
        pages: of each part of the pool.
        slots: the most sequences that run in a part.
        steps: tokens that a sequence gets at a time.
    """

    def __init__(self, pages: list[Pages], *, slots: int, steps: int) -> None:
        """Nothing waits."""
        self.pages, self.slots, self.steps = pages, slots, steps
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []  # in the order of their admission
        self.counts = Counts()

    @property
    def is_busy(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Answer]) -> None:
        """Let sequences wait."""
        self.waiting.extend(sequences)

    def drop_cancelled(self) -> None:
        """Forget the sequences whose callers gave up."""
        if any(s.future.cancelled() for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if not s.future.cancelled())
        for sequence in [s for s in self.running if s.future.cancelled()]:
            self.remove(sequence)

    def admit(self) -> None:
        """Let those run that fit, in their order.

        A prompt that is being read is not read a second time: who has the same waits for it.
        """
        reading = {s.request.prompt for s in self.running if not s.is_read}
        passed: list[Answer] = []
        while self.waiting and len(self.running) < self.slots * len(self.pages):
            sequence = self.waiting.popleft()
            if sequence.request.prompt in reading:
                passed.append(sequence)
            elif self._admit(sequence):
                if not sequence.is_read:
                    reading.add(sequence.request.prompt)
            else:
                self.waiting.appendleft(sequence)
                break
        self.waiting.extendleft(reversed(passed))

    def unread(self) -> list[Answer]:
        """Return the running sequences of which tokens have to be read, oldest first."""
        return [s for s in self.running if not s.is_read]

    def read(self, sequence: Answer, tokens: int) -> None:
        """Note that so many tokens more are cached; share them once all are."""
        sequence.cached += tokens
        self.counts = self.counts._replace(prompt_tokens=self.counts.prompt_tokens + tokens)
        if sequence.is_read:
            pages = self.pages[sequence.part]
            pages.seal(sequence.held, sequence.tokens[: sequence.cached])

    def ready(self) -> list[Answer]:
        """Return the sequences to decode, oldest first, each with pages for the next tokens.

        Where there are not enough, the youngest give theirs back, and are read again later.
        """
        for sequence in [s for s in self.running if s.is_read]:
            pages = self.pages[sequence.part]
            end = len(sequence.tokens) - 1 + min(self.steps, sequence.left)
            while sequence in self.running and not pages.reserve(sequence.held, end):
                self.preempt([s for s in self.running if s.part == sequence.part][-1])
        return [s for s in self.running if s.is_read]

    def preempt(self, sequence: Answer) -> None:
        """Take a sequence's pages; it is the next to be admitted, and read again."""
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.counts = self.counts._replace(preemptions=self.counts.preemptions + 1)

    def remove(self, sequence: Answer) -> None:
        """Take a sequence's pages; they stay, for others that begin alike, while there is room."""
        pages = self.pages[sequence.part]
        pages.seal(sequence.held, sequence.tokens[: sequence.cached])
        pages.release(sequence.held)
        sequence.cached = 0
        self.running.remove(sequence)

    def _admit(self, sequence: Answer) -> bool:
        """Give a sequence what is cached of its tokens, and pages for the rest."""
        end = len(sequence.tokens) - 1 + min(self.steps, sequence.left)
        for part in self._places(sequence):
            pages, held = self.pages[part], Held()
            found = pages.match(held, sequence.tokens[:-1])
            others = self._running_in(part)  # a page for each of them, which grow too
            if pages.lacks(held, end) + others <= pages.available:
                pages.reserve(held, end)
                sequence.part, sequence.held, sequence.cached = part, held, found
                self.running.append(sequence)
                reused = self.counts.reused_tokens + found
                self.counts = self.counts._replace(reused_tokens=reused)
                return True
            pages.release(held)
        return False

    def _places(self, sequence: Answer) -> list[int]:
        """Return the parts that have a slot: first where most is cached, then where fewest run."""
        places = []
        for part, pages in enumerate(self.pages):
            others, held = self._running_in(part), Held()
            if others < self.slots:
                found = pages.match(held, sequence.tokens[:-1]) if len(self.pages) > 1 else 0
                pages.release(held)
                places.append((-found, others, part))
        return [part for *_, part in sorted(places)]

    def _running_in(self, part: int) -> int:
        return sum(s.part == part for s in self.running)
