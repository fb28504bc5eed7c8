"""The batch that an algorithm sees: scores, penalties, advantages, corrections, selection."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.advantages import kl_penalized_rewards, rewards_from_scores
from jaxrl_llm.algorithms.pairs import Pairs
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.functions import asks_for, call, name_of
from jaxrl_llm.rewards.runner import FUNCTION_COMPONENT, Score
from jaxrl_llm.rollout.rollouts import without_lone
from jaxrl_llm.training.update import LossError, per_token, shape_text
from jaxrl_llm.types import Batch
from jaxrl_llm.workers.values import finite_number, short_repr

Function = Callable[..., Any]


class ScoreError(RunError):
    """A reward function that does not report what the config says it does."""


def with_scores(
    batch: Batch,
    scores: Sequence[Score],
    *,
    samples: int = 1,
    compares: bool = True,
    components: Sequence[str] = (),
) -> Batch:
    """Add the scores of a batch's answers to the rewards of their turns.

    `scores` are the sums of the rewards, `raw_scores` are what was given. A score is the reward of
    the last token of its answer, unless its steps have rewards. Unscored answers are not usable.

    Args:
        batch: B answers, with the `rewards` of their turns.
        scores: of each answer.
        samples: G, the answers to each prompt.
        compares: whether these are compared with each other. Then one that alone is left of its
            group is not usable, either.
        components: names of the reward functions' numbers that become `score_components` [B C];
            where a reward function failed, reward.on_error stands for each.

    Raises:
        ScoreError: a reward function did not report one of the components.
    """
    usable = batch["usable"] & ~np.array([score.is_unscored for score in scores], bool)
    batch = without_rows(batch, ~(without_lone(usable, samples) if compares else usable))
    usable = batch["usable"]
    values = np.where(usable, [score.score for score in scores], 0).astype(np.float32)
    of_turns = batch["rewards"]
    of_steps = _on_steps(scores, batch["mask"])
    has_steps = np.array([bool(score.step_rewards) for score in scores])
    of_last = np.where(has_steps, np.float32(0), values)
    with np.errstate(over="ignore"):
        rewards = of_turns + of_steps + np.asarray(_on_last_token(of_last, batch["mask"]))
        sums = of_last + of_steps.sum(1) + of_turns.sum(1)
    if not np.isfinite(sums).all():
        raise ScoreError(
            f"answer {np.flatnonzero(~np.isfinite(sums))[0]}: its score and the rewards of its "
            "turns add up to more than float32 can hold: let reward.function return smaller numbers"
        )
    batch = batch.add(scores=sums, raw_scores=values, rewards=rewards)
    if components:
        batch = batch.add(score_components=_components(scores, components, usable))
    return batch


def _components(scores: Sequence[Score], names: Sequence[str], usable: np.ndarray) -> np.ndarray:
    def number(score: Score, name: str) -> float:
        if score.error is not None and name != "score":
            return score.extra.get(FUNCTION_COMPONENT, score.score)
        component = score.extra.get(name, score.score if name == "score" else None)
        if (value := finite_number(component)) is None:
            reported = f"{name}={short_repr(component)}" if name in score.extra else [*score.extra]
            raise ScoreError(
                f"reward.components names {name!r}, but the reward function reported "
                f"{reported or 'a bare number'}: expected a finite number under that name"
            )
        return value

    numbers = [
        [number(score, name) if is_usable else 0.0 for name in names]
        for score, is_usable in zip(scores, usable, strict=True)
    ]
    return np.array(numbers, np.float32)


def _on_steps(scores: Sequence[Score], mask: np.ndarray) -> np.ndarray:
    """Lay the rewards of steps out [B T], each on its token; nothing of answers off the mask."""
    rewards = np.zeros(mask.shape, np.float32)
    for row, score in enumerate(scores):
        drawn = np.flatnonzero(mask[row])
        for place, reward in score.step_rewards if len(drawn) else ():
            rewards[row, drawn[place]] += reward
    return rewards


_on_last_token = jax.jit(rewards_from_scores)


def with_ages(batch: Batch, step: int) -> Batch:
    """Add `ages` [B T]: how many updates the weights that drew a token are behind the trainer's.

    They are 0 on tokens that nobody drew.
    """
    ages = np.where(batch["mask"], step - 1 - batch["versions"], 0)
    return batch.add(ages=ages.astype(np.int32))


def add_to_scores(batch: Batch, values: np.ndarray) -> Batch:
    """Add a penalty [B] to the scores, and to the reward of each answer's last token."""
    return batch.add(
        scores=batch["scores"] + values,
        rewards=batch["rewards"] + np.asarray(_on_last_token(values, batch["mask"])),
    )


def without_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Return a batch in which some answers [B] are not usable, as `lay_out` has them."""
    usable = batch["usable"] & ~rows
    if (usable == batch["usable"]).all():
        return batch
    own = len(usable) + np.arange(len(usable), dtype=np.int32)
    return batch.add(
        usable=usable,
        mask=batch["mask"] & usable[:, None],
        rewards=np.where(usable[:, None], batch["rewards"], 0),
        group_ids=np.where(usable, batch["group_ids"], own),
    )


def penalize(batch: Batch, kl: np.ndarray, coef: float) -> Batch:
    """Subtract the KL penalty from the token rewards, and its sum from the scores."""
    arrays = map(jnp.asarray, (batch["rewards"], kl, batch["mask"]))
    rewards = np.asarray(kl_penalized_rewards(*arrays, coef=coef))
    return batch.add(rewards=rewards, scores=rewards.sum(1))


def per_answer(
    function: Callable[..., Any], key: str, kind: type[np.generic]
) -> Callable[[Batch], np.ndarray]:
    """Return a jitted function from a batch to what `function` returns, checked: [B] of a kind.

    Args:
        function: asks for fields of a batch.
        key: its config key, for messages.
        kind: np.floating or np.bool_.
    """
    compute = jax.jit(lambda fields: call(function, fields))

    def checked(batch: Batch) -> np.ndarray:
        result = compute(batch.arrays)
        values = np.asarray(check_per_answer(result, function, key, kind, len(batch["mask"])))
        values = np.where(batch["usable"], values, np.zeros_like(values))
        if kind is not np.bool_ and not np.isfinite(values).all():
            raise ScoreError(f"{key}: {name_of(function)!r} returned NaN or infinity")
        return values

    return checked


def check_per_answer(
    result: Any, function: Callable[..., Any], key: str, kind: type[np.generic], answers: int
) -> jax.Array:
    """Return what a function returned if it is [B] of a kind.

    Raises:
        ScoreError: it is something else.
    """
    is_array = isinstance(result, jax.Array) and result.shape == (answers,)
    if is_array and np.issubdtype(result.dtype, kind):
        return result
    raise ScoreError(
        f"{key}: {name_of(function)!r} returned {shape_text(result)}; expected one "
        f"{'true or false' if kind is np.bool_ else 'number'} for each answer [B], here [{answers}]"
    )


def correction_step(functions: Sequence[Callable[..., Any]]) -> Callable[[Batch], Batch]:
    """Return a jitted step that adds the product of the functions' weights, `correction` [B T]."""

    @jax.jit
    def compute(fields: dict[str, Any]) -> Any:
        weights = jnp.ones(fields["mask"].shape, jnp.float32)
        for function in functions:
            weights = weights * correction_weights(function, fields)
        return weights

    def add(batch: Batch) -> Batch:
        weights = np.asarray(compute(batch.arrays))
        if not np.isfinite(weights[batch["mask"]]).all():
            names = ", ".join(name_of(function) for function in functions)
            raise ScoreError(f"algorithm.correction: {names} returned NaN or infinity")
        return batch.add(correction=weights)

    return add


def correction_weights(function: Callable[..., Any], fields: dict[str, Any]) -> jax.Array:
    """Return the weights [B T] of an off-policy correction.

    Raises:
        ScoreError: it returned something else.
    """
    weights, shape = call(function, fields), fields["mask"].shape
    if not isinstance(weights, jax.Array) or weights.shape != shape:
        raise ScoreError(
            f"algorithm.correction: {name_of(function)!r} returned {shape_text(weights)}; expected "
            f"one weight for each token [B T], here {list(shape)}"
        )
    return weights


class AdvantageError(RunError):
    """An advantage function that returned something else than advantages."""


def advantage_step(
    function: Callable[..., Any], *, with_returns: bool = False
) -> Callable[[Batch], Batch]:
    """Return a jitted step that adds `advantages` [B T] to a batch, and `returns` if it has them.

    The function returns [B] (every token of an answer gets its advantage), [B T], or a pair of
    advantages and returns, both [B T].

    Args:
        function: asks for fields of a batch.
        with_returns: whether it must return a pair, since a critic learns from the returns.
    """

    compute = jax.jit(functools.partial(compute_advantages, function, with_returns=with_returns))

    def add(batch: Batch) -> Batch:
        arrays = {name: np.asarray(array) for name, array in compute(batch.arrays).items()}
        for name, array in arrays.items():
            wrong = np.flatnonzero(~np.isfinite(array).all(1))
            if wrong.size:
                raise AdvantageError(
                    f"advantage {name_of(function)!r} returned NaN or infinity as {name} for "
                    f"{len(wrong)} of {len(array)} answers, the first one number {wrong[0]} "
                    f"with score {batch['scores'][wrong[0]]}"
                )
        return batch.add(**arrays)

    return add


def compute_advantages(
    function: Callable[..., Any], fields: dict[str, Any], *, with_returns: bool
) -> dict[str, Any]:
    """Return what an advantage function makes of the fields of a batch; see `advantage_step`.

    Raises:
        AdvantageError: it returned something else than advantages, and returns if asked for.
    """
    result, mask = call(function, fields), fields["mask"]
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) != 2 and (with_returns or isinstance(result, tuple)):
        raise AdvantageError(
            f"advantage {name_of(function)!r} returned {len(parts)} array(s); expected a pair "
            "(advantages, returns): the critic learns from the returns"
        )
    named = zip(("advantages", "returns"), parts, strict=False)
    return {name: _per_token(function, name, array, mask) for name, array in named}


def _per_token(function: Callable[..., Any], name: str, array: Any, mask: Any) -> Any:
    kinds = (jax.Array, np.ndarray)
    if not isinstance(array, kinds) or array.shape not in (mask.shape, mask.shape[:1]):
        got = f"shape {list(array.shape)}" if hasattr(array, "shape") else repr(type(array))
        raise AdvantageError(
            f"advantage {name_of(function)!r} returned {got} as {name}; expected an array [B] or "
            f"[B T], here [{mask.shape[0]}] or {list(mask.shape)}"
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise AdvantageError(
            f"advantage {name_of(function)!r} returned {array.dtype} as {name}, expected floating "
            "point"
        )
    return jnp.where(mask, array[:, None] if array.ndim == 1 else array, 0.0).astype(jnp.float32)


def kl_to_reference(kl: Callable[..., Any]) -> Callable[[Batch], np.ndarray]:
    """Return a function from a batch to the KL of every token to the reference [B T].

    It raises LossError where that is not finite, or no array of this shape.
    """

    @functools.partial(jax.jit, static_argnames="shape")
    def estimate(fields: dict[str, Any], shape: tuple[int, ...]) -> Any:
        return per_token(call(kl, fields), kl, "kl", shape)

    def of_batch(batch: Batch) -> np.ndarray:
        fields = {**batch.arrays, "logprobs": batch["old_logprobs"]}
        asked = {name: fields[name] for name in asks_for(kl)}
        values = np.asarray(estimate(asked, batch.tokens.shape), np.float32)
        if not np.isfinite(values[batch["mask"]]).all():
            raise LossError(f"kl {name_of(kl)!r} returned NaN or infinity")
        return np.where(batch["mask"], values, 0)

    return of_batch


def checked_controller(controller: Callable[..., Any]) -> Callable[[float, float, int], float]:
    """Return the KL controller, with its result checked to be a coefficient."""

    def next_coef(coef: float, observed_kl: float, batch_size: int) -> float:
        result = controller(coef, observed_kl, batch_size)
        is_number = isinstance(result, int | float | jax.Array | np.number) and np.ndim(result) == 0
        if not is_number or not 0 <= float(result) < float("inf"):
            raise ScoreError(
                f"algorithm.kl_controller: {name_of(controller)!r} returned {result!r} for "
                f"coef={coef:g} and observed_kl={observed_kl:g}; expected a number of 0 or more"
            )
        return float(result)

    return next_coef


def check_marks(result: Any, select: Function, shape: tuple[int, ...]) -> jax.Array:
    """Return what a producer of `high_covariance` returned if it is true or false for each token.

    Raises:
        ScoreError: it is something else.
    """
    if isinstance(result, jax.Array) and result.shape == shape and result.dtype == bool:
        return result
    raise ScoreError(
        f"algorithm.high_covariance: {name_of(select)!r} returned {shape_text(result)}; expected "
        f"true or false for each token [B T], here {list(shape)}"
    )


def with_key(select: Function, key: Any) -> Function:
    """Return a selector with its random key bound, if it takes one."""
    takes_key = "key" in inspect.signature(select).parameters
    return functools.partial(select, key=key) if takes_key else select


# What of a step's answers the policy is updated on: all, those that a filter keeps, or pairs.


def cut_minibatches(batch: Batch, size: int) -> Iterator[Batch]:
    """Cut a batch into mini-batches of so many answers, which are whole groups."""
    for first in range(0, len(batch.sequence_lengths), size):
        yield batch.take(slice(first, first + size))


def select_kept(
    keep: Callable[[Batch], np.ndarray], size: int, unit: int, batch: Batch
) -> tuple[list[Batch], dict[str, float]]:
    """Return mini-batches of the usable answers that a filter keeps, and how many these are.

    One of which nothing is left has an empty mask.

    Args:
        keep: batch -> which answers to keep [B].
        size: answers of a mini-batch before they are filtered.
        unit: the least rows of a mini-batch after it.
        batch: of a step, with its advantages.
    """
    kept = keep(batch)
    cut = [
        filled(batch.take(first + np.flatnonzero(kept[first : first + size])), unit)
        for first in range(0, len(kept), size)
    ]
    return cut, {"batch/kept_answers": float(kept.sum())}


def select_pairs(
    make_pairs: Callable[[Batch], tuple[np.ndarray, np.ndarray]], size: int, unit: int, batch: Batch
) -> tuple[list[Batch], dict[str, float]]:
    """Return mini-batches of pairs, as `preference_batch` lays them out, and how many these are.

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
    return cut, {"pairs/count": float(len(chosen)), "pairs/tied_groups": float(tied)}


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


def pair_maker(function: Callable[..., Any]) -> Callable[[Batch], tuple[np.ndarray, np.ndarray]]:
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


def scoring_counts(scores: Sequence[Score]) -> dict[str, float]:
    """Return on how many answers a reward function failed, and how many have no score.

    >>> scoring_counts([Score(1.0, {}, None), Score(0.0, {}, "timeout: 5 s")])
    {'reward/errors': 1.0, 'reward/unscored': 0.0}
    """
    return {
        "reward/errors": float(sum(score.has_failed for score in scores)),
        "reward/unscored": float(sum(score.is_unscored for score in scores)),
    }
