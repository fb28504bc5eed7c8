"""Losses of answers with a label, desirable or not, measured against a reference policy.

`logps` is the sum of the log-probs of an answer's tokens, in nats; Δ = log π(y) − log π_ref(y). A
loss has one number for each answer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxrl_llm.algorithms.losses_pair import PairLoss, check_positive


def kto(
    logps: Float[Array, " B"],
    ref_logps: Float[Array, " B"],
    labels: Bool[Array, " B"],
    kl_baseline: Float[Array, " B"],
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
    check_positive(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
    )
    ratio = logps.astype(jnp.float32) - ref_logps.astype(jnp.float32)
    baseline = jax.lax.stop_gradient(kl_baseline.astype(jnp.float32))
    gain = beta * (ratio - baseline)
    loss = jnp.where(
        labels,
        desirable_weight * jax.nn.sigmoid(-gain),
        undesirable_weight * jax.nn.sigmoid(gain),
    )
    return PairLoss(loss, {**_label_diagnostics(beta * ratio, labels), "kl_baseline": baseline})


def apo_zero_labelled(
    logps: Float[Array, " B"],
    ref_logps: Float[Array, " B"],
    labels: Bool[Array, " B"],
    *,
    beta: float = 0.1,
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
    check_positive(beta=beta)
    reward = beta * (logps.astype(jnp.float32) - ref_logps.astype(jnp.float32))
    loss = jnp.where(labels, jax.nn.sigmoid(-reward), jax.nn.sigmoid(reward))
    return PairLoss(loss, _label_diagnostics(reward, labels))


def _label_diagnostics(
    rewards: Float32[Array, " B"], labels: Bool[Array, " B"]
) -> dict[str, tuple[Float32[Array, " B"], Bool[Array, " B"]]]:
    return {"rewards/desirable": (rewards, labels), "rewards/undesirable": (rewards, ~labels)}
