"""Balance: what a sequence costs, and how sequences are shared out so that devices finish together.

In a synchronous micro-batch every device waits for the slowest.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.delta import CHUNK
from jaxrl_llm.models.flops import active_parameters, delta_products
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.spec import ModelSpec

XLA_ATTENTION = 4.0
"""How many times as long a FLOP of XLA's attention takes as one of a large product. Updates of the
model `small` of `benchmarks.training.train_step`, in long rows and in short ones, gave 3 to 7 on a
CPU, the most for the shortest sequences (82 to 512 tokens). A DeltaNet's chunks are as small."""


@dataclass(frozen=True)
class Cost:
    """The FLOPs of sequences, in those that one token takes outside attention: n + n² / breakeven.

    Attributes:
        breakeven: tokens of the sequence that spends as much in attention as outside of it.
        flops: the unit: of a token outside attention, forward and backward; 0 where unknown.
        in_chunks: the part of `flops` that layers with a DeltaNet spend on chunks of tokens.

    >>> Cost(breakeven=100.0)(np.array([10, 100]))
    array([ 11., 200.])
    """

    breakeven: float
    flops: float = 0.0
    in_chunks: float = 0.0

    def __call__(self, sizes: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """Return the cost of sequences of these sizes, in tokens."""
        return sizes + np.square(sizes, dtype=np.float64) / self.breakeven

    def of_rows(self, rows: int, length: int, keys: float) -> float:
        """Return what packed rows cost where XLA attends, filled or not.

        Args:
            rows: how many.
            length: of a row, in tokens, which a DeltaNet lengthens to whole chunks.
            keys: whose scores are computed for each token.
        """
        attention = 2 * keys / self.breakeven
        padding = self.in_chunks * (-length % CHUNK) / length
        return rows * length * (1 + XLA_ATTENTION * (attention + padding))


VERL_COST = Cost(breakeven=24576.0)
"""What verl assumes for every model: 24576·n + n², six times the width of one of 7B."""


def model_cost(spec: ModelSpec) -> Cost:
    """Return what sequences cost in a model.

    Forward and backward, a token takes 6 FLOPs for each parameter that it is multiplied with, and
    a pair of tokens 12·N·H in a layer's attention (https://arxiv.org/abs/2204.02311, appendix B).
    We count the n²/2 pairs of causal attention and not n², so n = parameters / (layers·N·H) is
    where both are equal. Experts count as far as a token is sent to them. Layers with a window are
    left out of the layers: their attention does not grow with the square. So are those with a
    DeltaNet, whose products with the memory count as parameters do.

    >>> spec = tiny_spec(layers=3, qk_norm=False)
    >>> model_cost(spec).breakeven * 3 * 2 * 2  # 3 layers of 48 + 72, norms of 4, and the embedding
    420.0
    """
    windowed = spec.windowed_layers or (spec.window is not None,) * spec.layers
    delta = spec.delta_layers or (False,) * spec.layers
    full = sum(not (short or none) for short, none in zip(windowed, delta, strict=True))
    pairs = full * spec.heads * spec.head_dim
    parameters = sum(active_parameters(spec)) + delta_products(spec)
    breakeven = parameters / pairs if pairs else math.inf
    return Cost(breakeven, 6.0 * parameters, delta_products(spec) / parameters)


def sequence_cost(model: Model) -> Cost:
    """Return what sequences cost in any model; of one that is no `Decoder` by its parameters alone.

    Nobody knows then what attention costs, and verl's assumption takes its place.
    """
    if isinstance(model, Decoder):
        return model_cost(model.spec)
    parameters = sum(math.prod(array.shape) for array in jax.tree.leaves(model.declare()))
    return Cost(VERL_COST.breakeven, 6.0 * parameters)


def karmarkar_karp(
    costs: Float[np.ndarray, " n"], parts: int, *, equal_size: bool = False
) -> list[list[int]]:
    """Divide numbers into parts of nearly equal sums, by the largest differencing method.

    Each number begins as a partial solution of its own. The two whose parts differ most are joined,
    the largest part of one with the smallest of the other, until one is left. Its largest sum is at
    most 4/3 - 1/(3·parts) times the smallest possible, as with the greedy method that gives the
    next largest number to the smallest part, and on average much closer; neither is always better.
    From Karmarkar and Karp 1982, "The differencing method of set partitioning"; bound by Michiels
    et al. 2007 (https://doi.org/10.1007/s10878-006-9010-z). By hand: NumPy and SciPy have
    no number partitioning, and these lines are less than a dependency.

    Args:
        costs: the numbers, not negative.
        parts: how many parts.
        equal_size: whether all parts hold as many numbers, by starting from solutions of `parts`
            numbers next to each other in size; the bound is then 2 - 1/parts.

    Returns:
        For each part the indices of its numbers, ascending.

    Raises:
        ValueError: no parts, or numbers that can't be divided into parts of equal size.

    >>> karmarkar_karp(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), 2)
    [[1, 3, 4], [0, 2]]
    """
    if parts < 1 or (equal_size and len(costs) % parts):
        equal = " of equal size" if equal_size else ""
        raise ValueError(f"{len(costs)} numbers can't be divided into {parts} parts{equal}")
    divided: list[list[int]] = [[] for _ in range(parts)]
    if not len(costs) or parts == 1:
        return [[*range(len(costs))], *divided[1:]]
    members = np.argsort(-costs, kind="stable").reshape(-1, parts if equal_size else 1)
    sums = dict(enumerate(costs[members]))  # descending; parts that are empty are left out
    widest = [(-_spread(s, parts), number) for number, s in sums.items()]
    heapq.heapify(widest)
    joins = []
    while len(widest) > 1:
        first, second = heapq.heappop(widest)[1], heapq.heappop(widest)[1]
        one, other = sums[first], sums.pop(second)
        total = np.zeros(min(parts, len(one) + len(other)))
        total[: len(one)] += one
        total[len(total) - len(other) :] += other[::-1]
        order = np.argsort(-total, kind="stable")
        joins.append((first, second, len(one), len(other), order))
        sums[first] = total[order]
        heapq.heappush(widest, (-_spread(sums[first], parts), first))
    ((root, total),) = sums.items()
    place = {root: np.arange(len(total))}
    for first, second, ones, others, order in reversed(joins):
        joined = np.empty_like(order)
        joined[order] = place[first]
        place[first], place[second] = joined[:ones], joined[len(order) - others :][::-1]
    for number, indices in enumerate(members.tolist()):
        for index, part in zip(indices, place[number].tolist(), strict=True):
            divided[part].append(index)
    return [sorted(part) for part in divided]


def _spread(sums: Float[np.ndarray, " k"], parts: int) -> float:
    return float(sums[0] - (sums[-1] if len(sums) == parts else 0))


def sum_by_rank(
    amounts: Float[np.ndarray, " B"] | Int[np.ndarray, " B"],
    batches: Sequence[Sequence[Sequence[int]]],
    ranks: int,
) -> Float[np.ndarray, "M S"]:
    """Sum what each of S ranks has in each of M micro-batches of a plan.

    Args:
        amounts: of each sequence.
        batches: for each micro-batch, for each of its rows, the indices of the sequences in it.
        ranks: devices over which rows are split; rank i has the i-th block of a micro-batch's.

    >>> print(sum_by_rank(np.array([3, 2, 1]), [[[0], [1]], [[], [2]]], ranks=2))
    [[3. 2.]
     [0. 1.]]
    """
    sums = np.zeros((len(batches), ranks))
    for batch, total in zip(batches, sums, strict=True):
        for number, row in enumerate(batch):
            total[number * ranks // len(batch)] += amounts[list(row)].sum()
    return sums


def imbalance(
    sizes: Int[np.ndarray, " B"],
    batches: Sequence[Sequence[Sequence[int]]],
    ranks: int,
    cost: Cost,
) -> dict[str, float]:
    """Return how evenly a plan loads the ranks.

    Args:
        sizes: tokens of each sequence.
        batches: the plan of these sequences.
        ranks: devices over which rows are split.
        cost: of a sequence.

    Returns:
        `perf/imbalance`: the time of the slowest ranks of all micro-batches over that of ranks with
        the same cost, 1 at best; and under verl's names the tokens of ranks, had the sequences been
        dealt out in their order, and `balanced_` as they are.

    >>> metrics = imbalance(np.array([3, 2, 1]), [[[0], [1, 2]]], 2, VERL_COST)
    >>> metrics["global_seqlen/minmax_diff"], metrics["global_seqlen/balanced_max"]
    (4.0, 3.0)
    """
    costs = sum_by_rank(cost(sizes), batches, ranks)
    tokens = sum_by_rank(sizes, batches, ranks).sum(0)
    in_order = [float(part.sum()) for part in np.array_split(sizes, ranks)]
    return {
        "perf/imbalance": float(costs.max(1).sum() / costs.mean(1).sum()),
        "global_seqlen/min": min(in_order),
        "global_seqlen/max": max(in_order),
        "global_seqlen/minmax_diff": max(in_order) - min(in_order),
        "global_seqlen/balanced_min": float(tokens.min()),
        "global_seqlen/balanced_max": float(tokens.max()),
        "global_seqlen/mean": float(tokens.mean()),
    }
