"""Policy losses for answers of older policies, which weigh each token by its age."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import ratios
from jaxrl_llm.algorithms.losses_token import TokenLoss, ppo_clip


def a3po(
    logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    ages: Int[Array, "B T"],
    advantages: Float[Array, "B T"],
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
    moved = ratios.clipped_log_ratio(logprobs, rollout_logprobs) * ahead / (ahead + 1)
    moved = jax.lax.stop_gradient(moved)
    weight = jnp.minimum(jnp.exp(moved), cap)
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    prox_logprobs = ratios.finite(rollout_logprobs) + moved
    loss, diagnostics = ppo_clip(logprobs, prox_logprobs, advantages, **clips)
    return TokenLoss(weight * loss, {**diagnostics, "prox_weight": weight})
