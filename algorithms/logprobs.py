"""Log-probs, entropies and Σπ² of tokens, from logits or, in chunks, from hidden states."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

NEVER = -1e30
"""The logit of a token that is never drawn. It is finite, as differences of two must be numbers."""


@dataclass(frozen=True)
class HeadProjection:
    """How hidden states become logits.

    Attributes:
        temperature: what logits are divided by, after the soft-cap.
        softcap: the bound of the logits' magnitude; None for none.
        chunk: the most tokens in a chunk.
        embed_axes: inside `jax.shard_map`, the mesh axes over which the rows of the output
            projection are split; they split tokens, too.
        vocab_axes: those over which its columns are split; their devices have the same tokens.
        never: ids of tokens that are never drawn: they have the logit `NEVER`, and no gradient.
    """

    temperature: float = 1.0
    softcap: float | None = None
    chunk: int = 1024
    embed_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()
    never: tuple[int, ...] = ()

    def gather(self, head: Float[Array, "d V"], dtype: jnp.dtype) -> Float[Array, "D V"]:
        """Return the whole output projection in a dtype."""
        narrow = head.astype(dtype)
        if not self.embed_axes:
            return narrow
        return jax.lax.all_gather(narrow, self.embed_axes, axis=0, tiled=True)

    def scatter(self, gradient: Float32[Array, "D V"]) -> Float32[Array, "d V"]:
        """Return this device's part of the gradient of the output projection."""
        if not self.embed_axes:
            return gradient
        return jax.lax.psum_scatter(gradient, self.embed_axes, scatter_dimension=0, tiled=True)

    def logits(
        self, hidden: Float[Array, "x D"], head: Float[Array, "D V"]
    ) -> Float32[Array, "x V"]:
        """Return logits, of this device's part of the vocabulary."""
        return self.from_raw(jnp.matmul(hidden, head, preferred_element_type=jnp.float32))

    def from_raw(self, raw: Float32[Array, "x V"]) -> Float32[Array, "x V"]:
        """Apply soft-cap and temperature to products."""
        capped = raw if self.softcap is None else self.softcap * jnp.tanh(raw / self.softcap)
        return self._with_never(capped / self.temperature, NEVER)

    def to_raw(
        self, cotangent: Float32[Array, "x V"], logits: Float32[Array, "x V"]
    ) -> Float32[Array, "x V"]:
        """Take a gradient by the logits back through temperature and soft-cap."""
        cotangent = cotangent / self.temperature
        if self.softcap is not None:
            cotangent *= 1.0 - jnp.square(logits * (self.temperature / self.softcap))
        return self._with_never(cotangent, 0.0)

    def _with_never(self, x: Float32[Array, "x V"], value: float) -> Float32[Array, "x V"]:
        """Put a value in the columns of tokens that are never drawn."""
        if not self.never:
            return x
        ids = jnp.arange(x.shape[-1])
        if self.vocab_axes:
            ids += jax.lax.axis_index(self.vocab_axes) * x.shape[-1]
        return jnp.where(jnp.isin(ids, jnp.array(self.never)), value, x)


def _chunk_count(tokens: int, chunk: int) -> int:
    """Return how many chunks to take, at best of equal size: padding is hard to share evenly."""
    least = -(-tokens // chunk)
    return next((n for n in range(least, 2 * least + 1) if n and tokens % n == 0), least)


class TokenChunks:
    """X tokens in chunks of equal size: needed ones first, or each chunk every n-th of them.

    Args:
        tokens: X.
        chunk: the most tokens of a chunk.
        needed: the tokens to compute; None: all.
    """

    def __init__(self, tokens: int, chunk: int, needed: Bool[Array, " X"] | None) -> None:
        """Put the tokens in order."""
        count = _chunk_count(tokens, chunk)
        self.tokens, self.count = tokens, count
        self.order, self.is_needed = None, None
        if needed is not None:
            padding = -tokens % count
            order = jnp.argsort(~needed, stable=True)
            self.order = jnp.pad(order, (0, padding), constant_values=tokens)
            firsts = jnp.arange(count) * ((tokens + padding) // count)
            self.is_needed = firsts < jnp.sum(needed)

    def cut(self, x: Array) -> Array:
        """Return [chunks, x, …] of values [X, …]."""
        if self.order is not None:
            # the order is padded with a number one past the tokens
            taken = x.at[self.order].get(mode="fill", fill_value=0)
            return taken.reshape(self.count, -1, *x.shape[1:])
        x = jnp.pad(x, [(0, -x.shape[0] % self.count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, self.count, *x.shape[1:]).swapaxes(0, 1)

    def join(self, x: Array) -> Array:
        """Return [X, …] of values [chunks, x, …]; the inverse of `cut`."""
        if self.order is not None:
            flat = x.reshape(-1, *x.shape[2:])
            zeros = jnp.zeros((self.tokens, *flat.shape[1:]), flat.dtype)
            return zeros.at[self.order].set(flat, mode="drop")
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[: self.tokens]

    def if_needed(self, compute: Callable[..., Any], skip: Callable[..., Any]) -> Any:
        """Return a function of (…, (is_needed, block)) that computes needed chunks only."""

        def run(*given: Any) -> Any:
            *carry, (is_needed, block) = given
            if is_needed is None:
                return compute(*carry, block)
            return jax.lax.cond(is_needed, compute, skip, *carry, block)

        return run


class TokenStats(NamedTuple):
    """What the policy says of each token.

    Attributes:
        logprobs: log π(target), in nats.
        entropy: −Σ_v π_v log π_v, in nats.
        sum_pi_squared: Σ_v π_v².
    """

    logprobs: Float32[Array, "*S"]
    entropy: Float32[Array, "*S"]
    sum_pi_squared: Float32[Array, "*S"]


def logprobs_from_logits(
    logits: Float[Array, "*S V"], targets: Int[Array, "*S"]
) -> Float32[Array, "*S"]:
    """Return log π(target) = logit_target − log Σ_v exp(logit_v).

    Args:
        logits: unnormalised log-probs of the vocabulary.
        targets: token ids from 0 to V − 1.

    Returns:
        Log-probs in nats.

    >>> print(f"{logprobs_from_logits(jnp.zeros((1, 4)), jnp.array([2]))[0]:.3f}")
    -1.386
    """
    return _stats(logits.astype(jnp.float32), targets).logprobs


def entropy_from_logits(logits: Float[Array, "*S V"]) -> Float32[Array, "*S"]:
    """Return the entropy −Σ_v π_v log π_v; a logit of −∞ is a token of probability 0.

    Args:
        logits: unnormalised log-probs of the vocabulary.

    Returns:
        Entropies in nats, from 0 to log V.

    >>> entropy_from_logits(jnp.array([[0.0, -jnp.inf]])).tolist()
    [0.0]
    """
    return _stats(logits.astype(jnp.float32), jnp.zeros(logits.shape[:-1], jnp.int32)).entropy


def token_stats(
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    targets: Int[Array, " X"],
    needed: Bool[Array, " X"] | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 1024,
    head_axes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> TokenStats:
    r"""Score targets under $\pi = \mathrm{softmax}(h W / \tau)$ without holding all logits.

    With a soft-cap c, $\pi = \mathrm{softmax}(c \tanh(h W / c) / \tau)$ (Gemma 2,
    https://arxiv.org/abs/2408.00118, section 2). The derivatives of a token's log-prob, entropy H
    and $S = \sum_v \pi_v^2$ by its logits are

    $$\mathbb{1}[v = t] - \pi_v, \quad -\pi_v (\log \pi_v + H), \quad 2 \pi_v (\pi_v - S)$$

    The tokens are taken in chunks, and logits are computed again for the gradient: beyond the
    inputs, their gradients and seven numbers per token, only a few arrays of chunk · V numbers are
    alive at once. A single chunk keeps its logits. A chunk has the whole vocabulary. Products are
    taken in the dtype of `hidden` and summed in float32, and the gradient of `head` is added up
    over the chunks in float32. There is no second derivative.

    A chunk holds every (X / chunk)-th token rather than a run of them: where X is sharded, each
    device then works on its own tokens in every chunk. With `needed`, chunks hold the needed tokens
    first, and those that hold none are skipped: prompts then cost nothing here.

    Args:
        hidden: last hidden states of X tokens, all of a batch or of its rows.
        head: the output projection.
        targets: token ids from 0 to V − 1, one per hidden state.
        needed: the tokens to score; the others get zeros, without a gradient. None: all.
        temperature: τ, what logits are divided by, after the soft-cap.
        softcap: c, the bound of the logits' magnitude; None for none.
        chunk: the most tokens in a chunk.
        head_axes: inside `jax.shard_map` without a check of replication, the mesh axes over which
            rows and columns of `head` are split. Rows are split as tokens are: a device gives its
            part, which is gathered in the dtype of `hidden`, once, and gets the gradient of it,
            summed in float32. Devices that split columns, the vocabulary, have the same tokens,
            and each computes its part of their logits.

    Returns:
        Log-probs, entropies and Σπ² per token, differentiable in `hidden` and `head`.

    Raises:
        ValueError: the temperature, the soft-cap or the chunk is not positive.

    >>> stats = token_stats(jnp.ones((3, 2)), jnp.zeros((2, 4)), jnp.array([0, 1, 2]), chunk=2)
    >>> stats.sum_pi_squared.tolist()
    [0.25, 0.25, 0.25]
    """
    if temperature <= 0 or chunk <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"got temperature {temperature}, softcap {softcap} and chunk {chunk}, "
            "expected positive ones"
        )
    projection = HeadProjection(temperature, softcap, chunk, *head_axes)
    return projected_token_stats(projection, hidden, head, targets, needed)


def projected_token_stats(
    projection: HeadProjection,
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    targets: Int[Array, " X"],
    needed: Bool[Array, " X"] | None = None,
) -> TokenStats:
    """Score targets as `token_stats`, with all that a projection says of how logits are made.

    >>> projection = HeadProjection(never=(3,))
    >>> args = jnp.ones((1, 2)), jnp.zeros((2, 4)), jnp.array([0])
    >>> print(f"{projected_token_stats(projection, *args).logprobs[0]:.3f}")  # one of three
    -1.099
    """
    return _only(needed, _token_stats(projection, hidden, head, targets, needed))


def token_stats_from_logits(
    logits: Float[Array, "X V"],
    targets: Int[Array, " X"],
    needed: Bool[Array, " X"] | None = None,
    *,
    temperature: float = 1.0,
) -> TokenStats:
    r"""Score targets under $\pi = \mathrm{softmax}(z / \tau)$ of logits z that are there.

    Args:
        logits: z, of X tokens.
        targets: token ids from 0 to V − 1.
        needed: the tokens to score; the others get zeros, without a gradient. None: all.
        temperature: τ.

    Returns:
        Log-probs, entropies and Σπ² per token, differentiable in the logits.

    Raises:
        ValueError: the temperature is not positive.

    >>> token_stats_from_logits(jnp.zeros((1, 4)), jnp.array([2])).sum_pi_squared.tolist()
    [0.25]
    """
    if temperature <= 0:
        raise ValueError(f"got temperature {temperature}, expected a positive one")
    return _only(needed, _stats(logits.astype(jnp.float32) / temperature, targets))


def _only(needed: Bool[Array, " X"] | None, stats: Any) -> TokenStats:
    if needed is None:
        return stats
    return TokenStats(*(jnp.where(needed, x, 0.0) for x in stats))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_stats(
    projection: HeadProjection,
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    targets: Int[Array, " X"],
    needed: Bool[Array, " X"] | None,
) -> TokenStats:
    return _forward(projection, hidden, head, targets, needed)[0]


def _forward(
    projection: HeadProjection,
    hidden: Float[Array, "X D"],
    head: Float[Array, "d V"],
    targets: Int[Array, " X"],
    needed: Bool[Array, " X"] | None,
) -> tuple[TokenStats, tuple[Any, ...]]:
    narrow = projection.gather(head, hidden.dtype)
    chunks = TokenChunks(hidden.shape[0], projection.chunk, needed)
    if chunks.count <= 1:
        logits = projection.logits(hidden, narrow)
        stats, residual = _stats_and_residual(logits, targets, projection.vocab_axes)
        return stats, (hidden, head, narrow, targets, needed, residual, logits)

    def score(block: tuple[Array, Array]) -> tuple[TokenStats, _Residual]:
        logits = projection.logits(block[0], narrow)
        return _stats_and_residual(logits, block[1], projection.vocab_axes)

    def nothing(block: tuple[Array, Array]) -> tuple[TokenStats, _Residual]:
        zeros = jnp.zeros(block[1].shape, jnp.float32)
        return TokenStats(zeros, zeros, zeros), _Residual(zeros, zeros, zeros, zeros)

    blocks = chunks.cut(hidden), chunks.cut(targets)
    by_chunk = jax.lax.map(chunks.if_needed(score, nothing), (chunks.is_needed, blocks))
    stats, residual = jax.tree.map(chunks.join, by_chunk)
    return stats, (hidden, head, narrow, targets, needed, residual, None)


def _backward(
    projection: HeadProjection, saved: tuple[Any, ...], cotangents: TokenStats
) -> tuple[Float[Array, "X D"], Float[Array, "d V"], None, None]:
    hidden, head, narrow, targets, needed, residual, logits = saved
    over = projection.vocab_axes
    cotangents = _add_up(cotangents, over)  # `shard_map` shares them out among equal results

    def gradients(
        block: tuple[Array, Array, _Residual, TokenStats], logits: Float32[Array, "x V"]
    ) -> tuple[Float[Array, "x D"], Float32[Array, "D V"]]:
        hidden, targets, residual, cotangents = block
        slope = _gradient(logits, targets, residual, cotangents, over)
        raw = projection.to_raw(slope, logits)
        # float32 times bfloat16 would leave the tensor cores unused
        raw = raw.astype(hidden.dtype)
        to_hidden = jnp.matmul(raw, narrow.T, preferred_element_type=jnp.float32)
        to_head = jnp.matmul(hidden.T, raw, preferred_element_type=jnp.float32)
        return to_hidden.astype(hidden.dtype), to_head

    if logits is not None:
        to_hidden, to_head = gradients((hidden, targets, residual, cotangents), logits)
        return to_hidden, projection.scatter(to_head).astype(head.dtype), None, None

    def add(total: Float32[Array, "D V"], block: Any) -> Any:
        to_hidden, to_head = gradients(block, projection.logits(block[0], narrow))
        return total + to_head, to_hidden

    def nothing(total: Float32[Array, "D V"], block: Any) -> Any:
        return total, jnp.zeros_like(block[0])

    chunks = TokenChunks(hidden.shape[0], projection.chunk, needed)
    blocks = jax.tree.map(chunks.cut, (hidden, targets, residual, cotangents))
    step, zero = chunks.if_needed(add, nothing), jnp.zeros(narrow.shape, jnp.float32)
    to_head, to_hidden = jax.lax.scan(step, zero, (chunks.is_needed, blocks))
    return chunks.join(to_hidden), projection.scatter(to_head).astype(head.dtype), None, None


_token_stats.defvjp(_forward, _backward)


class _Residual(NamedTuple):
    """What of a chunk's softmax the gradient needs besides the logits, one number per token."""

    maximum: Float32[Array, "*S"]
    log_total: Float32[Array, "*S"]
    entropy: Float32[Array, "*S"]
    sum_pi_squared: Float32[Array, "*S"]


def _stats(logits: Float32[Array, "*S V"], targets: Int[Array, "*S"]) -> TokenStats:
    return _stats_and_residual(logits, targets)[0]


def _stats_and_residual(
    logits: Float32[Array, "*S V"], targets: Int[Array, "*S"], over: tuple[str, ...] = ()
) -> tuple[TokenStats, _Residual]:
    """Return results and residuals; `over` are the mesh axes that the vocabulary is split over."""
    maximum = jax.lax.stop_gradient(logits.max(axis=-1))
    if over:
        maximum = jax.lax.pmax(maximum, over)
    below = logits - maximum[..., None]
    weight = jnp.exp(below)
    # A comparison splits over a sharded vocabulary; an indexed read would gather the logits.
    chosen = jnp.where(_is_target(logits, targets, over), below, 0.0)
    parts = weight, weight * jnp.where(weight > 0, below, 0.0), chosen, jnp.square(weight)
    total, mean, chosen, square = _add_up(tuple(part.sum(axis=-1) for part in parts), over)
    log_total = jnp.log(total)
    stats = TokenStats(
        logprobs=chosen - log_total,
        entropy=log_total - mean / total,
        sum_pi_squared=square / jnp.square(total),
    )
    return stats, _Residual(maximum, log_total, stats.entropy, stats.sum_pi_squared)


def _gradient(
    logits: Float32[Array, "*S V"],
    targets: Int[Array, "*S"],
    residual: _Residual,
    cotangents: TokenStats,
    over: tuple[str, ...],
) -> Float32[Array, "*S V"]:
    maximum, log_total, entropy, square = (x[..., None] for x in residual)
    by_logprob, by_entropy, by_square = (x[..., None] for x in cotangents)
    logpi = (logits - maximum) - log_total
    pi = jnp.exp(logpi)
    logpi = jnp.where(pi > 0, logpi, 0.0)
    slope = -by_logprob - by_entropy * (logpi + entropy) + 2.0 * by_square * (pi - square)
    return jnp.where(_is_target(logits, targets, over), by_logprob, 0.0) + pi * slope


def _add_up(parts: Any, over: tuple[str, ...]) -> Any:
    return jax.lax.psum(parts, over) if over else parts


def _is_target(
    logits: Float32[Array, "*S V"], targets: Int[Array, "*S"], over: tuple[str, ...]
) -> Bool[Array, "*S V"]:
    if over:
        targets = targets - jax.lax.axis_index(over) * logits.shape[-1]
    words = jnp.expand_dims(jnp.arange(logits.shape[-1]), range(targets.ndim))
    return words == targets[..., None]
