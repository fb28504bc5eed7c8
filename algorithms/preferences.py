"""Losses of preferences: of pairs of answers, of answers with a label, and of labelled steps.

Of a pair there are `chosen_logps` and `rejected_logps`, their lengths, and the same under a
reference; of an answer with a label `logps` and `labels`; of steps `step_logits` and `step_labels`.
A function's parameters say which of these it needs.

Every `*_logps` is the sum of the log-probs of an answer's tokens, in nats; a function that wants
their mean divides by the lengths n itself: a = log π(y) / n. Δ = log π(y) − log π_ref(y) of an
answer, w the chosen and l the rejected one, z = β (Δ_w − Δ_l). A loss has one number for each pair
or answer.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.algorithms.stats import AnswerMask, PerAnswer, PerAnswer32, PerPair, PerPair32

# Pairs, measured against a reference policy.


class PairLoss(NamedTuple):
    """What a loss of pairs, or of answers with a label, returns.

    Attributes:
        loss: of each pair [P], or of each answer.
        diagnostics: numbers for the log, one for each pair or answer; or such numbers, and which of
            them count in their mean.
    """

    loss: PerPair32
    diagnostics: Mapping[str, PerPair32 | tuple[PerPair32, Bool[Array, " P"]]]


def dpo(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Prefer the chosen answer: L = −(1 − ε) log σ(z) − ε log σ(−z).

    DPO (https://arxiv.org/abs/2305.18290, eq. 7). With ε above 0 it is cDPO, which takes labels to
    be wrong with that probability (https://ericmitchell.ai/cdpo.pdf).

    Args:
        chosen_logps: log-probs of the chosen answers under the policy that is being updated.
        rejected_logps: the same of the rejected answers.
        ref_chosen_logps: log-probs of the chosen answers under the reference.
        ref_rejected_logps: the same of the rejected answers.
        beta: scale of a reward, in reward per nat.
        label_smoothing: ε, the share of wrong labels, from 0 to below 1/2.

    Returns:
        The loss; rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies.

    Raises:
        ValueError: beta is not positive, or label_smoothing is out of range.

    >>> sums = jnp.array([-1.0]), jnp.array([-3.0])
    >>> f"{dpo(*sums, *sums).loss[0]:.4f}"  # at the reference
    '0.6931'
    """
    _check_smoothing(label_smoothing)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    z = rewards[0] - rewards[1]
    log_sigmoid = jax.nn.log_sigmoid
    loss = -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
    return PairLoss(loss, _reward_diagnostics(*rewards))


def robust_dpo(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> PairLoss:
    """Prefer the chosen answer in spite of wrong labels, without a bias in expectation.

    L = (−(1 − ε) log σ(z) + ε log σ(−z)) / (1 − 2 ε). Robust DPO
    (https://arxiv.org/abs/2403.00409). The loss may be negative.

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        beta: as for `dpo`.
        label_smoothing: ε, the share of wrong labels, from 0 to below 1/2.

    Returns:
        As `dpo`.

    Raises:
        ValueError: as for `dpo`.
    """
    _check_smoothing(label_smoothing)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    z = rewards[0] - rewards[1]
    log_sigmoid = jax.nn.log_sigmoid
    loss = -(1 - label_smoothing) * log_sigmoid(z) + label_smoothing * log_sigmoid(-z)
    return PairLoss(loss / (1 - 2 * label_smoothing), _reward_diagnostics(*rewards))


def ipo(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    chosen_lengths: Int[Array, " P"],
    rejected_lengths: Int[Array, " P"],
    *,
    beta: float = 0.1,
) -> PairLoss:
    """Regress the margin on a constant: L = (Δ_w / n_w − Δ_l / n_l − 1 / (2 β))².

    IPO (https://arxiv.org/abs/2310.12036, eq. 17), with the mean log-ratio of an answer's tokens
    in place of their sum, as its authors advise and TRL does; so β is not DPO's.

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        chosen_lengths: n_w, tokens of the chosen answers.
        rejected_lengths: n_l, tokens of the rejected answers.
        beta: strength of the pull to the reference; the margin aimed at is 1 / (2 β) nats a token.

    Returns:
        As `dpo`; its rewards are of sums, as there.

    Raises:
        ValueError: beta is not positive.
    """
    _check_positive(beta=beta)
    ratios = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, 1.0)
    margin = _answer_mean(ratios[0], chosen_lengths) - _answer_mean(ratios[1], rejected_lengths)
    loss = jnp.square(margin - 1 / (2 * beta))
    return PairLoss(loss, _reward_diagnostics(*(beta * ratio for ratio in ratios)))


def slic(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    *,
    beta: float = 0.1,
) -> PairLoss:
    """Push the margin above 1: L = max(0, 1 − z).

    The hinge loss of SLiC (https://arxiv.org/abs/2305.10425) on DPO's rewards, as in RSO
    (https://arxiv.org/abs/2309.06657).

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        beta: as for `dpo`.

    Returns:
        As `dpo`.

    Raises:
        ValueError: beta is not positive.
    """
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    return PairLoss(jax.nn.relu(1 - (rewards[0] - rewards[1])), _reward_diagnostics(*rewards))


def dpo_length_normalized(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    chosen_lengths: Int[Array, " P"],
    rejected_lengths: Int[Array, " P"],
    *,
    beta: float = 5.0,
) -> PairLoss:
    """Prefer the chosen answer by the mean of its tokens: L = −log σ(β (Δ_w / n_w − Δ_l / n_l)).

    Tülu 3 (https://arxiv.org/abs/2411.15124).

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        chosen_lengths: n_w, tokens of the chosen answers.
        rejected_lengths: n_l, tokens of the rejected answers.
        beta: scale of a reward, in reward per nat a token: ten to fifty times DPO's.

    Returns:
        As `dpo`, with rewards of means.

    Raises:
        ValueError: beta is not positive.
    """
    ratios = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    chosen = _answer_mean(ratios[0], chosen_lengths)
    rejected = _answer_mean(ratios[1], rejected_lengths)
    return PairLoss(-jax.nn.log_sigmoid(chosen - rejected), _reward_diagnostics(chosen, rejected))


def nca(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    *,
    beta: float = 0.1,
) -> PairLoss:
    """Raise the chosen reward itself: L = −log σ(βΔ_w) − ½ log σ(−βΔ_w) − ½ log σ(−βΔ_l).

    NCA (https://arxiv.org/abs/2402.05369), for two answers.

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        beta: as for `dpo`.

    Returns:
        As `dpo`.

    Raises:
        ValueError: beta is not positive.
    """
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    log_sigmoid = jax.nn.log_sigmoid
    pull = 0.5 * log_sigmoid(-rewards[0]) + 0.5 * log_sigmoid(-rewards[1])
    return PairLoss(-log_sigmoid(rewards[0]) - pull, _reward_diagnostics(*rewards))


def apo_zero(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    *,
    beta: float = 0.1,
) -> PairLoss:
    """Make the chosen answer likelier and the other less: L = 1 − σ(βΔ_w) + σ(βΔ_l).

    APO-zero (https://arxiv.org/abs/2408.06266), for chosen answers that are better than
    the policy's own.

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        beta: as for `dpo`.

    Returns:
        As `dpo`.

    Raises:
        ValueError: beta is not positive.
    """
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    loss = jax.nn.sigmoid(-rewards[0]) + jax.nn.sigmoid(rewards[1])
    return PairLoss(loss, _reward_diagnostics(*rewards))


def apo_down(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    *,
    beta: float = 0.1,
) -> PairLoss:
    """Make both answers less likely, the rejected one more so: L = σ(βΔ_w) + 1 − σ(z).

    APO-down (https://arxiv.org/abs/2408.06266), for a policy that is better than the
    chosen answers.

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        beta: as for `dpo`.

    Returns:
        As `dpo`.

    Raises:
        ValueError: beta is not positive.
    """
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    loss = jax.nn.sigmoid(rewards[0]) + jax.nn.sigmoid(rewards[1] - rewards[0])
    return PairLoss(loss, _reward_diagnostics(*rewards))


def rpo(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
    ref_chosen_logps: PerPair,
    ref_rejected_logps: PerPair,
    chosen_lengths: Int[Array, " P"],
    *,
    beta: float = 0.1,
    nll_coef: float = 1.0,
) -> PairLoss:
    """Prefer the chosen answer, and imitate it: L = −log σ(z) − α log π(y_w) / n_w.

    Iterative RPO (https://arxiv.org/abs/2404.19733).

    Args:
        chosen_logps: as for `dpo`.
        rejected_logps: as for `dpo`.
        ref_chosen_logps: as for `dpo`.
        ref_rejected_logps: as for `dpo`.
        chosen_lengths: n_w, tokens of the chosen answers.
        beta: as for `dpo`.
        nll_coef: α, weight of the second term.

    Returns:
        As `dpo`, and nll, the second term without its weight.

    Raises:
        ValueError: beta is not positive.
    """
    sums = chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps
    loss, diagnostics = dpo(*sums, beta=beta)
    nll = -_answer_mean(chosen_logps.astype(jnp.float32), chosen_lengths)
    return PairLoss(loss + nll_coef * nll, {**diagnostics, "nll": nll})


def _answer_mean(values: PerPair, lengths: Int[Array, " P"]) -> PerPair32:
    """Divide sums over tokens by how many these are; 0 where there are none.

    >>> _answer_mean(jnp.array([-6.0, 0.0]), jnp.array([3, 0])).tolist()
    [-2.0, 0.0]
    """
    return values / jnp.maximum(lengths, 1).astype(jnp.float32)


def _reward_diagnostics(chosen: PerPair32, rejected: PerPair32) -> dict[str, PerPair32]:
    """Return rewards of both answers, their difference, and where it has the right sign."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
    }


def _check_positive(**values: float) -> None:
    """Raise ValueError for a hyper-parameter that is not positive."""
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}: got {value}, expected a positive number")


def _check_smoothing(label_smoothing: float) -> None:
    """Raise ValueError unless 0 <= ε < 1/2."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing: got {label_smoothing}, expected 0 <= ε < 0.5")


def _rewards(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, beta: float
) -> tuple[PerPair32, PerPair32]:
    """Return β Δ of both answers, for a positive β."""
    _check_positive(beta=beta)
    chosen, rejected, ref_chosen, ref_rejected = (
        sums.astype(jnp.float32) for sums in (chosen, rejected, ref_chosen, ref_rejected)
    )
    return beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)


# Pairs without a reference policy.


LARGEST_MEAN = -1e-6
"""Mean log-prob above which an answer's odds grow no further, in nats."""


def simpo(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
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
    _check_positive(beta=beta)
    chosen, rejected = (
        beta * _answer_mean(sums.astype(jnp.float32), lengths)
        for sums, lengths in ((chosen_logps, chosen_lengths), (rejected_logps, rejected_lengths))
    )
    loss = -jax.nn.log_sigmoid(chosen - rejected - gamma)
    return PairLoss(loss, _reward_diagnostics(chosen, rejected))


def cpo(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
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
    _check_positive(beta=beta)
    _check_smoothing(label_smoothing)
    chosen, rejected = (sums.astype(jnp.float32) for sums in (chosen_logps, rejected_logps))
    z, log_sigmoid = beta * (chosen - rejected), jax.nn.log_sigmoid
    preferred = -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
    nll = -_answer_mean(chosen, chosen_lengths)
    diagnostics = _reward_diagnostics(beta * chosen, beta * rejected)
    return PairLoss(preferred + nll_coef * nll, {**diagnostics, "nll": nll})


def orpo(
    chosen_logps: PerPair,
    rejected_logps: PerPair,
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
    _check_positive(beta=beta)
    chosen = _answer_mean(chosen_logps.astype(jnp.float32), chosen_lengths)
    rejected = _answer_mean(rejected_logps.astype(jnp.float32), rejected_lengths)
    ratio = _log_odds(chosen) - _log_odds(rejected)
    loss = -chosen - beta * jax.nn.log_sigmoid(ratio)
    diagnostics = _reward_diagnostics(beta * chosen, beta * rejected)
    return PairLoss(loss, {**diagnostics, "nll": -chosen, "log_odds_ratio": ratio})


def bradley_terry(
    chosen_scores: PerPair, rejected_scores: PerPair, *, center_coef: float = 0.0
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
    chosen_scores: PerPair, rejected_scores: PerPair, margins: PerPair, *, center_coef: float = 0.0
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
    return PairLoss(centered, _reward_diagnostics(chosen, rejected))


def _log_odds(mean: PerPair32) -> PerPair32:
    """Return log(p / (1 − p)) of p = e^mean."""
    mean = jnp.minimum(mean, LARGEST_MEAN)
    return mean - jnp.log(-jnp.expm1(mean))


# Answers with a label, desirable or not, measured against a reference policy.


def kto(
    logps: PerAnswer,
    ref_logps: PerAnswer,
    labels: AnswerMask,
    kl_baseline: PerAnswer,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PairLoss:
    """Raise what is desirable above a baseline, and push the rest below it.

    L = λ_D (1 − σ(βΔ − βz₀)) where desirable, else λ_U (1 − σ(βz₀ − βΔ)). KTO
    (https://arxiv.org/abs/2402.01306, eq. 8). z₀ estimates KL(π‖π_ref): the mean of Δ over
    prompts with the answers of other rows, at least 0, without a gradient. It is taken over the
    whole mini-batch, however that is cut.

    Args:
        logps: log-probs of the answers under the policy that is being updated.
        ref_logps: the same under the reference.
        labels: true where the answer is desirable.
        kl_baseline: z₀, in nats, the same for all answers.
        beta: scale of a reward, in reward per nat.
        desirable_weight: λ_D.
        undesirable_weight: λ_U. The paper advises λ_D n_D / (λ_U n_U) between 1 and 4/3, for
            n_D desirable and n_U other answers.

    Returns:
        The loss; rewards/desirable and rewards/undesirable, each of answers of its kind;
        kl_baseline.

    Raises:
        ValueError: a weight or beta is not positive.

    >>> logps = jnp.array([-1.0, -1.0])
    >>> kto(logps, logps, jnp.array([True, False]), jnp.zeros(2)).loss.tolist()
    [0.5, 0.5]
    """
    _check_positive(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    ratio = logps.astype(jnp.float32) - ref_logps.astype(jnp.float32)
    baseline = jax.lax.stop_gradient(kl_baseline.astype(jnp.float32))
    gain = beta * (ratio - baseline)
    loss = jnp.where(
        labels, desirable_weight * jax.nn.sigmoid(-gain), undesirable_weight * jax.nn.sigmoid(gain)
    )
    return PairLoss(loss, {**_label_diagnostics(beta * ratio, labels), "kl_baseline": baseline})


def apo_zero_labelled(
    logps: PerAnswer, ref_logps: PerAnswer, labels: AnswerMask, *, beta: float = 0.1
) -> PairLoss:
    """Make what is desirable likelier, the rest less: L = 1 − σ(βΔ) where desirable, else σ(βΔ).

    APO-zero (https://arxiv.org/abs/2408.06266), with its two terms apart.

    Args:
        logps: as for `kto`.
        ref_logps: as for `kto`.
        labels: true where the answer is desirable.
        beta: as for `kto`.

    Returns:
        The loss; rewards/desirable and rewards/undesirable, each of answers of its kind.

    Raises:
        ValueError: beta is not positive.
    """
    _check_positive(beta=beta)
    reward = beta * (logps.astype(jnp.float32) - ref_logps.astype(jnp.float32))
    loss = jnp.where(labels, jax.nn.sigmoid(-reward), jax.nn.sigmoid(reward))
    return PairLoss(loss, _label_diagnostics(reward, labels))


def _label_diagnostics(
    rewards: PerAnswer32, labels: AnswerMask
) -> dict[str, tuple[PerAnswer32, AnswerMask]]:
    return {"rewards/desirable": (rewards, labels), "rewards/undesirable": (rewards, ~labels)}


# Steps: of each a process reward model says whether it is right.


def step_cross_entropy(
    step_logits: Float[Array, "P W"], step_labels: Float[Array, "P W"]
) -> TokenLoss:
    """Predict whether each step is right: L = −y log σ(z) − (1 − y) log(1 − σ(z)).

    The loss of a process reward model (https://arxiv.org/abs/2305.20050). A label between 0 and 1
    is the share of roll-outs from that step that end well, as Math-Shepherd estimates it
    (https://arxiv.org/abs/2312.08935, eq. 3 and 5). Of two classes whose logits differ by z it is
    the cross-entropy.

    Args:
        step_logits: z, logit of a step's being right, at its last token.
        step_labels: y, from 0 to 1.

    Returns:
        The loss of each step; rewards/steps, σ(z).

    >>> loss, _ = step_cross_entropy(jnp.array([[0.0, 2.0]]), jnp.array([[1.0, 0.0]]))
    >>> [f"{x:.4f}" for x in loss[0]]
    ['0.6931', '2.1269']
    """
    z, y = step_logits.astype(jnp.float32), step_labels.astype(jnp.float32)
    loss = y * jax.nn.softplus(-z) + (1.0 - y) * jax.nn.softplus(z)
    return TokenLoss(loss, {"rewards/steps": jax.nn.sigmoid(z)})
