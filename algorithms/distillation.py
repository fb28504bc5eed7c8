"""A student's divergence from a teacher, token by token, without holding the logits of either."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.algorithms.logprobs import HeadProjection, TokenChunks
from jaxrl_llm.algorithms.stats import finite

Axes = tuple[str, ...]
"""Mesh axes, inside `jax.shard_map`."""


class TeacherHidden(NamedTuple):
    """A teacher as its last hidden states of X tokens, and its output projection."""

    hidden: Float[Array, "X E"]
    head: Float[Array, "e U"]


class TeacherTop(NamedTuple):
    """A teacher as the log-probs of its K likeliest tokens; one of −∞ is missing."""

    ids: Int[Array, "*S K"]
    logprobs: Float[Array, "*S K"]


class DivergenceStats(NamedTuple):
    """What a student is to its teacher at each token.

    Attributes:
        divergence: what the divergence returned.
        agreement: 1 where their likeliest tokens are the same, else 0.
        student_mass: the student's probability of the tokens that are compared one by one.
        teacher_mass: the teacher's.
    """

    divergence: Float32[Array, "*S"]
    agreement: Float32[Array, "*S"]
    student_mass: Float32[Array, "*S"]
    teacher_mass: Float32[Array, "*S"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a student is compared with a teacher.

    Attributes:
        divergence: (student_logprobs, teacher_logprobs), [x V] each -> [x], of pure JAX.
        student: the student's output projection.
        teacher: that of a teacher with hidden states.
        vocab: the tokens that both have; what is beyond them is left out of both distributions.
            None: all.
    """

    divergence: Callable[..., Any]
    student: HeadProjection = field(default_factory=HeadProjection)
    teacher: HeadProjection = field(default_factory=HeadProjection)
    vocab: int | None = None

    @property
    def devices(self) -> Axes:
        """Return the devices that have the same tokens."""
        return self.student.vocab_axes or self.teacher.vocab_axes


def with_tail(
    top_logprobs: Float[Array, "*S K"], *, floor: float = 1e-7
) -> Float32[Array, "*S K1"]:
    r"""Append the log-prob of all other tokens, $\log \max(1 - \sum_k p_k, \epsilon)$.

    A divergence of such K + 1 classes is that of two distributions, and at most that over the whole
    vocabulary, as no function of a token tells more of it than the token. Without the tail a sum
    over some tokens can be negative, and the student could lower it by moving its mass elsewhere.

    Args:
        top_logprobs: log-probs of K different tokens, in nats; −∞ for one that is missing.
        floor: ε, the least that the tail has, as 1 − Σ p is not exact to more digits.

    Returns:
        Log-probs of K + 1 classes, in nats.

    >>> [round(x, 3) for x in jnp.exp(with_tail(jnp.log(jnp.array([0.5, 0.3])))).tolist()]
    [0.5, 0.3, 0.2]
    """
    top = finite(top_logprobs)
    rest = 1.0 - jnp.exp(top).sum(axis=-1, keepdims=True)
    return jnp.concatenate([top, jnp.log(jnp.maximum(rest, floor))], axis=-1)


def divergence_stats(
    comparison: Comparison,
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    teacher: TeacherHidden | TeacherTop,
    needed: Bool[Array, " X"] | None = None,
) -> DivergenceStats:
    """Compare a student with a teacher, a chunk of tokens at a time.

    Logits are computed again for the gradient: beyond the inputs, their gradients and a few numbers
    per token, only some arrays of chunk · V numbers are alive at once. The gradient goes to the
    student's hidden states and output projection; that of the latter is added up in float32.
    Products are taken in the dtype of the hidden states and summed in float32. Chunks hold the
    needed tokens first, and those without any are skipped; see `algorithms.logprobs.token_stats`.

    Inside `jax.shard_map`, devices that hold parts of the vocabulary exchange parts of a chunk's
    logits, so that each has the whole vocabulary for its share of the tokens: a divergence may be
    any function of both distributions.

    Args:
        comparison: of the two.
        hidden: the student's last hidden states.
        head: its output projection.
        teacher: its hidden states and output projection, or its likeliest tokens: then the
            distributions are over these, and one class more that is all the others.
        needed: the tokens to compare; the others get zeros, without a gradient. None: all.

    Returns:
        Numbers per token. Only `divergence` has a gradient.

    >>> from jaxrl_llm.algorithms.divergences import reverse_kl_divergence
    >>> comparison = Comparison(divergence=reverse_kl_divergence)
    >>> hidden, head = jnp.ones((3, 2)), jnp.eye(2, 4)
    >>> stats = divergence_stats(comparison, hidden, head, TeacherHidden(hidden, head))
    >>> stats.divergence.tolist(), stats.agreement.tolist()
    ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    """
    return _only(needed, _stats(comparison, hidden, head, _gathered(comparison, teacher), needed))


def divergence_stats_from_logits(
    comparison: Comparison,
    logits: Float[Array, "X V"],
    teacher: TeacherHidden | TeacherTop,
    needed: Bool[Array, " X"] | None = None,
) -> DivergenceStats:
    """Compare a student whose logits are there with a teacher, all tokens at once.

    See `divergence_stats`.
    """
    own = _share(comparison.devices, logits.astype(jnp.float32))
    stats = _compare(comparison, own, *_parts(_gathered(comparison, teacher)))
    return _only(
        needed, DivergenceStats(*(_join(comparison.devices, x, len(logits)) for x in stats))
    )


def _gathered(
    comparison: Comparison, teacher: TeacherHidden | TeacherTop
) -> TeacherHidden | TeacherTop:
    """Return a teacher without a gradient, with its whole output projection."""
    if isinstance(teacher, TeacherHidden):
        head = comparison.teacher.gather(teacher.head, teacher.hidden.dtype)
        teacher = TeacherHidden(teacher.hidden, head)
    return jax.lax.stop_gradient(teacher)


def _only(needed: Bool[Array, " X"] | None, stats: Any) -> DivergenceStats:
    if needed is None:
        return stats
    return DivergenceStats(*(jnp.where(needed, x, 0.0) for x in stats))


def _parts(teacher: TeacherHidden | TeacherTop) -> tuple[Any, Array | None]:
    """Return what there is of each token, and the teacher's whole output projection."""
    if isinstance(teacher, TeacherHidden):
        return teacher.hidden, teacher.head
    return teacher, None


def _compare(
    comparison: Comparison, logits: Float32[Array, "y V"], teacher: Any, head: Array | None
) -> DivergenceStats:
    """Compare whole distributions of this device's share of tokens."""
    if isinstance(teacher, TeacherTop):
        return _compare_top(
            comparison, logits, TeacherTop(*(_share(comparison.devices, x) for x in teacher))
        )
    assert head is not None, "a teacher with hidden states has an output projection"
    others = _shared_logits(comparison.devices, comparison.teacher, teacher, head)
    student, given = (jax.nn.log_softmax(x[:, : comparison.vocab]) for x in (logits, others))
    ones = jnp.ones(len(student), jnp.float32)
    agreement = jnp.argmax(student, axis=-1) == jnp.argmax(given, axis=-1)
    return DivergenceStats(
        comparison.divergence(student, given), agreement.astype(jnp.float32), ones, ones
    )


def _compare_top(
    comparison: Comparison, logits: Float32[Array, "y V"], teacher: TeacherTop
) -> DivergenceStats:
    student = jax.nn.log_softmax(logits[:, : comparison.vocab])
    is_known = (teacher.ids >= 0) & (teacher.ids < student.shape[-1])
    is_known &= teacher.logprobs > -jnp.inf
    chosen = jnp.take_along_axis(student, jnp.where(is_known, teacher.ids, 0), axis=-1)
    # what is missing is a part of the tail for both
    tops = [jnp.where(is_known, x, -jnp.inf) for x in (chosen, teacher.logprobs)]
    first = jnp.take_along_axis(teacher.ids, jnp.argmax(tops[1], axis=-1)[:, None], axis=-1)
    agreement = jnp.argmax(student, axis=-1) == first[:, 0]
    masses = (jnp.exp(x.astype(jnp.float32)).sum(axis=-1) for x in tops)
    divergence = comparison.divergence(*(with_tail(x) for x in tops))
    return DivergenceStats(divergence, agreement.astype(jnp.float32), *masses)


def likeliest_tokens(
    projection: HeadProjection,
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    needed: Bool[Array, " X"] | None = None,
    *,
    count: int,
    vocab: int | None = None,
) -> TeacherTop:
    """Return a model's likeliest tokens and their log-probs at temperature 1, chunk by chunk.

    Args:
        projection: how logits are made.
        hidden: last hidden states of X tokens.
        head: the output projection.
        needed: the tokens that are asked for; the others get zeros. None: all.
        count: K, how many are returned, the likeliest first.
        vocab: the ids that are considered, from 0 on; None: all.

    >>> head = jnp.log(jnp.array([[0.2, 0.5, 0.3]]))
    >>> top = likeliest_tokens(HeadProjection(), jnp.ones((1, 1)), head, count=2)
    >>> top.ids.tolist()
    [[1, 2]]
    """
    narrow, axes = projection.gather(head, hidden.dtype), projection.vocab_axes
    chunks = TokenChunks(len(hidden), projection.chunk, needed)

    def find(hidden: Array) -> TeacherTop:
        logits = _shared_logits(axes, projection, hidden, narrow)
        logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(logits[:, :vocab]), count)
        return TeacherTop(*(_join(axes, x, len(hidden)) for x in (ids, logprobs)))

    def nothing(hidden: Array) -> TeacherTop:
        shape = len(hidden), count
        return TeacherTop(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    step = chunks.if_needed(find, nothing)
    by_chunk = jax.lax.map(step, (chunks.is_needed, chunks.cut(hidden)))
    top = jax.tree.map(chunks.join, by_chunk)
    if needed is None:
        return top
    return TeacherTop(*(jnp.where(needed[:, None], x, 0) for x in top))


# Devices of some mesh axes have the same tokens, and each a part of the vocabulary: they share a
# chunk. Each gets the logits of its share of the tokens over the whole vocabulary. A matrix that is
# whole on every device is multiplied with the share alone. Without axes there is one device.


def _shared_logits(
    axes: Axes, projection: HeadProjection, hidden: Float[Array, "x D"], head: Float[Array, "D v"]
) -> Float32[Array, "y V"]:
    """Return the logits of this device's share of x tokens."""
    products = projection.logits(_rows(axes, projection, hidden), head)
    return _exchange(axes, projection, products)


def _rows(axes: Axes, projection: HeadProjection, x: Array) -> Array:
    """Return the tokens whose products this device computes."""
    return _padded(axes, x) if projection.vocab_axes else _share(axes, x)


def _exchange(
    axes: Axes, projection: HeadProjection, logits: Float32[Array, "x v"]
) -> Float32[Array, "y V"]:
    """Return the whole logits of this device's share, from parts of those of all tokens.

    Raises:
        ValueError: the vocabulary is split over other axes than those of these devices.
    """
    if not projection.vocab_axes:
        return logits
    if projection.vocab_axes != axes:
        raise ValueError(
            "the vocabularies of student and teacher are split over "
            f"{axes} and {projection.vocab_axes}; expected the same mesh axes"
        )
    return jax.lax.all_to_all(logits, axes, split_axis=0, concat_axis=1, tiled=True)


def _share(axes: Axes, x: Array) -> Array:
    """Return this device's share of tokens."""
    if not axes:
        return x
    x = _padded(axes, x)
    size = len(x) // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size)


def _join(axes: Axes, x: Array, tokens: int) -> Array:
    """Return what there is of all tokens, from each device's share."""
    return jax.lax.all_gather(x, axes, axis=0, tiled=True)[:tokens] if axes else x


def _padded(axes: Axes, x: Array) -> Array:
    padding = -len(x) % jax.lax.axis_size(axes) if axes else 0
    return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) if padding else x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(
    comparison: Comparison,
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    teacher: TeacherHidden | TeacherTop,
    needed: Bool[Array, " X"] | None,
) -> DivergenceStats:
    return _forward(comparison, hidden, head, teacher, needed)[0]


def _forward(
    comparison: Comparison,
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    teacher: TeacherHidden | TeacherTop,
    needed: Bool[Array, " X"] | None,
) -> tuple[DivergenceStats, tuple[Any, ...]]:
    narrow = comparison.student.gather(head, hidden.dtype)
    given, teacher_head = _parts(teacher)
    chunks = TokenChunks(len(hidden), comparison.student.chunk, needed)

    def compare(block: tuple[Array, Any]) -> DivergenceStats:
        logits = _shared_logits(comparison.devices, comparison.student, block[0], narrow)
        stats = _compare(comparison, logits, block[1], teacher_head)
        return DivergenceStats(*(_join(comparison.devices, x, len(block[0])) for x in stats))

    def nothing(block: tuple[Array, Any]) -> DivergenceStats:
        return DivergenceStats(*[jnp.zeros(len(block[0]), jnp.float32)] * 4)

    blocks = jax.tree.map(chunks.cut, (hidden, given))
    by_chunk = jax.lax.map(chunks.if_needed(compare, nothing), (chunks.is_needed, blocks))
    stats = jax.tree.map(chunks.join, by_chunk)
    return stats, (hidden, head, narrow, teacher, needed)


def _backward(
    comparison: Comparison, saved: tuple[Any, ...], cotangents: DivergenceStats
) -> tuple[Float[Array, "X D"], Float[Array, "d V"], None, None]:
    hidden, head, narrow, teacher, needed = saved
    given, teacher_head = _parts(teacher)
    slopes = cotangents.divergence
    if comparison.devices:  # `shard_map` shares out what is equal
        slopes = jax.lax.psum(slopes, comparison.devices)

    def gradients(block: Any) -> tuple[Float[Array, "x D"], Float32[Array, "D V"]]:
        hidden, given, slopes = block
        own = _rows(comparison.devices, comparison.student, hidden)

        def divergence(raw: Float32[Array, "x v"]) -> Float32[Array, " y"]:
            logits = _exchange(
                comparison.devices, comparison.student, comparison.student.from_raw(raw)
            )
            return _compare(comparison, logits, given, teacher_head).divergence

        raw = jnp.matmul(own, narrow, preferred_element_type=jnp.float32)
        (by_raw,) = jax.vjp(divergence, raw)[1](_share(comparison.devices, slopes))
        # float32 times bfloat16 would leave the tensor cores unused
        by_raw = by_raw.astype(hidden.dtype)
        to_own = jnp.matmul(by_raw, narrow.T, preferred_element_type=jnp.float32)
        (to_hidden,) = jax.vjp(partial(_rows, comparison.devices, comparison.student), hidden)[1](
            to_own.astype(hidden.dtype)
        )
        return to_hidden, jnp.matmul(own.T, by_raw, preferred_element_type=jnp.float32)

    def add(total: Float32[Array, "D V"], block: Any) -> Any:
        to_hidden, to_head = gradients(block)
        return total + to_head, to_hidden

    def nothing(total: Float32[Array, "D V"], block: Any) -> Any:
        return total, jnp.zeros_like(block[0])

    chunks = TokenChunks(len(hidden), comparison.student.chunk, needed)
    blocks = jax.tree.map(chunks.cut, (hidden, given, slopes))
    step, zero = chunks.if_needed(add, nothing), jnp.zeros(narrow.shape, jnp.float32)
    to_head, to_hidden = jax.lax.scan(step, zero, (chunks.is_needed, blocks))
    to_head = comparison.student.scatter(to_head).astype(head.dtype)
    return chunks.join(to_hidden), to_head, None, None


_stats.defvjp(_forward, _backward)
