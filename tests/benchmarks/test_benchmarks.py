"""What the benchmarks compute without running anything."""

import doctest

import pytest

from benchmarks.generation import generate
from benchmarks.peers import meter
from benchmarks.training import grpo_step, workloads


@pytest.mark.parametrize("script", [grpo_step, generate, meter, workloads])
def test_examples(script):
    assert doctest.testmod(script).failed == 0


def test_a_steps_flops_are_the_sum_over_its_passes():
    shape, prompts, lengths = workloads.MODELS["tiny"], [3, 5], [2, 4, 1, 6]
    layers = 4 * (2 * 128 * 32 * (4 + 2) + 3 * 128 * 384)
    head = 128 * workloads.VOCABULARY
    per_pair = 4 * shape.layers * shape.heads * shape.head_dim
    total = 0
    for prompt in prompts:
        total += sum(2 * layers + per_pair * (at + 1) for at in range(prompt)) + 2 * head
    for prompt, length in zip([3, 3, 5, 5], lengths, strict=True):
        for at in range(prompt, prompt + length - 1):
            total += 2 * layers + per_pair * (at + 1) + 2 * head
        for at in range(prompt + length):
            total += 4 * (2 * layers + per_pair * (at + 1))
        total += 4 * 2 * head * length
    assert workloads.step_flops(workloads.spec_of(shape), prompts, lengths) == total


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_every_step_generates_as_many_tokens(name):
    steps = workloads.lengths_of(workloads.WORKLOADS[name], 3)
    totals = {sum(lengths) for lengths in steps}
    assert len(totals) == 1
    assert totals.pop() == pytest.approx(128 * 64, rel=0.01)
    assert all(min(lengths) >= 1 for lengths in steps)
    assert {max(lengths) for lengths in steps} == {workloads.WORKLOADS[name].max_new_tokens}


def test_a_meter_counts_each_step_from_zero():
    watch = meter.Meter()
    watch.add(generated=3)
    watch.add(generated=4)
    watch.end_step()
    watch.end_step()
    assert watch.steps[0]["generated"] == 7
    assert "generated" not in watch.steps[1]
    assert all(step["other_cores"] >= 0 and step["seconds"] > 0 for step in watch.steps)
