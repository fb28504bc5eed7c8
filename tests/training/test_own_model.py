"""Models of the user's own: compared with flax alone, in training and in the engine."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import MeshConfig, MeshSizes
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.functional import FunctionalModel
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.nnx import from_module
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import DEFAULT_RULES, Layout
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.load_model import check_axes, make_model, open_layout
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch
from tests.own_models import Cached, Plain, WithHead
from tests.refusals import refuses
from tests.specs import make_batch
from tests.updates import chosen, mesh_of, plain

VOCAB, SIZES = 16, (8, 3, 5, 6)
SHAPE = RowShape(rows=4, length=8, sequences=4)
RULES = {**DEFAULT_RULES, "mine": "tensor"}
EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}


def layout_of(**sizes):
    return Layout(mesh_of(**sizes), rules=RULES)


def made(kind, rngs):
    """Return a module, of one block but where a stack is to be shown."""
    return kind(VOCAB, rngs=rngs) if kind is WithHead else kind(VOCAB, layers=1, rngs=rngs)


def made_by_flax(kind, seed):
    with nnx.use_eager_sharding(False):
        module = made(kind, nnx.Rngs(seed))
    module.eval()
    return module


@pytest.fixture(scope="module")
def cases():
    """The model of each module, made once, so that programs are compiled once."""
    return {
        kind: from_module(lambda rngs, kind=kind: made(kind, rngs))
        for kind in (Plain, Cached, WithHead)
    }


BATCH = make_batch(SIZES, 8, VOCAB)


def params_of(state):
    """Return flax's weights or gradients as nested dicts with texts as keys."""
    tree = {}
    for path, variable in nnx.to_flat_state(state):
        *outer, last = map(str, path)
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = variable[...]
    return tree


@functools.partial(nnx.jit, static_argnums=0)
def by_flax(kind, module):
    """The log-probs of one sequence a row, without packing, and the loss's gradient."""

    def logprobs(module):
        tokens, places = jnp.asarray(BATCH.tokens), jnp.broadcast_to(jnp.arange(8), (4, 8))
        given = module(tokens, places, jnp.ones_like(tokens))
        scores = given @ module.head_matrix() if kind is WithHead else given
        return jnp.pad(chosen(jax.nn.log_softmax(scores)[:, :-1], tokens[:, 1:]), ((0, 0), (1, 0)))

    def loss(module):
        weights = BATCH["mask"] / BATCH["mask"].sum(dtype=np.float32)
        return -jnp.sum(weights * BATCH["advantages"] * logprobs(module))

    return logprobs(module), nnx.value_and_grad(loss)(module)


@pytest.mark.parametrize(
    ("kind", "sizes", "remat"),
    [
        (Plain, {}, "none"),
        (WithHead, EIGHT, "dots"),
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.guards("models/")])
            for case in (
                (Plain, EIGHT, "dots"),
                (WithHead, {"fsdp": 2, "context": 2, "tensor": 2}, "dots"),
            )
        ),
    ],
)
def test_log_probs_and_updates_are_those_of_flax(cases, kind, sizes, remat):
    model, layout, module = cases[kind], layout_of(**sizes), made_by_flax(kind, 3)
    logprobs, (expected, grads) = by_flax(kind, module)
    before = jax.device_put(params_of(nnx.state(module, nnx.Param)), layout.of(model.declare()))
    config = ForwardConfig(model=model, rules=RULES, remat=remat, logprob_chunk=5)
    ours = logprob_pass(config, SHAPE, layout.mesh)(before, BATCH)["logprobs"]
    np.testing.assert_allclose(ours, np.where(BATCH["mask"], logprobs, 0.0), rtol=1e-4, atol=1e-5)
    learner = Learner(
        PolicyObjective(loss=plain),
        config,
        optax.sgd(1.0),
        reduce=token_mean,
        shape=SHAPE,
        mesh=layout.mesh,
        params_like=before,
    )
    state, metrics = learner.update(learner.init(before), BATCH, {})
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, state.params)
    chex.assert_trees_all_close(moved, params_of(grads), rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)
    assert optax.tree.norm(moved) > 0.01


def sampled(model, params, layout):
    requests = [
        Request((1 + i,) * (1 + 3 * (i % 2)), SamplingParams(6, temperature=float(i > 3)), seed=i)
        for i in range(8)
    ]
    engine = NativeEngine(model, EngineSettings(8, 16), layout=layout, steps=4)
    try:
        engine.load(params, version=0)
        return requests, engine.sample(requests)
    finally:
        engine.close()


def test_a_cache_and_recomputation_sample_the_same(cases):
    layout = layout_of()
    params = cases[Cached].init_params(jax.random.key(0))
    requests, cached = sampled(cases[Cached], params, layout)
    _, computed = sampled(cases[Plain], params, layout)
    tokens, lengths = np.zeros((8, 16), np.int32), []
    for row, request, one, other in zip(tokens, requests, cached, computed, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        whole = (*request.prompt, *one.tokens)
        row[: len(whole)] = whole
        lengths.append(len(whole))
    infer = logprob_pass(
        ForwardConfig(model=cases[Plain], rules=RULES), RowShape(8, 16, 8), mesh_of()
    )
    trained = infer(params, Batch(tokens, np.array(lengths, np.int32), {}))["logprobs"]
    for i, (request, one) in enumerate(zip(requests, cached, strict=True)):
        start = len(request.prompt)
        if request.sampling.temperature:
            np.testing.assert_allclose(one.logprobs, trained[i, start : start + 6], atol=1e-5)


def test_an_own_axis_is_split_as_its_rule_says(cases):
    declared = cases[Plain].declare()
    layout = layout_of(tensor=2)
    home = layout.of(declared)["blocks"]["0"]["qkv"]["kernel"]
    assert home.spec == jax.P(None, "tensor")
    assert declared["blocks"]["0"]["norms"]["0"]["scale"].axes == ("_0",)
    with pytest.raises(ConfigError, match="axis"):
        check_axes(cases[Plain], Layout(layout.mesh))
    wrong = MeshConfig(rules={"mine": None, "mien": "tensor"}, train=MeshSizes(devices=1))
    layout = open_layout(wrong, "train", wrong.train, has_own_axes=True)
    with refuses("mesh.rules.mien"):
        check_axes(cases[Plain], layout)


class WithArray(nnx.Module):
    def __init__(self, rngs):
        self.table = jnp.ones((4, 4))


class HalfACache(Plain):
    def extend(self, cache, tokens, positions):
        raise NotImplementedError


class Headless(Model):
    """A model that says what it reads, and nothing else."""

    vocab_size = 3


def test_what_is_no_model_is_refused():
    for make, named in (
        (WithArray, "table"),
        (lambda rngs: HalfACache(4, rngs=rngs), "init_cache"),
        (lambda rngs: 3, "int"),
        (lambda: 3, "int"),
        (Headless, "compute_dtypes"),
    ):
        with pytest.raises(ConfigError, match=named) as caught:
            make_model(FunctionSpec.of(make), "unused", seed=0)
        assert caught.value.keys == ("model.function",)
    model = FunctionalModel(
        init=lambda key: {"table": jnp.zeros((4, 3)), "head": jnp.zeros((2, 4))},  # of other widths
        apply=lambda params, tokens, positions, segment_ids: params["table"][tokens],
        head=lambda params: params["head"],
    )
    with pytest.raises(ValueError, match="head"):
        _ = model.vocab_size
