"""The hyper-parameters of a vision tower."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

TowerKind: TypeAlias = Literal["qwen3", "qwen2_5", "siglip"]
"""Of Qwen3-VL and Qwen3.5, of Qwen2.5-VL, and of Gemma 3."""

CHANNELS = 3
"""Colors of a pixel."""
ROPE_THETA = 1e4
"""Base of the rotary frequencies of towers that have such."""


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Describe a vision tower and the tokens that stand for what it reads.

    Hashable, so that it can be a static argument of `jax.jit`.

    Args:
        kind: Of the tower.
        layers: Number of blocks.
        hidden_size: Width of the tower.
        heads: Attention heads.
        ff_width: Feed-forward width.
        patch: Side of a patch, in pixels.
        frames_per_patch: Frames that a patch spans; a still image is repeated.
        merge: Side of the square of patches that become one token.
        out_size: Width of the features, that of the decoder's embeddings.
        position_side: Side of the square table of learned positions; 0: none.
        deep_layers: Blocks whose output goes to the decoder's first layers (DeepStack), from 0.
        window: Side of the squares within which patches attend to each other, in tokens; None:
            patches attend to all of their frame.
        full_layers: Blocks that have no such window, from 0.
        activation: Of the feed-forward, "gelu_tanh" or "silu".
        norm_eps: Added to the variance, or the mean square, in every norm.
        init_std: Standard deviation of random weights.
        image_mean: Subtracted from each color channel, after division by 255.
        image_std: That it is divided by then.
        image_id: Placeholder token of an image; each of its tokens is one.
        video_id: The same of a video; None: the model reads none.
        marks: Further token ids that only prompts hold, such as start and end of an image.
        tokens_per_second: Steps of the time of M-RoPE in a second of a video; None: frames of a
            video have no time but that in the text between them.
        hf_prefix: What names of its arrays in a checkpoint begin with.

    Raises:
        ValueError: A size is not positive, heads don't divide the width or have a width that is no
            multiple of 4, the activation is unknown, or a list of blocks names one that is not
            there.
    """

    kind: TowerKind
    layers: int
    hidden_size: int
    heads: int
    ff_width: int
    patch: int
    frames_per_patch: int
    merge: int
    out_size: int
    position_side: int = 0
    deep_layers: tuple[int, ...] = ()
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    activation: str = "gelu_tanh"
    norm_eps: float = 1e-6
    init_std: float = 0.02
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    image_id: int
    video_id: int | None = None
    marks: tuple[int, ...] = ()
    tokens_per_second: int | None = None
    hf_prefix: str = "model.visual."

    def __post_init__(self) -> None:
        names = ("layers", "hidden_size", "heads", "ff_width", "patch", "frames_per_patch")
        sizes = {name: getattr(self, name) for name in (*names, "merge", "out_size")}
        if wrong := {name: size for name, size in sizes.items() if size < 1}:
            raise ValueError(f"sizes of a vision tower must be positive, got {wrong}")
        if self.activation not in ("gelu_tanh", "silu"):
            raise ValueError(f"activation {self.activation!r}; expected gelu_tanh or silu")
        if self.hidden_size % self.heads or self.head_dim % 4:
            raise ValueError(
                f"heads must divide the width of a vision tower into widths that are multiples of "
                f"4, got heads={self.heads} for hidden_size={self.hidden_size}"
            )
        for name in ("deep_layers", "full_layers"):
            blocks = getattr(self, name)
            if sorted(set(blocks) & set(range(self.layers))) != list(blocks):
                raise ValueError(
                    f"{name}={blocks}; expected ascending numbers of the {self.layers} blocks"
                )
        if self.full_layers and self.window is None:
            raise ValueError("full_layers says which blocks have no window, but window is None")

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden_size // self.heads

    @property
    def patch_width(self) -> int:
        """Return how many numbers a patch is, F."""
        return CHANNELS * self.frames_per_patch * self.patch**2

    @property
    def group(self) -> int:
        """Return how many patches become one token."""
        return self.merge**2

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """Return the token ids that no answer holds: their logits are left out of every softmax."""
        ids = (self.image_id, self.video_id, *self.marks)
        return tuple(sorted({number for number in ids if number is not None}))
