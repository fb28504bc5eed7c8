"""Parts of a model in programs for GPUs: no GPU is needed, but jax's CUDA plugin."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import Attending, LayerCache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.delta import gated_delta_rule
from jaxrl_llm.models.moe.grouped_triton import TRITON, multiply_groups, sum_outer_products
from jaxrl_llm.models.moe.mixture import FURTHER_ROUNDS, mixture
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.planning.program import count_operations, list_loops, parse_program
from jaxrl_llm.planning.steps import gpu_devices
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import ROLLOUT_RULES, TOKENS, Layout, make_mesh
from jaxrl_llm.training.compile import ENGINE, StepId, StepKind, plan_shapes
from tests.guarded import MODEL, NATIVE, PLANNING
from tests.planning.stablehlo import OPTIONS, configure
from tests.specs import DENSE, tiny_spec

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.guards(*MODEL, *NATIVE, *PLANNING),
]

NO_SPILLS = {**OPTIONS, "xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def layout_on(gpu="H200", devices=1, axes=None, **options):
    return Layout(make_mesh(axes or {}, gpu_devices(gpu, devices)), **options)


def shape(*sizes, dtype=jnp.float32, layout):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.sharding())


def compile_alone(function, layout, *arguments):
    """Compile a kernel of Pallas; it asks the mesh for the GPU. A spill is an error."""
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(compiler_options=NO_SPILLS)


# ------------------------------------------------------------------------- the gated delta rule

KEY_HEADS, VALUE_HEADS, DELTA_WIDTH = 16, 32, 128  # of Qwen3.5-4B
FLOAT = 4  # bytes


def delta_tokens(layout, rows, length):
    one = functools.partial(shape, rows, length, layout=layout)
    keys = one(KEY_HEADS, DELTA_WIDTH, dtype=jnp.bfloat16)
    values = one(VALUE_HEADS, DELTA_WIDTH, dtype=jnp.bfloat16)
    return keys, keys, values, one(VALUE_HEADS), one(VALUE_HEADS), one(dtype=jnp.int32)


def test_gradients_of_the_delta_rule_need_little_memory_and_no_product_rounds():
    def total(q, k, v, log_decay, beta, segment_ids):
        return (gated_delta_rule(q, k, v, log_decay, beta, segment_ids)[0] ** 2).sum()

    length, layout = 4096, layout_on()
    lowered = jax.jit(jax.grad(total, argnums=range(5))).lower(*delta_tokens(layout, 1, length))
    compiled = lowered.compile(compiler_options=OPTIONS)
    numbers = compiled.memory_analysis().temp_size_in_bytes / FLOAT
    assert numbers / length / VALUE_HEADS < 6 * DELTA_WIDTH  # a memory has 128 · 128
    precisions = re.findall(r'"operand_precision":\[([^]]*)\]', compiled.as_text())
    assert set(precisions) == {'"HIGHEST","HIGHEST"'}  # else TF32


def test_decoding_by_the_delta_rule_changes_memories_in_place():
    slots, layout = 64, layout_on()
    memories = shape(slots, VALUE_HEADS, DELTA_WIDTH, DELTA_WIDTH, layout=layout)
    tokens = delta_tokens(layout, slots, 1)
    run = jax.jit(gated_delta_rule, donate_argnums=6).lower(*tokens, memories)
    sizes = run.compile(compiler_options=OPTIONS).memory_analysis()
    held = slots * VALUE_HEADS * DELTA_WIDTH**2 * FLOAT
    assert sizes.alias_size_in_bytes == held
    assert sizes.temp_size_in_bytes < held / 50


# ------------------------------------------------------------------------------ products of float8

LAYERS = 2
FP8_SPEC = dataclasses.replace(
    DENSE,
    **dict(vocab_size=8192, hidden_size=256, layers=LAYERS, heads=8, kv_heads=8, head_dim=64),
    **dict(ff_width=768, tied_embeddings=True, max_positions=512),
)
FP8_RUN = {
    "model__attention": "xla",
    "data__max_prompt_tokens": 128,
    "rollout__max_new_tokens": 128,
    "rollout__max_running_sequences": 64,
    "rollout__quantization": "fp8",
    "batch__max_tokens_per_device": 1024,
    "mesh__rollout__data": 1,
    "mesh__rollout__tensor": -1,
}
CALL = re.compile(r' = \(?(\w+)\[([\d,]*)\].*custom_call_target="(__cublas\$[^"]+)"')


@pytest.mark.parametrize(
    ("kind", "devices"), [(StepKind.DECODE, 1), (StepKind.DECODE, 2), (StepKind.PREFILL, 2)]
)
def test_layers_multiply_by_the_float8_tensor_cores(tmp_path, kind, devices):
    """Each matrix by itself, or query, key and value, or gate and up, merged by XLA into one."""
    shapes = plan_shapes(configure(tmp_path, FP8_SPEC, **FP8_RUN), gpu_devices("H200", devices))
    lowered = shapes.trace[StepId(ENGINE, kind)]().lower()
    text = lowered.compile(compiler_options=OPTIONS).as_text()
    products = [(target, dtype, shape) for dtype, shape, target in CALL.findall(text)]
    quantized = [p for p in products if p[0].endswith("$f8")]
    unused = 3 * (kind is StepKind.PREFILL)  # of the last layer only keys and values are kept
    assert LAYERS * 4 - unused <= len(quantized) <= LAYERS * 7
    # no matrix of a layer is multiplied otherwise, nor is one turned around or widened
    widths = {256, 512 // devices, 768 // devices, 1536 // devices, 2 * 768 // devices}
    others = [shape.split(",") for target, _, shape in products if not target.endswith("$f8")]
    assert not [shape for shape in others if len(shape) == 2 and int(shape[1]) in widths]
    assert not re.findall(r"f8e4m3fn\[\d+(?:,\d+){1,2}\]\S* transpose\(", text)
    matrix = rf"\[{768 // devices},256\]|\[256,{768 // devices}\]"
    assert not re.findall(rf"= (?:bf16|f16|f32)(?:{matrix})", text)
    assert re.search(rf"f8e4m3fn(?:{matrix})", text)


# ----------------------------------------------------------------------------- products of experts

EXPERTS = MoeSpec(experts=16, experts_per_token=2, ff_width=256)
SIZES = {"expert": 2, "fsdp": 4}
WIDTH, ROWS, LENGTH = 128, 8, 512
MATRICES = EXPERTS.experts // SIZES["expert"] * WIDTH * EXPERTS.ff_width
"""Numbers in one matrix of each of a device's experts."""


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(40960, 4096, 1536), (320, 4096, 384), (1000, 24, 40)]
)
def test_kernels_of_experts_keep_their_numbers_in_registers(gpu, rows, inner, columns):
    layout, partial = layout_on(gpu), functools.partial
    one = partial(shape, dtype=jnp.bfloat16, layout=layout)
    x, y, matrices, swapped = (
        one(*sizes)
        for sizes in ((rows, inner), (rows, columns), (16, inner, columns), (inner, 16, columns))
    )
    for function, *arrays in (
        (multiply_groups, x, matrices),
        (partial(multiply_groups, transposed=True), y, matrices),
        (partial(multiply_groups, between=True), x, swapped),
        (partial(multiply_groups, between=True, transposed=True), y, swapped),
        (sum_outer_products, x, y),
        (partial(sum_outer_products, between=True), x, y),
    ):
        sizes = shape(16, dtype=jnp.int32, layout=layout)
        memory = compile_alone(function, layout, *arrays, sizes).memory_analysis()
        assert memory.temp_size_in_bytes < 64 * 1024, "something was copied"


@pytest.fixture(scope="module")
def update():
    """A mixture's value and gradient, and what is counted in its program for eight H200."""
    mesh, width = make_mesh(SIZES, gpu_devices("H200", 8)), EXPERTS.ff_width
    shapes = {
        "router": ((WIDTH, EXPERTS.experts), jax.P()),
        "expert_gate": ((EXPERTS.experts, WIDTH, width), jax.P("expert", "fsdp")),
        "expert_up": ((EXPERTS.experts, WIDTH, width), jax.P("expert", "fsdp")),
        "expert_down": ((EXPERTS.experts, width, WIDTH), jax.P("expert", None, "fsdp")),
    }
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()
    }
    split = jax.NamedSharding(mesh, jax.P(TOKENS))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.bfloat16, sharding=split)

    def loss(weights, x):
        real = jnp.ones(x.shape[:2], bool)
        layout = Layout(mesh, grouped_kernels=TRITON)
        out, *_ = mixture(weights, EXPERTS, x, real, layout=layout)
        return (out.astype(jnp.float32) ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return run.lower(weights, x).compile(compiler_options=OPTIONS).as_text()


def test_experts_are_gathered_in_bfloat16_and_their_gradients_scattered_in_float32(update):
    sent = {}
    for over, size in count_operations(update, SIZES).sent.items():
        sent[over.kind] = sent.get(over.kind, 0) + size
    numbers = 3 * MATRICES * (SIZES["fsdp"] - 1) / SIZES["fsdp"]
    assert sent["all-gather"] == pytest.approx(2 * 2 * numbers, rel=0.02)
    assert sent["reduce-scatter"] == pytest.approx(4 * numbers, rel=0.02)
    assert sent.get("all-reduce", 0) < numbers / 10
    scattered = re.findall(r"= \(?\(?(\w+)\[[^=]* reduce-scatter(?:-start)?\(", update)
    assert set(scattered) == {"f32"}


def test_experts_loop_over_rounds_after_the_first(update):
    loops = [loop for loop in list_loops(update, SIZES) if FURTHER_ROUNDS in loop.source]
    assert [loop.trips for loop in loops] == [None, None]  # forward and backward


# --------------------------------------------------------------------------- attention over pages

HEADS = {  # queries, keys, width, width of values where keys are these, dtype, options
    "Qwen3-1.7B": (16, 8, 128, None, "bfloat16", Attending()),
    "a width of two parts": (32, 32, 80, None, "bfloat16", Attending()),
    "Gemma 2": (16, 8, 256, None, "bfloat16", Attending(256**-0.5, 4096, 50.0)),
    "groups of seven": (28, 4, 64, None, "bfloat16", Attending()),
    "gpt-oss": (64, 8, 64, None, "bfloat16", Attending(window=128, sinks=np.zeros(64, "f4"))),
    "float32": (16, 8, 128, None, "float32", Attending()),
    "latents": (16, 1, 576, 512, "bfloat16", Attending(0.07)),
    "latents of many heads": (128, 1, 576, 512, "bfloat16", Attending(0.07)),
}


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("name", HEADS)
def test_attention_over_pages_spills_no_register(name, is_int8):
    """Of sequences of 128 pages; too much shared memory is an error, too."""
    heads, kv_heads, width, value_width, dtype, options = HEADS[name]
    one = functools.partial(shape, dtype=dtype, layout=(layout := layout_on()))
    page, values = (512, kv_heads, width, 16), (512, kv_heads, 16, width)
    values = None if value_width else values

    def run(q, pages, table, positions):
        return attend_pages(q, pages, table, positions, options, value_width=value_width)

    of_pages = {"dtype": jnp.int8 if is_int8 else dtype}
    pages = LayerCache(one(*page, **of_pages), values and one(*values, **of_pages))
    if is_int8:
        pages = pages._replace(
            key_scales=one(*page[:2], 1 if values else 2, page[3]),
            value_scales=values and one(*values[:3], 1),
        )
    table, positions = one(64, 128, dtype=jnp.int32), one(64, dtype=jnp.int32)
    text = compile_alone(run, layout, one(64, heads, width), pages, table, positions).as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("devices", "axes"), [(1, {}), (8, {"data": 4, "tensor": 2})])
def test_decoding_holds_the_cache_once(devices, axes, kv_cache_dtype):
    widths = dict(vocab_size=512, hidden_size=256, heads=8, kv_heads=4, head_dim=64, ff_width=512)
    settings = EngineSettings(64 * devices, 2048, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    engine = NativeEngine(
        Decoder(tiny_spec(layers=3, **widths)),
        settings,
        layout=layout_on("H200", devices, axes, rules=ROLLOUT_RULES),
        kernel=attend_pages,
    )
    engine.close()
    _, (pool,) = engine.shapes()
    compiled = engine.trace("decode").lower().compile(compiler_options=OPTIONS)
    sizes = [
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(pool)
    ]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(sizes)
    keys = pool.keys[0]
    in_bfloat16 = 2 * math.prod(keys.sharding.shard_shape(keys.shape))
    assert memory.temp_size_in_bytes < in_bfloat16  # no layer is gathered; cuBLAS has half of it
    program = parse_program(compiled.as_text())
    lines = [line for block in program.computations.values() for line in block.values()]
    assert sum("xla.gpu.triton" in line.rest for line in lines) == 3
    assert [x.type for x in lines if x.operation == "copy" and x.size >= sizes[0]] == []
