"""Every update lowers for CUDA from a CPU: of each recipe, on each mesh, with each attention."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxrl_llm import kernel_choice
from jaxrl_llm.algorithms.losses import negative_log_likelihood
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.models import kernels
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.kernels import DeviceInfo
from jaxrl_llm.models.lora import split_adapter
from jaxrl_llm.models.spec import LoraSpec
from jaxrl_llm.sharding.layout import Layout, make_mesh, replicated
from jaxrl_llm.training import load_model
from jaxrl_llm.training.bind import abstract_fields, resolve_functions
from jaxrl_llm.training.buffer import merge_for_engine
from jaxrl_llm.training.compile import (
    StepId,
    StepKind,
    abstract_params,
    plan_role,
    plan_shapes,
    role_spec,
)
from jaxrl_llm.training.experience import advantage_step, correction_step
from jaxrl_llm.training.forward import balance_pass
from jaxrl_llm.training.load_model import open_layouts
from jaxrl_llm.training.reward_model import score_pass
from jaxrl_llm.training.roles import abstract_microbatch, row_shapes
from jaxrl_llm.training.update import Learner, PolicyObjective, shape_in
from tests.planning.stablehlo import DENSE, GROUPED, check, configure, lower, pretend, spec_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))


@pytest.fixture
def jitted(monkeypatch):
    """What the library gives to `jax.jit` meanwhile, jitted."""
    functions, jit = [], jax.jit

    def record(function=None, **options):
        if function is None:
            return functools.partial(record, **options)
        functions.append(jit(function, **options))
        return functions[-1]

    monkeypatch.setattr(jax, "jit", record)
    return functions


@pytest.fixture(scope="module")
def lowered():
    """Objectives whose update has been lowered."""
    return set()


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_updates_of_recipes(path, tmp_path, jitted, lowered):
    config = configure(tmp_path, DENSE, path, mesh__train__fsdp=8)
    functions = resolve_functions(config)
    jitted.clear()
    advantage_step(functions.advantage, with_returns="critic" in functions.updates)
    correction_step(functions.corrections)
    fields = abstract_fields(8, 4, 1, 1)
    for compute in jitted:
        assert not lower(compute.trace(fields)).calls

    layout = open_layouts(config.mesh).train
    for name, update in functions.updates.items():
        if repr(update.objective) in lowered:  # of another recipe, whose program is the same
            continue
        lowered.add(repr(update.objective))
        spec = DENSE if name == "actor" else role_spec(config, name, DENSE)
        steps = plan_role(config, functions, name, spec, layout)[1]
        for kind in (StepKind.ACCUMULATE, StepKind.APPLY):
            check(steps[StepId(name, kind)](), spec, kind)


def test_an_update_on_pairs_of_answers(tmp_path):
    path = ROOT / "configs/quickstart_online_dpo.yaml"
    config = configure(tmp_path, DENSE, path, mesh__train__fsdp=8)
    check(trace_actor(config, DENSE, StepKind.ACCUMULATE), DENSE, StepKind.ACCUMULATE)


MESHES = {
    "one device": {"fsdp": 1, "devices": 1},
    "data": {"data": 8, "fsdp": 1},
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 2, "fsdp": 1, "tensor": 4},
    "context by heads": {"fsdp": 2, "context": 4},
    "context by keys": {"fsdp": 2, "context": 4},
    "context by ring": {"fsdp": 2, "context": 4},
    "stage": {"stage": 2, "data": 2, "fsdp": 2},
    "expert": {"expert": 2, "fsdp": 4},
    "expert, tensor": {"expert": 2, "fsdp": 2, "tensor": 2},
    "fsdp, tensor, context": {"fsdp": 2, "tensor": 2, "context": 2},
}
REMAT = dict(zip(MESHES, itertools.cycle(("full", "dots", "none"))))


def mesh_keys(name, role="train"):
    """Config keys of one of `MESHES`."""
    keys = {f"mesh__{role}__{axis}": size for axis, size in MESHES[name].items()}
    return keys | {"mesh__context_by": name.partition("context by ")[2] or "heads"}


def trace_actor(config, spec, kind):
    """Trace a step of the policy of a run, of which nothing else is planned."""
    functions, layout = resolve_functions(config), open_layouts(config.mesh).train
    return plan_role(config, functions, "actor", spec, layout)[1][StepId("actor", kind)]()


@pytest.mark.parametrize(
    "name", [name for name in MESHES if name not in ("tensor", "expert, tensor")]
)
def test_meshes(name, tmp_path):
    spec = spec_of("Qwen3Moe" if "expert" in name else "Qwen3")
    config = configure(tmp_path, spec, model__remat=REMAT[name], **mesh_keys(name))
    traced = trace_actor(config, spec, StepKind.ACCUMULATE)
    check(traced, spec, StepKind.ACCUMULATE, 1 if name == "one device" else 8)


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
WITH_CUDNN = ("one device", "fsdp", "tensor", "context by heads", "expert, tensor")


@pytest.mark.parametrize("name", WITH_CUDNN)
def test_attention_by_cudnn(name, tmp_path, hopper):
    spec = spec_of("Qwen3Moe" if "expert" in name else "Qwen3")
    config = configure(tmp_path, spec, model__attention="cudnn", **mesh_keys(name))
    devices = 1 if name == "one device" else 8
    update = trace_actor(config, spec, StepKind.ACCUMULATE)
    grouped = GROUPED if spec.moe else set()
    check(update, spec, StepKind.ACCUMULATE, devices, FUSED | grouped)
    infer = trace_actor(config, spec, StepKind.INFER)
    check(infer, spec, StepKind.INFER, devices, {"__cudnn$fmhaSoftmax"} | grouped)


def test_models_on_meshes_of_their_own(tmp_path):
    apart = {"critic": (0, 4), "reference": (4, 4)}
    keys = {f"mesh__{role}__first_device": first for role, (first, _) in apart.items()}
    keys |= {f"mesh__{role}__devices": count for role, (_, count) in apart.items()}
    keys |= {"algorithm__advantage": "gae", "critic__loss": "clipped_value_loss"}
    shapes = plan_shapes(configure(tmp_path, spec_of("Llama"), **keys))
    for role in apart:
        infer = shapes.trace[StepId(role, StepKind.INFER)]()
        check(infer, shapes.roles[role].spec, StepKind.INFER, 4)
    update = shapes.trace[StepId("critic", StepKind.ACCUMULATE)]()
    check(update, shapes.roles["critic"].spec, StepKind.ACCUMULATE, 4)


def test_an_adapter(tmp_path):
    spec = spec_of(lora=LoraSpec(rank=4, alpha=8.0, targets=("query", "up")))
    config = configure(tmp_path, spec_of(), mesh__train__fsdp=8)
    for kind in (StepKind.ACCUMULATE, StepKind.APPLY, StepKind.INFER):
        check(trace_actor(config, spec, kind), spec, kind)


def test_passes_and_updates_that_no_plan_has(tmp_path, jitted):
    spec = spec_of("Qwen3Moe", tied_embeddings=False)
    scorer = dataclasses.replace(spec, reward_head=True)
    config = configure(tmp_path, spec, model__router_loss_coef=0.1)
    layout = open_layouts(config.mesh).train
    settings = load_model.forward_config(config.model, Decoder(spec), layout)
    shape = row_shapes(config, settings, layout)[0]
    settings = settings.over(shape)
    micro = abstract_microbatch({"mask"}, config, shape, layout.mesh)
    params, everywhere = abstract_params(spec, layout), replicated(layout.mesh)

    jitted.clear()
    learner = Learner(
        PolicyObjective(loss=negative_log_likelihood),
        settings,
        optax.adam(1e-3),
        reduce=token_mean,
        shape=shape,
        mesh=layout.mesh,
        params_like=params,
    )
    balance_pass(settings, shape, layout.mesh, {})
    count, weigh = jitted
    check(count.trace(params, {}, micro.rows), spec, StepKind.INFER)
    totals = jax.eval_shape(count, params, {}, micro.rows)
    coefs = {"balance_weights": jax.eval_shape(weigh, totals)}
    assert not lower(weigh.trace(totals)).calls
    metrics = jax.eval_shape(learner.zeros, params, {}, micro, coefs)[1]
    metrics = jax.tree.map(lambda x: shape_in(x, everywhere), metrics)
    update = learner.accumulate.trace((params, metrics), params, {}, micro, coefs)
    check(update, spec, StepKind.ACCUMULATE)

    jitted.clear()
    score_pass(settings, shape, layout)
    weights = abstract_params(scorer, layout, "bfloat16")
    check(jitted[0].trace(weights, {}, micro.rows), scorer, StepKind.INFER)


def test_an_adapter_is_merged_for_the_engine(jitted):
    layout = Layout(make_mesh({"fsdp": 8}))
    spec = spec_of(lora=LoraSpec(rank=4, alpha=8.0, targets=("query", "up")))
    adapter, _ = split_adapter(abstract_params(spec, layout))
    frozen = abstract_params(spec_of(), layout, "bfloat16")
    merge_for_engine(load_model.LoadedModel(Decoder(spec), adapter, adapter, frozen), "bfloat16")
    program = lower(jitted[0].trace(adapter, frozen))
    assert not program.calls
    assert {dtype for product in program.products for dtype, _ in product} == {"f32"}
