"""Whether a model decodes by the kernel that attends over pages in place.

As `models.kernels` decides for training: the kernel is taken where nothing speaks against it and it
has just agreed with its reference on the device.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxrl_llm.models.attention import Attending, quantize
from jaxrl_llm.models.kernels import TOLERANCE, DeviceInfo
from jaxrl_llm.models.layers import Layer, attending
from jaxrl_llm.models.paged_attention import Pages, attend_gathered
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

WIDTHS = 16  # heads are a multiple of it
LEAST_CAPABILITY = (8, 0)  # Ampere: older GPUs have no bfloat16
DTYPES = ("bfloat16", "float16", "float32")
TRIED_PAGES = 40  # of a sequence
TRIED_PAGE = 16

Kernel = Callable[..., Array]
"""What attends over pages: (q, pages, positions, options, value_width=) -> mixed values."""


class PagedHeads(NamedTuple):
    """What attention over a cache is asked to do on one device.

    Attributes:
        queries: query heads.
        keys: heads of the cache.
        width: of a key.
        latent: width of the values where they are the first numbers of the keys, else None.
        options: of each kind of layer, without its sinks.
        is_int8: whether keys and values are in int8.
        has_sinks: whether query heads have sinks.
    """

    queries: int
    keys: int
    width: int
    latent: int | None
    options: tuple[Attending, ...]
    is_int8: bool = False
    has_sinks: bool = False


class PagedChoice(NamedTuple):
    """How a cache is read in decoding.

    Attributes:
        name: triton, in place, or xla, over rows gathered from pages.
        reason: why, in words.
        kernel: what attends over pages; None: they are gathered into rows.
    """

    name: Literal["triton", "xla"]
    reason: str
    kernel: Kernel | None = None

    def __str__(self) -> str:
        """Return it as text for logs and plans."""
        how = "pages in place" if self.kernel else "rows gathered from pages"
        return f"{how}: {self.reason}"


def paged_heads(spec: ModelSpec, layout: Layout) -> PagedHeads | str:
    """Return what a device of a layout is asked to do, or why a kernel can't stand there.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> paged_heads(tiny_spec(head_dim=16), layout)[:4]
    (2, 1, 16, None)
    """
    spec, parts = spec.for_decoding, layout.mesh.shape["tensor"]
    if spec.heads % parts or (spec.kv_heads % parts and spec.kv_heads > 1):
        return f"{spec.kv_heads} key/value heads can't be split over tensor={parts} devices"
    kinds, heads = sorted(set(spec.windowed_layers)) or [None], spec.heads // parts
    return PagedHeads(
        heads,
        max(1, spec.kv_heads // parts),
        spec.head_dim,
        None if spec.latent is None else spec.latent.kv_rank,
        tuple(attending(spec, Layer(windowed), {}) for windowed in kinds),
        has_sinks=spec.attention_sinks,
    )


def paged_objection(heads: PagedHeads, dtype: DTypeLike, device: DeviceInfo) -> str | None:
    """Return why the kernel can't be used, or None if nothing speaks against trying it.

    >>> heads = PagedHeads(16, 8, 100, None, ())
    >>> paged_objection(heads, "bfloat16", DeviceInfo("cuda", (9, 0), (0, 11, 2)))
    'heads are 100 wide, it needs a multiple of 16'
    """
    wide = next((n for n in (heads.width, heads.latent) if n and n % WIDTHS), None)
    capability, least = (".".join(map(str, x)) for x in (device.capability, LEAST_CAPABILITY))
    reasons = {
        f"the devices are {device.platform}, not cuda": device.platform != "cuda",
        f"compute capability {capability}, it needs {least} (Ampere) or later": (
            device.capability < LEAST_CAPABILITY
        ),
        f"the engine's dtype is {jnp.dtype(dtype)}, it needs one of {', '.join(DTYPES)}": (
            jnp.dtype(dtype).name not in DTYPES
        ),
        f"heads are {wide} wide, it needs a multiple of {WIDTHS}": wide is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def paged_difference(kernel: Kernel, heads: PagedHeads, dtype: DTypeLike) -> float:
    r"""Return how far a kernel is off on a few sequences of random numbers.

    They are of one token, end before, at and after the border of a page, and fill all pages; one
    row is empty. With results $a_n$ of the kernel and $b_n$ of `attend_gathered` in float32 for
    each head and sequence, it is the largest $\lVert a_n - b_n \rVert / \lVert b_n \rVert$.

    Args:
        kernel: what is tried.
        heads: sizes and options to try it with.
        dtype: of its inputs; the reference gets the same numbers in float32.

    >>> paged_difference(attend_gathered, PagedHeads(2, 1, 16, None, (Attending(),)), "float32")
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
    pages = Pages(k, v if heads.latent is None else None, table)
    if heads.is_int8:
        pages = _quantized(pages, heads.latent, dtype)

    def results(kernel: Kernel, dtype: DTypeLike, options: Attending) -> np.ndarray:
        @jax.jit
        def run(q: Array, pages: Pages, positions: Array) -> Array:
            return kernel(q, pages, positions, options, value_width=heads.latent)

        def cast(x: Array) -> Array:
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        given = jax.tree.map(cast, (q, pages, positions))
        return np.asarray(run(*given).astype(jnp.float32))[:-1]

    furthest = 0.0
    sinks = jnp.linspace(-2, 2, heads.queries) if heads.has_sinks else None
    for options in (options._replace(sinks=sinks) for options in heads.options):
        with jax.default_matmul_precision("float32"):
            expected = results(attend_gathered, jnp.float32, options)
        off = np.linalg.norm(results(kernel, dtype, options) - expected, axis=2)
        furthest = max(furthest, float(np.max(off / np.linalg.norm(expected, axis=2))))
    return furthest


def _quantized(pages: Pages, latent: int | None, dtype: DTypeLike) -> Pages:
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
) -> PagedChoice:
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
    PagedChoice(name='xla', reason='the devices are cpu, not cuda', kernel=None)
    """
    if asked == "xla":
        return PagedChoice("xla", "XLA's attention was asked for")
    heads = paged_heads(spec, layout)
    if isinstance(heads, str):
        return PagedChoice("xla", heads)
    heads = heads._replace(is_int8=is_int8)
    if against := paged_objection(heads, dtype, device):
        return PagedChoice("xla", against)
    try:
        if kernel is None:  # not above: a jax to come will have no Pallas for Triton
            from jaxrl_llm.models.paged_triton import attend_pages as kernel
        if not device.is_here:
            return PagedChoice("triton", "nothing speaks against it; it was not tried", kernel)
        off = paged_difference(kernel, heads, dtype)
    except Exception as error:  # whatever stops a kernel speaks against it
        message = (str(error).strip() or "no message").splitlines()[0]
        return PagedChoice("xla", f"the kernel failed: {type(error).__name__}: {message}")
    by = f"its results differ from XLA's in float32 by up to {off:.2%} of a token's"
    if not off <= TOLERANCE:
        return PagedChoice("xla", f"{by}; at most {TOLERANCE:.0%} is rounding")
    return PagedChoice("triton", by, kernel)
