"""Which kernels a run takes, decided once for each kind of model, in all processes alike.

A kernel is taken where it is possible in all processes; what is decided is logged once.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.models.kernels import (
    GroupedKernels,
    KernelChoice,
    choose_kernel,
    device_of,
    heads_on,
    this_device,
)
from jaxrl_llm.models.moe.grouped import choose_grouped_kernels, grouped_widths
from jaxrl_llm.models.paged_attention import choose_paged_kernel, paged_heads
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import tower_heads_on
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout

log = logging.getLogger(__name__)

_DECIDED: dict[tuple[Any, ...], KernelChoice] = {}

_DECIDING = threading.Lock()  # steps are also lowered by the thread that compiles ahead


def choose_attention(asked: str, spec: ModelSpec, layout: Layout, dtype: str) -> KernelChoice:
    """Decide how a model attends to packed rows in training.

    Args:
        asked: `model.attention`.
        spec: the model.
        layout: where it runs.
        dtype: of the computation.

    Raises:
        ConfigError: model.attention=cudnn, which is not possible.
    """
    heads = heads_on(spec, layout)
    return _decide(
        ("attention", asked, dtype, heads),
        lambda: choose_kernel(asked, heads, dtype, device=this_device()),
    )


def choose_tower_attention(
    asked: str, spec: VisionSpec, layout: Layout, dtype: str
) -> KernelChoice:
    """Decide how a vision tower attends in training, as `choose_attention`.

    It is decided for the tower alone: where cuDNN is asked for and can serve the decoder only, the
    tower takes XLA.
    """
    heads, wish = tower_heads_on(spec, layout), "xla" if asked == "xla" else "auto"
    return _decide(
        ("vision", asked, dtype, heads),
        lambda: choose_kernel(wish, heads, dtype, device=this_device()),
    )


def choose_experts(
    asked: str, spec: ModelSpec, layout: Layout, dtype: str
) -> GroupedKernels | None:
    """Decide what multiplies rows of experts, if a model has any; None: XLA.

    Args:
        asked: `model.experts`.
        spec: the model.
        layout: where it runs.
        dtype: of the computation.

    Raises:
        ConfigError: model.experts=triton, which is not possible.
    """
    if spec.moe is None:
        return None
    device = device_of(layout)
    return _decide(
        ("experts", asked, dtype, grouped_widths(spec, layout), layout.stages > 1, device),
        lambda: choose_grouped_kernels(asked, spec, layout, dtype, device=device),
    ).kernel


def choose_cache_kernel(
    asked: str, spec: ModelSpec, layout: Layout, dtype: str, *, is_int8: bool = False
) -> KernelChoice:
    """Decide how the native engine reads its cache in decoding.

    Args:
        asked: `model.attention`: xla, or else the kernel where it is possible.
        spec: the model.
        layout: how sequences are split.
        dtype: of the engine.
        is_int8: whether keys and values are in int8.
    """
    return _decide(
        ("decoding", asked, dtype, is_int8, paged_heads(spec, layout)),
        lambda: choose_paged_kernel(
            asked, spec, layout, dtype, device=this_device(), is_int8=is_int8
        ),
    )


def _decide(case: tuple[Any, ...], choose: Callable[[], KernelChoice]) -> KernelChoice:
    """Decide a case that begins with a name and what was asked for, unless it is decided.

    A CPU has no kernels to choose from, so there the log is for who looks for it.
    """
    name, asked, *_ = case
    with _DECIDING:
        if case not in _DECIDED:
            with config_errors_at(f"model.{name}={asked}"):  # the others are never refused
                own = choose()
            others = distributed.all_gather((own.name, own.reason))
            against = [reason for kernel, reason in others if kernel == "xla"]
            _DECIDED[case] = KernelChoice("xla", against[0]) if against else own
            level = logging.DEBUG if this_device().platform == "cpu" else logging.INFO
            log.log(level, "%s by %s: %s", name, *_DECIDED[case][:2])
        return _DECIDED[case]
