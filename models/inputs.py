"""What a model is given beside its tokens: positions, images, rows of patches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxrl_llm.models.kernels import MOST_SEGMENTS
from jaxrl_llm.models.vision.spec import VisionSpec


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


class RowInputs(NamedTuple):
    """What a model may be given of rows of tokens beside the tokens.

    Attributes:
        routes: Experts that tokens go to in each layer that has some, as for
            `models.moe.routing.replay_routes`; None: routers choose.
        visual: Features that stand in place of the embeddings of some tokens; None: of none.
        rotary: Time, height and width of each token, for a model with `mrope_sections`; None: all
            three are its position.
    """

    routes: Int[Array, "R L M top"] | None = None
    visual: VisualTokens | None = None
    rotary: Int[Array, "R L 3"] | None = None


NO_INPUTS = RowInputs()


class PatchRows(NamedTuple):
    """Rows of packed patches, each array with the rows first, of numpy or JAX.

    Attributes:
        patches: Pixels, as in `Visual`; 0 at padding.
        frames: 1, 2, … for the frames of a row, each contiguous; 0 at padding.
        places: Row and column of each patch in its frame, and that frame's height and width, all in
            patches.
        windows: 1, 2, … for the windows of a row, each contiguous; 0 at padding. None: the tower
            has no windows, and patches are in the order of `Visual`. Else the tokens of a frame,
            each with its patches, are in the order of its windows.
        order: For each token of the visuals, in their order, where it is among those of the row;
            None: at its own place.
    """

    patches: UInt8[Any, "R P F"]
    frames: Int[Any, "R P"]
    places: Int[Any, "R P 4"]
    windows: Int[Any, "R P"] | None = None
    order: Int[Any, "R V"] | None = None


class FrameBounds(NamedTuple):
    """What is known of all frames of some rows; it decides what memory attention takes.

    Attributes:
        longest: Most patches of a frame; None: one may fill a row.
        most: Most frames of a row; None: any number.
    """

    longest: int | None = None
    most: int | None = None

    def rounded(self) -> "FrameBounds":
        """Return bounds that hold, too, and of which there are few: a program is made for each.

        >>> FrameBounds(longest=60, most=5).rounded(), FrameBounds(longest=64, most=17).rounded()
        (FrameBounds(longest=64, most=16), FrameBounds(longest=64, most=None))
        """
        longest = self.longest and 2 ** math.ceil(math.log2(self.longest))
        few = self.most is not None and self.most <= MOST_SEGMENTS
        return FrameBounds(longest, MOST_SEGMENTS if few else None)


def patch_rows(spec: VisionSpec, visuals: Sequence[Sequence[Visual]], length: int) -> PatchRows:
    """Pack the images and videos of some rows.

    Args:
        spec: The tower.
        visuals: Those of each row, in order.
        length: Patches P of each row, a multiple of those of a token.

    Returns:
        The rows. The features that a tower makes of them are in the order of the visuals, V = P /
        `spec.group` of a row.

    Raises:
        ValueError: A row's patches are more than `length`, which they must fit in as tokens, or a
            visual was not cut for this tower.

    >>> spec = tiny_vision()
    >>> image = Visual(np.zeros((8, 24), np.uint8), (1, 2, 4), 2, b"")
    >>> rows = patch_rows(spec, [[image], []], 12)
    >>> rows.frames.tolist()[0]
    [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    >>> rows.places[0, 4].tolist()
    [0, 2, 2, 4]
    """
    if length % spec.group:
        raise ValueError(f"rows of {length} patches; expected a multiple of {spec.group}")
    rows = PatchRows(
        np.zeros((len(visuals), length, spec.patch_width), np.uint8),
        np.zeros((len(visuals), length), np.int32),
        np.zeros((len(visuals), length, 4), np.int32),
    )
    if spec.window is not None:
        places = np.arange(length // spec.group, dtype=np.int32)
        order = np.tile(places, (len(visuals), 1))
        rows = rows._replace(windows=np.zeros_like(rows.frames), order=order)
    for row, images in enumerate(visuals):
        start = 0
        for image in images:
            check_visual(spec, image)
            if start + len(image.patches) > length:
                patches = sum(len(each.patches) for each in images)
                raise ValueError(f"row {row} has {patches} patches; expected at most {length}")
            _write(spec, image, rows, row, start)
            start += len(image.patches)
    return rows


def frame_bounds(visuals: Sequence[Sequence[Visual]]) -> FrameBounds:
    """Return the longest frame of some rows, and the most frames of one.

    Where several processes share the rows, all must give the same.

    >>> image = Visual(np.zeros((24, 24), np.uint8), (3, 2, 4), 2, b"")
    >>> frame_bounds([[image], [image, image], []])
    FrameBounds(longest=8, most=6)
    """
    grids = [[image.grid for image in images] for images in visuals]
    sizes = [height * width for row in grids for _, height, width in row]
    return FrameBounds(
        max(sizes, default=1), max((sum(t for t, _, _ in row) for row in grids), default=0)
    )


def check_visual(spec: VisionSpec, image: Visual) -> None:
    """Refuse an image or a video that was not cut for a tower.

    Raises:
        ValueError: its patches are others.
    """
    frames, height, width = image.grid
    expected = (frames * height * width, spec.patch_width)
    if image.merge != spec.merge or height % spec.merge or width % spec.merge:
        raise ValueError(
            f"a grid of {height} x {width} patches, merged by {image.merge}; the tower merges "
            f"squares of {spec.merge} x {spec.merge}"
        )
    if spec.kind == "siglip" and image.grid != (1, spec.position_side, spec.position_side):
        raise ValueError(
            f"a grid of {image.grid} patches; the tower has positions for "
            f"{spec.position_side} x {spec.position_side} of one image"
        )
    if image.patches.shape != expected or image.patches.dtype != np.uint8:
        raise ValueError(
            f"patches of shape {image.patches.shape} and {image.patches.dtype} for a grid of "
            f"{image.grid}; the tower expects {expected} and uint8"
        )


def _write(spec: VisionSpec, image: Visual, rows: PatchRows, row: int, start: int) -> None:
    """Write an image's patches into a row; frames and windows are numbered after those before."""
    _, height, width = image.grid
    number, row_of, column_of = _coordinates(image.grid, spec.merge)
    sizes = (np.full_like(number, size) for size in (height, width))
    place = np.stack([row_of, column_of, *sizes], axis=1)
    taken = np.arange(len(number))
    at = slice(start, start + len(number))
    if spec.window is not None:
        assert rows.windows is not None and rows.order is not None
        side = spec.window * spec.merge
        across = -(-width // side)
        window = (number * -(-height // side) + row_of // side) * across + column_of // side
        tokens = np.argsort(window[:: spec.group], kind="stable")
        taken = (tokens[:, None] * spec.group + np.arange(spec.group)).ravel()
        before = rows.windows[row].max()
        rows.windows[row, at] = before + 1 + window[taken]
        first = start // spec.group
        rows.order[row, first : first + len(tokens)] = first + np.argsort(tokens)
    rows.patches[row, at] = image.patches[taken]
    rows.frames[row, at] = rows.frames[row].max() + 1 + number[taken]
    rows.places[row, at] = place[taken]


def _coordinates(
    grid: tuple[int, int, int], merge: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frame, row and column of each patch; those of a token are next to each other."""
    frames, height, width = grid
    shape = (frames, height // merge, merge, width // merge, merge)
    index = np.arange(frames * height * width).reshape(grid).reshape(shape)
    index = index.transpose(0, 1, 3, 2, 4).ravel()
    frame, rest = np.divmod(index, height * width)
    return frame, *np.divmod(rest, width)
