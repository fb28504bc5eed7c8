"""The engine that reads pages in place answers as the one that gathers them into rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import kernel_choice
from jaxrl_llm.kernel_choice import choose_cache_kernel
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.kernels import KernelChoice
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout, make_mesh
from tests.guarded import MODEL, NATIVE
from tests.specs import tiny_spec

SPEC = tiny_spec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=64,
    window=9,
    windowed_layers=(True, False),
    score_softcap=20.0,
    attention_sinks=True,
)
REQUESTS = [
    Request(
        tuple(np.random.default_rng(length % 3).integers(0, 32, length).tolist()),
        SamplingParams(40 - length, temperature=float(length % 2)),
        seed=length,
    )
    for length in (1, 2, 15, 16, 17, 30, 3, 9)
]


def answers(devices, axes, kernel, dtype="float32"):
    layout = Layout(make_mesh(axes, jax.devices()[:devices]))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda d: jnp.asarray(
            0.4 * rng.normal(size=d.shape) + (d.axes[-1] in ("norm", "head_dim")), jnp.float32
        ),
        declare(SPEC),
    )
    settings = dataclasses.replace(EngineSettings(4, 40), dtype=dtype)
    engine = NativeEngine(Decoder(SPEC), settings, layout=layout, steps=5, kernel=kernel)
    try:
        engine.load(params, version=0)
        return [engine.sample(REQUESTS) for _ in range(2)]  # at the second time prompts are cached
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected():
    return answers(1, {}, None)


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE)
@pytest.mark.parametrize(
    ("devices", "axes", "kernel"),
    [
        (1, {}, functools.partial(attend_pages, interpret=True)),
        (4, {"data": 2, "tensor": 2}, attend_gathered),
        (4, {"data": 2, "tensor": 2}, functools.partial(attend_pages, interpret=True)),
    ],
    ids=["interpreted", "on a mesh", "interpreted on a mesh"],
)
def test_answers(expected, devices, axes, kernel):
    for got, wanted in zip(answers(devices, axes, kernel), expected, strict=True):
        for answer, want in zip(got, wanted, strict=True):
            assert answer.tokens.tolist() == want.tokens.tolist()
            np.testing.assert_allclose(answer.logprobs, want.logprobs, atol=1e-5)


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_DECIDED", {})


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize(
    ("asked", "reason"),
    [("auto", "the devices are cpu, not cuda"), ("xla", "XLA's attention was asked for")],
)
def test_on_a_cpu_pages_are_gathered(asked, reason, caplog):
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    with caplog.at_level("DEBUG", "jaxrl_llm"):
        for _ in range(2):  # it is decided and logged once
            assert choose_cache_kernel(asked, SPEC, layout, "float32") == ("xla", reason, None)
    assert caplog.messages == [f"decoding by xla: {reason}"]


@pytest.mark.usefixtures("undecided")
def test_a_process_without_the_kernel_decides_for_all(monkeypatch):
    """Pages are read in place where every process can."""
    can = KernelChoice("triton", "it agrees", attend_gathered)
    monkeypatch.setattr(kernel_choice, "choose_paged_kernel", lambda *_, **__: can)
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    assert choose_cache_kernel("auto", SPEC, layout, "float32") == can
    kernel_choice._DECIDED.clear()
    monkeypatch.setattr(distributed, "all_gather", lambda own: [own, ("xla", "no memory")])
    assert choose_cache_kernel("auto", SPEC, layout, "float32") == ("xla", "no memory", None)
