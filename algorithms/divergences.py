"""Divergences of a student's next-token distribution from a teacher's, over classes of tokens.

The classes are the vocabulary, or a teacher's k likeliest tokens with all others as one more class
(`algorithms.distillation.with_tail`).
Every function takes log-probs of both and returns one number for each token. They are 0 where the
two agree and positive elsewhere, and compute in float32. A probability of 0 adds nothing where the
definition says so, and where a divergence would be infinite it is a huge finite number.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxrl_llm.algorithms import stats


def forward_kl_divergence(
    student_logprobs: Float[Array, "*S V"],
    teacher_logprobs: Float[Array, "*S V"],
    *,
    temperature: float = 1.0,
) -> Float32[Array, "*S"]:
    r"""Compute the KL divergence of the student from the teacher, which makes it cover all modes.

    $$\tau^2\, \mathrm{KL}(t_\tau \| s_\tau) = \tau^2 \sum_v t_v (\log t_v - \log s_v)$$

    with $t_\tau \propto t^{1/\tau}$, and so for s. The factor keeps the gradient's scale at every
    temperature (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2.1).

    Args:
        student_logprobs: log-probs of the classes under the student, in nats.
        teacher_logprobs: the same under the teacher.
        temperature: τ, the temperature of distillation.

    Returns:
        Divergences in nats, times τ².

    Raises:
        ValueError: the temperature is not positive.

    >>> half, sure = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([1.0, 0.0]))
    >>> print(f"{forward_kl_divergence(half, sure):.3f}")
    0.693
    """
    student, teacher = _softened(student_logprobs, teacher_logprobs, temperature)
    return temperature**2 * _kl(teacher, student)


def reverse_kl_divergence(
    student_logprobs: Float[Array, "*S V"],
    teacher_logprobs: Float[Array, "*S V"],
    *,
    temperature: float = 1.0,
) -> Float32[Array, "*S"]:
    r"""Compute the KL divergence of the teacher from the student, which makes it seek one mode.

    $$\tau^2\, \mathrm{KL}(s_\tau \| t_\tau) = \tau^2 \sum_v s_v (\log s_v - \log t_v)$$

    MiniLLM (https://arxiv.org/abs/2306.08543, section 2.1), without its sum over later tokens; τ as
    in `forward_kl_divergence`.

    Args:
        student_logprobs: log-probs of the classes under the student, in nats.
        teacher_logprobs: the same under the teacher.
        temperature: τ, the temperature of distillation.

    Returns:
        Divergences in nats, times τ².

    Raises:
        ValueError: the temperature is not positive.

    >>> half, most = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.8, 0.2]))
    >>> print(f"{reverse_kl_divergence(half, most):.3f}")
    0.223
    """
    student, teacher = _softened(student_logprobs, teacher_logprobs, temperature)
    return temperature**2 * _kl(student, teacher)


def generalized_jsd(
    student_logprobs: Float[Array, "*S V"],
    teacher_logprobs: Float[Array, "*S V"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Float32[Array, "*S"]:
    r"""Compute the generalised Jensen-Shannon divergence, between forward and reverse KL.

    $$\tau^2 [\beta\, \mathrm{KL}(t \| m) + (1 - \beta)\, \mathrm{KL}(s \| m)], \quad
    m = \beta t + (1 - \beta) s$$

    GKD (https://arxiv.org/abs/2306.13649, eq. 1), with t and s at the temperature τ as in
    `forward_kl_divergence`. At β = 0 it is KL(t ‖ s) and at β = 1 KL(s ‖ t), by definition. Near
    these ends the formula is about β KL(t ‖ s), or (1 − β) KL(s ‖ t): its gradient has their
    direction but goes to 0, so that β = 0.01 needs a coefficient 100 times that of β = 0.

    Args:
        student_logprobs: log-probs of the classes under the student, in nats.
        teacher_logprobs: the same under the teacher.
        beta: β, the teacher's share of the mixture, from 0 to 1.
        temperature: τ, the temperature of distillation.

    Returns:
        Divergences in nats, times τ²; between the ends at most −β log β − (1 − β) log(1 − β) nats.

    Raises:
        ValueError: β is not in [0, 1], or the temperature is not positive.

    >>> one, other = jnp.log(jnp.array([1.0, 0.0])), jnp.log(jnp.array([0.0, 1.0]))
    >>> print(f"{generalized_jsd(one, other):.3f}")
    0.693
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"got beta {beta}, expected a number from 0 to 1")
    student, teacher = _softened(student_logprobs, teacher_logprobs, temperature)
    if beta == 0:
        return temperature**2 * _kl(teacher, student)
    if beta == 1:
        return temperature**2 * _kl(student, teacher)
    mixture = _log_mixture(student, teacher, beta)
    divergence = beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
    return temperature**2 * divergence


def _softened(
    student_logprobs: Float[Array, "*S V"],
    teacher_logprobs: Float[Array, "*S V"],
    temperature: float,
) -> tuple[Float32[Array, "*S V"], Float32[Array, "*S V"]]:
    if temperature <= 0:
        raise ValueError(f"got temperature {temperature}, expected a positive one")
    both = stats.finite(student_logprobs), stats.finite(teacher_logprobs)
    if temperature == 1:
        return both
    student, teacher = (jax.nn.log_softmax(logprobs / temperature) for logprobs in both)
    return student, teacher


def _kl(p: Float32[Array, "*S V"], q: Float32[Array, "*S V"]) -> Float32[Array, "*S"]:
    """Return Σ p (log p − log q) of finite log-probs."""
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def _log_mixture(
    student: Float32[Array, "*S V"], teacher: Float32[Array, "*S V"], beta: float
) -> Float32[Array, "*S V"]:
    """Return log(β t + (1 − β) s); where t = s it is exactly that, which a sum would round."""
    ahead = student - teacher
    of_teacher = jnp.log1p((1 - beta) * jnp.expm1(jnp.where(ahead <= 0, ahead, 0.0)))
    of_student = jnp.log1p(beta * jnp.expm1(jnp.where(ahead <= 0, 0.0, -ahead)))
    return jnp.where(ahead <= 0, teacher + of_teacher, student + of_student)
