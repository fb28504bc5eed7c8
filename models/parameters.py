"""The parameter arrays of a model: declared, initialized, counted.

`declare(spec)` is the single source of shapes, logical axes, initializers and Hugging Face names.
Initialization, sharding, loading and saving all read it and know nothing else about a model.
Arrays that every layer has are stacked on a leading axis `layers`, so that a model is one scan.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key, UInt32

from jaxrl_llm.models.arrays import (
    DECAYS,
    ONES,
    ZEROS,
    ArrayDecl,
    Declarations,
    HfPart,
    Initializer,
    Params,
    declarer,
)
from jaxrl_llm.models.moe.routing import SigmoidRouter
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.vision.parameters import declare_vision

A, B = "_lora_a", "_lora_b"
ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."


# Declarations of the arrays of low-rank adapters.
#
# A and B of the array `query` are the arrays `query_lora_a` and `query_lora_b` beside it. Their
# Hugging Face names and shapes are those of the `peft` library, so that adapters go from one to
# the other. Arrays that are parts of one matrix in a checkpoint, which has one A there, share the
# A of the first of them.


def declare_lora(declarations: Declarations, spec: ModelSpec) -> Declarations:
    """Add the two arrays of each adapted matrix to a model's declarations.

    A begins uniform within ±1/√inputs and B at zero, as `peft`'s do (its Kaiming-uniform with
    a = √5), so that an adapter changes nothing at first.

    Args:
        declarations: Of the model without an adapter.
        spec: The model; `spec.lora.targets` are names of arrays, as `find_targets` gives them.

    Returns:
        The declarations, with `{name}_lora_b` beside each target and `{name}_lora_a` beside each
        that is the first part of its matrix.

    Raises:
        ValueError: There is no adapter, or a target is no matrix that can have one.

    >>> spec = tiny_spec(layers=3)
    >>> from jaxrl_llm.models.parameters import declare
    >>> from jaxrl_llm.models.spec import LoraSpec
    >>> lora = LoraSpec(rank=2, alpha=4.0, targets=("query",))
    >>> layers = declare(dataclasses.replace(spec, lora=lora))["layers"]
    >>> layers["query_lora_a"].shape, layers["query_lora_b"].shape
    ((3, 4, 2), (3, 2, 2, 2))
    """
    if spec.lora is None:
        raise ValueError("the spec has no adapter; expected spec.lora")
    rank, targets = spec.lora.rank, spec.lora.targets
    able = adaptable(declarations)
    wrong = sorted(set(targets) - able.keys())
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} is no matrix that can have an adapter; {target_options(able)}"
        )
    modules = {able[target] for target in targets}
    if missing := sorted(name for name in able.keys() - set(targets) if able[name] in modules):
        raise ValueError(f"{missing} are parts of matrices that have an adapter; expected them too")

    added: Declarations = {}
    for name, group in declarations.items():
        if isinstance(group, dict):
            added[name] = dict(group)
            for target, first in first_parts(group).items():
                if target in targets:
                    pair = _declare_pair(target, group[target], rank)
                    added[name] |= pair if target == first else {target + B: pair[target + B]}
    return declarations | added


def _is_adaptable(decl: ArrayDecl) -> bool:
    """Say whether an array is a matrix in every layer, or in every expert of one; no router is.

    Nor are experts that a checkpoint joins in one array: `peft` adapts modules.
    """
    is_matrix = len(decl.hf_axes) == decl.dimensions == 2
    return "layers" in decl.stacked and is_matrix and "routes" not in decl.axes


def adaptable(declarations: Declarations) -> dict[str, str]:
    """Return the names of the matrices that can have an adapter, with their modules' paths."""
    return {
        name: decl.hf_name.removesuffix(".weight")
        for group in declarations.values()
        if isinstance(group, dict)
        for name, decl in group.items()
        if _is_adaptable(decl)
    }


def first_parts(group: Declarations) -> dict[str, str]:
    """Return, for each matrix of a stack, the first that is a part of the same in a checkpoint.

    That is the array itself unless it is such a part; an adapter's A stands beside the first.
    """
    able = {name: decl.hf_name for name, decl in group.items() if _is_adaptable(decl)}
    firsts: dict[str, str] = {}
    for name, hf_name in able.items():
        firsts.setdefault(hf_name, name)
    return {name: firsts[hf_name] for name, hf_name in able.items()}


def target_options(able: Mapping[str, str]) -> str:
    modules = sorted({module.rpartition(".")[2] for module in able.values()})
    return f"expected {ALL_LINEAR}, or some of {', '.join(modules)}, or patterns for them"


def _declare_pair(name: str, decl: ArrayDecl, rank: int) -> Declarations:
    sizes = dict(zip(decl.axes, decl.shape, strict=True)) | {"rank": rank}
    outputs, inputs = decl.hf_axes
    bound = 1 / math.sqrt(math.prod(sizes[axis] for axis in inputs))
    module = PEFT_PREFIX + decl.hf_name.removesuffix(".weight")

    uniform = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
    arrays: dict[str, tuple[str, tuple[str, ...], Initializer, Any]] = {
        A: ("A", (*inputs, "rank"), uniform, (("rank",), inputs)),
        B: ("B", ("rank", *outputs), ZEROS, (outputs, ("rank",))),
    }
    return {
        name + suffix: dataclasses.replace(
            decl,
            shape=tuple(sizes[axis] for axis in decl.stacked + axes),
            axes=decl.stacked + axes,
            initializer=initializer,
            hf_name=f"{module}.lora_{kind}.weight",
            hf_axes=hf_axes,
            hf_part=decl.hf_part if kind == "B" else None,
        )
        for suffix, (kind, axes, initializer, hf_axes) in arrays.items()
    }


PRNGKey: TypeAlias = Key[Array, ""] | UInt32[Array, " 2"]


def declare(spec: ModelSpec) -> Declarations:
    """Declare every parameter array of a model.

    Args:
        spec: The model.

    Returns:
        A nested dict of `ArrayDecl`: `embed`, the stacks of `spec.stacks` (stacked on axis 0),
        `final_norm`, and then `score` and `score_bias` of a value head, `score` of a reward head,
        or `head` unless the embeddings are tied; with the low-rank factors that `spec.lora` asks
        for, and `vision`, the arrays of `declare_vision`, of a model that has a tower.

    >>> spec = tiny_spec(layers=3)
    >>> declare(spec)["layers"]["key"].shape
    (3, 4, 1, 2)
    """
    array = _declarer(spec)
    norm = ZEROS if spec.unit_offset_norms else ONES
    declarations: Declarations = {
        "embed": array(f"{spec.hf_prefix}embed_tokens.weight", "vocab embed", "vocab embed"),
        **{name: _declare_stack(spec, layers) for name, layers in spec.stacks.items()},
        "final_norm": array(f"{spec.hf_prefix}norm.weight", "norm", "norm", norm),
    }
    if spec.value_head or spec.reward_head:
        declarations["score"] = array("score.weight", "embed label", "label embed")
    elif not spec.tied_embeddings:
        declarations["head"] = array("lm_head.weight", "embed vocab", "vocab embed")
    if spec.value_head:
        declarations["score_bias"] = array("score.bias", "label", "label", ZEROS)
    if spec.lora is not None:
        declarations = declare_lora(declarations, spec)
    if spec.vision is None or spec.vision_apart:
        return declarations
    return declarations | {"vision": declare_vision(spec.vision)}


def _declarer(
    spec: ModelSpec, layers: tuple[int, ...] = (), **own_sizes: int
) -> Callable[..., ArrayDecl]:
    """Return what declares a stack's arrays, by name, axes, Hugging Face axes and initializer."""
    sizes = {
        "layers": len(layers),
        "vocab": spec.vocab_size,
        "embed": spec.hidden_size,
        "norm": spec.hidden_size,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "ff": spec.ff_width,
        "experts": spec.moe.experts if spec.moe else 0,
        "routes": spec.moe.experts if spec.moe else 0,
        "expert_embed": spec.hidden_size,
        "expert_ff": spec.moe.ff_width if spec.moe else 0,
        "label": 1,
    } | own_sizes
    return declarer(sizes, jax.nn.initializers.normal(stddev=spec.init_std), layers)


def _declare_stack(spec: ModelSpec, layers: tuple[int, ...]) -> Declarations:
    array = _declarer(spec, layers)
    sparse = spec.moe is not None and layers[0] >= spec.moe.dense_layers
    mixer = _declare_attention if spec.latent is None else _declare_latent
    if spec.delta_layers and spec.delta_layers[layers[0]]:
        mixer = _declare_delta
    return (
        _declare_norms(spec, array)
        | mixer(spec, layers)
        | (_declare_experts if sparse else _declare_mlp)(spec, layers)
    )


def _declare_norms(spec: ModelSpec, array: Callable[..., ArrayDecl]) -> Declarations:
    names = {}
    if spec.pre_norms:
        after = "pre_feedforward" if spec.post_norms else "post_attention"
        names |= {"attention_norm": "input_layernorm", "mlp_norm": f"{after}_layernorm"}
    if spec.post_norms:
        names |= {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    norm = ZEROS if spec.unit_offset_norms else ONES
    return {
        ours: array(
            f"{spec.hf_prefix}layers.{{layers}}.{theirs}.weight", "layers norm", "norm", norm
        )
        for ours, theirs in names.items()
    }


def _declare_attention(spec: ModelSpec, layers: tuple[int, ...]) -> Declarations:
    array = _declarer(spec, layers)
    at = spec.hf_prefix + "layers.{layers}.self_attn."
    norm = ZEROS if spec.unit_offset_norms else ONES
    arrays = {}
    for ours, theirs, heads in (
        ("query", "q", "heads"),
        ("key", "k", "kv_heads"),
        ("value", "v", "kv_heads"),
    ):
        own, merged = f"{heads} head_dim", f"{heads}*head_dim"
        parts: dict[str, Any] = {ours: None}
        if spec.gated_attention and ours == "query":
            width = spec.head_dim
            parts = {
                ours: HfPart(("head_dim",), 0, 2 * width),
                "attention_gate": HfPart(("head_dim",), width, 2 * width),
            }
        if spec.hf_joined:
            sizes = [n * spec.head_dim for n in (spec.heads, spec.kv_heads, spec.kv_heads)]
            start = sum(sizes[: "qkv".index(theirs)])
            parts = {ours: HfPart((heads, "head_dim"), start, sum(sizes))}
        proj = f"{at}{'qkv' if spec.hf_joined else theirs}_proj"
        for name, part in parts.items():
            axes = f"layers embed {own}", f"{merged} embed"
            arrays[name] = array(f"{proj}.weight", *axes, hf_part=part)
            if spec.qkv_bias:
                bias = array(f"{proj}.bias", f"layers {own}", merged, ZEROS, hf_part=part)
                arrays[f"{name}_bias"] = bias
        if spec.qk_norm and ours != "value":
            name = f"{at}{theirs}_norm.weight"
            of_norm = _declarer(spec, layers, norm=getattr(spec, heads) * spec.head_dim)
            width = "norm" if spec.whole_qk_norm else "head_dim"
            arrays[f"{ours}_norm"] = of_norm(name, f"layers {width}", width, norm)
    axes = "layers heads head_dim embed"
    arrays["output"] = array(f"{at}o_proj.weight", axes, "embed heads*head_dim")
    if spec.output_bias:
        arrays["output_bias"] = array(f"{at}o_proj.bias", "layers norm", "norm", ZEROS)
    if spec.attention_sinks:
        arrays["sinks"] = array(f"{at}sinks", "layers heads", "heads")
    return arrays


def _declare_delta(spec: ModelSpec, layers: tuple[int, ...]) -> Declarations:
    assert spec.delta is not None
    delta, at = spec.delta, spec.hf_prefix + "layers.{layers}.linear_attn."
    heads, keys, values = delta.key_heads, delta.key_width, delta.joined_value_width
    sizes = {"delta_heads": heads, "_values": delta.values_per_key, "_taps": delta.conv_width}
    norm = _declarer(spec, layers, norm=delta.value_width)
    arrays = {"delta_norm": norm(f"{at}norm.weight", "layers norm", "norm", ONES)}
    start = 0
    for ours, width in (("query", keys), ("key", keys), ("value", values), ("gate", values)):
        array = _declarer(spec, layers, head_dim=width, _one=1, **sizes)
        both, total = ("delta_heads", "head_dim"), heads * (2 * keys + values)
        part: HfPart | None = HfPart(both, heads * start, total)
        name = "in_proj_z" if ours == "gate" else "in_proj_qkv"
        if ours != "gate":
            taps = "layers delta_heads head_dim _one _taps", "delta_heads*head_dim _one _taps"
            arrays[f"delta_{ours}_taps"] = array(f"{at}conv1d.weight", *taps, hf_part=part)
        if delta.joined_by_head:
            name, part = "in_proj_qkvz", HfPart(("head_dim",), start, 2 * (keys + values))
        elif ours == "gate":
            part = None
        axes = "layers embed delta_heads head_dim", "delta_heads*head_dim embed"
        arrays[f"delta_{ours}"] = array(f"{at}{name}.weight", *axes, hf_part=part)
        start += width
    array = _declarer(spec, layers, head_dim=values, **sizes)
    for i, (ours, theirs) in enumerate((("beta", "b"), ("decay", "a"))):
        name, part = f"in_proj_{theirs}", None
        if delta.joined_by_head:
            per_key = delta.values_per_key
            name, part = "in_proj_ba", HfPart(("_values",), i * per_key, 2 * per_key)
        axes = "layers embed delta_heads _values", "delta_heads*_values embed"
        arrays[f"delta_{ours}"] = array(f"{at}{name}.weight", *axes, hf_part=part)
    own = "layers delta_heads _values", "delta_heads*_values"
    for name, theirs, first in (("step_bias", "dt_bias", ONES), ("decay_log", "A_log", DECAYS)):
        arrays[f"delta_{name}"] = array(f"{at}{theirs}", *own, first, float32=True)
    axes = "layers delta_heads head_dim embed", "embed delta_heads*head_dim"
    arrays["delta_output"] = array(f"{at}out_proj.weight", *axes)
    return arrays


def _declare_latent(spec: ModelSpec, layers: tuple[int, ...]) -> Declarations:
    assert spec.latent is not None
    latent, at = spec.latent, spec.hf_prefix + "layers.{layers}.self_attn."
    arrays = {}
    to_heads = ("layers embed heads head_dim", "heads*head_dim embed")
    if latent.query_rank is None:
        array = _declarer(spec, layers, head_dim=latent.key_width)
        arrays["query"] = array(f"{at}q_proj.weight", *to_heads)
    else:
        rank = latent.query_rank
        array = _declarer(spec, layers, latent=rank)
        arrays["query_a"] = array(f"{at}q_a_proj.weight", "layers embed latent", "latent embed")
        array = _declarer(spec, layers, embed=rank, norm=rank, head_dim=latent.key_width)
        arrays["query_a_norm"] = array(f"{at}q_a_layernorm.weight", "layers norm", "norm", ONES)
        arrays["query_b"] = array(f"{at}q_b_proj.weight", *to_heads)
    rank = latent.kv_rank
    array = _declarer(spec, layers, latent=rank + latent.rope_width)
    name = f"{at}kv_a_proj_with_mqa.weight"
    arrays["kv_a"] = array(name, "layers embed latent", "latent embed")
    width = latent.nope_width + latent.value_width
    array = _declarer(spec, layers, embed=rank, norm=rank, head_dim=width)
    arrays["kv_a_norm"] = array(f"{at}kv_a_layernorm.weight", "layers norm", "norm", ONES)
    arrays["kv_b"] = array(f"{at}kv_b_proj.weight", *to_heads)
    array = _declarer(spec, layers, head_dim=latent.value_width)
    axes = "layers heads head_dim embed"
    arrays["output"] = array(f"{at}o_proj.weight", axes, "embed heads*head_dim")
    return arrays


def _declare_experts(spec: ModelSpec, layers: tuple[int, ...]) -> Declarations:
    assert spec.moe is not None
    array, at = _declarer(spec, layers), f"{spec.hf_prefix}layers.{{layers}}.{spec.moe.hf_module}."
    router = f"{at}{spec.moe.hf_router}."
    arrays = {"router": array(f"{router}weight", "layers embed routes", "routes embed")}
    if isinstance(spec.moe.router, SigmoidRouter):
        name = f"{at}{spec.moe.hf_router_bias}"
        arrays["router_bias"] = array(name, "layers routes", "routes", ZEROS)
    if spec.moe.biases:
        arrays["router_logit_bias"] = array(f"{router}bias", "layers routes", "routes", ZEROS)
    for ours, theirs in zip(("gate", "up", "down"), spec.moe.hf_projections, strict=True):
        arrays |= _declare_projection(spec.moe, ours, f"{at}experts.", theirs, array)
    if spec.moe.shared_ff_width:
        array = _declarer(spec, layers, ff=spec.moe.shared_ff_width)
        for ours in ("gate", "up", "down"):
            inputs, outputs = ("ff", "embed") if ours == "down" else ("embed", "ff")
            name = f"{at}{spec.moe.hf_shared}.{ours}_proj.weight"
            axes = f"layers {inputs} {outputs}"
            arrays[f"shared_{ours}"] = array(name, axes, f"{outputs} {inputs}")
    if spec.moe.shared_gate:
        array, name = _declarer(spec, layers, _one=1), f"{at}{spec.moe.hf_shared}_gate.weight"
        arrays["shared_expert_gate"] = array(name, "layers embed _one", "_one embed")
    return arrays


def _declare_projection(
    moe: MoeSpec, ours: str, at: str, theirs: str, array: Callable[..., ArrayDecl]
) -> Declarations:
    """Declare a projection of all experts: gate, up or down."""
    inputs, outputs = ("expert_embed", "expert_ff")[:: -1 if ours == "down" else 1]
    weight, bias = f"{at}{{experts}}.{theirs}.weight", f"{at}{{experts}}.{theirs}.bias"
    hf_axes, part = (f"{outputs} {inputs}", outputs), None
    if moe.hf_joined:
        weight = f"{at}down_proj" if ours == "down" else f"{at}gate_up_proj"
        bias, hf_axes = f"{weight}_bias", (f"experts {inputs} {outputs}", f"experts {outputs}")
        if ours != "down":
            start, step = int(ours == "up"), 2
            if moe.hf_halves:
                start, step = start * moe.ff_width, 1
            part = HfPart((outputs,), start, 2 * moe.ff_width, step)
    axes, name = f"layers experts {inputs} {outputs}", f"expert_{ours}"
    arrays = {name: array(weight, axes, hf_axes[0], hf_part=part)}
    if moe.biases:
        axes = f"layers experts {outputs}"
        arrays[f"{name}_bias"] = array(bias, axes, hf_axes[1], ZEROS, hf_part=part)
    return arrays


def _declare_mlp(spec: ModelSpec, layers: tuple[int, ...]) -> Declarations:
    array = _declarer(spec, layers)
    arrays = {}
    for ours, inputs, outputs in (
        ("gate", "embed", "ff"),
        ("up", "embed", "ff"),
        ("down", "ff", "embed"),
    ):
        theirs, part = ours, None
        if spec.hf_joined and ours != "down":
            first = 0 if ours == "gate" else spec.ff_width
            theirs, part = "gate_up", HfPart(("ff",), first, 2 * spec.ff_width)
        at = f"{spec.hf_prefix}layers.{{layers}}.mlp.{theirs}_proj"
        axes = f"layers {inputs} {outputs}", f"{outputs} {inputs}"
        arrays[ours] = array(f"{at}.weight", *axes, hf_part=part)
        if spec.mlp_bias:
            own = outputs if outputs == "ff" else "norm"
            arrays[f"{ours}_bias"] = array(f"{at}.bias", f"layers {own}", own, ZEROS)
    return arrays


def compute_dtypes(spec: ModelSpec, dtype: DTypeLike) -> dict[str, Any]:
    """Return the dtype in which the model uses each array.

    Matrices are cast; norm scales, routers and the value head are not.

    A copy of the parameters in these dtypes gives the same results as the float32 masters.

    >>> spec = tiny_spec()
    >>> compute_dtypes(spec, "bfloat16")["final_norm"]
    dtype('float32')
    """

    def used(declaration: ArrayDecl) -> Any:
        rank = len(declaration.shape) - len(declaration.stacked)
        is_vector = rank == 1 or declaration.dimensions == 1
        is_value_head = "label" in declaration.axes
        is_router = "routes" in declaration.axes
        is_wide = is_vector or is_value_head or is_router or declaration.float32
        return jnp.dtype(jnp.float32 if is_wide else dtype)

    return jax.tree.map(used, declare(spec))


def init_params(spec: ModelSpec, *, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> Params:
    """Draw fresh parameters as Hugging Face does.

    They are N(0, `init_std`²) for matrices, ones for norms and zeros for the bias of a value head.

    The key of each array comes from its path, so an array's values do not depend on which other
    arrays the model has. Under `jax.jit` with `out_shardings` each device draws only its part.

    Args:
        spec: The model.
        key: PRNG key.
        dtype: Of every array.

    Returns:
        Parameters nested as `declare(spec)`.

    >>> spec = tiny_spec(layers=3)
    >>> init_params(spec, key=jax.random.key(0))["embed"].shape
    (8, 4)
    """

    def draw(path: tuple[Any, ...], decl: ArrayDecl) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        array_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return decl.initializer(array_key, decl.shape, dtype)

    return jax.tree_util.tree_map_with_path(draw, declare(spec))


def parameter_count(spec: ModelSpec) -> int:
    """Count the parameters of a model; a tied embedding counts once.

    >>> parameter_count(tiny_spec())
    168
    """
    return sum(math.prod(decl.shape) for decl in jax.tree.leaves(declare(spec)))
