"""Ring attention against the equation written out in torch, and what its program holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxrl_llm.models import context
from jaxrl_llm.models.attention import NO_WINDOW, PLAIN, Attending, attend
from jaxrl_llm.models.context import attend_pieces
from jaxrl_llm.planning.program import count_operations
from jaxrl_llm.sharding.layout import TOKENS, Layout, make_mesh

HEADS, KEYS, WIDTH = 4, 2, 8
SINKS = jnp.array([-2.0, 0.5, 1.0, 3.0])


def layout_of(sizes, by="ring", **options):
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    return Layout(mesh, by, **options)


def draw(length, rows=2):
    rng = np.random.default_rng(0)
    shapes = [(rows, length, heads, WIDTH) for heads in (HEADS, KEYS, KEYS, HEADS)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def segments_of(length):
    """Two rows of long segments and padding, and two of many short ones and of padding alone."""
    long, short = np.ones((2, length), int), np.zeros((2, length), int)
    long[1, length // 3 :] = 2
    long[1, length - 3 :] = 0
    short[0] = 1 + np.arange(length) // 3
    return long, short


def expected(q, k, v, cotangent, segments, options, window):
    """The mixed values, 0 at padding, and gradients: one matrix of scores, differentiated."""
    scale = WIDTH**-0.5 if options.scale is None else options.scale
    q, k, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v))
    keys, values = (x.repeat_interleave(HEADS // KEYS, dim=2) for x in (k, v))
    scores = torch.einsum("rinh,rjnh->rnij", q, keys) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    index = np.arange(segments.shape[1])
    distance = index[:, None] - index[None, :]
    allowed = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    allowed &= (distance >= 0) & (distance < window)
    scores = scores.masked_fill(~torch.tensor(allowed)[:, None], -1e30)
    given = [q, k, v]
    if options.sinks is not None:  # one more score, without a value
        given.append(torch.tensor(np.asarray(options.sinks, float), requires_grad=True))
        beside = given[-1][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    mixed = torch.einsum("rnij,rjnh->rinh", weights, values)
    real = torch.tensor(segments > 0)[:, :, None, None]
    (mixed * torch.tensor(cotangent) * real).sum().backward()
    return [x.detach().numpy() for x in (mixed * real, *(x.grad for x in given))]


def run_on(layout, options):
    """Compile what `expected` computes, of rows that a layout splits."""

    @jax.jit
    def run(q, k, v, cotangent, segments, window):
        def mix(q, k, v, sinks):
            pieces = map(layout.split_context, (q, k, v, segments))
            own = options._replace(window=window, sinks=sinks)
            return layout.merge_context(attend_pieces(*pieces, own, layout=layout))

        mixed, backward = jax.vjp(mix, q, k, v, options.sinks)
        gradients = backward(jnp.where((segments > 0)[:, :, None, None], cotangent, 0.0))
        return jax.tree.leaves((mixed, gradients))

    return run


@pytest.mark.parametrize(
    ("sizes", "piece", "options"),
    [
        ({"context": 2, "tensor": 4}, 8, Attending(sinks=SINKS)),  # more devices than heads of keys
        ({"context": 4, "data": 2}, 6, Attending(scale=0.7, softcap=1.5, sinks=SINKS)),
        ({"context": 8}, 5, PLAIN),  # blocks of two tokens, the last ones of a piece padding
    ],
    ids=["2 devices", "4 devices", "8 devices"],
)
def test_a_ring_equals_one_matrix_of_scores(sizes, piece, options, monkeypatch):
    """Values and gradients, with segments and windows that cross pieces, and padding."""
    monkeypatch.setattr(context, "LARGEST_BLOCK", 2)
    given = draw(sizes["context"] * piece)
    run = run_on(layout_of(sizes), options)
    for segments in segments_of(given[0].shape[1]):
        for window in (NO_WINDOW, piece + 1, 1):
            got = run(*given, segments, window)
            for ours, theirs in zip(got, expected(*given, segments, options, window), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)


@functools.cache
def compiled(devices, by, length):
    """The program of a row's gradient, for queries, keys and values in bfloat16."""
    layout = layout_of({"context": devices}, by)
    split = layout.sharding(TOKENS)
    shape = (devices, length // devices)
    given = [
        jax.ShapeDtypeStruct((*shape, heads, WIDTH), jnp.bfloat16, sharding=split)
        for heads in (HEADS, KEYS, KEYS)
    ]
    segments = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)

    def total(q, k, v, segments):
        mixed = attend_pieces(q, k, v, segments, layout=layout)
        return jnp.square(mixed.astype(jnp.float32)).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*given, segments).compile()


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(context, "LARGEST_BLOCK", 64)


def test_no_device_holds_a_row(small_blocks):
    """Memory falls with the number of devices, and no array is gathered."""
    length = 2048
    few, many = (compiled(devices, "ring", length) for devices in (2, 8))
    keys = compiled(8, "keys", length)
    needed = [p.memory_analysis().temp_size_in_bytes for p in (few, many, keys)]
    assert needed[1] < needed[0] / 2, needed
    assert needed[1] < needed[2] / 8, needed
    assert "all-gather" in keys.as_text()
    assert not any(name in many.as_text() for name in ("all-gather", "all-to-all"))
    assert f"[1,{length}," not in many.as_text()


def test_devices_share_the_work_evenly(small_blocks):
    """Of the c² pairs of pieces each device computes the same, half of them and a quarter each."""
    devices, length = 8, 2048
    counts = count_operations(compiled(devices, "ring", length).as_text(), {"context": devices})
    all_pairs = 2 * HEADS * WIDTH * length**2
    products = 2 + 5  # forward and backward
    assert counts.flops == products * all_pairs / devices * (2 * devices + 1) / (4 * devices)


def test_what_a_ring_can_not_do_is_refused():
    q, k, v, _ = draw(16)
    segments = np.ones((2, 16), int)
    for layout, named in (
        (layout_of({"context": 2}, kernel=attend), "kernel"),
        (layout_of({"context": 2, "tensor": 3}), "tensor=3"),
    ):
        with pytest.raises(ValueError, match=named):
            jax.eval_shape(run_on(layout, PLAIN), q, k, v, q, segments, 1)
