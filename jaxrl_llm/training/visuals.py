"""Images and videos beside packed rows: which share a row, where their tokens are, their features.

Rows of patches have the indices of the rows of tokens, so that both are on the same devices. There
is a place for each token that a row may have of images and videos, whatever it has: ranks then take
equally long.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxrl_llm.compiler_options import Task, compiler_options
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import DataConfig, ModelConfig, SftDataConfig
from jaxrl_llm.data.packing import RowShape, best_fit
from jaxrl_llm.data.visuals.processor import configured_processor
from jaxrl_llm.data.visuals.rows import RowVisuals
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.inputs import (
    FrameBounds,
    PatchRows,
    Visual,
    VisualFeatures,
    frame_bounds,
    patch_rows,
)
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import placeholders
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout, batch_shards, over_batch
from jaxrl_llm.types import Batch, VisualRows

LEAST_TOKENS = 256
"""Of a row that a frozen tower reads: shorter ones are padded to as many."""


NO_TOKEN = -1
"""In place of the ids of drawn tokens."""


class FrozenTower:
    """A vision tower that is not trained, and its features of the images of a step.

    They are kept on the host: what micro-batches need of them is sent with these.

    Args:
        params: of the tower, in the compute dtype.
        model: that it belongs to.
        layout: where it stands.
        dtype: of computing.
    """

    def __init__(self, params: Params, model: Model, layout: Layout, dtype: str) -> None:
        """Know no features yet."""
        self.params = params
        self._spec, self._layout, self._dtype = vision_of(model), layout, dtype
        self._known: dict[bytes, VisualFeatures] = {}

        def encode(params: Params, rows: PatchRows, bounds: FrameBounds) -> VisualFeatures:
            return model.encode_visuals(
                {"vision": params},
                rows,
                dtype=dtype,
                remat="none",
                layout=layout,
                bounds=bounds,
            )

        options = compiler_options(Task.TRAIN, layout.mesh.devices.flat)
        self._encode = jax.jit(encode, static_argnums=2, compiler_options=options)

    def keep(self, batch: Batch) -> None:
        """Compute the features of a step's images, and forget others."""
        needed = {visual.key: visual for visuals in batch.visuals for visual in visuals}
        self._known = {key: own for key, own in self._known.items() if key in needed}
        self.features(needed.values())

    def features(self, visuals: Iterable[Visual]) -> list[VisualFeatures]:
        """Return the features of images, as one row [1 V D] each; compute what is not known."""
        given = list(visuals)
        missing = list({v.key: v for v in given if v.key not in self._known}.values())
        if missing:
            self._compute(missing)
        return [self._known[visual.key] for visual in given]

    def rows(self, visuals: Sequence[Sequence[Visual]], length: int) -> VisualFeatures:
        """Return the features of rows of images, padded to `length` tokens."""
        spec, dtype = self._spec, jax.numpy.dtype(self._dtype)
        features: Any = np.zeros((len(visuals), length, spec.out_size), dtype)
        deep: Any = None
        if spec.deep_layers:
            shape = len(visuals), len(spec.deep_layers), length, spec.out_size
            deep = np.zeros(shape, dtype)
        for row, images in enumerate(visuals):
            at = 0
            for own in self.features(images):
                end = at + own.features.shape[1]
                features[row, at:end] = own.features[0]
                if deep is not None and own.deep is not None:
                    deep[row, :, at:end] = own.deep[0]
                at = end
        return VisualFeatures(features, deep)

    def _compute(self, visuals: Sequence[Visual]) -> None:
        """Run the tower over images, a row on each device at a time."""
        sizes, ranks = np.array([v.tokens for v in visuals]), batch_shards(self._layout.mesh)
        length = max(LEAST_TOKENS, 2 ** math.ceil(math.log2(sizes.max())))
        shape = RowShape(rows=ranks, length=length, sequences=len(visuals) * ranks, ranks=ranks)
        images = [[visuals[i] for i in row] for row in best_fit(sizes, shape)]
        images += [[] for _ in range(-len(images) % ranks)]
        bounds = frame_bounds(images).rounded()  # of all, so that one program serves
        for first in range(0, len(images), ranks):
            some = images[first : first + ranks]
            patches = patch_rows(self._spec, some, length * self._spec.group)
            rows = distributed.put(patches, over_batch(self._layout.mesh))
            made = distributed.fetch(self._encode(self.params, rows, bounds))
            for row, own in enumerate(some):
                at = 0
                for visual in own:
                    end = at + visual.tokens
                    deep = None if made.deep is None else made.deep[row : row + 1, :, at:end]
                    features = VisualFeatures(made.features[row : row + 1, at:end], deep)
                    self._known[visual.key] = jax.tree.map(np.copy, features)
                    at = end


@dataclass(frozen=True, eq=False)
class VisualPacker:
    """Packs the images and videos of sequences beside their tokens.

    Attributes:
        model: that reads them.
        tower: of which there are features; None: micro-batches hold patches, for the model's own.
        max_pixels: of an image, or of a frame of a video; None: any number.
    """

    model: Model
    tower: FrozenTower | None = None
    max_pixels: int | None = None

    @property
    def spec(self) -> VisionSpec:
        """Return what the model knows of images."""
        return vision_of(self.model)

    @property
    def bounds(self) -> FrameBounds:
        """Return what is known of all frames, for the model's own tower."""
        return FrameBounds(self.max_pixels and self.max_pixels // self.spec.patch**2)

    def sizes(self, batch: Batch, shape: RowShape) -> Int[np.ndarray, " B"]:
        """Return the room in a row that each sequence takes: of its tokens, or of its images.

        Where all sequences of a row have room for their tokens and images of few tokens, so has the
        row for both.

        Args:
            batch: of B sequences.
            shape: of micro-batches.

        Raises:
            ValueError: a sequence has more images than a row has room for.
        """
        visual = np.array([sum(v.tokens for v in own) for own in batch.visuals])
        if (most := visual.max(initial=0)) > shape.visual_room(shape.width):
            raise ValueError(f"sequence {visual.argmax()}: {_too_many(int(most), shape)}")
        needed = np.ceil(visual / shape.visual_share - 1e-9).astype(batch.sequence_lengths.dtype)
        return np.maximum(batch.sequence_lengths, needed)

    def rows(self, batch: Batch, members: Sequence[Sequence[int]], shape: RowShape) -> VisualRows:
        """Return the images and videos of a micro-batch.

        Args:
            batch: with its visuals, and the mask of drawn tokens if there are any.
            members: for each of its rows, the indices of the sequences in it.
            shape: of it.

        Raises:
            ValueError: a sequence has not as many placeholder tokens as its images need.
        """
        visuals, drawn = batch.visuals, batch.fields.get("mask")
        numbers = np.full((shape.rows, shape.length), -1, np.int32)
        rotary = (
            np.zeros((*numbers.shape, 3), np.int32) if self.model.has_rotary_positions else None
        )
        for row, sequences in enumerate(members):
            at = feature = 0
            for i in sequences:
                size = int(batch.sequence_lengths[i])
                tokens = batch.tokens[i, :size]
                if drawn is not None:  # what was drawn stands for no image, whatever it is
                    tokens = np.where(drawn[i, :size], NO_TOKEN, tokens)
                places = at + np.flatnonzero(np.isin(tokens, placeholders(self.spec)))
                needed = sum(visual.tokens for visual in visuals[i])
                if len(places) != needed:
                    raise ValueError(
                        f"sequence {i} has {len(places)} placeholder tokens, but its images and "
                        f"videos have {needed}"
                    )
                numbers[row, places] = feature + np.arange(needed)
                if rotary is not None:
                    rotary[row, at : at + size] = self._positions(tokens, visuals[i])
                at, feature = at + size, feature + needed
        rows = [[visual for i in sequences for visual in visuals[i]] for sequences in members]
        rows += [[] for _ in range(shape.rows - len(rows))]
        length = shape.visual_length
        if self.tower is None:
            self._check_frames(rows)
            given: Any = patch_rows(self.spec, rows, length * self.spec.group)
        else:
            given = self.tower.rows(rows, length)
        return VisualRows(numbers, given, rotary)

    def _check_frames(self, rows: Sequence[Sequence[Visual]]) -> None:
        """Refuse frames larger than attention is made for."""
        largest, longest = frame_bounds(rows).longest, self.bounds.longest
        if longest is not None and largest is not None and largest > longest:
            raise ValueError(
                f"an image of {largest} patches, expected at most {longest}, those of "
                f"data.max_pixels={self.max_pixels}"
            )

    def without_any(self, shape: RowShape) -> VisualRows:
        """Return what a micro-batch without images has."""
        tokens, lengths = np.zeros((0, 1), np.int32), np.zeros(0, np.int32)
        return self.rows(Batch(tokens, lengths, {}), [], shape)

    def _positions(self, tokens: np.ndarray, visuals: Sequence[Visual]) -> np.ndarray:
        if not visuals:
            return np.arange(len(tokens))[:, None]
        return self.model.rotary_positions(tokens, visuals)[0]


def room_for_images(packer: VisualPacker | None, shape: RowShape) -> int | None:
    """Return how many tokens of images and videos a sequence may have; None: any number.

    Args:
        packer: of the model; None: it reads text alone.
        shape: of micro-batches.
    """
    if packer is None or shape.visual_share == 1:
        return None
    return shape.visual_room(shape.width)


def check_room(
    prompts: Iterable[tuple[str, Sequence[int]]], packer: VisualPacker | None, shape: RowShape
) -> None:
    """Refuse prompts with more images than a row has room for, before a step draws one.

    Args:
        prompts: where each stands, for messages, and its tokens.
        packer: of the model; None: it reads text alone.
        shape: of micro-batches.

    Raises:
        ConfigError: one has more.
    """
    room = room_for_images(packer, shape)
    if packer is None or room is None:
        return
    ids = placeholders(packer.spec)
    for where, tokens in prompts:
        if (count := int(np.isin(tokens, ids).sum())) > room:
            raise ConfigError(f"{where}: {_too_many(count, shape)}")


def _too_many(count: int, shape: RowShape) -> str:
    return (
        f"it has {count} tokens of images and videos, but a row for {shape.width} tokens has room "
        f"for {shape.visual_room(shape.width)}: raise batch.max_visual_tokens_per_device, or lower "
        "data.max_pixels"
    )


def row_visuals(model: ModelConfig, data: DataConfig | SftDataConfig) -> RowVisuals:
    """Return what reads the images and videos of rows.

    Args:
        model: that is to see them.
        data: of the run.

    Raises:
        ConfigError: the model has no processor of images, or the bounds of their area don't fit.
    """
    processor = configured_processor(
        None if model.vision == "none" else model.path,
        "model.vision",
        max_pixels=data.max_pixels,
        min_pixels=data.min_pixels,
        section="data.",
    )
    return RowVisuals(data.image_key, data.video_key, processor)


def vision_of(model: Model) -> VisionSpec:
    """Return what a model that reads images knows of them."""
    assert model.vision is not None, "the config's check has refused others"
    return model.vision
