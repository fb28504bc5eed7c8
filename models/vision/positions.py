"""Where the tokens of a prompt with images and videos are (M-RoPE), on the host."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from jaxrl_llm.models.vision.inputs import Visual
from jaxrl_llm.models.vision.spec import VisionSpec


def rotary_positions(
    spec: VisionSpec, tokens: Int[np.ndarray, " T"], visuals: Sequence[Visual]
) -> tuple[Int[np.ndarray, "T 3"], int]:
    """Return time, height and width of each token of a prompt (https://arxiv.org/abs/2409.12191).

    A token of text is at the same number in all three, the next of its sequence. One of an image
    is at its row and column from there on, and what follows is one further than the furthest of
    them. The frames of a video have times if `spec.tokens_per_second` is set; else each is placed
    as an image, and text between them tells the time.

    Args:
        spec: The tower.
        tokens: Ids of the prompt, with a placeholder for each token of an image.
        visuals: What the placeholders stand for, in order.

    Returns:
        The positions; and what is added to the index of a later token to get its position.

    Raises:
        ValueError: There are not as many placeholders as the visuals have tokens, or other tokens
            stand between those of an image.

    >>> spec = tiny_vision(image_id=9)
    >>> image = Visual(np.zeros((8, 24), np.uint8), (1, 4, 2), 2, b"")
    >>> positions, offset = rotary_positions(spec, np.array([5, 9, 9, 5]), [image])
    >>> positions.tolist(), offset
    ([[0, 0, 0], [1, 1, 1], [1, 2, 1], [3, 3, 3]], 0)
    """
    places = np.flatnonzero(np.isin(tokens, placeholders(spec)))
    needed = sum(visual.tokens for visual in visuals)
    if len(places) != needed:
        raise ValueError(
            f"a prompt with {len(places)} placeholder tokens, for images and videos of "
            f"{needed} tokens"
        )
    parts, index, following, used = list[np.ndarray](), 0, 0, 0
    for block in _blocks(spec, visuals):
        start, end = places[used], places[used] + len(block)
        if places[used + len(block) - 1] != end - 1:
            raise ValueError(
                f"tokens of an image from {start} on are not next to each other; expected "
                f"{len(block)} placeholders"
            )
        text = following + np.arange(start - index)
        first = following + len(text)
        parts += [np.stack([text] * 3, axis=1), first + block]
        index, following, used = end, first + int(block.max()) + 1, used + len(block)
    rest = following + np.arange(len(tokens) - index)
    parts.append(np.stack([rest] * 3, axis=1))
    return np.concatenate(parts).astype(np.int32), int(following - index)


def placeholders(spec: VisionSpec) -> list[int]:
    """Return the ids of the tokens that stand for those of images and videos."""
    return [spec.image_id] if spec.video_id is None else [spec.image_id, spec.video_id]


def _blocks(spec: VisionSpec, visuals: Sequence[Visual]) -> Iterator[Int[np.ndarray, "N 3"]]:
    """Yield the positions within each run of tokens, from 0."""
    for visual in visuals:
        frames, height, width = visual.grid
        size = frames, height // visual.merge, width // visual.merge
        block = np.indices(size).reshape(3, -1).T
        if spec.tokens_per_second is not None:
            times = _times(spec.tokens_per_second, visual)
            yield np.column_stack([times[block[:, 0]], block[:, 1:]])
        else:
            block[:, 0] = 0
            yield from np.split(block, frames)


def _times(per_second: float | int, visual: Visual) -> Int[np.ndarray, " t"]:
    """Return the time of each frame, from 0, in float32 as the families' code.

    A step is the same between all frames; it is rounded before it is narrowed, since differences of
    seconds are not exact.
    """
    frames = np.arange(visual.grid[0])
    if len(frames) == 1 or not visual.is_video:
        return frames
    step = np.float32(per_second * round(visual.seconds[1] - visual.seconds[0], 9))
    return (frames.astype(np.float32) * step).astype(np.int64)
