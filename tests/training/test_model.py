"""Nothing is assumed of a model but `Model`: one without attention is trained and sampled."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.arrays import NORMAL, ArrayDecl
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.model import Model
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass, value_pass
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch

SIZES = np.array([8, 3, 5, 6], np.int32)
SHAPE = RowShape(rows=2, length=8, sequences=4)


@dataclasses.dataclass(frozen=True)
class Perceptron(Model):
    """A layer over the newest token's embedding: it sees no other token, and keeps nothing."""

    vocab_size: int = 11
    width: int = 6
    max_positions: int | None = None
    logit_softcap: float | None = None
    has_router: bool = False

    def declare(self):
        def array(name, axes, *shape):
            first, second = axes
            return ArrayDecl(
                shape=shape,
                axes=axes,
                initializer=NORMAL,
                hf_name=name,
                hf_axes=((second,), (first,)),
            )

        return {
            "table": array("table", ("vocab", "embed"), self.vocab_size, self.width),
            "body": {"mlp": array("mlp", ("embed", "ff"), self.width, self.width)},
            "out": array("out", ("embed", "vocab"), self.width, self.vocab_size),
            "value": array("value", ("embed", "label"), self.width, 1),
        }

    def init_params(self, key):
        return jax.tree.map(lambda d: d.initializer(key, d.shape, jnp.float32), self.declare())

    def compute_dtypes(self, dtype):
        return jax.tree.map(lambda _: jnp.dtype(dtype), self.declare())

    def hidden_states(self, params, tokens, positions, segment_ids, *, dtype, remat, layout):
        del positions, segment_ids, remat
        x = params["table"][tokens].astype(dtype)
        x = x + jnp.tanh(x @ params["body"]["mlp"].astype(dtype))
        return (layout.constrain(x) if layout else x), {}

    def head_matrix(self, params, layout=None):
        del layout
        return params["out"]

    def logits(self, params, hidden):
        return (hidden @ params["out"]).astype(jnp.float32)

    def token_values(self, params, hidden):
        return (hidden @ params["value"])[..., 0].astype(jnp.float32)

    def sequence_scores(self, params, hidden, row, start, size):
        raise KeyError("score")

    def init_cache(self, batch, length, *, dtype, kv_cache_dtype):
        nothing = jnp.zeros((batch, 1, 0, length), dtype)
        return Cache((nothing,), (nothing.swapaxes(2, 3),))

    def extend(self, params, cache, tokens, positions, *, dtype, layout):
        rest: Any = {"dtype": dtype, "remat": "none", "layout": layout}
        return self.hidden_states(params, tokens, positions, tokens, **rest)[0], cache


MODEL: Model = Perceptron()


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda d: jnp.asarray(rng.normal(size=d.shape), jnp.float32), MODEL.declare()
    )


@pytest.fixture(scope="module")
def batch():
    rng, place = np.random.default_rng(1), np.arange(8)
    fields = {
        "mask": (place >= 2) & (place < SIZES[:, None]),
        "advantages": rng.normal(size=(4, 8)).astype(np.float32),
    }
    return Batch(rng.integers(0, 11, (4, 8)).astype(np.int32), SIZES, fields)


@pytest.fixture(params=[{}, {"fsdp": 2, "tensor": 2}], ids=["one", "four"])
def layout(request):
    return Layout(make_mesh(request.param, jax.devices()[: 4 if request.param else 1]))


def hidden_alone(params, tokens):
    """The states of unpacked sequences, by the model's equation."""
    x = params["table"][tokens]
    return x + jnp.tanh(x @ params["body"]["mlp"])


def logprobs_alone(params, tokens):
    scores = jax.nn.log_softmax(hidden_alone(params, tokens) @ params["out"])
    chosen = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def reinforce(logprobs, advantages):
    return TokenLoss(-logprobs * advantages, {})


def test_an_update_follows_the_direct_gradient(params, batch, layout):
    homes = layout.of(MODEL.declare())
    params = jax.device_put(params, homes)
    learner = Learner(
        PolicyObjective(loss=reinforce),
        ForwardConfig(model=MODEL),
        optax.sgd(1.0),
        reduce=token_mean,
        shape=SHAPE,
        mesh=layout.mesh,
        params_like=params,
    )
    state, metrics = learner.update(learner.init(params), batch, {})

    def loss(params):
        weights = batch["mask"] / batch["mask"].sum(dtype=np.float32)
        return -jnp.sum(weights * batch["advantages"] * logprobs_alone(params, batch.tokens))

    expected, grads = jax.value_and_grad(loss)(params)
    moved = jax.tree.map(jnp.subtract, params, state.params)
    chex.assert_trees_all_close(moved, grads, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert optax.tree.norm(grads["body"]) > 0.01


def test_values_are_read_by_the_models_own_head(params, batch):
    mesh = make_mesh({}, jax.devices()[:1])
    values = value_pass(ForwardConfig(model=MODEL), SHAPE, mesh)(params, batch)["values"]
    expected = (hidden_alone(params, batch.tokens) @ params["value"])[:, :-1, 0]
    inside = np.arange(1, 8) < SIZES[:, None]
    np.testing.assert_allclose(values[:, 1:][inside], expected[inside], rtol=1e-5)


def test_an_engine_refuses_float8_where_there_is_none(layout):
    with pytest.raises(ValueError, match="expected a model with matrices in float8"):
        NativeEngine(MODEL, EngineSettings(8, 16, quantization="fp8"), layout=layout)


def test_the_engine_samples_it_and_the_trainer_says_the_same(params, layout):
    engine = NativeEngine(MODEL, EngineSettings(8, 16), layout=layout, steps=4)
    requests = [
        Request((1 + i,) * (1 + 3 * (i % 2)), SamplingParams(6, temperature=float(i > 3)), seed=i)
        for i in range(8)
    ]
    try:
        engine.load(params, version=0)
        answers = engine.sample(requests)
    finally:
        engine.close()
    tokens, sizes = np.zeros((8, 16), np.int32), np.zeros(8, np.int32)
    for row, request, answer in zip(tokens, requests, answers, strict=True):
        whole = (*request.prompt, *answer.tokens)
        row[: len(whole)] = whole
    sizes[:] = [len(r.prompt) + len(a.tokens) for r, a in zip(requests, answers, strict=True)]
    shape, mesh = RowShape(rows=8, length=16, sequences=8), make_mesh({}, jax.devices()[:1])
    trained = logprob_pass(ForwardConfig(model=MODEL), shape, mesh)
    logprobs = trained(params, Batch(tokens, sizes, {}))["logprobs"]
    following = np.asarray(jnp.argmax(hidden_alone(params, np.arange(11)) @ params["out"], axis=1))
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        assert len(answer.tokens) == 6
        start = len(request.prompt)
        if i > 3:
            np.testing.assert_allclose(answer.logprobs, logprobs[i, start : start + 6], atol=1e-5)
        else:
            before = tokens[i, start - 1 : start + 5]
            np.testing.assert_array_equal(answer.tokens, following[before])
