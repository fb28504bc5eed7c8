import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.layers import rms_norm
from jaxrl_llm.models.linear import linear
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.rope import rotate, rotation
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.sharding.layout import Layout, make_mesh, shardings
from tests.decoders import forward, head_matrix, logits

LENGTHS = [4, 1, 5]


@pytest.fixture(scope="module")
def packed():
    """Tokens, positions and segment ids of one row of three sequences and of one padded row."""
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 37)
    counts = [*LENGTHS, 12 - sum(LENGTHS)]
    positions = np.concatenate([np.arange(n) for n in counts])
    segment_ids = np.repeat([1, 2, 3, 0], counts)
    alone = np.arange(12)
    return (
        tokens,
        jnp.array([positions, alone]),
        jnp.array([segment_ids, (alone < 7).astype(int)]),
    )


def test_rms_norm_by_hand():
    x = jnp.array([[1.0, 7.0], [0.0, 0.0]])
    got = rms_norm(x, jnp.array([1.0, 2.0]), eps=11.0)  # mean square 25, and 25 + 11 = 36
    np.testing.assert_allclose(got, [[1 / 6, 14 / 6], [0, 0]], rtol=1e-6)


def test_rms_norm_with_unit_offset():
    x, scale = jax.random.normal(jax.random.key(0), (2, 8))
    got = rms_norm(x, scale, eps=1e-6, unit_offset=True)
    np.testing.assert_array_equal(got, rms_norm(x, 1 + scale, eps=1e-6))


def test_linear_adds_bias_and_low_rank_term(spec):
    rng = np.random.default_rng(0)
    shapes = {"output": (4, 6, 16), "output_bias": (16,)}
    shapes |= {"output_lora_a": (4, 6, 2), "output_lora_b": (2, 16)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.normal(size=(2, 3, 4, 6)).astype(np.float32)
    adapted = dataclasses.replace(
        spec, lora=LoraSpec(rank=2, alpha=6.0, targets=("output",), rslora=True)
    )
    plain = np.einsum("rlnh,nhd->rld", x, weights["output"]) + weights["output_bias"]
    inner = np.einsum("rlnh,nhk->rlk", x, weights["output_lora_a"])
    expected = plain + inner @ weights["output_lora_b"] * 6 / np.sqrt(2)
    ours = jax.tree.map(jnp.array, weights)
    got = linear(ours, adapted, "output", jnp.array(x), inputs=2)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        linear(ours, spec, "output", jnp.array(x), inputs=2), plain, rtol=1e-4, atol=1e-4
    )
    narrow = linear(ours, adapted, "output", jnp.array(x, jnp.bfloat16), inputs=2)
    assert narrow.dtype == jnp.bfloat16


def test_rms_norm_is_computed_in_float32():
    x = jax.random.normal(jax.random.key(0), (64,)).astype(jnp.bfloat16)
    got = rms_norm(x, jnp.full(64, 1.001), eps=1e-6)
    assert got.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean() + 1e-6) * 1.001
    np.testing.assert_array_equal(got, jnp.asarray(expected, jnp.bfloat16))


def test_rotation_by_loops():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 6)).astype(np.float32)
    positions = [0, 5, 1000]
    expected = np.empty_like(x)
    for t, position in enumerate(positions):
        for i in range(3):
            turn = np.exp(1j * position * 100.0 ** (-2 * i / 6))
            turned = (x[0, t, :, i] + 1j * x[0, t, :, i + 3]) * turn
            expected[0, t, :, i], expected[0, t, :, i + 3] = turned.real, turned.imag
    by = rotation(jnp.array([positions]), head_dim=6, theta=100.0)
    np.testing.assert_allclose(rotate(jnp.array(x), by), expected, atol=2e-4)


def test_what_is_not_rotated_passes():
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, 10))
    by = rotation(jnp.array([[3, 4]]), head_dim=6, theta=100.0)
    got = rotate(x, by)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(got[..., :6], rotate(x[..., :6], by))


def test_rotated_products_depend_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(i, j):
        turn = [rotation(jnp.array([[p]]), head_dim=8, theta=1e4) for p in (i, j)]
        return float((rotate(q, turn[0]) * rotate(k, turn[1])).sum())

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


@pytest.fixture(scope="module")
def run(spec, params):
    return jax.jit(partial(forward, params, spec))


def test_packed_equals_separate(run, packed):
    """Each sequence alone at the beginning of a row; both rows of the batch hold it."""
    tokens, positions, segment_ids = packed
    together = run(tokens, positions, segment_ids)
    start, index = 0, jnp.tile(jnp.arange(12), (2, 1))
    for length in LENGTHS:
        moved = jnp.roll(tokens[:1].repeat(2, axis=0), -start, axis=1)
        alone = run(moved, index, (index < length).astype(int))
        for row in alone[:, :length]:
            np.testing.assert_allclose(together[0, start : start + length], row, atol=2e-5)
        start += length


def test_padding_and_other_sequences_do_not_matter(run, packed):
    tokens, positions, segment_ids = packed
    base = run(tokens, positions, segment_ids)
    assert jnp.isfinite(base).all()
    second = segment_ids == 2
    changed = jnp.where(second, tokens, (tokens + 1) % 37)
    again = run(changed, positions, segment_ids)
    np.testing.assert_array_equal(base[second], again[second])
    assert not np.allclose(base[segment_ids == 1], again[segment_ids == 1], atol=1e-2)


def test_later_tokens_do_not_matter(run, packed):
    tokens, positions, segment_ids = packed
    base = run(tokens, positions, segment_ids)
    again = run(tokens.at[1, 5].set((tokens[1, 5] + 1) % 37), positions, segment_ids)
    np.testing.assert_array_equal(base[1, :5], again[1, :5])
    changed = np.abs(base - again)[1, 5:7].max(axis=-1)
    assert (changed > 1e-3).all()


def nll_gradient(params, spec, packed, **options):
    tokens, positions, segment_ids = packed

    def nll(params):
        hidden = forward(params, spec, tokens, positions, segment_ids, **options)
        scores = jax.nn.log_softmax(logits(params, spec, hidden))
        picked = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
        return -jnp.where(segment_ids > 0, picked, 0.0).sum()

    return jax.jit(jax.value_and_grad(nll))(params)


@pytest.fixture(scope="module")
def plain(spec, params, packed):
    return nll_gradient(params, spec, packed)


def test_gradient_reaches_every_array(plain):
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain[1]):
        assert jnp.isfinite(leaf).all(), path
        assert jnp.abs(leaf).max() > 1e-3, path


def test_bfloat16_is_near_float32(run, spec, params, packed):
    narrow = jax.jit(partial(forward, params, spec, dtype=jnp.bfloat16))(*packed)
    wide = run(*packed)
    assert narrow.dtype == jnp.bfloat16
    real = packed[2] > 0
    error = np.abs(np.asarray(narrow, np.float32) - wide)[real]
    assert 1e-4 < error.mean() < 0.05  # not secretly float32, and not far from it
    assert logits(params, spec, narrow).dtype == jnp.float32


def test_soft_cap_of_logits_is_in_float32(spec, params):
    hidden = 30 * jax.random.normal(jax.random.key(0), (3, 16)).astype(jnp.bfloat16)
    capped = logits(params, dataclasses.replace(spec, logit_softcap=20.0), hidden)
    assert capped.dtype == jnp.float32
    plain = np.asarray(logits(params, spec, hidden), np.float64)
    assert np.abs(plain).max() > 20
    np.testing.assert_allclose(capped, 20 * np.tanh(plain / 20), rtol=1e-5)


def test_logits_accumulate_in_float32(spec, params):
    hidden = jax.random.normal(jax.random.key(0), (3, 16)).astype(jnp.bfloat16)
    head = np.asarray(params["head"].astype(jnp.bfloat16), np.float64)
    expected = np.asarray(hidden, np.float64) @ head
    np.testing.assert_allclose(logits(params, spec, hidden), expected, rtol=1e-5, atol=1e-5)


def test_head_matrix(spec, params):
    assert head_matrix(params, spec) is params["head"]
    tied = dataclasses.replace(spec, tied_embeddings=True)
    np.testing.assert_array_equal(head_matrix(params, tied), params["embed"].T)


def test_the_mesh_does_not_matter(spec, params, packed, plain):
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    batch = jax.device_put(packed, jax.NamedSharding(mesh, jax.P("fsdp")))
    sharded = nll_gradient(placed, spec, batch, layout=Layout(mesh))
    assert sharded[1]["layers"]["gate"].sharding.num_devices == 8
    chex.assert_trees_all_close(sharded, plain, rtol=1e-4, atol=1e-4)


def test_norms_over_all_heads_see_those_of_other_devices(spec, draw, packed):
    changes = {"whole_qk_norm": True, "pre_norms": False, "post_norms": True}
    spec = dataclasses.replace(spec, **changes, rotary_layers=(True, False, True))
    params = draw(spec)
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    assert placed["layers"]["query"].sharding.spec[2] == "tensor"
    batch = jax.device_put(packed, jax.NamedSharding(mesh, jax.P()))
    sharded = nll_gradient(placed, spec, batch, layout=Layout(mesh))
    chex.assert_trees_all_close(sharded, nll_gradient(params, spec, packed), rtol=1e-4, atol=1e-4)


def test_activations_stay_with_their_rows(spec, params, packed):
    """With fully sharded parameters the compiler must gather weights, not copy activations."""
    mesh = make_mesh({"fsdp": 8})
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    tiled = (jnp.tile(x, (32, 1)) for x in packed)
    batch = jax.device_put(tuple(tiled), jax.NamedSharding(mesh, jax.P("fsdp")))

    def memory(params, batch, **options):
        gradient = jax.grad(lambda p: forward(p, spec, *batch, **options).sum())
        stats = jax.jit(gradient).lower(params).compile().memory_analysis()
        return stats.temp_size_in_bytes

    one_device = memory(params, jax.device_put(batch, jax.devices()[0]))
    assert memory(placed, batch, layout=Layout(mesh)) < one_device / 5


PATTERNS = {
    "alike": {},
    "three and one": {
        "delta": DeltaSpec(key_heads=1, value_heads=1, key_width=64, value_width=64),
        "delta_layers": (True, True, True, False),
    },
}


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("kinds", PATTERNS.values(), ids=PATTERNS.keys())
def test_neither_weights_nor_gradients_are_there_twice(spec, kinds, remat):
    """A pass copies no layer but the one that it is at; gradients are added to their sum."""
    tokens = jnp.ones((1, 2), jnp.int32)
    large = dataclasses.replace(spec, hidden_size=128, ff_width=256)

    def scratch(repeats):
        layers = {k: v * repeats if type(v) is tuple else v for k, v in kinds.items()}
        own = dataclasses.replace(large, layers=4 * repeats, **layers)
        shapes = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), declare(own))

        def total(params):
            return forward(params, own, tokens, tokens, tokens, remat=remat).sum()

        def accumulate(sums, params):
            value, backward = jax.vjp(total, params)
            sums = jax.tree.map(jax.new_ref, sums)
            backward.with_refs(sums)(jnp.ones_like(value))
            return jax.tree.map(jax.freeze, sums)

        run = jax.jit(accumulate, donate_argnums=0)
        programs = jax.jit(total).lower(shapes), run.lower(shapes, shapes)
        size = sum(x.size for x in jax.tree.leaves(shapes)) * 4
        return [p.compile().memory_analysis().temp_size_in_bytes for p in programs], size

    (few, small), (many, larger) = scratch(2), scratch(4)
    grown = [(after - before) / (larger - small) for before, after in zip(few, many, strict=True)]
    assert max(grown) < 0.4, grown
