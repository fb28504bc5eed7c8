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

from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.fields import asks_for, call, name_of
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.moe.balance import RouterStats
from jaxrl_llm.training.forward import (
    ForwardConfig,
    hidden_states,
    token_stats_from_hidden,
    values_from_hidden,
)
from jaxrl_llm.training.microbatches import Fields, MicroBatch


class LossError(RunError, TypeError):
    """A loss function that returned something else than one loss per token."""


@runtime_checkable
class Objective(Protocol):
    """What an update minimises.

    Where the model has experts, the loss of a micro-batch has its part of their load-balance loss,
    weighted by `coefs["balance_weights"]` if they are given, and its metrics hold the statistics of
    the routers as `router`.
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
    """The loss of a policy's token: `correction * loss + kl_coef * kl - entropy_coef * entropy`.

    Attributes:
        loss: policy loss; asks for fields, returns TokenLoss or an array [B T].
        kl: estimator (logprobs, ref_logprobs) -> [B T], or None.
        entropy: whether there is an entropy bonus.
        corrected: whether the batch holds weights `correction` [B T] of the loss.
        on_policy: whether the policy is the one at the start of the step, as where a step is one
            update. `old_logprobs` are then the log-probs without their gradient, and `policy` in
            the metrics holds the tokens' log-probs and entropies [b T].
    """

    loss: Callable[..., Any]
    kl: Callable[..., Any] | None = None
    entropy: bool = False
    corrected: bool = False
    on_policy: bool = False

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        names = set(asks_for(self.loss)) | (set(asks_for(self.kl)) if self.kl else set())
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
        fields = micro.fields | {"logprobs": logprobs, "entropy": stats.entropy}
        policy_stats = {}
        if self.on_policy:
            fields["old_logprobs"] = jax.lax.stop_gradient(logprobs)
            policy_stats = {"policy": {"logprobs": stats.logprobs, "entropy": stats.entropy}}
        policy = as_token_loss(call(self.loss, fields), self.loss, mask.shape)
        corrected = weights * fields["correction"] if self.corrected else weights
        loss = _total(policy.loss, corrected, mask)
        metrics = {"pg_loss": loss} | _diagnostics(policy, micro)
        if self.kl:
            kl = per_token(call(self.kl, fields), self.kl, "kl", mask.shape)
            metrics["kl_loss"] = _total(kl, weights, mask)
            loss = loss + coefs["kl_coef"] * metrics["kl_loss"]
        if self.entropy:
            metrics["entropy_loss"] = _total(stats.entropy, weights, mask)
            loss = loss - coefs["entropy_coef"] * metrics["entropy_loss"]
        loss, routed = with_balance(loss, router, coefs)
        return loss, metrics | routed | policy_stats | {"loss": loss}


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
        loss = _total(regression.loss, micro.fields["weights"], mask)
        mean = _total(values, micro.fields["token_weights"], mask)
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


def _total(values: Array, weights: Array, mask: Array) -> Float32[Array, ""]:
    return jnp.sum(weights * jnp.where(mask, values, 0.0))


def _diagnostics(loss: TokenLoss, micro: MicroBatch) -> Fields:
    weights, mask = micro.fields["token_weights"], micro.fields["mask"]
    return {name: _total(value, weights, mask) for name, value in loss.diagnostics.items()}


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
