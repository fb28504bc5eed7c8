import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.native.sampler import (
    BatchSamplingParams,
    Extras,
    choose_tokens,
    least_kept,
    process,
)

LOGITS = np.array([1.0, 3.0, -2.0, 0.5, 2.5, -np.inf, 1.0, 0.0], np.float32)
DRAWS = 20_000

choose = jax.jit(choose_tokens)
least = jax.jit(least_kept, static_argnames="digit")


def params_of(seeds, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    n = len(seeds)
    return BatchSamplingParams(
        seeds=np.asarray(seeds, np.uint32),
        temperature=np.broadcast_to(np.float32(temperature), n),
        top_p=np.broadcast_to(np.float32(top_p), n),
        top_k=np.broadcast_to(np.int32(top_k), n),
        min_p=np.broadcast_to(np.float32(min_p), n),
    )


def draw(logits, *, seeds=range(DRAWS), steps=0, **options):
    """Draw once for each of many seeds."""
    n = len(seeds)
    rows = np.broadcast_to(logits, (n, len(logits)))
    drawn = choose(rows, np.full(n, steps, np.int32), params_of(seeds, **options))
    tokens, logprobs = map(np.asarray, drawn)
    return tokens, logprobs[np.arange(n), tokens]


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


def check_frequencies(tokens, probs):
    """Compare tokens with a distribution by chi-squared, rare ones taken together."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert len(counts) == len(probs)
    assert np.all(counts[probs == 0] == 0)
    often = probs * DRAWS >= 5
    wanted = np.append(probs[often], probs[~often].sum()) * DRAWS
    got = np.append(counts[often], counts[~often].sum())
    statistic, freedom = np.sum((got - wanted) ** 2 / np.maximum(wanted, 1)), often.sum() - 1
    assert statistic <= freedom + 4.5 * np.sqrt(2 * freedom) + 10


def test_frequencies_are_those_of_the_truncated_distribution(subtests):
    for temperature, top_p, top_k, min_p in (
        *((1.0, 1.0, 0, 0.0), (0.7, 1.0, 0, 0.0), (2.0, 1.0, 3, 0.0), (1.0, 0.8, 0, 0.0)),
        *((1.3, 0.75, 4, 0.0), (1.0, 1e-6, 0, 0.0), (1.0, 0.0, 0, 0.0), (1.0, 1.0, 1, 0.0)),
        *((1.0, 1.0, 100, 0.0), (1.0, 0.999999, 2, 0.0), (1.0, 1.0, 0, 0.1), (1.7, 1.0, 0, 0.2)),
        *((1.5, 0.97, 5, 0.05), (1.0, 1.0, 0, 1.0)),
    ):
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        with subtests.test(**options):
            tokens, logprobs = draw(LOGITS, **options)
            full = softmax(LOGITS / temperature)
            expected = truncated(full, top_p, top_k, min_p)
            check_frequencies(tokens, expected)
            np.testing.assert_allclose(logprobs, np.log(full[tokens]), atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 1000])
def test_frequencies_over_blocks_of_any_vocabulary(vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 3, vocabulary).astype(np.float32)
    logits[rng.permutation(vocabulary)[: vocabulary // 2]] = -np.inf
    logits[-1] = -np.inf if vocabulary > 2 else 0.0
    check_frequencies(draw(logits)[0], softmax(logits))


def test_streams_are_those_of_seed_and_step():
    seeds = [11, 7, 2**32 - 1, 11]
    together, _ = draw(LOGITS, temperature=3.0, seeds=seeds, steps=4)
    alone = [draw(LOGITS, temperature=3.0, seeds=[seed], steps=4)[0][0] for seed in seeds]
    assert together.tolist() == alone
    assert together[0] == together[3]
    first, second = (draw(LOGITS, steps=step)[0] for step in range(2))
    p = softmax(LOGITS)
    for left, right in ((first, second), (first[:-1], first[1:])):  # pairs of steps, and of seeds
        joint = np.zeros((8, 8))
        np.add.at(joint, (left, right), 1 / len(left))
        expected = np.outer(p, p)
        assert np.all(np.abs(joint - expected) <= 5 * np.sqrt(expected / DRAWS) + 1e-4)


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
    return np.asarray(jax.nn.log_softmax(jnp.asarray(rows)))


@pytest.mark.parametrize(
    ("vocabulary", "digit"), [(1, None), (7, 2), (1000, None), (1000, 2), (1000, 4), (151_936, 4)]
)
def test_what_stays_is_what_sorting_keeps(vocabulary, digit):
    rows = hard_rows(vocabulary)
    sorted_rows = np.sort(np.asarray(rows, np.float64), axis=1)[:, ::-1]
    counts = {0, 1, min(5, vocabulary), vocabulary // 2, vocabulary, vocabulary + 3}
    few = vocabulary > 1000
    for top_k in {50} if few else counts:
        count = min(top_k or vocabulary, vocabulary)
        kth = sorted_rows[:, count - 1]
        inside = np.where(sorted_rows >= kth[:, None], np.exp(sorted_rows), 0.0)
        share = np.cumsum(inside, axis=1) / inside.sum(axis=1, keepdims=True)
        for top_p in (0.9,) if few else (1.0, 0.9, 0.3, 1e-6, 0.0):
            limits = np.full(8, top_p, np.float32), np.full(8, top_k, np.int32)
            found = least(rows, *limits, np.zeros(8, np.float32), digit=digit)
            thresholds = np.asarray(found, np.float64)
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
    rows = hard_rows(1000)
    limits = (
        np.float32([1.0, 0.5, 0.9, 1.0, 0.9, 0.2, 0.7, 1e-6]),
        np.int32([0, 10, 0, 3, 5, 600, 1000, 0]),
        np.float32([0.0, 0.0, 0.1, 0.0, 0.9, 0.0, 0.0, 0.5]),
    )
    alone = [least(rows[i : i + 1], *(x[i : i + 1] for x in limits))[0] for i in range(8)]
    np.testing.assert_array_equal(least(rows, *limits), alone)
    rows = np.repeat(rows, 2, axis=0)
    n = len(rows)
    params = params_of(range(n), np.tile([0.0, 1.0], n // 2), np.linspace(0.1, 1.0, n), range(n))
    tokens, _ = choose(rows, np.arange(n), params)
    np.testing.assert_array_equal(tokens[::2], rows[::2].argmax(axis=1))


def test_truncation_is_that_of_transformers():
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
    held = np.zeros((4, 50), bool)
    held[np.arange(4)[:, None], previous] = True
    nothing = jnp.full((4, 1), 50), jnp.zeros((4, 1))
    extras = Extras(jnp.asarray(previous), jnp.full(4, 1.7), *nothing)
    mine = jax.nn.log_softmax(process(jnp.asarray(logits), jnp.asarray(held), extras) / 1.3)
    limits = np.full(4, 0.9, np.float32), np.full(4, 20, np.int32), np.full(4, 0.05, np.float32)
    kept = jnp.where(mine >= least(mine, *limits)[:, None], mine, -jnp.inf)
    expected = torch.log_softmax(warped, -1).numpy()
    np.testing.assert_allclose(jax.nn.log_softmax(kept), expected, atol=1e-5)
