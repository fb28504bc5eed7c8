"""The planner: what it says of a run is what the run's own programs and arrays say."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxrl_llm import plan as planner
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import make_config
from jaxrl_llm.models.kernels import cuda_device
from jaxrl_llm.planning import steps
from jaxrl_llm.planning.program import count_operations, replica_groups
from jaxrl_llm.planning.report import advise, scale_scratch
from jaxrl_llm.planning.steps import GPUS, analyze_step, memory_by_phase, workload
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.native.page_pool import PAGE
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.compile import (
    ENGINE,
    StepId,
    StepKind,
    bytes_per_device,
    plan_shapes,
    with_float16,
)
from jaxrl_llm.training.forward import pack_microbatches
from jaxrl_llm.training.load_model import open_layouts, open_model
from jaxrl_llm.training.roles import make_roles
from jaxrl_llm.types import Batch
from tests.guarded import MODEL, UPDATE
from tests.specs import DELTA
from tests.specs import DENSE as SMALL

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/planning/")

UPDATE_STEP, DECODE_STEP = StepId("actor", StepKind.ACCUMULATE), StepId(ENGINE, StepKind.DECODE)

DENSE = dataclasses.replace(SMALL, vocab_size=64, hidden_size=32, layers=3, head_dim=8, ff_width=48)
YAML = """
run_dir: runs/a
steps: 1
model: {path: PATH, random_init: true}
data: {train: t.parquet, max_prompt_tokens: 16}
rollout: {samples_per_prompt: 2, max_new_tokens: 16, max_running_sequences: 16}
batch: {prompts_per_step: 16, max_tokens_per_device: 512}
mesh: {train: {fsdp: 4, tensor: 2}, rollout: {data: 4, tensor: 2}}
"""
HYBRID = dataclasses.replace(DELTA, unit_offset_norms=True)


@pytest.fixture
def configure(tmp_path):
    def write(*overrides, spec=DENSE):
        (tmp_path / "config.json").write_text(json.dumps(make_config(spec)))
        write.path.write_text(YAML.replace("PATH", str(tmp_path)))
        return load(TrainConfig, write.path, overrides)

    write.path = tmp_path / "run.yaml"
    return write


def on_first_device(tree):
    first = jax.devices()[0]
    shards = (s for x in jax.tree.leaves(tree) for s in x.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device == first)


def test_what_a_policy_holds_to_be_its_own_teacher(configure):
    def weights(*words):
        overrides = "algorithm.advantage=reverse_kl", "model.dtype=bfloat16", *words
        held = {h.label: h.size for h in plan_shapes(configure(*overrides)).throughout}
        return held.get("teacher weights"), held["actor parameters"]

    average, actor = weights("teacher.weights=ema")
    assert average == actor  # float32 both
    first, _ = weights("teacher.weights=initial")
    assert actor / 2 < first < 0.6 * actor  # bfloat16, but for norms
    reference = "teacher.weights=initial", "algorithm.kl_loss=k3"
    assert weights(*reference) == (None, actor)
    assert weights(*reference, "reference.refresh_every=5")[0] == first  # it moves away


def test_the_plan_of_an_update_is_what_its_executable_says(configure):
    config = configure()
    shapes = plan_shapes(config)
    lowered = shapes.trace[UPDATE_STEP]().lower()
    planned = analyze_step(
        UPDATE_STEP, with_float16(lowered).compile(), workload(shapes, UPDATE_STEP), GPUS["H100"]
    )

    layouts = open_layouts(config.mesh)
    model = open_model(config.model, layouts.train, seed=0)
    learner = make_roles(config, resolve_functions(config), model, layouts)[0]["actor"].learner
    state = learner.init(model.params)
    held = {held.label: held.size for held in shapes.throughout}
    assert held["actor parameters"] == on_first_device(state.params)
    assert held["actor optimizer"] == on_first_device(state.opt_state)

    names = resolve_functions(config).updates["actor"].objective.asks_for()
    names |= {"mask", "weights", "token_weights"}
    ones = np.ones((16, 32), np.float32)
    batch = Batch(
        np.ones((16, 32), np.int32),
        np.full(16, 32),
        {name: ones > 0 if name == "mask" else ones for name in names},
    )
    mesh, shape = layouts.train.mesh, learner.shape
    _, micro = next(pack_microbatches(batch, names, shape, mesh))
    total = learner.zeros(state.params, {}, micro, {})
    own = learner.accumulate.lower(total, state.params, {}, micro, {}).compile().memory_analysis()
    assert planned.arguments == own.argument_size_in_bytes
    assert planned.scratch == own.temp_size_in_bytes
    assert planned.arguments == on_first_device((total, state.params, micro))
    assert memory_by_phase(shapes, {})[0].held["actor gradients"] == on_first_device(state.params)
    assert own.alias_size_in_bytes == on_first_device(total)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "spec"),
    [("auto", DENSE), ("int8", DENSE), ("auto", HYBRID)],
    ids=["auto", "int8", "states"],
)
def test_the_plan_of_the_engine_is_what_it_holds(configure, kv_cache_dtype, spec):
    config = configure(f"rollout.kv_cache_dtype={kv_cache_dtype}", spec=spec)
    shapes = plan_shapes(config)
    settings = EngineSettings(16, 32, kv_cache_dtype=kv_cache_dtype)
    engine = NativeEngine(Decoder(spec), settings, layout=shapes.layouts.rollout)
    weights, cache = engine.shapes()
    pool, (rows, width) = engine._runner._take_pool(), engine.programs.sizes.largest
    assert (rows, width) == (16, 32)
    slots = np.zeros(rows, np.int32) if pool.states else None
    table = engine.programs.page_table([None] * rows, width // PAGE)
    gathered = engine.programs.gather(rows, width // PAGE)(pool, table, slots)
    engine.close()
    assert shapes.cache == on_first_device((pool, gathered)) == bytes_per_device(cache)
    held = {held.label: held.size for held in shapes.throughout}
    assert held["engine weights"] == bytes_per_device(weights)


def test_a_plan_for_gpus_holds_pages_alone(configure):
    """What stands for the kernel on CPUs gathers less than a layer, and computes as much."""
    gpu, spec = cuda_device(GPUS["H100"].capability), dataclasses.replace(DENSE, head_dim=16)
    words = "rollout.max_running_sequences=64", "rollout.max_new_tokens=48"
    in_place = plan_shapes(configure(*words, spec=spec), None, gpu)
    gathered = plan_shapes(configure(*words, "model.attention=xla", spec=spec), None, gpu)
    pages = bytes_per_device(in_place.engine.pages)
    assert (in_place.gpu, in_place.cache) == (gpu, pages)
    assert bytes_per_device(gathered.engine.pages) == pages
    assert gathered.cache == pages + bytes_per_device(gathered.engine.rows) > 1.7 * pages
    assert gathered.engine.choice == ("xla", "XLA's attention was asked for", None)
    assert workload(in_place, DECODE_STEP) == workload(gathered, DECODE_STEP)
    for shapes in (in_place, gathered):
        compiled = shapes.trace[DECODE_STEP]().lower().compile()
        assert compiled.memory_analysis().alias_size_in_bytes == shapes.cache
        assert compiled.memory_analysis().temp_size_in_bytes < pages / 2
        flops = count_operations(compiled.as_text(), shapes.layouts.rollout.mesh.shape).flops
        assert flops == pytest.approx(workload(shapes, DECODE_STEP).flops / 8, rel=0.3)


def test_narrow_dtypes_take_less(configure):
    def held(label, *overrides):
        shapes = plan_shapes(configure("model.dtype=bfloat16", *overrides))
        return {held.label: held.size for held in shapes.throughout}[label]

    assert 0 < held("critic parameters", "algorithm.advantage=gae") < held("actor parameters")
    whole = held("engine weights")  # of which the embedding stays
    assert 0.5 * whole < held("engine weights", "rollout.quantization=fp8") < 0.67 * whole
    moments, counts = held("actor optimizer"), 8  # AdamW's and its schedule's
    less = held("actor optimizer", "optim.optimizer={fn: adamw, mu_dtype: bfloat16}")
    assert less - counts == (moments - counts) * 3 / 4


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_what_waits_on_the_host_is_counted_only_where_it_is_used(configure, offload):
    whole = memory_by_phase(plan_shapes(configure()), {})
    less = memory_by_phase(plan_shapes(configure(f"offload.{offload}=true")), {})
    saved = {a.step: a.total - b.total for a, b in zip(whole, less, strict=True)}
    kind = "actor parameters" if offload == "params" else "actor optimizer"
    assert saved[DECODE_STEP] == whole[0].held[kind]
    assert saved[UPDATE_STEP] == saved[StepId("actor", StepKind.APPLY)] == 0
    assert (saved[StepId("actor", StepKind.INFER)] > 0) == (offload == "optimizer")


def test_groups_over_a_part_of_a_named_axis():
    text = "replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}, x"
    assert replica_groups(text, 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert replica_groups("to_apply=%add", 3) == [[0, 1, 2]]


@pytest.mark.slow
def test_advice_is_a_config_that_fits(configure):
    shapes = plan_shapes(configure("mesh.train={data: 8, fsdp: 1}", "mesh.rollout={data: 8}"))
    scratch = {UPDATE_STEP: 1e5, DECODE_STEP: 1e4}
    before = max(p.total for p in memory_by_phase(shapes, scratch))

    def change(more):
        return configure("mesh.train={data: 8, fsdp: 1}", "mesh.rollout={data: 8}", *more)

    path = advise(shapes, scratch, before / 3, change)
    assert path[-1][1].total <= before / 3
    new = plan_shapes(change([c for changes, _ in path for c in changes]))
    again = max(p.total for p in memory_by_phase(new, scale_scratch(scratch, shapes, new)))
    assert again == path[-1][1].total
    assert advise(shapes, scratch, before, change) == []


def test_a_plan_in_words(configure, capsys, tmp_path, monkeypatch):
    configure()
    monkeypatch.setattr(planner, "simulate_devices", lambda devices: None)
    command = ["--config", str(tmp_path / "run.yaml"), "--devices", "8"]
    apart = ["mesh.train={fsdp: 2, tensor: 2, devices: 4}", "rollout.staleness=2"]
    apart += ["mesh.rollout={data: 2, tensor: 2, first_device: 4, devices: 4}"]
    assert planner.main([*command, "model.dtype=bfloat16", "algorithm.kl_loss=k3", *apart]) == 0
    text = capsys.readouterr().out
    for word in ("reference weights", "cache", "all-reduce", "rollout.staleness: 2: at most 96"):
        assert word in text, word
    assert planner.main([*command, "mesh.train.fsdp=3"]) == 2
    assert "mesh.train" in capsys.readouterr().err


def test_kernels_are_planned_where_they_compile(configure, tmp_path, monkeypatch):
    configure()
    planned = []
    monkeypatch.setattr(planner, "open_devices", lambda *_: None)
    monkeypatch.setattr(planner, "plan_run", lambda config, *_: planned.append(config.model) or "")
    command = ["--config", str(tmp_path / "run.yaml"), "--devices", "8", "model.experts=triton"]
    assert planner.main([*command, "model.attention=cudnn"]) == 0
    assert planner.main([*command, "--compile-for", "H200"]) == 0
    assert [model.experts for model in planned] == ["xla", "triton"]
    assert [model.attention for model in planned] == ["auto", "auto"]


def test_compiling_for_a_gpu_needs_the_plugin_and_whole_nodes(configure, capsys, monkeypatch):
    configure()
    monkeypatch.setattr(steps, "PLUGINS", ("jax_plugins.no_such_plugin",))
    command = ["--config", str(configure.path), "--compile-for", "H200", "--devices"]
    for words, expected in (
        (["8"], "jaxrl_llm[gpu-compiler]"),
        (["12"], "12"),
        (["8", "--gpu", "H100"], "--gpu"),
    ):
        with contextlib.suppress(SystemExit):
            assert planner.main([*command, *words]) == 2
        assert expected in capsys.readouterr().err
