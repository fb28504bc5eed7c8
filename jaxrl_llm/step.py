"""The jitted steps: log-probs of a batch, and updates by accumulated gradients.

A mini-batch is cut into micro-batches of packed rows. The reduction's weights are computed over
the whole mini-batch first, so a micro-batch adds `sum(weights * loss)` and the sum over them is
exactly the mini-batch's loss, however it is cut.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jaxrl_llm.algorithms.logprobs import TokenStats, token_stats
from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import RowShape, pack_rows, plan, unpack
from jaxrl_llm.dataflow import asks_for, call, describe
from jaxrl_llm.functions import RunError
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import forward, head_matrix
from jaxrl_llm.sharding.mesh import over_batch, replicated
from jaxrl_llm.types import Batch, Rows

Params = Any
Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """How the model is run in training: everything static about a forward pass."""

    spec: ModelSpec
    dtype: str = "float32"
    remat: bool = False
    logprob_chunk: int = 1024
    temperature: float = 1.0


class TrainState(NamedTuple):
    """What an update changes.

    Attributes:
        params: float32 master weights.
        opt_state: the optimizer's.
        updates: updates that were applied.
        skipped: updates in a row that were skipped because the gradient was not finite.
    """

    params: Params
    opt_state: Any
    updates: jax.Array
    skipped: jax.Array


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of a token: `loss + kl_coef * kl - entropy_coef * entropy`.

    Attributes:
        loss: policy loss; asks for fields, returns TokenLoss or an array [B T].
        kl: estimator (logprobs, ref_logprobs) -> [B T], or None.
        entropy: whether there is an entropy bonus.
    """

    loss: Callable[..., Any]
    kl: Callable[..., Any] | None = None
    entropy: bool = False

    def asks_for(self) -> set[str]:
        """Return the fields that the batch must hold."""
        names = set(asks_for(self.loss)) | (set(asks_for(self.kl)) if self.kl else set())
        return names - {"logprobs", "entropy"}


class TrainingError(RunError):
    """A run that must not go on."""


class LossError(RunError, TypeError):
    """A loss function that returned something else than one loss per token."""


class MicroBatch(NamedTuple):
    """One micro-batch: packed rows for the model, [b T] fields for the algorithm."""

    rows: Rows
    fields: Fields


def token_fields(params: Params, rows: Rows, model: Forward, mesh: Mesh) -> TokenStats:
    """Run the model over packed rows and gather its per-token results back to [b T].

    Entry (i, t) belongs to token t of sequence i given the tokens before it; entry (i, 0) is 0.
    Activations stay where the rows are, so it is the weights that are gathered.
    """
    hidden = forward(
        params,
        model.spec,
        jnp.asarray(rows.tokens),
        jnp.asarray(rows.positions),
        jnp.asarray(rows.segment_ids),
        dtype=jnp.dtype(model.dtype),
        remat=model.remat,
        activation_sharding=over_batch(mesh),
    )
    targets = jnp.roll(jnp.asarray(rows.tokens), -1, axis=1)
    stats = token_stats(
        hidden.reshape(-1, hidden.shape[-1]),
        head_matrix(params, model.spec),
        targets.reshape(-1),
        temperature=model.temperature,
        chunk=model.logprob_chunk,
    )

    def to_sequences(packed: Float[Array, " X"]) -> Float[Array, "b T"]:
        shifted = unpack(
            packed.reshape(targets.shape), *map(jnp.asarray, (rows.row, rows.start, rows.size))
        )
        inside = jnp.arange(shifted.shape[1]) < jnp.asarray(rows.size)[:, None]
        return jnp.where(inside, jnp.roll(shifted, 1, axis=1).at[:, 0].set(0.0), 0.0)

    return jax.tree.map(to_sequences, stats)


def microbatches(
    batch: Batch, names: set[str], shape: RowShape, mesh: Mesh
) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """Cut a batch into micro-batches on the devices, each with the indices of its sequences.

    Raises:
        ValueError: a batch wider than a row.
    """
    if batch.tokens.shape[1] > shape.length:
        raise ValueError(
            f"a batch of {batch.tokens.shape[1]} columns, wanted at most a row's {shape.length}"
        )
    sharding = over_batch(mesh)
    for members in plan(batch.sizes, shape):
        indices = np.array([i for row in members for i in row])
        rows = pack_rows(batch.tokens, batch.sizes, members, shape)
        fields = {name: _pad(batch[name][indices], shape) for name in names}
        yield indices, jax.device_put(MicroBatch(rows, fields), sharding)


def _pad(values: np.ndarray, shape: RowShape) -> np.ndarray:
    widths = [(0, shape.sequences - len(values))]
    if values.ndim > 1:
        widths.append((0, shape.length - values.shape[1]))
    return np.pad(values, widths)


def logprob_pass(
    model: Forward, shape: RowShape, mesh: Mesh
) -> Callable[[Params, Batch], dict[str, np.ndarray]]:
    """Return a function from parameters and a batch to its `logprobs` and `entropy` [B T]."""

    @jax.jit
    def run(params: Params, rows: Rows) -> tuple[Array, Array]:
        stats = token_fields(params, rows, model, mesh)
        return stats.logprobs, stats.entropy

    def logprobs(params: Params, batch: Batch) -> dict[str, np.ndarray]:
        found = {n: np.zeros(batch.tokens.shape, np.float32) for n in ("logprobs", "entropy")}
        pending = [
            (indices, run(params, micro.rows))
            for indices, micro in microbatches(batch, set(), shape, mesh)
        ]
        for indices, values in pending:
            for name, value in zip(found, jax.device_get(values), strict=True):
                found[name][indices] = value[: len(indices), : batch.tokens.shape[1]]
        return found

    return logprobs


class Learner(NamedTuple):
    """The jitted halves of an update, and how to start.

    Attributes:
        init: params -> TrainState.
        update: (state, batch, coefficients) -> (state, metrics). Donates the state.
        state_shardings: the layout of a TrainState.
    """

    init: Callable[[Params], TrainState]
    update: Callable[[TrainState, Batch, dict[str, float]], tuple[TrainState, dict[str, Any]]]
    state_shardings: TrainState


def make_learner(
    objective: Objective,
    model: Forward,
    optimizer: optax.GradientTransformation,
    *,
    reduce: Callable[..., Any],
    shape: RowShape,
    mesh: Mesh,
    params_like: Any,
) -> Learner:
    """Build the update for one objective.

    Args:
        objective: the loss of a token.
        model: how the model is run.
        optimizer: with gradient clipping and learning rate already in it.
        reduce: mask [B T] -> weights [B T], over a whole mini-batch.
        shape: of the micro-batches.
        mesh: the devices.
        params_like: shape, dtype and sharding of each parameter; gradients and moments follow it.
    """
    names = objective.asks_for() | {"mask", "weights", "token_weights"}
    param_shardings = jax.tree.map(lambda like: like.sharding, params_like)
    state_shardings = _state_shardings(optimizer, params_like, mesh)
    everywhere = replicated(mesh)

    @functools.partial(jax.jit, out_shardings=state_shardings)
    def init(params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        return TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params), zero, zero)

    @functools.partial(jax.jit, out_shardings=(param_shardings, everywhere))
    def differentiate(params: Params, micro: MicroBatch, coefs: Fields) -> tuple[Params, Fields]:
        return jax.grad(_scalar_loss, has_aux=True)(params, micro, coefs, objective, model, mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(param_shardings, everywhere))
    def add(total: tuple[Params, Fields], part: tuple[Params, Fields]) -> tuple[Params, Fields]:
        return jax.tree.map(jnp.add, total, part)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(state_shardings, everywhere))
    def apply(state: TrainState, grads: Params) -> tuple[TrainState, Fields]:
        return apply_gradients(state, grads, optimizer)

    @jax.jit
    def weigh(mask: Array) -> tuple[Array, Array]:
        return reduce(mask), token_mean(mask)

    def update(
        state: TrainState, batch: Batch, coefs: dict[str, float]
    ) -> tuple[TrainState, dict[str, Any]]:
        weights, token_weights = weigh(batch["mask"])
        batch = batch.add(weights=np.asarray(weights), token_weights=np.asarray(token_weights))
        total = None
        for _, micro in microbatches(batch, names, shape, mesh):
            part = differentiate(state.params, micro, coefs)
            total = part if total is None else add(total, part)
        assert total is not None, "a mini-batch holds at least one sequence"
        grads, metrics = total
        state, applied = apply(state, grads)
        return state, metrics | applied

    return Learner(init, update, state_shardings)


def _scalar_loss(
    params: Params,
    micro: MicroBatch,
    coefs: Fields,
    objective: Objective,
    model: Forward,
    mesh: Mesh,
) -> tuple[Float32[Array, ""], Fields]:
    stats = token_fields(params, micro.rows, model, mesh)
    mask, weights = micro.fields["mask"], micro.fields["weights"]

    def total(values: Array, by: Array) -> Array:
        return jnp.sum(by * jnp.where(mask, values, 0.0))

    fields = micro.fields | {
        "logprobs": jnp.where(mask, stats.logprobs, 0.0),
        "entropy": stats.entropy,
    }
    policy = as_token_loss(call(objective.loss, fields), objective.loss, mask.shape)
    loss = total(policy.loss, weights)
    metrics = {"pg_loss": loss}
    metrics |= {
        name: total(value, micro.fields["token_weights"])
        for name, value in policy.diagnostics.items()
    }
    if objective.kl:
        metrics["kl_loss"] = total(call(objective.kl, fields), weights)
        loss = loss + coefs["kl_coef"] * metrics["kl_loss"]
    if objective.entropy:
        metrics["entropy_loss"] = total(stats.entropy, weights)
        loss = loss - coefs["entropy_coef"] * metrics["entropy_loss"]
    return loss, metrics | {"loss": loss}


def as_token_loss(result: Any, function: Callable[..., Any], shape: tuple[int, ...]) -> TokenLoss:
    """Check what a loss function returned: TokenLoss, or an array [B T] without diagnostics.

    Raises:
        LossError: for anything else, and for a wrong shape or dtype.
    """
    found = result if isinstance(result, TokenLoss) else TokenLoss(result, {})
    for name, value in {"loss": found.loss, **found.diagnostics}.items():
        got = f"{type(value).__name__}"
        if isinstance(value, jax.Array):
            got = f"{value.dtype}{list(value.shape)}"
            if value.shape == shape and jnp.issubdtype(value.dtype, jnp.floating):
                continue
        raise LossError(
            f"loss {describe(function)!r} returned {got} as {name!r}; "
            f"wanted a floating-point array [B T], here {list(shape)}: one loss per token"
        )
    return found


def apply_gradients(
    state: TrainState, grads: Params, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Fields]:
    """Apply an update, or skip it where the gradient is not finite."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))

    def move(state: TrainState) -> TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.updates + 1, jnp.zeros_like(state.skipped))

    def skip(state: TrainState) -> TrainState:
        return state._replace(skipped=state.skipped + 1)

    # a branch updates in place; choosing between whole trees would hold both
    state = jax.lax.cond(jnp.isfinite(norm), move, skip, state)
    return state, {"grad_norm": norm, "skipped": state.skipped}


def check_skipped(skipped: int, limit: int) -> None:
    """Raise TrainingError when more than `limit` updates in a row were skipped."""
    if skipped > limit:
        raise TrainingError(
            f"{skipped} updates in a row had a gradient that is not finite "
            f"(optim.max_skipped={limit}); the last checkpoint is untouched. "
            "Look at the loss's inputs, lower the learning rate, or compute in float32"
        )


def _state_shardings(
    optimizer: optax.GradientTransformation, params_like: Any, mesh: Mesh
) -> TrainState:
    scalar: Any = replicated(mesh)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, like: like.sharding,
        jax.eval_shape(optimizer.init, params_like),
        params_like,
        transform_non_params=lambda _: scalar,
    )
    return TrainState(
        jax.tree.map(lambda like: like.sharding, params_like), opt_state, scalar, scalar
    )
