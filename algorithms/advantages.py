"""Advantage estimators, by the names that a config uses.

An estimator's positional parameters are fields of a batch, its keyword arguments are its
hyper-parameters. Estimators from one score per answer give [B] (`to_tokens` spreads them over the
tokens), those that look at tokens give [B T], and those that ask for `values` give advantages and
returns.

Tokens off the mask (prompt, tool output, padding) are passed over: what stands there in any input
is not read, and the outputs are 0 there. An answer that is to count for nothing has a group of its
own and a mask that is false everywhere: the others' advantages are then what they would be without
it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32

from jaxrl_llm.algorithms import stats
from jaxrl_llm.algorithms.stats import (
    AnswerInts,
    Mask,
    PerAnswer,
    PerAnswer32,
    PerToken,
    PerToken32,
    TokenInts,
)

# From one score per answer, compared with the other answers to the same prompt.


def grpo(
    scores: PerAnswer, group_ids: AnswerInts, *, scale_by_std: bool = True, eps: float = 1e-6
) -> PerAnswer32:
    """Standardise scores within their group: A = (R − mean) / (std + eps).

    GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2). The standard deviation divides by
    G − 1, which the paper leaves open. A group of one has no mean to compare with: A = R. A group
    of equal scores gives exactly 0.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        scale_by_std: divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the score.

    Returns:
        One advantage per answer.

    >>> scores, groups = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([7, 7, 9, 9])
    >>> [f"{a:.3f}" for a in grpo(scores, groups)]
    ['0.707', '-0.707', '0.000', '0.000']
    """
    groups = stats.grouped(group_ids)
    advantages = stats.centred(scores, groups)
    if scale_by_std:
        advantages /= stats.deviation(advantages, groups) + eps
    return jnp.where(groups.size == 1, scores.astype(jnp.float32), advantages)


def dr_grpo(scores: PerAnswer, group_ids: AnswerInts) -> PerAnswer32:
    """Compare scores with their group's mean: A = R − mean.

    Dr. GRPO (https://arxiv.org/abs/2503.20783, section 3.2): GRPO without the division by the
    standard deviation, which favours prompts that are nearly always or nearly never solved. Its
    aggregation is `reduce.sequence_mean_token_sum_norm`. A group of one: A = R.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        One advantage per answer.

    >>> dr_grpo(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    return grpo(scores, group_ids, scale_by_std=False)


def rloo(scores: PerAnswer, group_ids: AnswerInts) -> PerAnswer32:
    """Compare scores with the mean of the others in the group: A = R − Σ_{j≠i} R_j / (G − 1).

    RLOO (https://arxiv.org/abs/2402.14740, section 2.3), computed as G / (G − 1) · (R − mean). A
    group of one has no others: A = 0.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        One advantage per answer.

    >>> rloo(jnp.array([1.0, 0.0, 5.0, 3.0]), jnp.array([0, 0, 1, 2])).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    groups = stats.grouped(group_ids)
    size = groups.size.astype(jnp.float32)
    return (
        stats.centred(scores, groups) * size / jnp.maximum(groups.size - 1, 1).astype(jnp.float32)
    )


def opo(scores: PerAnswer, response_lengths: AnswerInts, group_ids: AnswerInts) -> PerAnswer32:
    """Compare scores with the group's mean weighted by length: A = R − Σ_j l_j R_j / Σ_j l_j.

    OPO (https://arxiv.org/abs/2505.23585): the baseline of least variance where the squared norm of
    an answer's gradient is proportional to its length. A group of one: A = R, as in `grpo`.

    Args:
        scores: score of each answer.
        response_lengths: tokens that the policy generated in each answer.
        group_ids: which answers share a prompt; any integers, in any order.

    Returns:
        One advantage per answer.

    >>> scores, groups = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])
    >>> opo(scores, jnp.array([1, 3, 2, 2]), groups).tolist()
    [0.75, -0.25, 0.0, 0.0]
    """
    scores = scores.astype(jnp.float32)
    groups = stats.grouped(group_ids)
    shifted = scores - stats.over_group(jax.ops.segment_min, scores, groups)
    tokens = response_lengths.astype(jnp.float32)
    weighted = stats.over_group(jax.ops.segment_sum, tokens * shifted, groups)
    baseline = weighted / jnp.maximum(stats.over_group(jax.ops.segment_sum, tokens, groups), 1.0)
    return jnp.where(groups.size == 1, scores, shifted - baseline)


def grpo_pass_at_k(
    scores: PerAnswer, group_ids: AnswerInts, *, scale_by_std: bool = True, eps: float = 1e-6
) -> PerAnswer32:
    """Reward only the best of a group, by its lead: A = (R_best − R_second) / (std + eps).

    The gradient of the expected maximum of a group, with the leave-one-out baseline
    (https://arxiv.org/abs/2503.19595); the division is GRPO's. All others get 0, and so does
    everyone where two share the best score and in a group of one.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        scale_by_std: divide by the standard deviation.
        eps: what is added to the standard deviation, in units of the score.

    Returns:
        One advantage per answer.

    >>> scores, groups = jnp.array([3.0, 1.0, 0.0, 0.0]), jnp.array([0, 0, 0, 0])
    >>> grpo_pass_at_k(scores, groups, scale_by_std=False).tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    scores = scores.astype(jnp.float32)
    groups = stats.grouped(group_ids)
    best = scores == stats.over_group(jax.ops.segment_max, scores, groups)
    second = stats.over_group(jax.ops.segment_max, jnp.where(best, -jnp.inf, scores), groups)
    alone = best & (stats.over_group(jax.ops.segment_sum, best.astype(jnp.int32), groups) == 1)
    lead = jnp.where(alone & (groups.size > 1), scores - second, 0.0)
    if not scale_by_std:
        return lead
    return lead / (stats.deviation(stats.centred(scores, groups), groups) + eps)


def gpg(
    scores: PerAnswer, group_ids: AnswerInts, mask: Mask, *, f_norm: float = 1.0
) -> PerAnswer32:
    """Compare with the group's mean and make up for idle groups: A = α (R − mean) / f_norm.

    GPG (https://arxiv.org/abs/2504.02546) with its "accurate gradient estimation": α = B / B_used,
    where B_used counts the answers of groups whose scores are not all equal. The others add nothing
    to the gradient, yet count in its mean. (verl counts the answers whose score is not 0.) Its loss
    is `losses.reinforce`. A group of one: A = α R / f_norm, idle where R = 0. As in `reduce`, an
    answer without any token on the mask counts for nothing, neither in B nor in B_used.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.
        f_norm: a constant divisor, in units of the score.

    Returns:
        One advantage per answer.

    >>> scores, groups = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])
    >>> gpg(scores, groups, jnp.ones((4, 1), bool)).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    groups = stats.grouped(group_ids)
    advantages = dr_grpo(scores, group_ids)
    counted = mask.any(axis=1)
    used = counted & (stats.over_group(jax.ops.segment_max, jnp.abs(advantages), groups) > 0)
    total, learning = (x.sum().astype(jnp.float32) for x in (counted, used))
    return advantages * (total / jnp.maximum(learning, 1.0)) / f_norm


def gdpo(
    score_components: Float[Array, "B C"],
    group_ids: AnswerInts,
    mask: Mask,
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
) -> PerAnswer32:
    """Standardise each score component by itself, add them up, whiten: A = whiten(Σ_c w_c A_c).

    A_c is GRPO's advantage of component c. GDPO (https://arxiv.org/abs/2601.05242): sums of
    different components that happen to be equal keep different advantages. We whiten over the
    answers with a token on the mask, as the paper does; verl does over their tokens.

    Args:
        score_components: the scores that an answer got, by component.
        group_ids: which answers share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.
        weights: one per component; all 1 where None.
        eps: what is added to the standard deviation of a group, in units of the score.

    Returns:
        One advantage per answer, 0 where it has no token on the mask.

    Raises:
        ValueError: not as many weights as components.

    >>> scores, groups = jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.array([0, 0])
    >>> [f"{a:.3f}" for a in gdpo(scores, groups, jnp.ones((2, 1), bool))]
    ['0.707', '-0.707']
    """
    components = score_components.shape[1]
    weights = [1.0] * components if weights is None else weights
    if len(weights) != components:
        raise ValueError(
            f"got {len(weights)} weights, expected one for each of {components} scores"
        )
    per_component = jax.vmap(lambda s: grpo(s, group_ids, eps=eps), in_axes=1, out_axes=1)
    total = per_component(score_components) @ jnp.asarray(weights, jnp.float32)
    return whiten(total, mask.any(axis=1))


def reinforce_plus_plus_baseline(
    scores: PerAnswer, group_ids: AnswerInts, mask: Mask
) -> PerToken32:
    """Compare with the group's mean, then whiten over the batch: A = whiten(R − mean).

    REINFORCE++ with a baseline (https://arxiv.org/abs/2501.03262): the standard deviation is the
    batch's, over tokens, instead of the group's. A group of one has no baseline.

    Args:
        scores: score of each answer.
        group_ids: which answers share a prompt; any integers, in any order.
        mask: true on tokens that the policy generated.

    Returns:
        One advantage per token, 0 off the mask.

    >>> mask = jnp.array([[True], [True]])
    >>> scores, groups = jnp.array([1.0, 0.0]), jnp.array([3, 3])
    >>> [f"{a:.3f}" for a in reinforce_plus_plus_baseline(scores, groups, mask)[:, 0]]
    ['0.707', '-0.707']
    """
    return whiten(to_tokens(dr_grpo(scores, group_ids), mask), mask)


# From rewards per token, and the parts that these are made of.


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
    # Less the minimum first, as in `stats.centred`: then equal values give exactly 0.
    lowest = jnp.min(x, initial=jnp.inf, where=mask)
    shifted = jnp.where(mask, x - lowest, 0.0)
    mean = shifted.sum() / jnp.maximum(count, 1).astype(jnp.float32)
    centred = jnp.where(mask, shifted - mean, 0.0)
    # In units of the largest one, if that is above 1: float32 can't hold the square of 1e20.
    unit = jnp.max(jnp.abs(centred), initial=1.0)
    centred /= unit
    variance = jnp.square(centred).sum() / jnp.maximum(count - 1, 1).astype(jnp.float32)
    return centred * jax.lax.rsqrt(variance + 1e-8 / unit / unit)


def to_tokens(advantages: PerAnswer, mask: Mask) -> PerToken32:
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


def rewards_from_scores(scores: PerAnswer, mask: Mask) -> PerToken32:
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
    rewards: PerToken, kl: PerToken, mask: Mask, *, coef: Float[ArrayLike, ""]
) -> PerToken32:
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


def reward_to_go(rewards: PerToken, mask: Mask, *, gamma: float = 1.0) -> PerToken32:
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
    return jnp.where(mask, _from_the_end(jnp.where(mask, gamma, 1.0), rewards), 0.0)


def gae(
    rewards: PerToken, values: PerToken, mask: Mask, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[PerToken32, PerToken32]:
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
    delta = rewards.astype(jnp.float32) + gamma * _next_on_mask(values, mask) - values
    advantages = _from_the_end(jnp.where(mask, gamma * lam, 1.0), jnp.where(mask, delta, 0.0))
    advantages = jnp.where(mask, advantages, 0.0)
    return advantages, advantages + values


def gae_whitened(
    rewards: PerToken, values: PerToken, mask: Mask, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[PerToken32, PerToken32]:
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


def remax(rewards: PerToken, mask: Mask, greedy_scores: PerAnswer) -> PerToken32:
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


def reinforce_plus_plus(rewards: PerToken, mask: Mask, *, gamma: float = 1.0) -> PerToken32:
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


def _next_on_mask(values: PerToken32, mask: Mask) -> PerToken32:
    """Return for each token the value of the next one on the mask, 0 where there is none.

    Args:
        values: one for each token, 0 off the mask.
        mask: true on tokens that the policy generated.

    >>> values, mask = jnp.array([[1.0, 0.0, 3.0]]), jnp.array([[True, False, True]])
    >>> _next_on_mask(values, mask).tolist()
    [[3.0, 3.0, 0.0]]
    """
    here_or_next = _from_the_end(jnp.where(mask, 0.0, 1.0), values)
    return jnp.pad(here_or_next[:, 1:], [(0, 0), (0, 1)])


def _from_the_end(decay: PerToken32, inputs: PerToken32) -> PerToken32:
    """Solve y_t = inputs_t + decay_t · y_{t+1} in log T steps.

    >>> _from_the_end(jnp.array([[0.5, 0.5]]), jnp.array([[1.0, 4.0]])).tolist()
    [[3.0, 4.0]]
    """

    def combine(later: tuple[Array, Array], here: tuple[Array, Array]) -> tuple[Array, Array]:
        return here[0] * later[0], here[1] + here[0] * later[1]

    return jax.lax.associative_scan(combine, (decay, inputs), reverse=True, axis=1)[1]


# Of episodes of several turns; `turn_ids` says which turn drew a token.


def grpo_turns(
    rewards: PerToken,
    turn_ids: TokenInts,
    group_ids: AnswerInts,
    mask: Mask,
    *,
    gamma: float = 1.0,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> PerToken32:
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
    groups = stats.grouped(group_ids)
    advantages, count = _centred(returns, drawn, groups)
    if scale_by_std:
        advantages /= stats.deviation(advantages, groups, count) + eps
    turns = jnp.where(mask, turn_ids, 0)
    return jnp.where(mask, jnp.take_along_axis(advantages, turns, axis=1), 0.0)


def gae_turns(
    rewards: PerToken,
    values: PerToken,
    mask: Mask,
    turn_ids: TokenInts,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[PerToken32, PerToken32]:
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
    ends = mask & (_next_on_mask(turns, mask) != turns)
    discount = jnp.where(ends, gamma, 1.0)
    delta = rewards.astype(jnp.float32) + discount * _next_on_mask(values, mask) - values
    decay = jnp.where(ends, gamma * lam, 1.0)
    advantages = jnp.where(mask, _from_the_end(decay, jnp.where(mask, delta, 0.0)), 0.0)
    return advantages, advantages + values


def _by_turn(rewards: PerToken, turn_ids: TokenInts, mask: Mask) -> tuple[PerToken32, Mask]:
    """Return the sum of each turn's rewards, with turn k in column k, and which turns there are."""
    length = mask.shape[1]

    def add_up(values: Array, turns: Array) -> Array:
        return jax.ops.segment_sum(values, turns, num_segments=length)

    rewards = jnp.where(mask, rewards.astype(jnp.float32), 0.0)
    turns = jnp.where(mask, turn_ids, 0)
    tokens = jax.vmap(add_up)(mask.astype(jnp.int32), turns)
    return jax.vmap(add_up)(rewards, turns), tokens > 0


def _centred(
    returns: PerToken32, drawn: Mask, groups: stats.Groups
) -> tuple[PerToken32, PerToken32]:
    """Return the returns less the mean of their group and column, and the episodes in the mean."""
    # Less the minimum first, as in `stats.centred`: then equal returns give exactly 0.
    lowest = stats.over_group(jax.ops.segment_min, jnp.where(drawn, returns, jnp.inf), groups)
    shifted = jnp.where(drawn, returns - lowest, 0.0)
    count = stats.over_group(jax.ops.segment_sum, drawn.astype(jnp.float32), groups)
    mean = stats.over_group(jax.ops.segment_sum, shifted, groups) / jnp.maximum(count, 1.0)
    return jnp.where(drawn, shifted - mean, 0.0), count


# Over the baseline that minimises the gradient's variance, for every token: the Optimal Token
# Baseline (https://arxiv.org/abs/2602.07078). The squared norm of the gradient of log π with
# respect to the logits is known from the forward pass, w = 1 − 2π + Σ_v π_v² (its "logit-gradient
# proxy"); W_t = Σ_{s≤t} w_s is what an answer has gathered up to token t.


def optimal_token_baseline(
    rewards: PerToken,
    mask: Mask,
    group_ids: AnswerInts,
    old_logprobs: PerToken,
    sum_pi_squared: PerToken,
) -> PerToken32:
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
    rewards: PerToken,
    mask: Mask,
    group_ids: AnswerInts,
    old_logprobs: PerToken,
    rollout_logprobs: PerToken,
    sum_pi_squared: PerToken,
    *,
    cap: float = 2.0,
) -> PerToken32:
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
    rho = jnp.minimum(jnp.exp(stats.clipped_log_ratio(old_logprobs, rollout_logprobs)), cap)
    energy = jnp.square(rho) * _energy(old_logprobs, sum_pi_squared)
    return _less_baseline(rewards, mask, group_ids, energy)


def optimal_token_baseline_multi_turn(
    rewards: PerToken,
    mask: Mask,
    group_ids: AnswerInts,
    old_logprobs: PerToken,
    sum_pi_squared: PerToken,
) -> PerToken32:
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


def _energy(logprobs: PerToken, sum_pi_squared: PerToken) -> PerToken32:
    # At least (1 − π)²; rounding may leave it below 0 where π is near 1.
    pi = jnp.exp(logprobs.astype(jnp.float32))
    return jnp.maximum(1.0 - 2.0 * pi + sum_pi_squared.astype(jnp.float32), 0.0)


def _less_baseline(
    rewards: PerToken, mask: Mask, group_ids: AnswerInts, energy: PerToken32
) -> PerToken32:
    groups = stats.grouped(group_ids)
    returns = reward_to_go(rewards, mask)
    gathered = jnp.where(mask, jnp.cumsum(jnp.where(mask, energy, 0.0), axis=1), 0.0)
    generating = stats.over_group(jax.ops.segment_sum, mask.astype(jnp.int32), groups)
    total = stats.over_group(jax.ops.segment_sum, gathered, groups)
    # Less the minimum first, as in `stats.centred`: then equal returns give exactly 0.
    lowest = stats.over_group(jax.ops.segment_min, jnp.where(mask, returns, jnp.inf), groups)
    shifted = jnp.where(mask, returns - lowest, 0.0)
    weighted = stats.over_group(jax.ops.segment_sum, gathered * shifted, groups)
    known = (generating > 1) & (total > 0)
    advantages = jnp.where(known, shifted - weighted / jnp.where(known, total, 1), returns)
    return jnp.where(mask, advantages, 0.0)


# From a reward for every token that an implicit reward model gives.


def prime(
    reward_logprobs: PerToken,
    ref_logprobs: PerToken,
    scores: PerAnswer,
    group_ids: AnswerInts,
    mask: Mask,
    *,
    beta: float = 0.05,
    gamma: float = 1.0,
    outcome_coef: float = 1.0,
) -> PerToken32:
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
    groups = stats.grouped(group_ids)
    reward = beta * stats.log_ratio(reward_logprobs, ref_logprobs)
    mean = stats.sequence_mean(reward, mask)
    others = stats.over_group(jax.ops.segment_sum, mean, groups) - mean
    size = groups.size[:, None]
    others /= jnp.maximum(size - 1, 1).astype(jnp.float32)
    process = reward_to_go(reward - others, mask, gamma=gamma)
    outcome = to_tokens(outcome_coef * rloo(scores, group_ids), mask)
    return jnp.where(size > 1, process + outcome, 0.0)


# From a teacher's log-probs: on-policy distillation.


def reverse_kl(
    rollout_logprobs: PerToken,
    teacher_logprobs: PerToken,
    mask: Mask,
    *,
    coef: float = 1.0,
    discount: float = 0.0,
) -> PerToken32:
    """Reward tokens that the teacher finds likelier: A_t = −c Σ_{s ≥ t} γ^(s−t) d_s, d = log π/π_T.

    d is an estimate of the reverse KL, KL(π ‖ π_T), at the token that the student drew. With γ = 0
    a policy gradient with A_t = −d_t follows −∇KL of the distribution of each token, given the
    tokens before it; γ = 1 also counts what a token does to those after it, with more variance.
    (On-policy distillation: Agarwal et al., https://arxiv.org/abs/2306.13649, and MiniLLM,
    https://arxiv.org/abs/2306.08543, eq. 3; with γ = 0 as Thinking Machines, "On-Policy
    Distillation", 2025.) No baseline is needed: E[∇ log π] is 0, and d is 0 where they agree.

    Args:
        rollout_logprobs: of the drawn tokens under the policy that drew them, log π.
        teacher_logprobs: of the same tokens under the teacher, log π_T.
        mask: true on tokens that the policy generated.
        coef: what a nat costs, c.
        discount: γ per token.

    Returns:
        One advantage per token, 0 off the mask.

    >>> mask = jnp.array([[True, True]])
    >>> reverse_kl(jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.0]]), mask).tolist()
    [[-0.5, 1.0]]
    """
    closer = teacher_logprobs.astype(jnp.float32) - rollout_logprobs.astype(jnp.float32)
    return coef * reward_to_go(closer, mask, gamma=discount)
