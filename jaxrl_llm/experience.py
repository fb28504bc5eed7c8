"""From prompts to what an algorithm can see: sample, score, lay out, estimate advantages."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.dataflow import call, describe
from jaxrl_llm.functions import RunError
from jaxrl_llm.rewards.pool import Score
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.types import Batch, Completion, Request, Sampling


class Rollouts(NamedTuple):
    """B sampled answers; those of one prompt lie side by side."""

    prompts: list[Prompt]
    completions: list[Completion]
    texts: list[str]


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
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
    seeds = np.random.SeedSequence(seed).generate_state(len(repeated)).tolist()
    completions = engine.sample(
        [Request(p.tokens, sampling, s) for p, s in zip(repeated, seeds, strict=True)]
    )
    texts = [decode(c.tokens[: len(c.tokens) - (c.finish == "stop")]) for c in completions]
    return Rollouts(repeated, completions, texts)


def experience(
    rollouts: Rollouts, scores: Sequence[Score], *, samples: int, max_tokens: int
) -> Batch:
    """Lay prompts and answers out as a batch [B T], T = `max_tokens`."""
    size = len(rollouts.prompts)
    tokens = np.zeros((size, max_tokens), np.int32)
    mask = np.zeros((size, max_tokens), bool)
    logprobs = np.zeros((size, max_tokens), np.float32)
    sizes = np.zeros(size, np.int32)
    for i, (prompt, answer) in enumerate(zip(rollouts.prompts, rollouts.completions, strict=True)):
        start, end = len(prompt.tokens), len(prompt.tokens) + len(answer.tokens)
        tokens[i, :start], tokens[i, start:end] = prompt.tokens, answer.tokens
        mask[i, start:end], logprobs[i, start:end] = True, answer.logprobs
        sizes[i] = end
    values = np.array([score.score for score in scores], np.float32)
    return Batch(
        tokens,
        sizes,
        {
            "mask": mask,
            "lengths": mask.sum(1, dtype=np.int32),
            "group_ids": np.arange(size, dtype=np.int32) // samples,
            "rollout_logprobs": logprobs,
            "scores": values,
            "rewards": _on_last_token(values, mask),
        },
    )


def _on_last_token(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    rewards = np.zeros(mask.shape, np.float32)
    rewards[np.arange(len(scores)), last] = scores
    return rewards


def penalize(batch: Batch, kl: np.ndarray, coef: float) -> Batch:
    """Subtract the KL penalty from the token rewards, and its sum from the scores."""
    rewards = batch["rewards"] - np.float32(coef) * np.where(batch["mask"], kl, 0)
    return batch.add(rewards=rewards, scores=rewards.sum(1))


class AdvantageError(RunError):
    """An advantage function that returned something else than advantages."""


def advantage_step(function: Callable[..., Any]) -> Callable[[Batch], Batch]:
    """Return a jitted step that adds `advantages` [B T] to a batch.

    The function returns [B] (every token of an answer gets its advantage), [B T], or a pair whose
    first entry is [B T].
    """

    @jax.jit
    def compute(fields: dict[str, Any]) -> Any:
        result = call(function, fields)
        result = result[0] if isinstance(result, tuple) else result
        mask = fields["mask"]
        arrays = (jax.Array, np.ndarray)
        if not isinstance(result, arrays) or result.shape not in (mask.shape, mask.shape[:1]):
            got = f"shape {list(result.shape)}" if hasattr(result, "shape") else repr(type(result))
            raise AdvantageError(
                f"advantage {describe(function)!r} returned {got}; wanted an array [B] or "
                f"[B T], here [{mask.shape[0]}] or {list(mask.shape)}"
            )
        if not jnp.issubdtype(result.dtype, jnp.floating):
            raise AdvantageError(
                f"advantage {describe(function)!r} returned {result.dtype}, wanted floating point"
            )
        per_token = result[:, None] if result.ndim == 1 else result
        return jnp.where(mask, per_token, 0.0).astype(jnp.float32)

    def add(batch: Batch) -> Batch:
        advantages = np.asarray(compute(dict(batch.fields)))
        if not np.isfinite(advantages).all():
            rows = np.flatnonzero(~np.isfinite(advantages).all(1))
            raise AdvantageError(
                f"advantage {describe(function)!r} returned NaN or infinity for "
                f"{len(rows)} of {len(advantages)} answers, the first one number {rows[0]} "
                f"with score {batch['scores'][rows[0]]}"
            )
        return batch.add(advantages=advantages)

    return add
