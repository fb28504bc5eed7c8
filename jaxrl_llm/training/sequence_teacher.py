"""Teachers that are given sequences of tokens: on a server, or with a tokenizer of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.data.token_alignment import UNALIGNED, Alignment, spread_logprobs
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.rollout.types import LEAST_LOGPROB, ScoredTokens
from jaxrl_llm.training.teacher_tokens import Retokenizer, TeacherSequence
from jaxrl_llm.types import Batch

Fields = dict[str, np.ndarray]
Scores = Callable[[], list[ScoredTokens]]
"""Waits for the log-probs of sequences."""


def without_teacher(batch: Batch) -> Fields:
    """Return the fields of a teacher that says nothing of a batch's answers."""
    return {
        "teacher_logprobs": batch["rollout_logprobs"].astype(np.float32, copy=True),
        "teacher_mask": np.zeros(batch.tokens.shape, bool),
    }


@dataclass(frozen=True, kw_only=True)
class SequenceTeacher:
    """A teacher that is given the tokens of each answer, in its own numbers.

    Attributes:
        name: for messages.
        submit: begins to score sequences.
        retokenize: writes answers in the teacher's tokens; None: it has the policy's.
        longest: the most tokens of a sequence; None: whatever the policy draws has room.
        top: how many of the likeliest tokens it tells for each place.
        model: the teacher, where it stands in this process.
    """

    name: str
    submit: Callable[[Sequence[Sequence[int]]], Scores]
    retokenize: Retokenizer | None = None
    longest: int | None = None
    top: int = 0
    model: Any = None

    def __call__(self, batch: Batch, rollouts: Rollouts) -> Fields:
        """Return fields of a batch of answers; see `begin`."""
        return self.begin(batch, rollouts)()

    def begin(self, batch: Batch, rollouts: Rollouts) -> Callable[[], Fields]:
        """Begin to score a batch of answers; return what waits for its fields.

        `teacher_logprobs` [B T] and `teacher_mask` [B T], and with `top` also `teacher_ids` and
        `teacher_top_logprobs` [B T K]. A drawn token of which the teacher's tokens tell nothing, or
        to which it gives no probability, has the policy's own log-prob and is not in the mask.
        """
        rows = np.flatnonzero(batch["mask"].any(1)).tolist()
        sequences = [self._sequence(rollouts, row) for row in rows]
        asked = [i for i, sequence in enumerate(sequences) if sequence.answer]
        scores = self.submit([sequences[i].tokens for i in asked])

        def finish() -> Fields:
            with activity(f"waiting for {self.name}"):
                scored = scores()
            fields = self._empty(batch)
            for i, score in zip(asked, scored, strict=True):
                episode = rollouts.episodes[rows[i]]
                self._fill(fields, rows[i], episode, sequences[i], score)
            fields["teacher_mask"] &= batch["mask"]
            return fields

        return finish

    def _sequence(self, rollouts: Rollouts, row: int) -> TeacherSequence:
        prompt, episode = rollouts.prompts[row], rollouts.episodes[row]
        if self.retokenize is not None:
            sequence = self.retokenize(prompt, episode)
        else:
            same = np.arange(len(episode.tokens), dtype=np.int32)
            answer = tuple(episode.tokens.tolist())
            sequence = TeacherSequence(episode.prompt, answer, Alignment(same, same))
        return sequence if self.longest is None else sequence.cut(self.longest)

    def _empty(self, batch: Batch) -> Fields:
        fields = without_teacher(batch)
        if self.top:
            places = (*batch.tokens.shape, self.top)
            fields["teacher_ids"] = np.zeros(places, np.int32)
            fields["teacher_top_logprobs"] = np.zeros(places, np.float32)
        return fields

    def _fill(
        self,
        fields: Fields,
        row: int,
        episode: Episode,
        sequence: TeacherSequence,
        scored: ScoredTokens,
    ) -> None:
        """Write what is known of an answer into its row."""
        first = len(sequence.prompt)
        theirs = scored.logprobs[first:]
        impossible = np.unique(sequence.alignment.right[theirs <= LEAST_LOGPROB])
        alignment = sequence.alignment.without(impossible)
        places = slice(len(episode.prompt), len(episode.prompt) + len(episode.tokens))
        known = alignment.left != UNALIGNED
        spread = spread_logprobs(episode.logprobs, theirs, alignment)
        fields["teacher_logprobs"][row, places][known] = spread[known]
        fields["teacher_mask"][row, places] = known
        if self.top:
            fields["teacher_ids"][row, places] = scored.top_ids[first:]
            fields["teacher_top_logprobs"][row, places] = scored.top_logprobs[first:]
