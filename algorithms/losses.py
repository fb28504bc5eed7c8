"""Policy losses, by the names that a config uses: per-token losses with per-token diagnostics.

A loss's positional parameters are fields of a batch, its keyword arguments are its
hyper-parameters. The scalar is sum(weights · loss), with weights from `reduce`.

In all of them r = exp(log π − log π_old), whose exponent is clipped to ±20, and sg stops the
gradient. Infinite log-probs are taken as huge finite ones, so that loss and gradient are finite
whatever stands off the mask; NaN stays NaN. Diagnostics are averaged by `reduce.token_mean`:
pg_clipfrac is the share of tokens that clipping holds back, ppo_kl is log π_old − log π.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key

from jaxrl_llm.algorithms import stats
from jaxrl_llm.algorithms.stats import Mask, PerToken, PerToken32, TokenInts

# Every token stands for itself.


class TokenLoss(NamedTuple):
    """What a loss function returns.

    Attributes:
        loss: loss of each token.
        diagnostics: numbers for the log, per token.
    """

    loss: PerToken32
    diagnostics: dict[str, PerToken32]


def ppo_clip(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> TokenLoss:
    """Clip the surrogate objective: L = max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)).

    PPO (https://arxiv.org/abs/1707.06347, eq. 7). Two bounds as in DAPO
    (https://arxiv.org/abs/2503.14476, eq. 10; ε_high 0.28 there). Where A < 0 the loss is at most
    −A · dual_clip, the dual clip of https://arxiv.org/abs/1912.09729.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        dual_clip: the largest ratio that counts where A < 0, above 1; infinity for none.

    Returns:
        The loss; pg_clipfrac, pg_clipfrac_lower (tokens that dual_clip holds back), ppo_kl.

    Raises:
        ValueError: a negative bound, or dual_clip not above 1.

    >>> log_ratio, advantages = jnp.log(jnp.array([[1.5, 1.5, 9.0]])), jnp.array([[1.0, -1, -1]])
    >>> loss, diagnostics = ppo_clip(log_ratio, jnp.zeros((1, 3)), advantages)
    >>> [f"{x:.1f}" for x in loss[0]]
    ['-1.2', '1.5', '3.0']
    >>> diagnostics["pg_clipfrac"].tolist(), diagnostics["pg_clipfrac_lower"].tolist()
    ([[1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]])
    """
    _check_bounds(clip_low, clip_high)
    if dual_clip <= 1:
        raise ValueError(f"dual_clip: got {dual_clip}, expected a ratio above 1 (or infinity)")
    log_ratio = stats.clipped_log_ratio(logprobs, old_logprobs)
    advantages = advantages.astype(jnp.float32)
    loss, clipped = _clipped_surrogate(jnp.exp(log_ratio), advantages, clip_low, clip_high)
    bound = jnp.where(advantages < 0, -advantages * dual_clip, jnp.inf)
    return TokenLoss(
        jnp.minimum(loss, bound),
        {
            "pg_clipfrac": clipped.astype(jnp.float32),
            "pg_clipfrac_lower": (loss > bound).astype(jnp.float32),
            "ppo_kl": -log_ratio,
        },
    )


def reinforce(logprobs: PerToken, advantages: PerToken) -> TokenLoss:
    """Take the plain policy gradient: L = −A log π.

    REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696), and the loss of GPG
    (https://arxiv.org/abs/2504.02546). On-policy only: no ratio corrects a second update on the
    same answers.

    Args:
        logprobs: log-probs under the policy that is being updated.
        advantages: one per token.

    Returns:
        The loss; no diagnostics.

    >>> reinforce(jnp.array([[-2.0]]), jnp.array([[0.5]])).loss.tolist()
    [[1.0]]
    """
    return TokenLoss(-advantages.astype(jnp.float32) * stats.finite(logprobs), {})


def negative_log_likelihood(logprobs: PerToken) -> TokenLoss:
    """Imitate the answers, whatever their advantages: L = −log π.

    The loss of supervised training, and of RAFT (https://arxiv.org/abs/2304.06767) on the answers
    that `algorithm.answer_filter` keeps.

    Args:
        logprobs: log-probs under the policy that is being updated.

    Returns:
        The loss; no diagnostics.

    >>> negative_log_likelihood(jnp.array([[-2.0]])).loss.tolist()
    [[2.0]]
    """
    return TokenLoss(-stats.finite(logprobs), {})


def cispo(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 10.0,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Clip the importance weight, not the update: L = −A sg(clip(r, 1 − ε_low, 1 + ε_high)) log π.

    CISPO (MiniMax-M1, https://arxiv.org/abs/2506.13585, eqs. 4 and 5). Every token keeps a
    gradient. The default ε_low sets no lower bound, as in the paper, which tunes ε_high and does
    not state it; 0.2 is that of verl's example.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        clip_low: how far the weight may fall below 1.
        clip_high: how far the weight may rise above 1.

    Returns:
        The loss; pg_clipfrac (tokens whose weight is clipped), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> logprobs = jnp.full((1, 1), -1.0)
    >>> cispo(logprobs, logprobs - 1.0, jnp.array([[1.0]]), clip_high=0.25).loss.tolist()
    [[1.25]]
    """
    _check_bounds(clip_low, clip_high)
    log_ratio = stats.clipped_log_ratio(logprobs, old_logprobs)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(
        -advantages.astype(jnp.float32) * weight * stats.finite(logprobs),
        {"pg_clipfrac": (weight != ratio).astype(jnp.float32), "ppo_kl": -log_ratio},
    )


def sapo(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """Gate softly instead of clipping: L = −A · 4/τ · σ(τ (r − 1)), τ by the sign of A.

    SAPO (https://arxiv.org/abs/2511.20347, section 3). At r = 1 the gradient is that of −A r; it
    fades as r leaves 1 on either side. The paper averages with `reduce.sequence_mean_token_mean`.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        tau_pos: temperature τ where A > 0.
        tau_neg: temperature τ elsewhere; larger fades sooner.

    Returns:
        The loss; ppo_kl.

    Raises:
        ValueError: a temperature is not positive.

    >>> sapo(jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.array([[1.0]])).loss.tolist()
    [[-2.0]]
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"got tau_pos {tau_pos} and tau_neg {tau_neg}, expected positive numbers")
    log_ratio = stats.clipped_log_ratio(logprobs, old_logprobs)
    advantages = advantages.astype(jnp.float32)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0)) * (4.0 / tau)
    return TokenLoss(-advantages * gate, {"ppo_kl": -log_ratio})


def dppo_tv(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    cap: float = float("inf"),
) -> TokenLoss:
    """Stop at a distance in probability: L = −A sg(min(r, cap) M) log π.

    M drops a token whose probability has moved further than the bound in the direction of its
    advantage: π − π_old > δ_high where A > 0, π_old − π > δ_low elsewhere. DPPO with the binary
    total variation (https://arxiv.org/abs/2602.04879, eqs. 12 and 13; δ in appendix C). The paper's
    old policy is the one that sampled, so rollout_logprobs may be put in place of old_logprobs. Its
    eq. 12 has no cap and its section 5.4 advises against one; the runs of its appendix E take 5,
    verl takes 20.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        clip_low: how far the probability may fall.
        clip_high: how far the probability may rise.
        cap: the largest importance weight; infinity for none.

    Returns:
        The loss; pg_clipfrac (tokens that M drops), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> logprobs, old_logprobs = jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[0.4, 0.3]]))
    >>> dppo_tv(logprobs, old_logprobs, jnp.ones((1, 2))).diagnostics["pg_clipfrac"].tolist()
    [[0.0, 1.0]]
    """
    _check_bounds(clip_low, clip_high)
    moved = _probability(logprobs) - _probability(old_logprobs)
    keep = jnp.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _kept(logprobs, old_logprobs, advantages, keep, cap)


def dppo_kl(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    cap: float = float("inf"),
) -> TokenLoss:
    """Stop at a KL divergence: L = −A sg(min(r, cap) M) log π.

    M drops a token that has moved in the direction of its advantage and whose binary divergence
    π_old log(π_old / π) + (1 − π_old) log((1 − π_old) / (1 − π)) exceeds the bound: δ_high where
    A > 0, δ_low elsewhere. DPPO (https://arxiv.org/abs/2602.04879, eqs. 12 and 14; δ in
    appendix C). For the cap and the old policy see `dppo_tv`.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        clip_low: the largest divergence of a token that has become less likely, in nats.
        clip_high: the largest divergence of a token that has become more likely, in nats.
        cap: the largest importance weight; infinity for none.

    Returns:
        The loss; pg_clipfrac (tokens that M drops), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> logprobs, old_logprobs = jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[0.4, 0.3]]))
    >>> dppo_kl(logprobs, old_logprobs, jnp.ones((1, 2))).diagnostics["pg_clipfrac"].tolist()
    [[0.0, 1.0]]
    """
    _check_bounds(clip_low, clip_high)
    pi, old = _probability(logprobs), _probability(old_logprobs)
    rest = jnp.log1p(-old) - jnp.log1p(-pi)
    divergence = old * stats.log_ratio(old_logprobs, logprobs) + (1.0 - old) * rest
    rising = advantages > 0
    near = divergence <= jnp.where(rising, clip_high, clip_low)
    returning = jnp.where(rising, pi <= old, pi >= old)
    return _kept(logprobs, old_logprobs, advantages, near | returning, cap)


def dro(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, *, beta: float
) -> TokenLoss:
    """Hold the policy by a quadratic penalty: L = −A log π + β/2 (log π − log π_old)².

    Its gradient is DRO's (https://arxiv.org/abs/2405.19107, eq. 8, divided by τ as there; τ is β),
    with π_old for the reference as in Kimi k1.5 (https://arxiv.org/abs/2501.12599, section 2.3.2),
    but for each token instead of the whole answer. The log-ratio is not clipped: far from π_old the
    penalty must pull. β has no default, as its scale is the reward's.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        beta: strength of the penalty, in units of the advantage.

    Returns:
        The loss; ppo_kl.

    Raises:
        ValueError: beta is negative.

    >>> dro(jnp.array([[-1.0]]), jnp.array([[-3.0]]), jnp.array([[1.0]]), beta=0.5).loss.tolist()
    [[2.0]]
    """
    if beta < 0:
        raise ValueError(f"beta: got {beta}, expected at least 0")
    log_ratio = stats.log_ratio(logprobs, old_logprobs)
    gain = advantages.astype(jnp.float32) * stats.finite(logprobs)
    return TokenLoss(
        0.5 * beta * jnp.square(log_ratio) - gain, {"ppo_kl": stats.clip_log_ratio(-log_ratio)}
    )


def _clipped_surrogate(
    ratio: PerToken32, advantages: PerToken32, clip_low: float, clip_high: float
) -> tuple[PerToken32, Mask]:
    """Return max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)), and where the clipped one is larger.

    >>> loss, clipped = _clipped_surrogate(jnp.array([[1.5]]), jnp.array([[1.0]]), 0.25, 0.25)
    >>> loss.tolist(), clipped.tolist()
    ([[-1.25]], [[True]])
    """
    free = -advantages * ratio
    held = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(free, held), held > free


def _check_bounds(clip_low: float, clip_high: float) -> None:
    """Raise ValueError where a clipping bound is negative.

    >>> _check_bounds(0.2, -0.1)
    Traceback (most recent call last):
        ...
    ValueError: got clip_low 0.2 and clip_high -0.1, expected at least 0
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"got clip_low {clip_low} and clip_high {clip_high}, expected at least 0")


def _probability(logprobs: PerToken) -> PerToken32:
    # Below 1, so that log(1 − π) is finite; the step from there to 1 is float32's last.
    return jnp.minimum(jnp.exp(jax.lax.stop_gradient(stats.finite(logprobs))), 1.0 - 2.0**-24)


def _kept(
    logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, keep: Mask, cap: float
) -> TokenLoss:
    """Return −A sg(min(r, cap) · keep) log π."""
    log_ratio = stats.clipped_log_ratio(logprobs, old_logprobs)
    weight = jax.lax.stop_gradient(jnp.where(keep, jnp.minimum(jnp.exp(log_ratio), cap), 0.0))
    return TokenLoss(
        -advantages.astype(jnp.float32) * weight * stats.finite(logprobs),
        {"pg_clipfrac": (~keep).astype(jnp.float32), "ppo_kl": -log_ratio},
    )


# The ratio belongs to a whole answer.


def gspo(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Clip the answer's ratio: L = max(−A s, −A clip(s, 1 − ε_low, 1 + ε_high)).

    s = exp(mean_t log r_t), the geometric mean of the ratios of an answer. GSPO
    (https://arxiv.org/abs/2507.18071, eq. 5), in the form for tokens (eq. 13), in which token t
    holds s · π_t / sg(π_t): the same value, and the same gradient where the advantages of an
    answer are equal and `reduce.sequence_mean_token_mean` averages, as in the paper. log s is at
    most 10.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        clip_low: how far s may fall below 1.
        clip_high: how far s may rise above 1.

    Returns:
        The loss; pg_clipfrac (tokens of answers that are held back), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> logprobs, mask = jnp.log(jnp.array([[0.5, 0.5]])), jnp.array([[True, True]])
    >>> old_logprobs = jnp.log(jnp.array([[1.0, 0.25]]))
    >>> gspo(logprobs, old_logprobs, jnp.ones((1, 2)), mask).loss.tolist()
    [[-1.0, -1.0]]
    """
    _check_bounds(clip_low, clip_high)
    level = stats.finite(logprobs)
    mean = stats.sequence_mean(stats.log_ratio(logprobs, old_logprobs), mask)
    log_s = level - jax.lax.stop_gradient(level) + jax.lax.stop_gradient(mean)
    ratio = jnp.exp(jnp.minimum(log_s, 10.0))
    loss, clipped = _clipped_surrogate(ratio, advantages.astype(jnp.float32), clip_low, clip_high)
    return TokenLoss(
        loss,
        {
            "pg_clipfrac": clipped.astype(jnp.float32),
            "ppo_kl": -stats.clipped_log_ratio(logprobs, old_logprobs),
        },
    )


def gmpo(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    mask: Mask,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """Clip each token, then take the geometric mean: L = −Ā exp(mean_t c_t).

    c_t = min(log r_t, ε_high) where Ā > 0 and max(log r_t, −ε_low) elsewhere; Ā is the mean
    advantage of the answer. GMPO (https://arxiv.org/abs/2507.20673, eq. 4), whose min leaves the
    other side unbounded too; its ε is e^0.4. Every token holds its answer's loss, so that
    `reduce.sequence_mean_token_mean` gives the paper's average over answers. (verl averages over
    the rows of each micro-batch, so that its loss depends on how a mini-batch is split.)

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        clip_low: how far the log-ratio may fall below 0.
        clip_high: how far the log-ratio may rise above 0.

    Returns:
        The loss; pg_clipfrac (tokens that are clipped), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> mask = jnp.array([[True, True]])
    >>> loss, _ = gmpo(jnp.array([[0.0, -0.4]]), jnp.array([[-9.0, 0.0]]), jnp.ones((1, 2)), mask)
    >>> loss.tolist()
    [[-1.0, -1.0]]
    """
    _check_bounds(clip_low, clip_high)
    log_ratio = stats.log_ratio(logprobs, old_logprobs)
    advantage = stats.sequence_mean(advantages, mask)
    rising = advantage > 0
    held = jnp.where(rising, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low))
    ratio = jnp.exp(stats.clip_log_ratio(stats.sequence_mean(held, mask)))
    return TokenLoss(
        jnp.broadcast_to(-advantage * ratio, log_ratio.shape),
        {
            "pg_clipfrac": (held != log_ratio).astype(jnp.float32),
            "ppo_kl": stats.clip_log_ratio(-log_ratio),
        },
    )


# For answers of older policies, which weigh each token by its age.


def a3po(
    logprobs: PerToken,
    rollout_logprobs: PerToken,
    ages: TokenInts,
    advantages: PerToken,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    cap: float = 2.0,
) -> TokenLoss:
    """Clip around a policy between the one that drew a token and the one that is updated.

    A-3PO (https://arxiv.org/abs/2512.06547): decoupled PPO without a pass for the log-probs of the
    policy at the start of the step, which are taken as
    log π_prox = sg(log π_rollout + α (log π − log π_rollout)) with α = d / (d + 1), d the token's
    age: π is d + 1 updates ahead of the policy that drew it, π_prox d. The loss is that of
    `ppo_clip` with r = π / π_prox, times min(π_prox / π_rollout, cap).

    A token of age 0 is clipped around the policy that drew it.

    Args:
        logprobs: log-probs under the policy that is being updated.
        rollout_logprobs: log-probs that the engine reported.
        ages: updates since the weights that drew each token.
        advantages: one per token.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        dual_clip: the largest ratio that counts where A < 0, above 1; infinity for none.
        cap: the largest weight, above 0; not in the paper, but in `truncated_token`.

    Returns:
        The loss; the diagnostics of `ppo_clip`, and prox_weight (the weight of each token).

    Raises:
        ValueError: a negative bound, dual_clip not above 1, or cap not above 0.

    >>> logprobs, rollout = jnp.log(jnp.array([[1.44, 1.1]])), jnp.zeros((1, 2))
    >>> loss, diagnostics = a3po(logprobs, rollout, jnp.array([[1, 0]]), jnp.array([[1.0, -1.0]]))
    >>> [f"{x:.2f}" for x in loss[0]], [f"{x:.2f}" for x in diagnostics["prox_weight"][0]]
    (['-1.44', '1.10'], ['1.20', '1.00'])
    """
    if cap <= 0:
        raise ValueError(f"cap: got {cap}, expected a weight above 0")
    ahead = ages.astype(jnp.float32)
    moved = stats.clipped_log_ratio(logprobs, rollout_logprobs) * ahead / (ahead + 1)
    moved = jax.lax.stop_gradient(moved)
    weight = jnp.minimum(jnp.exp(moved), cap)
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    prox_logprobs = stats.finite(rollout_logprobs) + moved
    loss, diagnostics = ppo_clip(logprobs, prox_logprobs, advantages, **clips)
    return TokenLoss(weight * loss, {**diagnostics, "prox_weight": weight})


# A few tokens are treated apart: those that take the most entropy away.
#
# The entropy of a policy falls with the covariance of log-probs and advantages
# (https://arxiv.org/abs/2505.22617, section 4.2). Which tokens have the highest covariance is a
# question to the whole mini-batch, while a loss sees a part of it. So a `select_…` function marks
# them, once per mini-batch, in the field `high_covariance [B T]`, and the loss takes that field.
#
# verl asks each micro-batch instead, so that its means, the tokens that it marks and how many they
# are (at least one in each) depend on how the mini-batch is split. It also passes over tokens that
# the ratio's clipping already holds back when it draws for Clip-Cov.


def _covariance(logprobs: PerToken, advantages: PerToken, mask: Mask) -> PerToken32:
    """Return each token's part in the covariance: (log π − mean) · (A − mean).

    The paper's eq. 10, over the tokens on the mask.

    Args:
        logprobs: log-probs under the policy that is being updated.
        advantages: one per token.
        mask: true on tokens that the policy generated.

    Returns:
        Products, 0 off the mask.

    >>> logprobs, advantages = jnp.array([[-1.0, -3.0]]), jnp.array([[1.0, -1.0]])
    >>> _covariance(logprobs, advantages, jnp.array([[True, True]])).tolist()
    [[1.0, 1.0]]
    """
    level, advantages = stats.finite(logprobs), advantages.astype(jnp.float32)
    product = (level - stats.masked_mean(level, mask)) * (
        advantages - stats.masked_mean(advantages, mask)
    )
    return jnp.where(mask, product, 0.0)


def select_clip_cov(
    logprobs: PerToken,
    advantages: PerToken,
    mask: Mask,
    *,
    key: Key[Array, ""],
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Mask:
    """Draw tokens whose covariance lies between two bounds: `high_covariance` for `clip_cov`.

    The paper's eq. 11, with the numbers of its section 4.3. The number drawn is `ratio` of the
    tokens on the mask, at least 1; fewer where fewer lie between the bounds.

    Args:
        logprobs: log-probs under the policy that is being updated, of the whole mini-batch.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        key: random key.
        ratio: share of the tokens to draw.
        low: covariance above which a token may be drawn.
        high: covariance below which a token may be drawn.

    Returns:
        True on the tokens drawn.

    >>> logprobs, advantages = jnp.array([[0.0, -2.0, -2.0]]), jnp.array([[4.0, 1.0, 1.0]])
    >>> key, mask = jax.random.key(0), jnp.array([[True, True, True]])
    >>> select_clip_cov(logprobs, advantages, mask, key=key).tolist()
    [[True, False, False]]
    """
    products = _covariance(logprobs, advantages, mask)
    eligible = mask & (products > low) & (products < high)
    order = jnp.where(eligible, jax.random.uniform(key, mask.shape), -1.0)
    return eligible & _largest(order, _share(mask, ratio))


def select_kl_cov(
    logprobs: PerToken, advantages: PerToken, mask: Mask, *, ratio: float = 2e-4
) -> Mask:
    """Take the tokens of the highest covariance: `high_covariance` for `kl_cov`.

    The paper's eq. 13. The number taken is `ratio` of the tokens on the mask, at least 1. The paper
    takes 2e-4 for a model of 32B parameters and 2e-3 for one of 7B.

    Args:
        logprobs: log-probs under the policy that is being updated, of the whole mini-batch.
        advantages: one per token.
        mask: true on tokens that the policy generated.
        ratio: share of the tokens to take.

    Returns:
        True on the tokens taken.

    >>> logprobs, advantages = jnp.array([[0.0, -2.0, -2.0]]), jnp.array([[4.0, 1.0, 1.0]])
    >>> select_kl_cov(logprobs, advantages, jnp.array([[True, True, True]])).tolist()
    [[True, False, False]]
    """
    products = jnp.where(mask, _covariance(logprobs, advantages, mask), -jnp.inf)
    return mask & _largest(products, _share(mask, ratio))


def clip_cov(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    high_covariance: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Drop the marked tokens from `ppo_clip`: L = 0 where marked.

    Clip-Cov (https://arxiv.org/abs/2505.22617, eq. 12), over PPO's clipped surrogate as in its
    listing 1.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        high_covariance: the tokens that `select_clip_cov` drew.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.

    Returns:
        The loss; pg_clipfrac (tokens held back or dropped), ppo_kl.

    Raises:
        ValueError: a negative bound.

    >>> zeros, marked = jnp.zeros((1, 2)), jnp.array([[True, False]])
    >>> clip_cov(zeros, zeros, jnp.ones((1, 2)), marked).loss.tolist()
    [[0.0, -1.0]]
    """
    loss, diagnostics = ppo_clip(
        logprobs,
        old_logprobs,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=float("inf"),
    )
    return TokenLoss(
        jnp.where(high_covariance, 0.0, loss),
        {
            "pg_clipfrac": jnp.where(high_covariance, 1.0, diagnostics["pg_clipfrac"]),
            "ppo_kl": diagnostics["ppo_kl"],
        },
    )


def kl_cov(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    high_covariance: Mask,
    *,
    kl_coef: float = 1.0,
) -> TokenLoss:
    """Hold the marked tokens near the old policy: L = −A r + β |log r| where marked, else −A r.

    KL-Cov (https://arxiv.org/abs/2505.22617, eq. 14), whose divergence is |log r| in its listing 1.
    Nothing is clipped. β = 1 is the paper's.

    Args:
        logprobs: log-probs under the policy that is being updated.
        old_logprobs: the same at the start of the step.
        advantages: one per token.
        high_covariance: the tokens that `select_kl_cov` took.
        kl_coef: strength β of the penalty, in units of the advantage.

    Returns:
        The loss; ppo_kl, and kl_cov_abs_kl, the penalty |log r| on marked tokens.

    Raises:
        ValueError: kl_coef is negative.

    >>> ones, marked = jnp.ones((1, 2)), jnp.array([[True, False]])
    >>> [f"{x:.3f}" for x in kl_cov(jnp.log(2 * ones), 0 * ones, ones, marked).loss[0]]
    ['-1.307', '-2.000']
    """
    if kl_coef < 0:
        raise ValueError(f"kl_coef: got {kl_coef}, expected at least 0")
    log_ratio = stats.clipped_log_ratio(logprobs, old_logprobs)
    distance = jnp.where(high_covariance, jnp.abs(log_ratio), 0.0)
    return TokenLoss(
        kl_coef * distance - advantages.astype(jnp.float32) * jnp.exp(log_ratio),
        {"ppo_kl": -log_ratio, "kl_cov_abs_kl": distance},
    )


def _share(mask: Mask, ratio: float) -> Float32[Array, ""]:
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio: got {ratio}, expected a share from 0 to 1")
    return jnp.maximum(jnp.floor(mask.sum().astype(jnp.float32) * ratio), 1.0)


def _largest(values: PerToken32, count: Float32[Array, ""]) -> Mask:
    """Mark the `count` largest values; of equal ones the first come first."""
    order = jnp.argsort(-values.ravel(), stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return (rank.astype(jnp.float32) < count).reshape(values.shape)
