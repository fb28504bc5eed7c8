"""From rollouts to a batch: layout, rewards, penalties, advantages."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import grpo
from jaxrl_llm.config.sections import RewardConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rewards.runner import RewardError, Score
from jaxrl_llm.rewards.scoring import with_components
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.training.buffer import lost_in_rounding
from jaxrl_llm.training.experience import (
    AdvantageError,
    ScoreError,
    advantage_step,
    penalize,
    with_ages,
    with_scores,
)
from jaxrl_llm.training.trainer import batch_metrics


def prompt(*tokens):
    return Prompt(index=0, tokens=tokens, data_source="test", ground_truth=None)


def completion(*tokens):
    arrays = np.array(tokens, np.int32), -np.array(tokens, np.float32) / 10
    return Completion(*arrays, np.full(len(tokens), 3, np.int32), "length")


def answered():
    prompts = [prompt(11, 12), prompt(11, 12), prompt(13), prompt(13)]
    answers = [completion(1, 2, 3), completion(4), completion(5, 6), completion(1, 2, 3, 4, 5)]
    episodes = [Episode.of(p.tokens, a) for p, a in zip(prompts, answers, strict=True)]
    return Rollouts(prompts, episodes, ["", "", "", ""])


@pytest.fixture
def batch():
    scores = [Score(s, {}, None) for s in (1.0, -0.5, 0.0, 2.0)]
    return with_scores(lay_out(answered(), samples=2, max_tokens=6), scores)


def test_layout_and_a_score_on_the_last_token(batch):
    assert batch.tokens.tolist() == [
        [11, 12, 1, 2, 3, 0],
        [11, 12, 4, 0, 0, 0],
        [13, 5, 6, 0, 0, 0],
        [13, 1, 2, 3, 4, 5],
    ]
    assert batch.sequence_lengths.tolist() == [5, 3, 3, 6]
    assert batch["mask"].astype(int).tolist() == [
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 1],
    ]
    assert batch["response_lengths"].tolist() == [3, 1, 2, 5]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]
    expected = np.where(batch["mask"], -batch.tokens.astype(np.float32) / 10, 0)
    np.testing.assert_array_equal(batch["rollout_logprobs"], expected)
    dtypes = {name: batch[name].dtype.name for name in batch.fields}
    integers = ("response_lengths", "group_ids", "turn_ids", "chain_ids", "versions", "turns")
    floats = ("rollout_logprobs", "scores", "raw_scores", "rewards")
    kinds = {"bool": ("mask", "usable"), "int32": integers, "float32": floats}
    assert dtypes == {name: kind for kind, names in kinds.items() for name in names}
    assert (batch.tokens.dtype, batch.sequence_lengths.dtype) == (np.int32, np.int32)
    assert batch["scores"].tolist() == [1.0, -0.5, 0.0, 2.0]
    rewards = np.zeros((4, 6))
    rewards[[0, 1, 3], [4, 2, 5]] = [1.0, -0.5, 2.0]
    np.testing.assert_array_equal(batch["rewards"], rewards)


def test_the_penalty_falls_on_the_answer_only(batch):
    kl = np.arange(24, dtype=np.float32).reshape(4, 6)
    penalized = penalize(batch, kl, 0.5)
    assert penalized["rewards"].tolist() == [
        [0, 0, -1, -1.5, -1, 0],
        [0, 0, -4.5, 0, 0, 0],
        [0, -6.5, -7, 0, 0, 0],
        [0, -9.5, -10, -10.5, -11, -9.5],
    ]
    assert penalized["scores"].tolist() == [-3.5, -4.5, -13.5, -50.5]
    assert penalized["rewards"].dtype == penalized["scores"].dtype == np.float32
    assert batch["scores"][0] == 1.0, "the old batch is as it was"
    poisoned = np.where(batch["mask"], kl, np.nan)
    np.testing.assert_array_equal(penalize(batch, poisoned, 0.5)["rewards"], penalized["rewards"])


def test_one_advantage_for_each_answer(batch):
    def advantage(scores, group_ids, *, shift=0.0):
        return scores * 10 + group_ids + shift

    advantages = advantage_step(functools.partial(advantage, shift=1.0))(batch)["advantages"]
    each = np.array([11, -4, 2, 22], np.float32)[:, None]
    np.testing.assert_array_equal(advantages, np.where(batch["mask"], each, 0), strict=True)


@pytest.mark.parametrize("pair", [False, True])
def test_one_advantage_for_each_token(batch, pair):
    """Low precision is widened, and what is off the mask is zero."""

    def advantage(rewards, mask):
        values = jnp.where(mask, jnp.cumsum(mask, axis=1) + rewards, jnp.nan)
        return (values, 2 * values) if pair else values.astype(jnp.bfloat16)

    batch = advantage_step(advantage, with_returns=pair)(batch)
    assert ("returns" in batch.fields) == pair
    if pair:
        np.testing.assert_array_equal(batch["returns"], 2 * batch["advantages"])
    assert batch["advantages"].tolist() == [
        [0, 0, 1, 2, 4, 0],
        [0, 0, 0.5, 0, 0, 0],
        [0, 1, 2, 0, 0, 0],
        [0, 1, 2, 3, 4, 7],
    ]
    assert batch["advantages"].dtype == np.float32


def test_something_else_than_advantages_is_named(batch):
    for function in (
        lambda mask: jnp.ones(mask.shape[1]),
        lambda scores: scores[:, None],
        lambda scores: {"advantages": scores},
        lambda scores: None,
        lambda group_ids: group_ids,
    ):
        with pytest.raises(AdvantageError, match="lambda"):
            advantage_step(function)(batch)
    own_array = np.ones((4,), np.float32)
    made = advantage_step(lambda scores: own_array)(batch)["advantages"]
    np.testing.assert_array_equal(made, batch["mask"].astype(np.float32))


def test_advantages_that_are_not_finite_are_named(batch):
    for poison in (np.nan, np.inf):
        step = advantage_step(lambda scores, p=poison: jnp.where(scores >= 1, p, scores))
        with pytest.raises(AdvantageError, match=r"2 of 4.*number 1 with score 1.0"):
            step(batch.take([1, 0, 3, 2]))


# -------------------------------------------------------------------------------------- unscored

UNSCORED = Score(np.nan, {}, "unscored: no verdict")


def test_the_rest_of_a_group_is_as_without_the_unscored_answer():
    rollouts = answered().take([0, 1, 2, 3, 0, 1, 2, 3])
    given = [1.0, None, 0.25, -2.0, 0.5, 0.5, None, 3.0]
    scores = [UNSCORED if s is None else Score(s, {}, None) for s in given]
    batch = lay_out(rollouts, samples=4, max_tokens=6)
    batch = with_scores(batch, scores, samples=4, components=("score",))
    batch = advantage_step(grpo)(batch)
    assert batch["usable"].tolist() == [s is not None for s in given]
    for rows in ([0, 2, 3], [4, 5, 7]):
        rest = np.array([given[row] for row in rows])
        expected = (rest - rest.mean()) / (rest.std(ddof=1) + 1e-6)
        for row, advantage in zip(rows, expected, strict=True):
            mask = batch["mask"][row]
            assert mask.any()
            np.testing.assert_allclose(batch["advantages"][row][mask], advantage, rtol=1e-5)
    for name in ("mask", "advantages", "rewards", "scores", "raw_scores", "score_components"):
        assert not batch[name][[1, 6]].any(), name


@pytest.mark.parametrize("compares", [True, False])
def test_an_answer_that_alone_is_left_of_its_group_is_compared_with_nothing(compares):
    batch = lay_out(answered(), samples=2, max_tokens=6)
    scores = [UNSCORED, *(Score(s, {}, None) for s in (1.0, 2.0, 3.0))]
    batch = with_scores(batch, scores, samples=2, compares=compares)
    assert batch["usable"].tolist() == [False, not compares, True, True]
    assert batch["scores"].tolist() == [0.0, 0.0 if compares else 1.0, 2.0, 3.0]
    assert np.isfinite(batch["rewards"]).all()


def test_scores_that_float32_makes_equal_are_found():
    for given, pair in (
        ([1e9 + 1, 1e9 + 2, 5.0, 6.0], (1e9 + 1, 1e9 + 2)),
        ([0.5, 1.0, 1.0 + 1e-9, 1.0], (1.0, 1.0 + 1e-9)),
        ([math.nan, 2.0, 2.0**24, 2.0**24 + 1], (2.0**24, 2.0**24 + 1)),
        ([1e9, 5.0, 1e9 + 1, 6.0], None),  # of two prompts
        ([0.3, 0.1 + 0.2, 1e9, 1e9], None),
        ([math.nan, math.nan, -1e38, 1e38], None),
    ):
        assert lost_in_rounding([Score(score, {}, None) for score in given], 2) == pair


def test_groups_without_spread_are_counted_by_the_scores_that_are_used():
    rollouts = answered()
    scores = [Score(1e9 + k, {}, None) for k in range(4)]
    scored = with_scores(lay_out(rollouts, samples=2, max_tokens=6), scores, samples=2)
    learned = with_ages(advantage_step(grpo)(scored), step=4)
    assert not learned["advantages"].any()
    metrics = batch_metrics(dict, learned, rollouts, scores)
    assert metrics["critic/groups_without_spread"] == 1.0


def test_scores_and_rewards_that_add_up_to_infinity_name_the_answer():
    laid = lay_out(answered(), samples=2, max_tokens=6)
    laid["rewards"][1, 2] = 3e38
    with pytest.raises(ScoreError, match="answer 1: "):
        with_scores(laid, [Score(3e38, {}, None)] * 4)


@pytest.mark.parametrize(
    ("on_error", "score"), [(-2.0, -2.0), ("unscored", math.nan), (None, None)]
)
def test_a_component_that_is_no_number_costs_its_answer(on_error, score):
    good = Score(1.0, {"form": 0.5}, None)
    reward = RewardConfig(components=("form",), on_error=on_error)
    for value in (math.nan, 10**400, "much", None):
        given = [good, Score(1.0, {"form": value}, None), good, good]
        check = with_components(lambda _, given=given: given, reward)
        if on_error is None:
            with pytest.raises(RewardError, match="form"):
                check(answered())
            continue
        scores = check(answered())
        assert [scores[i] for i in (0, 2, 3)] == [good] * 3
        assert scores[1].has_failed
        np.testing.assert_equal(scores[1].score, score)
        laid = lay_out(answered(), samples=2, max_tokens=6)
        scored = with_scores(laid, scores, samples=2, components=("form",))
        assert scored["score_components"][2:].tolist() == [[0.5], [0.5]]
