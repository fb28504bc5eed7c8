"""What a model is made of: its hyper-parameters and one declaration per parameter array.

`declare(spec)` is the single source of shapes, logical axes, initializers and Hugging Face names.
Initialization, sharding, loading and saving all read it and know nothing else about a model.
Arrays that every layer has are stacked on a leading axis `layers`, so that a model is one scan.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Key, UInt32

Params: TypeAlias = dict[str, Any]  # nested, arrays at the leaves
Declarations: TypeAlias = dict[str, Any]  # the same nesting, an ArrayDecl at each leaf
Initializer: TypeAlias = Callable[[Any, Sequence[int], Any], Any]
PRNGKey: TypeAlias = Key[Array, ""] | UInt32[Array, " 2"]

NORMAL: Initializer = jax.nn.initializers.normal(stddev=0.02)
ONES: Initializer = jax.nn.initializers.ones
ZEROS: Initializer = jax.nn.initializers.zeros


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Describe a pre-norm decoder with grouped-query attention and a gated feed-forward (Qwen3).

    Hashable, so that it can be a static argument of `jax.jit`.

    Args:
        vocab_size: Rows V of the embedding.
        width: Model width D.
        layers: Number of decoder layers.
        heads: Query heads N.
        kv_heads: Key/value heads K; divides `heads`.
        head_width: Width H of one head; N·H need not equal D.
        ff_width: Feed-forward width F.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in every RMS norm.
        tied_embeddings: Whether the output projection is the transposed embedding.
        qk_norm: Whether queries and keys are RMS-normed per head before the rotation.
        max_positions: Longest sequence the model was made for, in tokens.
        init_std: Standard deviation of random weights.
        value_head: Whether the model ends in one number per token, for a critic, and not in logits;
            `tied_embeddings` does not matter then.

    Raises:
        ValueError: A size is not positive, `kv_heads` does not divide `heads`, or `head_width` is
            odd.

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

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in vars(self).items() if not isinstance(v, bool)}
        wrong = {k: v for k, v in sizes.items() if v <= 0}
        if wrong:
            raise ValueError(f"sizes of a model must be positive, got {wrong}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got heads={self.heads}, kv_heads={self.kv_heads}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width must be even for rotary positions, got {self.head_width}")


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


def declare(spec: ModelSpec) -> Declarations:
    """Declare every parameter array of a model.

    Args:
        spec: The model.

    Returns:
        A nested dict of `ArrayDecl`: `embed`, `layers` (each stacked on axis 0), `final_norm`, and
        then `score` and `score_bias` of a value head, or `head` unless the embeddings are tied.

    >>> spec = ModelSpec(vocab_size=8, width=4, layers=3, heads=2, kv_heads=1, head_width=2,
    ...                  ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...                  max_positions=32)
    >>> declare(spec)["layers"]["key"].shape
    (3, 4, 1, 2)
    """
    sizes = {
        "layers": spec.layers,
        "vocab": spec.vocab_size,
        "embed": spec.width,
        "norm": spec.width,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_width": spec.head_width,
        "ff": spec.ff_width,
        "label": 1,
    }

    normal = jax.nn.initializers.normal(stddev=spec.init_std)

    def array(name: str, axes: str, hf_axes: str, initializer: Initializer = normal) -> ArrayDecl:
        names = tuple(axes.split())
        return ArrayDecl(
            shape=tuple(sizes[axis] for axis in names),
            axes=names,
            initializer=initializer,
            hf_name=name,
            hf_axes=tuple(tuple(group.split("*")) for group in hf_axes.split()),
        )

    declarations: Declarations = {
        "embed": array("model.embed_tokens.weight", "vocab embed", "vocab embed"),
        "layers": _declare_layers(array, qk_norm=spec.qk_norm),
        "final_norm": array("model.norm.weight", "norm", "norm", ONES),
    }
    if spec.value_head:
        declarations["score"] = array("score.weight", "embed label", "label embed")
        declarations["score_bias"] = array("score.bias", "label", "label", ZEROS)
    elif not spec.tied_embeddings:
        declarations["head"] = array("lm_head.weight", "embed vocab", "vocab embed")
    return declarations


def _declare_layers(array: Callable[..., ArrayDecl], *, qk_norm: bool) -> Declarations:
    at = "model.layers.{layers}."
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    kv_axes, hf_kv_axes = "layers embed kv_heads head_width", "kv_heads*head_width embed"
    layers = {
        "attention_norm": array(f"{at}input_layernorm.weight", "layers norm", "norm", ONES),
        "query": array(
            f"{attention}q_proj.weight",
            "layers embed heads head_width",
            "heads*head_width embed",
        ),
        "key": array(f"{attention}k_proj.weight", kv_axes, hf_kv_axes),
        "value": array(f"{attention}v_proj.weight", kv_axes, hf_kv_axes),
        "output": array(
            f"{attention}o_proj.weight",
            "layers heads head_width embed",
            "embed heads*head_width",
        ),
        "mlp_norm": array(f"{at}post_attention_layernorm.weight", "layers norm", "norm", ONES),
        "gate": array(f"{mlp}gate_proj.weight", "layers embed ff", "ff embed"),
        "up": array(f"{mlp}up_proj.weight", "layers embed ff", "ff embed"),
        "down": array(f"{mlp}down_proj.weight", "layers ff embed", "embed ff"),
    }
    if qk_norm:
        norm_axes = ("layers head_width", "head_width", ONES)
        layers["query_norm"] = array(f"{attention}q_norm.weight", *norm_axes)
        layers["key_norm"] = array(f"{attention}k_norm.weight", *norm_axes)
    return layers


def compute_dtypes(spec: ModelSpec, dtype: DTypeLike) -> dict[str, Any]:
    """Return the dtype in which the model uses each array.

    Matrices are cast; norm scales and the value head are not.

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
        return jnp.dtype(jnp.float32 if is_vector or is_value_head else dtype)

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
