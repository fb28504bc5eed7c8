"""Log-probs, entropies and Σπ² of tokens, from logits or, in chunks, from hidden states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


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
    head: Float[Array, "D V"],
    targets: Int[Array, " X"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> TokenStats:
    """Score targets under softmax(hidden @ head / temperature) without holding all logits.

    The tokens are taken in chunks and each chunk's logits are computed again for the gradient, so
    that about chunk · V logits live at once. The vocabulary is never split. The product is taken
    in the dtype of `hidden` and summed in float32; so is its gradient, whose part for `head` is
    added up over the chunks in the dtype of `head`: pass float32 parameters to train.

    A chunk holds every (X / chunk)-th token rather than a run of them: where X is sharded, each
    device then works on its own tokens in every chunk.

    Args:
        hidden: last hidden states of X tokens, all of a batch or of its rows.
        head: the output projection.
        targets: token ids from 0 to V − 1, one per hidden state.
        temperature: what logits are divided by.
        chunk: the most tokens in a chunk, over all devices.

    Returns:
        Log-probs, entropies and Σπ² per token, differentiable in `hidden` and `head`.

    Raises:
        ValueError: the temperature or the chunk is not positive.

    >>> stats = token_stats(jnp.ones((3, 2)), jnp.zeros((2, 4)), jnp.array([0, 1, 2]), chunk=2)
    >>> stats.sum_pi_squared.tolist()
    [0.25, 0.25, 0.25]
    """
    if temperature <= 0 or chunk <= 0:
        raise ValueError(f"got temperature {temperature} and chunk {chunk}, wanted positive ones")

    def score(block: tuple[Float[Array, "x D"], Int[Array, " x"]]) -> TokenStats:
        return _stats(_project(block[0], head) / temperature, block[1])

    tokens = hidden.shape[0]
    if tokens <= chunk:
        return score((hidden, targets))
    chunks = -(-tokens // chunk)
    padding = -tokens % chunks

    def strided(x: Array) -> Array:
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunks, *x.shape[1:]).swapaxes(0, 1)

    stats = jax.lax.map(jax.checkpoint(score), (strided(hidden), strided(targets)))
    return TokenStats(*(x.swapaxes(0, 1).reshape(-1)[:tokens] for x in stats))


def _stats(logits: Float32[Array, "*S V"], targets: Int[Array, "*S"]) -> TokenStats:
    logpi = jax.nn.log_softmax(logits, axis=-1)
    pi = jnp.exp(logpi)
    # A comparison splits over a sharded vocabulary; an indexed read would gather the logits.
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    return TokenStats(
        logprobs=jnp.where(chosen, logpi, 0.0).sum(axis=-1),
        entropy=(pi * jnp.where(pi > 0, -logpi, 0.0)).sum(axis=-1),
        sum_pi_squared=jnp.square(pi).sum(axis=-1),
    )


@jax.custom_vjp
def _project(hidden: Float[Array, "x D"], head: Float[Array, "D V"]) -> Float32[Array, "x V"]:
    # The automatic gradient multiplies float32 by bfloat16, which leaves the tensor cores unused.
    return jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _project_forward(
    hidden: Float[Array, "x D"], head: Float[Array, "D V"]
) -> tuple[Float32[Array, "x V"], tuple[Array, Array]]:
    return _project(hidden, head), (hidden, head)


def _project_backward(
    saved: tuple[Array, Array], cotangent: Float32[Array, "x V"]
) -> tuple[Float[Array, "x D"], Float[Array, "D V"]]:
    hidden, head = saved
    narrow = cotangent.astype(hidden.dtype)
    to_hidden = jnp.matmul(narrow, head.astype(hidden.dtype).T, preferred_element_type=jnp.float32)
    to_head = jnp.matmul(hidden.T, narrow, preferred_element_type=jnp.float32)
    return to_hidden.astype(hidden.dtype), to_head.astype(head.dtype)


_project.defvjp(_project_forward, _project_backward)
