"""What an update minimises: a loss per token, summed with the weights of a reduction.

An objective runs a model over packed rows, calls a loss function with the fields that it asks for,
and returns the part of a micro-batch in the mini-batch's loss.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jaxrl_llm.algorithms.logprobs import TokenStats, token_stats
from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.config.errors import RunError
from jaxrl_llm.config.fields import asks_for, call, describe
from jaxrl_llm.data.packing import unpack
from jaxrl_llm.models.heads import head_matrix, token_values
from jaxrl_llm.models.kernels import Kernel
from jaxrl_llm.models.moe.balance import RouterStats
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import forward_with_router
from jaxrl_llm.sharding.layout import TOKENS, Layout
from jaxrl_llm.types import Rows

Params = Any
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """How the model is run in training: everything static about a forward pass.

    `router_loss_coef` is that of the experts' load-balance loss, `router_bias_rate` how far an
    update moves the bias of sigmoid routers, `context` how attention sees rows that devices share
    (`sharding.layout.Layout`), and `kernel` what computes it (`models.kernels.choose`; None: XLA).
    """

    spec: ModelSpec
    dtype: str = "float32"
    remat: str = "none"
    logprob_chunk: int = 1024
    temperature: float = 1.0
    router_loss_coef: float = 0.0
    router_bias_rate: float = 0.001
    context: str = "heads"
    kernel: Kernel | None = None


class MicroBatch(NamedTuple):
    """One micro-batch: packed rows for the model, [b T] fields for the algorithm."""

    rows: Rows
    fields: Fields


class LossError(RunError, TypeError):
    """A loss function that returned something else than one loss per token."""


def token_fields(params: Params, rows: Rows, model: Forward, mesh: Mesh) -> TokenStats:
    """Run the model over packed rows and gather its per-token results back to [b T].

    Entry (i, t) belongs to token t of sequence i given the tokens before it; entry (i, 0) is 0.
    Activations stay where the rows are, so it is the weights that are gathered.
    """
    return _token_stats(params, hidden_states(params, rows, model, mesh)[0], rows, model, mesh)


def _token_stats(
    params: Params, hidden: Float[Array, "P l D"], rows: Rows, model: Forward, mesh: Mesh
) -> TokenStats:
    """Score the rows' tokens, each device its own: the head's gradient is added up over the devices
    once, not once a chunk. Where stages hold the layers, they share the scoring too."""
    layout = Layout(mesh, model.context)
    targets = jnp.roll(jnp.asarray(rows.tokens), -1, axis=1)
    axes = TOKENS if targets.size % (layout.shards * layout.stages) else (*TOKENS, "stage")
    shards = math.prod(mesh.shape[axis] for axis in axes)

    def own(x: Array) -> Array:
        parts = x.reshape(shards, -1, *x.shape[2:])
        return jax.lax.with_sharding_constraint(parts, layout.sharding(axes))

    score = functools.partial(
        token_stats,
        temperature=model.temperature,
        softcap=model.spec.logit_softcap,
        chunk=max(model.logprob_chunk // shards, 1),
    )
    stats = jax.vmap(score, in_axes=(0, None, 0), spmd_axis_name=axes)(
        own(hidden), head_matrix(params, model.spec, layout), own(targets)
    )
    return jax.tree.map(lambda x: _to_sequences(x.reshape(targets.shape), rows), stats)


def value_fields(params: Params, rows: Rows, model: Forward, mesh: Mesh) -> Float32[Array, "b T"]:
    """Run a model with a value head over packed rows and gather its values back to [b T].

    Entry (i, t) is the value of the state before token t of sequence i; entry (i, 0) is 0.
    """
    return _values(params, hidden_states(params, rows, model, mesh)[0], rows)


def router_totals(params: Params, rows: Rows, model: Forward, mesh: Mesh) -> RouterStats:
    """Run a model with experts over packed rows and sum up what its routers did."""
    router = hidden_states(params, rows, model, mesh)[1]
    assert router is not None, "the model has experts"
    return router


def hidden_states(
    params: Params, rows: Rows, model: Forward, mesh: Mesh
) -> tuple[Float[Array, "P l D"], RouterStats | None]:
    """Return the hidden states of the rows, in pieces where devices share a row."""
    layout = Layout(mesh, model.context, kernel=model.kernel)
    tokens, positions, segments = (
        layout.cut(jnp.asarray(x)) for x in (rows.tokens, rows.positions, rows.segment_ids)
    )
    hidden, router = forward_with_router(
        params,
        model.spec,
        tokens,
        positions,
        segments,
        dtype=jnp.dtype(model.dtype),
        remat=model.remat,
        layout=layout,
    )
    return hidden, RouterStats(**router) if router else None


def _values(params: Params, hidden: Float[Array, "P l D"], rows: Rows) -> Float32[Array, "b T"]:
    values = token_values(params, hidden)
    return _to_sequences(values.reshape(jnp.shape(rows.tokens)), rows)


def _to_sequences(packed: Float[Array, "R L"], rows: Rows) -> Float[Array, "b T"]:
    """Gather what the model says at each token as what it says of the next one."""
    shifted = unpack(packed, *map(jnp.asarray, (rows.row, rows.start, rows.size)))
    inside = jnp.arange(shifted.shape[1]) < jnp.asarray(rows.size)[:, None]
    return jnp.where(inside, jnp.roll(shifted, 1, axis=1).at[:, 0].set(0.0), 0.0)


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
        self, params: Params, micro: MicroBatch, coefs: Fields, model: Forward, mesh: Mesh
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
        self, params: Params, micro: MicroBatch, coefs: Fields, model: Forward, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        stats = _token_stats(params, hidden, micro.rows, model, mesh)
        mask, weights = micro.fields["mask"], micro.fields["weights"]
        logprobs = jnp.where(mask, stats.logprobs, 0.0)
        fields = micro.fields | {"logprobs": logprobs, "entropy": stats.entropy}
        said = {}
        if self.on_policy:
            fields["old_logprobs"] = jax.lax.stop_gradient(logprobs)
            said = {"policy": {"logprobs": stats.logprobs, "entropy": stats.entropy}}
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
        loss, routed = _balanced(loss, router, coefs)
        return loss, metrics | routed | said | {"loss": loss}


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """The loss of a critic's value: asks for `values`, and what else the batch holds."""

    loss: Callable[..., Any]

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        return set(asks_for(self.loss)) - {"values"}

    def __call__(
        self, params: Params, micro: MicroBatch, coefs: Fields, model: Forward, mesh: Mesh
    ) -> tuple[Float32[Array, ""], Fields]:
        """Return a micro-batch's part of the loss, and its parts of the metrics."""
        mask = micro.fields["mask"]
        hidden, router = hidden_states(params, micro.rows, model, mesh)
        values = jnp.where(mask, _values(params, hidden, micro.rows), 0.0)
        found = call(self.loss, micro.fields | {"values": values})
        regression = as_token_loss(found, self.loss, mask.shape)
        loss = _total(regression.loss, micro.fields["weights"], mask)
        mean = _total(values, micro.fields["token_weights"], mask)
        metrics = {"vf_loss": loss, "vpred_mean": mean} | _diagnostics(regression, micro)
        loss, routed = _balanced(loss, router, coefs)
        return loss, metrics | routed


def _balanced(
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


def _diagnostics(found: TokenLoss, micro: MicroBatch) -> Fields:
    weights, mask = micro.fields["token_weights"], micro.fields["mask"]
    return {name: _total(value, weights, mask) for name, value in found.diagnostics.items()}


def as_token_loss(result: Any, function: Callable[..., Any], shape: tuple[int, ...]) -> TokenLoss:
    """Check what a loss function returned: TokenLoss, or an array [B T] without diagnostics.

    Raises:
        LossError: for anything else, and for a wrong shape or dtype.
    """
    found = result if isinstance(result, TokenLoss) else TokenLoss(result, {})
    for name, value in {"loss": found.loss, **found.diagnostics}.items():
        per_token(value, function, "loss", shape, part=f" as {name!r}")
    return found


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
        f"{kind} {describe(function)!r} returned {got}{part}; wanted a floating-point array [B T], "
        f"here {list(shape)}: one {ONE_OF.get(kind, 'number')} per token"
    )


ONE_OF = {"loss": "loss", "reduce": "weight"}
