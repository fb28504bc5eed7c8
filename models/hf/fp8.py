"""Checkpoints in block-wise float8, as those of DeepSeek-V3 and Qwen3-FP8, which vLLM reads.

A matrix `X.weight` [out in] is float8_e4m3fn, and `X.weight_scale_inv` has a float32 for each of
its blocks of 128 × 128: weight = value × the scale of its block (DeepSeek-V3, section 3.3,
https://arxiv.org/abs/2412.19437). Embedding, head, routers, norms and biases are as ever.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxrl_llm.models.arrays import ArrayDecl
from jaxrl_llm.models.hf.quantized import SCALE_SUFFIX
from jaxrl_llm.models.hf.save import host_arrays, join_parts, joined, to_hf
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.quantization import PRECISE_AXES, round_to_fp8
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.distributed import replicate

BLOCK = 128


def is_blocked(declaration: ArrayDecl) -> bool:
    """Tell whether an array is a layer's matrix, of an expert or not, and no router.

    Those of a DeltaNet stay, too, as its state sums up what they lose over all tokens, and so do
    gates of one output, and experts that a checkpoint joins in one array.
    """
    return _is_matrix(declaration) and not PRECISE_AXES & set(declaration.axes)


def _is_matrix(declaration: ArrayDecl) -> bool:
    return declaration.is_stack and len(declaration.hf_axes) == declaration.dimensions == 2


def quantization_config(spec: ModelSpec) -> dict[str, Any]:
    """Return what `config.json` says of such a checkpoint.

    >>> quantization_config(tiny_spec())["modules_to_not_convert"]
    ['lm_head', 'model.embed_tokens']
    """
    kept = [
        name.removesuffix(".weight")
        for decl in jax.tree.leaves(declare(spec))
        if _is_matrix(decl) and not is_blocked(decl)
        for name, _ in decl.hf_indices()
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", *dict.fromkeys(kept)],
    }


def check_block_shapes(spec: ModelSpec, tensor_parallel: int) -> None:
    """Check that blocks don't lie across the parts in which vLLM holds matrices.

    It joins query, key and value, and gate and up, and cuts them for its GPUs.

    Args:
        spec: The model.
        tensor_parallel: GPUs that share a copy of it.

    Raises:
        ValueError: A part is no multiple of 128 wide, or a checkpoint has a layer's experts in one
            array, which stays in bfloat16, while vLLM would take it for float8.

    >>> check_block_shapes(tiny_spec(head_dim=128, ff_width=256), 1)
    """
    if any(leaf.hf_axes[0] == ("experts",) for leaf in jax.tree.leaves(declare(spec))):
        raise ValueError(
            "vLLM's float8 needs experts whose matrices have names of their own in a checkpoint, "
            "this model's are joined: expected rollout.quantization: none"
        )
    parts = {}
    if spec.latent is None:
        parts["the queries"] = spec.heads * spec.head_dim / tensor_parallel
        parts["the keys"] = spec.head_dim * max(1, spec.kv_heads / tensor_parallel)
    else:
        parts["the values"] = spec.heads * spec.latent.value_width / tensor_parallel
    if spec.moe is None or spec.moe.dense_layers:
        parts["the feed-forward"] = spec.ff_width / tensor_parallel
    if spec.moe is not None:
        parts["an expert"] = spec.moe.ff_width / tensor_parallel
        if spec.moe.shared_ff_width:
            parts["the shared experts"] = spec.moe.shared_ff_width / tensor_parallel
    for name, width in parts.items():
        if width % BLOCK:
            raise ValueError(
                f"vLLM's float8 has blocks of {BLOCK}: expected a multiple of it as the width of "
                f"{name} on each of {tensor_parallel} GPUs, got {width:g}"
            )


def quantize_blocks(matrix: Float[Array, "*B out in"]) -> tuple[Array, Array]:
    r"""Quantize matrices by blocks: $s = \max |W| / 448$ and $V = \mathrm{e4m3}(W / s)$ of each.

    Blocks at the right and lower edges may be smaller.

    Args:
        matrix: One or more, in a checkpoint's form.

    Returns:
        The values [*B out in] and the scales [*B ⌈out/128⌉ ⌈in/128⌉], float32.

    >>> values, scale = quantize_blocks(jnp.ones((130, 300)))
    >>> values.dtype, values.shape, scale.shape
    (dtype(float8_e4m3fn), (130, 300), (2, 3))
    """
    *batch, rows, columns = matrix.shape
    room = [(0, 0)] * len(batch) + [(0, -rows % BLOCK), (0, -columns % BLOCK)]
    padded = jnp.pad(matrix, room)
    high, wide = padded.shape[-2] // BLOCK, padded.shape[-1] // BLOCK
    blocks = padded.reshape(*batch, high, BLOCK, wide, BLOCK)
    values, scale = round_to_fp8(blocks, (-3, -1))
    values = values.reshape(padded.shape)[..., :rows, :columns]
    return values, scale.reshape(*batch, high, wide)


def blocked_host_arrays(
    leaves: Iterable[tuple[ArrayDecl, Any, DTypeLike]],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a checkpoint's arrays by name, as `host_arrays`; quantized on their devices.

    The scales of a matrix follow it. One layer of one array is on the host at once. Blocks are
    those of the array in the checkpoint, also where ours are parts of it.

    Args:
        leaves: Our arrays with their declarations, and the dtype of the computation, to which
            they are rounded first.
    """
    for parts in joined(leaves):
        declarations = tuple(declaration for declaration, *_ in parts)
        first = declarations[0]
        if not is_blocked(first):
            yield from host_arrays(parts)
            continue
        for layer, names in groupby(first.hf_indices(), key=lambda named: named[1][0]):
            stacks, index = [leaf for _, leaf, _ in parts], layer
            if not isinstance(stacks[0], jax.Array):  # of the host: no more than this layer travels
                stacks, index = [stack[layer : layer + 1] for stack in stacks], 0
            pair = _quantize_layer(stacks, index, np.dtype(parts[0][2]), declarations)
            values, scale = (np.asarray(replicate(x)) for x in pair)
            for name, (_, *expert) in names:
                yield name, values[tuple(expert)]
                yield name + SCALE_SUFFIX, scale[tuple(expert)]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _quantize_layer(
    stacks: Sequence[Array], layer: ArrayLike, dtype: np.dtype, declarations: tuple[ArrayDecl, ...]
) -> tuple[Array, Array]:
    """Quantize one layer, or all experts of it, in the form of a checkpoint."""

    def whole(*parts: Array) -> Array:
        return join_parts(declarations, map(to_hf, declarations, parts))

    for _ in declarations[0].stacked[1:]:
        whole = jax.vmap(whole)
    parts = [jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False) for stack in stacks]
    return quantize_blocks(whole(*(part.astype(dtype) for part in parts)))
