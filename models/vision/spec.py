"""The hyper-parameters of a vision tower."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """Describe a vision tower and the tokens that stand for what it reads.

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
        image_mean: Subtracted from each color channel, after division by 255.
        image_std: That it is divided by then.
        image_id: Placeholder token of an image; each of its tokens is one.
        video_id: The same of a video; None: the model reads none.
        marks: Further token ids that only prompts hold, such as start and end of an image.
    """

    kind: Literal["qwen3", "qwen2_5", "siglip"]
    layers: int
    hidden_size: int
    heads: int
    ff_width: int
    patch: int
    frames_per_patch: int
    merge: int
    out_size: int
    position_side: int
    deep_layers: tuple[int, ...] = ()
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    image_id: int
    video_id: int | None = None
    marks: tuple[int, ...] = ()

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """Return the token ids that no answer holds: their logits are left out of every softmax."""
        ids = (self.image_id, self.video_id, *self.marks)
        return tuple(sorted({number for number in ids if number is not None}))
