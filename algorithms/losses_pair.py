"""Losses of preferences between two answers to a prompt, measured against a reference policy.

Every `*_logps` is the sum of the log-probs of an answer's tokens, in nats; a function that wants
their mean divides by the lengths itself. Δ = log π(y) − log π_ref(y) of an answer, w the chosen
and l the rejected one, z = β (Δ_w − Δ_l). A loss has one number for each pair.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int


class PairLoss(NamedTuple):
    """What a loss of pairs, or of answers with a label, returns.

    Attributes:
        loss: of each pair [P], or of each answer.
        diagnostics: numbers for the log, one for each pair or answer; or such numbers, and which of
            them count in their mean.
    """

    loss: Float32[Array, " P"]
    diagnostics: Mapping[str, Float32[Array, " P"] | tuple[Float32[Array, " P"], Bool[Array, " P"]]]


def dpo(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    check_smoothing(label_smoothing)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    z = rewards[0] - rewards[1]
    log_sigmoid = jax.nn.log_sigmoid
    loss = -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
    return PairLoss(loss, reward_diagnostics(*rewards))


def robust_dpo(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    check_smoothing(label_smoothing)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    z = rewards[0] - rewards[1]
    log_sigmoid = jax.nn.log_sigmoid
    loss = -(1 - label_smoothing) * log_sigmoid(z) + label_smoothing * log_sigmoid(-z)
    return PairLoss(loss / (1 - 2 * label_smoothing), reward_diagnostics(*rewards))


def ipo(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    ratios = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, 1.0)
    margin = answer_mean(ratios[0], chosen_lengths) - answer_mean(ratios[1], rejected_lengths)
    loss = jnp.square(margin - 1 / (2 * beta))
    return PairLoss(loss, reward_diagnostics(*(beta * ratio for ratio in ratios)))


def slic(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    return PairLoss(jax.nn.relu(1 - (rewards[0] - rewards[1])), reward_diagnostics(*rewards))


def dpo_length_normalized(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    ratios = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    chosen = answer_mean(ratios[0], chosen_lengths)
    rejected = answer_mean(ratios[1], rejected_lengths)
    return PairLoss(-jax.nn.log_sigmoid(chosen - rejected), reward_diagnostics(chosen, rejected))


def nca(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    log_sigmoid = jax.nn.log_sigmoid
    pull = 0.5 * log_sigmoid(-rewards[0]) + 0.5 * log_sigmoid(-rewards[1])
    return PairLoss(-log_sigmoid(rewards[0]) - pull, reward_diagnostics(*rewards))


def apo_zero(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    loss = jax.nn.sigmoid(-rewards[0]) + jax.nn.sigmoid(rewards[1])
    return PairLoss(loss, reward_diagnostics(*rewards))


def apo_down(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    check_positive(beta=beta)
    rewards = _rewards(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta)
    loss = jax.nn.sigmoid(rewards[0]) + jax.nn.sigmoid(rewards[1] - rewards[0])
    return PairLoss(loss, reward_diagnostics(*rewards))


def rpo(
    chosen_logps: Float[Array, " P"],
    rejected_logps: Float[Array, " P"],
    ref_chosen_logps: Float[Array, " P"],
    ref_rejected_logps: Float[Array, " P"],
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
    nll = -answer_mean(chosen_logps.astype(jnp.float32), chosen_lengths)
    return PairLoss(loss + nll_coef * nll, {**diagnostics, "nll": nll})


def answer_mean(values: Float[Array, " P"], lengths: Int[Array, " P"]) -> Float32[Array, " P"]:
    """Divide sums over tokens by how many these are; 0 where there are none.

    >>> answer_mean(jnp.array([-6.0, 0.0]), jnp.array([3, 0])).tolist()
    [-2.0, 0.0]
    """
    return values / jnp.maximum(lengths, 1).astype(jnp.float32)


def reward_diagnostics(
    chosen: Float32[Array, " P"], rejected: Float32[Array, " P"]
) -> dict[str, Float32[Array, " P"]]:
    """Return rewards of both answers, their difference, and where it has the right sign."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
    }


def check_positive(**values: float) -> None:
    """Raise ValueError for a hyper-parameter that is not positive."""
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}: got {value}, expected a positive number")


def check_smoothing(label_smoothing: float) -> None:
    """Raise ValueError unless 0 <= ε < 1/2."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing: got {label_smoothing}, expected 0 <= ε < 0.5")


def _rewards(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, beta: float
) -> tuple[Float32[Array, " P"], Float32[Array, " P"]]:
    """Return β Δ of both answers."""
    chosen, rejected, ref_chosen, ref_rejected = (
        sums.astype(jnp.float32) for sums in (chosen, rejected, ref_chosen, ref_rejected)
    )
    return beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
