"""Attention over pages in place, interpreted on a CPU, against loops and against gathered rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import Attending, LayerCache
from jaxrl_llm.models.paged_attention import attend_gathered, attend_in_turn
from jaxrl_llm.models.paged_triton import Blocks, attend_pages, choose_blocks
from tests.guarded import NATIVE

PAGE, PAGES = 16, 6
POSITIONS = (0, PAGE - 1, PAGE, PAGE + 1, PAGES * PAGE - 1, -1)  # the last row is empty
SPLIT = Blocks(queries=16, pages=2, per_split=2, splits=3)
FULL = Attending()
ROUNDING = {"float32": 2e-5, "bfloat16": 2e-2}


def drawn(
    heads, kv_heads, width, dtype="float32", *, value_width=None, positions=POSITIONS, is_int8=False
):
    """Return queries, pages, their table and positions."""
    rng = np.random.default_rng(0)
    count = len(positions) * PAGES + 1
    shapes = (len(positions), heads, width), (count, kv_heads, width, PAGE)
    q, keys = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    values = None
    if value_width is None:
        values = jnp.asarray(rng.normal(size=(count, kv_heads, PAGE, width)), dtype)
    scales = ()
    if is_int8:
        keys, *scales = in_int8(keys, 2, value_width or width, dtype)
        if value_width is None:
            values, of_values = in_int8(values, 3, width, dtype)
            scales.append(of_values)
    table = rng.permutation(count)[:-1].reshape(len(positions), PAGES).astype(np.int32)
    for row, position in zip(table, positions, strict=True):
        row[position // PAGE + 1 :] = count  # no page
    pages = LayerCache(keys, values, *scales)
    return q, pages, jnp.array(table), jnp.array(positions, jnp.int32)


def in_int8(x, axis, first, dtype):
    """Quantize along an axis by the formula, its first numbers and the others apart; zeros stay."""
    x = np.array(x, np.float32)
    x.swapaxes(axis, -1)[0, 0, 3] = 0.0
    parts = [part for part in np.split(x, [first], axis=axis) if part.size]
    scales = [np.abs(part).max(axis=axis, keepdims=True) / np.float32(127) for part in parts]
    scales = [np.asarray(jnp.asarray(scale, dtype), np.float32) for scale in scales]
    steps = [np.where(scale > 0, scale, 1) for scale in scales]
    numbers = [np.round(part / step) for part, step in zip(parts, steps, strict=True)]
    numbers = np.clip(np.concatenate(numbers, axis), -127, 127)
    return jnp.asarray(numbers, jnp.int8), jnp.asarray(np.concatenate(scales, axis), dtype)


def looped(q, pages, table, positions, options, value_width):
    """Attend with one head of one row after the other in float64."""
    keys, values = pages[:2]
    out = np.zeros((*q.shape[:2], value_width or values.shape[3]))
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    q, keys, table = np.asarray(q, float), np.asarray(keys, float), np.asarray(table)
    values = None if values is None else np.asarray(values, float)
    if pages.key_scales is not None:  # of products that are sums, as it is of factors
        of_keys = np.asarray(pages.key_scales, float)
        widths = [keys.shape[2]] if of_keys.shape[2] == 1 else [value_width, -1]
        keys[:, :, : widths[0]] *= of_keys[:, :, :1]
        keys[:, :, widths[0] :] *= of_keys[:, :, -1:]
        values = None if values is None else values * np.asarray(pages.value_scales, float)
    for (row, position), head in itertools.product(
        enumerate(positions.tolist()), range(q.shape[1])
    ):
        kv = head * keys.shape[1] // q.shape[1]
        window = position + 1 if options.window is None else int(options.window)
        places = [(table[row, j // PAGE], j % PAGE) for j in range(position + 1)][-window:]
        if not places:
            continue
        k = np.array([keys[page, kv, :, slot] for page, slot in places])
        v = k if values is None else [values[page, kv, slot] for page, slot in places]
        scores = scale * k @ q[row, head]
        if options.softcap is not None:
            scores = options.softcap * np.tanh(scores / options.softcap)
        weights = np.exp(scores)
        total = weights.sum() + (0 if options.sinks is None else np.exp(float(options.sinks[head])))
        out[row, head] = weights @ np.asarray(v)[:, : out.shape[2]] / total
    return out


def check(given, options=FULL, *, value_width=None, blocks=None):
    """Compare the kernel with loops and with what is gathered."""
    dtype = given[0].dtype

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend, given):
        return attend(*given, options, value_width=value_width)

    got = run(functools.partial(attend_pages, blocks=blocks, interpret=True), given)
    assert got.dtype == dtype
    got = np.asarray(got.astype(jnp.float32))
    expected = looped(*given, options, value_width)
    bound = ROUNDING[dtype.name]
    np.testing.assert_allclose(got, expected, atol=bound, rtol=bound)
    real = np.asarray(given[3]) >= 0
    for gather in (attend_gathered, attend_in_turn):
        gathered = run(gather, given).astype(jnp.float32)
        np.testing.assert_allclose(got[real], np.asarray(gathered)[real], atol=bound, rtol=bound)


CASES = {
    "groups of two, half precision": (4, 2, 64, "bfloat16", Attending(), SPLIT),
    "a width of two parts, groups of seven": (14, 2, 80, "float32", Attending(), SPLIT),
    "a window": (5, 1, 16, "float32", Attending(window=20), SPLIT),
    "a traced window": (4, 4, 16, "float32", Attending(window=jnp.array(33)), SPLIT),
    "a soft-cap and a scale": (2, 1, 16, "float32", Attending(0.7, None, 1.5), None),
    "sinks": (6, 2, 16, "float32", Attending(sinks=jnp.linspace(-2, 4, 6)), SPLIT),
    "two blocks of queries": (40, 1, 16, "float32", Attending(), Blocks(32, 4, 4, 2)),
}


BY_INT8 = ("a window", "sinks")


@pytest.mark.parametrize(
    ("name", "is_int8"), [*((name, False) for name in CASES), *((name, True) for name in BY_INT8)]
)
def test_pages_in_place(name, is_int8):
    heads, kv_heads, width, dtype, options, blocks = CASES[name]
    check(drawn(heads, kv_heads, width, dtype, is_int8=is_int8), options, blocks=blocks)


@pytest.mark.parametrize(("width", "is_int8"), [(64, False), (48, True)])
def test_keys_that_are_values(width, is_int8):
    given = drawn(20, 1, 80, value_width=width, is_int8=is_int8)
    check(given, Attending(scale=0.1), value_width=width, blocks=SPLIT)


def test_nothing_is_read_of_other_sequences():
    """Who else lies in the pool cannot change a result, not even by NaN."""
    q, (keys, values, *_), table, positions = drawn(2, 1, 16)
    own = np.unique(np.asarray(table[:2]))
    others = np.setdiff1d(np.arange(len(keys)), own)
    pages = LayerCache(keys, values)
    expected = attend_pages(q, pages, table, positions, blocks=SPLIT, interpret=True)
    pages = LayerCache(keys.at[others].set(jnp.nan), values.at[others].set(jnp.nan))
    got = attend_pages(q, pages, table, positions, blocks=SPLIT, interpret=True)
    np.testing.assert_array_equal(got[:2], expected[:2])


def test_all_pages_are_in_a_split():
    for programs, pages in itertools.product((1, 64, 4096), (1, 2, 7, 128, 2048)):
        blocks = choose_blocks(programs, 4, 512, PAGE, pages)
        assert blocks.per_split % blocks.pages == 0
        assert (blocks.splits - 1) * blocks.per_split < pages <= blocks.splits * blocks.per_split


@pytest.mark.slow
@pytest.mark.guards("models/", *NATIVE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_every_shape(group, dtype):
    """Each width with other options than its neighbours."""
    every = [
        *((FULL, SPLIT), (Attending(window=37), None), (Attending(window=4096), SPLIT)),
        *((Attending(softcap=2.0, window=jnp.array(20)), SPLIT), (Attending(scale=0.2), None)),
    ]
    for width, (number, (options, blocks)) in itertools.product(
        [64, 80, 96, 128, 256], enumerate(every)
    ):
        if (group + width // 16 + number) % 3 == 0:
            check(drawn(2 * group, 2, width, dtype), options, blocks=blocks)
