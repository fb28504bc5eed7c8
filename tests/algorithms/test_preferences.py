"""Losses of preferences against the papers' formulas in float64, and what must hold of them."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms import preferences
from jaxrl_llm.config.functions import public_functions

PAIRS = 5


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def sigmoid(x):
    return np.exp(log_sigmoid(x))


def odds(mean):
    return mean - np.log1p(-np.exp(mean))


def deltas(f):
    return (
        f["chosen_logps"] - f["ref_chosen_logps"],
        f["rejected_logps"] - f["ref_rejected_logps"],
    )


def means(f):
    return f["chosen_logps"] / f["chosen_lengths"], f["rejected_logps"] / f["rejected_lengths"]


def z(f, beta=0.3):
    chosen, rejected = deltas(f)
    return beta * (chosen - rejected)


def of_kto(f):
    gain = 0.3 * (f["logps"] - f["ref_logps"] - f["kl_baseline"])
    return np.where(f["labels"], 1.5 * (1 - sigmoid(gain)), 0.5 * (1 - sigmoid(-gain)))


def of_apo(f):
    reward = 0.3 * (f["logps"] - f["ref_logps"])
    return np.where(f["labels"], 1 - sigmoid(reward), sigmoid(reward))


def of_length_normalized(f):
    chosen, rejected = deltas(f)
    margin = chosen / f["chosen_lengths"] - rejected / f["rejected_lengths"]
    return -log_sigmoid(5 * margin)


def of_ipo(f):
    chosen, rejected = deltas(f)
    margin = chosen / f["chosen_lengths"] - rejected / f["rejected_lengths"]
    return (margin - 1 / (2 * 0.3)) ** 2


def of_nca(f):
    chosen, rejected = (0.3 * delta for delta in deltas(f))
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def of_cpo(f):
    margin = 0.3 * (f["chosen_logps"] - f["rejected_logps"])
    return -0.9 * log_sigmoid(margin) - 0.1 * log_sigmoid(-margin) - 0.7 * means(f)[0]


def of_orpo(f):
    chosen, rejected = means(f)
    return -chosen - 0.3 * log_sigmoid(odds(chosen) - odds(rejected))


def of_scores(f, margins=0.0):
    chosen, rejected = f["chosen_scores"], f["rejected_scores"]
    return -log_sigmoid(chosen - rejected - margins) + 0.01 * (chosen + rejected) ** 2


def of_steps(f):
    z, y = f["step_logits"], f["step_labels"]
    return -y * log_sigmoid(z) - (1 - y) * log_sigmoid(-z)


ORACLES = {
    "dpo": (lambda f: -log_sigmoid(z(f)), {"beta": 0.3}),
    "dpo, smoothed": (
        lambda f: -0.8 * log_sigmoid(z(f)) - 0.2 * log_sigmoid(-z(f)),
        {"beta": 0.3, "label_smoothing": 0.2},
    ),
    "robust_dpo": (
        lambda f: (-0.8 * log_sigmoid(z(f)) + 0.2 * log_sigmoid(-z(f))) / 0.6,
        {"beta": 0.3, "label_smoothing": 0.2},
    ),
    "ipo": (of_ipo, {"beta": 0.3}),
    "slic": (lambda f: np.maximum(0, 1 - z(f)), {"beta": 0.3}),
    "dpo_length_normalized": (of_length_normalized, {}),
    "nca": (of_nca, {"beta": 0.3}),
    "apo_zero": (
        lambda f: 1 - sigmoid(0.3 * deltas(f)[0]) + sigmoid(0.3 * deltas(f)[1]),
        {"beta": 0.3},
    ),
    "apo_down": (lambda f: sigmoid(0.3 * deltas(f)[0]) + 1 - sigmoid(z(f)), {"beta": 0.3}),
    "rpo": (lambda f: -log_sigmoid(z(f)) - 0.7 * means(f)[0], {"beta": 0.3, "nll_coef": 0.7}),
    "simpo": (
        lambda f: -log_sigmoid(2.5 * (means(f)[0] - means(f)[1]) - 0.8),
        {"beta": 2.5, "gamma": 0.8},
    ),
    "cpo": (of_cpo, {"beta": 0.3, "nll_coef": 0.7, "label_smoothing": 0.1}),
    "orpo": (of_orpo, {"beta": 0.3}),
    "bradley_terry": (of_scores, {"center_coef": 0.01}),
    "bradley_terry_margin": (lambda f: of_scores(f, f["margins"]), {"center_coef": 0.01}),
    "kto": (of_kto, {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
    "apo_zero_labelled": (of_apo, {"beta": 0.3}),
    "step_cross_entropy": (of_steps, {}),
}
SCORES = ("chosen_scores", "rejected_scores", "step_logits")
LEARNED = ("chosen_logps", "rejected_logps", *SCORES, "logps")
every = pytest.mark.parametrize("case", ORACLES)


def bound(case):
    """Return a loss of (fields) -> PairLoss, and the names of its fields."""
    function = getattr(preferences, case.partition(",")[0])
    keywords = ORACLES[case][1]
    kinds = inspect.signature(function).parameters.values()
    names = [p.name for p in kinds if p.kind is not p.KEYWORD_ONLY]
    return lambda fields: function(*(jnp.asarray(fields[n]) for n in names), **keywords), names


@pytest.fixture
def fields():
    rng = np.random.default_rng(0)
    made = {
        name: rng.uniform(-9, -1, PAIRS).astype(np.float32)
        for name in (
            *("chosen_logps", "rejected_logps", "logps"),
            *("ref_chosen_logps", "ref_rejected_logps", "ref_logps"),
        )
    }
    made |= {n: rng.normal(size=PAIRS).astype(np.float32) for n in SCORES}
    made["step_logits"] = rng.normal(size=(PAIRS, 3)).astype(np.float32)
    made["step_labels"] = rng.uniform(size=(PAIRS, 3)).astype(np.float32)
    made |= {n: rng.integers(3, 9, PAIRS) for n in ("chosen_lengths", "rejected_lengths")}
    made["margins"] = rng.uniform(0, 1, PAIRS).astype(np.float32)
    made["kl_baseline"] = np.full(PAIRS, 0.4, np.float32)
    made["labels"] = np.array([True, False, True, True, False])
    return made


def test_every_loss_has_an_oracle():
    named = {name.partition(",")[0] for name in ORACLES}
    assert named == set(public_functions(preferences))


@every
def test_a_loss_is_the_papers(case, fields):
    oracle, _ = ORACLES[case]
    exact = {
        name: np.asarray(v, np.float64 if v.dtype.kind == "f" else None)
        for name, v in fields.items()
    }
    assert_allclose(bound(case)[0](fields).loss, oracle(exact), rtol=2e-6)


@every
def test_its_gradient_is_that_of_the_formula(case, fields):
    run, names = bound(case)
    oracle, _ = ORACLES[case]
    exact = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in fields.items()}
    for name in set(names) & set(LEARNED):
        gradient = jax.grad(lambda x, name=name: run(fields | {name: x}).loss.sum())(
            jnp.asarray(fields[name])
        )
        above, below = (oracle(exact | {name: exact[name] + step}) for step in (1e-5, -1e-5))
        assert_allclose(gradient, (above - below) / 2e-5, rtol=2e-4, atol=1e-6)


@every
def test_a_pair_knows_nothing_of_the_others(case, fields):
    run, _ = bound(case)
    alone = [run({n: v[i : i + 1] for n, v in fields.items()}) for i in range(PAIRS)]
    together = run(fields)
    assert_allclose(together.loss, np.concatenate([x.loss for x in alone]), rtol=1e-6)
    for name, values in together.diagnostics.items():
        parts = [x.diagnostics[name] for x in alone]
        apart = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        chex.assert_trees_all_close(values, apart, rtol=1e-6)


@every
@pytest.mark.parametrize("scale", [1e4, -1e4, 0.0])
def test_nothing_overflows(case, scale, fields):
    run, names = bound(case)
    learned = sorted(set(names) & set(LEARNED))
    most = min(scale, 0.0) if "logps" in learned[0] else scale
    fields[learned[0]] = np.full_like(fields[learned[0]], most)
    value, gradients = jax.value_and_grad(lambda given: run(fields | given).loss.sum())(
        {name: jnp.asarray(fields[name]) for name in learned}
    )
    assert np.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("name", ["dpo", "robust_dpo", "dpo_length_normalized"])
def test_at_the_reference_it_is_log_two(name, fields):
    for side in ("chosen", "rejected"):
        fields[f"{side}_logps"] = fields[f"ref_{side}_logps"]
    loss, diagnostics = bound(name)[0](fields)
    assert_allclose(loss, np.log(2), rtol=1e-6)
    assert not diagnostics["rewards/margins"].any()


def test_a_loss_of_pairs_has_the_margin_that_it_is_about(fields):
    loss, diagnostics = bound("dpo")[0](fields)
    assert_allclose(diagnostics["rewards/margins"], z(fields), rtol=1e-5)
    assert_allclose(diagnostics["rewards/accuracies"], z(fields) > 0)
    assert 0 < diagnostics["rewards/accuracies"].sum() < PAIRS
    assert_allclose(loss, -log_sigmoid(np.asarray(diagnostics["rewards/margins"])), rtol=1e-5)


def test_ktos_baseline_has_no_gradient(fields):
    run, _ = bound("kto")
    baseline = jnp.asarray(fields["kl_baseline"])
    assert not jax.grad(lambda b: run(fields | {"kl_baseline": b}).loss.sum())(baseline).any()


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("dpo", {"beta": 0.0}, "beta: got 0.0, expected a positive number"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing: got 0.5, expected 0 <= ε < 0.5"),
        ("robust_dpo", {"label_smoothing": -0.1}, "label_smoothing: got -0.1"),
        ("bradley_terry", {"center_coef": -1.0}, "center_coef: got -1.0, expected at least 0"),
        ("kto", {"desirable_weight": 0.0}, "desirable_weight: got 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(name, keywords, message, fields):
    function, (_, names) = getattr(preferences, name), bound(name)
    with pytest.raises(ValueError, match=message):
        function(*(jnp.asarray(fields[n]) for n in names), **keywords)
