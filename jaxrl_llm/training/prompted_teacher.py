"""A teacher that reads another prompt than the policy, and what it says at the answers' places."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.errors import RowError, RunError
from jaxrl_llm.config.fields import call, name_of
from jaxrl_llm.config.functions import described_failure
from jaxrl_llm.data.chat import Message
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.row_fields import naming_row
from jaxrl_llm.data.teacher_prompts import ScoredAnswer
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.rollouts import Rollouts, lay_out
from jaxrl_llm.training.teachers import without_teacher
from jaxrl_llm.types import Batch


class TeacherPromptError(RunError):
    """A function that gives no prompt for a teacher, or only such as are too long."""


class PromptedAnswers(NamedTuple):
    """Some of a step's answers behind the prompts that a teacher reads.

    Attributes:
        rows: of these answers in the step's batch.
        rollouts: the answers with the new prompts.
        batch: the same, laid out.
    """

    rows: np.ndarray
    rollouts: Rollouts
    batch: Batch


@dataclass(frozen=True, kw_only=True)
class TeacherPrompts:
    """Puts the prompts that a teacher reads before a step's answers.

    Attributes:
        function: writes the messages of a prompt; asks for some of `data.teacher_prompts.TOLD`.
        encode: messages -> token ids.
        samples: answers to each prompt.
        max_prompt_tokens: the longest prompt.
        max_tokens: the longest prompt and answer.
    """

    function: Callable[..., Any]
    encode: Callable[..., Sequence[int]]
    samples: int
    max_prompt_tokens: int
    max_tokens: int

    def __call__(
        self, batch: Batch, rollouts: Rollouts, scores: Sequence[Score]
    ) -> tuple[PromptedAnswers | None, dict[str, float]]:
        """Return the answers that have a teacher, if there are any, and how many have none.

        Args:
            batch: a step's answers; only usable ones get a teacher.
            rollouts: the same.
            scores: of them.

        Raises:
            TeacherPromptError: the function failed, or all its prompts are too long.
        """
        usable = np.flatnonzero(batch["mask"].any(1)).tolist()
        rows, prompts, too_long, last = [], [], 0, None
        for row in usable:
            messages = self._written(batch, rollouts, scores, row)
            if messages is None:
                continue
            if last is None or last[0] != messages:  # answers to one prompt often share it
                last = messages, self._encoded(messages, rollouts.prompts[row])
            if len(last[1]) > self.max_prompt_tokens:
                too_long += 1
                continue
            rows.append(row)
            prompts.append(last)
        if too_long and not rows:
            raise TeacherPromptError(
                f"teacher.prompt: each of the {too_long} prompts of a step is longer than "
                f"{self.max_prompt_tokens} tokens, so that nothing is learned from the teacher: "
                "raise teacher.max_prompt_tokens"
            )
        left = len(usable) - len(rows) - too_long
        metrics = {"teacher/no_prompt": float(left), "teacher/too_long": float(too_long)}
        return (self._laid_out(rollouts, rows, prompts) if rows else None), metrics

    def _written(
        self, batch: Batch, rollouts: Rollouts, scores: Sequence[Score], row: int
    ) -> list[Message] | None:
        """Return the messages for one answer; None where it has no teacher."""
        prompt, first = rollouts.prompts[row], row // self.samples * self.samples
        others = (i for i in range(first, first + self.samples) if i != row)
        told = {
            "messages": [dict(message) for message in prompt.messages],
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "text": rollouts.texts[row],
            "score": scores[row].score,
            "feedback": scores[row].extra,
            "siblings": [
                ScoredAnswer(rollouts.texts[i], scores[i].score, scores[i].extra)
                for i in others
                if batch["usable"][i] and scores[i].error is None
            ],
        }
        try:
            messages = call(self.function, told)
        except Exception as error:
            raise TeacherPromptError(
                f"teacher.prompt: {name_of(self.function)!r} failed on an answer to row "
                f"{prompt.index}: {described_failure(error, self.function)}"
            ) from error
        if messages is None or _is_chat(messages):
            return messages
        raise TeacherPromptError(
            f"teacher.prompt: {name_of(self.function)!r} returned {messages!r:.200}, expected "
            "messages, each with role and content, or None"
        )

    def _encoded(self, messages: Sequence[Message], prompt: Prompt) -> tuple[int, ...]:
        tools = {"tools": prompt.tools} if prompt.tools else {}
        try:
            with naming_row(f"an answer to row {prompt.index}", prompt.index):
                return tuple(self.encode(messages, **tools))
        except RowError as error:
            raise TeacherPromptError(f"teacher.prompt: {error}") from error

    def _laid_out(
        self,
        rollouts: Rollouts,
        rows: list[int],
        prompts: Sequence[tuple[list[Any], tuple[int, ...]]],
    ) -> PromptedAnswers:
        taken = rollouts.take(rows)
        changed = [
            (
                dataclasses.replace(prompt, tokens=tokens, messages=messages),
                dataclasses.replace(episode, prompt=tokens),
            )
            for prompt, episode, (messages, tokens) in zip(*taken[:2], prompts, strict=True)
        ]
        behind = taken._replace(prompts=[p for p, _ in changed], episodes=[e for _, e in changed])
        laid_out = lay_out(behind, samples=1, max_tokens=self.max_tokens, compares=False)
        return PromptedAnswers(np.array(rows), behind, laid_out)


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages)
    )


def fields_at_answers(batch: Batch, rollouts: Rollouts, prompted: PromptedAnswers) -> Batch:
    """Return a step's batch with the fields that a teacher has added to answers behind new prompts.

    A token without a teacher has the policy's own log-prob as `teacher_logprobs`, so that it is no
    further from the teacher than 0, and `teacher_mask` is false there.

    Args:
        batch: of the step.
        rollouts: of the step.
        prompted: some of its answers; the batch has the teacher's fields.
    """
    theirs = prompted.batch
    names = [name for name in theirs.fields if name.startswith("teacher_")]
    fields = {
        name: np.zeros((*batch.tokens.shape, *theirs[name].shape[2:]), theirs[name].dtype)
        for name in names
    } | without_teacher(batch)
    for place, row in enumerate(prompted.rows.tolist()):
        before, behind = rollouts.episodes[row], prompted.rollouts.episodes[place]
        here, there = (
            slice(len(episode.prompt), len(episode.prompt) + len(before.tokens))
            for episode in (before, behind)
        )
        for name in names:
            fields[name][row, here] = theirs[name][place, there]
    return batch.add(**fields)


def add_prompted_logprobs(
    batch: Batch,
    rollouts: Rollouts,
    scores: Sequence[Score],
    prompts: TeacherPrompts,
    add: Callable[[Batch, Rollouts], tuple[Batch, dict[str, float]]],
) -> tuple[Batch, dict[str, float]]:
    """Return a batch with what a teacher says of its answers behind other prompts; and metrics.

    Args:
        batch: of a step.
        rollouts: of the step.
        scores: of the answers.
        prompts: that the teacher reads.
        add: adds its log-probs to any batch of answers.
    """
    prompted, metrics = prompts(batch, rollouts, scores)
    if prompted is None:
        batch = batch.add(**without_teacher(batch))
        metrics["teacher/reverse_kl"] = 0.0
    else:
        told, more = add(prompted.batch, prompted.rollouts)
        batch = fields_at_answers(batch, rollouts, prompted._replace(batch=told))
        metrics |= more
    metrics["teacher/left_out"] = 1 - float(batch["teacher_mask"][batch["mask"]].mean())
    return batch, metrics
