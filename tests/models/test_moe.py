"""Statistics and balance of routers against loops and transformers.

test_replay has the output and the gradient of experts, tests/parity those of whole models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.moe.routing import (
    RouterStats,
    SigmoidRouter,
    load_balance_loss,
    route_softmax,
    router_metrics,
    router_stats,
    update_bias,
)
from jaxrl_llm.models.moe.spec import MoeSpec

TOKENS, EXPERTS, TOP = 9, 8, 3


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


SPEC = MoeSpec(experts=EXPERTS, experts_per_token=TOP, ff_width=5)
REAL = np.ones((1, 7), bool)


@jax.jit
def run(weights, x, real):
    return mixture(weights, SPEC, x, real)[:2]


def layer(width=6, ff=5):
    shapes = {
        "router": (width, EXPERTS),
        "expert_gate": (EXPERTS, width, ff),
        "expert_up": (EXPERTS, width, ff),
        "expert_down": (EXPERTS, ff, width),
    }
    return {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def test_tokens_and_the_statistics_do_not_depend_on_others_or_padding():
    weights, x = layer(), draw(1, 7, 6, seed=9)
    together, _ = run(weights, x, REAL)
    _, padded = run(weights, x, np.arange(7)[None] < 4)
    alone, stats = run(weights, x[:, :4], REAL[:, :4])
    np.testing.assert_allclose(together[:, :4], alone, rtol=1e-5, atol=1e-6)
    assert padded.tokens == 4
    assert padded.choices.sum() == 4 * TOP
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    half = jnp.asarray(x, jnp.bfloat16)
    out, stats = run(weights, half, REAL)
    _, expected = run(weights, np.asarray(half, np.float32), REAL)
    assert out.dtype == jnp.bfloat16
    for a, b in zip(stats, expected, strict=True):  # the router stays in float32
        np.testing.assert_array_equal(a, b)


def test_statistics_and_metrics_equal_loop():
    logits, mask = 2 * draw(TOKENS, EXPERTS), np.arange(TOKENS) % 4 != 0
    routing = route_softmax(jnp.asarray(logits), top=TOP, normalize=True)
    stats = router_stats(routing, jnp.asarray(mask))
    choices, entropy = np.zeros(EXPERTS), 0.0
    for t in np.flatnonzero(mask):
        p = softmax(logits[t])
        choices[np.argsort(-p)[:TOP]] += 1
        entropy -= (p * np.log(p)).sum()
    metrics = router_metrics(stats)
    np.testing.assert_array_equal(metrics["tokens_per_expert"], choices)
    np.testing.assert_allclose(metrics["max_load"], choices.max() / choices.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["router_entropy"], entropy / mask.sum(), rtol=1e-5)
    certain = router_stats(
        route_softmax(jnp.array([[0.0, 500.0]]), top=1, normalize=True), jnp.array([True])
    )
    assert float(router_metrics(certain)["router_entropy"]) == 0.0


@pytest.mark.parametrize("padded", [True, False])
def test_load_balance_loss_equals_transformers(padded):
    layers, rows, length = 3, 2, 5
    logits = 2 * draw(layers, rows * length, EXPERTS)
    mask = np.ones((rows, length), np.int64)
    if padded:
        mask[0, 3:] = 0
    gates = torch.from_numpy(logits).requires_grad_()
    theirs = load_balancing_loss_func(tuple(gates), EXPERTS, TOP, torch.from_numpy(mask))
    theirs.backward()

    @jax.jit
    @jax.value_and_grad
    def ours(logits):
        def stats_of(layer):
            routing = route_softmax(layer, top=TOP, normalize=True)
            return router_stats(routing, jnp.asarray(mask.reshape(-1) != 0))

        return load_balance_loss(jax.vmap(stats_of)(logits))

    value, gradient = ours(logits)
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, gates.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_load_balance_loss_of_balanced_and_empty_statistics():
    even = jnp.full(4, 6.0)
    stats = RouterStats(jnp.array(12.0), even, even / 2, jnp.array(0.0))
    assert float(load_balance_loss(stats)) == pytest.approx(2.0)  # two experts per token
    assert float(load_balance_loss(jax.tree.map(jnp.zeros_like, stats))) == 0.0


def test_update_bias_moves_against_the_load():
    bias, choices = draw(2, 4), np.array([[5.0, 1.0, 3.0, 3.0], [0.0, 0.0, 0.0, 8.0]])
    got = update_bias(jnp.asarray(bias), jnp.asarray(choices), rate=0.01)
    for i, e in np.ndindex(2, 4):
        step = 0.01 * np.sign(choices[i].mean() - choices[i, e])
        assert float(got[i, e]) == pytest.approx(bias[i, e] + step, abs=1e-6)


REFUSED = [
    ({"experts_per_token": 9}, "experts_per_token"),
    ({"experts_per_token": 0}, "experts_per_token"),
    ({"ff_width": 0}, "ff_width"),
    ({"dense_layers": -1}, "dense_layers"),
    ({"router": (3, 1)}, "groups"),
    ({"router": (8, 8)}, "2"),
    ({"router": (4, 5)}, "groups"),
    ({"router": (4, 1)}, "experts_per_token"),
]


def test_impossible_mixtures_are_refused():
    for changes, named in REFUSED:
        given = dict(experts=EXPERTS, experts_per_token=TOP, ff_width=5) | changes
        if "router" in given:
            sizes = dict(zip(("groups", "top_groups"), given["router"], strict=True))
            given["router"] = SigmoidRouter(**sizes, normalize=True, scale=1.0)
        with pytest.raises(ValueError, match=named):
            MoeSpec(**given)
    router = SigmoidRouter(groups=1, top_groups=1, normalize=True, scale=1.0)
    with pytest.raises(ValueError, match="bias"):
        router(jnp.zeros((1, 4)), None, top=1)
