"""The native engine with its layers' matrices in float8, against a forward pass by the formula."""

import contextlib
import functools
import types

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.models import decoder, linear
from jaxrl_llm.models import layers as layer_functions
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.quantization import QuantizedMatrix, declare_quantized
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.rollout.native.engine import check_fp8
from jaxrl_llm.training.buffer import engine_checksum
from tests.decoders import forward, logits
from tests.rollout.conftest import SPECS

PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9), (31,)]


def scale_of(x):
    """Return what the largest number of each row is divided by to become 448."""
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / 448)
    return np.where(scale > 0, scale, np.float32(1))


def rounded(x):
    """Return numbers as they are after a rounding to e4m3 by the largest of each row."""
    x = np.asarray(x, np.float32)
    scale = scale_of(x)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def have_ties(x):
    """Return for each row whether a number is so near the middle of two of e4m3 that two programs,
    whose float32 sums differ in their last bits, may round it to either."""
    x = np.asarray(x, np.float32)
    lower, upper = (
        (x / scale_of(x) * f).astype(ml_dtypes.float8_e4m3fn) for f in (1 - 3e-6, 1 + 3e-6)
    )
    return (lower != upper).any(axis=-1)


def dequantized(params, model="dense"):
    """Return the weights that the engine's float8 ones stand for."""
    declared = declare_quantized(SPECS[model])

    def one(decl, stack):
        if not isinstance(decl, QuantizedMatrix):
            return stack
        stack = np.asarray(stack)
        layers = []
        for matrix in stack:
            inputs = int(np.prod(matrix.shape[: decl.inputs]))
            columns = rounded(matrix.reshape(inputs, -1).T)
            layers.append(columns.T.reshape(matrix.shape))
        return jnp.asarray(np.stack(layers))

    return jax.tree.map(
        one, declared, params, is_leaf=lambda decl: isinstance(decl, QuantizedMatrix)
    )


def logprobs(params, tokens, model="dense"):
    place = jnp.arange(len(tokens))[None]
    hidden = forward(params, SPECS[model], jnp.asarray([tokens]), place, jnp.ones_like(place))
    return np.asarray(jax.nn.log_softmax(logits(params, SPECS[model], hidden)[0]), np.float64)


def project_rounded(ties, x, matrix, *, inputs=1):
    """Round what is multiplied as the formula does, and scale it before the product.

    `ties` gets for each token of one sequence whether its numbers have ties.
    """
    flat = x.reshape(*x.shape[:2], -1)

    def of_host(numbers):
        ties.append(have_ties(numbers)[0])
        return rounded(numbers)

    numbers = jax.pure_callback(of_host, jax.ShapeDtypeStruct(flat.shape, np.float32), flat)
    y = numbers @ matrix.reshape(flat.shape[2], -1)
    return y.reshape(*x.shape[:2], *matrix.shape[inputs:])


def linear_rounded(ties, weights, spec, name, x, **options):
    """Apply a projection as `linear` does, by the formula where the engine has it in float8."""
    rounds = not name.startswith("delta_")
    with pytest.MonkeyPatch.context() as patched:
        if rounds:
            patched.setattr(linear, "project", functools.partial(project_rounded, ties))
        return linear.linear(weights, spec, name, x, **options)


def greedy(prompt, new=12):
    return Request(prompt, SamplingParams(new, temperature=0.0), seed=0)


@pytest.fixture
def make(build):
    with contextlib.ExitStack() as stack:

        def made(**options):
            engine = build(quantization="fp8", **options)
            stack.callback(engine.close)
            return engine

        yield made


@pytest.mark.parametrize("model", SPECS)
def test_answers_are_those_of_the_formula_after_each_of_two_syncs(
    make, draw_params, monkeypatch, model
):
    engine = make(model=model)
    for version in (0, 1):
        params = draw_params(version, model)
        engine.load(params, version=version)
        answers = engine.sample([greedy(prompt) for prompt in PROMPTS])
        plain, differences, compared = dequantized(params, model), [], 0
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            whole = [*prompt, *answer.tokens.tolist()]
            ties = []
            with monkeypatch.context() as patched:
                for module in (layer_functions, decoder):
                    patched.setattr(module, "linear", functools.partial(linear_rounded, ties))
                expected = logprobs(plain, whole, model)[len(prompt) - 1 : -1]
            # what follows a tie has seen it
            sure = ~np.logical_or.accumulate(np.any(ties, axis=0))[len(prompt) - 1 : -1]
            assert (answer.tokens == expected.argmax(axis=1))[sure].all()
            np.testing.assert_allclose(answer.logprobs[sure], expected.max(axis=1)[sure], atol=5e-5)
            compared += sure.sum()
            differences.append(logprobs(params, whole, model)[len(prompt) - 1 : -1] - expected)
        differences = np.abs(np.concatenate(differences))
        assert 1e-3 < differences.mean() < 0.5  # the rounding matters
        assert compared > 0.7 * len(differences)


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 4}], ids=str)
def test_a_mesh_gives_the_same(make, params, axes):
    alone, mesh = make(), make(devices=4, axes=axes)
    receipts = [engine.load(params, version=0) for engine in (alone, mesh)]
    assert receipts[0].checksum == receipts[1].checksum
    requests = [greedy(prompt) for prompt in PROMPTS]
    for one, many in zip(alone.sample(requests), mesh.sample(requests), strict=True):
        assert one.tokens.tolist() == many.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=5e-5)


def test_the_trainer_knows_the_checksum(make, params):
    engine = make(dtype="bfloat16")
    receipt = engine.load(params, version=0)
    sent = [
        engine_checksum(Decoder(SPECS["dense"]), "bfloat16", quantized=q)(params)
        for q in (True, False)
    ]
    assert receipt.checksum == int(sent[0]) != int(sent[1])
    changed = jax.tree.map(lambda x: x, params)
    changed["layers"]["down"] = params["layers"]["down"] * 1.01
    assert engine.load(changed, version=1).checksum != receipt.checksum


def test_matrices_take_half_of_bfloat16(build, make, params):
    def bytes_of(engine, names):
        layers = engine.shapes()[0]["layers"]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves([layers[n] for n in names]))

    wide, narrow = build(dtype="bfloat16"), make(dtype="bfloat16")
    wide.close()
    names = ("query", "key", "value", "output", "gate", "up", "down")
    scales = sum(4 * x.scale.size for n in names for x in narrow.shapes()[0]["layers"][n])
    assert bytes_of(narrow, names) - scales == bytes_of(wide, names) / 2
    narrow.load(params, version=0)
    chex.assert_trees_all_equal_shapes_and_dtypes(narrow._params, narrow.shapes()[0])
    others = [name for name in narrow._params["layers"] if name not in names]
    assert bytes_of(narrow, others) == bytes_of(wide, others)
    assert narrow._params["embed"].dtype == narrow._params["head"].dtype == jnp.bfloat16


def test_nothing_compiles_at_the_second_sync_and_donated_weights_go(
    make, params, other_params, compile_rest
):
    engine = make()
    engine.load(params, version=0)
    mine = jax.tree.map(jnp.copy, other_params)
    compile_rest()
    with contextlib.closing(CompileCounter()) as counter:
        receipt = engine.load(other_params, version=1)
        answers = engine.sample([greedy(PROMPTS[0])])
        assert counter.count == 0
    assert engine.load(mine, version=2, donate=True).checksum == receipt.checksum
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    assert engine.sample([greedy(PROMPTS[0])])[0].tokens.tolist() == answers[0].tokens.tolist()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0"])
def test_gpus_without_float8_are_refused(capability):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="GPU X")
    refused = float(capability) < 8.9
    message = rf"capability 8.9 or more .*; GPU X has {capability}"
    with pytest.raises(ValueError, match=message) if refused else contextlib.nullcontext():
        check_fp8(Decoder(SPECS["dense"]), gpu)


def test_a_cpu_says_that_it_is_slow(make, caplog):
    make()
    assert "its float8 products are slow" in caplog.text
