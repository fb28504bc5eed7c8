"""Sampled answers to prompts, as the training loop, evaluation and reward functions get them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.types import Completion, Request, SamplingParams
from jaxrl_llm.types import Batch


class Rollouts(NamedTuple):
    """B sampled answers; those of one prompt lie side by side."""

    prompts: list[Prompt]
    completions: list[Completion]
    texts: list[str]

    def take(self, rows: Sequence[int]) -> "Rollouts":
        """Return some of the answers, by index."""
        return Rollouts(
            [self.prompts[i] for i in rows],
            [self.completions[i] for i in rows],
            [self.texts[i] for i in rows],
        )

    def join(self, other: "Rollouts") -> "Rollouts":
        """Return these answers, then the other's."""
        return Rollouts(
            self.prompts + other.prompts,
            self.completions + other.completions,
            self.texts + other.texts,
        )


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int,
    seed: tuple[int, ...],
    decode: Callable[[Any], str],
) -> Rollouts:
    """Draw G answers for each prompt.

    Args:
        engine: holds the policy.
        prompts: P prompts.
        sampling: how to sample.
        samples: G.
        seed: entropy of this call; each answer gets a seed of its own from it.
        decode: answer's token ids, without the stop token, to text.
    """
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    seeds = answer_seeds(seed, len(repeated))
    completions = engine.sample(
        [Request(p.tokens, sampling, s) for p, s in zip(repeated, seeds, strict=True)]
    )
    ends = [len(c.tokens) - isinstance(c.stopped_by, int) for c in completions]
    texts = [decode(c.tokens[:end]) for c, end in zip(completions, ends, strict=True)]
    return Rollouts(repeated, completions, texts)


def answer_seeds(seed: tuple[int, ...], count: int) -> list[int]:
    """Return the seeds of so many answers, from the entropy of a call.

    >>> answer_seeds((0, 1), 3)[:2] == answer_seeds((0, 1), 2)
    True
    """
    return np.random.SeedSequence(seed).generate_state(count).tolist()


def side_by_side(rollouts: Rollouts, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids of prompts and answers [B T], T = `max_tokens`, and their numbers [B]."""
    tokens = np.zeros((len(rollouts.prompts), max_tokens), np.int32)
    sizes = np.zeros(len(tokens), np.int32)
    for i, (prompt, answer) in enumerate(zip(rollouts.prompts, rollouts.completions, strict=True)):
        sizes[i] = len(prompt.tokens) + len(answer.tokens)
        tokens[i, : sizes[i]] = (*prompt.tokens, *answer.tokens)
    return tokens, sizes


def lay_out(rollouts: Rollouts, *, samples: int, max_tokens: int) -> Batch:
    """Lay prompts and answers out as a batch [B T], T = `max_tokens`.

    Args:
        rollouts: B answers.
        samples: G, the answers to each prompt.
        max_tokens: T, at least the longest prompt and answer.

    Returns:
        A batch with the fields `mask`, `response_lengths`, `group_ids` and `rollout_logprobs`.
    """
    tokens, sizes = side_by_side(rollouts, max_tokens)
    mask, logprobs = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
    for i, (answer, end) in enumerate(zip(rollouts.completions, sizes, strict=True)):
        start = end - len(answer.tokens)
        mask[i, start:end], logprobs[i, start:end] = True, answer.logprobs
    return Batch(
        tokens,
        sizes,
        {
            "mask": mask,
            "response_lengths": mask.sum(1, dtype=np.int32),
            "group_ids": np.arange(len(sizes), dtype=np.int32) // samples,
            "rollout_logprobs": logprobs,
        },
    )
