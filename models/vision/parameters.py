"""The parameter arrays of a vision tower, as `models.parameters` declares those of a decoder."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.models.arrays import ONES, ZEROS, ArrayDecl, Declarations, HfPart, declarer
from jaxrl_llm.models.vision.spec import CHANNELS, VisionSpec

BLOCKS, MERGERS = "_blocks", "_mergers"
"""The leading axes of arrays that every block, or every merger for DeepStack, has."""


def declare_vision(spec: VisionSpec) -> Declarations:
    """Declare every parameter array of a vision tower.

    Blocks are stacked on axis 0, which no mesh axis splits. The logical names of other axes are
    those of the decoder, so that the same rules lay them out.

    Args:
        spec: The tower.

    Returns:
        A dict of `ArrayDecl` by name. Those with the axis `_blocks` are the blocks'; `merger_…` and
        `deep_…` make features of patches.

    Raises:
        ValueError: There is no tower of this kind.

    >>> spec = tiny_vision(layers=3, ff_width=12)
    >>> declare_vision(spec)["query"].shape, declare_vision(spec)["merger_up"].shape
    ((3, 8, 2, 4), (4, 8, 32))
    """
    if spec.kind not in _DECLARED:
        raise ValueError(f"a vision tower {spec.kind!r}; expected one of {sorted(_DECLARED)}")
    return _DECLARED[spec.kind](spec)


def _declare_qwen3(spec: VisionSpec) -> Declarations:
    array = _declarer(spec)
    arrays = _declare_patches(spec, bias=True) | {
        "positions": array(f"{spec.hf_prefix}pos_embed.weight", "_places embed", "_places embed")
    }
    at = f"{spec.hf_prefix}blocks.{{{BLOCKS}}}."
    for ours, theirs in (("attention_norm", "norm1"), ("mlp_norm", "norm2")):
        arrays |= _norm(array, ours, at + theirs, BLOCKS, "norm")
    arrays |= _declare_attention(spec)
    arrays |= _linear(array, "up", f"{at}mlp.linear_fc1", f"{BLOCKS} embed", "ff")
    arrays |= _linear(array, "down", f"{at}mlp.linear_fc2", f"{BLOCKS} ff", "embed")
    arrays |= _norm(array, "merger_norm", f"{spec.hf_prefix}merger.norm", "", "norm")
    names = (f"{spec.hf_prefix}merger.linear_fc1", f"{spec.hf_prefix}merger.linear_fc2")
    arrays |= _declare_merger(spec, "merger", names, "")
    if spec.deep_layers:
        at = f"{spec.hf_prefix}deepstack_merger_list.{{{MERGERS}}}."
        arrays |= _norm(array, "deep_norm", f"{at}norm", MERGERS, "_group*norm")
        names = (f"{at}linear_fc1", f"{at}linear_fc2")
        arrays |= _declare_merger(spec, "deep", names, MERGERS)
    return arrays


def _declare_qwen2_5(spec: VisionSpec) -> Declarations:
    array = _declarer(spec)
    arrays = _declare_patches(spec, bias=False) | _declare_attention(spec)
    at = f"{spec.hf_prefix}blocks.{{{BLOCKS}}}."
    for ours, theirs in (("attention_norm", "norm1"), ("mlp_norm", "norm2")):
        arrays |= _norm(array, ours, at + theirs, BLOCKS, "norm", bias=False)
    for ours, inputs, outputs in (
        ("gate", "embed", "ff"),
        ("up", "embed", "ff"),
        ("down", "ff", "embed"),
    ):
        arrays |= _linear(array, ours, f"{at}mlp.{ours}_proj", f"{BLOCKS} {inputs}", outputs)
    at = f"{spec.hf_prefix}merger."
    arrays |= _norm(array, "merger_norm", f"{at}ln_q", "", "norm", bias=False)
    # the activation between them is number 1
    names = (f"{at}mlp.0", f"{at}mlp.2")
    return arrays | _declare_merger(spec, "merger", names, "")


def _declare_siglip(spec: VisionSpec) -> Declarations:
    array, at = _declarer(spec), f"{spec.hf_prefix}embeddings."
    pixels = "embed _channels*_frames _height _width"
    arrays = {
        "patches": array(
            f"{at}patch_embedding.weight", "_channels _frames _height _width embed", pixels
        ),
        "patches_bias": array(f"{at}patch_embedding.bias", "norm", "norm", ZEROS),
        "positions": array(f"{at}position_embedding.weight", "_places embed", "_places embed"),
    }
    at = f"{spec.hf_prefix}encoder.layers.{{{BLOCKS}}}."
    for ours, theirs in (("attention_norm", "layer_norm1"), ("mlp_norm", "layer_norm2")):
        arrays |= _norm(array, ours, at + theirs, BLOCKS, "norm")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        name = f"{at}self_attn.{theirs}_proj"
        arrays |= _linear(array, ours, name, f"{BLOCKS} embed", "heads head_dim")
    name = f"{at}self_attn.out_proj"
    arrays |= _linear(array, "output", name, f"{BLOCKS} heads head_dim", "embed")
    arrays |= _linear(array, "up", f"{at}mlp.fc1", f"{BLOCKS} embed", "ff")
    arrays |= _linear(array, "down", f"{at}mlp.fc2", f"{BLOCKS} ff", "embed")
    arrays |= _norm(array, "post_norm", f"{spec.hf_prefix}post_layernorm", "", "norm")
    at = "multi_modal_projector.mm_"
    arrays["merger_norm"] = array(f"{at}soft_emb_norm.weight", "norm", "norm", ZEROS)  # of 1 + w
    array = _declarer(spec, ff=spec.hidden_size, embed=spec.out_size)
    arrays["merger"] = array(f"{at}input_projection_weight", "ff embed", "ff embed")
    return arrays


_DECLARED = {"qwen3": _declare_qwen3, "qwen2_5": _declare_qwen2_5, "siglip": _declare_siglip}


def _declarer(spec: VisionSpec, **own_sizes: int) -> Callable[..., ArrayDecl]:
    sizes = {
        BLOCKS: spec.layers,
        MERGERS: len(spec.deep_layers),
        "embed": spec.hidden_size,
        "norm": spec.hidden_size,
        "heads": spec.heads,
        "head_dim": spec.head_dim,
        "ff": spec.ff_width,
        "_places": spec.position_side**2,
        "_group": spec.group,
        "_channels": CHANNELS,
        "_frames": spec.frames_per_patch,
        "_height": spec.patch,
        "_width": spec.patch,
    } | own_sizes
    return declarer(sizes, jax.nn.initializers.normal(stddev=spec.init_std))


def _declare_patches(spec: VisionSpec, *, bias: bool) -> Declarations:
    array, at = _declarer(spec), f"{spec.hf_prefix}patch_embed.proj."
    pixels = "_channels _frames _height _width"
    arrays = {"patches": array(f"{at}weight", f"{pixels} embed", f"embed {pixels}")}
    if bias:
        arrays["patches_bias"] = array(f"{at}bias", "norm", "norm", ZEROS)
    return arrays


def _declare_attention(spec: VisionSpec) -> Declarations:
    array, at = _declarer(spec), f"{spec.hf_prefix}blocks.{{{BLOCKS}}}.attn."
    arrays = {}
    for i, name in enumerate(("query", "key", "value")):
        part = HfPart(("heads", "head_dim"), i * spec.hidden_size, 3 * spec.hidden_size)
        outputs = "heads head_dim"
        arrays |= _linear(array, name, f"{at}qkv", f"{BLOCKS} embed", outputs, hf_part=part)
    return arrays | _linear(array, "output", f"{at}proj", f"{BLOCKS} heads head_dim", "embed")


def _declare_merger(
    spec: VisionSpec, ours: str, theirs: tuple[str, str], stacked: str
) -> Declarations:
    """Declare the two matrices of a merger, from the patches of a token to a feature."""
    wide = spec.group * spec.hidden_size
    array = _declarer(spec, ff=wide)
    up = _linear(array, f"{ours}_up", theirs[0], f"{stacked} _group embed", "ff")
    array = _declarer(spec, ff=wide, embed=spec.out_size, norm=spec.out_size)
    return up | _linear(array, f"{ours}_down", theirs[1], f"{stacked} ff", "embed")


def _norm(
    array: Callable[..., ArrayDecl],
    ours: str,
    theirs: str,
    stacked: str,
    axes: str,
    *,
    bias: bool = True,
) -> Declarations:
    own = f"{stacked} {axes.replace('*', ' ')}"
    arrays = {ours: array(f"{theirs}.weight", own, axes, ONES)}
    return arrays | ({f"{ours}_bias": array(f"{theirs}.bias", own, axes, ZEROS)} if bias else {})


def _linear(
    array: Callable[..., ArrayDecl], ours: str, theirs: str, inputs: str, outputs: str, **part: Any
) -> Declarations:
    """Declare a matrix and its bias; stacked axes come first in `inputs`."""
    names = inputs.split()
    merged = [name for name in names if name not in (BLOCKS, MERGERS)]
    stacked = " ".join(name for name in names if name in (BLOCKS, MERGERS))
    rows, columns = "*".join(outputs.split()), "*".join(merged)
    own = "norm" if outputs == "embed" else outputs
    hf_own = "norm" if outputs == "embed" else rows
    return {
        ours: array(f"{theirs}.weight", f"{inputs} {outputs}", f"{rows} {columns}", **part),
        f"{ours}_bias": array(f"{theirs}.bias", f"{stacked} {own}", hf_own, ZEROS, **part),
    }
