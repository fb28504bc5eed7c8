"""Updates of small models that keep their gradient, and comparisons of such."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import make_mesh, shardings
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.update import Learner
from jaxrl_llm.types import Batch
from tests.decoders import forward, logits

KEEP_GRADIENT = optax.chain(optax.trace(decay=0.0), optax.sgd(0.5))
"""Its state is the gradient, by which parameters move half."""


def mesh_of(**axes: int) -> Any:
    """Return a mesh of as many devices as its axes need; one device, if there are none."""
    return make_mesh(axes or {"fsdp": 1}, jax.devices()[: math.prod(axes.values())])


def place(params: Any, spec: ModelSpec, mesh: Any) -> Any:
    """Lay parameters out as training does."""
    return jax.device_put(params, shardings(declare(spec), mesh))


def learn(
    spec: ModelSpec,
    params: Any,
    objective: Any,
    shape: RowShape,
    *,
    mesh: Any = None,
    reduce: Any = token_mean,
    optimizer: Any = KEEP_GRADIENT,
    **settings: Any,
) -> Learner:
    """Return the updates of a model.

    Args:
        spec: the model.
        params: its parameters, placed on the mesh.
        objective: what is minimised.
        shape: of a micro-batch's rows.
        mesh: one device, if None.
        reduce: weights of tokens.
        optimizer: one that keeps the gradient, unless another is given.
        settings: further ones of ForwardConfig.
    """
    return Learner(
        objective,
        ForwardConfig(model=Decoder(spec), **settings),
        optimizer,
        reduce=reduce,
        shape=shape,
        mesh=mesh or mesh_of(),
        params_like=params,
    )


def updated(learner: Learner, params: Any, batch: Batch, coefs: Any = None) -> Any:
    """Return gradient, metrics and new parameters, on the host."""
    state, metrics = learner.update(learner.init(params), batch, coefs or {})
    return jax.device_get((state.opt_state[0].trace, metrics, state.params))


def assert_same(tree: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compare gradients.

    Args:
        tree: of arrays.
        expected: of arrays, one of which has numbers that are not tiny.
        rtol: relative tolerance.
        atol: as a share of the largest number of all arrays.
    """
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert scale > 1e-3, "the comparison needs a gradient that is not tiny"
    for one, other in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol * scale)


def by_rows(spec: ModelSpec, params: Any, batch: Batch) -> Any:
    """Return log π of all tokens [B T V] by a pass over one sequence a row, without packing.

    Entry t of a row is the distribution of token t, given those before it.
    """
    count, length = batch.tokens.shape
    real = np.arange(length) < batch.sequence_lengths[:, None]
    positions = np.broadcast_to(np.arange(length), (count, length))
    rows = (jnp.asarray(x) for x in (batch.tokens, positions, real.astype(np.int32)))
    scores = logits(params, spec, forward(params, spec, *rows))
    return jnp.roll(jax.nn.log_softmax(scores), 1, axis=1)


def chosen(logprobs: Any, tokens: Any) -> Any:
    """Return the log-probs [B T] of a batch's tokens."""
    return jnp.take_along_axis(logprobs, jnp.asarray(tokens)[..., None], axis=-1)[..., 0]


def plain(logprobs: Any, advantages: Any) -> Any:
    """The policy gradient's loss."""
    return -logprobs * advantages
