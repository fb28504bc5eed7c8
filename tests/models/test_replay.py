"""Recorded choices of experts that a pass takes, against loops over tokens in numpy and torch."""

import functools

import jax
import numpy as np
import pytest
import torch

from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.moe.routing import NO_ROUTE, SigmoidRouter, SoftmaxRouter
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


def recorded(seed=3):
    """Choices that no router would make, of all tokens but the third."""
    rng = np.random.default_rng(seed)
    routes = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(TOKENS)]).astype(np.int8)
    routes[2] = NO_ROUTE
    return routes.reshape(2, TOKENS // 2, TOP)


X, REAL = draw(2, TOKENS // 2, WIDTH, seed=9), np.ones((2, TOKENS // 2), bool)


@functools.cache
def compiled(router, layout=None):
    spec = MoeSpec(experts=EXPERTS, experts_per_token=TOP, ff_width=FF, router=router)

    def loss(weights, x, real, routes):
        out, stats, experts = mixture(weights, spec, x, real, layout=layout, routes=routes)
        return (out**2).sum(), (out, stats, experts)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


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
