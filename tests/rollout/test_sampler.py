"""Choosing tokens: exact truncation, exact frequencies, independent streams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxrl_llm.rollout.native.sampler import (
    BatchSamplingParams,
    Extras,
    choose_tokens,
    least_kept,
    process,
)

LOGITS = np.array([1.0, 3.0, -2.0, 0.5, 2.5, -np.inf, 1.0, 0.0], np.float32)
DRAWS = 20_000
ALLOWED = [1e-9, 19.51, 23.03, 25.90, 28.47, 30.86, 33.11]  # chi-squared's, by degrees of freedom

choose = jax.jit(choose_tokens)
least = jax.jit(least_kept, static_argnames="digit")


def cut(logprobs, *limits, digit=None):
    """Set what is cut off to -inf."""
    return jnp.where(logprobs >= least(logprobs, *limits, digit=digit)[:, None], logprobs, -jnp.inf)


def draw(logits, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seeds=None, steps=0):
    """Draw once for each of many seeds."""
    seeds = np.arange(DRAWS) if seeds is None else np.asarray(seeds)
    n = len(seeds)
    tokens, logprobs = choose(
        jnp.broadcast_to(jnp.asarray(logits), (n, len(logits))),
        jnp.full(n, steps, jnp.int32),
        BatchSamplingParams(
            seeds=jnp.asarray(seeds, jnp.uint32),
            temperature=jnp.full(n, temperature, jnp.float32),
            top_p=jnp.full(n, top_p, jnp.float32),
            top_k=jnp.full(n, top_k, jnp.int32),
            min_p=jnp.full(n, min_p, jnp.float32),
        ),
    )
    return np.asarray(tokens), np.asarray(logprobs)[np.arange(n), np.asarray(tokens)]


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def truncated(p, top_p, top_k, min_p=0.0):
    """The distribution that is left, by walking down the sorted tokens; equal ones go together."""
    order = sorted(range(len(p)), key=lambda v: -p[v])
    order = [v for v in order if p[v] >= p[order[min(top_k or len(p), len(p)) - 1]]]
    total, mass, kept = sum(p[v] for v in order), 0.0, []
    for v in order:
        if kept and top_p < 1 and mass / total >= top_p and p[v] < p[kept[-1]]:
            break
        kept.append(v)
        mass += p[v]
    kept = [v for v in kept if p[v] >= min_p * max(p)]
    out = np.zeros(len(p))
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.7, 1.0, 0, 0.0),
        (2.0, 1.0, 3, 0.0),
        (1.0, 0.8, 0, 0.0),
        (1.3, 0.75, 4, 0.0),
        (1.0, 1e-6, 0, 0.0),
        (1.0, 0.0, 0, 0.0),
        (1.0, 1.0, 1, 0.0),
        (1.0, 1.0, 100, 0.0),
        (1.0, 0.999999, 2, 0.0),
        (1.0, 1.0, 0, 0.1),
        (1.7, 1.0, 0, 0.2),
        (1.5, 0.97, 5, 0.05),
        (1.0, 1.0, 0, 1.0),
    ],
)
def test_frequencies_are_those_of_the_truncated_distribution(temperature, top_p, top_k, min_p):
    """By a chi-squared test at one in 100,000 over the tokens that are left."""
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    tokens, logprobs = draw(LOGITS, **options)
    full = softmax(LOGITS / temperature)
    expected = truncated(full, top_p, top_k, min_p)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert np.all(counts[expected == 0] == 0)
    left = expected > 0
    statistic = np.sum((counts[left] - expected[left] * DRAWS) ** 2 / (expected[left] * DRAWS))
    assert statistic <= ALLOWED[int(left.sum()) - 1]
    np.testing.assert_allclose(logprobs, np.log(full[tokens]), atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 96, 1000])
def test_frequencies_over_blocks_of_any_vocabulary(vocabulary):
    """Half of the tokens have no mass, the last among them; the others' spreads over decades."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 3, vocabulary).astype(np.float32)
    logits[rng.permutation(vocabulary)[: vocabulary // 2]] = -np.inf
    logits[-1] = -np.inf if vocabulary > 2 else 0.0
    probs = softmax(logits)
    counts = np.bincount(draw(logits)[0], minlength=vocabulary)
    assert len(counts) == vocabulary
    assert np.all(counts[probs == 0] == 0)
    often = probs * DRAWS >= 5
    expected, got = probs[often] * DRAWS, counts[often]
    rest = [probs[~often].sum() * DRAWS, counts[~often].sum()]
    terms = np.append((got - expected) ** 2 / expected, (rest[1] - rest[0]) ** 2 / max(rest[0], 1))
    freedom = often.sum()
    assert terms.sum() <= freedom + 4.5 * np.sqrt(2 * freedom)


def test_temperature_zero_is_argmax_with_logprobs_at_temperature_one():
    tokens, logprobs = draw(LOGITS, temperature=0.0, top_p=0.3, top_k=2, seeds=range(50))
    assert set(tokens) == {1}
    np.testing.assert_allclose(logprobs, np.log(softmax(LOGITS)[1]), atol=1e-6)


def test_rows_have_their_own_settings():
    """Greedy, top-1 at a high temperature, and plain sampling in one batch."""
    n = 300
    tokens, _ = choose(
        jnp.broadcast_to(LOGITS, (3 * n, 8)),
        jnp.zeros(3 * n, jnp.int32),
        BatchSamplingParams(
            seeds=jnp.arange(3 * n, dtype=jnp.uint32),
            temperature=jnp.repeat(jnp.array([0.0, 9.0, 9.0]), n),
            top_p=jnp.ones(3 * n),
            top_k=jnp.repeat(jnp.array([0, 1, 0]), n),
            min_p=jnp.zeros(3 * n),
        ),
    )
    tokens = np.asarray(tokens)
    assert set(tokens[: 2 * n]) == {1}
    assert len(set(tokens[2 * n :])) == 7


def test_the_stream_is_that_of_seed_and_step():
    """One row alone, or among others in another place, draws the same token."""
    seeds = np.array([11, 7, 2**32 - 1, 11])
    together, _ = draw(LOGITS, temperature=3.0, seeds=seeds, steps=4)
    alone = [draw(LOGITS, temperature=3.0, seeds=[seed], steps=4)[0][0] for seed in seeds]
    assert together.tolist() == alone
    assert together[0] == together[3]


def test_steps_and_seeds_draw_independently():
    """Pairs of tokens of two steps, and of two seeds, have the product's frequencies."""
    first, _ = draw(LOGITS, steps=0)
    second, _ = draw(LOGITS, steps=1)
    p = softmax(LOGITS)
    for left, right in ((first, second), (first[:-1], first[1:])):
        joint = np.zeros((8, 8))
        np.add.at(joint, (left, right), 1 / len(left))
        expected = np.outer(p, p)
        assert np.all(np.abs(joint - expected) <= 5 * np.sqrt(expected / DRAWS) + 1e-4)


def test_low_precision_logits_are_sampled_in_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    tokens, logprobs = draw(logits, temperature=0.9)
    expected = softmax(np.asarray(logits, np.float64) / 0.9)[tokens]
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, np.log(expected), atol=1e-5)


@given(
    weights=st.lists(st.integers(1, 20), min_size=6, max_size=6, unique=True),
    top_p=st.sampled_from([0.05, 0.33, 0.5, 0.77, 0.95, 1.0]),
    top_k=st.integers(0, 7),
)
def test_truncate_keeps_what_a_loop_keeps(weights, top_p, top_k):
    p = np.array(weights) / np.sum(weights)
    ranked = np.sort(p)[::-1][: top_k or None]
    ties = np.abs(np.cumsum(ranked) / ranked.sum() - top_p)
    assume(top_p == 1 or ties.min() > 1e-4)  # at a tie float32 decides
    kept = cut(
        jnp.log(jnp.asarray(p[None], jnp.float32)),
        jnp.array([top_p], jnp.float32),
        jnp.array([top_k], jnp.int32),
        jnp.zeros(1),
    )[0]
    inside = truncated(p, top_p, top_k) > 0
    np.testing.assert_array_equal(np.isfinite(kept), inside)
    np.testing.assert_allclose(kept[inside], np.log(p[inside]), rtol=1e-6)


def hard_rows(vocabulary):
    """Log-probs that spread over decades, are all equal, tie, are -inf, or have two levels."""
    rng = np.random.default_rng(vocabulary)
    rows = rng.normal(0, 3, (8, vocabulary)).astype(np.float32)
    rows[1] = 0.0
    rows[2] = np.round(rows[2])
    rows[3, rng.permutation(vocabulary)[: vocabulary // 2]] = -np.inf
    rows[4] = np.where(np.arange(vocabulary) == vocabulary // 3, 1.0, -np.inf)
    rows[5] = np.where(np.arange(vocabulary) < vocabulary // 2, 5.0, -5.0)
    rows[6] *= 50
    rows[7] *= 0.01
    return jax.nn.log_softmax(jnp.asarray(rows))


@pytest.mark.parametrize("digit", [None, 2, 4])
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 151_936])
def test_what_stays_is_what_sorting_keeps(vocabulary, digit):
    """Every row with every k and p; a GPU finds four bits at a time, a CPU one."""
    rows = hard_rows(vocabulary)
    sorted_rows = np.sort(np.asarray(rows, np.float64), axis=1)[:, ::-1]
    counts = {0, 1, min(5, vocabulary), vocabulary // 2, vocabulary, vocabulary + 3}
    few = vocabulary > 1000
    for top_k in {0, 50} if few else counts:
        count = min(top_k or vocabulary, vocabulary)
        kth = sorted_rows[:, count - 1]
        inside = np.where(sorted_rows >= kth[:, None], np.exp(sorted_rows), 0.0)
        share = np.cumsum(inside, axis=1) / inside.sum(axis=1, keepdims=True)
        for top_p in (1.0, 0.9) if few else (1.0, 0.9, 0.3, 1e-6, 0.0):
            limits = np.full(8, top_p, np.float32), np.full(8, top_k, np.int32), np.zeros(8)
            thresholds = np.asarray(least(rows, *map(jnp.asarray, limits), digit=digit), np.float64)
            if top_p == 1:
                np.testing.assert_array_equal(thresholds, kth if top_k else np.full(8, -np.inf))
                continue
            assert np.all(thresholds >= kth)
            for row, value in enumerate(thresholds):
                first = np.searchsorted(-sorted_rows[row], -value, side="left")
                last = np.searchsorted(-sorted_rows[row], -value, side="right") - 1
                assert last >= first  # it is the log-prob of a token
                assert share[row, last] >= top_p - 1e-4
                assert first == 0 or share[row, first - 1] < top_p + 1e-4


def test_rows_are_cut_by_their_own_limits():
    """All at once as one by one."""
    rows = hard_rows(1000)
    limits = (
        jnp.array([1.0, 0.5, 0.9, 1.0, 0.9, 0.2, 0.7, 1e-6]),
        jnp.array([0, 10, 0, 3, 5, 600, 1000, 0]),
        jnp.array([0.0, 0.0, 0.1, 0.0, 0.9, 0.0, 0.0, 0.5]),
    )
    alone = [least(rows[i : i + 1], *(x[i : i + 1] for x in limits))[0] for i in range(8)]
    np.testing.assert_array_equal(least(rows, *limits), alone)


def test_greedy_takes_the_first_of_the_likeliest():
    """Whatever is cut off, and beside rows that are sampled."""
    rows = np.repeat(np.asarray(hard_rows(1000)), 2, axis=0)
    n = len(rows)
    tokens, _ = choose(
        jnp.asarray(rows),
        jnp.arange(n),
        BatchSamplingParams(
            seeds=jnp.arange(n, dtype=jnp.uint32),
            temperature=jnp.tile(jnp.array([0.0, 1.0]), n // 2),
            top_p=jnp.linspace(0.1, 1.0, n),
            top_k=jnp.arange(n),
            min_p=jnp.zeros(n),
        ),
    )
    np.testing.assert_array_equal(tokens[::2], rows[::2].argmax(axis=1))


def test_tokens_as_likely_as_the_last_that_stays_do_so_too():
    """As transformers' top-k does."""
    half, none = jnp.array([0.5]), jnp.array([0.0])
    kept = cut(jnp.log(jnp.array([[0.2, 0.4, 0.2, 0.2]])), half, jnp.array([0]), none)
    assert np.isfinite(kept[0]).all()
    kept = cut(jnp.log(jnp.array([[0.2, 0.4, 0.2, 0.2]])), jnp.ones(1), jnp.array([1]), none)
    assert np.isfinite(kept[0]).tolist() == [False, True, False, False]


def test_truncation_is_that_of_transformers():
    """Temperature, top-k, top-p, min-p and the repetition penalty, one after another."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    rng = np.random.default_rng(0)
    logits, previous = rng.normal(0, 3, (4, 50)).astype(np.float32), rng.integers(0, 50, (4, 9))
    warped = torch.tensor(logits)
    for warper in (
        theirs.RepetitionPenaltyLogitsProcessor(1.7),
        theirs.TemperatureLogitsWarper(1.3),
        theirs.TopKLogitsWarper(20),
        theirs.TopPLogitsWarper(0.9),
        theirs.MinPLogitsWarper(0.05),
    ):
        warped = warper(torch.tensor(previous), warped)
    held = jnp.zeros((4, 50), bool).at[jnp.arange(4)[:, None], previous].set(True)
    nothing = jnp.full((4, 1), 50), jnp.zeros((4, 1))
    mine = (
        process(
            jnp.asarray(logits), held, Extras(jnp.asarray(previous), jnp.full(4, 1.7), *nothing)
        )
        / 1.3
    )
    rows = jnp.ones(4)
    kept = cut(jax.nn.log_softmax(mine), 0.9 * rows, jnp.full(4, 20), 0.05 * rows)
    np.testing.assert_allclose(
        jax.nn.log_softmax(kept), torch.log_softmax(warped, -1).numpy(), atol=1e-5
    )
