"""What an update minimises: a loss per token, summed with the weights of a reduction.

An objective runs a model over packed rows, calls a loss function with the fields that it asks for,
and returns the part of a micro-batch in the mini-batch's loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from jaxrl_llm.algorithms.distillation import DivergenceStats
from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.fields import asks_for, call, name_of
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.moe.balance import RouterStats
from jaxrl_llm.training.distillation import Distillation
from jaxrl_llm.training.forward import (
    ForwardConfig,
    hidden_states,
    token_stats_from_hidden,
    values_from_hidden,
)
from jaxrl_llm.training.microbatches import Fields, MicroBatch

COEFS = {"kl_coef": 0.0, "entropy_coef": 0.0, "distillation_coef": 0.0}
"""The coefficients of a loss's terms; a compiled update takes any."""


class LossError(RunError, TypeError):
    """A loss function that returned something else than one loss per token."""


@runtime_checkable
class Objective(Protocol):
    """What an update minimises.

    Where the model has experts, the loss of a micro-batch has its part of their load-balance loss,
    weighted by `coefs["balance_weights"]` if they are given, and its metrics hold the statistics of
    the routers as `router`. Metrics add up over micro-batches but for those under `largest` and
    `smallest`, of which the update keeps the largest and the smallest.
    """

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        ...

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """The loss of a policy's token.

    It is `share * correction * loss + kl_coef * kl - entropy_coef * entropy`, and to that
    `distillation_coef * divergence` from a teacher.

    Attributes:
        loss: policy loss; asks for fields, returns TokenLoss or an array [B T]. None: there is none
            but the other terms.
        share: of the loss; with 0 it has no gradient.
        kl: estimator (logprobs, ref_logprobs) -> [B T], or None.
        entropy: whether there is an entropy bonus.
        corrected: whether the batch holds weights `correction` [B T] of the loss.
        on_policy: whether the policy is the one at the start of the step, as where a step is one
            update. `old_logprobs` are then the log-probs without their gradient, and `policy` in
            the metrics holds the tokens' log-probs and entropies [b T].
        distillation: how the policy is compared with a teacher, or None. The weights of a teacher
            whose hidden states are asked for are `teacher` among the coefficients.
    """

    loss: Callable[..., Any] | None
    share: float = 1.0
    kl: Callable[..., Any] | None = None
    entropy: bool = False
    corrected: bool = False
    on_policy: bool = False
    distillation: Distillation | None = None

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        names = {name for f in (self.loss, self.kl) if f for name in asks_for(f)}
        names |= self.distillation.asks_for() if self.distillation else set()
        known = {"logprobs", "entropy"} | ({"old_logprobs"} if self.on_policy else set())
        return (names - known) | ({"correction"} if self.corrected else set())

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        stats = token_stats_from_hidden(params, hidden, micro.rows, model, mesh)
        mask, weights = micro.fields["mask"], micro.fields["weights"]
        logprobs = jnp.where(mask, stats.logprobs, 0.0)
        entropy = jnp.where(mask, stats.entropy, 0.0)
        fields = micro.fields | {"logprobs": logprobs, "entropy": entropy}
        policy_stats = {}
        if self.on_policy:
            fields["old_logprobs"] = jax.lax.stop_gradient(logprobs)
            policy_stats = {"policy": {"logprobs": stats.logprobs, "entropy": stats.entropy}}
        loss, metrics = self._policy_loss(fields, micro)
        if self.kl:
            kl = per_token(call(self.kl, fields), self.kl, "kl", mask.shape)
            metrics["kl_loss"] = weighted_total(kl, weights, mask)
            loss = loss + coefs["kl_coef"] * metrics["kl_loss"]
        if self.entropy:
            metrics["entropy_loss"] = weighted_total(stats.entropy, weights, mask)
            loss = loss - coefs["entropy_coef"] * metrics["entropy_loss"]
        if self.distillation:
            compared = self.distillation(params, hidden, micro, coefs, model, mesh)
            metrics |= divergence_metrics(compared, micro, of_top=self.distillation.of_top)
            loss = loss + coefs["distillation_coef"] * metrics["distillation_loss"]
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed | policy_stats | {"loss": loss}

    def _policy_loss(self, fields: Fields, micro: MicroBatch) -> tuple[Array, Fields]:
        """Return the term of the loss function, and its metrics."""
        if self.loss is None:
            return jnp.zeros(()), {}
        mask, weights = micro.fields["mask"], micro.fields["weights"]
        policy = as_token_loss(call(self.loss, fields), self.loss, mask.shape)
        corrected = weights * fields["correction"] if self.corrected else weights
        loss = weighted_total(policy.loss, corrected, mask)
        metrics = {"pg_loss": loss} | _diagnostics(policy, micro)
        return self.share * (loss if self.share else jax.lax.stop_gradient(loss)), metrics


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """The loss of a critic's value: asks for `values`, and what else the batch holds."""

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        return set(asks_for(self.loss)) - {"values"}

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: ForwardConfig, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        mask = micro.fields["mask"]
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        values = jnp.where(mask, values_from_hidden(params, hidden, micro.rows, model), 0.0)
        result = call(self.loss, micro.fields | {"values": values})
        regression = as_token_loss(result, self.loss, mask.shape)
        loss = weighted_total(regression.loss, micro.fields["weights"], mask)
        mean = weighted_total(values, micro.fields["token_weights"], mask)
        metrics = {"vf_loss": loss, "vpred_mean": mean} | _diagnostics(regression, micro)
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed


def with_balance(
    loss: Array, router: RouterStats | None, coefs: Fields
) -> tuple[Float32[Array, ""], Fields]:
    """Add the load-balance loss of the experts, if there are any, and return what they did."""
    if router is None:
        return loss, {}
    if "balance_weights" in coefs:
        loss = loss + jnp.sum(coefs["balance_weights"] * router.probabilities)
    return loss, {"router": router}


def weighted_total(values: Array, weights: Array, mask: Array) -> Float32[Array, ""]:
    """Return the sum of weighted values [B T] under a mask; what lies off it is not read.

    Neither of the values nor of the weights: 0 times NaN is NaN, in a gradient, too.
    """
    return jnp.sum(jnp.where(mask, weights, 0.0) * jnp.where(mask, values, 0.0))


def divergence_metrics(compared: DivergenceStats, micro: MicroBatch, *, of_top: bool) -> Fields:
    """Return the distillation's part of a loss as `distillation_loss`, and what it compared.

    Args:
        compared: of each token.
        micro: with weights.
        of_top: whether the teacher gave its likeliest tokens only.
    """
    mask, weights = micro.fields["mask"], micro.fields["token_weights"]
    means = {"divergence/mean": compared.divergence, "top1_agreement": compared.agreement}
    if of_top:
        means |= {
            "student_top_mass": compared.student_mass,
            "teacher_top_mass": compared.teacher_mass,
        }
    metrics: Fields = {name: weighted_total(x, weights, mask) for name, x in means.items()}
    loss = weighted_total(compared.divergence, micro.fields["weights"], mask)
    return metrics | {
        "distillation_loss": loss,
        "largest": {"divergence/max": jnp.where(mask, compared.divergence, -jnp.inf).max()},
        "smallest": {"divergence/min": jnp.where(mask, compared.divergence, jnp.inf).min()},
    }


def _diagnostics(loss: TokenLoss, micro: MicroBatch) -> Fields:
    weights, mask = micro.fields["token_weights"], micro.fields["mask"]
    return {name: weighted_total(value, weights, mask) for name, value in loss.diagnostics.items()}


def as_token_loss(result: Any, function: Callable[..., Any], shape: tuple[int, ...]) -> TokenLoss:
    """Check what a loss function returned: TokenLoss, or an array [B T] without diagnostics.

    Raises:
        LossError: for anything else, and for a wrong shape or dtype.
    """
    loss = result if isinstance(result, TokenLoss) else TokenLoss(result, {})
    for name, value in {"loss": loss.loss, **loss.diagnostics}.items():
        per_token(value, function, "loss", shape, part=f" as {name!r}")
    return loss


def per_token(
    value: Any, function: Callable[..., Any], kind: str, shape: tuple[int, ...], *, part: str = ""
) -> Array:
    """Return what a function returned if it is one number per token.

    Args:
        value: what it returned.
        function: for the message, as are `kind` and `part`, which of its results it is.
        shape: [B T].

    Raises:
        LossError: it is no floating-point array of this shape.
    """
    got = f"{type(value).__name__}"
    if isinstance(value, jax.Array):
        got = f"{value.dtype}{list(value.shape)}"
        if value.shape == shape and jnp.issubdtype(value.dtype, jnp.floating):
            return value
    raise LossError(
        f"{kind} {name_of(function)!r} returned {got}{part}; expected a floating-point array "
        f"[B T], here {list(shape)}: one {ONE_OF.get(kind, 'number')} per token"
    )


ONE_OF = {"loss": "loss", "reduce": "weight"}
