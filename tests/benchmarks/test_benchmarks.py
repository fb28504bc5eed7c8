"""What the benchmarks compute without running anything."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.generation import generate
from benchmarks.peers import meter
from benchmarks.training import grpo_step
from jaxrl_llm.models.heads import logits
from jaxrl_llm.models.parameters import initialize
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.models.transformer import forward


@pytest.mark.parametrize("script", [grpo_step, meter, generate])
def test_examples(script):
    assert doctest.testmod(script).failed == 0


def spec_of(shape):
    return ModelSpec(
        vocab_size=grpo_step.VOCABULARY,
        hidden_size=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ff_width=shape.ff_width,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied_embeddings=True,
        max_positions=512,
    )


def test_flops_of_a_forward_pass_are_those_that_xla_counts():
    shape = grpo_step.MODELS["small"]._replace(layers=1)  # XLA counts a loop's body once
    spec, length = spec_of(shape), 64

    def run(params, rows):
        return logits(params, spec, forward(params, spec, rows, rows, rows))

    params = jax.eval_shape(lambda: initialize(spec, key=jax.random.key(0)))
    rows = jax.ShapeDtypeStruct((1, length), jnp.int32)
    counted = jax.jit(run).lower(params, rows).compile().cost_analysis()["flops"]
    causal = grpo_step.forward_flops(shape, 0, length, length)
    # XLA's attention computes all pairs, where a causal one needs (T + 1) / 2T of them
    full = causal + 4 * shape.heads * shape.head_dim * length * (length - 1) // 2
    np.testing.assert_allclose(counted, full, rtol=0.05)  # the rest are norms, softmax, and so on


def test_a_steps_flops_are_the_sum_over_its_passes():
    shape, prompts, lengths = grpo_step.MODELS["tiny"], [3, 5], [2, 4, 1, 6]
    layers, head = grpo_step.matrix_parameters(shape)
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
    assert grpo_step.step_flops(shape, prompts, lengths) == total


@pytest.mark.parametrize("name", grpo_step.WORKLOADS)
def test_every_step_generates_as_many_tokens(name):
    steps = grpo_step.lengths_of(grpo_step.WORKLOADS[name], 3)
    totals = {sum(lengths) for lengths in steps}
    assert len(totals) == 1
    assert totals.pop() == pytest.approx(128 * 64, rel=0.01)
    assert all(min(lengths) >= 1 for lengths in steps)
    assert {max(lengths) for lengths in steps} == {grpo_step.WORKLOADS[name].max_new_tokens}


def test_a_meter_counts_each_step_from_zero():
    watch = meter.Meter()
    watch.add(generated=3)
    watch.add(generated=4)
    watch.end_step()
    watch.end_step()
    assert watch.steps[0]["generated"] == 7
    assert "generated" not in watch.steps[1]
    assert all(step["other_cores"] >= 0 and step["seconds"] > 0 for step in watch.steps)
