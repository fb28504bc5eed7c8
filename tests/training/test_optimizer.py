"""What an optimizer is shown, against the same one on arrays that nobody stacked."""

import inspect

import jax
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import pytest
from optax.contrib import MuonDimensionNumbers as Muon

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import OptimConfig
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.training.optimizer import make_optimizer
from jaxrl_llm.training.update import PolicyObjective
from tests.specs import DENSE as SMALL
from tests.specs import draw, tiny_spec
from tests.updates import learn, mesh_of, place, plain

SPEC = tiny_spec(
    layers=3,
    hidden_size=8,
    head_dim=4,
    tied_embeddings=False,
    qkv_bias=True,
    moe=MoeSpec(experts=4, experts_per_token=2, ff_width=6, dense_layers=1),
    lora=LoraSpec(rank=2, alpha=4.0, targets=("query", "output")),
)
DENSE, SPARSE = SPEC.stacks
DECLARED = declare(SPEC)
ARRAYS = {  # of a layer, as the model has it: its shape, and Muon's axes
    "embed": ((8, 8), None),
    "final_norm": ((8,), None),
    "head": ((8, 8), None),
    f"{DENSE}.attention_norm": ((8,), None),
    f"{DENSE}.gate": ((8, 6), Muon(0, 1)),
    f"{SPARSE}.expert_down": ((4, 6, 8), Muon(1, 2)),
    f"{SPARSE}.mlp_norm": ((8,), None),
    f"{SPARSE}.output": ((8, 8), Muon(0, 1)),
    f"{SPARSE}.output_lora_a": ((8, 2), Muon(0, 1)),
    f"{SPARSE}.query": ((8, 8), Muon(0, 1)),
    f"{SPARSE}.query_bias": ((8,), None),
    f"{SPARSE}.query_lora_b": ((2, 8), Muon(0, 1)),
    f"{SPARSE}.router": ((8, 4), Muon(0, 1)),
}
OBJECTIVE, SHAPE = PolicyObjective(loss=plain), RowShape(rows=8, length=8, sequences=8)
RATE, STEPS = 0.1, 3
RATES = FunctionSpec("constant_schedule", {"value": RATE})

REFUSED = {
    *("lbfgs", "momo", "momo_adam", "sophia", "dpsgd"),  # which ask for more
    *("schedule_free", "schedule_free_adamw", "schedule_free_sgd"),  # which train other weights
    *("optimistic_adam", "rprop", "scale_by_rprop", "sm3"),  # of a number, not of a schedule
}


def stacks(seed):
    """Arrays as our models hold them; each layer's has another scale."""
    rng = np.random.default_rng(seed)
    tree = {}
    for name in ARRAYS:
        group, _, own = name.rpartition(".")
        declared = DECLARED[group][own] if group else DECLARED[own]
        array = rng.standard_normal(declared.shape).astype(np.float32)
        if group:
            array *= np.arange(1, len(array) + 1).reshape(-1, *(1,) * (array.ndim - 1))
        (tree.setdefault(group, {}) if group else tree)[own] = array
    return tree


def arrays(tree):
    """The same as a model without stacks has them: a tree of its names."""
    named = {}
    for name, (shape, _) in ARRAYS.items():
        group, _, own = name.rpartition(".")
        each = tree[group][own] if group else [tree[own]]
        named[name] = {i: np.asarray(array).reshape(shape) for i, array in enumerate(each)}
    return named


def ours(spec):
    config = OptimConfig(optimizer=spec, schedule=RATES, grad_clip=None)
    return make_optimizer(config)[0](DECLARED, stacks(0))


def updates(optimizer, view):
    """The updates of a few gradients, after which the parameters are as the optimizer wants."""
    params, made = view(stacks(0)), []
    init, update = jax.jit(optimizer.init), jax.jit(optimizer.update)
    state = init(params)
    for seed in range(1, STEPS + 1):
        step, state = update(view(stacks(seed)), state, params)
        params = jax.tree.map(np.add, params, jax.device_get(step))
        made.append(step)
    return made


def differences(spec):
    """Where a config's optimizer does not do what optax's does to arrays of single layers."""
    wrong, mine = [], [*map(arrays, updates(ours(spec), lambda tree: tree))]
    for i, (got, expected) in enumerate(zip(mine, updates(theirs(spec), arrays), strict=True)):
        for name, layers in expected.items():
            for layer, array in layers.items():
                most = 1e-3 * np.abs(array).max()
                if not np.allclose(got[name][layer], array, rtol=0, atol=most):
                    wrong.append((spec.fn, f"update {i}", name, layer))
    return wrong


def numbers(tree):
    return {name: ARRAYS[name][1] for name in tree}


def theirs(spec):
    module, _, name = spec.fn.partition(":")
    more = {"muon_weight_dimension_numbers": numbers} if name == "muon" else {}
    function = getattr(optax.contrib if module == "optax.contrib" else optax, name)
    return function(optax.constant_schedule(RATE), **spec.kwargs, **more)


@pytest.mark.parametrize("name", ["optax:lamb", "optax.contrib:muon"])
def test_it_is_shown_arrays_as_the_model_has_them(name):
    assert not differences(FunctionSpec(name))


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/training/optimizer.py", "models/arrays.py")
def test_every_optimizer_of_optax_is_that_of_single_layers_or_is_refused():
    wrong, refused = [], set()
    for module in (optax, optax.contrib):
        for own, function in vars(module).items():
            is_public = inspect.isfunction(function) and not own.startswith("_")
            if not is_public or "learning_rate" not in inspect.signature(function).parameters:
                continue
            keywords = {"key": jax.random.key(0)} if own == "noisy_sgd" else {}
            try:
                wrong += differences(FunctionSpec(f"{module.__name__}:{own}", keywords))
            except ConfigError as error:
                assert error.keys == ("optim.optimizer",), str(error)
                refused.add(own)
    assert not wrong and refused == REFUSED


B1, B2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.01


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


def test_the_first_moment_may_be_bfloat16():
    keywords, mesh = {"mu_dtype": "bfloat16", "weight_decay": DECAY}, mesh_of(fsdp=4, tensor=2)
    config = OptimConfig(optimizer=FunctionSpec("adamw", keywords), schedule=RATES, grad_clip=None)
    params, *gradients = (place(draw(SMALL, seed, 1.0), SMALL, mesh) for seed in range(4))
    made = make_optimizer(config)[0](declare(SMALL), params)
    learner = learn(SMALL, params, OBJECTIVE, SHAPE, mesh=mesh, optimizer=made)
    state = learner.init(params)
    for gradient in gradients:
        state, _ = learner.apply(state, jax.tree.map(jax.numpy.copy, gradient), None)
    moments, digit = state.opt_state[0], 2.0**-7  # of bfloat16: m is rounded once more on its way
    trees = (params, state.params, moments.mu, moments.nu, *gradients)
    for before, after, m, v, *g in zip(*map(jax.tree.leaves, trees), strict=True):
        assert (m.dtype.name, v.dtype.name) == ("bfloat16", "float32")
        assert m.sharding == v.sharding == after.sharding
        expected = adamw(np.asarray(before), [*map(np.asarray, g)])
        np.testing.assert_allclose(after, expected[0], atol=3 * digit * RATE)
        np.testing.assert_allclose(m.astype(np.float32), expected[1], atol=digit, rtol=digit)
        np.testing.assert_allclose(v, expected[2], rtol=1e-5)
