"""Whether a vision tower may attend by cuDNN's kernel."""

from jax.typing import DTypeLike

from jaxrl_llm.models.attention import Attending
from jaxrl_llm.models.kernels import (
    DeviceInfo,
    Heads,
    Kernel,
    KernelChoice,
    attend_cudnn,
    choose_for_heads,
)
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.sharding.layout import Layout

WHOLE_FRAMES = Attending(causal=False)


def tower_heads_on(spec: VisionSpec, layout: Layout) -> Heads | str:
    """Return what a device of a layout is asked to do, or why a kernel can't stand there.

    >>> import jax
    >>> from jaxrl_llm.sharding.mesh import make_mesh
    >>> spec = tiny_vision(hidden_size=16)
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
    >>> spec = tiny_vision(hidden_size=16)
    >>> layout = Layout(make_mesh({}, jax.devices()[:1]))
    >>> cpu = DeviceInfo("cpu", (), (0, 11, 2))
    >>> choose_tower_kernel("auto", spec, layout, "bfloat16", device=cpu).reason
    'the devices are cpu, not cuda'
    """
    if asked == "xla":
        return KernelChoice("xla", "it was asked for")
    return choose_for_heads(tower_heads_on(spec, layout), dtype, device=device, kernel=kernel)
