"""Attention against loops over rows, heads and positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

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
    "window of one": Attending(window=1),
    "traced window": Attending(window=jnp.array(2)),
    "no window among windows": Attending(window=jnp.array(jnp.iinfo(jnp.int32).max)),
    "scale and soft-cap": Attending(scale=0.7, softcap=1.5),
    "soft-cap and window": Attending(softcap=0.8, window=2),
    "sinks": Attending(sinks=jnp.array([-2.0, 0.5, 1.0, 3.0])),
    "sinks above all scores, and a window": Attending(window=2, sinks=jnp.full(4, 40.0)),
}
each_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


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


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_packed_equals_loops(heads, kv_heads):
    q, k, v = arrays(4, 6, heads, 8, kv_heads=kv_heads)
    segments = np.array(SEGMENTS)
    expected = looped(
        q, k, v, lambda r, i, j: j <= i and segments[r, i] == segments[r, j] and segments[r, i] > 0
    )
    got = np.asarray(attend(jnp.array(q), jnp.array(k), jnp.array(v), jnp.array(segments)))
    real = segments > 0
    np.testing.assert_allclose(got[real], expected[real], atol=1e-5)
    assert np.isfinite(got).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_cached_equals_loops(heads, kv_heads):
    q, k, v = arrays(3, 7, heads, 8, kv_heads=kv_heads)
    positions = np.array([[0], [3], [6]])
    expected = looped(q[:, :1], k, v, lambda r, i, j: j <= positions[r, i])
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    got = attend_cache(*map(jnp.array, (q[:, :1], k, v, positions)))
    np.testing.assert_allclose(got, expected, atol=1e-5)


@each_options
def test_windows_scales_and_caps_equal_loops(options):
    q, k, v = arrays(4, 6, 4, 8, kv_heads=2)
    segments = np.array(SEGMENTS)
    window = 6 if options.window is None else int(options.window)

    def allowed(r, i, j):
        return i - window < j <= i and segments[r, i] == segments[r, j] and segments[r, i] > 0

    expected = looped(q, k, v, allowed, options)
    got = np.asarray(attend(*map(jnp.array, (q, k, v, segments)), options))
    real = segments > 0
    np.testing.assert_allclose(got[real], expected[real], atol=1e-5)
    assert np.isfinite(got).all()

    at = np.array([[0, 1, 2], [1, 2, 3], [3, 4, 5], [5, 6, 6]])  # the last row ends in padding
    expected = looped(q[:, :3], k, v, lambda r, i, j: at[r, i] - window < j <= at[r, i], options)
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    got = np.asarray(attend_cache(*map(jnp.array, (q[:, :3], k, v, at)), options))
    np.testing.assert_allclose(got[at < 6], expected[at < 6], atol=1e-5)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_with_sinks_equal_autograd_of_a_softmax_over_one_more_score(dtype, monkeypatch):
    """By PyTorch, which has the scores of a row and its sink side by side."""
    monkeypatch.setattr(attention, "LEAST_BLOCK", 3)
    given = [jnp.array(x, dtype) for x in arrays(4, 6, 4, 8, kv_heads=2)]
    given.append(jnp.array([-2.0, 0.5, 1.0, 3.0]))
    segments = np.array(SEGMENTS)
    cotangent = np.random.default_rng(1).normal(size=(4, 6, 4, 8)).astype(np.float32)
    cotangent[segments == 0] = 0.0

    def mix(q, k, v, sinks):
        return attend(q, k, v, jnp.array(segments), Attending(window=3, sinks=sinks))

    mixed, backward = jax.vjp(mix, *given)
    ours = mixed, *backward(jnp.array(cotangent, dtype))

    q, k, v, sinks = (torch.tensor(np.array(x, np.float32), requires_grad=True) for x in given)
    index = np.arange(6)
    near = (index[:, None] >= index) & (index[:, None] - index < 3)
    allowed = near & (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
    keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("rinh,rjnh->rnij", q, keys) * 8**-0.5
    scores = scores.masked_fill(~torch.tensor(allowed)[:, None], -torch.inf)
    beside = sinks[None, :, None, None].expand(4, 4, 6, 1)
    weights = torch.cat([scores, beside], dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("rnij,rjnh->rinh", weights, values)
    out.backward(torch.tensor(np.asarray(jnp.array(cotangent, dtype), np.float32)))
    theirs = out.detach(), q.grad, k.grad, v.grad, sinks.grad
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.abs().max())
        np.testing.assert_allclose(np.asarray(one, np.float32), other, atol=tolerance * scale)


@pytest.mark.parametrize(
    "options", [OPTIONS["plain"], OPTIONS["soft-cap and window"]], ids=["plain", "capped"]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_finite_and_do_not_cross_segments(dtype, options):
    qkv = [jnp.array(x, dtype) for x in arrays(4, 6, 4, 8, kv_heads=2)]
    segments = jnp.array(SEGMENTS)

    def second_segment(q, k, v):
        mixed = attend(q, k, v, segments, options)
        assert mixed.dtype == dtype
        weights = jnp.where(segments == 2, 1.0, 0.0)[..., None, None] * jnp.arange(1.0, 9.0)
        return (mixed.astype(jnp.float32) * weights).sum()

    for gradient in jax.grad(second_segment, argnums=(0, 1, 2))(*qkv):
        assert jnp.isfinite(gradient).all()
        assert not gradient[segments != 2].any()
        assert gradient[segments == 2].any()

    everything = jax.grad(lambda *a: attend(*a, segments, options).sum(), argnums=(0, 1, 2))(*qkv)
    assert all(jnp.isfinite(gradient).all() for gradient in everything)


@pytest.mark.parametrize("options", [Attending(), Attending(softcap=1e6)], ids=["plain", "capped"])
def test_softmax_is_float32_in_bfloat16(options):
    """Scores near 64 that differ by 1/8 are one number in bfloat16, whose step there is 1/2."""
    q = jnp.full((1, 2, 1, 4), 8.0, jnp.bfloat16)
    k = jnp.array([[[[4.0, 4.0, 4.0, 4.0]], [[4.0, 4.0, 4.0, 4.03125]]]], jnp.bfloat16)
    v = jnp.array([[[[0.0] * 4], [[1.0] * 4]]], jnp.bfloat16)
    got = attend(q, k, v, jnp.ones((1, 2), jnp.int32), options)[0, 1, 0, 0]
    assert abs(float(got) - 1 / (1 + np.exp(-0.125))) < 4e-3


@pytest.mark.parametrize(("blocks", "length"), [(1, 12), (2, 12), (2, 11)])
@each_options
def test_rows_of_many_segments_attend_as_whole_rows_do(options, blocks, length, monkeypatch):
    """And so do the gradients, where a token is told of 2 · `longest` keys only."""
    monkeypatch.setattr(attention, "LEAST_BLOCK", 4 // blocks)
    segments = jnp.array(
        [
            [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
            [1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4],
            [1, 2, 2, 2, 3, 3, 3, 3, 4, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )[:, :length]
    q, k, v = map(jnp.array, arrays(4, length, 4, 8, kv_heads=2))
    real = (segments > 0)[:, :, None, None]

    def total(q, k, v, longest):
        mixed = attend(q, k, v, segments, options, longest=longest)
        mixed = jnp.where(real, mixed, 0.0)
        return (mixed * jnp.sin(jnp.arange(mixed.size).reshape(mixed.shape))).sum(), mixed

    gradient = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    (_, mixed), gradients = gradient(q, k, v, 4)
    (_, expected), expected_gradients = gradient(q, k, v, None)
    np.testing.assert_allclose(mixed, expected, atol=1e-6)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    # a segment that is longer than it may be is cut, so `longest` is what the work is limited by
    other = attend(q, k, v, jnp.ones_like(segments), options, longest=4)
    window = 12 if options.window is None else int(options.window)
    assert window < 4 or not np.allclose(other, attend(q, k, v, jnp.ones_like(segments), options))


@pytest.mark.parametrize("longest", [None, 3, 5])
def test_not_causal_equals_loops(longest, monkeypatch):
    """Over all of a segment, on both sides of a token; and its gradient, in any pieces."""
    monkeypatch.setattr(attention, "LEAST_BLOCK", 2)
    segments = np.array([[1, 1, 2, 3, 3, 3, 4, 4, 4, 5, 0, 0, 0, 0, 0, 0]])
    q, k, v = arrays(1, 16, 4, 8, kv_heads=2)
    same = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
    real, given = (segments > 0)[..., None, None], tuple(map(jnp.array, (q, k, v)))
    weights = np.random.default_rng(1).normal(size=q.shape)

    def ours(q, k, v):
        options = Attending(causal=False)
        return attend(q, k, v, jnp.array(segments), options, longest=longest)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.where(same[:, None], jnp.einsum("rinh,rjnh->rnij", q, k) * 8**-0.5, -1e9)
        return jnp.einsum("rnij,rjnh->rinh", jax.nn.softmax(scores), v)

    def run(mix):
        def loss(given):
            mixed = mix(*given)
            return jnp.where(real, mixed * weights, 0).sum(), mixed

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(given)

    (_, mixed), gradients = run(ours)
    expected = looped(q, k, v, lambda r, i, j: same[r, i, j])
    np.testing.assert_allclose(mixed[segments > 0], expected[segments > 0], atol=1e-5)
    assert np.isfinite(mixed).all()
    for got, wanted in zip(gradients, run(plain)[1], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_window_is_causal():
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(ValueError, match="not causal has no window, got 2"):
        attend(x, x, x, jnp.ones((1, 2), jnp.int32), Attending(window=2, causal=False))
