"""Floating-point operations (FLOPs) of a model: of a forward pass, of an update, of one token.

Only what no implementation can do without is counted: two FLOPs for each number of a weight matrix
and token, and those of the products in attention and in the gated delta rule. Norms, activation
functions and softmax are left out, and so is what a program computes twice or for padding.
"""

import math
from collections.abc import Sequence

import jax

from jaxrl_llm.models.arrays import ArrayDecl
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.parameters import BLOCKS, declare_vision
from jaxrl_llm.models.vision.spec import VisionSpec


def active_parameters(spec: ModelSpec) -> tuple[int, int, int]:
    """Count the parameters that one token is multiplied with, those of a vision tower left out.

    Of experts those count that a token is sent to. Embeddings count as a head if they are tied to
    it, and not where tokens are only looked up in them.

    Returns:
        Their numbers in matrices of the layers, in the matrix of the output head, and in scales of
        norms and in biases.

    >>> spec = tiny_spec(layers=3, qk_norm=False)
    >>> active_parameters(spec)  # each layer has 48 in attention and 72 in the MLP
    (360, 32, 28)
    """
    declarations = declare(spec)
    embed = declarations.pop("embed")
    declarations.pop("vision", None)
    heads = [declarations.pop(name) for name in ("score", "head") if name in declarations]
    leaves = jax.tree.leaves(declarations, is_leaf=lambda leaf: isinstance(leaf, ArrayDecl))
    return (
        sum(_active(leaf, spec) for leaf in leaves if leaf.dimensions > 1),
        sum(_active(leaf, spec) for leaf in heads or [embed]),
        sum(_active(leaf, spec) for leaf in leaves if leaf.dimensions == 1),
    )


def _active(array: ArrayDecl, spec: ModelSpec) -> int:
    size = math.prod(array.shape)
    if spec.moe and "experts" in array.axes:
        return size // spec.moe.experts * spec.moe.experts_per_token
    return size


def forward_flops(
    spec: ModelSpec, tokens: int | float, pairs: int | float, *, scored: int | float | None = None
) -> int | float:
    r"""Count the FLOPs of a forward pass, $2\,(T P_{layers} + T_{scored} P_{head} + A + T D)$.

    Each of the pairs of a token and one that it attends to costs a product of keys and one of
    values in each layer with attention, so
    $A = \mathrm{pairs} \cdot \mathrm{layers} \cdot N (H_k + H_v)$; Kaplan et al. 2020, section 2.1
    (https://arxiv.org/abs/2001.08361). `delta_products` says D.

    Args:
        spec: The model.
        tokens: T, all of them.
        pairs: Of a token and one that it attends to, over all tokens; also in layers with a window.
        scored: Tokens whose logits are computed; None computes all.

    >>> spec = tiny_spec()
    >>> forward_flops(spec, 1, 0) == 2 * (4 * 8 + 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6)
    True
    >>> forward_flops(spec, 3, 6) - forward_flops(spec, 3, 6, scored=1) == 2 * 2 * 4 * 8
    True
    """
    layers, head, _ = active_parameters(spec)
    products = tokens * layers + (tokens if scored is None else scored) * head
    attending = spec.layers - sum(spec.delta_layers)
    products += tokens * delta_products(spec)
    return 2 * (products + pairs * attending * spec.heads * _widths(spec))


def delta_products(spec: ModelSpec) -> int:
    r"""Count the products that a token's memories take, besides those with parameters.

    In each layer with a DeltaNet each value head's matrix is multiplied by the key, changed by an
    outer product, and multiplied by the query, so $D = 3 \cdot \mathrm{layers} \cdot M K V$:
    equation 10 of Yang et al. 2024 (https://arxiv.org/abs/2412.06464). Its decay is left out, as
    norms are, and so is what chunks of tokens cost more.

    >>> from jaxrl_llm.models.delta import DeltaSpec
    >>> delta = DeltaSpec(key_heads=2, value_heads=4, key_width=8, value_width=6)
    >>> spec = tiny_spec(layers=3, delta=delta, delta_layers=(True, True, False))
    >>> delta_products(spec) == 2 * 3 * 4 * 8 * 6
    True
    """
    if spec.delta is None:
        return 0
    memory = spec.delta.value_heads * spec.delta.key_width * spec.delta.value_width
    return 3 * sum(spec.delta_layers) * memory


def _widths(spec: ModelSpec) -> int:
    """Return the width of a head's keys and values together."""
    if spec.latent is None:
        return 2 * spec.head_dim
    if spec.latent.absorbed:
        return 2 * spec.head_dim - spec.latent.rope_width
    return spec.latent.key_width + spec.latent.value_width


def update_flops(spec: ModelSpec, lengths: Sequence[int]) -> int | float:
    """Count the FLOPs of a forward and a backward pass, twice as many, over causal sequences.

    Args:
        spec: The model.
        lengths: Tokens of each sequence.

    >>> spec = tiny_spec()
    >>> update_flops(spec, [2]) - 2 * update_flops(spec, [1])  # one more pair, N = H = 2
    48
    """
    return 3 * forward_flops(spec, sum(lengths), causal_pairs(0, *lengths))


def tower_flops(spec: VisionSpec, grids: Sequence[tuple[int, int, int]]) -> int | float:
    r"""Count the FLOPs of a forward pass of a vision tower.

    They are those of `forward_flops` with patches for tokens, and of the matrices that make a
    feature of a token's patches. Patches attend to all of their frame or window.

    Args:
        spec: The tower.
        grids: Frames, height and width of each image or video, in patches.

    >>> spec = tiny_vision()
    >>> image, pairs = tower_flops(spec, [(1, 2, 4)]), 8 * 8
    >>> image == 2 * (8 * 24 * 8 + 8 * (4 + 2) * 8 * 8 + 2 * 32 * (32 + 4) + pairs * 2 * 8)
    True
    """
    declared = declare_vision(spec)
    patches = sum(math.prod(grid) for grid in grids)
    products, windowed = 0, 0 if spec.window is None else spec.layers - len(spec.full_layers)
    for name, array in declared.items():
        if array.dimensions > 1 and name != "positions":
            per_patch = BLOCKS in array.axes or name == "patches"
            products += math.prod(array.shape) * patches // (1 if per_patch else spec.group)
    for frames, height, width in grids:
        pairs = (spec.layers - windowed) * (height * width) ** 2
        if spec.window is not None:
            side = spec.window * spec.merge
            pairs += windowed * _squares(height, side) * _squares(width, side)
        products += frames * pairs * 2 * spec.hidden_size
    return 2 * products


def _squares(size: int, part: int) -> int:
    """Return the sum of the squares of the parts that a side is cut into."""
    return size // part * part**2 + (size % part) ** 2


def causal_pairs(start: int, *ends: int) -> int:
    """Count the pairs of tokens, each with itself and those before it, of causal sequences.

    Args:
        start: Tokens of each sequence that are left out as the attending ones, as they are cached.
        ends: Tokens of each sequence, those left out among them.

    >>> causal_pairs(0, 3), causal_pairs(2, 3), causal_pairs(0, 2, 3)
    (6, 3, 9)
    """
    return sum((end * (end + 1) - start * (start + 1)) // 2 for end in ends)
