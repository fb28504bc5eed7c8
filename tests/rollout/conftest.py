import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.decoders import forward, logits

SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=64,
)
MIXTURE = dataclasses.replace(SPEC, moe=MoeSpec(experts=8, experts_per_token=2, ff_width=16))
HYBRID = dataclasses.replace(
    SPEC,
    layers=3,
    gated_attention=True,
    delta=DeltaSpec(key_heads=2, value_heads=4, key_width=6, value_width=5),
    delta_layers=(True, True, False),
)
SPECS = {"dense": SPEC, "moe": MIXTURE, "hybrid": HYBRID}
MAX_TOKENS = 40


def spec_of(model):
    """Return the spec of one of these models, or one that is given."""
    return SPECS[model] if isinstance(model, str) else model


def draw(seed, model="dense"):
    rng = np.random.default_rng(seed)

    def one(decl):
        values = 0.4 * rng.normal(size=decl.shape) + (decl.axes[-1] in ("norm", "head_dim"))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(one, declare(spec_of(model)))


@pytest.fixture(scope="session")
def params():
    """Parameters under which attention and the next token are far from uniform."""
    return draw(0)


@pytest.fixture(scope="session")
def draw_params():
    """(seed, model) -> parameters of one of these models, or of a spec."""
    return draw


@pytest.fixture(scope="session")
def other_params():
    return draw(1)


@pytest.fixture(scope="session")
def next_logits():
    """(params, tokens, model) -> logits [n V] after each of n tokens, by a full forward pass."""

    @functools.partial(jax.jit, static_argnums=2)
    def run(params, tokens, spec):
        length = jnp.arange(MAX_TOKENS)[None]
        hidden = forward(params, spec, tokens[None], length, jnp.ones_like(length))
        return logits(params, spec, hidden)[0]  # causal: what follows changes nothing

    def padded(params, tokens, model="dense"):
        tokens = np.asarray(tokens, np.int32)
        row = np.full(MAX_TOKENS, 5, np.int32)
        row[: len(tokens)] = tokens
        return np.asarray(run(params, row, SPECS[model]))[: len(tokens)]

    return padded


@pytest.fixture(scope="session")
def build():
    """(devices, axes of the mesh, model, options) -> an engine, without weights."""

    def make(devices=1, axes=None, model="dense", **options):
        mesh = make_mesh(axes or {"fsdp": -1}, jax.devices()[:devices])
        settings = {"max_running_sequences": 4, "max_tokens": MAX_TOKENS}
        for field in dataclasses.fields(EngineSettings):
            if field.name in options:
                settings[field.name] = options.pop(field.name)
        return NativeEngine(
            Decoder(spec_of(model)), EngineSettings(**settings), layout=Layout(mesh), **options
        )

    return make


@pytest.fixture(scope="session")
def shared_engine(build, params):
    """Compiled once for all tests; decodes five tokens at a time, so that looks are many."""
    engine = build(steps=5)
    engine.load(params, version=0)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, params):
    """The shared engine with the first weights, and running."""
    shared_engine.load(params, version=0)
    yield shared_engine
    shared_engine.resume()


@pytest.fixture
def hollow(build):
    """(options) -> an engine that compiles no model; a test that samples replaces `_turn`."""
    made = []

    def make(**options):
        engine = build(**options)
        engine.programs.warm_up = lambda *_: None
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
