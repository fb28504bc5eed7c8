"""XLA's flags: on GPUs only, unless the user names them, and written down."""

import functools
import json
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import compilation as module
from jaxrl_llm.compilation import FLAGS, Task, compiler_options, flags_of_environment
from jaxrl_llm.runs import directory
from jaxrl_llm.training.compile import plan_shapes
from jaxrl_llm.training.forward import balance_pass
from jaxrl_llm.training.reward_model import score_pass
from tests.planning.stablehlo import configure, spec_of

GPUS = [SimpleNamespace(platform="gpu", process_index=p, id=p) for p in (0, 1)]
DECODING = ("prefill_chunk", "decode_chunk")


@pytest.fixture
def plain(monkeypatch):
    """No flags in the environment, and an XLA that knows all of ours."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(module, "is_known", lambda name, value, device: True)


def test_flags_are_of_a_task_and_of_gpus(plain):
    for task in Task:
        assert compiler_options(task, GPUS) == (FLAGS[task] or None)
        assert compiler_options(task, jax.devices()) is None


def test_what_the_user_says_wins(plain, monkeypatch, tmp_path):
    first = next(iter(FLAGS[Task.TRAIN]))
    other = {"xla_gpu_other": True}
    monkeypatch.setattr(module, "FLAGS", {Task.TRAIN: FLAGS[Task.TRAIN] | other})
    monkeypatch.setenv("XLA_FLAGS", f"--xla_other=1  --{first}=false")
    assert compiler_options(Task.TRAIN, GPUS) == other
    (tmp_path / "flags").write_text(f"--xla_other\n--{first}=false\n")
    assert flags_of_environment(str(tmp_path / "flags")) == {"xla_other", first}
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert compiler_options(Task.TRAIN, GPUS) == other


def test_a_flag_that_xla_does_not_know_is_left_out(monkeypatch, caplog):
    device = jax.devices()[0]
    flags = {"xla_cpu_enable_fast_math": False, "xla_gpu_none": True}
    monkeypatch.setattr(module, "FLAGS", {Task.TRAIN: flags})
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    really = module.is_known
    monkeypatch.setattr(module, "is_known", lambda name, value, _: really(name, value, device))
    with caplog.at_level(logging.WARNING):
        assert compiler_options(Task.TRAIN, GPUS) == {"xla_cpu_enable_fast_math": False}
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "XLA's flag xla_gpu_none is not set"
    ]


def test_this_xla_knows_every_flag():
    flags = {name: value for flags in FLAGS.values() for name, value in flags.items()}
    assert all(module.is_known(name, flags[name], jax.devices()[0]) for name in flags)


def test_the_steps_of_a_run_get_the_flags_of_their_tasks(monkeypatch, tmp_path):
    given, jit = {}, jax.jit

    def record(function=None, *, compiler_options=None, **options):
        if function is None:
            return functools.partial(record, compiler_options=compiler_options, **options)
        given[getattr(function, "__name__", "")] = compiler_options
        return jit(function, **options)

    spec = spec_of("Qwen3Moe")
    config = configure(tmp_path, spec, model__router_loss_coef=0.1)
    monkeypatch.setattr(jax, "jit", record)
    shapes = plan_shapes(config)
    for trace in shapes.trace.values():
        trace()
    assert not any(given.values()), "on CPUs there are none"
    given.clear()
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(module, "is_known", lambda name, value, device: True)
    monkeypatch.setattr(module, "is_gpu", lambda device: True)
    monkeypatch.setattr(module, "FLAGS", {task: {task: True} for task in Task})
    shapes = plan_shapes(config)
    for trace in shapes.trace.values():
        trace()
    layout, role = shapes.layouts.train, shapes.roles["actor"]
    score_pass(role.settings, role.shape, layout)
    balance_pass(role.settings, role.shape, layout.mesh, {})
    train = ("accumulate", "apply", "infer", "count", "compute")
    tasks = dict.fromkeys(train, Task.TRAIN) | dict.fromkeys(DECODING, Task.DECODE)
    assert {name: given[name] for name in tasks} == {n: {task: True} for n, task in tasks.items()}


def test_options_reach_the_compiler():
    """Those of `jax.jit` hold for programs that are lowered and compiled apart, too."""
    program = jax.jit(abs, compiler_options={"xla_gpu_none": True}).lower(jnp.ones(2))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_none"):
        program.compile()


def test_versions_name_the_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=1")
    written = json.loads(json.dumps(directory.collect_versions(0)))
    assert written["xla_flags"] == "--xla_some=1"
    assert written["compiler_options"] == {"train": {}, "decode": {}}
    monkeypatch.setattr(module, "is_gpu", lambda device: True)
    monkeypatch.setattr(module, "is_known", lambda name, value, device: True)
    written = json.loads(json.dumps(directory.collect_versions(0)))
    assert written["compiler_options"] == {str(task): options for task, options in FLAGS.items()}
