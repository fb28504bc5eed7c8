"""Runs of `train` on pairs of their answers, on some of them, and with a reference that moves."""

import jax
import numpy as np
import pytest

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.runs.checkpoint import Checkpoints
from tests.guarded import NATIVE, RUN

pytestmark = pytest.mark.guards(*RUN, *NATIVE)

ONE_UPDATE = ("batch.prompts_per_minibatch=null", "checkpoint.every=1", "checkpoint.keep=9")
PAIRS = ("algorithm.pairs=best_and_worst", "algorithm.pair_loss={fn: dpo, beta: 0.5}", *ONE_UPDATE)
REFRESH = "reference.refresh_every=2"
LOG_TWO = pytest.approx(np.log(2), abs=1e-5)


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def reference_at(workshop, run_dir, step):
    like = jax.eval_shape(lambda: init_params(read_spec(workshop.base), key=jax.random.key(0)))
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=None, read_only=True)
    tree = checkpoints.restore_params(like, step, role="reference").state
    checkpoints.close()
    return by_path(tree)


# ------------------------------------------------------------------------------------------ pairs


@pytest.fixture(scope="module")
def online(run):
    return run(*PAIRS, REFRESH, "steps=4").ok()


def test_online_dpo_begins_at_log_two_and_again_after_a_refresh(online):
    lines = online.metrics[1:]
    losses = [line["actor/loss"] for line in lines]
    assert losses[0] == LOG_TWO and losses[2] == LOG_TWO
    assert abs(losses[1] - np.log(2)) > 1e-3 < abs(losses[3] - np.log(2))
    assert abs(lines[2]["actor/rewards/margins"]) < 1e-5 < abs(lines[1]["actor/rewards/margins"])
    for line in lines:
        assert 0 < line["pairs/count"] == 8 - line["pairs/tied_groups"]
        assert "critic/advantages/mean" not in line and line["actor/grad_norm"] > 0


def test_a_refreshed_reference_is_the_policy_of_its_step(online, workshop, same):
    base = by_path(load_params(workshop.base, read_spec(workshop.base)))
    policies = [workshop.params(online.run_dir, step) for step in (2, 4)]
    for step, expected in ((1, base), (2, policies[0]), (3, policies[0]), (4, policies[1])):
        same(reference_at(workshop, online.run_dir, step), expected)


@pytest.mark.slow
def test_a_run_that_goes_on_after_a_refresh_is_the_run_that_was_not_stopped(
    online, run, workshop, same
):
    stopped = run(*PAIRS, REFRESH, "steps=3").ok()
    again = run(*PAIRS, REFRESH, "steps=4", run_dir=stopped.run_dir).ok()
    for mine, expected in zip(again.learned[1:], online.learned[1:], strict=True):
        assert {name: mine[name] for name in expected} == expected  # it has validated once more
    same(workshop.params(again.run_dir), workshop.params(online.run_dir))
    same(reference_at(workshop, again.run_dir, 4), reference_at(workshop, online.run_dir, 4))


@pytest.mark.slow
def test_micro_batches_change_nothing_of_a_step_on_pairs(online, run):
    """Those of the other run hold a pair each."""
    (_, line) = run(*PAIRS, "steps=1", "batch.max_tokens_per_device=32").ok().metrics
    for name in ("actor/loss", "actor/grad_norm", "actor/rewards/chosen", "pairs/count"):
        assert line[name] == pytest.approx(online.metrics[1][name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_all_pairs_and_other_losses_of_pairs(run):
    words = ("algorithm.pairs=all_pairs", "algorithm.pair_loss=orpo", "steps=2")
    lines = run(*words, "batch.epochs_per_step=2").ok().metrics[1:]
    for line in lines:
        assert line["pairs/count"] > 8 and line["actor/nll"] > 0
        assert "timing_s/ref" not in line


# ---------------------------------------------------------------------------------- some answers


@pytest.mark.slow
def test_raft_imitates_the_best_answers(run):
    words = ("algorithm.answer_filter=best_of_group", "algorithm.loss=negative_log_likelihood")
    lines = run(*words, *ONE_UPDATE, "optim.schedule.value=3e-3", "steps=8").ok().metrics[1:]
    assert all(0 < line["batch/kept_answers"] <= 8 for line in lines)
    first, last = ([line["critic/score/mean"] for line in some] for some in (lines[:2], lines[-2:]))
    assert np.mean(last) > np.mean(first) + 0.1


@pytest.mark.slow
def test_clipping_and_a_kl_work_on_kept_answers_too(run):
    """A filter that keeps all changes nothing but the pass that the update made before."""
    keep = "algorithm.answer_filter={fn: at_least, threshold: -1.0}"
    words = ("algorithm.kl_loss=k3", "algorithm.kl_coef=0.1", *ONE_UPDATE)
    kept, plain = (run(*words, *more).ok().learned[1:] for more in ((keep,), ()))
    for mine, expected in zip(kept, plain, strict=True):
        assert mine.pop("batch/kept_answers") == 32 and mine.keys() == expected.keys()
        for name, value in expected.items():
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_steps_with_nothing_to_learn_from_stop_the_run(run, workshop, same, caplog):
    none = "algorithm.answer_filter={fn: at_least, threshold: 99.0}"
    words = (none, "algorithm.max_generation_batches=3", *ONE_UPDATE)
    first = run(*words, "steps=1").ok()
    assert "step 1: algorithm.answer_filter left nothing to train on" in caplog.text
    line = first.metrics[1]
    assert line["batch/kept_answers"] == 0 and "actor/loss" not in line
    base = by_path(load_params(workshop.base, read_spec(workshop.base)))
    same(workshop.params(first.run_dir), base)
    again = run(*words, "steps=9", run_dir=first.run_dir)
    assert again.status == 1
    assert "step 3: algorithm.answer_filter left nothing to train on in 3 steps" in again.err


# ------------------------------------------------------------------------------------- reference


def kls(result):
    return [line["actor/kl"] for line in result.metrics[1:]]


KL = ("algorithm.kl_loss=k3", *ONE_UPDATE)


@pytest.mark.slow
def test_a_refresh_brings_the_kl_to_zero_beside_an_adapter(run):
    words = ("model.lora={rank: 2}", "optim.schedule.value=1e-2", "steps=3")
    first, second, third = kls(run(*KL, *words, REFRESH).ok())
    assert max(first, third) < 1e-9 < 1e-6 < second


@pytest.mark.slow
def test_a_refresh_can_mix_on_a_mesh_of_its_own_and_on_the_host(run, workshop):
    words = ("reference.refresh_every=1", "reference.mix=0.25", "offload.reference=true")
    apart = ("mesh.train.devices=1", "mesh.rollout.devices=1", "mesh.reference.first_device=1")
    result = run(*KL, *words, *apart, "steps=2", devices=2).ok()
    first, second = kls(result)
    assert first < 1e-9 < 1e-6 < second
    old = by_path(load_params(workshop.base, read_spec(workshop.base)))
    for step in (1, 2):
        policy = workshop.params(result.run_dir, step)
        old = {name: 0.25 * policy[name] + 0.75 * array for name, array in old.items()}
        for name, array in reference_at(workshop, result.run_dir, step).items():
            np.testing.assert_allclose(array, old[name], rtol=1e-6, atol=1e-7)
