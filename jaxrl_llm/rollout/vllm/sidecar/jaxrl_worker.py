"""What this library adds to vLLM's worker: weights from a map of bytes, and log-probs.

It runs in vLLM's environment, in the process that holds the model: vLLM imports it before it loads
the model, as its `worker_extension_cls`.
"""

import ctypes
import functools
import logging
import mmap
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.sample.sampler import Sampler

PR_SET_PDEATHSIG = 1
GREEDY_BELOW = 1e-5  # a temperature, as vLLM has it

# at each weight sync it warns of tables without weights and of tied heads, where
# `Worker._missing` knows better
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# whoever kills the sidecar kills this process, too: else it would hold its memory for ever
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class TrainersSampler(Sampler):
    """Reports log-probs under softmax(logits / temperature), as the trainer computes them.

    vLLM itself has log-probs before the temperature, or after top-k, top-p and min-p have cut the
    distribution, and neither is what the policy's loss is about. Penalties and biases of logits
    don't count: they are no part of the policy. Placeholder tokens of images, which only prompts
    hold, are left out of the softmax, and never drawn.

    Args:
        never: ids of these.
    """

    def __init__(self, never: Sequence[int] = ()) -> None:
        """Report log-probs of the logits as the model gives them."""
        super().__init__("raw_logprobs")
        self._never = list(never)
        self._heat: torch.Tensor | None = None  # of each row; None: no row is heated

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *rest: Any) -> Any:
        """Draw as vLLM does."""
        self._heat = sampling_metadata.temperature
        if self._never:
            logits[:, self._never] = float("-inf")
        try:
            return super().forward(logits, sampling_metadata, *rest)
        finally:
            self._heat = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:  # in vLLM a static method
        """Return log-softmax [rows V] of logits over temperatures; greedy rows have none."""
        if self._heat is not None:
            heat = torch.where(self._heat < GREEDY_BELOW, 1.0, self._heat)
            logits = logits.to(torch.float32) / heat.unsqueeze(1)
        return logits.log_softmax(dim=-1, dtype=torch.float32)


def answered(method: Callable[..., dict[str, int]]) -> Callable[..., dict[str, Any]]:
    """Let a worker's method answer with its `checksums` or with its `error`, and never raise.

    Where one rank raises, vLLM does not fetch the answers of the others, and takes them for those
    to its next question.
    """

    @functools.wraps(method)
    def safe(self: Any, *args: Any) -> dict[str, Any]:
        try:
            return {"checksums": method(self, *args)}
        except Exception as error:
            logging.getLogger(__name__).exception("%s failed", method.__name__)
            return {"error": "".join(traceback.format_exception_only(error)).strip()}

    return safe


class Worker:
    """Methods of vLLM's worker; `self` has its attributes besides."""

    model_runner: Any
    model_config: Any

    def jaxrl_prepare(self, never: Sequence[int] = ()) -> None:
        """Report the trainer's log-probs from now on.

        Args:
            never: ids of tokens that are not drawn.
        """
        runner = self.model_runner
        if type(runner.sampler) is not Sampler:
            raise TypeError(f"vLLM samples by {type(runner.sampler)}, expected {Sampler}")
        if hasattr(runner, "rejection_sampler"):  # which has a sampler of its own
            raise TypeError(
                "got a speculative_config in rollout.vllm.engine_args, expected none: the "
                "log-probs of speculative decoding are not those of the policy"
            )
        runner.sampler = TrainersSampler(never)

    @answered
    def jaxrl_start(self) -> dict[str, int]:
        """Get ready for new weights; what has come of others, and is not whole, is dropped."""
        infos = [get_layerwise_info(layer) for layer in self._model().modules()]
        if any(info.can_load() for info in infos):  # else vLLM would count what came before
            for info in infos:
                info.load_numel = 0
                info.loaded_weights.clear()
            self._finish()
        initialize_layerwise_reload(self._model())
        return {}

    @answered
    def jaxrl_take(self, path: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Take some arrays of the model; return the checksum of each as it lies in the map.

        Args:
            path: of the map of bytes.
            entries: the name, dtype, shape and place of each array.
        """
        tensors = read(path, entries)
        checksums = {name: crc32(tensor) for name, tensor in tensors}
        self._model().load_weights(iter(tensors))
        return checksums

    @answered
    def jaxrl_finish(self, path: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Use the new weights; return the checksums of those that the model keeps as they came.

        Args:
            path: of the map of bytes.
            entries: of all arrays of the model.

        Raises:
            ValueError: arrays of the model did not come, or it does not hold what came.
        """
        try:
            missing = sorted(self._missing())
        finally:
            self._finish()
        if missing:
            raise ValueError(f"no weights came for {', '.join(missing)}")
        held, checksums = dict(self._model().named_parameters()), {}
        for entry in entries:
            if entry["dtype"] == "float8_e4m3fn" or entry["name"].endswith("_scale_inv"):
                continue  # kernels may turn them into others of the same shape
            ours = held.get(entry["name"])
            form = None if ours is None else (list(ours.shape), str(ours.dtype))
            if ours is not None and form == (list(entry["shape"]), f"torch.{entry['dtype']}"):
                checksums[entry["name"]] = crc32(ours.data)
        return checksums

    def _model(self) -> Any:
        return self.model_runner.get_model()

    def _missing(self) -> Iterator[str]:
        """Name the layers that don't have all their weights yet."""
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        for name, layer in self._model().named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or info.load_numel >= info.load_numel_total:
                continue
            if is_deferred_attention_layer(layer) or not info.restore_metadata[0]:
                continue  # scales that vLLM sets itself, and tables without weights
            padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
            if not padded and not (tied and name.endswith("lm_head")):
                yield f"{name} ({info.load_numel} of {info.load_numel_total} numbers)"

    def _finish(self) -> None:
        finalize_layerwise_reload(self._model(), self.model_config)
        refresh_packed(self._model())


def refresh_packed(model: Any) -> None:
    """Pack again what vLLM keeps in a form of its own on CPUs.

    A head that shares the embedding's weights has a packed copy of them, which vLLM does not make
    anew when the embedding is loaded: without this its logits would be those of old weights.
    """
    for layer in model.modules():
        packed = hasattr(layer, "cpu_linear") and hasattr(layer, "quant_method")
        weight = getattr(layer, "weight", None)
        if packed and weight is not None and weight.numel() > 0:
            layer.quant_method.process_weights_after_loading(layer)


def read(path: str, entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Map arrays that lie side by side into memory; they are views of what lies there."""
    first, end = entries[0]["offset"], entries[-1]["offset"] + entries[-1]["bytes"]
    first -= first % mmap.ALLOCATIONGRANULARITY
    with Path(path).open("rb") as file:
        # private: torch wants memory that can be written; nothing is
        view = mmap.mmap(
            file.fileno(),
            end - first,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=first,
        )
    tensors = []
    for entry in entries:
        kind = getattr(torch, entry["dtype"])
        count = 1
        for side in entry["shape"]:
            count *= side
        flat = torch.frombuffer(view, dtype=kind, count=count, offset=entry["offset"] - first)
        tensors.append((entry["name"], flat.reshape(entry["shape"])))
    return tensors


def crc32(tensor: torch.Tensor) -> int:
    """Return the checksum of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy())
