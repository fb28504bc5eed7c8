"""Advantages over the baseline that minimises the gradient's variance, for every token.

The Optimal Token Baseline (https://arxiv.org/abs/2602.07078). The squared norm of the gradient of
log π with respect to the logits is known from the forward pass, w = 1 − 2π + Σ_v π_v² (its
"logit-gradient proxy"); W_t = Σ_{s≤t} w_s is what an answer has gathered up to token t.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.advantages_token import reward_to_go
from jaxrl_llm.algorithms.groups import grouped, over_group


def optimal_token_baseline(
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    old_logprobs: Float[Array, "B T"],
    sum_pi_squared: Float[Array, "B T"],
) -> Float32[Array, "B T"]:
    """Compare returns, token by token, with the group's: A_t = G_t − Σ_j G_jt W_jt / Σ_j W_jt.

    The sums go over the answers of the group that are still being generated at t. Where a single
    one is left, and so in a group of one, there is nothing to compare with: A_t = G_t. Answers are
    aligned by position in the batch; see `optimal_token_baseline_multi_turn` for tool calls.

    Args:
        rewards: reward of each token.
        mask: true on tokens that the policy generated.
        group_ids: which answers share a prompt; any integers, in any order.
        old_logprobs: log-probs under the policy at the start of the step.
        sum_pi_squared: Σ_v π_v² under the same policy.

    Returns:
        One advantage per token, 0 off the mask.

    >>> row = jnp.full((2, 1), 0.5)
    >>> rewards, mask, groups = jnp.array([[1.0], [0.0]]), row > 0, jnp.array([0, 0])
    >>> optimal_token_baseline(rewards, mask, groups, jnp.log(row), row).tolist()
    [[0.5], [-0.5]]
    """
    energy = _energy(old_logprobs, sum_pi_squared)
    return _less_baseline(rewards, mask, group_ids, energy)


def optimal_token_baseline_corrected(
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    sum_pi_squared: Float[Array, "B T"],
    *,
    cap: float = 2.0,
) -> Float32[Array, "B T"]:
    """Take `optimal_token_baseline` where the loss is weighted by ρ: w = ρ² (1 − 2π + Σ_v π_v²).

    ρ = min(exp(log π_old − log π_rollout), cap) is the weight that `correction.truncated_token`
    gives a token; weighting a gradient by ρ multiplies its squared norm by ρ².

    Args:
        rewards: reward of each token.
        mask: true on tokens that the policy generated.
        group_ids: which answers share a prompt; any integers, in any order.
        old_logprobs: log-probs under the policy at the start of the step.
        rollout_logprobs: log-probs that the engine reported.
        sum_pi_squared: Σ_v π_v² under the policy at the start of the step.
        cap: the largest weight.

    Returns:
        One advantage per token, 0 off the mask.

    >>> row = jnp.full((2, 1), 0.5)
    >>> rewards, mask, groups = jnp.array([[1.0], [0.0]]), row > 0, jnp.array([0, 0])
    >>> rollout = jnp.log(jnp.array([[0.5], [0.25]]))
    >>> advantages = optimal_token_baseline_corrected(
    ...     rewards, mask, groups, jnp.log(row), rollout, row
    ... )
    >>> [f"{a:.3f}" for a in advantages[:, 0]]
    ['0.800', '-0.200']
    """
    rho = jnp.minimum(jnp.exp(ratios.clipped_log_ratio(old_logprobs, rollout_logprobs)), cap)
    energy = jnp.square(rho) * _energy(old_logprobs, sum_pi_squared)
    return _less_baseline(rewards, mask, group_ids, energy)


def optimal_token_baseline_multi_turn(
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    old_logprobs: Float[Array, "B T"],
    sum_pi_squared: Float[Array, "B T"],
) -> Float32[Array, "B T"]:
    """Take `optimal_token_baseline` with answers aligned by how many tokens were generated.

    Tool output has another length in every answer, so the n-th generated token of an answer is
    compared with the n-th of the others. Without gaps in the mask this is the plain form.

    Args:
        rewards: reward of each token.
        mask: true on tokens that the policy generated.
        group_ids: which answers share a prompt; any integers, in any order.
        old_logprobs: log-probs under the policy at the start of the step.
        sum_pi_squared: Σ_v π_v² under the same policy.

    Returns:
        One advantage per token, 0 off the mask.

    >>> half = jnp.full((2, 2), 0.5)
    >>> rewards = jnp.array([[1.0, 0.0], [0.0, 0.0]])
    >>> mask = jnp.array([[True, False], [False, True]])
    >>> optimal_token_baseline_multi_turn(
    ...     rewards, mask, jnp.array([0, 0]), jnp.log(half), half
    ... ).tolist()
    [[0.5, 0.0], [0.0, -0.5]]
    """
    order = jnp.argsort(~mask, axis=1, stable=True)

    def compact(x: Array) -> Array:
        return jnp.take_along_axis(x, order, axis=1)

    advantages = optimal_token_baseline(
        compact(rewards), compact(mask), group_ids, compact(old_logprobs), compact(sum_pi_squared)
    )
    return jnp.take_along_axis(advantages, jnp.argsort(order, axis=1), axis=1)


def _energy(
    logprobs: Float[Array, "B T"], sum_pi_squared: Float[Array, "B T"]
) -> Float32[Array, "B T"]:
    # At least (1 − π)²; rounding may leave it below 0 where π is near 1.
    pi = jnp.exp(logprobs.astype(jnp.float32))
    return jnp.maximum(1.0 - 2.0 * pi + sum_pi_squared.astype(jnp.float32), 0.0)


def _less_baseline(
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    group_ids: Int[Array, " B"],
    energy: Float32[Array, "B T"],
) -> Float32[Array, "B T"]:
    groups = grouped(group_ids)
    returns = reward_to_go(rewards, mask)
    gathered = jnp.where(mask, jnp.cumsum(jnp.where(mask, energy, 0.0), axis=1), 0.0)
    generating = over_group(jax.ops.segment_sum, mask.astype(jnp.int32), groups)
    total = over_group(jax.ops.segment_sum, gathered, groups)
    # Less the minimum first, as in `groups.centred`: then equal returns give exactly 0.
    lowest = over_group(jax.ops.segment_min, jnp.where(mask, returns, jnp.inf), groups)
    shifted = jnp.where(mask, returns - lowest, 0.0)
    weighted = over_group(jax.ops.segment_sum, gathered * shifted, groups)
    known = (generating > 1) & (total > 0)
    advantages = jnp.where(known, shifted - weighted / jnp.where(known, total, 1), returns)
    return jnp.where(mask, advantages, 0.0)
