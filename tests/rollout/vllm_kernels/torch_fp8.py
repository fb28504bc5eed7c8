"""A float8 kernel for vLLM on CPUs without AMX, in torch: for tests, in vLLM's environment."""

import torch
from jaxrl_worker import Worker  # what vLLM is to find here
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import PlatformEnum

__all__ = ["Worker"]


class TorchKernel(Fp8BlockScaledMMLinearKernel):
    """Lays weights out anew once they are loaded, as those of GPUs do: no others can be loaded."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        for name in ("weight", "weight_scale_inv"):
            turned = getattr(layer, name).data.t().contiguous()
            replace_parameter(layer, name, torch.nn.Parameter(turned, requires_grad=False))

    def apply_weights(self, layer, x, bias=None, **kwargs):
        rows, columns = layer.weight.shape  # [in out]
        scale = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        matrix = layer.weight.float() * scale[:rows, :columns]
        y = (x.float() @ matrix).to(x.dtype)
        return y if bias is None else y + bias

    def apply_block_scaled_mm(self, A, B, As, Bs):
        raise NotImplementedError


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [TorchKernel]
