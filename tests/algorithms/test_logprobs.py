"""Log-probs, entropies and Σπ² in chunks, against whole logits and plain autodiff."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms.logprobs import (
    HeadProjection,
    TokenStats,
    entropy_from_logits,
    logprobs_from_logits,
    projected_token_stats,
    token_stats,
)

D, V = 6, 11


def make(tokens, dtype=jnp.float32):
    rng = np.random.default_rng(tokens)
    hidden = jnp.asarray(rng.normal(size=(tokens, D)), dtype)
    head = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    return hidden, head, jnp.asarray(rng.integers(0, V, tokens))


def plain(hidden, head, targets, temperature=1.0, softcap=None):
    """All logits at once, in float32, with jax's own derivative."""
    hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
    logits = jnp.matmul(hidden, head, precision="highest")
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = logits / temperature
    logpi = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    pi = jnp.exp(logpi)
    chosen = logpi[jnp.arange(len(targets)), targets]
    return TokenStats(chosen, -(pi * logpi).sum(-1), (pi**2).sum(-1))


def test_from_logits_match_numpy_loops():
    """And huge and forbidden logits leave numbers finite, of any type."""
    logits = np.random.default_rng(0).normal(size=(4, 5)) * 3
    got = logprobs_from_logits(jnp.asarray(logits, jnp.float32), jnp.array([0, 3, 3, 1]))
    entropy = entropy_from_logits(jnp.asarray(logits, jnp.float32))
    for i, target in enumerate((0, 3, 3, 1)):
        pi = [np.exp(x) / sum(np.exp(x) for x in logits[i]) for x in logits[i]]
        assert_allclose(got[i], np.log(pi[target]), rtol=1e-5)
        assert_allclose(entropy[i], -sum(p * np.log(p) for p in pi), rtol=1e-5)
    huge = jnp.array([[1e4, 0.0, -1e4], [0.0, 0.0, -jnp.inf]])
    chosen = logprobs_from_logits(huge.astype(jnp.bfloat16), jnp.array([1, 0]))
    assert_allclose(chosen, [-1e4, -np.log(2)], rtol=1e-2)
    entropy = entropy_from_logits(huge.astype(jnp.bfloat16))
    assert_allclose(entropy, [0.0, np.log(2)], rtol=1e-6)
    assert chosen.dtype == entropy.dtype == jnp.float32
    assert np.isfinite(jax.grad(lambda x: entropy_from_logits(x).sum())(huge)).all()


def mixture(function, hidden, head):
    """A sum of all statistics with random weights, and the statistics."""
    stats = function(hidden, head)
    weights = np.random.default_rng(3).normal(size=(3, len(hidden))).astype(np.float32)
    return sum((w * x).sum() for w, x in zip(weights, stats, strict=True)), stats


def values_and_gradients(function, hidden, head):
    run = jax.value_and_grad(lambda *x: mixture(function, *x), (0, 1), has_aux=True)
    return jax.jit(run)(hidden, head)


@pytest.mark.parametrize(  # one chunk, even ones, and one that is padded
    ("tokens", "chunk", "softcap"), [(5, 8, None), (8, 4, 1.5), (10, 4, None)]
)
def test_values_and_gradients_are_those_of_whole_logits(tokens, chunk, softcap):
    hidden, head, targets = make(tokens)
    projection = {"temperature": 0.7, "softcap": softcap}

    def chunked(hidden, head):
        return token_stats(hidden, head, targets, chunk=chunk, **projection)

    def whole(hidden, head):
        return plain(hidden, head, targets, **projection)

    got, want = (values_and_gradients(f, hidden, head) for f in (chunked, whole))
    jax.tree.map(lambda g, w: assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))


def test_tokens_that_are_not_needed_have_zeros_and_no_gradient():
    """NaN would spread to the head's gradient if a chunk without a needed one were computed."""
    hidden, head, targets = make(11)

    def scored(needed, hidden, head):
        return token_stats(hidden, head, targets, needed, chunk=4)

    def whole(needed, hidden, head):
        return TokenStats(*(jnp.where(needed, x, 0.0) for x in plain(hidden, head, targets)))

    runs = [
        jax.jit(lambda needed, *x, f=f: values_and_gradients(partial(f, needed), *x))
        for f in (scored, whole)
    ]
    for count in (0, 3, 4, 11):  # of 11 tokens in chunks of 4
        needed = np.random.default_rng(count).permutation(11) < count
        holes = hidden if count % 4 else jnp.where(needed[:, None], hidden, jnp.nan)
        got, want = runs[0](needed, holes, head), runs[1](needed, hidden, head)
        jax.tree.map(lambda g, w: assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


def test_bfloat16_loses_no_more_than_its_rounding():
    """Of bfloat16 inputs the values are exact to float32; gradients are rounded to 2^-8."""
    hidden, head, targets = make(40, jnp.bfloat16)
    head = head.astype(jnp.bfloat16)

    def chunked(hidden, head):
        return token_stats(hidden, head, targets, chunk=16, softcap=1.5)

    def whole(hidden, head):
        return plain(hidden, head, targets, softcap=1.5)

    got, want = (values_and_gradients(f, hidden, head) for f in (chunked, whole))
    jax.tree.map(lambda g, w: assert_allclose(g, w, rtol=1e-5, atol=1e-5), got[0][1], want[0][1])
    assert [x.dtype for x in got[1]] == [hidden.dtype, head.dtype]
    exact = values_and_gradients(whole, hidden.astype(jnp.float32), head.astype(jnp.float32))[1]
    for ours, true in zip(got[1], exact, strict=True):
        scale = float(jnp.abs(true).max())
        assert_allclose(ours.astype(jnp.float32), true, rtol=2**-7, atol=2**-8 * scale)


def test_huge_logits_have_finite_gradients():
    hidden, head = jnp.full((4, 1), 1e4), jnp.array([[1.0, 0.0, -1.0]])

    def chunked(hidden, head):
        return token_stats(hidden, head, jnp.array([0, 1, 2, 0]), chunk=2)

    (_, stats), gradients = values_and_gradients(chunked, hidden, head)
    assert_allclose(stats.logprobs, [0.0, -1e4, -2e4, 0.0])
    assert_allclose(stats.entropy, 0.0, atol=1e-6)
    assert all(np.isfinite(x).all() for x in gradients)


def test_bfloat16_hidden_states_add_up_the_head_gradient_in_float32():
    """π = 1/8 is exact in bfloat16; sums over a chunk (293 · 7/8) and over all of them are not."""
    hidden = jnp.ones((2048, D), jnp.bfloat16)
    head = jnp.zeros((D, 8), jnp.float32)
    targets = jnp.zeros(2048, int)

    def total(hidden, head):
        return token_stats(hidden, head, targets, chunk=300).logprobs.sum()

    to_hidden, to_head = jax.jit(jax.grad(total, (0, 1)))(hidden, head)
    assert to_hidden.dtype == jnp.bfloat16 and to_head.dtype == jnp.float32
    want = np.full((D, 8), -2048 / 8)
    want[:, 0] += 2048
    assert_allclose(to_head, want, rtol=1e-6)


def scratch_bytes(tokens, chunk):
    """What the compiled functions hold besides inputs and results: of values, and of gradients."""
    hidden = jax.ShapeDtypeStruct((tokens, D), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((D, 8192), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def total(hidden, head, targets):
        stats = token_stats(hidden, head, targets, chunk=chunk)
        return stats.logprobs.sum() + stats.entropy.sum() + stats.sum_pi_squared.sum()

    for function in (total, jax.grad(total, (0, 1))):
        compiled = jax.jit(function).lower(hidden, head, targets).compile()
        yield compiled.memory_analysis().temp_size_in_bytes


def test_no_more_than_a_few_chunks_of_logits_live_at_once():
    """The bound is in chunks: 8 times the tokens need no more logits."""
    chunk, one = 256, 256 * 8192 * 4
    assert min(scratch_bytes(4096, 4096)) >= 16 * one  # the measure sees logits
    for few, many in zip(scratch_bytes(512, chunk), scratch_bytes(4096, chunk), strict=True):
        assert many <= 3.5 * one
        assert many <= few + 0.1 * one


def test_sharded_tokens_stay_on_their_devices():
    """A chunk takes tokens from every device, so that no hidden state has to move."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    hidden, head, targets = make(64)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    args = jax.device_put((hidden, head, targets), (rows, whole, rows))
    step = jax.jit(lambda *x: token_stats(*x, chunk=16), out_shardings=rows)
    compiled = step.lower(*args).compile().as_text()
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert collective not in compiled


@pytest.mark.parametrize(("parts", "chunk"), [(1, 3), (4, 16)])
def test_tokens_that_are_never_drawn_are_left_out_of_the_softmax(parts, chunk):
    """As if the vocabulary had not got them, also where devices hold parts of it."""
    never, columns = (2, 7, 8), 12
    hidden, _, targets = make(6)
    head = jnp.asarray(np.random.default_rng(0).normal(size=(D, columns)), jnp.float32)
    left = np.setdiff1d(np.arange(columns), never)
    targets = targets % len(left)
    axes = ("tensor",) if parts > 1 else ()
    projection = HeadProjection(0.7, 1.5, chunk, vocab_axes=axes, never=never)

    def without(hidden, head):
        return projected_token_stats(projection, hidden, head, jnp.asarray(left)[targets])

    split = PartitionSpec(None, "tensor")
    mesh = Mesh(np.array(jax.devices()[:parts]), ("tensor",))
    specs = {"in_specs": (PartitionSpec(), split), "out_specs": PartitionSpec()}
    run = jax.shard_map(without, mesh=mesh, **specs, check_vma=False)

    def shorter(hidden, head):
        return plain(hidden, head[:, left], targets, temperature=0.7, softcap=1.5)

    got, want = (values_and_gradients(f, hidden, head) for f in (run, shorter))
    jax.tree.map(lambda g, w: assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)
    assert not got[1][1][:, list(never)].any()


def test_bad_arguments_are_named():
    for keywords in ({"temperature": 0.0}, {"chunk": 0}, {"softcap": 0.0}):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            token_stats(*make(5), **keywords)
