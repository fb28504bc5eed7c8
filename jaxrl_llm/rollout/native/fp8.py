"""Whether the native engine can multiply in float8."""

import logging
from typing import Any

import jax

from jaxrl_llm.compiler_options import is_gpu
from jaxrl_llm.models.capabilities import QuantizableModel
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.quantization import is_quantized

FP8_CAPABILITY = 8.9
"""The least compute capability of NVIDIA's GPUs that multiply float8 numbers."""

log = logging.getLogger(__name__)


def check_fp8(model: Model, device: Any) -> None:
    """Refuse a model or a GPU that has no float8 products; log where they are slow.

    Raises:
        ValueError: there are none.
    """
    declared = model.declare_quantized() if isinstance(model, QuantizableModel) else {}
    if not any(map(is_quantized, jax.tree.leaves(declared, is_leaf=is_quantized))):
        raise ValueError(f"expected a model with matrices in float8, got {type(model).__name__}")
    if not is_gpu(device):
        log.warning(
            "rollout.quantization=fp8 on %s: its float8 products are slow, and for tests",
            device.platform,
        )
        return
    capability = float(device.compute_capability)
    if device.platform != "rocm" and capability < FP8_CAPABILITY:
        raise ValueError(
            f"rollout.quantization=fp8 needs GPUs of compute capability {FP8_CAPABILITY} or more "
            f"(Ada, Hopper and later); {device.device_kind} has {capability}"
        )
