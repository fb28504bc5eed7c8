"""From prompts to what an algorithm can see: sample, score, lay out, estimate advantages."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.advantages import kl_penalized_rewards, rewards_from_scores
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.fields import call, name_of
from jaxrl_llm.rewards.runner import FUNCTION_COMPONENT, Score
from jaxrl_llm.rollout.sampling import without_lone
from jaxrl_llm.types import Batch
from jaxrl_llm.workers.answers import finite_number, short_repr


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
        rewards = of_turns + of_steps + _on_last_token(of_last, batch["mask"])
        sums = of_last + of_steps.sum(1) + of_turns.sum(1)
    if not np.isfinite(sums).all():
        raise ScoreError(
            f"answer {np.flatnonzero(~np.isfinite(sums))[0]}: its score and the rewards of its "
            "turns add up to more than float32 can hold: let reward.function return smaller numbers"
        )
    batch = batch.add(scores=sums, raw_scores=values, rewards=rewards)
    if not components:
        return batch
    numbers = _components(scores, components, usable)
    return batch.add(score_components=numbers)


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


def _on_last_token(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.asarray(_rewards_from_scores(scores, mask))


_rewards_from_scores = jax.jit(rewards_from_scores)


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
        rewards=batch["rewards"] + _on_last_token(values, batch["mask"]),
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
    got = type(result).__name__
    if isinstance(result, jax.Array):
        got = f"{result.dtype}{list(result.shape)}"
        if result.shape == (answers,) and np.issubdtype(result.dtype, kind):
            return result
    raise ScoreError(
        f"{key}: {name_of(function)!r} returned {got}; expected one "
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
        got = (
            f"{weights.dtype}{list(weights.shape)}"
            if isinstance(weights, jax.Array)
            else type(weights).__name__
        )
        raise ScoreError(
            f"algorithm.correction: {name_of(function)!r} returned {got}; expected one weight for "
            f"each token [B T], here {list(shape)}"
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
