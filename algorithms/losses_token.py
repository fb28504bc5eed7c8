"""Policy losses in which every token stands for itself."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxrl_llm.algorithms import ratios


class TokenLoss(NamedTuple):
    """What a loss function returns.

    Attributes:
        loss: loss of each token.
        diagnostics: numbers for the log, per token.
    """

    loss: Float32[Array, "B T"]
    diagnostics: dict[str, Float32[Array, "B T"]]


def ppo_clip(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
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
    check_bounds(clip_low, clip_high)
    if dual_clip <= 1:
        raise ValueError(f"dual_clip: got {dual_clip}, expected a ratio above 1 (or infinity)")
    log_ratio = ratios.clipped_log_ratio(logprobs, old_logprobs)
    advantages = advantages.astype(jnp.float32)
    loss, clipped = clipped_surrogate(jnp.exp(log_ratio), advantages, clip_low, clip_high)
    bound = jnp.where(advantages < 0, -advantages * dual_clip, jnp.inf)
    return TokenLoss(
        jnp.minimum(loss, bound),
        {
            "pg_clipfrac": clipped.astype(jnp.float32),
            "pg_clipfrac_lower": (loss > bound).astype(jnp.float32),
            "ppo_kl": -log_ratio,
        },
    )


def reinforce(logprobs: Float[Array, "B T"], advantages: Float[Array, "B T"]) -> TokenLoss:
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
    return TokenLoss(-advantages.astype(jnp.float32) * ratios.finite(logprobs), {})


def negative_log_likelihood(logprobs: Float[Array, "B T"]) -> TokenLoss:
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
    return TokenLoss(-ratios.finite(logprobs), {})


def cispo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
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
    check_bounds(clip_low, clip_high)
    log_ratio = ratios.clipped_log_ratio(logprobs, old_logprobs)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(
        -advantages.astype(jnp.float32) * weight * ratios.finite(logprobs),
        {"pg_clipfrac": (weight != ratio).astype(jnp.float32), "ppo_kl": -log_ratio},
    )


def sapo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
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
    log_ratio = ratios.clipped_log_ratio(logprobs, old_logprobs)
    advantages = advantages.astype(jnp.float32)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0)) * (4.0 / tau)
    return TokenLoss(-advantages * gate, {"ppo_kl": -log_ratio})


def dppo_tv(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
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
    check_bounds(clip_low, clip_high)
    moved = _probability(logprobs) - _probability(old_logprobs)
    keep = jnp.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _kept(logprobs, old_logprobs, advantages, keep, cap)


def dppo_kl(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
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
    check_bounds(clip_low, clip_high)
    pi, old = _probability(logprobs), _probability(old_logprobs)
    rest = jnp.log1p(-old) - jnp.log1p(-pi)
    divergence = old * ratios.log_ratio(old_logprobs, logprobs) + (1.0 - old) * rest
    rising = advantages > 0
    near = divergence <= jnp.where(rising, clip_high, clip_low)
    returning = jnp.where(rising, pi <= old, pi >= old)
    return _kept(logprobs, old_logprobs, advantages, near | returning, cap)


def dro(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    beta: float,
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
    log_ratio = ratios.log_ratio(logprobs, old_logprobs)
    gain = advantages.astype(jnp.float32) * ratios.finite(logprobs)
    return TokenLoss(
        0.5 * beta * jnp.square(log_ratio) - gain, {"ppo_kl": ratios.clip_log_ratio(-log_ratio)}
    )


def clipped_surrogate(
    ratio: Float32[Array, "B T"],
    advantages: Float32[Array, "B T"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """Return max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)), and where the clipped one is larger.

    >>> loss, clipped = clipped_surrogate(jnp.array([[1.5]]), jnp.array([[1.0]]), 0.25, 0.25)
    >>> loss.tolist(), clipped.tolist()
    ([[-1.25]], [[True]])
    """
    free = -advantages * ratio
    held = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(free, held), held > free


def check_bounds(clip_low: float, clip_high: float) -> None:
    """Raise ValueError where a clipping bound is negative.

    >>> check_bounds(0.2, -0.1)
    Traceback (most recent call last):
        ...
    ValueError: got clip_low 0.2 and clip_high -0.1, expected at least 0
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"got clip_low {clip_low} and clip_high {clip_high}, expected at least 0")


def _probability(logprobs: Float[Array, "B T"]) -> Float32[Array, "B T"]:
    # Below 1, so that log(1 − π) is finite; the step from there to 1 is float32's last.
    return jnp.minimum(jnp.exp(jax.lax.stop_gradient(ratios.finite(logprobs))), 1.0 - 2.0**-24)


def _kept(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    keep: Bool[Array, "B T"],
    cap: float,
) -> TokenLoss:
    """Return −A sg(min(r, cap) · keep) log π."""
    log_ratio = ratios.clipped_log_ratio(logprobs, old_logprobs)
    weight = jax.lax.stop_gradient(jnp.where(keep, jnp.minimum(jnp.exp(log_ratio), cap), 0.0))
    return TokenLoss(
        -advantages.astype(jnp.float32) * weight * ratios.finite(logprobs),
        {"pg_clipfrac": (~keep).astype(jnp.float32), "ppo_kl": -log_ratio},
    )
