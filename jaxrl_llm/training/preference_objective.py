"""What an update on preferences minimises: a loss of pairs, or of answers with a label.

That of labelled steps is in `step_objective`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32

from jaxrl_llm.algorithms.preferences import PairLoss
from jaxrl_llm.config.fields import asks_for, call, name_of
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.training.forward import ForwardConfig, hidden_states, token_stats_from_hidden
from jaxrl_llm.training.microbatches import MEANS, Fields, MicroBatch
from jaxrl_llm.training.objective import LossError, with_balance

SUMS = frozenset({"chosen_logps", "rejected_logps", "logps"})
LENGTHS = frozenset({"chosen_lengths", "rejected_lengths", "lengths"})
SCORES = frozenset({"chosen_scores", "rejected_scores", "scores"})
OF_REFERENCE = frozenset({"ref_chosen_logps", "ref_rejected_logps", "ref_logps"})
OF_ROWS = frozenset({"margins", "labels"})
OF_MINIBATCH = frozenset({"kl_baseline"})
ANSWER_FIELDS = SUMS | LENGTHS | SCORES | OF_REFERENCE | OF_ROWS | OF_MINIBATCH
"""What a loss of pairs or of answers with a label may ask for, [P] each."""

OF_LABELLED = frozenset({"logps", "lengths", "scores", "ref_logps", "labels", "kl_baseline"})
"""Those of answers with a label; the others are of pairs."""


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """The mean over pairs, or over answers with a label, of a loss that asks for fields [P].

    The mean is over the whole mini-batch: `weights` [P W] add up to one share for each sequence.

    Attributes:
        loss: asks for `ANSWER_FIELDS`, returns PairLoss or an array [P].
    """

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        names = set(asks_for(self.loss))
        is_of_pairs = not names <= OF_LABELLED
        given = names & (OF_REFERENCE | OF_ROWS | OF_MINIBATCH)
        return given | ({"second_start"} if is_of_pairs else set())

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        names, mask = set(asks_for(self.loss)), micro.fields["mask"]
        fields = dict(micro.fields)
        if names & SUMS:
            stats = token_stats_from_hidden(params, hidden, micro.rows, model, mesh)
            logprobs = jnp.where(mask, stats.logprobs, 0.0)
            fields |= split_sums(logprobs, fields, ("chosen_logps", "rejected_logps"), "logps")
        if names & LENGTHS:
            on = mask.astype(jnp.int32)
            fields |= split_sums(on, fields, ("chosen_lengths", "rejected_lengths"), "lengths")
        if names & SCORES:
            fields |= _scores(params, hidden, micro, model)
        result = as_pair_loss(call(self.loss, fields), self.loss, mask.shape[:1])
        weights = micro.fields["weights"].sum(axis=1)
        loss = _total(result.loss, weights)
        metrics: Fields = {"pg_loss": loss, MEANS: {}}
        for name, shown in result.diagnostics.items():
            if isinstance(shown, tuple):
                own = jnp.where(shown[1], weights, 0.0)
                metrics[MEANS][name] = _total(shown[0], own), jnp.sum(own)
            else:
                metrics[name] = _total(shown, weights)
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed | {"loss": loss}


def split_sums(
    values: Any, fields: Fields, of_pair: tuple[str, str], of_one: str
) -> dict[str, Any]:
    """Add values [P W] up over each answer, by the names of the sums [P]."""
    if "second_start" not in fields:
        return {of_one: values.sum(axis=1)}
    steps = jnp.arange(values.shape[1])
    is_second: Bool[Array, "P W"] = steps >= fields["second_start"][:, None]
    sums = (jnp.where(is_it, values, 0).sum(axis=1) for is_it in (~is_second, is_second))
    return dict(zip(of_pair, sums, strict=True))


def as_pair_loss(result: Any, function: Callable[..., Any], shape: tuple[int, ...]) -> PairLoss:
    """Check what a loss of preferences returned: PairLoss, or an array [P] without diagnostics.

    Raises:
        LossError: for anything else, and for a wrong shape or dtype.
    """
    loss = result if isinstance(result, PairLoss) else PairLoss(result, {})
    for name, given in {"loss": loss.loss, **loss.diagnostics}.items():
        value = given[0] if isinstance(given, tuple) else given
        is_array = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
        if not is_array or value.shape != shape:
            got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
            raise LossError(
                f"loss {name_of(function)!r} returned {got} as {name!r}; expected a floating-point "
                f"array [P], here {list(shape)}: one number for each pair or answer"
            )
    return loss


def _scores(params: Params, hidden: Any, micro: MicroBatch, model: ForwardConfig) -> Fields:
    """Return a reward model's scores of each answer."""
    row, start, size = map(jnp.asarray, micro.rows.places)
    counts = micro.fields["weights"].sum(axis=1) > 0

    def score(start: Array, size: Array) -> Array:
        scores = model.model.sequence_scores(params, hidden, row, start, size)
        return jnp.where(counts, scores, 0.0)  # a loss may have no gradient in padding

    if "second_start" not in micro.fields:
        return {"scores": score(start, size)}
    second = micro.fields["second_start"]
    return {
        "chosen_scores": score(start, second),
        "rejected_scores": score(start + second, size - second),
    }


def _total(values: Array, weights: Array) -> Float32[Array, ""]:
    return jnp.sum(weights * jnp.where(weights > 0, values, 0.0))
