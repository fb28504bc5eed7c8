"""What a tower reads, and what the decoder reads of it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, UInt8


@dataclass(frozen=True, eq=False)
class Visual:
    """An image or a video, cut into patches, on the host.

    Attributes:
        patches: Pixels after resizing and before normalization, one row of F numbers for each
            patch, in the order and layout of the family's image processor.
        grid: Frames (of a video: groups of frames that are read together), and height and width in
            patches.
        merge: Side of the square of patches that become one token.
        key: Digest of all the others; equal keys mean equal features and positions.
        seconds: Time of each frame of a video; empty for an image.
    """

    patches: UInt8[np.ndarray, "P F"]
    grid: tuple[int, int, int]
    merge: int
    key: bytes
    seconds: tuple[float, ...] = ()

    @property
    def is_video(self) -> bool:
        """Tell whether it is a video."""
        return bool(self.seconds)

    @property
    def tokens(self) -> int:
        """Return how many tokens stand for it."""
        return math.prod(self.grid) // self.merge**2


class VisualFeatures(NamedTuple):
    """What a tower makes of R rows of patches.

    Attributes:
        features: In place of the embeddings of V tokens per row, in the order of the visuals.
        deep: Further features, added to the residual stream after each of the first K layers
            (DeepStack, https://arxiv.org/abs/2406.04334); None: the tower has none.
    """

    features: Float[Array, "R V D"]
    deep: Float[Array, "R K V D"] | None = None


class VisualTokens(NamedTuple):
    """Features for the placeholder tokens of packed rows.

    Attributes:
        feature: For each token its feature, counted within the row; -1 for text.
        given: The features of each row.
    """

    feature: Int[Array, "R L"]
    given: VisualFeatures
