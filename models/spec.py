"""The hyper-parameters of a model."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.rope import LongRopeScaling, Scaling
from jaxrl_llm.models.vision.spec import VisionSpec

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


class Block(NamedTuple):
    """Layers of a model that repeat, computed by one scan.

    Attributes:
        repeats: How often.
        runs: What repeats, in order: names of stacks, and how many layers of each.
    """

    repeats: int
    runs: tuple[tuple[str, int], ...]

    def layers_of(self, name: str) -> int:
        """Return how many layers of a stack one repeat has."""
        return sum(count for stack, count in self.runs if stack == name)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Describe a decoder with grouped-query attention and a gated feed-forward.

    Its defaults are those of Qwen3. Hashable, so that it can be a static argument of `jax.jit`.

    Args:
        vocab_size: Rows V of the embedding.
        hidden_size: Width D of the residual stream.
        layers: Number of decoder layers.
        heads: Query heads N.
        kv_heads: Key/value heads K; divides `heads`.
        head_dim: Width H of one head; N·H need not equal D.
        ff_width: Feed-forward width F of the plain layers.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in every RMS norm.
        tied_embeddings: Whether the output projection is the transposed embedding.
        qk_norm: Whether queries and keys are RMS-normed before the rotation.
        whole_qk_norm: Whether that norm is over all heads of a token together, and not per head.
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
        rotary_layers: For each layer whether queries and keys are rotated; empty means all.
        query_scalar: Scores are multiplied by its inverse root; None means `head_dim`.
        score_softcap: Attention scores s become c·tanh(s/c).
        attention_sinks: Whether a learned score per query head, without a value, joins the softmax.
        logit_softcap: Logits z become c·tanh(z/c).
        unit_offset_norms: Whether norms multiply by 1 + w and not by w.
        pre_norms: Whether what attention and feed-forward take is normed.
        post_norms: Whether what attention and feed-forward give is normed before it is added.
        scaled_embeddings: Whether embeddings are multiplied by √D.
        moe: The experts of a mixture; None: every layer has a plain feed-forward.
        latent: Multi-head latent attention; `kv_heads` is then `heads`, or 1 in the absorbed form,
            `head_dim` is its own, and there is no `qk_norm`. None: plain attention.
        gated_attention: Whether what attention mixes is multiplied by the sigmoid of a projection
            of its input, for each head and dimension.
        delta: The gated DeltaNet of some layers; None: all have attention.
        delta_layers: For each layer whether it has the DeltaNet in place of attention; empty means
            none.
        hf_prefix: What names of arrays in a checkpoint begin with, but for the heads.
        hf_joined: Whether a checkpoint has the projections of queries, keys and values in one
            array, and those of gate and up in another.
        lora: Low-rank adapters beside the frozen arrays.
        vision: The vision tower, whose parameters lie under `vision`; None: it reads text alone.
        vision_apart: Whether the parameters of the tower are held by themselves, and features are
            given.
        mrope_sections: How many of a head's rotary frequencies turn by a token's time, height and
            width (M-RoPE, https://arxiv.org/abs/2409.12191); None: all turn by its position.
        mrope_interleaved: Whether these frequencies alternate, and do not lie in three chunks.

    Raises:
        ValueError: A size is not positive, `kv_heads` does not divide `heads`, the rotated width is
            odd, the activation is unknown, windows or the DeltaNet are described in part, or two
            parts exclude each other.

    >>> ModelSpec(vocab_size=8, hidden_size=4, layers=1, heads=2, kv_heads=1, head_dim=2,
    ...           ff_width=6, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=True,
    ...           max_positions=32).qk_norm
    True
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff_width: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qk_norm: bool = True
    whole_qk_norm: bool = False
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
    rotary_layers: tuple[bool, ...] = ()
    query_scalar: float | None = None
    score_softcap: float | None = None
    attention_sinks: bool = False
    logit_softcap: float | None = None
    unit_offset_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    scaled_embeddings: bool = False
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None
    gated_attention: bool = False
    delta: DeltaSpec | None = None
    delta_layers: tuple[bool, ...] = ()
    hf_prefix: str = "model."
    hf_joined: bool = False
    lora: LoraSpec | None = None
    vision: VisionSpec | None = None
    vision_apart: bool = False
    mrope_sections: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in vars(self).items() if type(v) in (int, float)}
        wrong = {k: v for k, v in sizes.items() if v <= 0}
        if wrong:
            raise ValueError(f"sizes of a model must be positive, got {wrong}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got heads={self.heads}, kv_heads={self.kv_heads}"
            )
        if self.rotary_width % 2 or not 0 < self.rotary_width <= self.head_dim:
            raise ValueError(
                f"head_dim must be even for rotary positions, and so must be the part of it that "
                f"is rotated: got {self.head_dim}, of which {self.rotary_width} are rotated"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}; expected one of {ACTIVATIONS}")
        if self.value_head and self.reward_head:
            raise ValueError("a model ends in a value head or in a reward head, got both")
        self._check_windows()
        self._check_norms()
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
        if self.rotary_layers and (
            len(self.rotary_layers) != self.layers or all(self.rotary_layers)
        ):
            raise ValueError(
                f"rotary_layers needs one entry for each of the {self.layers} layers, some of them "
                f"false: leave it out where all are rotated; got {self.rotary_layers}"
            )

    def _check_norms(self) -> None:
        if not (self.pre_norms or self.post_norms):
            raise ValueError("a layer needs pre_norms or post_norms, got neither")
        if self.whole_qk_norm and not self.qk_norm:
            raise ValueError("whole_qk_norm says over what qk_norm norms, which is False")

    def _check_parts(self) -> None:
        if self.hf_joined and (self.mlp_bias or self.latent or self.gated_attention):
            raise ValueError(
                "a checkpoint with hf_joined has no mlp_bias, latent or gated attention; "
                f"got {self}"
            )
        if self.vision is not None and self.vision.out_size != self.hidden_size:
            raise ValueError(
                f"features of the vision tower are {self.vision.out_size} wide; expected the "
                f"decoder's hidden_size={self.hidden_size}"
            )
        if self.mrope_sections and 2 * sum(self.mrope_sections) != self.rotary_width:
            raise ValueError(
                f"mrope_sections must add up to half of the {self.rotary_width} dimensions of a "
                f"head that are rotated, got {self.mrope_sections}"
            )
        if self.moe is not None and self.moe.dense_layers >= self.layers:
            raise ValueError(
                f"moe.dense_layers must leave layers with experts, got {self.moe.dense_layers} of "
                f"{self.layers}"
            )
        if bool(self.delta_layers) != (self.delta is not None):
            raise ValueError("delta and delta_layers come together, got one of them")
        if self.delta_layers and (
            len(self.delta_layers) != self.layers or len(set(self.delta_layers)) == 1
        ):
            raise ValueError(
                f"delta_layers needs an entry for each of {self.layers} layers, and both kinds of "
                f"layers; got {self.delta_layers}"
            )
        if self.latent is not None:
            expected = (1 if self.latent.absorbed else self.heads, self.latent.head_dim)
            others = self.qk_norm or self.qkv_bias or self.attention_sinks
            if (self.kv_heads, self.head_dim) != expected or others:
                raise ValueError(
                    f"this latent attention has kv_heads, head_dim = {expected} and none of "
                    f"qk_norm, qkv_bias and attention_sinks; got {self}"
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
            head_dim=latent.head_dim,
            query_scalar=self.score_scale**-2,
        )

    def for_length(self, longest: int) -> "ModelSpec":
        """Return the spec of the same model for sequences of at most so many tokens.

        It differs for `LongRopeScaling` only, whose long factors are taken by all sequences where
        the longest one may exceed the original context.

        >>> from jaxrl_llm.models.rope import LongRopeScaling
        >>> scaling = LongRopeScaling(short_factors=(1.0,), long_factors=(8.0,),
        ...                           original_positions=16, attention_factor=1.1)
        >>> [tiny_spec(rope_scaling=scaling).for_length(n).rope_scaling.long for n in (16, 17)]
        [False, True]
        """
        if not isinstance(self.rope_scaling, LongRopeScaling):
            return self
        long = longest > self.rope_scaling.original_positions
        scaling = dataclasses.replace(self.rope_scaling, long=long)
        return dataclasses.replace(self, rope_scaling=scaling)

    @property
    def attends_within_images(self) -> bool:
        """Return whether tokens of an image attend to all others of it, as in Gemma 3."""
        return self.vision is not None and self.vision.kind == "siglip"

    @property
    def rotary_width(self) -> int:
        """Return how many of a head's dimensions are rotated."""
        if self.latent is not None:
            return self.latent.rope_width
        return int(self.head_dim * self.rotary_fraction)

    @property
    def score_scale(self) -> float:
        """Return what products of queries and keys are multiplied by."""
        return (self.head_dim if self.query_scalar is None else self.query_scalar) ** -0.5

    def stack_of(self, number: int) -> str:
        """Return the name of the stack that holds a layer."""
        is_dense = self.moe is not None and number < self.moe.dense_layers
        is_delta = bool(self.delta_layers) and self.delta_layers[number]
        return ("dense_" if is_dense else "") + ("delta_layers" if is_delta else "layers")

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Return the stacks of alike layers, by name, with the numbers of the layers of each."""
        stacks: dict[str, tuple[int, ...]] = {}
        for number in range(self.layers):
            name = self.stack_of(number)
            stacks[name] = (*stacks.get(name, ()), number)
        return stacks

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the layers in order, as blocks that each repeat their shortest period.

        >>> from jaxrl_llm.models.delta import DeltaSpec
        >>> delta = DeltaSpec(key_heads=1, value_heads=1, key_width=2, value_width=2)
        >>> spec = tiny_spec(layers=6, delta=delta, delta_layers=(True, True, False) * 2)
        >>> spec.blocks
        (Block(repeats=2, runs=(('delta_layers', 2), ('layers', 1))),)
        """
        names = [self.stack_of(number) for number in range(self.layers)]
        blocks: list[Block] = []
        for _, group in itertools.groupby(names, key=lambda name: name.startswith("dense_")):
            part = list(group)
            period = next(
                n for n in range(1, len(part) + 1) if all(map(str.__eq__, part, part[n:]))
            )
            repeats = len(part) // period
            for times, layers in ((repeats, part[:period]), (1, part[repeats * period :])):
                runs = tuple((name, len([*run])) for name, run in itertools.groupby(layers))
                blocks += [Block(times, runs)] if runs else []
        return tuple(blocks)
