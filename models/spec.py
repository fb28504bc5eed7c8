"""What a model is made of: its hyper-parameters and one declaration per parameter array.

`declare(spec)` is the single source of shapes, logical axes, initializers and Hugging Face names.
Initialization, sharding, loading and saving all read it and know nothing else about a model.
Arrays that every layer has are stacked on a leading axis `layers`, so that a model is one scan.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Key, UInt32

from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe import MoeSpec, SigmoidRouter
from jaxrl_llm.models.rope import Scaling

Params: TypeAlias = dict[str, Any]  # nested, arrays at the leaves
Declarations: TypeAlias = dict[str, Any]  # the same nesting, an ArrayDecl at each leaf
Initializer: TypeAlias = Callable[[Any, Sequence[int], Any], Any]
PRNGKey: TypeAlias = Key[Array, ""] | UInt32[Array, " 2"]

NORMAL: Initializer = jax.nn.initializers.normal(stddev=0.02)
ONES: Initializer = jax.nn.initializers.ones
ZEROS: Initializer = jax.nn.initializers.zeros
ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    r"""Describe low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Args:
        rank: Rank r of each adapter.
        alpha: Numerator of the scale.
        targets: Names of the arrays that get one, such as "query".
        rslora: Whether the scale is α/√r (https://arxiv.org/abs/2312.03732) and not α/r.

    >>> LoraSpec(rank=4, alpha=8.0, targets=("query",)).scale
    2.0
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Return what the product of the two low-rank factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Describe a pre-norm decoder with grouped-query attention and a gated feed-forward.

    Its defaults are those of Qwen3. Hashable, so that it can be a static argument of `jax.jit`.

    Args:
        vocab_size: Rows V of the embedding.
        width: Model width D.
        layers: Number of decoder layers.
        heads: Query heads N.
        kv_heads: Key/value heads K; divides `heads`.
        head_width: Width H of one head; N·H need not equal D.
        ff_width: Feed-forward width F of the plain layers.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in every RMS norm.
        tied_embeddings: Whether the output projection is the transposed embedding.
        qk_norm: Whether queries and keys are RMS-normed per head before the rotation.
        max_positions: Longest sequence the model was made for, in tokens.
        init_std: Standard deviation of random weights.
        value_head: Whether the model ends in one number per token, for a critic, and not in logits;
            `tied_embeddings` does not matter then.
        reward_head: Whether the model ends in one number per sequence, for a reward model: a value
            head without a bias, read at the last token.
        qkv_bias: Whether the query, key and value projections have a bias.
        output_bias: Whether the attention's output projection has one.
        mlp_bias: Whether the three projections of the feed-forward have one.
        activation: Of the gate: "silu" or "gelu_tanh".
        rope_scaling: What stretches the rotary frequencies; not of `local_rope_theta`.
        local_rope_theta: Base of the unscaled frequencies of the layers with a window; None: they
            rotate as the others do.
        rotary_fraction: Share of the head's dimensions, its first, that are rotated.
        window: How many tokens, itself included, a token attends to in the layers with a window.
        windowed_layers: For each layer whether it has the window; empty means all.
        query_scalar: Scores are multiplied by its inverse root; None means `head_width`.
        score_softcap: Attention scores s become c·tanh(s/c).
        logit_softcap: Logits z become c·tanh(z/c).
        unit_offset_norms: Whether norms multiply by 1 + w and not by w.
        post_norms: Whether what attention and feed-forward give is normed before it is added.
        scaled_embeddings: Whether embeddings are multiplied by √D.
        moe: The experts of a mixture; None: every layer has a plain feed-forward.
        latent: Multi-head latent attention; `kv_heads` is then `heads`, or 1 in the absorbed form,
            `head_width` is its own, and there is no `qk_norm`. None: plain attention.
        lora: Low-rank adapters beside the frozen arrays.

    Raises:
        ValueError: A size is not positive, `kv_heads` does not divide `heads`, the rotated width is
            odd, the activation is unknown, or windows are described in part.

    >>> ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2, ff_width=6,
    ...           rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True, max_positions=32).qk_norm
    True
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    ff_width: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qk_norm: bool = True
    max_positions: int
    init_std: float = 0.02
    value_head: bool = False
    reward_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    rope_scaling: Scaling | None = None
    local_rope_theta: float | None = None
    rotary_fraction: float = 1.0
    window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    query_scalar: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    unit_offset_norms: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None
    lora: LoraSpec | None = None

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in vars(self).items() if type(v) in (int, float)}
        wrong = {k: v for k, v in sizes.items() if v <= 0}
        if wrong:
            raise ValueError(f"sizes of a model must be positive, got {wrong}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got heads={self.heads}, kv_heads={self.kv_heads}"
            )
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_width:
            raise ValueError(
                f"head_width must be even for rotary positions, and so must be the part of it that "
                f"is rotated: got {self.head_width}, of which {self.rotary_width} are rotated"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}; wanted one of {ACTIVATIONS}")
        if self.value_head and self.reward_head:
            raise ValueError("a model ends in a value head or in a reward head, got both")
        self._check_windows()
        self._check_parts()

    def _check_windows(self) -> None:
        if len(self.windowed_layers) not in (0, self.layers):
            raise ValueError(
                f"windowed_layers has {len(self.windowed_layers)} entries for {self.layers} layers"
            )
        if self.windowed_layers and (self.window is None or len(set(self.windowed_layers)) == 1):
            raise ValueError(
                "windowed_layers needs a window and both kinds of layers: leave it out where all "
                f"layers are alike; got window={self.window}, {self.windowed_layers}"
            )
        if self.local_rope_theta is not None and not self.windowed_layers:
            raise ValueError("local_rope_theta needs windowed_layers, got none")

    def _check_parts(self) -> None:
        if self.moe is not None and self.moe.dense_layers >= self.layers:
            raise ValueError(
                f"moe.dense_layers must leave layers with experts, got {self.moe.dense_layers} of "
                f"{self.layers}"
            )
        if self.latent is not None:
            wanted = (1 if self.latent.absorbed else self.heads, self.latent.head_width)
            if (self.kv_heads, self.head_width) != wanted or self.qk_norm or self.qkv_bias:
                raise ValueError(
                    f"this latent attention has kv_heads, head_width = {wanted} and neither "
                    f"qk_norm nor qkv_bias; got {self}"
                )

    @property
    def for_decoding(self) -> "ModelSpec":
        """Return the spec of the same model with which a cache holds least.

        It differs for latent attention only, which it gives its absorbed form. Parameters are the
        same.
        """
        if self.latent is None or self.latent.absorbed:
            return self
        latent = dataclasses.replace(self.latent, absorbed=True)
        return dataclasses.replace(
            self,
            latent=latent,
            kv_heads=1,
            head_width=latent.head_width,
            query_scalar=self.score_scale**-2,
        )

    @property
    def rotary_width(self) -> int:
        """Return how many of a head's dimensions are rotated."""
        if self.latent is not None:
            return self.latent.rope_width
        return int(self.head_width * self.rotary_fraction)

    @property
    def score_scale(self) -> float:
        """Return what products of queries and keys are multiplied by."""
        return (self.head_width if self.query_scalar is None else self.query_scalar) ** -0.5

    @property
    def stacks(self) -> dict[str, range]:
        """Return the stacks of alike layers, by name, with the layers that each holds, in order."""
        dense = self.moe.dense_layers if self.moe else 0
        stacks = {"dense_layers": range(dense), "layers": range(dense, self.layers)}
        return {name: layers for name, layers in stacks.items() if layers}


@dataclass(frozen=True, kw_only=True)
class ArrayDecl:
    """Declare one parameter array and its counterpart in a Hugging Face checkpoint.

    Args:
        shape: Size of each dimension.
        axes: Logical name of each dimension, all different; `sharding.rules` maps them to a mesh.
        initializer: `(key, shape, dtype) -> array`.
        hf_name: Name in a Hugging Face checkpoint. A placeholder such as `{layers}` names a leading
            axis along which our array stacks several of theirs.
        hf_axes: The dimensions of *one* Hugging Face array, each as the tuple of our axes that are
            merged in it, in order.
        first_layer: Number of the first layer of a stack in the names of a Hugging Face checkpoint.

    Raises:
        ValueError: The axes do not match the shape, or `hf_name` and `hf_axes` do not cover them.

    >>> decl = ArrayDecl(shape=(3, 8, 2, 4), axes=("layers", "embed", "heads", "head_width"),
    ...                  initializer=NORMAL, hf_name="l.{layers}.q.weight",
    ...                  hf_axes=(("heads", "head_width"), ("embed",)))
    >>> decl.stacked, decl.hf_shape
    (('layers',), (8, 8))
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: Initializer
    hf_name: str
    hf_axes: tuple[tuple[str, ...], ...]
    first_layer: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes) or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"{self.hf_name}: axes must be different and one per dimension, "
                f"got axes {self.axes} for shape {self.shape}"
            )
        merged = tuple(axis for group in self.hf_axes for axis in group)
        stacked = self.axes[: len(self.axes) - len(merged)]
        if sorted(self.axes) != sorted(stacked + merged) or any(
            f"{{{axis}}}" not in self.hf_name for axis in stacked
        ):
            raise ValueError(
                f"{self.hf_name}: each of the axes {self.axes} must stand once, either in hf_axes "
                f"(got {self.hf_axes}) or, leading, as a placeholder in the name"
            )

    @property
    def stacked(self) -> tuple[str, ...]:
        """Name the leading axes that count separate Hugging Face arrays."""
        return self.axes[: len(self.axes) - sum(map(len, self.hf_axes))]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Give the shape of one Hugging Face array."""
        sizes = dict(zip(self.axes, self.shape, strict=True))
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.hf_axes)

    def hf_indices(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name of each Hugging Face array and its index on our leading axes."""
        for index in np.ndindex(*self.shape[: len(self.stacked)]):
            counts = dict(zip(self.stacked, index, strict=True))
            if "layers" in counts:
                counts["layers"] += self.first_layer
            yield self.hf_name.format(**counts), index


def declare(spec: ModelSpec) -> Declarations:
    """Declare every parameter array of a model.

    Args:
        spec: The model.

    Returns:
        A nested dict of `ArrayDecl`: `embed`, the stacks of `spec.stacks` (stacked on axis 0),
        `final_norm`, and then `score` and `score_bias` of a value head, `score` of a reward head,
        or `head` unless the embeddings are tied; with the low-rank factors that `spec.lora` asks
        for.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=3, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> declare(spec)["layers"]["key"].shape
    (3, 4, 1, 2)
    """
    array = _declarer(spec)
    norm = ZEROS if spec.unit_offset_norms else ONES
    declarations: Declarations = {
        "embed": array("model.embed_tokens.weight", "vocab embed", "vocab embed"),
        **{name: _declare_stack(spec, layers) for name, layers in spec.stacks.items()},
        "final_norm": array("model.norm.weight", "norm", "norm", norm),
    }
    if spec.value_head or spec.reward_head:
        declarations["score"] = array("score.weight", "embed label", "label embed")
    elif not spec.tied_embeddings:
        declarations["head"] = array("lm_head.weight", "embed vocab", "vocab embed")
    if spec.value_head:
        declarations["score_bias"] = array("score.bias", "label", "label", ZEROS)
    if spec.lora is None:
        return declarations
    from jaxrl_llm.models.lora import declare_lora  # which imports this module

    return declare_lora(declarations, spec)  # pyright: ignore[reportArgumentType]  # the same class


def _declarer(
    spec: ModelSpec, layers: range = range(0), **own_sizes: int
) -> Callable[..., ArrayDecl]:
    """Return `(hf_name, axes, hf_axes, initializer) -> ArrayDecl` for the arrays of a stack."""
    sizes = {
        "layers": len(layers),
        "vocab": spec.vocab_size,
        "embed": spec.width,
        "norm": spec.width,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_width": spec.head_width,
        "ff": spec.ff_width,
        "experts": spec.moe.experts if spec.moe else 0,
        "routes": spec.moe.experts if spec.moe else 0,
        "expert_embed": spec.width,
        "expert_ff": spec.moe.ff_width if spec.moe else 0,
        "label": 1,
    } | own_sizes
    normal = jax.nn.initializers.normal(stddev=spec.init_std)

    def array(name: str, axes: str, hf_axes: str, initializer: Initializer = normal) -> ArrayDecl:
        names = tuple(axes.split())
        return ArrayDecl(
            shape=tuple(sizes[axis] for axis in names),
            axes=names,
            initializer=initializer,
            hf_name=name,
            hf_axes=tuple(tuple(group.split("*")) for group in hf_axes.split()),
            first_layer=layers.start,
        )

    return array


def _declare_stack(spec: ModelSpec, layers: range) -> Declarations:
    array = _declarer(spec, layers)
    sparse = spec.moe is not None and layers.start >= spec.moe.dense_layers
    return (
        _declare_norms(spec, array)
        | (_declare_attention if spec.latent is None else _declare_latent)(spec, layers)
        | (_declare_experts if sparse else _declare_mlp)(spec, layers)
    )


def _declare_norms(spec: ModelSpec, array: Callable[..., ArrayDecl]) -> Declarations:
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if spec.post_norms:
        names |= {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    norm = ZEROS if spec.unit_offset_norms else ONES
    return {
        ours: array(f"model.layers.{{layers}}.{theirs}.weight", "layers norm", "norm", norm)
        for ours, theirs in names.items()
    }


def _declare_attention(spec: ModelSpec, layers: range) -> Declarations:
    array = _declarer(spec, layers)
    at = "model.layers.{layers}.self_attn."
    norm = ZEROS if spec.unit_offset_norms else ONES
    arrays = {}
    for ours, theirs, heads in (
        ("query", "q", "heads"),
        ("key", "k", "kv_heads"),
        ("value", "v", "kv_heads"),
    ):
        own, merged = f"{heads} head_width", f"{heads}*head_width"
        arrays[ours] = array(f"{at}{theirs}_proj.weight", f"layers embed {own}", f"{merged} embed")
        if spec.qkv_bias:
            bias = array(f"{at}{theirs}_proj.bias", f"layers {own}", merged, ZEROS)
            arrays[f"{ours}_bias"] = bias
        if spec.qk_norm and ours != "value":
            name = f"{at}{theirs}_norm.weight"
            arrays[f"{ours}_norm"] = array(name, "layers head_width", "head_width", norm)
    axes = "layers heads head_width embed"
    arrays["output"] = array(f"{at}o_proj.weight", axes, "embed heads*head_width")
    if spec.output_bias:
        arrays["output_bias"] = array(f"{at}o_proj.bias", "layers norm", "norm", ZEROS)
    return arrays


def _declare_latent(spec: ModelSpec, layers: range) -> Declarations:
    assert spec.latent is not None
    latent, at = spec.latent, "model.layers.{layers}.self_attn."
    arrays = {}
    to_heads = ("layers embed heads head_width", "heads*head_width embed")
    if latent.query_rank is None:
        array = _declarer(spec, layers, head_width=latent.key_width)
        arrays["query"] = array(f"{at}q_proj.weight", *to_heads)
    else:
        rank = latent.query_rank
        array = _declarer(spec, layers, latent=rank)
        arrays["query_a"] = array(f"{at}q_a_proj.weight", "layers embed latent", "latent embed")
        array = _declarer(spec, layers, embed=rank, norm=rank, head_width=latent.key_width)
        arrays["query_a_norm"] = array(f"{at}q_a_layernorm.weight", "layers norm", "norm", ONES)
        arrays["query_b"] = array(f"{at}q_b_proj.weight", *to_heads)
    rank = latent.kv_rank
    array = _declarer(spec, layers, latent=rank + latent.rope_width)
    name = f"{at}kv_a_proj_with_mqa.weight"
    arrays["kv_a"] = array(name, "layers embed latent", "latent embed")
    width = latent.nope_width + latent.value_width
    array = _declarer(spec, layers, embed=rank, norm=rank, head_width=width)
    arrays["kv_a_norm"] = array(f"{at}kv_a_layernorm.weight", "layers norm", "norm", ONES)
    arrays["kv_b"] = array(f"{at}kv_b_proj.weight", *to_heads)
    array = _declarer(spec, layers, head_width=latent.value_width)
    axes = "layers heads head_width embed"
    arrays["output"] = array(f"{at}o_proj.weight", axes, "embed heads*head_width")
    return arrays


def _declare_experts(spec: ModelSpec, layers: range) -> Declarations:
    assert spec.moe is not None
    array, at = _declarer(spec, layers), f"model.layers.{{layers}}.{spec.moe.hf_module}."
    arrays = {"router": array(f"{at}gate.weight", "layers embed routes", "routes embed")}
    if isinstance(spec.moe.router, SigmoidRouter):
        name = f"{at}gate.e_score_correction_bias"
        arrays["router_bias"] = array(name, "layers routes", "routes", ZEROS)
    for ours, theirs in zip(("gate", "up", "down"), spec.moe.hf_projections, strict=True):
        inputs, outputs = ("expert_embed", "expert_ff")[:: -1 if ours == "down" else 1]
        name = f"{at}experts.{{experts}}.{theirs}.weight"
        axes = f"layers experts {inputs} {outputs}"
        arrays[f"expert_{ours}"] = array(name, axes, f"{outputs} {inputs}")
    if spec.moe.shared_ff_width:
        array = _declarer(spec, layers, ff=spec.moe.shared_ff_width)
        for ours in ("gate", "up", "down"):
            inputs, outputs = ("ff", "embed") if ours == "down" else ("embed", "ff")
            name = f"{at}shared_experts.{ours}_proj.weight"
            axes = f"layers {inputs} {outputs}"
            arrays[f"shared_{ours}"] = array(name, axes, f"{outputs} {inputs}")
    return arrays


def _declare_mlp(spec: ModelSpec, layers: range) -> Declarations:
    array = _declarer(spec, layers)
    arrays = {}
    for ours, inputs, outputs in (
        ("gate", "embed", "ff"),
        ("up", "embed", "ff"),
        ("down", "ff", "embed"),
    ):
        at = f"model.layers.{{layers}}.mlp.{ours}_proj"
        hf_axes = f"{outputs} {inputs}"
        arrays[ours] = array(f"{at}.weight", f"layers {inputs} {outputs}", hf_axes)
        if spec.mlp_bias:
            own = outputs if outputs == "ff" else "norm"
            arrays[f"{ours}_bias"] = array(f"{at}.bias", f"layers {own}", own, ZEROS)
    return arrays


def compute_dtypes(spec: ModelSpec, dtype: DTypeLike) -> dict[str, Any]:
    """Return the dtype in which the model uses each array.

    Matrices are cast; norm scales, routers and the value head are not.

    A copy of the parameters in these dtypes gives the same results as the float32 masters.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> compute_dtypes(spec, "bfloat16")["final_norm"]
    dtype('float32')
    """

    def used(declaration: ArrayDecl) -> Any:
        is_vector = len(declaration.shape) - len(declaration.stacked) == 1
        is_value_head = "label" in declaration.axes
        is_router = "routes" in declaration.axes
        return jnp.dtype(jnp.float32 if is_vector or is_value_head or is_router else dtype)

    return jax.tree.map(used, declare(spec))


def initialize(spec: ModelSpec, *, key: PRNGKey, dtype: DTypeLike = jnp.float32) -> Params:
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

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=3, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> initialize(spec, key=jax.random.key(0))["embed"].shape
    (8, 4)
    """

    def draw(path: tuple[Any, ...], decl: ArrayDecl) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        array_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return decl.initializer(array_key, decl.shape, dtype)

    return jax.tree_util.tree_map_with_path(draw, declare(spec))


def parameter_count(spec: ModelSpec) -> int:
    """Count the parameters of a model; a tied embedding counts once.

    >>> parameter_count(ModelSpec(vocab_size=8, width=4, layers=1, heads=2, kv_heads=1,
    ...     head_width=2, ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...     max_positions=32))
    168
    """
    return sum(math.prod(decl.shape) for decl in jax.tree.leaves(declare(spec)))
