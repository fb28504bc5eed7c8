"""Chains of episodes: one sequence of a batch for the algorithm, a sequence each for the models.

An algorithm sees an episode as one sequence, in the order in which its tokens were drawn and told,
whatever chains they belong to: scores, groups, advantages and a reduction's weights are of
episodes. A model reads each chain by itself, as the policy did. So a batch is cut into chains where
micro-batches are packed, and what models say of tokens is put back into their places.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxrl_llm.types import VISUALS, Batch


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
