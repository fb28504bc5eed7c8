"""The algorithm stage: from scores and log-probs to advantages, and the KL coefficient."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config.fields import asks_for, call, name_of
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.training.batch_metrics import kl_metrics
from jaxrl_llm.training.bind import AlgorithmFunctions
from jaxrl_llm.training.experience import (
    ScoreError,
    Selected,
    advantage_step,
    correction_step,
    penalize,
    selection_of,
)
from jaxrl_llm.training.objectives import LossError, per_token
from jaxrl_llm.types import Batch


@dataclass(frozen=True, kw_only=True)
class AlgorithmStage:
    """What the algorithm makes of a scored batch. What adds is the identity if not asked for.

    Attributes:
        penalize_kl: (batch, KL coefficient) -> the batch with the KL subtracted from its rewards.
        add_advantages: adds `advantages`, and `returns` if there is a critic.
        add_correction: adds the weights of the off-policy correction.
        select: batch -> what of it the policy is updated on.
        control_kl: (batch, KL coefficient) -> metrics of the KL, and the next coefficient.
    """

    penalize_kl: Callable[[Batch, float], Batch]
    add_advantages: Callable[[Batch], Batch]
    add_correction: Callable[[Batch], Batch]
    select: Callable[[Batch], Selected]
    control_kl: Callable[[Batch, float], tuple[dict[str, float], float]]


def build_algorithm(config: TrainConfig, functions: AlgorithmFunctions) -> AlgorithmStage:
    """Build what the functions of a config add to a batch."""
    kl = kl_to_reference(functions.kl) if functions.kl else None
    controller = checked_controller(functions.controller)
    in_reward = config.algorithm.kl_reward is not None
    corrections = functions.corrections
    return AlgorithmStage(
        penalize_kl=functools.partial(penalize_kl, kl) if kl and in_reward else without_kl_penalty,
        add_advantages=advantage_step(
            functions.advantage, with_returns="critic" in functions.updates
        )
        if functions.advantage
        else without_advantages,
        add_correction=correction_step(corrections) if corrections else without_correction,
        select=selection_of(config, functions),
        control_kl=functools.partial(control_kl, kl, controller) if kl else keep_kl_coef,
    )


def penalize_kl(kl: Callable[[Batch], np.ndarray], batch: Batch, kl_coef: float) -> Batch:
    """Subtract the KL to the reference from a batch's rewards."""
    return penalize(batch, kl(batch), kl_coef)


def without_kl_penalty(batch: Batch, kl_coef: float) -> Batch:
    """Return the same batch, where the KL is in the loss or there is none."""
    del kl_coef
    return batch


def without_advantages(batch: Batch) -> Batch:
    """Return the same batch, where pairs are compared instead."""
    return batch


def without_correction(batch: Batch) -> Batch:
    """Return the same batch, where nothing corrects for the engine's log-probs."""
    return batch


def control_kl(
    kl: Callable[[Batch], np.ndarray],
    controller: Callable[[float, float, int], float],
    batch: Batch,
    kl_coef: float,
) -> tuple[dict[str, float], float]:
    """Return metrics of a batch's KL, and the controller's next coefficient."""
    metrics = kl_metrics(batch, kl(batch), kl_coef)
    return metrics, controller(kl_coef, metrics["actor/kl"], int(batch["usable"].sum()))


def keep_kl_coef(batch: Batch, kl_coef: float) -> tuple[dict[str, float], float]:
    """Return no metrics and the same coefficient, where there is no KL."""
    del batch
    return {}, kl_coef


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
