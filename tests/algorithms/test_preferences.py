"""Losses of preferences against the papers' formulas in float64, and what must hold of them."""

import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms import preferences
from jaxrl_llm.config.functions import asks_for, call, public_functions

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


@functools.cache
def bound(case):
    """Return a jitted loss of (fields), one with its gradients, and the names of its fields."""
    function = partial(getattr(preferences, case.partition(",")[0]), **ORACLES[case][1])
    names = asks_for(function)
    learned = sorted(set(names) & set(LEARNED))

    def loss(fields):
        return function(*(jnp.asarray(fields[n]) for n in names))

    def total(given, fields):
        return loss(fields | given).loss.sum()

    def gradients(fields):
        return jax.grad(total)({name: fields[name] for name in learned}, fields)

    only = jax.jit(loss), jax.jit(gradients)
    run, differentiate = (lambda f, run=run: run({n: f[n] for n in names}) for run in only)
    return run, differentiate, learned


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


@pytest.mark.parametrize("case", ORACLES)
def test_a_loss_is_the_papers(case, fields):
    """And so is its gradient; a pair knows nothing of the others; and nothing overflows."""
    (run, gradients, learned), oracle = bound(case), ORACLES[case][0]
    exact = {k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in fields.items()}
    together = run(fields)
    assert_allclose(together.loss, oracle(exact), rtol=2e-6)
    for name, gradient in gradients(fields).items():
        above, below = (oracle(exact | {name: exact[name] + step}) for step in (1e-5, -1e-5))
        assert_allclose(gradient, (above - below) / 2e-5, rtol=2e-4, atol=1e-6, err_msg=name)
    others = run({n: np.concatenate([v[:1], v[:0:-1]]) for n, v in fields.items()})
    first = jax.tree.map(lambda x: x[0], together)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], others), first, rtol=1e-6)
    for scale in (1e4, -1e4, 0.0):
        most = min(scale, 0.0) if "logps" in learned[0] else scale
        wild = fields | {learned[0]: np.full_like(fields[learned[0]], most)}
        for x in jax.tree.leaves((run(wild).loss, gradients(wild))):
            assert np.isfinite(x).all()


def test_rewards_of_orpo_are_the_mean_log_probs_of_tokens(fields):
    """Those of losses with a reference are TRL's: `tests/training/test_preference.py`."""
    diagnostics = bound("orpo")[0](fields).diagnostics
    for side, mean in zip(("chosen", "rejected"), means(fields), strict=True):
        assert_allclose(diagnostics[f"rewards/{side}"], 0.3 * mean, rtol=1e-5)
    assert_allclose(diagnostics["nll"], -means(fields)[0], rtol=1e-5)
    ratio = odds(means(fields)[0]) - odds(means(fields)[1])
    assert_allclose(diagnostics["log_odds_ratio"], ratio, rtol=1e-4, atol=1e-6)


def test_ktos_baseline_has_no_gradient(fields):
    def total(baseline):
        return bound("kto")[0](fields | {"kl_baseline": baseline}).loss.sum()

    assert not jax.grad(total)(jnp.asarray(fields["kl_baseline"])).any()


def test_what_makes_no_sense_is_refused(fields):
    fields = {key: jnp.asarray(values) for key, values in fields.items()}
    for name, keywords in (
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("robust_dpo", {"label_smoothing": -0.1}),
        ("bradley_terry", {"center_coef": -1.0}),
        ("kto", {"desirable_weight": 0.0}),
    ):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            call(partial(getattr(preferences, name), **keywords), fields)
