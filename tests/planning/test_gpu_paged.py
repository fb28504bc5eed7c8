"""What XLA's compiler for GPUs makes of attention over pages: no GPU needed, but jax's plugin."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import Attending, LayerCache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.planning.program import parse_program
from jaxrl_llm.planning.steps import gpu_devices
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import ROLLOUT_RULES, Layout, make_mesh
from tests.guarded import MODEL, NATIVE
from tests.planning.stablehlo import OPTIONS
from tests.specs import tiny_spec

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.guards(*MODEL, *NATIVE),
]

NO_SPILLS = {**OPTIONS, "xla_gpu_fail_ptx_compilation_on_register_spilling": True}
LAYERS = 3
SPEC = tiny_spec(
    vocab_size=512, hidden_size=256, layers=LAYERS, heads=8, kv_heads=4, head_dim=64, ff_width=512
)


HEADS = {  # queries, keys, width, dtype, options
    "Qwen3-1.7B": (16, 8, 128, "bfloat16", Attending()),
    "Qwen3-235B": (64, 4, 128, "bfloat16", Attending()),
    "a width of two parts": (32, 32, 80, "bfloat16", Attending()),
    "Gemma 2": (16, 8, 256, "bfloat16", Attending(256**-0.5, 4096, 50.0)),
    "groups of seven": (28, 4, 64, "bfloat16", Attending()),
    "gpt-oss": (64, 8, 64, "bfloat16", Attending(window=128, sinks=np.zeros(64, np.float32))),
    "float32": (16, 8, 128, "float32", Attending()),
}


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("case", HEADS.values(), ids=HEADS.keys())
def test_no_register_is_spilled(case, is_int8):
    heads, kv_heads, width, dtype, options = case
    page, pages = (512, kv_heads, width, 16), (512, kv_heads, 16, width)
    compile_kernel((64, heads, width), page, pages, dtype, options, is_int8=is_int8)


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_no_register_is_spilled_over_latents(heads, is_int8):
    page, options = (512, 1, 576, 16), Attending(0.07)
    compile_kernel((64, heads, 576), page, None, "bfloat16", options, 512, is_int8=is_int8)


def compile_kernel(q, keys, values, dtype, options, value_width=None, *, is_int8=False):
    """Compile it for sequences of 128 pages; too much shared memory is an error, too."""
    layout = Layout(make_mesh({}, gpu_devices("H200", 1)))

    def shape(sizes, dtype=dtype):
        return sizes and jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.sharding())

    def run(q, pages, table, positions):
        return attend_pages(q, pages, table, positions, options, value_width=value_width)

    of_pages, table = jnp.int8 if is_int8 else dtype, shape((q[0], 128), jnp.int32)
    pages = LayerCache(shape(keys, of_pages), shape(values, of_pages))
    if is_int8:
        pages = pages._replace(
            key_scales=shape((*keys[:2], 1 if values else 2, keys[3])),
            value_scales=values and shape((*values[:3], 1)),
        )
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):  # Pallas asks it for the GPU
        lowered = jax.jit(run).lower(shape(q), pages, table, shape(q[:1], jnp.int32))
    text = lowered.compile(compiler_options=NO_SPILLS).as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("devices", "axes"), [(1, {}), (8, {"data": 4, "tensor": 2})])
def test_decoding_holds_the_cache_once(devices, axes, kv_cache_dtype):
    layout = Layout(make_mesh(axes, gpu_devices("H200", devices)), rules=ROLLOUT_RULES)
    settings = EngineSettings(64 * devices, 2048, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    engine = NativeEngine(Decoder(SPEC), settings, layout=layout, kernel=attend_pages)
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
    kernels = [line for line in lines if "xla.gpu.triton" in line.rest]
    assert len(kernels) == LAYERS
    assert [x.type for x in lines if x.operation == "copy" and x.size >= sizes[0]] == []
