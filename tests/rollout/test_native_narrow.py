"""The engine with matrices in float8, or a cache in int8, against a forward pass by the formula."""

import contextlib
import dataclasses
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
from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.paged_attention import attend_gathered
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.models.quantization import QuantizedMatrix, declare_quantized
from jaxrl_llm.rollout.engine import Request, SamplingParams
from jaxrl_llm.rollout.native.engine import check_fp8
from jaxrl_llm.training.buffer import engine_checksum
from tests.decoders import forward, logits
from tests.guarded import MODEL, NATIVE
from tests.rollout.conftest import MAX_TOKENS, build, check_same, opened, spec_of, weights
from tests.specs import DENSE, LATENT

PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9), (31,)]
NEW, LENGTH = 12, 20
SIZES = {"PREFILL_LENGTHS": (16,), "PREFILL_TOKENS": (64,)}
slow = functools.partial(
    pytest.param, marks=[pytest.mark.slow, pytest.mark.guards(*MODEL, *NATIVE)]
)


def rounded(x):
    """Return numbers as they are after a rounding to e4m3 by the largest of each row."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / 448)
    scale = np.where(scale > 0, scale, np.float32(1))
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def dequantized(params, model):
    """Return the weights that the engine's float8 ones stand for."""

    def one(decl, stack):
        if not isinstance(decl, QuantizedMatrix):
            return stack
        layers = []
        for matrix in np.asarray(stack):
            inputs = int(np.prod(matrix.shape[: decl.inputs]))
            layers.append(rounded(matrix.reshape(inputs, -1).T).T.reshape(matrix.shape))
        return jnp.asarray(np.stack(layers))

    declared = declare_quantized(spec_of(model))
    return jax.tree.map(one, declared, params, is_leaf=lambda d: isinstance(d, QuantizedMatrix))


def project_rounded(x, matrix, *, inputs=1):
    """Round what is multiplied as the formula does, and scale it before the product."""
    flat = x.reshape(*x.shape[:2], -1)
    shape = jax.ShapeDtypeStruct(flat.shape, np.float32)
    y = jax.pure_callback(rounded, shape, flat) @ matrix.reshape(flat.shape[2], -1)
    return y.reshape(*x.shape[:2], *matrix.shape[inputs:])


def linear_rounded(weights, spec, name, x, **options):
    """Apply a projection as `linear` does, by the formula where the engine has it in float8."""
    with pytest.MonkeyPatch.context() as patched:
        if not name.startswith("delta_"):
            patched.setattr(linear, "project", project_rounded)
        return linear.linear(weights, spec, name, x, **options)


@functools.partial(jax.jit, static_argnums=(2, 3))
def logprobs_by(params, rows, model, by_formula):
    with pytest.MonkeyPatch.context() as patched:
        for module in (layer_functions, decoder) if by_formula else ():
            patched.setattr(module, "linear", linear_rounded)
        place = jnp.broadcast_to(jnp.arange(LENGTH), rows.shape)
        hidden = forward(params, spec_of(model), rows, place, jnp.ones_like(place))
        return jax.nn.log_softmax(logits(params, spec_of(model), hidden))


def greedy(prompt):
    return Request(prompt, SamplingParams(NEW, temperature=0.0), seed=0)


REQUESTS = [greedy(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def shared():
    with contextlib.closing(build(quantization="fp8", sizes=SIZES)) as engine:
        yield engine


@pytest.mark.parametrize("model", ["dense", slow("moe"), slow("delta")])
def test_answers_are_those_of_the_formula_after_each_of_two_syncs(shared, model):
    with contextlib.ExitStack() as stack:
        engine = shared
        if model != "dense":
            engine = build(model=model, quantization="fp8", sizes=SIZES)
            stack.enter_context(contextlib.closing(engine))
        for version in (0, 1):
            params = weights(model, version)
            engine.load(params, version=version)
            answers = engine.sample(REQUESTS)
            rows = np.zeros((len(PROMPTS), LENGTH), np.int32)
            for row, prompt, answer in zip(rows, PROMPTS, answers, strict=True):
                row[: len(prompt) + NEW] = [*prompt, *answer.tokens]
            formula = np.asarray(logprobs_by(dequantized(params, model), rows, model, True))
            exact = np.asarray(logprobs_by(params, rows, model, False))
            off, matters = [], []
            for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
                drawn = slice(len(prompt) - 1, len(prompt) - 1 + NEW)
                off += np.abs(formula[row, drawn].max(axis=1) - answer.logprobs).tolist()
                matters.append(np.abs(exact[row, drawn] - formula[row, drawn]).mean())
            # what two float32 sums round to other neighbours changes all that follows
            assert np.median(off) < 1e-5 and max(off) < 0.5
            assert 1e-3 < np.mean(matters) < 0.5


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE)
def test_a_mesh_gives_the_same(shared):
    axes = {"fsdp": 2, "tensor": 2}
    with contextlib.closing(build(4, axes, quantization="fp8", sizes=SIZES)) as mesh:
        receipts = [engine.load(weights(), version=0) for engine in (shared, mesh)]
        assert receipts[0].checksum == receipts[1].checksum
        check_same(shared.sample(REQUESTS), mesh.sample(REQUESTS), atol=5e-5)


def test_what_the_engine_holds_and_its_checksum(hollow):
    narrow = hollow(dtype="bfloat16", quantization="fp8")
    receipt = narrow.load(weights(), version=0)
    chex.assert_trees_all_equal_shapes_and_dtypes(narrow._params, narrow.shapes()[0])
    layers = narrow._params["layers"]
    names = ("query", "key", "value", "output", "gate", "up", "down")
    assert {x.values.dtype for name in names for x in layers[name]} == {jnp.dtype("float8_e4m3fn")}
    assert narrow._params["embed"].dtype == narrow._params["head"].dtype == jnp.bfloat16
    sent = [
        engine_checksum(Decoder(DENSE), "bfloat16", quantized=q)(weights()) for q in (True, False)
    ]
    assert receipt.checksum == int(sent[0]) != int(sent[1])


def test_donated_weights_go(shared):
    receipt = shared.load(weights(seed=1), version=1)
    answers = shared.sample(REQUESTS[:1])
    mine = jax.tree.map(jnp.copy, weights(seed=1))
    assert shared.load(mine, version=2, donate=True).checksum == receipt.checksum
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(mine))
    check_same(shared.sample(REQUESTS[:1]), answers)


def test_gpus_without_float8_are_refused():
    for capability in ("7.5", "8.6", "8.9", "10.0"):
        named = {"platform": "gpu", "device_kind": "GPU X", "compute_capability": capability}
        refused = float(capability) < 8.9
        with pytest.raises(ValueError, match="fp8") if refused else contextlib.nullcontext():
            check_fp8(Decoder(DENSE), types.SimpleNamespace(**named))


GROUPED = dataclasses.replace(
    DENSE, head_dim=16, window=9, windowed_layers=(True, False), score_softcap=20.0
)
WIDTHS = dataclasses.replace(LATENT.latent, kv_rank=16, nope_width=8, rope_width=16, value_width=8)
SHARED = dataclasses.replace(LATENT, head_dim=WIDTHS.head_dim, latent=WIDTHS)
STEM = np.random.default_rng(9).integers(0, 32, MAX_TOKENS).tolist()
MIXED = [
    Request(
        (*STEM[: length if seed % 2 else length // 2], *range(length - length // 2))[:length],
        SamplingParams(MAX_TOKENS - length, temperature=float(seed % 3 == 2)),
        seed=seed,
    )
    for seed, length in enumerate((1, 2, 15, 16, 17, 30, 7, 24, 16, 9))
]
PIECES = {"PREFILL_LENGTHS": (8,), "PREFILL_TOKENS": (16,), "SHORTEST_ROW": 16}
KERNEL = functools.partial(attend_pages, interpret=True)


def restored(x, first):
    """Return what int8 makes of vectors whose first numbers have a scale of their own."""
    parts = []
    for part in (x[..., :first], x[..., first:]):
        if part.shape[-1]:
            scale = jnp.maximum(jnp.abs(part).max(axis=-1, keepdims=True), 1e-30) / 127
            parts.append(jnp.round(part / scale) * scale)
    return jnp.concatenate(parts, axis=-1)


@functools.partial(jax.jit, static_argnums=2)
def logprobs_of(params, row, spec):
    """Return log-probs [n V] of a forward pass over restored keys and values."""
    first = spec.latent.kv_rank if spec.latent else spec.head_dim

    def attend_restored(q, k, v, *more, **options):
        if spec.latent:  # the values are part of the key, and have its scale
            v = restored(k, first)
        return attend(q, restored(k, first), restored(v, first), *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "attend", attend_restored)
        place, decoding = jnp.arange(MAX_TOKENS)[None], spec.for_decoding
        hidden = forward(params, decoding, row[None], place, jnp.ones_like(place))
        return jax.nn.log_softmax(logits(params, decoding, hidden))[0]


def check(answers, spec):
    """Compare answers with the forward pass; a number may be rounded to its other neighbour."""
    off = []
    for request, answer in zip(MIXED, answers, strict=True):
        row = np.zeros(MAX_TOKENS, np.int32)
        row[: len(request.prompt) + len(answer.tokens)] = [*request.prompt, *answer.tokens]
        after = np.asarray(logprobs_of(weights(spec), row, spec))
        after = after[len(request.prompt) - 1 :][: len(answer.tokens)]
        if request.sampling.temperature == 0:
            assert answer.tokens.tolist() == after.argmax(-1).tolist()
        off += np.abs(answer.logprobs - after[np.arange(len(after)), answer.tokens]).tolist()
    assert np.median(off) < 2e-6
    assert max(off) < 0.02


ON_MESH = {"devices": 4, "axes": {"data": 2, "tensor": 2}}


@pytest.fixture(scope="module", params=[GROUPED, SHARED], ids=["grouped", "latent"])
def spec(request):
    return request.param


@pytest.mark.parametrize(
    "options",
    [
        {"max_running_sequences": 3, "cache_pages": 7.5, "kernel": attend_gathered},
        slow({"max_running_sequences": 12} | ON_MESH),
        slow({"max_running_sequences": 12, "kernel": KERNEL} | ON_MESH),
        slow({"max_running_sequences": 3, "cache_pages": 15.0}),
    ],
    ids=["in place", "mesh", "interpreted on a mesh", "cramped rows"],
)
def test_answers_are_those_of_restored_keys_and_values(spec, options):
    options = {"sizes": PIECES, "steps": 7, "kv_cache_dtype": "int8"} | options
    if pages := options.pop("cache_pages", None):
        with contextlib.closing(build(model=spec, kv_cache_dtype="int8")) as plain:
            options["cache_gb"] = pages * plain.programs.page_bytes() / 1e9
    with opened(spec, **options) as engine:
        for _ in range(2):  # at the second time prompts are cached
            check(engine.sample(MIXED), spec)
        if "devices" not in options:
            held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner.pool))
            assert held == engine.programs.sizes.pages * engine.programs.page_bytes()
        assert (engine.stats().preemptions > 0) == bool(pages)
        assert engine.stats().reused_tokens > 0
