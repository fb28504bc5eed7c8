"""Which kernels a run takes, decided once for each kind of model, in all processes alike."""

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.models.kernels import KernelChoice, choose_kernel, device_of, heads_on, this_device
from jaxrl_llm.models.moe.grouped import GroupedKernels
from jaxrl_llm.models.moe.grouped_kernel import (
    GroupedChoice,
    choose_grouped_kernels,
    grouped_shapes,
)
from jaxrl_llm.models.paged_kernel import PagedChoice, choose_paged_kernel, paged_heads
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import choose_tower_kernel, tower_heads_on
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout

log = logging.getLogger(__name__)

Choice = TypeVar("Choice", KernelChoice, GroupedChoice, PagedChoice)

_DECIDED: dict[tuple[Any, ...], Any] = {}

_DECIDING = threading.Lock()  # steps are also lowered by the thread that compiles ahead


def choose_attention(asked: str, spec: ModelSpec, layout: Layout, dtype: str) -> KernelChoice:
    """Decide how a model attends to packed rows in training, and log it, once.

    Several processes decide alike: cuDNN's kernel is taken where it is possible in all of them.

    Args:
        asked: `model.attention`.
        spec: the model.
        layout: where it runs.
        dtype: of the computation.

    Raises:
        ConfigError: model.attention=cudnn, which is not possible.
    """
    case = "attention", asked, dtype, heads_on(spec, layout)
    return _decide(case, lambda: choose_kernel(asked, spec, layout, dtype, device=this_device()))


def choose_tower_attention(
    asked: str, spec: VisionSpec, layout: Layout, dtype: str
) -> KernelChoice:
    """Decide how a vision tower attends in training, and log it, once, as `choose_attention`.

    Args:
        asked: `model.attention`; for the tower, cudnn means where it is possible.
        spec: the tower.
        layout: where it runs.
        dtype: of the computation.
    """
    case = "vision", asked, dtype, tower_heads_on(spec, layout)
    return _decide(
        case, lambda: choose_tower_kernel(asked, spec, layout, dtype, device=this_device())
    )


def choose_experts(
    asked: str, spec: ModelSpec, layout: Layout, dtype: str
) -> GroupedKernels | None:
    """Decide what multiplies rows of experts, if a model has any, and log it, once.

    Several processes decide alike: Triton's kernels are taken where they are possible in all of
    them.

    Args:
        asked: `model.experts`.
        spec: the model.
        layout: where it runs.
        dtype: of the computation.

    Returns:
        The kernels; None for XLA's.

    Raises:
        ConfigError: model.experts=triton, which is not possible.
    """
    if spec.moe is None:
        return None
    device = device_of(layout)
    case = "experts", asked, dtype, grouped_shapes(spec, layout), device
    return _decide(
        case, lambda: choose_grouped_kernels(asked, spec, layout, dtype, device=device)
    ).kernels


def choose_cache_kernel(
    asked: str, spec: ModelSpec, layout: Layout, dtype: str, *, is_int8: bool = False
) -> PagedChoice:
    """Decide how the native engine reads its cache in decoding, and log it, once.

    Several processes decide alike: the kernel is taken where it is possible in all of them.

    Args:
        asked: `model.attention`: xla, or else the kernel where it is possible.
        spec: the model.
        layout: how sequences are split.
        dtype: of the engine.
        is_int8: whether keys and values are in int8.
    """
    case = "decoding", asked, dtype, is_int8, paged_heads(spec, layout)
    return _decide(
        case,
        lambda: choose_paged_kernel(
            asked, spec, layout, dtype, device=this_device(), is_int8=is_int8
        ),
    )


def _decide(case: tuple[Any, ...], choose: Callable[[], Choice]) -> Choice:
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
            _DECIDED[case] = type(own)("xla", against[0]) if against else own
            level = logging.DEBUG if this_device().platform == "cpu" else logging.INFO
            log.log(level, "%s by %s: %s", name, *_DECIDED[case][:2])
        return _DECIDED[case]
