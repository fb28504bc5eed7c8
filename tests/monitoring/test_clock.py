"""Seconds, compilations and memory of a step."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.monitoring.clock import Clock, CompileCounter, is_due, memory_metrics, summary


def test_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    for stage, seconds in (("gen", 2.0), ("reward", 1.0), ("gen", 0.5)):
        with clock(stage):
            now[0] += seconds
        now[0] += 0.25  # between the stages
    assert clock.metrics() == {"timing_s/gen": 2.5, "timing_s/reward": 1.0, "timing_s/step": 4.25}


def test_compilations_are_counted():
    counter, other = CompileCounter(), CompileCounter()
    double = jax.jit(lambda x: x * 2 + 1)
    ones = {n: np.ones(n, np.float32) for n in (3, 5)}
    before = counter.count
    double(ones[3]).block_until_ready()
    assert counter.count == before + 1
    double(ones[3] * 2).block_until_ready()
    assert counter.count == before + 1, "the same shape is not compiled again"
    double(ones[5]).block_until_ready()
    assert counter.count == before + 2
    counter.close()
    jax.jit(lambda x: x * 3)(ones[3]).block_until_ready()
    assert counter.count == before + 2, "closed"
    assert other.count == before + 3, "which does not disturb others"
    other.close()


def test_due():
    for every, last, steps in (
        *((0, 7, [7]), (3, 7, [3, 6, 7]), (1, 3, [1, 2, 3])),
        *((10, 7, [7]), (3, 0, [3, 6]), (0, 0, [])),
    ):
        assert [step for step in range(1, (last or 7) + 1) if is_due(step, every, last)] == steps


def test_summary():
    assert summary("x", np.array([3.0, -1.0, 4.0])) == {"x/mean": 2.0, "x/max": 4.0, "x/min": -1.0}
    assert summary("x", np.zeros(0)) == {"x/mean": 0.0, "x/max": 0.0, "x/min": 0.0}
    assert {type(v) for v in summary("x", jnp.arange(3)).values()} == {float}


def test_memory_is_in_gib(monkeypatch):
    assert 0.05 < memory_metrics()["perf/cpu_memory_used_gb"] < 200
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 3 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory_metrics()["perf/max_memory_allocated_gb"] == 3.0
