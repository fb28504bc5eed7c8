import dataclasses
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxrl_llm.data.packing import (
    VERL_COST,
    XLA_ATTENTION,
    Cost,
    imbalance,
    karmarkar_karp,
    model_cost,
)
from jaxrl_llm.models.attention import LEAST_BLOCK
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.flops import active_parameters
from jaxrl_llm.models.parameters import init_params
from tests.decoders import forward, head_matrix
from tests.specs import DENSE


def sums(costs, parts):
    return [sum(costs[i] for i in part) for part in parts]


def brute_force(costs, parts, sizes=None):
    """Try every division, or every one into parts of equal size."""
    best = float("inf")
    for chosen in itertools.product(range(parts), repeat=len(costs)):
        if sizes is None or all(chosen.count(part) == sizes for part in range(parts)):
            totals = [0.0] * parts
            for part, cost in zip(chosen, costs, strict=True):
                totals[part] += cost
            best = min(best, max(totals))
    return best


@given(st.lists(st.integers(0, 40), max_size=7), st.integers(1, 4), st.booleans())
def test_every_number_is_in_one_part_and_the_bound_holds(numbers, parts, equal):
    size = len(numbers) // parts if equal else None
    numbers = numbers[: size * parts] if equal else numbers
    divided = karmarkar_karp(np.array(numbers, float), parts, equal_size=equal)
    assert len(divided) == parts
    assert sorted(i for part in divided for i in part) == [*range(len(numbers))]
    most, best = max(sums(numbers, divided)), brute_force(numbers, parts, size)
    if equal:
        assert [len(part) for part in divided] == [size] * parts
        assert most <= (2 - 1 / parts) * best + 1e-9
    else:
        assert best <= most <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9
        assert most == best or len(numbers) > max(parts + 2, 4)  # then it is optimal


def test_impossible_parts():
    for parts, equal in ((0, False), (2, True)):
        with pytest.raises(ValueError, match="divided"):
            karmarkar_karp(np.ones(3), parts, equal_size=equal)


SIZES = dict(vocab_size=512, hidden_size=128, heads=4, kv_heads=4, head_dim=32, ff_width=384)
SPEC = dataclasses.replace(DENSE, **SIZES, max_positions=4096)


def test_the_breakeven_is_what_xla_counts():
    """Fit a·n + b·n² to three lengths: half of b is causal, so breakeven = 2a/b."""
    spec = dataclasses.replace(SPEC, tied_embeddings=False)
    lengths = np.array([128.0, 256.0, 2 * LEAST_BLOCK - 1])
    assert lengths[-1] % 2, "in one block attention computes all n² pairs"

    def logits(params, tokens):
        rows = jnp.zeros_like(tokens)
        return forward(params, spec, tokens, rows, rows + 1) @ head_matrix(params, spec)

    def flops(n):
        like = jax.eval_shape(lambda key: init_params(spec, key=key), jax.random.key(0))
        lowered = jax.jit(logits).lower(like, jax.ShapeDtypeStruct((1, n), jnp.int32))
        return lowered.cost_analysis()["flops"]

    counted = np.array([flops(int(n)) for n in lengths])
    linear, square = np.linalg.lstsq(np.stack([lengths, lengths**2], 1), counted, rcond=None)[0]
    np.testing.assert_allclose(model_cost(spec).breakeven, 2 * linear / square, rtol=0.1)


def test_layers_with_a_window_do_not_grow_with_the_square():
    windowed = dataclasses.replace(SPEC, window=16)
    mixed = dataclasses.replace(windowed, windowed_layers=(True, False))
    assert model_cost(mixed).breakeven == 2 * model_cost(SPEC).breakeven
    assert model_cost(windowed)(np.array([3, 4000])).tolist() == [3, 4000]


def test_layers_with_a_delta_net_cost_by_the_token():
    delta = DeltaSpec(key_heads=2, value_heads=4, key_width=8, value_width=6)
    spec = dataclasses.replace(SPEC, delta=delta, delta_layers=(True, False))
    memory = 3 * 4 * 8 * 6
    products = sum(active_parameters(spec)) + memory
    one_layer = spec.heads * spec.head_dim
    cost = model_cost(spec)
    assert cost == Cost(products / one_layer, 6.0 * products, memory / products)
    plain = dataclasses.replace(cost, in_chunks=0.0)
    more = [cost.of_rows(3, n, 10.0) - plain.of_rows(3, n, 10.0) for n in (64, 80, 128, 129)]
    # filled up to whole chunks of 64 tokens, by none, 48, none, and 63 tokens
    expected = [XLA_ATTENTION * 3 * n * memory / products for n in (0, 48, 0, 63)]
    assert more == pytest.approx(expected)


def test_the_metrics_of_a_plan_by_hand():
    assert imbalance(np.array([3, 4]), [[[0]], [[1]]], 1, VERL_COST)["perf/imbalance"] == 1
    sizes = np.array([6, 2, 2, 4, 1])
    metrics = imbalance(sizes, [[[0], [1, 2]], [[], [3, 4]]], 2, Cost(4.0))
    slowest = (6 + 9) + (4 + 4 + 1 + 0.25)
    assert metrics == {
        "perf/imbalance": slowest / ((15 + 2 * 3 + 8 + 1.25) / 2),
        "global_seqlen/min": 5.0,  # 4 and 1 against 6, 2 and 2
        "global_seqlen/max": 10.0,
        "global_seqlen/minmax_diff": 5.0,
        "global_seqlen/balanced_min": 6.0,
        "global_seqlen/balanced_max": 9.0,
        "global_seqlen/mean": 7.5,
    }
