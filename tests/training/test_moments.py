"""AdamW's first moment in bfloat16: the update, its layout, its checkpoint."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import OptimConfig
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.optimizer import make_optimizer
from jaxrl_llm.training.update import Learner, PolicyObjective

SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ff_width=16,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=32,
)
RATE, DECAY, B1, B2, EPS = 0.1, 0.01, 0.9, 0.999, 1e-8


def adamw(params, gradients):
    """Loshchilov & Hutter 2019, algorithm 2, with m kept in bfloat16 between updates."""
    m, v = np.zeros_like(params), np.zeros_like(params)
    for t, g in enumerate(gradients, 1):
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g**2
        step = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
        params = params - RATE * (step + DECAY * params)
        m = m.astype(ml_dtypes.bfloat16).astype(np.float32)
    return params, m, v


def test_the_first_moment_may_be_bfloat16(tmp_path):
    keywords = {"mu_dtype": "bfloat16", "weight_decay": DECAY}
    optimizer_of, _ = make_optimizer(
        OptimConfig(
            optimizer=FunctionSpec("adamw", keywords),
            schedule=FunctionSpec("constant_schedule", {"value": RATE}),
            grad_clip=None,
        )
    )
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    rng = np.random.default_rng(0)

    def drawn():
        shapes = (decl.shape for decl in jax.tree.leaves(declare(SPEC)))
        leaves = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        return jax.tree.unflatten(jax.tree.structure(declare(SPEC)), leaves)

    params = jax.device_put(drawn(), Layout(mesh).of(declare(SPEC)))
    learner = Learner(
        PolicyObjective(loss=lambda logprobs: -logprobs),
        ForwardConfig(model=Decoder(SPEC)),
        optimizer_of(declare(SPEC), params),
        reduce=token_mean,
        shape=RowShape(rows=8, length=8, sequences=8),
        mesh=mesh,
        params_like=params,
    )
    gradients = [drawn() for _ in range(3)]
    state = learner.init(params)
    for gradient in gradients:
        placed = jax.device_put(gradient, learner.state_shardings.params)
        state, _ = learner.apply(state, placed, None)

    moments = state.opt_state[0]
    for before, after, m, v, *g in zip(
        *map(jax.tree.leaves, (params, state.params, moments.mu, moments.nu, *gradients)),
        strict=True,
    ):
        assert (m.dtype, v.dtype) == (jnp.bfloat16, jnp.float32)
        assert m.sharding == v.sharding == after.sharding
        expected = adamw(np.asarray(before), g)
        digit = 2.0**-7  # of bfloat16: m is rounded once more on its way
        np.testing.assert_allclose(after, expected[0], atol=3 * digit * RATE)
        np.testing.assert_allclose(m.astype(jnp.float32), expected[1], atol=digit, rtol=digit)
        np.testing.assert_allclose(v, expected[2], rtol=1e-5)

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = checkpoints.restore(like).state
    checkpoints.close()
    for a, b in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
        assert (a.dtype, a.sharding) == (b.dtype, b.sharding)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
