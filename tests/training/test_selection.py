"""What of a step is trained on: the updates are those of `prefer` and of `sft`."""

import functools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_llm.algorithms import losses, preferences, shaping
from jaxrl_llm.algorithms.pairs import Pairs, all_pairs, best_and_worst
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean
from jaxrl_llm.config.sections import ReferenceConfig
from jaxrl_llm.data.dataset import Preference, preference_batch
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.sharding.layout import batch_shards
from jaxrl_llm.sharding.reshard import to_host
from jaxrl_llm.training.experience import (
    ScoreError,
    cut_minibatches,
    filled,
    pair_maker,
    per_answer,
    select_kept,
    select_pairs,
)
from jaxrl_llm.training.roles import Reference
from jaxrl_llm.training.update import PolicyObjective, PreferenceObjective, TrainState
from jaxrl_llm.types import Batch
from tests.specs import DENSE as SPEC
from tests.specs import draw
from tests.updates import assert_same, by_rows, chosen, learn, mesh_of, place, updated

WIDTH, GROUP = 8, 4
DPO = functools.partial(preferences.dpo, beta=0.3)
SCORES = [0.0, 1.0, 0.5, 1.0] + [1.0] * 4 + [0.25, 0.0, 0.0, 0.75]
"""Of three groups; the second one's are all equal."""
UNUSABLE = 11  # the best of the last group
ANSWERS = len(SCORES)


@pytest.fixture(scope="module")
def params():
    return draw(SPEC, scale=0.3)


@pytest.fixture(scope="module")
def batch():
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


def build(params, objective, reduce, *, width, rows=16, mesh=None):
    """Return a function from a mini-batch to the gradient and metrics of an update."""
    mesh = mesh or mesh_of()
    placed, ranks = place(params, SPEC, mesh), batch_shards(mesh)
    shape = row_shape(rows * width, width, sequences=16, multiple_of=ranks)
    learner = learn(SPEC, placed, objective, shape, mesh=mesh, reduce=reduce)
    coefs = {"kl_coef": 0.0, "entropy_coef": 0.0}
    return lambda minibatch: updated(learner, placed, minibatch, coefs)[:2]


def pairs_of(batch, function=best_and_worst, size=ANSWERS):
    return select_pairs(pair_maker(function), size, size // GROUP, batch)


def preferences_of(batch, pairs):
    """Return what `prefer` would read, by hand: prompt, two answers, sums under the reference."""
    items = []
    for pair in pairs:
        answers, columns = [], {}
        for side, i in zip(("chosen", "rejected"), pair, strict=True):
            start = int(np.flatnonzero(batch["mask"][i])[0])
            prompt = tuple(batch.tokens[i, :start].tolist())
            answers.append(tuple(batch.tokens[i, start : batch.sequence_lengths[i]].tolist()))
            total = sum(batch["ref_logprobs"][i][batch["mask"][i]].astype(float).tolist())
            columns[f"ref_{side}_logps"] = total
        items.append(Preference(prompt, tuple(answers), columns))
    return items


def test_ties_and_unusable_answers_make_no_pair(batch):
    """The last group's best answer is not usable, so that its second best takes its place."""
    (minibatch,), metrics = pairs_of(batch)
    assert metrics == {"pairs/count": 2.0, "pairs/tied_groups": 1.0}
    assert minibatch["margins"].tolist() == [1.0, 0.25, 0.0]
    assert minibatch.sequence_lengths[-1] == 0 and not minibatch["mask"][-1].any()
    wanted = preference_batch(preferences_of(batch, [(1, 0), (8, 9)]), 2 * WIDTH)
    assert_array_equal(minibatch.tokens[:2], wanted.tokens)
    for name in ("mask", "second_start", "ref_chosen_logps", "ref_rejected_logps"):
        assert_allclose(minibatch[name][:2], wanted[name], rtol=1e-6, err_msg=name)
    assert pairs_of(batch, all_pairs)[1]["pairs/count"] == 5 + 2


def test_pairs_go_to_the_mini_batch_of_their_prompts(batch):
    without, _ = pairs_of(batch.take(np.arange(4, 8)))  # all of the second group's are tied
    assert not any(minibatch["mask"].any() for minibatch in without)
    cut, _ = pairs_of(batch, size=GROUP)
    assert [int((m.sequence_lengths > 0).sum()) for m in cut] == [1, 0, 1]
    assert [m["mask"].any() for m in cut] == [True, False, True]


def test_an_update_on_pairs_is_that_of_prefer(params, batch):
    """In other rows on a mesh; rows that fill a mini-batch up count for nothing."""
    chosen, rejected = pair_maker(all_pairs)(batch)
    pairs = [*zip(chosen, rejected, strict=True)]
    wanted = preference_batch(preferences_of(batch, pairs), 2 * WIDTH)
    mask = np.zeros_like(wanted["mask"])
    for row, both in zip(mask, pairs, strict=True):  # holes and all
        joined = [batch["mask"][i, : batch.sequence_lengths[i]] for i in both]
        row[: sum(map(len, joined))] = np.concatenate(joined)
    assert (mask != wanted["mask"]).any()
    wanted = wanted.add(mask=mask)
    how = PreferenceObjective(loss=DPO), sequence_mean_token_mean
    expected = build(params, *how, width=2 * WIDTH)(wanted)
    run = build(params, *how, width=2 * WIDTH, rows=4, mesh=mesh_of(fsdp=4, tensor=2))
    (minibatch,), metrics = pairs_of(batch, all_pairs)
    assert len(minibatch.tokens) == 12 > int(metrics["pairs/count"])
    got = run(minibatch)
    assert_same(got[0], expected[0])
    for name in ("loss", "rewards/margins", "rewards/accuracies"):
        assert_allclose(got[1][name], expected[1][name], rtol=2e-5, err_msg=name)


def test_what_is_no_pair_is_refused(batch):
    one = jnp.array([0])
    for function, expected in (
        (lambda scores: scores, "Pairs"),
        (lambda scores: Pairs(scores, scores, scores > 0), "chosen"),
        (lambda scores: Pairs(jnp.arange(2), jnp.arange(2), jnp.ones(2)), "valid"),
        (lambda scores: Pairs(one, jnp.array([4]), jnp.array([True])), "prompts"),
        (lambda scores: Pairs(one, jnp.array([12]), jnp.array([True])), "11"),
    ):
        with pytest.raises(ScoreError, match=expected):
            pair_maker(function)(batch)


def test_a_reference_on_the_host_is_there_again_after_a_refresh():
    reference = Reference(
        infer=Mock(),
        params=None,
        copy=lambda params: jax.tree.map(jnp.copy, params),
        mix=lambda before, after: jax.tree.map(lambda x, y: 0.75 * x + 0.25 * y, before, after),
        settings=ReferenceConfig(refresh_every=2, mix=0.25),
        on_host=True,
    )
    zero = jnp.zeros((), jnp.int32)
    old, policy = (TrainState({"w": jnp.full(2, value)}, (), zero, zero) for value in (4.0, 8.0))
    old = old._replace(params=to_host(old.params))
    new = reference.refreshed(old, policy)
    assert new.params["w"].sharding.memory_kind == "pinned_host" and int(new.updates) == 1
    assert_array_equal(new.params["w"], [5.0, 5.0])
    assert [reference.is_due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]


def kept_by(batch, function, size=ANSWERS):
    keep = per_answer(function, "algorithm.answer_filter", np.bool_)
    return select_kept(keep, size, size // GROUP, batch)


@jax.jit
def imitation(params, tokens, sizes, mask, shares):
    """Return Σ −log π of tokens by their shares, one sequence a row, and its gradient."""

    def loss(params):
        given = Batch(tokens, sizes, {})
        logprobs = chosen(by_rows(SPEC, params, given), tokens)
        return -jnp.sum(jnp.where(mask, shares * logprobs, 0.0))

    return jax.value_and_grad(loss)(params)


def test_imitating_the_kept_answers_is_supervised_training_on_them(params, batch):
    """One by one, without packing; the mean is over the kept answers."""
    (minibatch,), metrics = kept_by(batch, functools.partial(shaping.at_least, threshold=1.0))
    rows, counts = [1, 3, 4, 5, 6, 7], batch["mask"].sum(1)
    assert metrics == {"batch/kept_answers": len(rows)}
    shares = np.zeros(batch["mask"].shape, np.float32)
    for i in rows:
        shares[i] = 1 / (len(rows) * counts[i])
    arrays = batch.tokens, batch.sequence_lengths, batch["mask"], shares
    loss, gradient = jax.device_get(imitation(params, *arrays))
    objective = PolicyObjective(loss=losses.negative_log_likelihood)
    assert len(minibatch.tokens) == 6, "three prompts, twice"
    got = build(params, objective, sequence_mean_token_mean, width=WIDTH)(minibatch)
    assert_same(got[0], gradient)
    assert_allclose(got[1]["loss"], loss, rtol=2e-5)


def test_the_best_of_each_group_is_kept(batch):
    (minibatch,), metrics = kept_by(batch, shaping.best_of_group)
    assert metrics == {"batch/kept_answers": 2.0}
    assert_array_equal(minibatch.tokens[:2], batch.tokens[[1, 8]])
    assert minibatch.sequence_lengths[2] == 0
    high = functools.partial(shaping.best_of_group, threshold=1.5)
    (empty,), _ = kept_by(batch, high)
    assert minibatch["mask"].any() and not empty["mask"].any()


def test_mini_batches_are_whole_groups_in_their_order_and_filled_up_to_powers_of_two(batch):
    cut = [*cut_minibatches(batch, GROUP)]
    assert len(cut) == 3
    assert_array_equal(cut[1].tokens, batch.tokens[4:8])
    assert [len(filled(batch.take(np.arange(n)), 3).tokens) for n in (0, 3, 4, 7)] == [3, 3, 6, 12]
