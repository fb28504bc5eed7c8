"""What an update of a process reward model minimises: a loss of each step of an answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32

from jaxrl_llm.config.fields import asks_for, call
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.training.forward import ForwardConfig, hidden_states, token_scores_from_hidden
from jaxrl_llm.training.microbatches import Fields, MicroBatch
from jaxrl_llm.training.objective import as_token_loss, weighted_total, with_balance

LOGITS = "step_logits"
OF_STEPS = frozenset({LOGITS, "step_labels"})
"""What a loss of steps may ask for, [P W] each."""


@dataclass(frozen=True, kw_only=True)
class StepObjective:
    """The mean over all steps of a mini-batch of a loss that asks for `OF_STEPS`.

    `mask` is true on the last token of each step, `weights` add up to 1 over the mini-batch, and
    so does `answer_share` [P].

    Attributes:
        loss: returns TokenLoss or an array [P W].
    """

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        return (set(asks_for(self.loss)) - {LOGITS}) | {"step_labels", "answer_share"}

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        mask, weights = micro.fields["mask"], micro.fields["weights"]
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        z = jnp.where(mask, token_scores_from_hidden(params, hidden, micro.rows, model), 0.0)
        result = as_token_loss(call(self.loss, micro.fields | {LOGITS: z}), self.loss, mask.shape)

        right_steps, right_answers = step_correctness(z, micro.fields["step_labels"], mask)
        loss = weighted_total(result.loss, weights, mask)
        shown = result.diagnostics | {"accuracy/steps": right_steps.astype(jnp.float32)}
        metrics = {name: weighted_total(x, weights, mask) for name, x in shown.items()}
        metrics |= {"pg_loss": loss}
        metrics["accuracy/answers"] = jnp.sum(micro.fields["answer_share"] * right_answers)
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed | {"loss": loss}


def step_correctness(
    logits: Float[Array, "P W"], labels: Float[Array, "P W"], mask: Bool[Array, "P W"]
) -> tuple[Bool[Array, "P W"], Bool[Array, " P"]]:
    """Return where a step is judged as its label says, and in which answers the first wrong one is.

    A step is judged right where its logit is above 0, and is right where its label is above 1/2.
    An answer without a wrong step counts where none is found, as in ProcessBench
    (https://arxiv.org/abs/2412.06559).

    >>> labels, mask = jnp.array([[1.0, 0.0, 0.0]]), jnp.ones((1, 3), bool)
    >>> steps, answers = step_correctness(jnp.array([[2.0, -1.0, 3.0]]), labels, mask)
    >>> steps.tolist(), answers.tolist()
    ([[True, True, False]], [True])
    """
    judged, wrong = (mask & ~is_right for is_right in (logits > 0, labels > 0.5))
    first, expected = (_first(x) for x in (judged, wrong))
    return judged == wrong, first == expected


def _first(marks: Bool[Array, "P W"]) -> Array:
    """Return the first place that is marked; one past the last where none is."""
    return jnp.where(marks.any(axis=1), jnp.argmax(marks, axis=1), marks.shape[1])
