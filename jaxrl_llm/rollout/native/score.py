"""Log-probs of given tokens, by the model code that reads prompts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from jaxrl_llm.models.model import Model
from jaxrl_llm.rollout.native.decode import MOST_TOP_LOGPROBS
from jaxrl_llm.rollout.types import LEAST_LOGPROB
from jaxrl_llm.sharding.layout import Layout

READ_AT_ONCE = 256
"""Tokens of each row whose logits exist at once."""


class TokenScores(NamedTuple):
    """Log-probs of rows of tokens: entry t is of token t given those before it; the first is 0.

    Attributes:
        logprobs: of the tokens, in nats, before any temperature; `LEAST_LOGPROB` of one that is
            never drawn.
        top_ids: the likeliest tokens, likeliest first.
        top_logprobs: their log-probs.
    """

    logprobs: Float32[Array, "B T"]
    top_ids: Int[Array, "B T top"]
    top_logprobs: Float32[Array, "B T top"]


def score_rows(
    params: Any,
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    dtype: Any,
    layout: Layout | None = None,
) -> TokenScores:
    """Read rows of tokens a part after the other, and score each token.

    Args:
        params: in the compute dtype, each layer's arrays apart.
        model: the model.
        tokens: padded on the right to a multiple of `READ_AT_ONCE`, if longer than that.
        lengths: tokens of each row; what is beyond them is meaningless.
        dtype: of the computation.
        layout: how rows are split over a mesh.
    """
    rows, width = tokens.shape
    size = min(width, READ_AT_ONCE)
    targets = jnp.roll(tokens, -1, axis=1)  # what a state tells is of the next token
    most = min(MOST_TOP_LOGPROBS, model.vocab_size)

    def read(cache: Any, first: Int[Array, ""]) -> tuple[Any, tuple[Array, Array, Array]]:
        index = first + jnp.arange(size)
        positions = jnp.where(index < lengths[:, None], index, width)
        part, target = (
            jax.lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (tokens, targets)
        )
        hidden, cache = model.extend(params, cache, part, positions, dtype=dtype, layout=layout)
        logprobs = jax.nn.log_softmax(model.logits(params, hidden), axis=-1)
        own = jnp.take_along_axis(logprobs, target[..., None], axis=-1)[..., 0]
        own = jnp.maximum(own, LEAST_LOGPROB)  # a mark of an image is never drawn
        values, ids = jax.lax.top_k(logprobs, most)
        return cache, (own, ids, values)

    cache = model.init_cache(rows, width, dtype=dtype, kv_cache_dtype="auto")
    _, parts = jax.lax.scan(read, cache, jnp.arange(0, width, size))

    def joined(x: Array) -> Array:
        whole = jnp.moveaxis(x, 0, 1).reshape(rows, width, *x.shape[3:])
        return jnp.roll(whole, 1, axis=1).at[:, 0].set(0)

    return TokenScores(*map(joined, parts))
