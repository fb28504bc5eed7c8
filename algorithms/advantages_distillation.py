"""Advantages from a teacher's log-probs: on-policy distillation."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jaxrl_llm.algorithms.advantages_token import reward_to_go


def reverse_kl(
    rollout_logprobs: Float[Array, "B T"],
    teacher_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    coef: float = 1.0,
    discount: float = 0.0,
) -> Float32[Array, "B T"]:
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
