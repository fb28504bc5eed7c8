"""Attention over packed rows by cuDNN's fused kernel, and how kernels are chosen.

`models.attention.attend` computes every score of a row. cuDNN's kernel keeps scores on the chip and
visits only those of a segment with itself. It is told where segments begin and how long they are,
never which pairs are allowed: that would be a mask of L² numbers.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxrl_llm.models.attention import PLAIN, Attending, attend
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout

MOST_SEGMENTS = 16
"""Of a row. The softmax statistics that cuDNN stores grow with it."""

WIDEST_HEAD = 256
LEAST_CAPABILITY = (9, 0)  # Hopper: older GPUs have no packed kernel
LEAST_JAX = (0, 11, 2)  # before it, offsets of keys were wrong where heads share keys
TRIED = ((150, 1, 70), (320,), (20,) * MOST_SEGMENTS, (7, 200), ())  # segments of the rows tried
TOLERANCE = 0.04
"""Most that a token's result may be off in 16 bits; rounding alone makes it about 0.01."""

Kernel: TypeAlias = Callable[..., Array]
"""What computes `attend`, from the same arguments (q, k, v, segment_ids, options)."""


class GroupedKernels(NamedTuple):
    """What computes grouped products and their gradients.

    Attributes:
        multiply: `(x [M K], matrices, sizes [E], transposed=, between=) -> [M N]`, the products in
            the dtype of both; `between` says that the axis of groups is the matrices' second one.
        sum_outer_products: `(x [M K], y [M N], sizes [E], between=) -> [E K N]`, or [K E N], in
            float32: the sum of x^T y over the rows of each group.
    """

    multiply: Callable[..., Array]
    sum_outer_products: Callable[..., Array]


def find_segments(
    segment_ids: Int[Array, "R L"], most: int = MOST_SEGMENTS
) -> tuple[Int[Array, "R M"], Int[Array, "R M+1"], Int[Array, "R L"]]:
    """Find where the segments of packed rows begin and how long they are.

    Args:
        segment_ids: As for `models.attention.attend`.
        most: Number of slots M; further segments of a row get none, but a number of M or more.

    Returns:
        Tokens of each segment, and the index of its first token, -1 where there is none; cuDNN
        wants one more of the latter, which is -1 here. And the index of the segment that each token
        is in; M or more at padding.

    >>> [x.tolist() for x in find_segments(jnp.array([[1, 1, 2, 0, 0]]), 3)]
    [[[2, 1, -1]], [[0, 2, -1, -1]], [[0, 0, 1, 3, 3]]]
    """
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    real = segment_ids != 0
    begins = real & (segment_ids != before)
    number = jnp.where(real, jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1, most)
    belongs = number[:, None, :] == jnp.arange(most)[:, None]
    sizes = belongs.sum(axis=2, dtype=jnp.int32)
    there = sizes > 0
    starts = jnp.where(there, jnp.argmax(belongs, axis=2).astype(jnp.int32), -1)
    none = ((0, 0), (0, 1))
    return jnp.where(there, sizes, -1), jnp.pad(starts, none, constant_values=-1), number


@jax.named_scope("attention")
def attend_cudnn(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R L K H"],
    v: Float[Array, "R L K H"],
    segment_ids: Int[Array, "R L"],
    options: Attending = PLAIN,
) -> Float[Array, "R L N H"]:
    """Compute `models.attention.attend` with cuDNN's fused kernel, FlashAttention on packed rows.

    Dao 2023 (https://arxiv.org/abs/2307.08691). It takes 16 bits, on Hopper and later, without a
    window, a soft-cap or sinks. On a mesh it has to stand inside `jax.shard_map`, or XLA gathers
    all that it takes.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        segment_ids: As for `attend`, at most `MOST_SEGMENTS` in a row. What comes after these gets
            NaN, so that no wrong number is taken for a result.
        options: Scale of the scores, and whether they are causal.

    Returns:
        The mixed values; 0 at padding, and so is the gradient there.

    Raises:
        ValueError: A window, a soft-cap or sinks are asked for.

    >>> x = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
    >>> attend_cudnn(x, x, x, jnp.array([[1, 1, 0]]), Attending(window=2))
    Traceback (most recent call last):
    ValueError: cuDNN's packed attention has no window, soft-cap or sinks, got window=2
    """
    names = ("window", "softcap", "sinks")
    if given := [f"{name}={x}" for name in names if (x := getattr(options, name)) is not None]:
        raise ValueError(
            f"cuDNN's packed attention has no window, soft-cap or sinks, got {', '.join(given)}"
        )
    # private: the public function takes no segments (jax pull request 29731 would let it)
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    sizes, starts, number = find_segments(segment_ids)
    real = (segment_ids != 0)[:, :, None, None]
    # the kernel leaves padding as it finds it, in results and in gradients
    q, k, v = (jnp.where(real, x, jnp.zeros_like(x)) for x in (q, k, v))
    mixed: Any = dot_product_attention(
        q,
        k,
        v,
        q_seqlen=sizes,
        kv_seqlen=sizes,
        q_offsets=starts,
        kv_offsets=starts,
        scale=q.shape[3] ** -0.5 if options.scale is None else options.scale,
        mask_type=MaskType.PADDING_CAUSAL if options.causal else MaskType.PADDING,
    )
    left_out = real & (number >= MOST_SEGMENTS)[:, :, None, None]
    mixed = jnp.where(real, mixed, jnp.zeros_like(mixed))
    return jnp.where(left_out, jnp.full_like(mixed, jnp.nan), mixed)


class DeviceInfo(NamedTuple):
    """What a kernel depends on.

    Attributes:
        platform: Of the devices: cuda, cpu, …
        capability: Of a CUDA device, as (9, 0); empty of others.
        jax: Version.
        is_here: Whether a kernel can be tried on it; False where programs are only compiled for it.
    """

    platform: str
    capability: tuple[int, ...]
    jax: tuple[int, ...]
    is_here: bool = True


def this_device() -> DeviceInfo:
    """Describe the first device of this process.

    >>> this_device().platform in ("cpu", "cuda", "gpu", "tpu")
    True
    """
    return _described(jax.local_devices()[0])


def device_of(layout: Layout) -> DeviceInfo:
    """Describe the devices of a layout, which are alike.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> device_of(Layout(make_mesh({}, jax.devices()[:1]))) == this_device()
    True
    """
    device = layout.mesh.devices.flat[0]
    return this_device() if device in jax.devices() else _described(device)._replace(is_here=False)


def _described(device: Any) -> DeviceInfo:
    version: tuple[int, ...] = jax.__version_info__
    # a device that is not there has its name where others have the version of CUDA
    names = device.platform == "gpu" and f"{device.client.platform_version} {device.device_kind}"
    if not names or not ("cuda" in names or "NVIDIA" in names):
        return DeviceInfo(device.platform, (), version)
    return DeviceInfo("cuda", tuple(map(int, device.compute_capability.split("."))), version)


def cuda_device(capability: str) -> DeviceInfo:
    """Describe an NVIDIA GPU that is not here.

    Args:
        capability: For which it is compiled.

    >>> cuda_device("9.0")[:2]
    ('cuda', (9, 0))
    """
    numbers = tuple(map(int, capability.split(".")))
    return DeviceInfo("cuda", numbers, jax.__version_info__, is_here=False)


class Heads(NamedTuple):
    """What attention is asked to do on one device.

    Attributes:
        queries: Number of query heads N.
        keys: Number of key/value heads K.
        width: Of a key, H.
        options: Scale, window and soft-cap of each kind of layer; one over packed rows.
        has_sinks: Whether query heads have sinks.
        latent: Of a cache, width of the values where they are the first numbers of the keys.
        is_int8: Whether a cache has keys and values in int8.
    """

    queries: int
    keys: int
    width: int
    options: tuple[Attending, ...]
    has_sinks: bool = False
    latent: int | None = None
    is_int8: bool = False


class KernelChoice(NamedTuple):
    """How a part of a model is computed in a run.

    Attributes:
        name: xla, or the kernel: cudnn or triton.
        reason: Why, in words.
        kernel: What computes it; None: XLA.
    """

    name: Literal["cudnn", "triton", "xla"]
    reason: str
    kernel: Any = None


def device_objection(
    device: DeviceInfo, least: tuple[int, ...], generation: str, *, verb: str = "it needs"
) -> str | None:
    """Return why a kernel can't run on a device, or None.

    >>> device_objection(DeviceInfo("cuda", (7, 5), (0, 11, 2)), (8, 0), "Ampere")
    'compute capability 7.5, it needs 8.0 (Ampere) or later'
    """
    if device.platform != "cuda":
        return f"the devices are {device.platform}, not cuda"
    if device.capability < least:
        own, needed = (".".join(map(str, numbers)) for numbers in (device.capability, least))
        return f"compute capability {own}, {verb} {needed} ({generation}) or later"
    return None


class Trial(NamedTuple):
    """How far a kernel may be off, and what its messages call it and its results."""

    tolerance: float
    kernel: str = "the kernel"
    results: str = "its results"
    unit: str = "a token's"
    passes: str = ", forward or backward"


def try_kernel(
    name: Literal["cudnn", "triton"],
    load: Callable[[], Any],
    difference: Callable[[Any], float],
    trial: Trial,
    *,
    untried: str | None = None,
) -> KernelChoice:
    """Take a kernel if it agrees with XLA.

    Args:
        name: Of the kernel.
        load: Returns it; where it can't be imported, that speaks against it.
        difference: How far its results are off.
        trial: What is allowed.
        untried: Why it is taken without a trial; None: it is tried.
    """
    try:
        kernel = load()
        if untried is not None:
            return KernelChoice(name, untried, kernel)
        off = difference(kernel)
    except Exception as error:  # whatever stops a kernel speaks against it
        message = (str(error).strip() or "no message").splitlines()[0]
        return KernelChoice("xla", f"{trial.kernel} failed: {type(error).__name__}: {message}")
    by = f"{trial.results} differ from XLA's in float32 by up to {off:.2%} of {trial.unit}"
    if not off <= trial.tolerance:
        rounding = f"{trial.passes}; at most {trial.tolerance:.0%} is rounding"
        return KernelChoice("xla", by + rounding)
    return KernelChoice(name, by, kernel)


def heads_on(spec: ModelSpec, layout: Layout) -> Heads | str:
    """Return what a device of a layout is asked to do, or why a kernel can't stand there.

    >>> from jaxrl_llm.sharding.layout import make_mesh
    >>> spec = tiny_spec(head_dim=4)
    >>> heads_on(spec, Layout(make_mesh({}, jax.devices()[:1])))[:3]
    (2, 1, 4)
    """
    if spec.attends_within_images:
        return "tokens of an image attend to those after them"
    if layout.stages > 1:
        return f"layers are split into stage={layout.stages} stages, which share one program"
    if layout.pieces > 1 and layout.context != "heads":
        shared = f"mesh.context_by={layout.context}"
        return f"context={layout.pieces} devices share a row's queries ({shared})"
    parts = layout.mesh.shape["tensor"] * layout.pieces
    keys = spec.kv_heads
    if layout.pieces > 1:  # attention by heads repeats keys until they can be split
        keys = next((n for n in range(keys, spec.heads + 1, keys) if n % parts == 0), keys)
    if spec.heads % parts or keys % parts:
        return f"{spec.kv_heads} key/value heads can't be split over tensor={parts} devices"
    options = Attending(spec.score_scale, spec.window, spec.score_softcap)
    heads = spec.heads // parts
    return Heads(heads, keys // parts, spec.head_dim, (options,), spec.attention_sinks)


def objection(heads: Heads, dtype: DTypeLike, device: DeviceInfo) -> str | None:
    """Return why cuDNN's packed kernel can't be used, or None if nothing speaks against trying it.

    >>> heads = Heads(16, 8, 128, (PLAIN,))
    >>> objection(heads, "bfloat16", DeviceInfo("cpu", (), (0, 11, 2)))
    'the devices are cpu, not cuda'
    >>> objection(heads, "bfloat16", DeviceInfo("cuda", (9, 0), (0, 11, 2)))
    """
    if against := device_objection(device, LEAST_CAPABILITY, "Hopper"):
        return against
    version, least = (".".join(map(str, numbers)) for numbers in (device.jax, LEAST_JAX))
    (options,) = heads.options
    reasons = {
        f"jax {version}, it needs {least} or later": device.jax < LEAST_JAX,
        f"the compute dtype is {jnp.dtype(dtype)}, it needs bfloat16 or float16": (
            jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16)
        ),
        f"heads are {heads.width} wide, it needs a multiple of 8 up to {WIDEST_HEAD}": (
            heads.width % 8 != 0 or heads.width > WIDEST_HEAD
        ),
        f"the model has a window of {options.window} tokens": options.window is not None,
        f"the model has a soft-cap of {options.softcap}": options.softcap is not None,
        "the model has attention sinks": heads.has_sinks,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def difference(kernel: Kernel, heads: Heads, dtype: DTypeLike) -> float:
    r"""Return how far a kernel is off on small packed rows, forward and backward.

    The rows have several segments, one token or sixteen segments or none at all, and padding; their
    numbers are random. With results $a_t$ of the kernel and $b_t$ of `attend` in float32, the
    mixed values and the three gradients of a token t, it is the largest
    $\lVert a_t - b_t \rVert / \max(\lVert b_t \rVert, \mathrm{rms}(b))$.

    Args:
        kernel: What is tried.
        heads: Sizes and scale to try it with.
        dtype: Of its inputs; `attend` gets the same numbers in float32.

    >>> difference(attend, Heads(2, 1, 8, (PLAIN,)), "float32")
    0.0
    """
    length = max(map(sum, TRIED))
    rows = [[i + 1 for i, n in enumerate(row) for _ in range(n)] for row in TRIED]
    segment_ids = jnp.array([row + [0] * (length - len(row)) for row in rows])
    sizes = (heads.queries, heads.keys, heads.keys, heads.queries)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    given = [
        jax.random.normal(key, (len(rows), length, n, heads.width)).astype(dtype)
        for key, n in zip(keys, sizes, strict=True)
    ]

    def results(kernel: Kernel, dtype: DTypeLike) -> list[Float32[Array, "R L n H"]]:
        def run(q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
            def mix(q: Array, k: Array, v: Array) -> Array:
                return kernel(q, k, v, segment_ids, heads.options[0])

            mixed, backward = jax.vjp(mix, q, k, v)
            return mixed, *backward(cotangent)

        outputs = jax.jit(run)(*(x.astype(dtype) for x in given))
        return [x.astype(jnp.float32) for x in outputs]

    with jax.default_matmul_precision("float32"):
        expected = results(attend, jnp.float32)
    got, real = results(kernel, dtype), segment_ids != 0
    # what is mixed at padding means nothing; gradients are 0 there
    everywhere = jnp.ones_like(real)
    return max(
        _furthest(a, b, where)
        for a, b, where in zip(got, expected, (real, *[everywhere] * 3), strict=True)
    )


def _furthest(
    got: Float32[Array, "R L n H"], expected: Float32[Array, "R L n H"], where: Bool[Array, "R L"]
) -> float:
    size, off = (jnp.sqrt(jnp.square(x).sum((2, 3))) for x in (expected, got - expected))
    usual = jnp.sqrt(jnp.mean(jnp.square(size), where=where))
    return float(jnp.max(jnp.where(where, off / jnp.maximum(size, usual), 0.0)))


def choose_kernel(
    asked: str,
    heads: Heads | str,
    dtype: DTypeLike,
    *,
    device: DeviceInfo,
    kernel: Kernel = attend_cudnn,
) -> KernelChoice:
    """Decide how a model, or its vision tower, attends to packed rows.

    cuDNN's kernel is taken where nothing speaks against it and it has just agreed with `attend` on
    this device, with this model's heads.

    Args:
        asked: xla, cudnn, or auto: cudnn where it is possible.
        heads: What a device is asked to do, or why a kernel can't do it, as `heads_on`.
        dtype: Of the computation.
        device: The devices.
        kernel: What is tried.

    Raises:
        ValueError: cudnn is asked for and not possible.

    >>> heads, cpu = Heads(16, 8, 128, (PLAIN,)), DeviceInfo("cpu", (), (0, 11, 2))
    >>> choose_kernel("auto", heads, "float32", device=cpu)
    KernelChoice(name='xla', reason='the devices are cpu, not cuda', kernel=None)
    """
    if asked == "xla":
        return KernelChoice("xla", "it was asked for")
    against = heads if isinstance(heads, str) else objection(heads, dtype, device)
    if against is None and isinstance(heads, Heads):
        trial = Trial(TOLERANCE, kernel="cuDNN's packed kernel")
        choice = try_kernel(
            "cudnn", lambda: kernel, lambda kernel: difference(kernel, heads, dtype), trial
        )
    else:
        choice = KernelChoice("xla", against or "")
    if asked == "cudnn" and choice.name != "cudnn":
        raise ValueError(
            f"cuDNN's packed kernel can't be used: {choice.reason}; expected auto or xla"
        )
    return choice
