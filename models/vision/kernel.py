"""Whether a vision tower may attend by cuDNN's kernel."""

from jax.typing import DTypeLike

from jaxrl_llm.models.attention import Attending
from jaxrl_llm.models.kernels import (
    DeviceInfo,
    Heads,
    Kernel,
    KernelChoice,
    attend_cudnn,
    objection,
    try_kernel,
)
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.sharding.layout import Layout

WHOLE_FRAMES = Attending(causal=False)


def tower_heads_on(spec: VisionSpec, layout: Layout) -> Heads | str:
    """Return what a device of a layout is asked to do, or why a kernel can't stand there.

    >>> import jax
    >>> from jaxrl_llm.sharding.mesh import make_mesh
    >>> spec = VisionSpec(kind="qwen3", layers=1, hidden_size=16, heads=2, ff_width=8, patch=2,
    ...                   frames_per_patch=2, merge=2, out_size=4, position_side=4, image_id=1,
    ...                   image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))
    >>> tower_heads_on(spec, Layout(make_mesh({}, jax.devices()[:1])))[:3]
    (2, 2, 8)
    """
    parts = layout.mesh.shape["tensor"] * layout.pieces
    if spec.heads % parts:
        return f"{spec.heads} heads can't be split over {parts} devices"
    heads = spec.heads // parts
    return Heads(heads, heads, spec.head_dim, WHOLE_FRAMES)


def choose_tower_kernel(
    asked: str,
    spec: VisionSpec,
    layout: Layout,
    dtype: DTypeLike,
    *,
    device: DeviceInfo,
    kernel: Kernel = attend_cudnn,
) -> KernelChoice:
    """Decide how a vision tower attends within frames, as `models.kernels.choose_kernel`.

    It is decided for the tower alone: where cuDNN is asked for and can serve the decoder only, the
    tower takes XLA.

    Args:
        asked: xla, cudnn or auto.
        spec: The tower.
        layout: Where it runs.
        dtype: Of the computation.
        device: The devices.
        kernel: What is tried.

    >>> import jax
    >>> from jaxrl_llm.sharding.mesh import make_mesh
    >>> spec = VisionSpec(kind="qwen3", layers=1, hidden_size=16, heads=2, ff_width=8, patch=2,
    ...                   frames_per_patch=2, merge=2, out_size=4, position_side=4, image_id=1,
    ...                   image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> cpu = DeviceInfo("cpu", (), (0, 11, 2))
    >>> choose_tower_kernel("auto", spec, layout, "bfloat16", device=cpu).reason
    'the devices are cpu, not cuda'
    """
    if asked == "xla":
        return KernelChoice("xla", "it was asked for")
    heads = tower_heads_on(spec, layout)
    if isinstance(heads, str):
        return KernelChoice("xla", heads)
    against, agreed = objection(heads, dtype, device), ""
    if against is None:
        against, agreed = try_kernel(kernel, heads, dtype)
    return (
        KernelChoice("cudnn", agreed, kernel) if against is None else KernelChoice("xla", against)
    )
