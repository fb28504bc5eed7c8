"""Batches packed into rows, a model's forward pass over them, and its passes without gradients.

Rows of patches have the indices of the rows of tokens, so that both are on the same devices. There
is a place for each token that a row may have of images and videos, whatever it has: ranks then take
equally long.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from jaxrl_llm.algorithms.logprobs import (
    HeadProjection,
    TokenStats,
    projected_token_stats,
    token_stats_from_logits,
)
from jaxrl_llm.compilation import (
    BACKGROUND,
    PendingProgram,
    Task,
    abstract,
    compile_all,
    compiler_options,
    compiles_ahead,
)
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import DataConfig, ModelConfig, SftDataConfig
from jaxrl_llm.data.dataset import RowVisuals
from jaxrl_llm.data.packing import (
    RowShape,
    best_fit,
    choose_rows,
    in_bucket,
    pack_rows,
    plan_microbatches,
    plan_whole,
    unpack,
)
from jaxrl_llm.data.visuals.processor import configured_processor
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.inputs import (
    FrameBounds,
    PatchRows,
    RowInputs,
    Visual,
    VisualFeatures,
    VisualTokens,
    frame_bounds,
    patch_rows,
)
from jaxrl_llm.models.kernels import GroupedKernels, Kernel
from jaxrl_llm.models.linear import SplitMatrix
from jaxrl_llm.models.lora import combine_params
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.moe.routing import NO_ROUTE, RouterStats, balance_weights
from jaxrl_llm.models.moe.spec import RouteShape
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.models.vision.tower import placeholders
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import (
    DEFAULT_RULES,
    TOKENS,
    Layout,
    Rules,
    batch_shards,
    over_batch,
    replicated,
)
from jaxrl_llm.types import ROUTES, VISUALS, Batch, Rows, VisualRows

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
                {"vision": params}, rows, dtype=dtype, remat="none", layout=layout, bounds=bounds
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


Fields = dict[str, Any]


class MicroBatch(NamedTuple):
    """One micro-batch: packed rows for the model, [b T] fields for the algorithm."""

    rows: Rows
    fields: Fields


def pack_microbatches(
    batch: Batch,
    names: Iterable[str],
    shape: RowShape,
    mesh: Mesh,
    visuals: VisualPacker | None = None,
) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """Cut a batch into micro-batches on the devices, each with the indices of its sequences.

    Args:
        batch: the batch.
        names: of the fields that they hold, and `ROUTES` where rows are to hold these.
        shape: of the micro-batches.
        mesh: the devices.
        visuals: packs images and videos; None: the model reads none.

    Raises:
        ValueError: a batch wider than the longest sequence; a sequence with more images than fit.
    """
    if batch.tokens.shape[1] > shape.width:
        raise ValueError(
            f"a batch of {batch.tokens.shape[1]} columns, expected at most {shape.width}"
        )
    sharding = over_batch(mesh)
    sizes = _sizes(batch, shape, visuals)
    for planned in plan_microbatches(sizes, shape):
        members, bucket = in_bucket(sizes, planned, shape)
        indices, micro = _laid_out(batch, names, members, bucket, visuals)
        yield indices, distributed.put(micro, sharding)


def _sizes(batch: Batch, shape: RowShape, visuals: VisualPacker | None) -> np.ndarray:
    """Return the room in a row that each sequence takes."""
    return batch.sequence_lengths if visuals is None else visuals.sizes(batch, shape)


def pack_batch(
    batch: Batch, shape: RowShape, mesh: Mesh, visuals: VisualPacker | None = None
) -> Rows:
    """Pack a whole batch into rows on the devices, of the smallest bucket that holds it.

    Sequence i of the rows is sequence i of the batch, so that what a model says of them is [B T].

    Args:
        batch: B sequences.
        shape: of a micro-batch with at least B rows, as long as the batch is wide.
        mesh: the devices.
        visuals: packs images and videos; None: the model reads none.
    """
    sizes = _sizes(batch, shape, visuals)
    members, bucket = in_bucket(sizes, plan_whole(sizes, shape), shape)
    packed = pack_rows(batch.tokens, batch.sequence_lengths, members, bucket)
    order = np.argsort([i for row in members for i in row])
    rows = distributed.put(packed[:3], over_batch(mesh))
    places = distributed.put(tuple(place[order] for place in packed.places), replicated(mesh))
    seen = visuals and distributed.put(visuals.rows(batch, members, bucket), over_batch(mesh))
    return Rows(*rows, *places, visual=seen)


def _laid_out(
    batch: Batch,
    names: Iterable[str],
    members: list[list[int]],
    bucket: RowShape,
    visuals: VisualPacker | None,
) -> tuple[np.ndarray, MicroBatch]:
    indices = np.array([i for row in members for i in row], np.int32)
    marks = [batch.fields.get(name) for name in ("mask", "second_start")]
    marks += [batch[ROUTES]] if ROUTES in names else []
    rows = pack_rows(batch.tokens, batch.sequence_lengths, members, bucket, *marks)
    if visuals is not None:
        rows = rows._replace(visual=visuals.rows(batch, members, bucket))
    fields = {n: _pad(batch[n][indices], bucket) for n in names if n != ROUTES}
    return indices, MicroBatch(rows, fields)


def _pad(values: np.ndarray, shape: RowShape) -> np.ndarray:
    widths = [(0, shape.sequences - len(values))]
    if values.ndim > 1:
        values = values[:, : shape.width]
        widths.append((0, shape.width - values.shape[1]))
    widths += [(0, 0)] * (values.ndim - 2)
    return np.pad(values, widths)


class MicroBatchStep:
    """A jitted step over micro-batches, with a program for each bucket of their shapes.

    Each batch gets the rows, long or short, in which it takes less time (`choose_rows`).
    On CPUs a micro-batch waits for its own program, and the others are compiled while it runs.
    Elsewhere the first one waits for all.

    Args:
        label: of the step.
        step: jitted.
        shape: of the micro-batches.
        mesh: the devices.
        place: of the micro-batch, or of its rows, among the step's inputs.
        params: the place of the parameters, whose layout and dtypes tell programs apart, too.
        visuals: packs images and videos; None: the model reads none.
    """

    def __init__(
        self,
        label: str,
        step: Any,
        shape: RowShape,
        mesh: Mesh,
        *,
        place: int,
        params: int = 0,
        visuals: VisualPacker | None = None,
    ) -> None:
        """Compile nothing yet."""
        self._label, self._step, self._shape, self._mesh = label, step, shape, mesh
        self._place, self._params, self._visuals = place, params, visuals
        self._is_ahead = compiles_ahead(mesh.devices.flat)
        self._programs: dict[Any, dict[Any, PendingProgram]] = {}  # by layout, then by size
        self._of_batch: dict[Any, PendingProgram] = {}
        self._begin_others: Callable[[tuple[Any, ...]], None] | None = None

    def begin(self, params: Params, inputs: Callable[[RowShape], tuple[Any, ...]]) -> None:
        """Begin to compile the program of the largest bucket, before there is a batch.

        It is that of short rows, which most batches get.

        Args:
            params: that the step will run with, or their shapes.
            inputs: bucket -> the step's inputs, as shapes.
        """
        if self._is_ahead:
            largest = self._shape.in_short_rows.buckets[-1]
            programs = self._programs.setdefault(layout_and_dtypes(params), {})
            BACKGROUND.add([self._program(programs, largest, lambda: inputs(largest))])

    def microbatches(
        self, batch: Batch, names: Iterable[str]
    ) -> Iterator[tuple[np.ndarray, MicroBatch]]:
        """Cut a batch's chains as `pack_microbatches`; run the step on them before the next batch.

        Args:
            batch: with the fields that the step asks for.
            names: of these fields.
        """
        visuals, mesh = self._visuals, self._mesh
        ids = () if visuals is None else placeholders(visuals.spec)
        batch = cut_chains(batch, names, self._shape.width, ids)
        sizes = _sizes(batch, self._shape, visuals)
        shape = choose_rows(sizes, self._shape)

        def begin_others(inputs: tuple[Any, ...]) -> None:
            """Begin to compile for the other buckets: first what the batch needs."""
            own = self._programs.setdefault(layout_and_dtypes(inputs[self._params]), {})
            self._of_batch = own
            ready = {size for size, p in own.items() if p.is_done and not p.has_failed}
            if ready >= {*map(_size, shape.buckets)}:
                return
            # programs that wait hold on to shapes alone
            before, after = abstract((inputs[: self._place], inputs[self._place + 1 :]))
            is_micro, programs = isinstance(inputs[self._place], MicroBatch), {}
            for bucket in shape.buckets:
                micro = _as_shapes(_laid_out(batch, names, [], bucket, visuals)[1], mesh)
                given = *before, micro if is_micro else micro.rows, *after
                programs[bucket] = self._program(own, bucket, lambda given=given: given)
            if not self._is_ahead:
                compile_all([*programs.values()])
                return
            planned = plan_microbatches(sizes, shape)
            needed = dict.fromkeys(in_bucket(sizes, members, shape)[1] for members in planned)
            BACKGROUND.add([programs[bucket] for bucket in needed][1:])  # this thread: the first
            rest = [program for bucket, program in programs.items() if bucket not in needed]
            BACKGROUND.add(rest, later=True)

        self._begin_others = begin_others
        return pack_microbatches(batch, names, shape, mesh, visuals)

    def compile(self, *inputs: Any) -> None:
        """Compile the programs for the batch that was cut last; on CPUs, only begin to.

        Args:
            *inputs: of the step for the first micro-batch; others than the parameters may be
                shapes.
        """
        if self._begin_others is not None:
            begin_others, self._begin_others = self._begin_others, None
            begin_others(inputs)

    def __call__(self, *inputs: Any) -> Any:
        """Run the step on a micro-batch, once it is compiled."""
        self.compile(*inputs)
        micro = inputs[self._place]
        rows: Rows = micro.rows if isinstance(micro, MicroBatch) else micro
        self._of_batch[*rows.tokens.shape, *rows.row.shape].result()
        return self._step(*inputs)

    def _program(
        self, programs: dict[Any, PendingProgram], bucket: RowShape, inputs: Callable[[], Any]
    ) -> PendingProgram:
        """Return the program of a bucket; make it if there is none, or none that works."""
        size = _size(bucket)
        if size not in programs or programs[size].has_failed:
            label = f"{self._label} {bucket.rows} x {bucket.length}"
            programs[size] = PendingProgram(label, lambda: self._step.lower(*inputs()).compile())
        return programs[size]


def _size(bucket: RowShape) -> tuple[int, int, int]:
    """Return what tells a bucket's arrays from others': rows, length, sequences."""
    return bucket.rows, bucket.length, bucket.sequences


def layout_and_dtypes(params: Params) -> Any:
    """Return what tells a step's programs apart besides the shapes: layout and dtypes."""
    return tuple((leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(params))


def _as_shapes(micro: MicroBatch, mesh: Mesh) -> MicroBatch:
    sharding = over_batch(mesh)

    def shape(array: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)

    return jax.tree.map(shape, micro)


def merge_microbatches(
    parts: Iterable[tuple[np.ndarray, dict[str, Array]]], batch: Batch
) -> dict[str, np.ndarray]:
    """Put what micro-batches say of their tokens together, once all of them are on their way.

    Args:
        parts: of the batch's chains: their indices, and arrays [b T ...] by name.
        batch: that was cut.
    """
    merged: dict[str, np.ndarray] = {}
    chains = chain_places(batch)
    sequences = batch.tokens.shape if chains is None else chains[1].shape
    for indices, results in list(parts):
        for name, values in distributed.fetch(results).items():
            shape = *sequences, *values.shape[2:]
            whole = merged.setdefault(name, np.zeros(shape, values.dtype))
            width = min(values.shape[1], whole.shape[1])
            whole[indices, :width] = values[: len(indices), :width]
    if chains is None:
        return merged
    return {name: join_chains(values, chains, batch) for name, values in merged.items()}


# Chains of episodes: one sequence of a batch for the algorithm, a sequence each for the models.


ChainPlaces = tuple[Int[np.ndarray, " N"], Int[np.ndarray, "N L"], Int[np.ndarray, " N"]]
"""Where the tokens of N chains lie in a batch: the episode of each chain; the columns of its
tokens, in order and padded with 0 to the longest chain; and how many these are."""


def chain_places(batch: Batch) -> ChainPlaces | None:
    """Return where the chains of a batch lie; None where each episode has one.

    >>> chains = {"chain_ids": np.array([[0, 1, 0], [0, 0, -1]])}
    >>> places = chain_places(Batch(np.zeros((2, 3), int), np.array([3, 2]), chains))
    >>> [array.tolist() for array in places]
    [[0, 0, 1], [[0, 2], [1, 0], [0, 1]], [2, 1, 2]]
    """
    if not has_chains(batch):
        return None
    episodes, columns = [], []
    for episode, size in enumerate(batch.sequence_lengths):
        ids = batch["chain_ids"][episode, :size]
        own = [np.flatnonzero(ids == chain) for chain in range(ids.max(initial=-1) + 1)]
        columns += [places for places in own if len(places)]
        episodes += [episode] * (len(columns) - len(episodes))
    sizes = np.array([len(own) for own in columns], np.int32)
    padded = np.zeros((len(sizes), sizes.max()), np.int32)
    for row, own in zip(padded, columns, strict=True):
        row[: len(own)] = own
    return np.array(episodes, np.int32), padded, sizes


def has_chains(batch: Batch) -> bool:
    """Return whether an episode of a batch has several chains."""
    return bool(batch.fields.get("chain_ids", np.zeros(1)).max(initial=0) > 0)


def cut_chains(
    batch: Batch, names: Iterable[str], width: int, placeholders: Sequence[int] = ()
) -> Batch:
    """Return a batch with a sequence for each chain; the same one where each episode has one.

    Args:
        batch: of episodes.
        names: of the fields that it needs; those of an episode [B] are each of its chains'.
        width: tokens of the longest chain that there may be. A mini-batch of episodes of one chain
            is cut down to it, as others of the step may have more.
        placeholders: ids of the tokens that stand for images and videos, which are kept.
    """
    names = {*names, "mask", *([VISUALS] if placeholders else [])} & batch.fields.keys()
    places = chain_places(batch)
    if places is None:
        if "chain_ids" not in batch.fields or batch.tokens.shape[1] <= width:
            return batch
        narrow = {n: batch[n][:, :width] if batch[n].ndim > 1 else batch[n] for n in names}
        return Batch(batch.tokens[:, :width], batch.sequence_lengths, narrow)
    episodes, columns, sizes = places
    rows = episodes[:, None]
    fields = {
        name: batch[name][rows, columns] if batch[name].ndim > 1 else batch[name][episodes]
        for name in names
    }
    if VISUALS in names:
        fields[VISUALS] = _cut_visuals(batch, places, placeholders)
    return Batch(batch.tokens[rows, columns], sizes, fields)


def _cut_visuals(batch: Batch, places: ChainPlaces, placeholders: Sequence[int]) -> np.ndarray:
    """Return the images and videos of each chain [N]: those whose first token it has."""
    cut = np.empty(len(places[0]), object)
    is_visual = np.isin(batch.tokens, placeholders) & ~batch["mask"]
    for chain, (episode, columns, size) in enumerate(zip(*places, strict=True)):
        visuals = batch.visuals[episode]
        counts = np.array([0, *(visual.tokens for visual in visuals)]).cumsum()
        firsts = np.flatnonzero(is_visual[episode])[counts[:-1]]
        own = np.isin(firsts, columns[:size])
        cut[chain] = tuple(v for v, is_own in zip(visuals, own, strict=True) if is_own)
    return cut


def join_chains(values: np.ndarray, places: ChainPlaces, batch: Batch) -> np.ndarray:
    """Return what is said of the tokens of `cut_chains`'s sequences in their places in the batch.

    Args:
        values: [N L ...].
        places: of the batch.
        batch: of episodes.

    Returns:
        Values [B T ...], 0 where there are no tokens.
    """
    episodes, columns, sizes = places
    inside = np.arange(columns.shape[1]) < sizes[:, None]
    rows = np.broadcast_to(episodes[:, None], inside.shape)
    whole = np.zeros((*batch.tokens.shape, *values.shape[2:]), values.dtype)
    whole[rows[inside], columns[inside]] = values[inside]
    return whole


def sequence_sizes(batch: Batch) -> Int[np.ndarray, " N"]:
    """Return the tokens of each sequence that a model reads: of an episode, or of each chain."""
    places = chain_places(batch)
    return batch.sequence_lengths if places is None else places[2]


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the model is run in training: everything static about a forward pass.

    `model` is a `models.decoder.Decoder`, unless it is one of the user's own.
    `router_loss_coef` is that of the experts' load-balance loss, `router_bias_rate` how far an
    update moves the bias of sigmoid routers, `context` how attention sees rows that devices share
    (`sharding.layout.Layout`), `kernel` what computes it (`models.kernels.choose_kernel`; None:
    XLA), `grouped_kernels` what multiplies rows of experts
    (`models.moe.grouped.choose_grouped_kernels`; None: XLA), `rules` how a model of the
    user's own splits its logical axes, and `longest` is the most tokens of a sequence, where rows
    are longer. Where `router_replay`, the config's key, is not none, tokens go to the experts that
    their rows say. `visuals` packs the images and videos that the model reads; None: it reads none.
    """

    model: Model
    dtype: str = "float32"
    remat: str = "none"
    logprob_chunk: int = 1024
    temperature: float = 1.0
    router_loss_coef: float = 0.0
    router_bias_rate: float = 0.001
    context: str = "heads"
    kernel: Kernel | None = None
    grouped_kernels: GroupedKernels | None = None
    rules: Rules = field(default_factory=lambda: DEFAULT_RULES, hash=False)
    longest: int | None = None
    router_replay: str = "none"
    visuals: VisualPacker | None = field(default=None, hash=False)

    @property
    def replays(self) -> bool:
        """Tell whether tokens go to the experts that their rows say."""
        return self.router_replay != "none"

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the fields of a batch that its rows must hold for the model."""
        return (ROUTES,) if self.replays else ()

    @property
    def route_shape(self) -> RouteShape | None:
        """Return what rows hold of choices of experts; None: nothing is replayed."""
        return self.model.route_shape if self.replays else None

    def projection(self, head: SplitMatrix, temperature: float = 1.0) -> HeadProjection:
        """Return how hidden states become logits by an output projection that devices hold."""
        return HeadProjection(
            temperature=temperature,
            softcap=self.model.logit_softcap,
            chunk=self.logprob_chunk,
            embed_axes=head.embed_axes,
            vocab_axes=head.vocab_axes,
            never=() if self.visuals is None else self.visuals.spec.never_sampled,
        )

    def over(self, shape: RowShape) -> "ForwardConfig":
        """Return the same for micro-batches of a shape."""
        return dataclasses.replace(self, longest=shape.longest)


def token_fields(params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh) -> TokenStats:
    """Run the model over packed rows and gather its per-token results back to [b T].

    Entry (i, t) belongs to token t of sequence i given the tokens before it; entry (i, 0) is 0, and
    so are those of tokens that need not be scored. Activations stay where the rows are, so it is
    the weights that are gathered.
    """
    return token_stats_from_hidden(
        params, hidden_states(params, rows, config, mesh)[0], rows, config, mesh
    )


def token_stats_from_hidden(
    params: Params, hidden: Float[Array, "P l D"], rows: Rows, config: ForwardConfig, mesh: Mesh
) -> TokenStats:
    """Score the rows' tokens, each device its own: the head's gradient is added up over the devices
    once, not once a chunk. Where stages hold the layers, they share the scoring too."""
    layout = Layout(mesh, config.context)
    targets = jnp.roll(jnp.asarray(rows.tokens), -1, axis=1)
    axes = token_axes(layout, targets.size)
    head = split_head(params, config, layout)
    by_token = PartitionSpec(axes)
    places = [hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)]
    if rows.scored is not None:
        places.append(jnp.asarray(rows.scored).reshape(-1))
    specs = [by_token] * len(places)
    if head is None:  # hidden states are logits
        score = functools.partial(token_stats_from_logits, temperature=config.temperature)
    else:
        score = functools.partial(
            projected_token_stats, config.projection(head, temperature=config.temperature)
        )
        places.insert(1, head.array)
        specs.insert(1, PartitionSpec(head.embed_axes, head.vocab_axes))
    stats = layout.by_tokens(score, in_specs=specs, axes=axes)(*places)
    return by_sequence(stats, rows, config)


def token_axes(layout: Layout, tokens: int) -> tuple[str, ...]:
    """Return the mesh axes over which scored tokens are split: the stages' too, if they can be."""
    return TOKENS if tokens % (layout.shards * layout.stages) else (*TOKENS, "stage")


def split_head(params: Params, config: ForwardConfig, layout: Layout) -> SplitMatrix | None:
    """Return the output projection, and how devices hold it; None where hidden states are logits"""
    head = config.model.head_matrix(params, layout)
    return head if head is None or isinstance(head, SplitMatrix) else SplitMatrix(head, (), ())


def hidden_states(
    params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh
) -> tuple[Float[Array, "P l D"], RouterStats | None]:
    """Return the hidden states of the rows, in pieces where devices share a row."""
    hidden, router = _run(params, rows, config, mesh)
    router.pop("experts", None)
    return hidden, RouterStats(**router) if router else None


def hidden_states_and_routes(
    params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh
) -> tuple[Float[Array, "P l D"], Int[Array, "b T M top"]]:
    """Return the hidden states of the rows, and the experts that each sequence's tokens went to.

    The model replays: tokens without a recorded choice go where their router sends them.
    """
    hidden, router = _run(params, rows, config, mesh)
    experts = Layout(mesh, config.context).merge_context(jnp.moveaxis(router["experts"], 0, 2))
    experts = experts.astype(jnp.asarray(rows.routes).dtype)
    return hidden, unpack(experts, *map(jnp.asarray, rows.places), width=_width(rows, config))


def _run(
    params: Params, rows: Rows, config: ForwardConfig, mesh: Mesh
) -> tuple[Float[Array, "P l D"], dict[str, Any]]:
    layout = Layout(
        mesh,
        config.context,
        config.rules,
        kernel=config.kernel,
        grouped_kernels=config.grouped_kernels,
        longest=config.longest,
    )
    tokens, positions, segments = (
        layout.split_context(jnp.asarray(x))
        for x in (rows.tokens, rows.positions, rows.segment_ids)
    )
    given = {}
    if config.replays or config.visuals is not None:
        given["inputs"] = _inputs(params, rows, config, layout)
    return config.model.hidden_states(
        params,
        tokens,
        positions,
        segments,
        dtype=jnp.dtype(config.dtype),
        remat=config.remat,
        layout=layout,
        **given,
    )


def _inputs(params: Params, rows: Rows, config: ForwardConfig, layout: Layout) -> RowInputs:
    """Return what the rows hold beside tokens, with features of the patches that they have."""
    routes = layout.split_context(jnp.asarray(rows.routes)) if config.replays else None
    if config.visuals is None:
        return RowInputs(routes)
    assert rows.visual is not None, "the model's own packer has packed the rows"
    numbers, given, rotary = rows.visual
    if isinstance(given, PatchRows):
        given = config.visuals.model.encode_visuals(
            params,
            given,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
            layout=layout,
            bounds=config.visuals.bounds,
        )
    visual = VisualTokens(jnp.asarray(numbers), given)
    return RowInputs(routes, visual, None if rotary is None else jnp.asarray(rotary))


def values_from_hidden(
    params: Params, hidden: Float[Array, "P l D"], rows: Rows, config: ForwardConfig
) -> Float32[Array, "b T"]:
    return by_sequence(config.model.token_values(params, hidden), rows, config)


def token_scores_from_hidden(
    params: Params, hidden: Float[Array, "P l D"], rows: Rows, config: ForwardConfig
) -> Float32[Array, "b T"]:
    """Gather what a value head says of each token itself, not of the state before it, to [b T]."""
    scores = config.model.token_values(params, hidden).reshape(-1, jnp.shape(rows.tokens)[1])
    return unpack(scores, *map(jnp.asarray, rows.places), width=_width(rows, config))


def _width(rows: Rows, config: ForwardConfig) -> int:
    """Return T, the most tokens of a sequence."""
    length = jnp.shape(rows.tokens)[1]
    return min(config.longest or length, length)


def by_sequence(tree: Any, rows: Rows, config: ForwardConfig, *, axes: int = 0) -> Any:
    """Gather [b T …] what the model says at each token as what it says of the next one.

    Entry (i, 0) is 0, and so is what lies beyond a sequence.

    Args:
        tree: arrays for the places of the rows, in their order.
        rows: packed.
        config: how the model is run.
        axes: of what there is at each place; 0 for a number.
    """
    length, width = jnp.shape(rows.tokens)[1], _width(rows, config)
    inside = jnp.arange(width) < jnp.asarray(rows.size)[:, None]
    inside = jnp.expand_dims(inside, range(2, 2 + axes))

    def gather(x: Array) -> Array:
        by_row = x.reshape(-1, length, *x.shape[x.ndim - axes :])
        shifted = unpack(by_row, *map(jnp.asarray, rows.places), width=width)
        return jnp.where(inside, jnp.roll(shifted, 1, axis=1).at[:, 0].set(0), 0)

    return jax.tree.map(gather, tree)


def logprob_pass(
    model: ForwardConfig,
    shape: RowShape,
    mesh: Mesh,
    names: tuple[str, ...] = ("logprobs", "entropy"),
    *,
    frozen: Params | None = None,
) -> "Inference":
    """Return a function from parameters and a batch to some of its TokenStats [B T], by name.

    Args:
        model: how the model is run. If it replays choices of experts, it takes those of a batch
            that has such.
        shape: of the micro-batches.
        mesh: the devices.
        names: of TokenStats; and `ROUTES` where it is to report the experts of each token, if the
            model replays.
        frozen: the parameters that are not in those given at each call.
    """

    def infer(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        everything = combine_params(params, rest)
        if ROUTES not in names:
            stats = token_fields(everything, rows, model, mesh)._asdict()
            return {name: stats[name] for name in names}
        hidden, routes = hidden_states_and_routes(everything, rows, model, mesh)
        stats = token_stats_from_hidden(everything, hidden, rows, model, mesh)._asdict()
        return {name: (stats | {ROUTES: routes})[name] for name in names}

    return Inference(infer, shape, mesh, frozen or {}, model)


def value_pass(model: ForwardConfig, shape: RowShape, mesh: Mesh) -> "Inference":
    """Return a function from a critic's parameters and a batch to its `values` [B T]."""

    def infer(params: Params, rest: Params, rows: Rows) -> dict[str, Array]:
        everything = combine_params(params, rest)
        hidden = hidden_states(everything, rows, model, mesh)[0]
        return {"values": values_from_hidden(everything, hidden, rows, model)}

    return Inference(infer, shape, mesh, {}, model)


class Inference:
    """A pass without gradients: (params, batch) -> what a model says of each token [B T], by name.

    Args:
        compute: (params, frozen, rows) -> the same of a micro-batch [b T].
        shape: of the micro-batches.
        mesh: the devices.
        frozen: the parameters that are not in those given at each call.
        model: how the model is run, which says what rows hold for it beside tokens.
        label: of the pass, where its programs are waited for.

    Attributes:
        run: `compute`, jitted.
        step: `run` over micro-batches.
    """

    def __init__(
        self,
        compute: Callable[[Params, Params, Rows], dict[str, Array]],
        shape: RowShape,
        mesh: Mesh,
        frozen: Params,
        model: ForwardConfig,
        label: str = "log-probs",
    ) -> None:
        """Compile nothing yet."""
        options = compiler_options(Task.TRAIN, mesh.devices.flat)
        self.run: Any = jax.jit(compute, compiler_options=options)
        self.step = MicroBatchStep(label, self.run, shape, mesh, place=2, visuals=model.visuals)
        self._frozen, self._route_shape = frozen, model.route_shape

    def compile_ahead(self, params: Params, rows_like: Callable[[RowShape], Rows]) -> None:
        """Begin to compile what the first batch needs in all likelihood.

        Args:
            params: that it will be given, or their shapes.
            rows_like: bucket -> rows as shapes.
        """
        like = abstract((params, self._frozen))
        self.step.begin(like[0], lambda bucket: (*like, rows_like(bucket)))

    def __call__(self, params: Params, batch: Batch) -> dict[str, np.ndarray]:
        """Run over a batch, in micro-batches."""
        marks = ()
        if self._route_shape is not None:
            batch, marks = with_routes(batch, self._route_shape), (ROUTES,)
        parts = (
            (indices, self.step(params, self._frozen, micro.rows))
            for indices, micro in self.step.microbatches(batch, marks)
        )
        return merge_microbatches(parts, batch)


def with_routes(batch: Batch, shape: RouteShape) -> Batch:
    """Return a batch with choices of experts: its own, or none of any token."""
    if ROUTES in batch.fields:
        return batch
    each = *batch.tokens.shape, shape.layers, shape.top
    none = np.asarray(NO_ROUTE, shape.dtype)
    return batch.add(**{ROUTES: np.broadcast_to(none, each)})  # which takes no memory


def balance_pass(
    model: ForwardConfig, shape: RowShape, mesh: Mesh, frozen: Params
) -> Callable[[Params, Batch], Fields]:
    """Return a function from parameters and a mini-batch to the coefficients of its balance loss.

    They are the constant part of `load_balance_loss` times the model's coefficient. Without experts
    or with a coefficient of 0 there are none, and nothing is run.
    """
    everywhere = replicated(mesh)
    options = compiler_options(Task.TRAIN, mesh.devices.flat)

    @functools.partial(jax.jit, out_shardings=everywhere, compiler_options=options)
    def count(params: Params, rest: Params, rows: Rows) -> RouterStats:
        router = hidden_states(combine_params(params, rest), rows, model, mesh)[1]
        assert router is not None, "the model has experts"
        return router

    step = MicroBatchStep("experts' load", count, shape, mesh, place=2, visuals=model.visuals)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def weigh(total: RouterStats) -> Array:
        return model.router_loss_coef * balance_weights(total)

    def find(params: Params, batch: Batch) -> Fields:
        if not model.model.has_router or model.router_loss_coef == 0:
            return {}
        cut = step.microbatches(batch, model.marks)
        counted = (step(params, frozen, micro.rows) for _, micro in cut)
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), counted)
        return {"balance_weights": weigh(total)}

    return find
