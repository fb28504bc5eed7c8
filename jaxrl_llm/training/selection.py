"""What of a step's answers the policy is updated on: all, those that a filter keeps, or pairs.

It is cut into mini-batches of whole groups. Where answers are left out, a mini-batch is filled up
with rows without tokens, so that few numbers of rows are ever compiled for.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.algorithms.pairs import Pairs
from jaxrl_llm.config.fields import call, name_of
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.training.experience import ScoreError, per_answer
from jaxrl_llm.training.layouts import minibatch_size
from jaxrl_llm.training.load_functions import BatchFunctions
from jaxrl_llm.types import Batch


class Selected(NamedTuple):
    """What of a step's answers the policy is updated on.

    Attributes:
        minibatches: of answers, or of pairs as `preference_batch` lays them out; one of which
            nothing is left has an empty mask.
        metrics: of what is left out.
    """

    minibatches: list[Batch]
    metrics: dict[str, float]

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is left in any mini-batch."""
        return not any(minibatch["mask"].any() for minibatch in self.minibatches)


def selection_of(config: TrainConfig, functions: BatchFunctions) -> Callable[[Batch], Selected]:
    """Return the function from a step's batch to what the policy is updated on.

    Args:
        config: of the run.
        functions: that it names.
    """
    size = minibatch_size(config)
    unit = size // config.rollout.samples_per_prompt
    if functions.pairs is not None:
        return functools.partial(select_pairs, pair_maker(functions.pairs), size, unit)
    if functions.answer_filter is not None:
        keep = per_answer(functions.answer_filter, "algorithm.answer_filter", np.bool_)
        return functools.partial(select_kept, keep, size, unit)
    return functools.partial(select_all, size)


def cut_minibatches(batch: Batch, size: int) -> Iterator[Batch]:
    """Cut a batch into mini-batches of so many answers, which are whole groups."""
    for first in range(0, len(batch.sequence_lengths), size):
        yield batch.take(slice(first, first + size))


def select_all(size: int, batch: Batch) -> Selected:
    """Take all answers."""
    return Selected([*cut_minibatches(batch, size)], {})


def select_kept(
    keep: Callable[[Batch], np.ndarray], size: int, unit: int, batch: Batch
) -> Selected:
    """Take the answers that a filter keeps, of those that are usable.

    Args:
        keep: batch -> which answers to keep [B].
        size: answers of a mini-batch before they are filtered.
        unit: the least rows of a mini-batch after it.
        batch: of a step, with its advantages.
    """
    kept = keep(batch)
    cut = [
        filled(minibatch.take(np.flatnonzero(chosen)), unit)
        for minibatch, chosen in zip(
            cut_minibatches(batch, size), cut_rows(kept, size), strict=True
        )
    ]
    return Selected(cut, {"batch/kept_answers": float(kept.sum())})


def select_pairs(
    make_pairs: Callable[[Batch], tuple[np.ndarray, np.ndarray]],
    size: int,
    unit: int,
    batch: Batch,
) -> Selected:
    """Take pairs of answers.

    Args:
        make_pairs: batch -> indices of the chosen and of the rejected answers.
        size: answers of the groups whose pairs are a mini-batch.
        unit: the least rows of a mini-batch.
        batch: of a step.
    """
    chosen, rejected = make_pairs(batch)
    numbers, counts = np.unique(batch["group_ids"][batch["usable"]], return_counts=True)
    groups = numbers[counts > 1]
    tied = len(np.setdiff1d(groups, batch["group_ids"][chosen]))
    cut = []
    for first in range(0, len(batch.sequence_lengths), size):
        own = (chosen >= first) & (chosen < first + size)
        cut.append(filled(pair_batch(batch, chosen[own], rejected[own]), unit))
    return Selected(cut, {"pairs/count": float(len(chosen)), "pairs/tied_groups": float(tied)})


def cut_rows(values: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Cut values of all answers as `cut_minibatches` does."""
    for first in range(0, len(values), size):
        yield values[first : first + size]


def pair_batch(batch: Batch, chosen: np.ndarray, rejected: np.ndarray) -> Batch:
    """Lay pairs of answers out as `preference_batch` does: each as one sequence of two segments.

    Its fields: `mask`, `second_start`, `margins`, the difference of the scores, and where the batch
    has the reference's log-probs their sums over each answer.

    Args:
        batch: of a step [B T].
        chosen: indices of the better answers.
        rejected: indices of the worse answers.
    """
    count, length = len(chosen), batch.tokens.shape[1]
    tokens = np.zeros((count, 2 * length), np.int32)
    mask = np.zeros(tokens.shape, bool)
    sizes = batch.sequence_lengths
    for i, (better, worse) in enumerate(zip(chosen, rejected, strict=True)):
        first, second = sizes[better], sizes[worse]
        for values, of in ((tokens, batch.tokens), (mask, batch["mask"])):
            values[i, :first] = of[better, :first]
            values[i, first : first + second] = of[worse, :second]
    scores = batch["scores"]
    fields = {
        "mask": mask,
        "second_start": sizes[chosen].astype(np.int32),
        "margins": (scores[chosen] - scores[rejected]).astype(np.float32),
    }
    if "ref_logprobs" in batch.fields:
        logprobs = np.where(batch["mask"], batch["ref_logprobs"], 0.0)
        sums = logprobs.sum(1, dtype=np.float64).astype(np.float32)
        fields |= {"ref_chosen_logps": sums[chosen], "ref_rejected_logps": sums[rejected]}
    return Batch(tokens, (sizes[chosen] + sizes[rejected]).astype(np.int32), fields)


def filled(batch: Batch, unit: int) -> Batch:
    """Fill a batch up with rows without tokens, to `unit` times a power of two.

    >>> filled(Batch(np.ones((3, 1), int), np.ones(3, int), {}), 2).sequence_lengths.tolist()
    [1, 1, 1, 0]
    """
    rows = unit
    while rows < len(batch.tokens):
        rows *= 2
    more = rows - len(batch.tokens)

    def fill(values: np.ndarray) -> np.ndarray:
        return np.pad(values, [(0, more), *[(0, 0)] * (values.ndim - 1)])

    fields = {name: fill(values) for name, values in batch.fields.items()}
    return Batch(fill(batch.tokens), fill(batch.sequence_lengths), fields)


def pair_maker(
    function: Callable[..., Any],
) -> Callable[[Batch], tuple[np.ndarray, np.ndarray]]:
    """Return a jitted function from a batch to the pairs that `function` makes and that count.

    Args:
        function: asks for fields of a batch, returns Pairs.
    """
    compute = jax.jit(lambda fields: call(function, fields))

    def make(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        result = check_pairs(compute(batch.arrays), function)
        chosen, rejected, valid = map(np.asarray, result)
        chosen, rejected = chosen[valid], rejected[valid]
        groups, usable = batch["group_ids"], batch["usable"]
        for indices in (chosen, rejected):
            if ((indices < 0) | (indices >= len(usable))).any():
                raise ScoreError(
                    f"algorithm.pairs: {name_of(function)!r} returned an index that is no answer, "
                    f"expected 0 to {len(usable) - 1}"
                )
        if (groups[chosen] != groups[rejected]).any():
            raise ScoreError(
                f"algorithm.pairs: {name_of(function)!r} paired answers to different prompts: "
                "expected both of one group (group_ids)"
            )
        both = usable[chosen] & usable[rejected] & (chosen != rejected)
        order = np.argsort(chosen[both], kind="stable")
        return chosen[both][order], rejected[both][order]

    return make


def check_pairs(result: Any, function: Callable[..., Any]) -> Pairs:
    """Return what a function that makes pairs returned, if it is Pairs of arrays [P].

    Raises:
        ScoreError: it is something else.
    """
    kinds = {"chosen": np.integer, "rejected": np.integer, "valid": np.bool_}
    if not isinstance(result, tuple) or len(result) != len(kinds):
        raise ScoreError(
            f"algorithm.pairs: {name_of(function)!r} returned {type(result).__name__}; expected "
            "Pairs(chosen, rejected, valid)"
        )
    for (name, kind), array in zip(kinds.items(), result, strict=True):
        is_array = isinstance(array, jax.Array) and array.ndim == 1
        if not is_array or not np.issubdtype(array.dtype, kind) or array.shape != result[0].shape:
            got = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else repr(array)
            expected = "true or false" if kind is np.bool_ else "indices of answers"
            raise ScoreError(
                f"algorithm.pairs: {name_of(function)!r} returned {got} as {name!r}; expected "
                f"{expected} [P]"
            )
    return Pairs(*result)
