"""Models, the engine and updates lower for CUDA from a CPU.

What only the lowered text shows is asserted of it. What is computed is tested elsewhere, and what
XLA's GPU compiler makes of it needs its plugin.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxrl_llm import kernel_choice
from jaxrl_llm.models import kernels
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.kernels import DeviceInfo
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import ROLLOUT_RULES, Layout, make_mesh
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.compile import StepId, StepKind, plan_role, plan_shapes
from jaxrl_llm.training.load_model import open_layouts
from tests.planning.stablehlo import GROUPED, SPECS, check, configure, lower, pretend, slow, spec_of


def test_the_reader_sees_what_may_not_be_in_a_program():
    narrow = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def wrong(x):
        wide = x.astype(jnp.float32)
        narrow_sum = jax.lax.reduce(x, jnp.bfloat16(0), jax.lax.add, [1])
        return 2 * x, (wide @ wide.T).sum() + narrow_sum

    program = lower(wrong.trace(narrow))
    assert program.products == [(("f32", (8, 16)), ("f32", (16, 8)), ("f32", (8, 8)))]
    assert ("bf16", 16) in program.sums
    assert program.donates == [True]
    assert program.donated == program.aliased == program.partitions == 1


@pytest.mark.parametrize("family", slow(SPECS, "Qwen3Moe"))
def test_families(family, tmp_path, monkeypatch):
    pretend(monkeypatch, (8, 0))  # where cuDNN's attention is not possible
    spec = spec_of(family)
    sizes = {"mesh__train__fsdp": 4, "mesh__train__tensor": 2}
    rollout = {"mesh__rollout__data": 4, "mesh__rollout__tensor": 2}
    keys = {"model__vision": "trained", "batch__max_visual_tokens_per_device": 16}
    shapes = plan_shapes(
        configure(tmp_path, spec, **sizes, **rollout, **(keys if spec.vision else {}))
    )
    for step, trace in shapes.trace.items():
        if step.role != "reference" and step.kind is not StepKind.APPLY:
            # of prefill's last layer only keys and values are kept
            layers = spec.layers - (step.kind is StepKind.PREFILL)
            grouped = GROUPED if spec.moe and layers > spec.moe.dense_layers else frozenset()
            check(trace(), spec, step.kind, calls=grouped)


@pytest.mark.parametrize("kv_cache_dtype", slow(["auto", "int8"], "auto"))
def test_the_engine_over_pages_in_place(kv_cache_dtype):
    spec = spec_of("Gemma2", head_dim=16)  # windows and soft-caps
    mesh = make_mesh({"data": 4, "tensor": 2})
    settings = EngineSettings(16, 256, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    layout = Layout(mesh, rules=ROLLOUT_RULES)
    engine = NativeEngine(Decoder(spec), settings, layout=layout, kernel=attend_pages)
    engine.close()
    keys = list(engine.programs._keys(8))
    assert {key[0] for key in keys} == {"pool", "copy", "prefill", "decode"}
    copy = lower(engine.programs.trace("copy", engine.programs.sizes.rows[-1]))
    decode = lower(engine.programs.trace("decode", *engine.programs.sizes.largest, True))
    assert (copy.calls, copy.donates) == (set(), [True, False, False])
    assert len(decode.calls) == 1  # Triton's, by a name that depends on jax's version
    assert decode.donates == [False, True, False, False, False, False]
    for program in (copy, decode):
        assert program.partitions == 8
        assert program.aliased == program.donated


MESHES = {  # and what is stored for the backward pass
    "one device": ({"fsdp": 1, "devices": 1}, "full"),
    "fsdp": ({"fsdp": 8}, "none"),
    "tensor": ({"data": 2, "fsdp": 1, "tensor": 4}, "full"),
    "context by heads": ({"fsdp": 2, "tensor": 2, "context": 2}, "dots"),
    "context by ring": ({"fsdp": 2, "context": 4}, "none"),
    "stage": ({"stage": 2, "data": 2, "fsdp": 2}, "full"),
    "expert, tensor": ({"expert": 2, "fsdp": 2, "tensor": 2}, "none"),
}


def mesh_keys(name):
    """Config keys of one of `MESHES`."""
    sizes, remat = MESHES[name]
    keys = {f"mesh__train__{axis}": size for axis, size in sizes.items()}
    return keys | {
        "model__remat": remat,
        "mesh__context_by": name.partition("context by ")[2] or "heads",
    }


def trace_actor(config, spec, kind):
    """Trace a step of the policy of a run, of which nothing else is planned."""
    functions, layout = resolve_functions(config), open_layouts(config.mesh).train
    return plan_role(config, functions, "actor", spec, layout)[1][StepId("actor", kind)]()


@pytest.mark.parametrize("name", slow(MESHES, "fsdp"))
def test_meshes(name, tmp_path):
    spec = spec_of("Qwen3Moe" if "expert" in name else "Qwen3")
    config = configure(tmp_path, spec, **mesh_keys(name))
    traced = trace_actor(config, spec, StepKind.ACCUMULATE)
    check(traced, spec, StepKind.ACCUMULATE, 1 if name == "one device" else 8)
    if name == "fsdp":
        check(trace_actor(config, spec, StepKind.APPLY), spec, StepKind.APPLY)


@pytest.fixture
def hopper(monkeypatch):
    """Stands in for what jax and the library look up on a machine, and for trying kernels."""
    device = DeviceInfo("cuda", (9, 0), kernels.LEAST_JAX)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 92800)
    monkeypatch.setattr(
        fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda c: c == "9.0"
    )
    pretend(monkeypatch, device.capability)
    monkeypatch.setattr(kernel_choice, "this_device", lambda: device)
    monkeypatch.setattr(kernels, "difference", lambda *_: 0.0)


FUSED = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
WITH_CUDNN = ("one device", "tensor", "context by heads", "expert, tensor")


@pytest.mark.parametrize("name", slow(WITH_CUDNN, "tensor"))
def test_attention_by_cudnn(name, tmp_path, hopper):
    spec = spec_of("Qwen3Moe" if "expert" in name else "Qwen3")
    config = configure(tmp_path, spec, model__attention="cudnn", **mesh_keys(name))
    devices = 1 if name == "one device" else 8
    update = trace_actor(config, spec, StepKind.ACCUMULATE)
    grouped = GROUPED if spec.moe else set()
    check(update, spec, StepKind.ACCUMULATE, devices, FUSED | grouped)
    infer = trace_actor(config, spec, StepKind.INFER)
    check(infer, spec, StepKind.INFER, devices, {"__cudnn$fmhaSoftmax"} | grouped)


def test_an_adapter(tmp_path):
    spec = spec_of(lora=LoraSpec(rank=4, alpha=8.0, targets=("query", "up")))
    config = configure(tmp_path, spec_of(), mesh__train__fsdp=8)
    for kind in (StepKind.ACCUMULATE, StepKind.INFER):
        check(trace_actor(config, spec, kind), spec, kind)
