"""Profiles of steps: which are traced, what is read off a trace, and how it is summed up."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.profiler import (
    GROUPS,
    Operation,
    Profiler,
    Span,
    Trace,
    device_timeline,
    operation_group,
    read_trace,
    summarize,
    tracing,
)
from tests.refusals import refuses

DEVICES = 2


def test_a_trace_has_every_operation_of_every_device_and_its_summary_adds_up(
    tmp_path, compiles_alone
):
    """Two phases: six layers of two products each and a sum over both; then a transposition.

    A trace says less of a program that was read from a cache.
    """
    jax.clear_caches()  # a trace has all programs that the process holds
    mesh = jax.make_mesh((DEVICES,), ("data",), devices=jax.devices()[:DEVICES])
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.device_put(np.ones((64, 512), np.float32), rows)
    layers = jax.device_put(np.ones((6, 512, 512), np.float32), jax.NamedSharding(mesh, jax.P()))

    @jax.jit
    def multiply(x, layers):
        def layer(x, weights):
            with jax.named_scope("attention"):
                x = x @ weights
            return jnp.tanh(x @ weights), None

        return jax.lax.scan(layer, x, layers)[0].sum()

    turn = jax.jit(lambda x, layers: jnp.transpose(layers, (2, 0, 1)))
    jax.block_until_ready((multiply(x, layers), turn(x, layers)))
    clock = Clock()
    with tracing(tmp_path, 7):
        for phase, call in (("gen", multiply), ("adv", turn)):
            with clock(phase):
                jax.block_until_ready(call(x, layers))
    (path,) = tmp_path.rglob("*.xplane.pb")
    trace = read_trace(path)
    assert {o.device for o in trace.operations} == {f"CPU {n}" for n in range(DEVICES)}
    assert not [o for o in trace.operations if re.match("while|call", o.name)]
    for device in range(DEVICES):
        own = [o for o in trace.operations if o.device == f"CPU {device}"]
        kinds = {g: [o for o in own if o.group == g] for g in GROUPS}
        assert len(kinds["matrix products"]) == len(kinds["attention"]) == 6
        assert all(o.program == "jit_multiply" for o in kinds["attention"])
        assert len(kinds["collectives"]) == 1
        assert any(o.program == "jit__lambda" for o in kinds["copies"])

    head, groups, top = summarize(trace, 7).split("\n\n")
    phases = re.findall(r"^([a-z_ ]+?) +(\d+\.\d+) +(\d+\.\d) %", head, re.MULTILINE)
    assert [name for name, _, _ in phases] == ["gen", "adv", "outside of phases"]
    total = float(re.match(r"step 7: (\S+) s, devices busy", head)[1])
    assert sum(float(s) for _, s, _ in phases) == pytest.approx(total, abs=2e-3)
    kinds = dict(re.findall(r"^([a-z ]+?) +\d+\.\d+ +(\d+\.\d) %", groups, re.MULTILINE))
    assert tuple(kinds) == GROUPS
    assert sum(map(float, kinds.values())) == pytest.approx(100, abs=0.3)
    assert len(re.findall(r"^ +\d+\.\d+ +(\d+\.\d) % +\d+ ", top, re.MULTILINE)) > 3


def test_operations_share_the_time_that_a_device_is_busy():
    """Against a walk through time in steps of one."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 80, 40)
    ends = starts + rng.integers(0, 15, 40)
    operations = [
        Operation("0", "", "", "", "other", a * 1e9, b * 1e9)
        for a, b in zip(starts, ends, strict=True)
    ]
    timeline = device_timeline(Trace(Span("step", 0, 100e9), [], operations), "0")
    seconds = np.arange(100)
    running = (starts <= seconds[:, None]) & (seconds[:, None] < ends)
    expected = running / np.maximum(1, running.sum(1, keepdims=True))
    np.testing.assert_allclose(timeline.seconds, expected.sum(0), atol=1e-9)
    for first, last in ((0, 100), (10, 33)):
        busy = timeline.busy(Span("gen", first * 1e9, last * 1e9))
        assert busy == pytest.approx(running[first:last].any(1).sum())


def test_groups():
    for name, opcodes, source, group in (
        ("sm90_xmma_gemm_bf16 custom-call.3", "custom-call", "", "matrix products"),
        ("custom-call.9", "custom-call", "f/dot_general __cublas$lt$matmul", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_fprop", "custom-call", "", "attention"),
        ("custom-call.1", "custom-call", "f __cudnn$fmhaSoftmax", "attention"),
        ("ncclDevKernel_AllGather_RING_LL start.2", "all-gather-start", "", "collectives"),
        ("MemcpyD2D", "MemcpyD", "", "copies"),
        ("loop_copy_fusion.2", "fusion parameter copy bitcast", "", "copies"),
        ("loop_add_fusion.2", "fusion parameter copy add", "", "other"),
    ):
        assert operation_group(name, {*opcodes.split()}, source) == group, name


def test_only_chosen_steps_are_traced(tmp_path, capsys, caplog):
    with caplog.at_level(logging.INFO):
        display = Display("training", 4)
        profiler = Profiler(range(2, 5), (1, 3), tmp_path, display)
    assert "step 1" in caplog.text
    with refuses("log.profile_steps"):
        Profiler(range(2, 5), (9,), tmp_path, Display("training", 4))
    (tmp_path / "profile/step_3").mkdir(parents=True)
    (tmp_path / "profile/step_3/old").touch()
    for step in range(2, 5):
        profiler.turn_to(step)
        with Clock()("gen"):
            jax.block_until_ready(jnp.ones(3) + step)
    profiler.close()
    display.close()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_3"]
    suffixes = {path.name.partition(".")[2] for path in (tmp_path / "profile").rglob("*.*")}
    assert {"txt", "xplane.pb", "trace.json.gz"} == suffixes
    assert capsys.readouterr().out.startswith("step 3: ")
    assert not (tmp_path / "profile/step_3/old").exists()


GPU_TRACE = """
planes {{ name: '/device:GPU:0' {kernels} {stats}
    lines {{ name: 'Stream #7(Kernel,MemcpyD2D)' {product} {copy} {alloc} }}
    lines {{ name: 'Stream #9(Kernel)' {gather} }}
    lines {{ name: 'XLA Ops' {product} }} }}
planes {{ name: '/host:CPU' {phases} {numbers}
    lines {{ name: 'python'
        events {{ metadata_id: 1 duration_ps: 12000000 stats {{ metadata_id: 1 int64_value: 5 }} }}
        events {{ metadata_id: 2 duration_ps: 8000000 stats {{ metadata_id: 2 int64_value: 1 }} }}
    }} }}
"""


def test_a_gpus_streams_are_read(tmp_path):
    """A trace written by hand as CUDA's tracer lays one out: no GPU is needed."""
    stats = ["hlo_op", "hlo_module", "program_id", "kernel_details", "memcpy_details"]
    stats.append("memalloc_details")
    kernels = ["nvjet_hsh_192x192", "ncclDevKernel_AllGather_RING_LL", "MemcpyD2D", "MemoryAlloc"]

    def event(kernel, start_us, length_us, **values):
        text = "".join(
            f"stats {{ metadata_id: {stats.index(name) + 1} str_value: '{value}' }} "
            for name, value in values.items()
        )
        times = f"offset_ps: {start_us * 10**6} duration_ps: {length_us * 10**6}"
        return f"events {{ metadata_id: {kernel + 1} {times} {text}}}"

    def names(kind, values):
        return "".join(
            f"{kind}_metadata {{ key: {i} value {{ id: {i} name: '{name}' }} }}"
            for i, name in enumerate(values, 1)
        )

    of_step = {"hlo_module": "jit_step", "program_id": "3", "kernel_details": "regs:168"}
    text = GPU_TRACE.format(
        kernels=names("event", kernels),
        stats=names("stat", stats),
        product=event(0, 1, 6, hlo_op="cublas.1", **of_step),
        gather=event(1, 4, 4, hlo_op="all-gather.2", **of_step),
        copy=event(2, 9, 1, memcpy_details="size:8"),
        alloc=event(3, 0, 10, memalloc_details="size:8"),
        phases=names("event", ["step", "gen"]),
        numbers=names("stat", ["step_num", "phase"]),
    )
    path = tmp_path / "gpu.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    trace = read_trace(path)
    assert [(o.program, o.name, o.group) for o in trace.operations] == [
        ("jit_step", "cublas.1", "matrix products"),
        ("", "MemcpyD2D", "copies"),
        ("jit_step", "all-gather.2", "collectives"),
    ]
    timeline = device_timeline(trace, "/device:GPU:0")
    np.testing.assert_allclose(timeline.seconds, np.array([4.5, 1, 2.5]) / 1e6)
    assert timeline.busy(trace.step) == pytest.approx(8e-6)
    assert timeline.busy(trace.phases[0]) == pytest.approx(7e-6)
