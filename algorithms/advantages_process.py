"""Advantages from a reward for every token that an implicit reward model gives."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.advantages_outcome import rloo
from jaxrl_llm.algorithms.advantages_token import reward_to_go, to_tokens
from jaxrl_llm.algorithms.groups import grouped, over_group


def prime(
    reward_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    scores: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.05,
    gamma: float = 1.0,
    outcome_coef: float = 1.0,
) -> Float32[Array, "B T"]:
    """Add up process and outcome: A_t = Σ_{s≥t} γ^{s−t} (r_s − Σ_{j≠i} r̄_j / (G − 1)) + c A_RLOO.

    r_t = β (log π_φ − log π_ref) is the implicit process reward of a reward model φ that
    `values.implicit_reward_loss` trains, r̄_j its mean over the tokens of answer j, and A_RLOO the
    outcome's advantage, `rloo`. PRIME (https://arxiv.org/abs/2502.01456, eqs. 3 and 5), where
    c is 1. A weight of the process part is a factor of β. A group of one: A = 0.

    verl's recipe takes G / (G − 1) r_s − Σ_j r̄_j / (G − 1) in place of the paper's difference,
    with the answer itself in the sum. The two differ by (r_s − r̄_i) / (G − 1), which adds up to 0
    over an answer. It also gives the last token no process reward, divides r by the largest
    return among the answers of a device, weighs both parts by 5 and whitens their sum. We follow
    the paper.

    Args:
        reward_logprobs: log-probs under the implicit reward model.
        ref_logprobs: the same under the reference.
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.
        beta: scale of the process reward, in reward per nat.
        gamma: discount per token on the mask, of the process reward.
        outcome_coef: weight c of the outcome.

    Returns:
        One advantage per token, 0 off the mask.

    Raises:
        ValueError: beta is negative.

    >>> reward, ref = jnp.array([[-1.0, -2.0], [-3.0, -1.0]]), jnp.full((2, 2), -2.0)
    >>> scores, groups, mask = jnp.array([1.0, 0.0]), jnp.array([5, 5]), jnp.ones((2, 2), bool)
    >>> prime(reward, ref, scores, groups, mask, beta=0.5).tolist()
    [[1.5, 1.0], [-1.5, -0.75]]
    """
    if beta < 0:
        raise ValueError(f"beta: got {beta}, expected at least 0")
    groups = grouped(group_ids)
    reward = beta * ratios.log_ratio(reward_logprobs, ref_logprobs)
    mean = ratios.sequence_mean(reward, mask)
    others = over_group(jax.ops.segment_sum, mean, groups) - mean
    size = groups.size[:, None]
    others /= jnp.maximum(size - 1, 1).astype(jnp.float32)
    process = reward_to_go(reward - others, mask, gamma=gamma)
    outcome = to_tokens(outcome_coef * rloo(scores, group_ids), mask)
    return jnp.where(size > 1, process + outcome, 0.0)
