"""Images in the engine: what a request brings, and the vision tower that encodes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxrl_llm.models.inputs import FrameBounds, PatchRows, Visual, VisualFeatures, check_visual
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import placeholders
from jaxrl_llm.rollout.engine import EngineError, Request, images_refused
from jaxrl_llm.rollout.native.page_pool import Sizes
from jaxrl_llm.sharding.layout import Layout


@dataclass(frozen=True, eq=False)
class PromptVisuals:
    """Where a prompt holds its images and videos.

    Attributes:
        number: which visual each token is of; -1 for text.
        index: which of its tokens.
        keys: what the tokens are known by where pages are shared: text by its token ids, images by
            negative numbers that depend on what they show.
        rotary: time, height and width of each token; None: its position is all that counts.
        delta: what is added to the position of what follows the prompt.
        whole: whether the tokens of an image are read together, as they attend to each other.
    """

    number: Int[np.ndarray, " T"]
    index: Int[np.ndarray, " T"]
    keys: tuple[int, ...]
    rotary: Int[np.ndarray, "T 3"] | None
    delta: int
    whole: bool

    def first(self, visual: int) -> int:
        """Return where the first token of a visual is."""
        return int(np.argmax(self.number == visual))

    def within(self, start: int, end: int) -> Iterator[int]:
        """Yield the visuals of which some token is among these, in order."""
        present = np.unique(self.number[start:end])
        yield from present[present >= 0].tolist()

    def whole_until(self, start: int, end: int) -> int:
        """Return where a piece of the prompt from `start` on ends, up to `end`.

        It holds no part of an image that is to be read whole, but for the rest of one.
        """
        splits = self.whole and end < len(self.number) and self.number[end] >= 0
        if not splits or self.number[end] != self.number[end - 1]:
            return end
        return max(start, self.first(int(self.number[end])))


def check_visuals(model: Model, request: Request, sizes: Sizes) -> None:
    """Refuse a request whose images and videos the engine can't read.

    Raises:
        EngineError: The model has no tower, a visual was not cut for it or is larger than what is
            read at once, placeholder tokens are not those of the visuals, the last token is one, or
            a bias raises a token that is never sampled.
    """
    vision = model.vision
    if vision is None:
        if request.visuals:
            raise images_refused(request)
        return
    _check_placeholders(vision, request)
    for visual in request.visuals:
        _check_size(model, visual, sizes)
    raised = {token for token, bias in request.sampling.logit_bias if bias > 0}
    if never := raised & {*vision.never_sampled}:
        raise EngineError(f"logit_bias raises token id {min(never)}, which is never sampled")


def read_prompt(model: Model, request: Request) -> PromptVisuals | None:
    """Return where a checked prompt holds its visuals; None: it is text.

    Raises:
        EngineError: Tokens of an image are not next to each other.
    """
    vision = model.vision
    if vision is None or not request.visuals:
        return None
    tokens = np.array(request.prompt, np.int32)
    places = np.flatnonzero(np.isin(tokens, placeholders(vision)))
    number, index = np.full((2, len(tokens)), -1, np.int32)
    counts = [visual.tokens for visual in request.visuals]
    number[places] = np.repeat(np.arange(len(counts)), counts)
    index[places] = np.concatenate([np.arange(count) for count in counts])
    keys, bases = list(request.prompt), [int.from_bytes(visual.key) for visual in request.visuals]
    for place in places.tolist():
        keys[place] = -1 - (bases[number[place]] << 32 | int(index[place]))
    rotary, delta = None, 0
    if model.has_rotary_positions:
        try:
            rotary, delta = model.rotary_positions(tokens, request.visuals)
        except ValueError as error:
            raise EngineError(str(error)) from error
    whole = model.attends_within_images
    return PromptVisuals(number, index, tuple(keys), rotary, delta, whole)


def _check_size(model: Model, visual: Visual, sizes: Sizes) -> None:
    """Refuse a visual that was not cut for the tower, or that it has no room for."""
    assert model.vision is not None  # for pyright
    try:
        check_visual(model.vision, visual)
    except ValueError as error:
        raise EngineError(str(error)) from error
    most, _ = sizes.patch_shapes[-1]
    if len(visual.patches) > most:
        raise EngineError(
            f"got an image or a video of {len(visual.patches)} patches (t, h, w = {visual.grid}), "
            f"expected at most {most}: lower data.max_pixels"
        )
    at_once = max(length for _, length in sizes.prefill_shapes)
    if model.attends_within_images and visual.tokens > at_once:
        raise EngineError(
            f"got an image of {visual.tokens} tokens that attend to each other, expected at most "
            f"{at_once}, which are read at once"
        )


def _check_placeholders(vision: VisionSpec, request: Request) -> None:
    """Refuse a prompt that has other placeholder tokens than its visuals have tokens."""
    if vision.video_id is None and any(visual.is_video for visual in request.visuals):
        raise EngineError("got a video, but this model reads none; expected images")
    ids = placeholders(vision)
    given = [token for token in request.prompt if token in ids]
    expected = [
        vision.video_id if visual.is_video else vision.image_id
        for visual in request.visuals
        for _ in range(visual.tokens)
    ]
    if given != expected:
        counts = ", ".join(str(visual.tokens) for visual in request.visuals) or "none"
        kinds = " and ".join(f"{given.count(token)} of id {token}" for token in ids)
        raise EngineError(
            f"the prompt holds placeholder tokens of images and videos, {kinds}; expected one for "
            f"each token of its {len(request.visuals)} images and videos ({counts}), in their order"
        )
    if request.prompt[-1] in ids:
        raise EngineError("the prompt ends within an image or a video; expected text after it")


# The vision tower in the engine: its programs, and slots for the features that it makes.
#
# Features lie in slots, [parts, slots, …], one for each token of an image, of the part of the
# batch that reads it.


def encode_into(
    params: Any,
    model: Model,
    held: VisualFeatures,
    patches: PatchRows,
    slots: Int[Array, "parts V"],
    *,
    bounds: FrameBounds,
    layout: Layout | None = None,
) -> VisualFeatures:
    """Read images and videos, and keep their features.

    Args:
        params: in the compute dtype.
        model: that has a tower.
        held: the slots of all parts.
        patches: a row for each part.
        slots: where the features go, in the order of the visuals; past the slots they are dropped.
        bounds: what is known of the frames.
        layout: how the parts are split over a mesh.
    """
    dtype = held.features.dtype
    options = {"dtype": dtype, "remat": "none", "layout": layout, "bounds": bounds}
    new = model.encode_visuals(params, patches, **options)

    def written(held: Array, at: Array, new: Array) -> Array:
        return held.at[..., at, :].set(new.astype(dtype), mode="drop")

    return jax.tree.map(lambda held, new: jax.vmap(written)(held, slots, new), held, new)
