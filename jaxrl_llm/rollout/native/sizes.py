"""The few shapes that the engine's programs have."""

import itertools
import math
from typing import NamedTuple

from jaxrl_llm.sharding.layout import Layout, batch_shards

PAGE = 16
"""Tokens that a page holds."""

FEWEST_ROWS = 8
SHORTEST_ROW = 128  # tokens
PREFILL_LENGTHS = (32, 256)  # tokens of a prompt that are read at once
PREFILL_TOKENS = (256, 1024)  # tokens of all prompts

PATCH_LENGTHS = (256, 1024, 4096, 16384, 65536)  # patches that a part reads at once
PATCHES_AT_ONCE = 4096  # of several images
SHORT_FRAME = 1024  # patches; where all frames are so short, attention over many takes less


class Sizes(NamedTuple):
    """The shapes of all programs.

    Attributes:
        parts: of a batch, each with pages of its own.
        pages: of a part.
        rows: how many sequences are decoded at once; one of these numbers.
        widths: how many tokens a row holds; one of these numbers.
        prefill_shapes: how many prompts are read at once, and of how many tokens.
        steps: tokens that are decoded in a chunk.
        has_rows: whether pages are gathered into rows, for which there is as much room again.
        slots: of a part, each for a state; 0 for a model without.
        visual_tokens: of images and videos whose features a part holds; 0 for a model of text.
        patch_shapes: how many patches a part reads at once, and the longest frame of them.
    """

    parts: int
    pages: int
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    prefill_shapes: tuple[tuple[int, int], ...]
    steps: int
    has_rows: bool = True
    slots: int = 0
    visual_tokens: int = 0
    patch_shapes: tuple[tuple[int, int], ...] = ()

    @property
    def capacity(self) -> int:
        """Return how many tokens the pool holds, and the rows at most."""
        return self.parts * self.pages * PAGE

    def fits(self, rows: int, width: int) -> bool:
        """Return whether so many rows may be decoded at once."""
        return not self.has_rows or rows * width <= self.capacity or rows == self.rows[0]

    @property
    def largest(self) -> tuple[int, int]:
        """Return rows and width of the most that is decoded at once."""
        fitting = [(n, w) for n in self.rows for w in self.widths if self.fits(n, w)]
        return max(fitting, key=lambda shape: (shape[0] * shape[1], shape[1]))

    def width(self, length: int) -> int:
        """Return the narrowest row that holds so many tokens."""
        return next(width for width in self.widths if width >= length)


def choose_sizes(
    *,
    parts: int,
    max_running_sequences: int,
    max_tokens: int,
    steps: int,
    pages: int | None = None,
) -> Sizes:
    """Choose few shapes: parts of the running sequences, and of the longest one.

    Args:
        parts: of a batch.
        max_running_sequences: a multiple of the parts.
        max_tokens: the longest sequence.
        steps: tokens decoded in a chunk.
        pages: of a part; None is enough for all.

    >>> choose_sizes(parts=1, max_running_sequences=32, max_tokens=600, steps=16).rows
    (8, 16, 32)
    >>> choose_sizes(parts=1, max_running_sequences=32, max_tokens=600, steps=16).widths
    (160, 304, 608)
    """
    longest, running = _up(max_tokens, PAGE), max_running_sequences
    widths = {_up(longest / n, PAGE) for n in (4, 2) if longest >= n * SHORTEST_ROW}
    rows = {_up(running / n, parts) for n in (16, 4, 2) if running >= n * FEWEST_ROWS}
    lengths = {min(length, longest) for length in PREFILL_LENGTHS}
    prefill_shapes = {
        (_up(min(max(1, tokens // length), running), parts), length)
        for tokens, length in itertools.product(PREFILL_TOKENS, lengths)
    }
    return Sizes(
        parts,
        running // parts * (longest // PAGE + 1) if pages is None else pages,
        tuple(sorted(rows | {running})),
        tuple(sorted(widths | {longest})),
        tuple(sorted(prefill_shapes)),
        steps,
    )


def with_visuals(sizes: Sizes, patches: int, tokens: int) -> Sizes:
    """Return shapes with those of a vision tower.

    Args:
        sizes: of the text.
        patches: of the largest image, or more.
        tokens: of images whose features a part holds.

    >>> sizes = choose_sizes(parts=1, max_running_sequences=8, max_tokens=600, steps=16)
    >>> with_visuals(sizes, 4800, 4800).patch_shapes
    ((256, 256), (1024, 1024), (4096, 1024), (4096, 4096), (4800, 1024), (4800, 4800))
    """
    largest = min(patches, PATCH_LENGTHS[-1])
    lengths = [length for length in PATCH_LENGTHS if length < largest] + [largest]
    # a part attends to itself and to one on each side of it
    short = {(length, SHORT_FRAME) for length in lengths if length > 3 * SHORT_FRAME}
    shapes = short | {(length, length) for length in lengths}
    return sizes._replace(visual_tokens=tokens, patch_shapes=tuple(sorted(shapes)))


def _up(number: int | float, unit: int) -> int:
    return math.ceil(number / unit) * unit


def touched(tokens: int) -> int:
    """Return how many pages so many tokens side by side touch at most.

    >>> touched(16), touched(1)
    (2, 1)
    """
    return (tokens + PAGE - 2) // PAGE + 1


def count_parts(layout: Layout, max_running_sequences: int) -> int:
    """Return into how many parts a batch is split.

    Raises:
        ValueError: the sequences can't be shared evenly, or the mesh has stages or contexts.
    """
    idle = [axis for axis in ("stage", "context") if layout.mesh.shape[axis] > 1]
    if idle:
        raise ValueError(f"nothing is decoded over the axis {idle[0]!r}; expected a size of 1")
    parts = batch_shards(layout.mesh)
    if max_running_sequences % parts:
        raise ValueError(
            f"rollout.max_running_sequences={max_running_sequences} can't be shared evenly by the "
            f"{parts} parts of a batch; expected a multiple of {parts}"
        )
    return parts
