"""Losses of preferences between two answers to a prompt that need no reference policy.

Every `*_logps` is the sum of the log-probs of an answer's tokens, in nats; w is the chosen answer,
l the rejected one, n their tokens, a = log π(y) / n. A loss has one number for each pair.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.algorithms.losses_pair import (
    PairLoss,
    answer_mean,
    check_positive,
    check_smoothing,
    reward_diagnostics,
)

LARGEST_MEAN = -1e-6
"""Mean log-prob above which an answer's odds grow no further, in nats."""


def simpo(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    chosen_lengths: Int[Array, " P"],
    rejected_lengths: Int[Array, " P"],
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> PairLoss:
    """Prefer the chosen answer by a margin: L = −log σ(β a_w − β a_l − γ).

    SimPO (https://arxiv.org/abs/2405.14734, eq. 6), which has no term that imitates. In TRL it
    takes `loss_type="simpo"` with `cpo_alpha=0`.

    Args:
        chosen_logps: log-probs of the chosen answers under the policy that is being updated.
        rejected_logps: the same of the rejected answers.
        chosen_lengths: n_w, tokens of the chosen answers.
        rejected_lengths: n_l, tokens of the rejected answers.
        beta: scale of a reward, in reward per nat a token.
        gamma: γ, the margin, in units of the reward; the paper takes 0.3 to 0.55 times beta.

    Returns:
        The loss; rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies.

    Raises:
        ValueError: beta is not positive.

    >>> logps, lengths = jnp.array([-2.0]), jnp.array([2])
    >>> f"{simpo(logps, logps, lengths, lengths, gamma=0.0).loss[0]:.4f}"
    '0.6931'
    """
    check_positive(beta=beta)
    chosen, rejected = (
        beta * answer_mean(sums.astype(jnp.float32), lengths)
        for sums, lengths in ((chosen_logps, chosen_lengths), (rejected_logps, rejected_lengths))
    )
    loss = -jax.nn.log_sigmoid(chosen - rejected - gamma)
    return PairLoss(loss, reward_diagnostics(chosen, rejected))


def cpo(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    chosen_lengths: Int[Array, " P"],
    *,
    beta: float = 0.1,
    nll_coef: float = 1.0,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Prefer the chosen answer, and imitate it, as DPO with a uniform reference.

    L = −(1 − ε) log σ(z) − ε log σ(−z) − α log π(y_w) / n_w, z = β (log π(y_w) − log π(y_l)). CPO
    (https://arxiv.org/abs/2401.08417). The last term is the mean over an answer's tokens;
    TRL's is the mean over all tokens of a batch.

    Args:
        chosen_logps: as for `simpo`.
        rejected_logps: as for `simpo`.
        chosen_lengths: n_w, tokens of the chosen answers.
        beta: scale of a reward, in reward per nat.
        nll_coef: α, weight of the last term.
        label_smoothing: ε, the share of wrong labels, from 0 to below 1/2.

    Returns:
        As `simpo`, and nll, the last term without its weight.

    Raises:
        ValueError: beta is not positive, or label_smoothing is out of range.
    """
    check_positive(beta=beta)
    check_smoothing(label_smoothing)
    chosen, rejected = (sums.astype(jnp.float32) for sums in (chosen_logps, rejected_logps))
    z, log_sigmoid = beta * (chosen - rejected), jax.nn.log_sigmoid
    preferred = -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
    nll = -answer_mean(chosen, chosen_lengths)
    diagnostics = reward_diagnostics(beta * chosen, beta * rejected)
    return PairLoss(preferred + nll_coef * nll, {**diagnostics, "nll": nll})


def orpo(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    chosen_lengths: Int[Array, " P"],
    rejected_lengths: Int[Array, " P"],
    *,
    beta: float = 0.1,
) -> PairLoss:
    """Imitate the chosen answer, and raise its odds above the other's.

    L = −a_w − λ log σ(log odds_w − log odds_l), log odds = a − log(1 − e^a). ORPO
    (https://arxiv.org/abs/2403.07691, eq. 6 and 7). The first term is over the answer; the authors'
    code and TRL take the prompt's tokens, too. Where a is above −10⁻⁶ the odds have no gradient.

    Args:
        chosen_logps: as for `simpo`.
        rejected_logps: as for `simpo`.
        chosen_lengths: n_w, tokens of the chosen answers.
        rejected_lengths: n_l, tokens of the rejected answers.
        beta: λ, weight of the second term; TRL's name for it.

    Returns:
        As `simpo`, and nll, the first term; log_odds_ratio, the difference of the log odds.

    Raises:
        ValueError: beta is not positive.

    >>> logps, lengths = jnp.array([-2.0]), jnp.array([2])
    >>> f"{orpo(logps, logps, lengths, lengths).loss[0]:.4f}"  # 1 + 0.1 log 2
    '1.0693'
    """
    check_positive(beta=beta)
    chosen = answer_mean(chosen_logps.astype(jnp.float32), chosen_lengths)
    rejected = answer_mean(rejected_logps.astype(jnp.float32), rejected_lengths)
    ratio = _log_odds(chosen) - _log_odds(rejected)
    loss = -chosen - beta * jax.nn.log_sigmoid(ratio)
    diagnostics = reward_diagnostics(beta * chosen, beta * rejected)
    return PairLoss(loss, {**diagnostics, "nll": -chosen, "log_odds_ratio": ratio})


def bradley_terry(
    chosen_scores: Float[Array, " P"],
    rejected_scores: Float[Array, " P"],
    *,
    center_coef: float = 0.0,
) -> PairLoss:
    """Score the chosen answer higher: L = −log σ(r_w − r_l) + c (r_w + r_l)².

    The loss of a reward model (https://arxiv.org/abs/2203.02155, eq. 1), whose second term keeps
    scores around 0 (https://arxiv.org/abs/2312.09244, eq. 2; c = 0.01 there).

    Args:
        chosen_scores: the reward model's scores of the chosen answers.
        rejected_scores: the same of the rejected answers.
        center_coef: c, weight of the second term.

    Returns:
        The loss; rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies.

    Raises:
        ValueError: center_coef is negative.

    >>> bradley_terry(jnp.array([2.0]), jnp.array([-2.0])).diagnostics["rewards/margins"].tolist()
    [4.0]
    """
    if center_coef < 0:
        raise ValueError(f"center_coef: got {center_coef}, expected at least 0")
    return _ranked(chosen_scores, rejected_scores, jnp.zeros_like(chosen_scores), center_coef)


def bradley_terry_margin(
    chosen_scores: Float[Array, " P"],
    rejected_scores: Float[Array, " P"],
    margins: Float[Array, " P"],
    *,
    center_coef: float = 0.0,
) -> PairLoss:
    """Score the chosen answer higher by a margin: L = −log σ(r_w − r_l − m) + c (r_w + r_l)².

    Llama 2's loss of a reward model (https://arxiv.org/abs/2307.09288, eq. 2), whose margins say
    how much better annotators find the chosen answer.

    Args:
        chosen_scores: the reward model's scores of the chosen answers.
        rejected_scores: the same of the rejected answers.
        margins: m, in units of the score; a column of the data.
        center_coef: as for `bradley_terry`.

    Returns:
        As `bradley_terry`.

    Raises:
        ValueError: center_coef is negative.
    """
    if center_coef < 0:
        raise ValueError(f"center_coef: got {center_coef}, expected at least 0")
    return _ranked(chosen_scores, rejected_scores, margins, center_coef)


def _ranked(chosen: Array, rejected: Array, margins: Array, center_coef: float) -> PairLoss:
    chosen, rejected, margins = (x.astype(jnp.float32) for x in (chosen, rejected, margins))
    loss = -jax.nn.log_sigmoid(chosen - rejected - margins)
    centered = loss + center_coef * jnp.square(chosen + rejected)
    return PairLoss(centered, reward_diagnostics(chosen, rejected))


def _log_odds(mean: Float32[Array, " P"]) -> Float32[Array, " P"]:
    """Return log(p / (1 − p)) of p = e^mean."""
    mean = jnp.minimum(mean, LARGEST_MEAN)
    return mean - jnp.log(-jnp.expm1(mean))
