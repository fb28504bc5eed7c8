"""Episodes of several turns: advantages per turn, tokens told between turns, unusable episodes."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import advantages as adv

TURN_IDS = [  # of the mask in conftest.py; only the first episode of its group has a turn 2
    [-1, 0, 1, 2, -1],
    [-1, 0, 1, -1, -1],
    [0, 0, -1, 1, 2],
    [-1, 0, -1, -1, 1],
    [-1, 0, 1, 1, 2],
    [-1, -1, 0, -1, -1],
]
GROUPED = [
    *(adv.grpo, adv.dr_grpo, adv.rloo, adv.opo, adv.grpo_pass_at_k, adv.gpg, adv.gdpo),
    *(adv.reinforce_plus_plus_baseline, adv.prime, adv.grpo_turns),
    *(adv.optimal_token_baseline, adv.optimal_token_baseline_corrected),
    adv.optimal_token_baseline_multi_turn,
]
OTHERS = [adv.remax, adv.reward_to_go, adv.reinforce_plus_plus]
OTHERS += [adv.gae, adv.gae_whitened, adv.gae_turns]
ALIGNED_BY_POSITION = [adv.optimal_token_baseline, adv.optimal_token_baseline_corrected]


@pytest.fixture
def episodes(fields):
    return fields | {"turn_ids": jnp.array(TURN_IDS)}


def on_tokens(result, mask):
    """Return what an estimator gave, for each token, as the trainer takes it."""
    parts = result if isinstance(result, tuple) else (result,)
    return [np.where(mask, p if p.ndim == 2 else p[:, None], 0.0) for p in map(np.asarray, parts)]


def loop_grpo_turns(rewards, turns, ids, mask, gamma, scale):
    returns, out = {}, np.zeros(rewards.shape)
    for b in range(len(rewards)):
        ahead = 0.0
        for k in sorted(set(turns[b, mask[b]].tolist()), reverse=True):
            ahead = sum(rewards[b, mask[b] & (turns[b] == k)]) + gamma * ahead
            returns[b, k] = ahead
    for (b, k), value in returns.items():
        peers = [v for (j, turn), v in returns.items() if turn == k and ids[j] == ids[b]]
        if len(peers) > 1:
            mean = sum(peers) / len(peers)
            std = (sum((v - mean) ** 2 for v in peers) / (len(peers) - 1)) ** 0.5
            out[b, mask[b] & (turns[b] == k)] = (value - mean) / (std + 1e-6 if scale else 1.0)
    return out


def loop_gae_turns(rewards, values, mask, turns, gamma, lam):
    advantages, returns = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for b in range(len(rewards)):
        next_value, ahead, next_turn = 0.0, 0.0, None
        for t in reversed(range(rewards.shape[1])):
            if mask[b, t]:
                discount, trace = (1, 1) if turns[b, t] == next_turn else (gamma, lam)
                delta = rewards[b, t] + discount * next_value - values[b, t]
                ahead = delta + discount * trace * ahead
                next_value, next_turn = values[b, t], turns[b, t]
                advantages[b, t], returns[b, t] = ahead, ahead + values[b, t]
    return advantages, returns


def numbered(steps):
    """Number the turns of an episode of told tokens (t), and drawn ones of a turn or the next."""
    turn, ids = -1, []
    for step in steps:
        turn = turn if step == "t" else max(turn, 0) if step == "s" else turn + 1
        ids.append(-1 if step == "t" else turn)
    return ids


quarters = st.lists(st.integers(-8, 8), min_size=32, max_size=32)
layouts = st.lists(st.text("tsn", min_size=8, max_size=8), min_size=4, max_size=4)
ids4 = st.lists(st.integers(0, 2), min_size=4, max_size=4)
jitted = {f: jax.jit(f, static_argnames=("gamma", "lam")) for f in (adv.gae, adv.gae_turns)}
grpo_turns = jax.jit(adv.grpo_turns, static_argnames=("gamma", "scale_by_std"))


@pytest.mark.parametrize("scale", [True, False])
@hypothesis.given(layouts, quarters, ids4)
def test_grpo_turns_matches_the_loop(scale, steps, rewards, ids):
    turns, ids = np.array([numbered(s) for s in steps]), np.array(ids)
    rewards, mask = np.reshape(rewards, (4, 8)) / 4, turns >= 0
    want = loop_grpo_turns(rewards, turns, ids, mask, 0.5, scale)
    got = grpo_turns(rewards.astype(np.float32), turns, ids, mask, gamma=0.5, scale_by_std=scale)
    assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@hypothesis.given(layouts, quarters, quarters)
def test_gae_turns_matches_the_loop(steps, rewards, values):
    turns = np.array([numbered(s) for s in steps])
    mask = turns >= 0
    args = [np.reshape(x, (4, 8)).astype(np.float32) / 4 for x in (rewards, values)]
    want = loop_gae_turns(*args, mask, turns, 0.5, 0.75)
    got = jitted[adv.gae_turns](*args, mask, turns, gamma=0.5, lam=0.75)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
    got = jitted[adv.gae_turns](*args, mask, turns, gamma=1.0, lam=1.0)
    plain = jitted[adv.gae](*args, mask, gamma=1.0, lam=1.0)
    chex.assert_trees_all_close(got, plain, atol=1e-5)
    every = np.where(mask, np.cumsum(mask, axis=1) - 1, -1)  # each token a turn
    got = jitted[adv.gae_turns](*args, mask, every, gamma=0.5, lam=0.75)
    chex.assert_trees_all_close(got, jitted[adv.gae](*args, mask, gamma=0.5, lam=0.75), atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_first_tokens_have_the_gae_of_turns_as_actions(episodes, lam):
    rewards, values, mask = (np.asarray(episodes[k]) for k in ("rewards", "values", "mask"))
    turns, actions = np.array(TURN_IDS), 3
    table = np.zeros((3, 6, actions), np.float32)  # rewards, values and which turns there are
    first = np.zeros(mask.shape, bool)
    for b, t in np.argwhere(mask):
        k = turns[b, t]
        table[0, b, k] += rewards[b, t]
        if not table[2, b, k]:
            table[1, b, k], table[2, b, k], first[b, t] = values[b, t], 1.0, True
    there = jnp.array(table[2] > 0)
    want, _ = adv.gae(jnp.array(table[0]), jnp.array(table[1]), there, gamma=0.9, lam=lam)
    args = [episodes[k] for k in ("rewards", "values", "mask", "turn_ids")]
    got, _ = adv.gae_turns(*args, gamma=0.9, lam=lam)
    assert_allclose(got[first], want[there], rtol=1e-5, atol=1e-6)


def test_turns_by_hand():
    """Returns are 3 and 2, 1 and 1, 5 and 2; the last of them in a turn that nobody else has."""
    rewards = jnp.array([[1.0, 9.0, 0.0, 2.0], [0.0, 9.0, 1.0, 9.0], [3.0, 9.0, 0.0, 2.0]])
    turns = jnp.array([[0, -1, 1, 1], [0, -1, 1, -1], [0, -1, 0, 2]])
    groups, mask = jnp.array([4, 4, 4]), turns >= 0
    got = adv.grpo_turns(rewards, turns, groups, mask, scale_by_std=False)
    assert_allclose(got, [[0, 0, 0.5, 0.5], [-2, 0, -0.5, 0], [2, 0, 2, 0]], atol=1e-6)
    got = adv.grpo_turns(rewards, turns, groups, mask)
    half = 0.5**0.5
    assert_allclose(got, [[0, 0, half, half], [-1, 0, -half, 0], [1, 0, 1, 0]], atol=1e-5)
    got = adv.grpo_turns(rewards, turns, groups, mask, gamma=0.5, scale_by_std=False)
    assert_allclose(got[:, 0], np.array([2.0, 0.5, 4.0]) - 6.5 / 3, atol=1e-6)  # once per turn


def test_grpo_turns_with_one_turn_is_grpo(episodes):
    mask, ids = episodes["mask"], episodes["group_ids"]
    turns = jnp.where(mask, 0, -1)
    rewards = adv.rewards_from_scores(episodes["scores"], mask)
    for keywords in ({}, {"scale_by_std": False}, {"eps": 0.5}):
        want = adv.to_tokens(adv.grpo(episodes["scores"], ids, **keywords), mask)
        got = adv.grpo_turns(rewards, turns, ids, mask, gamma=0.5, **keywords)
        assert_allclose(got[:5], want[:5], rtol=1e-5, atol=1e-6)
        assert_array_equal(got[5], np.zeros(5))  # a group of one


def test_equal_returns_give_exactly_zero_wherever_their_tokens_are():
    """In float32 (0.1 + 0.2) + 0.7 is not 0.1 + (0.2 + 0.7); the noise would be divided by eps."""
    turns = jnp.array([[0, 1, 2, -1, -1, -1, -1], [0, 0, -1, 1, 1, -1, 2], [-1, 0, 1, 1, 1, -1, 2]])
    ends = (jnp.pad(turns[:, 1:], [(0, 0), (0, 1)], constant_values=9) != turns) & (turns >= 0)
    rewards = jnp.where(ends, jnp.array([0.1, 0.2, 0.7])[turns], 0.0)
    got = adv.grpo_turns(rewards, turns, jnp.zeros(3, int), turns >= 0, gamma=0.9)
    assert_array_equal(got, np.zeros((3, 7)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "function",
    [f for f in GROUPED + OTHERS if f not in ALIGNED_BY_POSITION],
    ids=lambda f: f.__name__,
)
def test_told_tokens_change_nothing(function, seed, episodes, arguments):
    """Put three told tokens, of which nothing is known, somewhere into each episode."""
    rng = np.random.default_rng(seed)
    places = np.sort([rng.permutation(8)[:5] for _ in range(6)], axis=1)
    longer = {}
    for name, values in jax.tree.map(np.asarray, episodes).items():
        longer[name] = values
        if values.shape == (6, 5):
            told = {"b": False, "i": -1, "f": np.nan}[values.dtype.kind]
            longer[name] = np.full((6, 8), told, values.dtype)
            np.put_along_axis(longer[name], places, values, axis=1)
    want = on_tokens(function(*arguments(function, episodes)), episodes["mask"])
    args = map(jnp.asarray, arguments(function, longer))
    got = on_tokens(function(*args), longer["mask"])
    for part, expected in zip(got, want, strict=True):
        inside = np.take_along_axis(part, places, axis=1)
        assert_allclose(inside, expected, rtol=1e-4, atol=1e-5)
        assert_array_equal(part[~longer["mask"]], 0.0)


@pytest.mark.parametrize("rows", [[1, 4], [2, 4], [3, 5]], ids=str)
@pytest.mark.parametrize("function", GROUPED + OTHERS, ids=lambda f: f.__name__)
def test_an_unusable_episode_counts_for_nothing(function, rows, episodes, arguments):
    """A group of its own and an empty mask are as good as cutting it out of the batch."""
    others = np.setdiff1d(np.arange(6), rows)
    without = {name: values[others] for name, values in episodes.items()}
    kept = jax.tree.map(np.array, episodes)
    for values in kept.values():
        if values.dtype.kind == "f":
            values[rows] = np.nan if values.shape == (6, 5) else 1e3
    kept["mask"][rows], kept["response_lengths"][rows] = False, 0
    kept["group_ids"][rows] = 6 + np.array(rows)
    want = on_tokens(function(*arguments(function, without)), without["mask"])
    got = on_tokens(function(*map(jnp.asarray, arguments(function, kept))), kept["mask"])
    for part, expected in zip(got, want, strict=True):
        assert np.abs(expected).max() > 0
        assert_allclose(part[others], expected, rtol=1e-5, atol=1e-6)
        assert_array_equal(part[rows], 0.0)


@pytest.mark.parametrize("function", [adv.grpo_turns, adv.gae_turns], ids=lambda f: f.__name__)
def test_jit_and_vmap_agree_with_eager_and_bfloat16_is_computed_in_float32(
    function, episodes, other_fields, arguments
):
    other = other_fields | {"turn_ids": jnp.array(TURN_IDS[::-1])}
    other["mask"] = other["turn_ids"] >= 0
    first, second = arguments(function, episodes), arguments(function, other)
    eager = [function(*first), function(*second)]
    chex.assert_trees_all_close(jax.jit(function)(*first), eager[0], rtol=1e-5, atol=1e-5)
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    both = jax.tree.map(lambda *x: jnp.stack(x), *eager)
    mapped = jax.jit(jax.vmap(function))(*stacked)
    chex.assert_trees_all_close(mapped, both, rtol=1e-5, atol=1e-5)
    low = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in first]
    high = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in low]
    chex.assert_trees_all_equal(function(*low), function(*high))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(function(*low)))
