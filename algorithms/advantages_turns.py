"""Advantages of episodes in which the policy draws several turns and is told something between.

`turn_ids` says which turn drew a token. Tokens off the mask (what the policy is told, padding) are
passed over as in `advantages_token`, and so is an episode without any token on the mask.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.algorithms.advantages_token import from_the_end, next_on_mask, reward_to_go
from jaxrl_llm.algorithms.groups import Groups, deviation, grouped, over_group


def grpo_turns(
    rewards: Float[Array, "B T"],
    turn_ids: Int[Array, "B T"],
    group_ids: Int[Array, " B"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Float32[Array, "B T"]:
    """Standardise each turn's return within its group: A_k = (G_k − mean_k) / (std_k + eps).

    G_k = r_k + γ G_{k+1}, where r_k is the sum of the rewards of turn k's tokens, and k + 1 the
    episode's next turn. Mean and standard deviation (divisor n − 1) are over the episodes of the
    group that have a turn k. Where there is only one, nothing can be compared: A_k = 0, unlike
    `grpo`'s group of one. Equal returns give exactly 0. For episodes of one turn this is `grpo`.

    GTPO (https://arxiv.org/abs/2511.14846) takes normalised discounted returns of turns, too.
    MT-GRPO (https://arxiv.org/abs/2505.11821) standardises a turn's reward and the outcome's each
    by itself and adds them up; we add up first, so that rewards keep their relative sizes. GiGPO
    (https://arxiv.org/abs/2505.10978) standardises discounted returns among the steps of a group
    that begin in equal states, and adds the advantage of the whole episode; we compare turns of
    equal number, whatever their states, and add nothing.

    Args:
        rewards: reward of each token.
        turn_ids: number of the turn that drew the token, from 0 and below T.
        group_ids: which episodes share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.
        gamma: discount per turn.
        scale_by_std: divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the reward.

    Returns:
        One advantage per token, the same for all tokens of a turn, 0 off the mask.

    >>> rewards, turns = jnp.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]]), jnp.array([[0, -1, 1]] * 2)
    >>> grpo_turns(rewards, turns, jnp.array([7, 7]), turns >= 0, scale_by_std=False).tolist()
    [[1.0, 0.0, 0.5], [-1.0, 0.0, -0.5]]
    """
    turn_rewards, drawn = _by_turn(rewards, turn_ids, mask)
    returns = reward_to_go(turn_rewards, drawn, gamma=gamma)
    groups = grouped(group_ids)
    advantages, count = _centred(returns, drawn, groups)
    if scale_by_std:
        advantages /= deviation(advantages, groups, count) + eps
    turns = jnp.where(mask, turn_ids, 0)
    return jnp.where(mask, jnp.take_along_axis(advantages, turns, axis=1), 0.0)


def gae_turns(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    turn_ids: Int[Array, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Take `gae` with γ and λ per turn: δ_t = r_t + γ_t V_{t+1} − V_t, A_t = δ_t + γ_t λ_t A_{t+1}.

    γ_t = γ and λ_t = λ where the next token on the mask is another turn's, else both are 1: a long
    turn is discounted no more than a short one. So a turn's first token has the advantage that GAE
    (https://arxiv.org/abs/1506.02438, eq. 16) gives turns as actions, with V at their first tokens.
    Turn-PPO (https://arxiv.org/abs/2512.17008) gives that to all tokens of the turn; here each of
    them is compared with its own V_t, which the critic learns for every token. With γ = λ = 1 this
    is `gae`.

    Args:
        rewards: reward of each token.
        values: what the critic expects from each token on, before the token is chosen.
        mask: true on tokens that the policy generated.
        turn_ids: number of the turn that drew the token.
        gamma: discount per turn.
        lam: 0 trusts the critic after one turn, 1 waits for the end.

    Returns:
        Advantages, and returns A + V for the critic to learn; both 0 off the mask.

    >>> rewards, values = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[0.5, 0.25, 0.5]])
    >>> mask, turns = jnp.array([[True, True, True]]), jnp.array([[0, 0, 1]])
    >>> advantages, returns = gae_turns(rewards, values, mask, turns, gamma=0.5)
    >>> advantages.tolist(), returns.tolist()
    ([[0.0, 0.25, 0.5]], [[0.5, 0.5, 1.0]])
    """
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)
    turns = jnp.where(mask, turn_ids, 0).astype(jnp.float32)
    ends = mask & (next_on_mask(turns, mask) != turns)
    discount = jnp.where(ends, gamma, 1.0)
    delta = rewards.astype(jnp.float32) + discount * next_on_mask(values, mask) - values
    decay = jnp.where(ends, gamma * lam, 1.0)
    advantages = jnp.where(mask, from_the_end(decay, jnp.where(mask, delta, 0.0)), 0.0)
    return advantages, advantages + values


def _by_turn(
    rewards: Float[Array, "B T"], turn_ids: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """Return the sum of each turn's rewards, with turn k in column k, and which turns there are."""
    length = mask.shape[1]

    def add_up(values: Array, turns: Array) -> Array:
        return jax.ops.segment_sum(values, turns, num_segments=length)

    rewards = jnp.where(mask, rewards.astype(jnp.float32), 0.0)
    turns = jnp.where(mask, turn_ids, 0)
    tokens = jax.vmap(add_up)(mask.astype(jnp.int32), turns)
    return jax.vmap(add_up)(rewards, turns), tokens > 0


def _centred(
    returns: Float32[Array, "B T"], drawn: Bool[Array, "B T"], groups: Groups
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Return the returns less the mean of their group and column, and the episodes in the mean."""
    # Less the minimum first, as in `groups.centred`: then equal returns give exactly 0.
    lowest = over_group(jax.ops.segment_min, jnp.where(drawn, returns, jnp.inf), groups)
    shifted = jnp.where(drawn, returns - lowest, 0.0)
    count = over_group(jax.ops.segment_sum, drawn.astype(jnp.float32), groups)
    mean = over_group(jax.ops.segment_sum, shifted, groups) / jnp.maximum(count, 1.0)
    return jnp.where(drawn, shifted - mean, 0.0), count
