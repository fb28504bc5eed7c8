"""The pages of a key/value cache, attention of decoding over them, and which kernel does it.

`models.paged_triton` reads pages where they lie, on GPUs. Here is what it computes, by gathering
them into rows, which any device can.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.attention import PLAIN, Attending, LayerCache, attend_cache, quantize
from jaxrl_llm.models.kernels import (
    TOLERANCE,
    DeviceInfo,
    Heads,
    KernelChoice,
    Trial,
    device_objection,
    try_kernel,
)
from jaxrl_llm.models.layers import Layer, attention_options
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

WIDTHS = 16  # heads are a multiple of it
LEAST_CAPABILITY = (8, 0)  # Ampere: older GPUs have no bfloat16
DTYPES = ("bfloat16", "float16", "float32")
TRIED_PAGES = 40  # of a sequence
TRIED_PAGE = 16

Kernel = Callable[..., Array]
"""What attends over pages: (q, pages, table, positions, options, value_width=) -> mixed values."""

AT_ONCE = 4
"""Sequences that `attend_in_turn` gathers at once."""


def attend_gathered(
    q: Float[Array, "B N H"],
    pages: LayerCache,
    table: Int[Array, "B n"],
    positions: Int[Array, " B"],
    options: Attending = PLAIN,
    *,
    value_width: int | None = None,
) -> Float[Array, "B N V"]:
    """Compute `models.paged_triton.attend_pages` by gathering the pages into rows: its reference.

    Args:
        q: As `models.paged_triton.attend_pages`.
        pages: As `models.paged_triton.attend_pages`.
        table: As `models.paged_triton.attend_pages`.
        positions: As `models.paged_triton.attend_pages`; the result of an empty row means nothing.
        options: As `models.paged_triton.attend_pages`.
        value_width: As `models.paged_triton.attend_pages`.

    >>> k, v = jnp.ones((3, 1, 16, 4)), jnp.ones((3, 1, 4, 16))
    >>> table, positions = jnp.array([[1, 0], [2, 9]]), jnp.array([5, 3])
    >>> given = jnp.ones((2, 3, 16)), LayerCache(k, v), table, positions
    >>> jax.eval_shape(attend_gathered, *given).shape
    (2, 3, 16)
    """
    k = _rows(pages.keys, table, 3)
    if pages.values is None:
        v = k.swapaxes(2, 3)[..., :value_width]
    else:
        v = _rows(pages.values, table, 2)
    of_values = None if pages.value_scales is None else _rows(pages.value_scales, table, 2)
    of_keys = None if pages.key_scales is None else _rows(pages.key_scales, table, 3)
    if of_keys is None:
        q = q.astype(k.dtype)
    elif of_values is None:  # keys are the values
        of_values = of_keys[:, :, :1].swapaxes(2, 3)
    return attend_cache(q[:, None], k, v, positions[:, None], options, of_keys, of_values)[:, 0]


def attend_in_turn(
    q: Float[Array, "B N H"],
    pages: LayerCache,
    table: Int[Array, "B n"],
    positions: Int[Array, " B"],
    options: Attending = PLAIN,
    *,
    value_width: int | None = None,
) -> Float[Array, "B N V"]:
    """Compute `attend_gathered` for a few sequences at a time, so that few are ever gathered.

    It stands for the kernel in programs for CPUs that are compiled to see what a GPU would need.

    Args:
        q: As `attend_gathered`.
        pages: As `attend_gathered`.
        table: As `attend_gathered`.
        positions: As `attend_gathered`.
        options: As `attend_gathered`.
        value_width: As `attend_gathered`.

    >>> k, v = jnp.ones((3, 1, 16, 4)), jnp.ones((3, 1, 4, 16))
    >>> table, positions = jnp.array([[1, 0], [2, 9]]), jnp.array([5, 3])
    >>> given = jnp.ones((2, 3, 16)), LayerCache(k, v), table, positions
    >>> jax.eval_shape(attend_in_turn, *given).shape
    (2, 3, 16)
    """

    def attend_one(row: tuple[Array, Array, Array]) -> Array:
        q, table, position = (x[None] for x in row)
        return attend_gathered(q, pages, table, position, options, value_width=value_width)[0]

    return jax.lax.map(attend_one, (q, table, positions), batch_size=AT_ONCE)


def _rows(pages: Array, table: Int[Array, "B n"], axis: int) -> Array:
    """Lay the pages of each sequence side by side, along the axis of their tokens."""
    rows = pages.at[table].get(mode="fill", fill_value=0)  # a table ends in numbers past all pages
    return jax.lax.collapse(jnp.moveaxis(rows, 1, axis), axis, axis + 2)


def place_of_token(
    table: Int[Array, "B n"], positions: Int[Array, " B"], count: int, size: int
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return page and slot of a token of each row.

    Args:
        table: The pages of each row.
        positions: Of the tokens; negative in an empty row, whose page is one past all.
        count: Pages in all.
        size: Slots of a page.

    >>> page, slot = place_of_token(jnp.array([[3, 1], [2, 5]]), jnp.array([17, -1]), 5, 16)
    >>> page.tolist(), slot.tolist()
    ([1, 5], [1, 15])
    """
    own = jnp.take_along_axis(table, jnp.maximum(positions, 0)[:, None] // size, axis=1)[:, 0]
    return jnp.where(positions < 0, count, own), positions % size


def paged_heads(spec: ModelSpec, layout: Layout) -> Heads | str:
    """Return what a device of a layout is asked to do, or why a kernel can't stand there.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> paged_heads(tiny_spec(head_dim=16), layout)[:3]
    (2, 1, 16)
    """
    spec, parts = spec.for_decoding, layout.mesh.shape["tensor"]
    if spec.heads % parts or (spec.kv_heads % parts and spec.kv_heads > 1):
        return f"{spec.kv_heads} key/value heads can't be split over tensor={parts} devices"
    kinds, heads = sorted(set(spec.windowed_layers)) or [None], spec.heads // parts
    return Heads(
        heads,
        max(1, spec.kv_heads // parts),
        spec.head_dim,
        tuple(attention_options(spec, Layer(windowed), {}) for windowed in kinds),
        spec.attention_sinks,
        None if spec.latent is None else spec.latent.kv_rank,
    )


def paged_objection(heads: Heads, dtype: DTypeLike, device: DeviceInfo) -> str | None:
    """Return why the kernel can't be used, or None if nothing speaks against trying it.

    >>> heads = Heads(16, 8, 100, ())
    >>> paged_objection(heads, "bfloat16", DeviceInfo("cuda", (9, 0), (0, 11, 2)))
    'heads are 100 wide, it needs a multiple of 16'
    """
    wide = next((n for n in (heads.width, heads.latent) if n and n % WIDTHS), None)
    if against := device_objection(device, LEAST_CAPABILITY, "Ampere"):
        return against
    if jnp.dtype(dtype).name not in DTYPES:
        return f"the engine's dtype is {jnp.dtype(dtype)}, it needs one of {', '.join(DTYPES)}"
    return None if wide is None else f"heads are {wide} wide, it needs a multiple of {WIDTHS}"


def paged_difference(kernel: Kernel, heads: Heads, dtype: DTypeLike) -> float:
    r"""Return how far a kernel is off on a few sequences of random numbers.

    They are of one token, end before, at and after the border of a page, and fill all pages; one
    row is empty. With results $a_n$ of the kernel and $b_n$ of `attend_gathered` in float32 for
    each head and sequence, it is the largest $\lVert a_n - b_n \rVert / \lVert b_n \rVert$.

    Args:
        kernel: what is tried.
        heads: sizes and options to try it with.
        dtype: of its inputs; the reference gets the same numbers in float32.

    >>> paged_difference(attend_gathered, Heads(2, 1, 16, (Attending(),)), "float32")
    0.0
    """
    last = TRIED_PAGES * TRIED_PAGE - 1
    positions = jnp.array([0, TRIED_PAGE - 1, TRIED_PAGE, 300, last, -1], jnp.int32)
    count = len(positions) * TRIED_PAGES
    keys = jax.random.split(jax.random.key(0), 4)
    table = jax.random.permutation(keys[3], count).reshape(len(positions), -1)
    page = (count, heads.keys, heads.width, TRIED_PAGE)
    shapes = (len(positions), heads.queries, heads.width), page, (*page[:2], TRIED_PAGE, page[2])
    q, k, v = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys[:3], shapes, strict=True)
    )
    pages = LayerCache(k, v if heads.latent is None else None)
    if heads.is_int8:
        pages = _quantized(pages, heads.latent, dtype)

    def results(kernel: Kernel, dtype: DTypeLike, options: Attending) -> np.ndarray:
        @jax.jit
        def run(q: Array, pages: LayerCache, table: Array, positions: Array) -> Array:
            return kernel(q, pages, table, positions, options, value_width=heads.latent)

        def cast(x: Array) -> Array:
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        given = jax.tree.map(cast, (q, pages, table, positions))
        return np.asarray(run(*given).astype(jnp.float32))[:-1]

    furthest = 0.0
    sinks = jnp.linspace(-2, 2, heads.queries) if heads.has_sinks else None
    for options in (options._replace(sinks=sinks) for options in heads.options):
        with jax.default_matmul_precision("float32"):
            expected = results(attend_gathered, jnp.float32, options)
        off = np.linalg.norm(results(kernel, dtype, options) - expected, axis=2)
        furthest = max(furthest, float(np.max(off / np.linalg.norm(expected, axis=2))))
    return furthest


def _quantized(pages: LayerCache, latent: int | None, dtype: DTypeLike) -> LayerCache:
    """Return pages in int8."""
    width = pages.keys.shape[2]
    widths = (width,) if latent is None else (latent, width - latent)
    keys, of_keys = quantize(pages.keys.swapaxes(2, 3), widths, dtype)
    pages = pages._replace(keys=keys.swapaxes(2, 3), key_scales=of_keys.swapaxes(2, 3))
    if pages.values is None:
        return pages
    values, of_values = quantize(pages.values, (width,), dtype)
    return pages._replace(values=values, value_scales=of_values)


def choose_paged_kernel(
    asked: str,
    spec: ModelSpec,
    layout: Layout,
    dtype: DTypeLike,
    *,
    device: DeviceInfo,
    is_int8: bool = False,
    kernel: Kernel | None = None,
) -> KernelChoice:
    """Decide how a model reads its cache in decoding.

    Args:
        asked: `xla`, or anything else: the kernel where it is possible.
        spec: the model.
        layout: where it decodes.
        dtype: of the computation.
        device: the devices; where these are not here, nothing is tried.
        is_int8: whether keys and values are in int8.
        kernel: what is tried; None: `models.paged_triton.attend_pages`.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> layout, cpu = Layout(make_mesh({}, jax.devices()[:1])), DeviceInfo("cpu", (), (0, 11, 2))
    >>> choose_paged_kernel("auto", tiny_spec(), layout, "float32", device=cpu)
    KernelChoice(name='xla', reason='the devices are cpu, not cuda', kernel=None)
    """
    if asked == "xla":
        return KernelChoice("xla", "XLA's attention was asked for")
    heads = paged_heads(spec, layout)
    if isinstance(heads, str):
        return KernelChoice("xla", heads)
    heads = heads._replace(is_int8=is_int8)
    if against := paged_objection(heads, dtype, device):
        return KernelChoice("xla", against)

    def load() -> Kernel:
        if kernel is not None:
            return kernel
        # not above: a jax to come will have no Pallas for Triton
        from jaxrl_llm.models.paged_triton import attend_pages

        return attend_pages

    return try_kernel(
        "triton",
        load,
        lambda kernel: paged_difference(kernel, heads, dtype),
        Trial(TOLERANCE, passes=""),
        untried=None if device.is_here else "nothing speaks against it; it was not tried",
    )
