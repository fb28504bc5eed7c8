"""Micro-batches: a batch's sequences, packed into rows of a few fixed shapes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxrl_llm.compilation import BACKGROUND, PendingProgram, abstract, compile_all, compiles_ahead
from jaxrl_llm.data.packing import (
    RowShape,
    choose_rows,
    in_bucket,
    pack_rows,
    plan_microbatches,
    plan_whole,
)
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.vision.tower import placeholders
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import over_batch, replicated
from jaxrl_llm.training.visuals import VisualPacker
from jaxrl_llm.types import ROUTES, VISUALS, Batch, Rows

Fields = dict[str, Any]

EXTREMES = {"largest": (-jnp.inf, jnp.maximum), "smallest": (jnp.inf, jnp.minimum)}
"""Names of an objective's metrics that do not add up: what to begin with, and how to merge them."""

MEANS = "means"
"""Name of an objective's metrics that are means over some of the rows: pairs of a sum and of what
it is to be divided by, both of which add up."""


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
    sequences = batch.tokens.shape if chains is None else chains.columns.shape
    for indices, results in list(parts):
        for name, values in distributed.fetch(results).items():
            shape = *sequences, *values.shape[2:]
            whole = merged.setdefault(name, np.zeros(shape, values.dtype))
            width = min(values.shape[1], whole.shape[1])
            whole[indices, :width] = values[: len(indices), :width]
    if chains is None:
        return merged
    return {name: join_chains(values, chains, batch) for name, values in merged.items()}


def empty_total(like: tuple[Params, Fields]) -> tuple[Params, Fields]:
    """Return gradients and metrics of no micro-batches, by their shapes."""

    def start(path: Any, leaf: Any) -> Array:
        value, _ = EXTREMES.get(path[0].key, (0.0, jnp.add))
        return jnp.full(leaf.shape, value, leaf.dtype)

    grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like[0])
    return grads, jax.tree.map_with_path(start, like[1])


def merge_metrics(total: Fields, metrics: Fields) -> Fields:
    """Add the metrics of a micro-batch to those of others, or keep their extremes."""

    def merge(path: Any, total: Array, value: Array) -> Array:
        _, function = EXTREMES.get(path[0].key, (0.0, jnp.add))
        return function(total, value)

    return jax.tree.map_with_path(merge, total, metrics)


def finished_metrics(metrics: Fields) -> Fields:
    """Return metrics in which extremes and means stand among the others; no mean of no rows."""
    kinds = (*EXTREMES, MEANS)
    sums = {name: value for name, value in metrics.items() if name not in kinds}
    extremes = {name: x for kind in EXTREMES for name, x in metrics.get(kind, {}).items()}
    means = jax.device_get(metrics.get(MEANS, {})).items()
    return sums | extremes | {name: total / share for name, (total, share) in means if share > 0}


# Chains of episodes: one sequence of a batch for the algorithm, a sequence each for the models.


class ChainPlaces(NamedTuple):
    """Where the tokens of N chains lie in a batch.

    Attributes:
        episodes: of which a chain is.
        columns: of its tokens, in order; padded with 0 to the longest chain.
        sizes: tokens of each chain.
    """

    episodes: Int[np.ndarray, " N"]
    columns: Int[np.ndarray, "N L"]
    sizes: Int[np.ndarray, " N"]


def chain_places(batch: Batch) -> ChainPlaces | None:
    """Return where the chains of a batch lie; None where each episode has one.

    >>> chains = {"chain_ids": np.array([[0, 1, 0], [0, 0, -1]])}
    >>> places = chain_places(Batch(np.zeros((2, 3), int), np.array([3, 2]), chains))
    >>> places.episodes.tolist(), places.columns.tolist(), places.sizes.tolist()
    ([0, 0, 1], [[0, 2], [1, 0], [0, 1]], [2, 1, 2])
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
    return ChainPlaces(np.array(episodes, np.int32), padded, sizes)


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
    rows = places.episodes[:, None]
    fields = {
        name: batch[name][rows, places.columns]
        if batch[name].ndim > 1
        else batch[name][places.episodes]
        for name in names
    }
    if VISUALS in names:
        fields[VISUALS] = _cut_visuals(batch, places, placeholders)
    return Batch(batch.tokens[rows, places.columns], places.sizes, fields)


def _cut_visuals(batch: Batch, places: ChainPlaces, placeholders: Sequence[int]) -> np.ndarray:
    """Return the images and videos of each chain [N]: those whose first token it has."""
    cut = np.empty(len(places.sizes), object)
    is_visual = np.isin(batch.tokens, placeholders) & ~batch["mask"]
    for chain, (episode, size) in enumerate(zip(places.episodes, places.sizes, strict=True)):
        visuals = batch.visuals[episode]
        counts = np.array([0, *(visual.tokens for visual in visuals)]).cumsum()
        firsts = np.flatnonzero(is_visual[episode])[counts[:-1]]
        own = np.isin(firsts, places.columns[chain, :size])
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
    inside = np.arange(places.columns.shape[1]) < places.sizes[:, None]
    rows = np.broadcast_to(places.episodes[:, None], inside.shape)
    whole = np.zeros((*batch.tokens.shape, *values.shape[2:]), values.dtype)
    whole[rows[inside], places.columns[inside]] = values[inside]
    return whole


def sequence_sizes(batch: Batch) -> Int[np.ndarray, " N"]:
    """Return the tokens of each sequence that a model reads: of an episode, or of each chain."""
    places = chain_places(batch)
    return batch.sequence_lengths if places is None else places.sizes
