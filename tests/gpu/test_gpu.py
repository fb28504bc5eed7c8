"""What needs a CUDA device: `JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/gpu`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.config.sections import CACHE_TOLERANCE
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.attention import Attending
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.kernels import (
    TOLERANCE,
    Heads,
    attend_cudnn,
    choose_kernel,
    difference,
    heads_on,
    objection,
    this_device,
)
from jaxrl_llm.models.moe.grouped import choose_grouped_kernels, grouped_matmul
from jaxrl_llm.models.moe.grouped_triton import multiply_groups, sum_outer_products
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.paged_attention import choose_paged_kernel, paged_difference
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.models.parameters import declare, init_params
from jaxrl_llm.models.quantization import quantize_matrix, quantized_product
from jaxrl_llm.rollout.engine import EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh, replicated, shardings
from jaxrl_llm.sharding.reshard import to_device, to_host
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.update import PolicyObjective
from jaxrl_llm.types import Batch
from tests.specs import DENSE
from tests.updates import learn

pytestmark = pytest.mark.gpu

SPEC = dataclasses.replace(
    DENSE,
    **dict(vocab_size=512, hidden_size=256, layers=4, heads=8, kv_heads=4, head_dim=64),
    **dict(ff_width=768, rope_theta=1e6, tied_embeddings=True, max_positions=512),
)
LENGTH = 128


def _sequences(device, dtype, kernel=None, kv_cache_dtype="auto"):
    """Sample on a device; return the batch, the engine's log-probs and the trainer's."""
    mesh = make_mesh({}, [device])
    params = jax.device_put(
        init_params(SPEC, key=jax.random.key(0)), shardings(declare(SPEC), mesh)
    )
    settings = EngineSettings(32, LENGTH, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    engine = NativeEngine(Decoder(SPEC), settings, layout=Layout(mesh), kernel=kernel)
    engine.load(params, version=0)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 512, size).tolist()) for size in rng.integers(3, 40, 16)]
    sampling = SamplingParams(max_new_tokens=64, temperature=0.8, stop_ids=(7,))
    answers = engine.sample(
        [Request(prompt, sampling, seed) for seed, prompt in enumerate(prompts * 4)]
    )
    engine.close()
    tokens = np.zeros((64, LENGTH), np.int32)
    mask, reported = np.zeros((64, LENGTH), bool), np.zeros((64, LENGTH), np.float32)
    sizes = np.zeros(64, np.int32)
    for i, (prompt, answer) in enumerate(zip(prompts * 4, answers, strict=True)):
        start, sizes[i] = len(prompt), len(prompt) + len(answer.tokens)
        tokens[i, : sizes[i]] = [*prompt, *answer.tokens]
        mask[i, start : sizes[i]], reported[i, start : sizes[i]] = True, answer.logprobs
    batch = Batch(tokens, sizes, {"mask": mask, "lengths": mask.sum(1)})
    settings = ForwardConfig(model=Decoder(SPEC), dtype=dtype, temperature=0.8)
    shape = row_shape(2048, LENGTH, sequences=64)
    logprobs = logprob_pass(settings, shape, mesh)(params, batch)["logprobs"]
    return mesh, params, batch, reported, logprobs


@pytest.mark.parametrize("in_place", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(
    ("dtype", "cache", "tolerance"),
    [
        *(("float32", "auto", 5e-3), ("bfloat16", "auto", 3e-2)),
        ("bfloat16", "int8", CACHE_TOLERANCE),
    ],
)
def test_decoding_agrees_with_the_forward_pass(dtype, cache, tolerance, in_place):
    device = jax.devices("gpu")[0]
    asked, layout = "auto" if in_place else "xla", Layout(make_mesh({}, [device]))
    given = {"device": this_device(), "is_int8": cache == "int8"}
    choice = choose_paged_kernel(asked, SPEC, layout, dtype, **given)
    assert (choice.kernel is not None) == in_place, choice.reason
    _, _, batch, reported, logprobs = _sequences(device, dtype, choice.kernel, cache)
    assert np.abs(reported - logprobs)[batch["mask"]].mean() < tolerance


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize(("heads", "keys", "width"), [(16, 8, 128), (7, 1, 80), (8, 4, 256)])
def test_the_kernel_over_pages_is_exact(heads, keys, width, is_int8):
    kinds = (Attending(), Attending(window=100, softcap=5.0))
    asked = Heads(heads, keys, width, kinds, is_int8=is_int8)
    assert paged_difference(attend_pages, asked, "float32") < 1e-4
    assert paged_difference(attend_pages, asked, "bfloat16") < TOLERANCE


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_the_kernel_over_latents_is_exact(heads, is_int8):
    asked = Heads(heads, 1, 576, (Attending(0.07),), latent=512, is_int8=is_int8)
    assert paged_difference(attend_pages, asked, "bfloat16") < TOLERANCE


def test_an_update_on_the_gpu_equals_the_one_on_the_cpu():
    losses = []
    for device in (jax.devices("gpu")[0], jax.devices("cpu")[0]):
        mesh, params, batch, _, logprobs = _sequences(jax.devices("gpu")[0], "float32")
        mesh = make_mesh({}, [device])
        params = jax.device_put(params, shardings(declare(SPEC), mesh))
        advantages = np.where(batch["mask"], np.linspace(-1, 1, 64)[:, None], 0).astype(np.float32)
        batch = batch.add(old_logprobs=logprobs, advantages=advantages)
        shape = row_shape(2048, LENGTH, sequences=64)
        given = {"mesh": mesh, "optimizer": optax.sgd(1e-2), "temperature": 0.8}
        learner = learn(SPEC, params, PolicyObjective(loss=ppo_clip), shape, **given)
        coefs = {"kl_coef": 0.0, "entropy_coef": 0.0}
        state, metrics = learner.update(learner.init(params), batch, coefs)
        losses.append((float(metrics["loss"]), jax.device_get(state.params["embed"])))
    (gpu, on_gpu), (cpu, on_cpu) = losses
    assert abs(gpu - cpu) < 1e-3
    assert np.allclose(on_gpu, on_cpu, atol=1e-4)
    assert jnp.isfinite(gpu)


def test_what_is_offloaded_leaves_the_device():
    devices = jax.devices("gpu")[:1]
    layout, size = replicated(make_mesh({}, devices)), 2**30
    draw = jax.jit(lambda key: jax.random.bits(key, (size // 4,)), out_shardings=layout)
    array = jax.block_until_ready(draw(jax.random.key(0)))
    expected = np.asarray(array)
    full = devices[0].memory_stats()
    held = to_host(array)
    empty = devices[0].memory_stats()
    assert full["bytes_in_use"] - empty["bytes_in_use"] >= size
    np.testing.assert_array_equal(np.asarray(held), expected)
    back = to_device(held)
    again = devices[0].memory_stats()
    assert abs(again["bytes_in_use"] - full["bytes_in_use"]) < size // 100
    assert again["peak_bytes_in_use"] - full["peak_bytes_in_use"] < size // 100
    np.testing.assert_array_equal(np.asarray(back), expected)


WIDE = Heads(16, 8, 128, (Attending(scale=0.1),))


@pytest.fixture
def hopper():
    """Skip where the kernel can't be used, with the reason."""
    reason = objection(WIDE, "bfloat16", this_device())
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "heads",
    [
        WIDE,
        Heads(8, 8, 64, (Attending(),)),
        Heads(8, 1, 256, (Attending(),)),
        Heads(16, 16, 72, (Attending(causal=False),)),  # of the tower of Qwen3-VL
    ],
)
def test_the_packed_kernel_agrees_with_xla_forward_and_backward(heads, dtype):
    assert difference(attend_cudnn, heads, dtype) < TOLERANCE


@pytest.mark.usefixtures("hopper")
def test_the_packed_kernel_agrees_on_a_long_row_of_ragged_segments():
    """Against one product per segment in float32, so that no mask of ours takes part."""
    sizes = (1700, 3, 911, 64, 1, 1024)
    ids = np.zeros((2, 4096), np.int32)
    ids[0, : sum(sizes)] = np.repeat(np.arange(1, 7), sizes)
    ids[1, :4000] = 1
    keys = jax.random.split(jax.random.key(0), 4)
    given = [
        jax.random.normal(key, (2, 4096, n, 128), jnp.bfloat16)
        for key, n in zip(keys, (16, 8, 8, 16), strict=True)
    ]

    def kernel(q, k, v, out):
        mixed, backward = jax.vjp(lambda *x: attend_cudnn(*x, jnp.array(ids)), q, k, v)
        return mixed, *backward(out)

    @jax.jit
    def alone(q, k, v, out):
        def mix(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

        with jax.default_matmul_precision("float32"):
            mixed, backward = jax.vjp(mix, q, k, v)
            return mixed, *backward(out)

    actual = [np.asarray(x, np.float32) for x in jax.jit(kernel)(*given)]
    for row in range(2):
        for number in range(1, ids[row].max() + 1):
            (at,) = np.nonzero(ids[row] == number)
            part = slice(at[0], at[-1] + 1)
            expected = alone(*(x[row : row + 1, part].astype(jnp.float32) for x in given))
            for a, b in zip(actual, expected, strict=True):
                largest = np.linalg.norm(a[row], axis=(1, 2)).max()  # gradients of one token are 0
                off = np.linalg.norm(a[row, part] - b[0]) / max(np.linalg.norm(b), largest)
                assert off < 0.01, (row, number, off)
        for a in actual:
            assert not a[row][ids[row] == 0].any()


@pytest.mark.usefixtures("hopper")
def test_log_probs_with_the_packed_kernel_equal_those_without():
    mesh, params, batch, _, logprobs = _sequences(jax.devices("gpu")[0], "bfloat16")
    choice = choose_kernel("cudnn", heads_on(SPEC, Layout(mesh)), "bfloat16", device=this_device())
    settings = ForwardConfig(
        model=Decoder(SPEC), dtype="bfloat16", temperature=0.8, kernel=choice.kernel
    )
    again = logprob_pass(settings, row_shape(2048, LENGTH, sequences=64), mesh)(params, batch)
    assert np.abs(again["logprobs"] - logprobs)[batch["mask"]].mean() < 5e-3


@pytest.mark.parametrize("rows", [8, 256])
def test_float8_products_are_those_of_a_cpu(rows):
    """Up to the rounding of bfloat16 and the tensor cores' shorter sums."""
    keys = jax.random.split(jax.random.key(0))
    matrix = quantize_matrix(jax.random.normal(keys[0], (1024, 512)))
    x = jax.random.normal(keys[1], (rows, 1, 1024), jnp.bfloat16)
    on_gpu, on_cpu = (
        np.asarray(jax.jit(quantized_product)(*jax.device_put((x, matrix), device)), np.float32)
        for device in (jax.devices("gpu")[0], jax.devices("cpu")[0])
    )
    assert np.abs(on_gpu - on_cpu).max() < 2**-6 * np.abs(on_cpu).max()


# ----------------------------------------------------------------------------- products of experts

SHAPES = {  # rows, and of a group its inner width and columns
    "training": ([4096, 0, 300, 5000, 1, 2047], 700, 4096, 1536),
    "decoding": ([20, 0, 5, 100, 1, 2], 64, 4096, 384),
    "odd": ([33, 0, 511, 7], 0, 200, 136),
}


def close(got, expected, dtype):
    """Compare within the rounding of a result, of which no sum has a share."""
    rounding = 1e-5 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    expected = np.asarray(expected)
    most = rounding * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=rounding, atol=most)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_agree_with_products_in_float32(name, dtype):
    given, after, inner, columns = SHAPES[name]
    rows = sum(given) + after
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inner), dtype).at[sum(given) :].set(0)
    y = jax.random.normal(keys[1], (rows, columns), dtype).at[sum(given) :].set(0)
    matrices = jax.random.normal(keys[2], (len(given), inner, columns), dtype)
    sizes = jnp.array(given)

    def wide(x, matrices):
        with jax.default_matmul_precision("float32"):
            return grouped_matmul(*(a.astype(jnp.float32) for a in (x, matrices)), sizes)

    expected, back = jax.vjp(wide, x.astype(jnp.float32), matrices.astype(jnp.float32))
    to_x, to_matrices = back(y.astype(jnp.float32))
    got = multiply_groups(x, matrices, sizes)
    close(got, expected, dtype)
    close(multiply_groups(y, matrices, sizes, transposed=True), to_x, dtype)
    close(sum_outer_products(x, y, sizes), to_matrices, jnp.float32)


def test_the_kernels_agree_when_a_run_tries_them():
    moe = MoeSpec(experts=128, experts_per_token=8, ff_width=768)
    spec = dataclasses.replace(DENSE, hidden_size=2048, layers=1, moe=moe)
    layout = Layout(make_mesh({}, jax.devices("gpu")[:1]))
    choice = choose_grouped_kernels("triton", spec, layout, "bfloat16", device=this_device())
    assert choice.name == "triton", choice.reason
