"""Models of the user's own: compared with flax alone, in training and in the engine."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import MeshConfig, MeshSizes
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.attention import segment_mask
from jaxrl_llm.models.functional import FunctionalModel
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.nnx import from_module
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import DEFAULT_RULES, Layout, make_mesh
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.load_model import check_axes, make_model, open_layout
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch
from tests.own_models import Cached, Plain, WithHead

VOCAB, SIZES = 16, np.array([8, 3, 5, 6], np.int32)
SHAPE = RowShape(rows=4, length=8, sequences=4)
RULES = {**DEFAULT_RULES, "mine": "tensor"}
MESHES = {
    "one device": {},
    "eight": {"data": 2, "fsdp": 2, "tensor": 2},
    "eight, two share a row": {"fsdp": 2, "context": 2, "tensor": 2},
}


@pytest.fixture(params=MESHES)
def layout(request):
    sizes = MESHES[request.param]
    mesh = make_mesh(sizes, jax.devices()[: 8 if sizes else 1])
    return Layout(mesh, rules=RULES)


def made_by_flax(kind, seed):
    with nnx.use_eager_sharding(False):
        module = kind(VOCAB, rngs=nnx.Rngs(seed))
    module.eval()
    return module


@pytest.fixture(scope="module", params=[Plain, WithHead])
def by_flax(request):
    """A module that flax alone has made."""
    return made_by_flax(request.param, 3)


@pytest.fixture(scope="module")
def cases():
    """The model of each module, made once, so that programs are compiled once."""
    return {kind: from_module(lambda rngs, kind=kind: kind(VOCAB, rngs=rngs)) for kind in KINDS}


KINDS = (Plain, Cached, WithHead)


@pytest.fixture(scope="module")
def batch():
    rng, place = np.random.default_rng(1), np.arange(8)
    fields = {
        "mask": (place >= 2) & (place < SIZES[:, None]),
        "advantages": rng.normal(size=(4, 8)).astype(np.float32),
    }
    return Batch(rng.integers(0, VOCAB, (4, 8)).astype(np.int32), SIZES, fields)


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


def logprobs_by_flax(module, batch):
    """Run each sequence alone, without packing."""
    rows = []
    for tokens, size in zip(batch.tokens, batch.sequence_lengths, strict=True):
        one = jnp.asarray(tokens[None, :size])
        given = module(one, jnp.arange(size)[None], jnp.ones_like(one))[0]
        scores = given @ module.head_matrix() if hasattr(module, "head_matrix") else given
        chosen = jax.nn.log_softmax(scores)[jnp.arange(size - 1), one[0, 1:]]
        rows.append(jnp.pad(chosen, (1, 8 - size)))
    return jnp.stack(rows)


def reinforce(logprobs, advantages):
    return TokenLoss(-logprobs * advantages, {})


def test_log_probs_are_those_of_flax(by_flax, cases, batch, layout):
    model = cases[type(by_flax)]
    config = ForwardConfig(model=model, rules=RULES, logprob_chunk=5)
    weights = params_of(nnx.state(by_flax, nnx.Param))
    params = jax.device_put(weights, layout.of(model.declare()))
    ours = logprob_pass(config, SHAPE, layout.mesh)(params, batch)["logprobs"]
    expected = np.where(batch["mask"], logprobs_by_flax(by_flax, batch), 0.0)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_an_update_is_the_gradient_of_flax(by_flax, cases, batch, layout, remat):
    model = cases[type(by_flax)]
    weights = params_of(nnx.state(by_flax, nnx.Param))
    before = jax.device_put(weights, layout.of(model.declare()))
    learner = Learner(
        PolicyObjective(loss=reinforce),
        ForwardConfig(model=model, rules=RULES, remat=remat),
        optax.sgd(1.0),
        reduce=token_mean,
        shape=SHAPE,
        mesh=layout.mesh,
        params_like=before,
    )
    state, metrics = learner.update(learner.init(before), batch, {})

    def loss(module):
        weights = batch["mask"] / batch["mask"].sum(dtype=np.float32)
        return -jnp.sum(weights * batch["advantages"] * logprobs_by_flax(module, batch))

    expected, grads = nnx.value_and_grad(loss)(by_flax)
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


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one", "eight"])
def test_a_cache_and_recomputation_sample_the_same(cases, mesh):
    devices = jax.devices()[: 8 if mesh else 1]
    layout = Layout(make_mesh(mesh, devices), rules=RULES)
    params = cases[Cached].init_params(jax.random.key(0))
    requests, cached = sampled(cases[Cached], params, layout)
    _, computed = sampled(cases[Plain], params, layout)
    tokens, sizes = np.zeros((8, 16), np.int32), []
    for row, request, one, other in zip(tokens, requests, cached, computed, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        whole = (*request.prompt, *one.tokens)
        row[: len(whole)] = whole
        sizes.append(len(whole))
    trained = logprob_pass(
        ForwardConfig(model=cases[Plain], rules=RULES),
        RowShape(8, 16, 8),
        make_mesh({}, devices[:1]),
    )(params, Batch(tokens, np.array(sizes, np.int32), {}))["logprobs"]
    for i, (request, one) in enumerate(zip(requests, cached, strict=True)):
        start = len(request.prompt)
        if request.sampling.temperature:
            np.testing.assert_allclose(one.logprobs, trained[i, start : start + 6], atol=1e-5)


def test_layers_that_are_scanned_are_sampled(cases):
    layout = Layout(make_mesh({}, jax.devices()[:1]), rules=RULES)
    params = cases[WithHead].init_params(jax.random.key(0))
    assert cases[WithHead].declare()["blocks"]["up"]["kernel"].axes == ("layers", "embed", "ff")
    module = made_by_flax(WithHead, jax.random.key(0))
    requests, answers = sampled(cases[WithHead], params, layout)
    tokens = jnp.array([[*requests[1].prompt, *answers[1].tokens]])
    hidden = module(tokens, jnp.arange(tokens.size)[None], jnp.ones_like(tokens))
    likeliest = np.asarray((hidden @ module.head_matrix()).argmax(-1))[0]
    start = len(requests[1].prompt)
    np.testing.assert_array_equal(answers[1].tokens, likeliest[start - 1 : -1])


def test_an_own_axis_is_split_as_its_rule_says(cases):
    declared = cases[Plain].declare()
    layout = Layout(make_mesh({"tensor": 2}, jax.devices()[:2]), rules=RULES)
    home = layout.of(declared)["blocks"]["0"]["qkv"]["kernel"]
    assert home.spec == jax.P(None, "tensor")
    assert declared["blocks"]["0"]["norms"]["0"]["scale"].axes == ("_0",)
    with pytest.raises(ConfigError, match="there is no rule for the logical axis"):
        check_axes(cases[Plain], Layout(layout.mesh))
    wrong = MeshConfig(rules={"mine": None, "mien": "tensor"}, train=MeshSizes(devices=1))
    layout = open_layout(wrong, "train", wrong.train, has_own_axes=True)
    with pytest.raises(ConfigError, match=r"^mesh\.rules\.mien: .*did you mean 'mine'"):
        check_axes(cases[Plain], layout)


def test_a_mask_of_segments_keeps_sequences_apart(cases):
    segments = np.array([[1, 1, 2, 2, 2, 0, 0]])
    mask = np.asarray(segment_mask(jnp.asarray(segments)))[0, 0]
    for i in range(7):
        for j in range(7):
            assert mask[i, j] == (j <= i and segments[0, i] == segments[0, j])


class WithArray(nnx.Module):
    def __init__(self, rngs):
        self.table = jnp.ones((4, 4))


class HalfACache(Plain):
    def extend(self, cache, tokens, positions):
        raise NotImplementedError


class WrongShape(Plain):
    def __call__(self, tokens, positions, segment_ids):
        return super().__call__(tokens, positions, segment_ids)[0]


class Headless(Model):
    """A model that says what it reads, and nothing else."""

    vocab_size = 3


class InBfloat16(Plain):
    def __init__(self, rngs):
        super().__init__(4, rngs=rngs)
        self.more = nnx.Param(jnp.ones(2, jnp.bfloat16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (WithArray, "WithArray.table is a jax array, and no variable of nnx: keep it as nnx"),
        (lambda rngs: HalfACache(4, rngs=rngs), "HalfACache has one of init_cache and extend"),
        (lambda rngs: WrongShape(4, rngs=rngs), r"expected logits \[R L V\] for tokens"),
        (InBfloat16, "more: expected a float32 array, got ShapeDtypeStruct"),
        (lambda rngs: 3, "expected an nnx.Module, got int"),
        (lambda: 3, "returned int, expected an nnx.Module, of a function that takes rngs"),
        (Headless, "Can't instantiate abstract class Headless .* compute_dtypes"),
    ],
)
def test_what_is_no_model_is_refused(make, message):
    with pytest.raises(ConfigError, match=f"^model.function: .*{message}"):
        make_model(FunctionSpec.of(make), "unused", seed=0)


def test_a_head_of_another_width_is_refused():
    model = FunctionalModel(
        init=lambda key: {"table": jnp.zeros((4, 3)), "head": jnp.zeros((2, 4))},
        apply=lambda params, tokens, positions, segment_ids: params["table"][tokens],
        head=lambda params: params["head"],
    )
    with pytest.raises(ValueError, match=r"expected a head \[D V\] with D = 3"):
        _ = model.vocab_size
