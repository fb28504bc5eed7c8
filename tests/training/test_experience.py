"""From rollouts to a batch: layout, rewards, penalties, advantages, and what is trained on.

Updates on pairs and on kept answers are those of `prefer` and of `sft`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import losses, shaping
from jaxrl_llm.algorithms.advantages import grpo
from jaxrl_llm.algorithms.pairs import Pairs, all_pairs, best_and_worst
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean
from jaxrl_llm.config.sections import RewardConfig
from jaxrl_llm.data.dataset import Preference, Prompt, preference_batch
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.rewards.runner import RewardError, Score
from jaxrl_llm.rewards.scoring import with_components
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.training.experience import (
    AdvantageError,
    ScoreError,
    advantage_step,
    cut_minibatches,
    filled,
    pair_maker,
    penalize,
    per_answer,
    select_kept,
    select_pairs,
    with_ages,
    with_scores,
)
from jaxrl_llm.training.trainer import batch_metrics
from jaxrl_llm.training.update import PolicyObjective
from jaxrl_llm.types import Batch
from tests.specs import DENSE as SPEC
from tests.specs import draw
from tests.updates import assert_same, by_rows, chosen, learn, updated


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
        with pytest.raises(AdvantageError, match=r"2 of 4.*1\.0"):
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


# ------------------------------------------------------------------- what of a step is trained on

WIDTH, GROUP = 8, 4
SCORES = [0.0, 1.0, 0.5, 1.0] + [1.0] * 4 + [0.25, 0.0, 0.0, 0.75]
"""Of three groups; the second one's are all equal."""
UNUSABLE = 11  # the best of the last group
ANSWERS = len(SCORES)


@pytest.fixture(scope="module")
def graded():
    """Ragged answers with holes in their masks, as tools leave them; one is not usable."""
    rng = np.random.default_rng(1)
    count = len(SCORES)
    prompts = np.repeat(rng.integers(2, 4, count // GROUP), GROUP)
    sizes = prompts + rng.integers(2, WIDTH - 3, count)
    usable = np.arange(count) != UNUSABLE
    sizes = np.where(usable, sizes, prompts)
    place = np.arange(WIDTH)
    inside = place < sizes[:, None]
    mask = inside & (place >= prompts[:, None]) & usable[:, None]
    mask[2, prompts[2] + 1] = False
    groups = np.where(usable, np.arange(count) // GROUP, count + np.arange(count))
    logprobs = rng.normal(-3, 1, mask.shape).astype(np.float32)
    drawn = rng.integers(1, SPEC.vocab_size, mask.shape)
    tokens = np.where(place < prompts[:, None], drawn[np.arange(count) // GROUP], drawn)
    tokens = np.where(inside, tokens, 0)
    fields = {
        "mask": mask,
        "scores": np.array(SCORES, np.float32),
        "group_ids": groups.astype(np.int32),
        "usable": usable,
        "ref_logprobs": logprobs,
    }
    return Batch(tokens.astype(np.int32), sizes.astype(np.int32), fields)


def pairs_of(graded, function=best_and_worst, size=ANSWERS):
    return select_pairs(pair_maker(function), size, size // GROUP, graded)


def preferences_of(graded, pairs):
    """Return what `prefer` would read, by hand: prompt, two answers, sums under the reference."""
    items = []
    for pair in pairs:
        answers, columns = [], {}
        for side, i in zip(("chosen", "rejected"), pair, strict=True):
            start = int(np.flatnonzero(graded["mask"][i])[0])
            prompt = tuple(graded.tokens[i, :start].tolist())
            answers.append(tuple(graded.tokens[i, start : graded.sequence_lengths[i]].tolist()))
            total = sum(graded["ref_logprobs"][i][graded["mask"][i]].astype(float).tolist())
            columns[f"ref_{side}_logps"] = total
        items.append(Preference(prompt, tuple(answers), columns))
    return items


def test_ties_and_unusable_answers_make_no_pair(graded):
    """The last group's best answer is not usable: its second best takes its place."""
    (minibatch,), metrics = pairs_of(graded)
    assert metrics == {"pairs/count": 2.0, "pairs/tied_groups": 1.0}
    assert minibatch["margins"].tolist() == [1.0, 0.25, 0.0]
    assert minibatch.sequence_lengths[-1] == 0 and not minibatch["mask"][-1].any()
    wanted = preference_batch(preferences_of(graded, [(1, 0), (8, 9)]), 2 * WIDTH)
    assert_array_equal(minibatch.tokens[:2], wanted.tokens)
    for name in ("mask", "second_start", "ref_chosen_logps", "ref_rejected_logps"):
        assert_allclose(minibatch[name][:2], wanted[name], rtol=1e-6, err_msg=name)
    chosen, rejected = pair_maker(all_pairs)(graded)
    (minibatch,), metrics = pairs_of(graded, all_pairs)
    assert metrics["pairs/count"] == len(chosen) == 5 + 2 < len(minibatch.tokens)
    for row, both in zip(minibatch["mask"], zip(chosen, rejected, strict=True), strict=False):
        joined = [graded["mask"][i, : graded.sequence_lengths[i]] for i in both]
        assert_array_equal(row[: sum(map(len, joined))], np.concatenate(joined))  # holes and all


def test_pairs_go_to_the_mini_batch_of_their_prompts(graded):
    without, _ = pairs_of(graded.take(np.arange(4, 8)))  # all of the second group's are tied
    assert not any(minibatch["mask"].any() for minibatch in without)
    cut, _ = pairs_of(graded, size=GROUP)
    assert [int((m.sequence_lengths > 0).sum()) for m in cut] == [1, 0, 1]
    assert [m["mask"].any() for m in cut] == [True, False, True]


def test_what_is_no_pair_is_refused(graded):
    one = jnp.array([0])
    for function, expected in (
        (lambda scores: scores, "Pairs"),
        (lambda scores: Pairs(one, jnp.array([4]), jnp.array([True])), "prompts"),
        (lambda scores: Pairs(one, jnp.array([12]), jnp.array([True])), "11"),
    ):
        with pytest.raises(ScoreError, match=expected):
            pair_maker(function)(graded)


@jax.jit
def imitation(params, tokens, sizes, mask, shares):
    """Return Σ −log π of tokens by their shares, one sequence a row, and its gradient."""

    def loss(params):
        given = Batch(tokens, sizes, {})
        logprobs = chosen(by_rows(SPEC, params, given), tokens)
        return -jnp.sum(jnp.where(mask, shares * logprobs, 0.0))

    return jax.value_and_grad(loss)(params)


def test_imitating_the_kept_answers_is_supervised_training_on_them(graded):
    """One by one, without packing; rows that fill a mini-batch up count for nothing."""
    high = functools.partial(shaping.at_least, threshold=0.5)
    keep = per_answer(high, "algorithm.answer_filter", np.bool_)
    (minibatch,), metrics = select_kept(keep, ANSWERS, ANSWERS // GROUP, graded)
    params = draw(SPEC, scale=0.3)
    rows, counts = [1, 2, 3, 4, 5, 6, 7], graded["mask"].sum(1)
    assert metrics == {"batch/kept_answers": len(rows)}
    shares = np.zeros(graded["mask"].shape, np.float32)
    for i in rows:
        shares[i] = 1 / (len(rows) * counts[i])
    arrays = graded.tokens, graded.sequence_lengths, graded["mask"], shares
    loss, gradient = jax.device_get(imitation(params, *arrays))
    objective = PolicyObjective(loss=losses.negative_log_likelihood)
    assert len(minibatch.tokens) == 12, "three prompts, four times"
    shape = row_shape(16 * WIDTH, WIDTH, sequences=16)
    learner = learn(SPEC, params, objective, shape, reduce=sequence_mean_token_mean)
    coefs = {"kl_coef": 0.0, "entropy_coef": 0.0}
    got, metrics, _ = updated(learner, params, minibatch, coefs)
    assert_same(got, gradient)
    assert_allclose(metrics["loss"], loss, rtol=2e-5)


def test_mini_batches_are_whole_groups_in_their_order_and_filled_up_to_powers_of_two(graded):
    cut = [*cut_minibatches(graded, GROUP)]
    assert len(cut) == 3
    assert_array_equal(cut[1].tokens, graded.tokens[4:8])
    assert [len(filled(graded.take(np.arange(n)), 3).tokens) for n in (0, 3, 4, 7)] == [3, 3, 6, 12]
