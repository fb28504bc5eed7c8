"""Mixtures of experts: statistics and balance of routers, and choices of experts that are replayed.

Against loops over tokens in numpy and torch, and transformers; tests/parity has whole models.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.moe.routing import (
    NO_ROUTE,
    RouterStats,
    SigmoidRouter,
    SoftmaxRouter,
    load_balance_loss,
    route_softmax,
    router_metrics,
    router_stats,
    update_bias,
)
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.sharding.layout import Layout, make_mesh

TOKENS, WIDTH, FF, EXPERTS, TOP = 8, 6, 5, 8, 3
ROUTERS = {
    "softmax": SoftmaxRouter(normalize=False),
    "sigmoid": SigmoidRouter(groups=4, top_groups=2, normalize=True, scale=2.5),
}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def layer():
    shapes = {
        "router": (WIDTH, EXPERTS),
        "router_bias": (EXPERTS,),
        "expert_gate": (EXPERTS, WIDTH, FF),
        "expert_up": (EXPERTS, WIDTH, FF),
        "expert_down": (EXPERTS, FF, WIDTH),
    }
    return {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


X, REAL = draw(2, TOKENS // 2, WIDTH, seed=9), np.ones((2, TOKENS // 2), bool)


@functools.cache
def compiled(router, layout=None):
    spec = MoeSpec(experts=EXPERTS, experts_per_token=TOP, ff_width=FF, router=router)

    def loss(weights, x, real, routes):
        out, stats, experts = mixture(weights, spec, x, real, layout=layout, routes=routes)
        return (out.astype(jnp.float32) ** 2).sum(), (out, stats, experts)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def run(x, real):
    """The output and statistics of a router's own choices."""
    (_, (out, stats, _)), _ = compiled(ROUTERS["softmax"])(layer(), x, real, None)
    return out, stats


def test_tokens_and_the_statistics_do_not_depend_on_others_or_padding():
    together, _ = run(X, REAL)
    _, padded = run(X, np.broadcast_to(np.arange(TOKENS // 2) < 3, REAL.shape))
    alone, stats = run(X[:, :3], REAL[:, :3])
    np.testing.assert_allclose(together[:, :3], alone, rtol=1e-5, atol=1e-6)
    assert padded.tokens == 6
    assert padded.choices.sum() == 6 * TOP
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    half = jnp.asarray(X, jnp.bfloat16)
    out, stats = run(half, REAL)
    _, expected = run(np.asarray(half, np.float32), REAL)
    assert out.dtype == jnp.bfloat16
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)  # the router stays in float32


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


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


def test_load_balance_loss_equals_transformers():
    layers, rows, length = 3, 2, 5
    logits = 2 * draw(layers, rows * length, EXPERTS)
    mask = np.ones((rows, length), np.int64)
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
    ({"router": (3, 1)}, "groups"),
    ({"router": (4, 5)}, "groups"),
    ({"router": (4, 1)}, "experts_per_token"),
]


def test_impossible_mixtures_are_refused():
    for changes, named in REFUSED:
        given = dict(experts=EXPERTS, experts_per_token=TOP, ff_width=FF) | changes
        if "router" in given:
            groups, top = given["router"]
            given["router"] = dataclasses.replace(ROUTERS["sigmoid"], groups=groups, top_groups=top)
        with pytest.raises(ValueError, match=named):
            MoeSpec(**given)
    with pytest.raises(ValueError, match="bias"):
        ROUTERS["sigmoid"](jnp.zeros((1, EXPERTS)), None, top=1)


# ----------------------------------------------------------------------- choices that are replayed


def recorded(seed=3):
    """Choices that no router would make, of all tokens but the third."""
    rng = np.random.default_rng(seed)
    routes = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(TOKENS)]).astype(np.int8)
    routes[2] = NO_ROUTE
    return routes.reshape(2, TOKENS // 2, TOP)


def by_hand(router, weights, x, routes):
    """A loop over tokens, in torch: the output, with gradients to all that it is made of."""
    out = []
    for token, chosen in zip(x.reshape(-1, WIDTH), routes.reshape(-1, TOP), strict=True):
        z = token @ weights["router"]
        p = torch.sigmoid(z) if isinstance(router, SigmoidRouter) else torch.softmax(z, -1)
        share = p[chosen.tolist()]
        share = share / share.sum() if router.normalize else share
        share = share * getattr(router, "scale", 1.0)
        total = 0.0
        for weight, e in zip(share, chosen.tolist(), strict=True):
            gate, up = token @ weights["expert_gate"][e], token @ weights["expert_up"][e]
            hidden = torch.nn.functional.silu(gate) * up
            total = total + weight * (hidden @ weights["expert_down"][e])
        out.append(total)
    return torch.stack(out).reshape(x.shape)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_output_and_gradient_of_recorded_choices_equal_loop(router):
    weights, routes = layer(), recorded()
    run = compiled(router)
    (_, (_, _, own)), _ = run(weights, X, REAL, np.full_like(routes, NO_ROUTE))
    plain = run(weights, X, REAL, None)
    again = run(weights, X, REAL, np.asarray(own).astype(np.int8))
    assert again[0][1][1].replaced == 0
    pairs = zip(*(jax.tree.leaves((r[0][1][0], r[1])) for r in (plain, again)), strict=True)
    for a, b in pairs:  # a router's own choices change no bit
        np.testing.assert_array_equal(a, b)
    (_, (out, stats, experts)), (to_weights, to_x) = run(weights, X, REAL, routes)
    taken = np.where(routes == NO_ROUTE, own, routes)
    np.testing.assert_array_equal(experts, taken)
    theirs = {name: torch.tensor(w, requires_grad=True) for name, w in weights.items()}
    x = torch.tensor(X, requires_grad=True)
    expected = by_hand(router, theirs, x, taken)
    (expected**2).sum().backward()
    np.testing.assert_allclose(out, expected.detach(), rtol=1e-4, atol=1e-4)
    for name, gradient in (to_weights | {"x": to_x}).items():
        wanted = x.grad if name == "x" else theirs[name].grad
        wanted = np.zeros(EXPERTS) if wanted is None else wanted.numpy()  # the bias only chooses
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-4 * np.abs(out).max())
    counted = np.bincount(taken.ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.choices, counted)
    pairs = zip(*(np.asarray(x).reshape(-1, TOP).tolist() for x in (routes, own)), strict=True)
    others = [set(given) - set(chosen) for given, chosen in pairs]
    assert stats.replayed == TOP * (TOKENS - 1)
    assert stats.replaced == sum(map(len, others[:2] + others[3:]))


def test_what_padding_holds_is_not_replayed():
    weights, routes, real = layer(), recorded(), REAL.copy()
    real[1, 2:] = False
    routes[1, 2:] = 0  # one expert three times
    (_, (_, stats, experts)), _ = compiled(ROUTERS["softmax"])(weights, X, real, routes)
    assert all(len(set(token)) == TOP for token in np.asarray(experts).reshape(-1, TOP).tolist())
    assert stats.replayed == TOP * 5


def test_choices_are_replayed_where_experts_are_split_over_devices():
    weights, routes = layer(), recorded()
    layout = Layout(make_mesh({"expert": 2}, jax.devices()[:2]))
    router = ROUTERS["sigmoid"]
    (_, (out, stats, experts)), gradients = compiled(router)(weights, X, REAL, routes)
    (_, shared), of_shared = compiled(router, layout)(weights, X, REAL, routes)
    np.testing.assert_array_equal(shared[2], experts)
    for a, b in zip(jax.tree.leaves((out, stats)), jax.tree.leaves(shared[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_shared), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(a).max()))
