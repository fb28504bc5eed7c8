"""Every family of models, and the engine, lowers for CUDA from a CPU.

What only the lowered text shows is asserted of it. What is computed is tested elsewhere, and what
XLA's GPU compiler makes of it needs its plugin.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import FAMILIES, make_config
from jaxrl_llm.models.moe.grouped_triton import TRITON
from jaxrl_llm.models.paged_triton import attend_pages
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import ROLLOUT_RULES, Layout, make_mesh
from jaxrl_llm.training.compile import ENGINE, StepId, StepKind, plan_shapes
from tests.planning.stablehlo import (
    DENSE,
    DONATES,
    GROUPED,
    SPECS,
    check,
    check_precision,
    configure,
    lower,
    pretend,
    spec_of,
)


def test_the_reader_sees_what_may_not_be_in_a_program():
    narrow = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def wrong(x):
        wide = x.astype(jnp.float32)
        narrow_sum = jax.lax.reduce(x, jnp.bfloat16(0), jax.lax.add, [1])
        return jnp.exp(jnp.log(x)), (wide @ wide.T).sum() + narrow_sum

    program = lower(wrong.trace(narrow))
    assert program.products == [(("f32", (8, 16)), ("f32", (16, 8)), ("f32", (8, 8)))]
    assert program.widened >= {(8, 16)}
    assert program.logarithms == program.exponentials == {("bf16", (8, 16))}
    assert ("bf16", 16) in program.sums
    assert program.donates == [True]
    assert program.donated == program.aliased == program.partitions == 1


def test_it_is_cuda_that_programs_are_lowered_for():
    like = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    factor = jax.jit(jnp.linalg.cholesky).trace(like)
    assert lower(factor).calls == {"cusolver_potrf_ffi"}
    assert lower(factor, "cpu").calls == {"lapack_spotrf_ffi"}
    unlike = jax.jit(lambda x: jax.lax.platform_dependent(x, cpu=jnp.exp, cuda=jnp.log))
    assert lower(unlike.trace(like)).logarithms
    tell = jax.jit(lambda x: jax.pure_callback(abs, like, x))
    with pytest.raises(ValueError, match="platform"):  # Python is called by each platform apart
        lower(tell.trace(like))


def test_every_family_of_models_is_here():
    made = {name: make_config(spec_of(name))["architectures"] for name in SPECS}
    expected = {
        family.name: [f"{family.name}{'ForConditionalGeneration' if sees else 'ForCausalLM'}"]
        for family in reversed(FAMILIES)
        for sees in [family.language_class != "ForCausalLM"]
    }
    expected["Gemma3 with images"] = ["Gemma3ForConditionalGeneration"]
    del expected["Glm4MoeLite"]  # the same models as DeepseekV3
    assert made == expected


@pytest.mark.parametrize("family", SPECS)
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


@pytest.mark.parametrize("family", ["Gemma2", "DeepseekV3"])
def test_the_engine_with_every_bucket(family):
    spec = spec_of(family)
    mesh = make_mesh({"data": 4, "tensor": 2})
    settings = EngineSettings(max_running_sequences=16, max_tokens=256, dtype="bfloat16")
    layout = Layout(mesh, rules=ROLLOUT_RULES, grouped_kernels=TRITON)
    engine = NativeEngine(Decoder(spec), settings, layout=layout)
    engine.close()
    keys = list(engine.programs._keys(8))
    assert {key[0] for key in keys} == {"pool", "gather", "prefill", "decode"}
    assert len({key[1:3] for key in keys if key[0] == "decode"}) > 2
    with_extras = ("decode", *engine.programs.sizes.largest, True)
    programs = {key: lower(engine.programs.trace(*key)) for key in [*keys, with_extras]}
    for (name, *_), program in programs.items():
        multiplies = name in ("prefill", "decode")
        assert program.calls <= (GROUPED if spec.moe and multiplies else set())
        assert program.partitions == 8
        assert program.aliased == program.donated
        if multiplies:
            assert program.donates == DONATES[StepKind(name)]
            check_precision(program, spec, StepKind(name))
        else:
            assert program.donated == 0
            assert not program.products


def test_an_engine_on_one_device(tmp_path):
    sizes = {"mesh__train__devices": 1, "mesh__rollout__devices": 1}
    shapes = plan_shapes(configure(tmp_path, DENSE, model__dtype="float32", **sizes))
    for kind in (StepKind.PREFILL, StepKind.DECODE):
        program = lower(shapes.trace[StepId(ENGINE, kind)]())
        assert program.partitions == 1
        assert {dtype for product in program.products for dtype, _ in product} == {"f32"}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
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


def test_the_engine_with_images():
    spec = spec_of("Qwen3VL")
    settings = EngineSettings(max_running_sequences=16, max_tokens=256, dtype="bfloat16")
    layout = Layout(make_mesh({"data": 4, "tensor": 2}), rules=ROLLOUT_RULES)
    engine = NativeEngine(Decoder(spec), settings, layout=layout)
    engine.close()
    keys = [key for key in engine.programs._keys(8) if key[0] in ("features", "encode")]
    assert keys == [("features",), ("encode", 256, 256), ("encode", 1024, 1024)]
    features = lower(engine.programs.trace("features"))
    encode = lower(engine.programs.trace(*keys[1]))
    prefill, decode = (lower(engine.trace(name)) for name in ("prefill", "decode"))
    assert encode.donates == [False, True, False, False]
    assert prefill.donates == [False, True, False, False]
    for program in (features, encode, prefill, decode):
        assert program.calls == set()
        assert program.partitions == 8
        assert program.aliased == program.donated
    assert encode.donated == 2  # the features and those of DeepStack
    for step in (StepKind.PREFILL, StepKind.DECODE):
        check_precision(prefill if step is StepKind.PREFILL else decode, spec, step)
