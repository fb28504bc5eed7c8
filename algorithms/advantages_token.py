"""Advantages from rewards per token, and the parts they are made of.

Tokens off the mask (prompt, tool output, padding) are passed over: what stands there in any input
is not read, and the outputs are 0 there.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32


def whiten(x: Float[Array, "*S"], mask: Bool[Array, "*S"]) -> Float32[Array, "*S"]:
    """Shift and scale to mean 0 and variance 1 over the mask: (x − mean) / √(var + 1e-8).

    The variance divides by N − 1. Equal values give exactly 0.

    Args:
        x: what to whiten.
        mask: true where x counts.

    Returns:
        The whitened values, 0 off the mask.

    >>> whitened = whiten(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))
    >>> [f"{x:.3f}" for x in whitened]
    ['-0.707', '0.707', '0.000']
    """
    x, count = x.astype(jnp.float32), mask.sum()
    # Less the minimum first, as in `groups.centred`: then equal values give exactly 0.
    lowest = jnp.min(x, initial=jnp.inf, where=mask)
    shifted = jnp.where(mask, x - lowest, 0.0)
    mean = shifted.sum() / jnp.maximum(count, 1).astype(jnp.float32)
    centred = jnp.where(mask, shifted - mean, 0.0)
    # In units of the largest one, if that is above 1: float32 can't hold the square of 1e20.
    unit = jnp.max(jnp.abs(centred), initial=1.0)
    centred /= unit
    variance = jnp.square(centred).sum() / jnp.maximum(count - 1, 1).astype(jnp.float32)
    return centred * jax.lax.rsqrt(variance + 1e-8 / unit / unit)


def to_tokens(advantages: Float[Array, " B"], mask: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Give every token on the mask its answer's advantage: A_t = A.

    Args:
        advantages: one per answer.
        mask: true on tokens that the policy generated.

    Returns:
        One advantage per token, 0 off the mask.

    >>> to_tokens(jnp.array([2.0]), jnp.array([[False, True, True]])).tolist()
    [[0.0, 2.0, 2.0]]
    """
    return jnp.where(mask, advantages.astype(jnp.float32)[:, None], 0.0)


def rewards_from_scores(
    scores: Float[Array, " B"], mask: Bool[Array, "B T"]
) -> Float32[Array, "B T"]:
    """Put an answer's score on its last token on the mask.

    Args:
        scores: score of each answer.
        mask: true on tokens that the policy generated; an answer without any loses its score.

    Returns:
        Rewards that sum to the score over each answer.

    >>> rewards_from_scores(jnp.array([2.0]), jnp.array([[True, True, False]])).tolist()
    [[0.0, 2.0, 0.0]]
    """
    left = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(mask & (left == 1), scores.astype(jnp.float32)[:, None], 0.0)


def kl_penalized_rewards(
    rewards: Float[Array, "B T"],
    kl: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    coef: Float[ArrayLike, ""],
) -> Float32[Array, "B T"]:
    """Charge each token for leaving the reference: r_t − β KL_t.

    InstructGPT (https://arxiv.org/abs/2203.02155, eq. 2), with any estimator of `kl`.

    Args:
        rewards: reward of each token.
        kl: KL estimate of each token, in nats.
        mask: true on tokens that the policy generated.
        coef: the price β, in reward per nat.

    Returns:
        Rewards, 0 off the mask.

    >>> rewards, mask = jnp.array([[0.0, 1.0]]), jnp.array([[True, True]])
    >>> kl_penalized_rewards(rewards, jnp.array([[2.0, 1.0]]), mask, coef=0.5).tolist()
    [[-1.0, 0.5]]
    """
    charged = rewards.astype(jnp.float32) - coef * kl.astype(jnp.float32)
    return jnp.where(mask, charged, 0.0)


def reward_to_go(
    rewards: Float[Array, "B T"], mask: Bool[Array, "B T"], *, gamma: float = 1.0
) -> Float32[Array, "B T"]:
    """Add up what comes from here on: G_t = r_t + γ G_{t+1}.

    The discount counts tokens on the mask only.

    Args:
        rewards: reward of each token.
        mask: true on tokens that the policy generated.
        gamma: discount per token.

    Returns:
        Returns, 0 off the mask.

    >>> rewards, mask = jnp.array([[1.0, 7.0, 4.0]]), jnp.array([[True, False, True]])
    >>> reward_to_go(rewards, mask, gamma=0.5).tolist()
    [[3.0, 0.0, 4.0]]
    """
    rewards = jnp.where(mask, rewards.astype(jnp.float32), 0.0)
    return jnp.where(mask, from_the_end(jnp.where(mask, gamma, 1.0), rewards), 0.0)


def gae(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Estimate advantages from a critic: δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γλ A_{t+1}.

    GAE (https://arxiv.org/abs/1506.02438, eq. 16). t + 1 is the next token on the mask: V and A
    are carried through the tokens between. After the last one both are 0. The defaults are the
    usual ones for language models: Monte Carlo returns less the value.

    Args:
        rewards: reward of each token.
        values: what the critic expects from each token on, before the token is chosen.
        mask: true on tokens that the policy generated.
        gamma: discount per token.
        lam: 0 trusts the critic after one token, 1 waits for the end.

    Returns:
        Advantages, and returns A + V for the critic to learn; both 0 off the mask.

    >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.75]])
    >>> advantages, returns = gae(rewards, values, jnp.array([[True, True]]))
    >>> advantages.tolist(), returns.tolist()
    ([[0.5, 0.25]], [[1.0, 1.0]])
    """
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)
    delta = rewards.astype(jnp.float32) + gamma * next_on_mask(values, mask) - values
    advantages = from_the_end(jnp.where(mask, gamma * lam, 1.0), jnp.where(mask, delta, 0.0))
    advantages = jnp.where(mask, advantages, 0.0)
    return advantages, advantages + values


def gae_whitened(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Estimate advantages by `gae` and whiten them over the batch, as PPO is usually run.

    Args:
        rewards: reward of each token.
        values: what the critic expects from each token on, before the token is chosen.
        mask: true on tokens that the policy generated.
        gamma: discount per token.
        lam: 0 trusts the critic after one token, 1 waits for the end.

    Returns:
        Whitened advantages, and the returns of `gae`, which are not whitened.

    >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.75]])
    >>> advantages, returns = gae_whitened(rewards, values, jnp.array([[True, True]]))
    >>> [f"{a:.3f}" for a in advantages[0]], returns.tolist()
    (['0.707', '-0.707'], [[1.0, 1.0]])
    """
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    return whiten(advantages, mask), returns


def remax(
    rewards: Float[Array, "B T"], mask: Bool[Array, "B T"], greedy_scores: Float[Array, " B"]
) -> Float32[Array, "B T"]:
    """Compare the return with the score of the greedy answer: A_t = Σ_{s≥t} r_s − R_greedy.

    ReMax (https://arxiv.org/abs/2310.10505).

    Args:
        rewards: reward of each token.
        mask: true on tokens that the policy generated.
        greedy_scores: for each answer, the score of the greedy answer to its prompt.

    Returns:
        One advantage per token, 0 off the mask.

    >>> rewards, mask = jnp.array([[0.0, 1.0]]), jnp.array([[True, True]])
    >>> remax(rewards, mask, jnp.array([0.25])).tolist()
    [[0.75, 0.75]]
    """
    return reward_to_go(rewards, mask) - to_tokens(greedy_scores, mask)


def reinforce_plus_plus(
    rewards: Float[Array, "B T"], mask: Bool[Array, "B T"], *, gamma: float = 1.0
) -> Float32[Array, "B T"]:
    """Whiten discounted returns over the batch: A = whiten(reward_to_go(r)).

    REINFORCE++ (https://arxiv.org/abs/2501.03262): no critic and no groups; the KL penalty belongs
    in the rewards.

    Args:
        rewards: reward of each token.
        mask: true on tokens that the policy generated.
        gamma: discount per token.

    Returns:
        One advantage per token, 0 off the mask.

    >>> rewards, mask = jnp.array([[1.0], [0.0]]), jnp.array([[True], [True]])
    >>> [f"{a:.3f}" for a in reinforce_plus_plus(rewards, mask)[:, 0]]
    ['0.707', '-0.707']
    """
    return whiten(reward_to_go(rewards, mask, gamma=gamma), mask)


def next_on_mask(values: Float32[Array, "B T"], mask: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """Return for each token the value of the next one on the mask, 0 where there is none.

    Args:
        values: one for each token, 0 off the mask.
        mask: true on tokens that the policy generated.

    >>> values, mask = jnp.array([[1.0, 0.0, 3.0]]), jnp.array([[True, False, True]])
    >>> next_on_mask(values, mask).tolist()
    [[3.0, 3.0, 0.0]]
    """
    here_or_next = from_the_end(jnp.where(mask, 0.0, 1.0), values)
    return jnp.pad(here_or_next[:, 1:], [(0, 0), (0, 1)])


def from_the_end(
    decay: Float32[Array, "B T"], inputs: Float32[Array, "B T"]
) -> Float32[Array, "B T"]:
    """Solve y_t = inputs_t + decay_t · y_{t+1} in log T steps.

    >>> from_the_end(jnp.array([[0.5, 0.5]]), jnp.array([[1.0, 4.0]])).tolist()
    [[3.0, 4.0]]
    """

    def combine(later: tuple[Array, Array], here: tuple[Array, Array]) -> tuple[Array, Array]:
        return here[0] * later[0], here[1] + here[0] * later[1]

    return jax.lax.associative_scan(combine, (decay, inputs), reverse=True, axis=1)[1]
