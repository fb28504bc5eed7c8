"""Routing, experts, statistics and balance against loops over tokens, torch and transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxrl_llm.models.moe.grouped import group_rows, grouped_matmul
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.moe.routing import (
    RouterStats,
    SigmoidRouter,
    SoftmaxRouter,
    load_balance_loss,
    route_sigmoid,
    route_softmax,
    router_metrics,
    router_stats,
    update_bias,
)
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec

TOKENS, EXPERTS, TOP = 9, 8, 3


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("normalize", [True, False])
def test_route_softmax_equals_loop(normalize):
    logits = 2 * draw(TOKENS, EXPERTS)
    routing = route_softmax(jnp.asarray(logits), top=TOP, normalize=normalize)
    for t in range(TOKENS):
        p = softmax(logits[t])
        chosen = np.argsort(-p)[:TOP]
        weights = p[chosen] / p[chosen].sum() if normalize else p[chosen]
        assert routing.experts[t].tolist() == chosen.tolist()
        np.testing.assert_allclose(routing.weights[t], weights, rtol=1e-5)
        np.testing.assert_allclose(routing.probabilities[t], p, rtol=1e-5)


def test_normalized_softmax_is_the_softmax_of_the_chosen_logits():
    logits = 2 * draw(TOKENS, EXPERTS)
    routing = route_softmax(jnp.asarray(logits), top=TOP, normalize=True)
    for t in range(TOKENS):
        chosen = np.asarray(routing.experts[t])
        np.testing.assert_allclose(routing.weights[t], softmax(logits[t][chosen]), rtol=1e-5)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (2, 1), (4, 4)])
@pytest.mark.parametrize("normalize", [True, False])
def test_route_sigmoid_equals_loop(groups, top_groups, normalize):
    logits, bias = 2 * draw(TOKENS, EXPERTS), 0.5 * draw(EXPERTS, seed=1)
    routing = route_sigmoid(
        jnp.asarray(logits),
        jnp.asarray(bias),
        top=TOP,
        groups=groups,
        top_groups=top_groups,
        normalize=normalize,
        scale=2.5,
    )
    size = EXPERTS // groups
    for t in range(TOKENS):
        scores = sigmoid(logits[t])
        choice = scores + bias
        of_group = [np.sort(choice[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
        best = np.argsort(of_group)[::-1][:top_groups]
        allowed = [e for e in range(EXPERTS) if e // size in best]
        chosen = sorted(allowed, key=lambda e, choice=choice: -choice[e])[:TOP]
        weights = scores[chosen] / scores[chosen].sum() if normalize else scores[chosen]
        assert routing.experts[t].tolist() == chosen
        np.testing.assert_allclose(routing.weights[t], 2.5 * weights, rtol=1e-5)
        np.testing.assert_allclose(routing.probabilities[t], scores / scores.sum(), rtol=1e-5)


def test_bias_changes_the_choice_and_has_no_gradient():
    logits = jnp.zeros((1, 4))

    def weight(bias):
        routing = route_sigmoid(
            logits, bias, top=1, groups=1, top_groups=1, normalize=False, scale=1.0
        )
        return routing.weights.sum(), routing.experts

    bias = jnp.array([0.0, 0.0, 3.0, 0.0])
    (value, experts), gradient = jax.value_and_grad(weight, has_aux=True)(bias)
    assert experts.tolist() == [[2]]
    assert float(value) == 0.5
    assert gradient.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "sizes",
    [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0], [1, 1, 1, 1], [40, 7, 0, 33], [200, 1, 90, 9]],
    ids=str,
)
def test_grouped_matmul_equals_ragged_dot(sizes):
    x, matrices = jnp.asarray(draw(sum(sizes), 6)), jnp.asarray(draw(len(sizes), 6, 5, seed=1))
    sizes = jnp.array(sizes)

    def loss(multiply):
        return lambda x, matrices: (multiply(x, matrices, sizes) ** 2).sum()

    expected = np.concatenate(
        [part @ w for part, w in zip(np.split(x, np.cumsum(sizes)[:-1]), matrices, strict=True)]
    )
    np.testing.assert_allclose(grouped_matmul(x, matrices, sizes), expected, atol=1e-5)
    ours = jax.grad(loss(grouped_matmul), (0, 1))(x, matrices)
    theirs = jax.grad(loss(jax.lax.ragged_dot), (0, 1))(x, matrices)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def layer(width=6, ff=5, experts=EXPERTS, *, biases=False):
    shapes = {
        "router": (width, experts),
        "expert_gate": (experts, width, ff),
        "expert_up": (experts, width, ff),
        "expert_down": (experts, ff, width),
    }
    if biases:
        shapes |= {"router_logit_bias": (experts,), "expert_gate_bias": (experts, ff)}
        shapes |= {"expert_up_bias": (experts, ff), "expert_down_bias": (experts, width)}
    return {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


SPEC = MoeSpec(experts=EXPERTS, experts_per_token=TOP, ff_width=5)


def run(weights, x, real, **keywords):
    return jax.jit(lambda *a: mixture(a[0], SPEC, a[1], a[2], **keywords)[:2])(weights, x, real)


def test_mixture_equals_loop_over_tokens():
    weights, x = layer(), draw(2, 5, 6, seed=9)
    out, _ = run(weights, x, np.ones((2, 5), bool))
    for r, t in np.ndindex(2, 5):
        token, expected = x[r, t], 0.0
        p = softmax(token @ weights["router"])
        chosen = np.argsort(-p)[:TOP]
        for e in chosen:
            gate, up = token @ weights["expert_gate"][e], token @ weights["expert_up"][e]
            hidden = gate * sigmoid(gate) * up
            expected = expected + p[e] / p[chosen].sum() * (hidden @ weights["expert_down"][e])
        np.testing.assert_allclose(out[r, t], expected, rtol=1e-4, atol=1e-5)


CLIPPED = dataclasses.replace(
    SPEC, biases=True, swiglu=ClippedSwiglu(alpha=1.702, limit=1.5)
)  # so low a limit that many are clipped


def test_biases_and_clipped_units_equal_loop_over_tokens():
    """As gpt-oss has them, with a softmax over the chosen scores alone."""
    weights, x = layer(biases=True), draw(2, 5, 6, seed=9)
    real = np.ones((2, 5), bool)
    out, *_ = jax.jit(lambda *a: mixture(a[0], CLIPPED, a[1], a[2]))(weights, x, real)
    clipped = 0
    for r, t in np.ndindex(2, 5):
        token, expected = x[r, t], 0.0
        scores = token @ weights["router"] + weights["router_logit_bias"]
        chosen = np.argsort(-scores)[:TOP]
        for share, e in zip(softmax(scores[chosen]), chosen, strict=True):
            gate, up = (
                token @ weights[f"expert_{name}"][e] + weights[f"expert_{name}_bias"][e]
                for name in ("gate", "up")
            )
            clipped += (gate > 1.5).sum() + (abs(up) > 1.5).sum()
            gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
            hidden = (up + 1) * gate * sigmoid(1.702 * gate)
            given = hidden @ weights["expert_down"][e] + weights["expert_down_bias"][e]
            expected = expected + share * given
        np.testing.assert_allclose(out[r, t], expected, rtol=1e-4, atol=1e-5)
    assert clipped > 50


def test_gradients_of_group_rows_are_sums_over_the_group():
    vectors, sizes = jnp.asarray(draw(4, 3)), jnp.array([2, 0, 3, 1])
    weights = draw(8, 3, seed=1)

    def total(vectors):
        return (group_rows(vectors, sizes, 8) * weights).sum()

    expected = np.zeros((4, 3))
    for row, group in enumerate([0, 0, 2, 2, 2, 3]):  # the last two rows have no group
        expected[group] += weights[row]
    np.testing.assert_allclose(jax.grad(total)(vectors), expected, rtol=1e-6)


def test_gradient_of_mixture_equals_that_of_all_experts():
    weights, x = layer(), draw(1, 7, 6, seed=9)

    def dense(weights, x):
        flat = x.reshape(-1, 6)
        routing = route_softmax(flat @ weights["router"], top=TOP, normalize=True)
        gate = jnp.einsum("td,edf->tef", flat, weights["expert_gate"])
        up = jnp.einsum("td,edf->tef", flat, weights["expert_up"])
        out = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, weights["expert_down"])
        taken = jnp.take_along_axis(out, routing.experts[:, :, None], axis=1)
        return (taken * routing.weights[:, :, None]).sum(1).reshape(x.shape)

    def loss(f):
        return lambda weights, x: (f(weights, x) ** 2).sum()

    def ours(weights, x):
        return mixture(weights, SPEC, x, jnp.ones((1, 7), bool))[0]

    got = jax.jit(jax.grad(loss(ours), (0, 1)))(weights, x)
    expected = jax.jit(jax.grad(loss(dense), (0, 1)))(weights, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


def test_low_rank_factors_are_added_to_the_experts():
    weights, x = layer(), draw(1, 7, 6, seed=9)
    a, b = draw(EXPERTS, 6, 2, seed=20), draw(EXPERTS, 2, 5, seed=21)
    real = np.ones((1, 7), bool)
    adapted = weights | {"expert_up_lora_a": a, "expert_up_lora_b": b}
    merged = weights | {"expert_up": weights["expert_up"] + 0.5 * a @ b}
    got, _ = run(adapted, x, real, lora_scale=0.5)
    np.testing.assert_allclose(got, run(merged, x, real)[0], rtol=1e-4, atol=1e-4)


def test_a_token_does_not_depend_on_the_others():
    weights, x = layer(), draw(1, 7, 6, seed=9)
    real = np.ones((1, 7), bool)
    together, _ = run(weights, x, real)
    alone, _ = run(weights, x[:, 3:4], real[:, :1])
    np.testing.assert_allclose(together[:, 3:4], alone, rtol=1e-5, atol=1e-6)


def test_router_stays_in_float32():
    weights, x = layer(), draw(1, 7, 6, seed=9)
    half = jnp.asarray(x, jnp.bfloat16)
    real = np.ones((1, 7), bool)
    out, stats = run(weights, half, real)
    _, expected = run(weights, half.astype(jnp.float32), real)
    assert out.dtype == jnp.bfloat16
    for a, b in zip(stats, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_padding_is_left_out_of_the_statistics():
    weights, x = layer(), draw(1, 7, 6, seed=9)
    real = np.array([[True] * 4 + [False] * 3])
    _, padded = run(weights, x, real)
    _, alone = run(weights, x[:, :4], real[:, :4])
    assert padded.tokens == 4
    assert padded.choices.sum() == 4 * TOP
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


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


def test_entropy_of_certain_and_uniform_routers():
    def entropy(logits):
        routing = route_softmax(jnp.array([logits]), top=1, normalize=True)
        return float(router_metrics(router_stats(routing, jnp.array([True])))["router_entropy"])

    assert entropy([0.0, 500.0]) == 0.0
    assert entropy([1.0] * 4) == pytest.approx(np.log(4))


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

    def ours(logits):
        def stats_of(layer):
            routing = route_softmax(layer, top=TOP, normalize=True)
            return router_stats(routing, jnp.asarray(mask.reshape(-1) != 0))

        return load_balance_loss(jax.vmap(stats_of)(logits))

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(logits))
    np.testing.assert_allclose(value, theirs.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, gates.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_load_balance_loss_of_balanced_and_empty_statistics():
    even = jnp.full(4, 6.0)
    stats = RouterStats(jnp.array(12.0), even, even / 2, jnp.array(0.0))
    assert float(load_balance_loss(stats)) == pytest.approx(2.0)  # two experts per token
    nothing = jax.tree.map(jnp.zeros_like, stats)
    assert float(load_balance_loss(nothing)) == 0.0


def test_update_bias_moves_against_the_load():
    bias, choices = draw(2, 4), np.array([[5.0, 1.0, 3.0, 3.0], [0.0, 0.0, 0.0, 8.0]])
    got = update_bias(jnp.asarray(bias), jnp.asarray(choices), rate=0.01)
    for i, e in np.ndindex(2, 4):
        error = choices[i].mean() - choices[i, e]
        step = 0.01 if error > 0 else -0.01 if error < 0 else 0.0
        assert float(got[i, e]) == pytest.approx(bias[i, e] + step, abs=1e-6)


def test_bias_updates_even_the_load_out():
    """A skewed router, updated as in the paper, ends near a balanced one."""
    skew = jnp.linspace(-1.0, 1.0, EXPERTS)
    logits = jnp.asarray(0.5 * draw(256, EXPERTS)) + skew

    def load(bias):
        routing = route_sigmoid(
            logits, bias, top=2, groups=1, top_groups=1, normalize=True, scale=1.0
        )
        return router_stats(routing, jnp.ones(256, bool)).choices

    def step(bias, _):
        return update_bias(bias, load(bias), rate=0.005), None

    bias, _ = jax.jit(lambda b: jax.lax.scan(step, b, length=200))(jnp.zeros(EXPERTS))
    before, after = load(jnp.zeros(EXPERTS)), load(bias)
    assert before.max() / before.mean() > 2.0
    assert after.max() / after.mean() < 1.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token=9 of 8"),
        ({"experts_per_token": 0}, "experts_per_token=0 of 8"),
        ({"ff_width": 0}, "must be positive"),
        ({"dense_layers": -1}, "must be positive"),
        ({"router": (3, 1)}, "groups must divide the experts"),
        ({"router": (8, 8)}, "at least 2 each"),
        ({"router": (4, 5)}, "groups must divide the experts"),
        ({"router": (4, 1)}, "hold experts_per_token"),
    ],
    ids=str,
)
def test_impossible_mixtures_are_refused(changes, message):
    if "router" in changes:
        groups, top_groups = changes["router"]
        router = SigmoidRouter(groups=groups, top_groups=top_groups, normalize=True, scale=1.0)
        changes = {"router": router}
    expected = dict(experts=EXPERTS, experts_per_token=TOP, ff_width=5) | changes
    with pytest.raises(ValueError, match=message):
        MoeSpec(**expected)


def test_sigmoid_router_without_bias_is_refused():
    router = SigmoidRouter(groups=1, top_groups=1, normalize=True, scale=1.0)
    with pytest.raises(ValueError, match="adds a bias"):
        router(jnp.zeros((1, 4)), None, top=1)
    assert SoftmaxRouter(normalize=True) == SoftmaxRouter(normalize=True)


def test_mixture_and_its_gradient_are_the_same_on_a_mesh():
    weights, x = layer(width=8, ff=6), draw(4, 5, 8, seed=9)
    real = jnp.arange(20).reshape(4, 5) % 3 != 0
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    parts = {
        "router": jax.P("fsdp", None),
        "expert_gate": jax.P(None, "fsdp", "tensor"),
        "expert_up": jax.P(None, "fsdp", "tensor"),
        "expert_down": jax.P(None, "tensor", "fsdp"),
    }

    def place(array, spec):
        return jax.device_put(array, jax.NamedSharding(mesh, spec))

    spread = {name: place(weights[name], part) for name, part in parts.items()}

    def loss(weights, x, real):
        out, stats, _ = mixture(weights, SPEC, x, real)
        return (out**2).sum() + load_balance_loss(stats), (out, stats)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    alone = run(weights, x, real)
    together = run(spread, place(x, jax.P("fsdp")), place(real, jax.P("fsdp")))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(b).max()))
