"""Products of experts in programs for GPUs: no GPU is needed, but jax's CUDA plugin."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.moe.grouped_triton import TRITON, multiply_groups, sum_outer_products
from jaxrl_llm.models.moe.mixture import FURTHER_ROUNDS, mixture
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.planning.program import count_operations, list_loops
from jaxrl_llm.planning.steps import gpu_devices
from jaxrl_llm.sharding.layout import TOKENS, Layout, make_mesh
from jaxrl_llm.training.compile import ENGINE, StepId, StepKind, plan_shapes
from tests.guarded import MODEL, PLANNING
from tests.planning.stablehlo import GROUPED, OPTIONS, configure, lower, spec_of

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.guards(*MODEL, *PLANNING),
]

SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
SPEC = MoeSpec(experts=16, experts_per_token=2, ff_width=256)
SIZES = {"expert": 2, "fsdp": 4}
WIDTH, ROWS, LENGTH = 128, 8, 512
MATRICES = SPEC.experts // SIZES["expert"] * WIDTH * SPEC.ff_width
"""Numbers in one matrix of each of a device's experts."""


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(40960, 4096, 1536), (320, 4096, 384), (4096, 7168, 16), (1000, 24, 40)],
)
def test_kernels_compile_and_keep_their_numbers_in_registers(gpu, rows, inner, columns):
    layout = Layout(make_mesh({}, gpu_devices(gpu, 1)))

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.sharding())

    x, y, matrices = shape(rows, inner), shape(rows, columns), shape(16, inner, columns)
    swapped, sizes = shape(inner, 16, columns), shape(16, dtype=jnp.int32)
    partial = functools.partial
    given = (
        (multiply_groups, x, matrices),
        (partial(multiply_groups, transposed=True), y, matrices),
        (partial(multiply_groups, between=True), x, swapped),
        (partial(multiply_groups, between=True, transposed=True), y, swapped),
        (sum_outer_products, x, y),
        (partial(sum_outer_products, between=True), x, y),
    )
    for function, *arrays in given:
        with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):  # Pallas asks it
            lowered = jax.jit(function).lower(*arrays, sizes)
        compiled = lowered.compile(compiler_options=OPTIONS | SPILLS)
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 64 * 1024, "something was copied"


@pytest.mark.parametrize(("asked", "taken"), [("auto", TRITON), ("xla", None)])
def test_kernels_are_planned_untried(asked, taken, tmp_path):
    config = configure(tmp_path, spec_of("Qwen3Moe"), model__experts=asked, mesh__train__fsdp=8)
    shapes = plan_shapes(config, gpu_devices("H200", 8))
    assert shapes.roles["actor"].settings.grouped_kernels == taken
    program = lower(shapes.trace[StepId(ENGINE, StepKind.DECODE)]())
    assert program.calls == (GROUPED if taken else set())


@pytest.fixture(scope="module")
def update():
    """A mixture's value and gradient, and what is counted in its program for eight H200."""
    mesh = make_mesh(SIZES, gpu_devices("H200", 8))
    shapes = {
        "router": ((WIDTH, SPEC.experts), jax.P()),
        "expert_gate": ((SPEC.experts, WIDTH, SPEC.ff_width), jax.P("expert", "fsdp")),
        "expert_up": ((SPEC.experts, WIDTH, SPEC.ff_width), jax.P("expert", "fsdp")),
        "expert_down": ((SPEC.experts, SPEC.ff_width, WIDTH), jax.P("expert", None, "fsdp")),
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
        out, *_ = mixture(weights, SPEC, x, real, layout=layout)
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


def test_matrices_are_not_copied_for_blocks_of_rows(update):
    for line in update.splitlines():
        for shape in re.findall(r"(?:bf16|f32)\[(\d+),(\d+),(\d+)\]", line.partition("=")[2][:200]):
            widths = {int(n) for n in shape[1:]} if len(shape) == 3 else set()
            if widths == {WIDTH, SPEC.ff_width}:
                assert int(shape[0]) <= SPEC.experts // SIZES["expert"], line[:200]


def test_a_loop_runs_only_the_rounds_that_are_needed(update):
    loops = [loop for loop in list_loops(update, SIZES) if FURTHER_ROUNDS in loop.source]
    assert [loop.trips for loop in loops] == [None, None]  # forward and backward


def test_the_flops_are_those_of_the_rows_that_fit_into_a_round(update):
    tokens = ROWS * LENGTH // 8
    rows = 1.25 * tokens * SPEC.experts_per_token
    products = 3 * 4  # forward, again in the backward pass, and two for gradients
    router = 2 * tokens * WIDTH * SPEC.experts * 4
    flops = count_operations(update, SIZES).flops
    assert flops == pytest.approx(2 * rows * WIDTH * SPEC.ff_width * products + router, rel=0.05)
