"""Attention against loops over rows, heads and positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import Attending, attend, attend_cache

SEGMENTS = [[1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 3], [1, 2, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


def arrays(*shape, kv_heads):
    rng = np.random.default_rng(0)
    kv_shape = (*shape[:-2], kv_heads, shape[-1])
    return [rng.normal(size=s).astype(np.float32) for s in (shape, kv_shape, kv_shape)]


OPTIONS = {
    "plain": Attending(),
    "window": Attending(window=3),
    "traced window": Attending(window=jnp.array(2)),
    "no window among windows": Attending(window=jnp.array(jnp.iinfo(jnp.int32).max)),
    "scale, soft-cap and window": Attending(scale=0.7, softcap=1.5, window=2),
    "sinks": Attending(sinks=jnp.array([-2.0, 0.5, 1.0, 3.0])),
    "sinks above all scores, and a window": Attending(window=2, sinks=jnp.full(4, 40.0)),
}


def looped(q, k, v, allowed, options=OPTIONS["plain"]):
    """Attend one query at a time over the keys that `allowed(row, i, j)` admits, in float64."""
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    out = np.full(q.shape, np.nan)
    rows, length, heads, _ = q.shape
    for r, i, n in np.ndindex(rows, length, heads):
        kv = n * k.shape[2] // heads
        keys = [j for j in range(k.shape[1]) if allowed(r, i, j)]
        if keys:
            scores = scale * np.array([q[r, i, n].astype(float) @ k[r, j, kv] for j in keys])
            if options.softcap is not None:
                scores = options.softcap * np.tanh(scores / options.softcap)
            sink = 0.0 if options.sinks is None else np.exp(float(options.sinks[n]))
            weights = np.exp(scores) / (np.exp(scores).sum() + sink)
            out[r, i, n] = sum(w * v[r, j, kv] for w, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [(4, 4, Attending()), (3, 1, Attending()), *((4, 2, one) for one in OPTIONS.values())],
    ids=["no groups", "one head of keys", *OPTIONS],
)
def test_attention_equals_loops(heads, kv_heads, options):
    """Of rows of packed segments, and of a few tokens over a cache."""
    q, k, v = arrays(4, 6, heads, 8, kv_heads=kv_heads)
    segments = np.array(SEGMENTS)
    window = 6 if options.window is None else int(options.window)

    def allowed(r, i, j):
        return i - window < j <= i and segments[r, i] == segments[r, j] and segments[r, i] > 0

    expected = looped(q, k, v, allowed, options)
    got = np.asarray(jax.jit(lambda *x: attend(*x, options))(q, k, v, segments))
    real = segments > 0
    np.testing.assert_allclose(got[real], expected[real], atol=1e-5)
    assert np.isfinite(got).all()

    at = np.array([[0, 1, 2], [1, 2, 3], [3, 4, 5], [5, 6, 6]])  # the last row ends in padding
    expected = looped(q[:, :3], k, v, lambda r, i, j: at[r, i] - window < j <= at[r, i], options)
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    got = np.asarray(jax.jit(lambda *x: attend_cache(*x, options))(q[:, :3], k, v, at))
    np.testing.assert_allclose(got[at < 6], expected[at < 6], atol=1e-5)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("options", [Attending(), Attending(softcap=1e6)], ids=["plain", "capped"])
def test_softmax_is_float32_in_bfloat16(options):
    """Scores near 64 that differ by 1/8 are one number in bfloat16, whose step there is 1/2."""
    q = jnp.full((1, 2, 1, 4), 8.0, jnp.bfloat16)
    k = jnp.array([[[[4.0, 4.0, 4.0, 4.0]], [[4.0, 4.0, 4.0, 4.03125]]]], jnp.bfloat16)
    v = jnp.array([[[[0.0] * 4], [[1.0] * 4]]], jnp.bfloat16)
    got = attend(q, k, v, jnp.ones((1, 2), jnp.int32), options)[0, 1, 0, 0]
    assert abs(float(got) - 1 / (1 + np.exp(-0.125))) < 4e-3


@pytest.mark.parametrize(
    ("name", "blocks", "length"),
    [
        *(("plain", 1, 12), ("traced window", 2, 12), ("scale, soft-cap and window", 2, 11)),
        ("sinks above all scores, and a window", 2, 11),
    ],
)
def test_rows_of_many_segments_attend_as_whole_rows_do(name, blocks, length, monkeypatch):
    """And so do the gradients, where a token is told of 2 · `longest` keys only."""
    monkeypatch.setattr(attention, "LEAST_BLOCK", 4 // blocks)
    segments = np.array(
        [
            [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
            [1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4],
            [1, 2, 2, 2, 3, 3, 3, 3, 4, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )[:, :length]
    options, given = OPTIONS[name], arrays(4, length, 4, 8, kv_heads=2)

    @functools.partial(jax.jit, static_argnames="longest")
    def run(q, k, v, segments, longest):
        def total(q, k, v):
            mixed = attend(q, k, v, segments, options, longest=longest)
            mixed = jnp.where((segments > 0)[:, :, None, None], mixed, 0.0)
            return (mixed * jnp.sin(jnp.arange(mixed.size).reshape(mixed.shape))).sum(), mixed

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    got, expected = (jax.tree.leaves(run(*given, segments, longest)) for longest in (4, None))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    if name == "plain":  # a segment that is longer than it may be is cut
        one = np.ones_like(segments)
        assert not np.allclose(run(*given, one, 4)[1], run(*given, one, None)[1])
