"""What a function asks for by name is there: each producer of a field, in whole runs."""

import json
from collections import Counter

import numpy as np
import pytest

from jaxrl_llm.data.rows import read_rows
from tests.e2e.comparing import same
from tests.guarded import NATIVE, RUN

pytestmark = pytest.mark.guards(*RUN, *NATIVE)

REFILL = (
    "algorithm.group_filter=with_spread",
    "algorithm.max_generation_batches=4",
    "rollout.dump_every=1",
)


def steps_of(result):
    return [line for line in result.ok().metrics if line["step"]]


@pytest.fixture(scope="module")
def refilled(run, workshop):
    scorer = f"reward.function={workshop.mine('spread_if_even')}"
    return run(*REFILL, scorer, "steps=3", "checkpoint.every=1").ok()


def test_groups_without_spread_are_drawn_again_and_no_prompt_comes_twice(refilled, workshop):
    lines, used = refilled.metrics[1:], Counter()
    for line in lines:
        assert line["critic/groups_without_spread"] == 0
        assert line["batch/dropped_groups"] >= 2
        assert line["batch/generation_batches"] == 1 + line["batch/dropped_groups"] / 8
        answers = [row["prompt"] for row in refilled.rows(line["step"])]
        assert len(answers) == 32
        assert all(answers[i] == answers[i - i % 4] for i in range(len(answers))), "whole groups"
        used.update(answers[::4])
    assert sum(line["batch/generation_batches"] for line in lines) <= 8, "of 8 prompts, of 64"
    data = read_rows(workshop.data / "train.parquet")
    assert used <= Counter(json.dumps(row["prompt"], ensure_ascii=False) for row in data)


@pytest.mark.slow
def test_a_run_killed_while_it_draws_again_continues_bit_for_bit(
    refilled, workshop, until, tmp_path
):
    """Killed while the groups that step 2 draws again are being scored."""
    calls, run_dir = tmp_path / "calls", workshop.folder()
    scorer = f"{{fn: '{workshop.mine('spread_if_even')}', log: '{calls}'}}"
    words = (*REFILL, f"reward.function={scorer}", "steps=3", "checkpoint.every=1")
    moment = 16 + int(32 * (refilled.metrics[1]["batch/generation_batches"] + 1)) + 4
    process = workshop.start(*words, run_dir=run_dir)
    reached = until(lambda: calls.exists() and calls.stat().st_size >= moment, process)
    process.kill()
    process.communicate()
    assert reached and calls.stat().st_size < moment + 32
    result = workshop.finish(workshop.start(*words, run_dir=run_dir), run_dir).ok()
    assert result.learned == refilled.learned
    same(workshop.params(result.run_dir), workshop.params(refilled.run_dir))


@pytest.mark.slow
def test_greedy_scores_are_those_of_greedy_answers(run, workshop):
    """Validated on the prompts of the only step, in the same order or another."""
    before, line = run(
        f"algorithm.advantage={workshop.mine('greedy_mean')}",
        f"data.validation={workshop.data}/train.parquet",
        "batch={prompts_per_step: 64, prompts_per_minibatch: 64, max_tokens_per_device: 128}",
        "steps=1",
    ).metrics
    greedy = before["val-core/arithmetic/reward/mean@1"]
    assert line["critic/advantages/mean"] == pytest.approx(greedy, rel=1e-4)
    assert line["critic/score/mean"] != pytest.approx(greedy, rel=1e-2)


@pytest.mark.slow
def test_low_precision_in_the_engine_is_measured_and_corrected(run):
    """A sync whose checksum were not that of what the trainer would quantize stops the run."""
    for words, least, most in (
        (("rollout.kv_cache_dtype=int8",), 1e-5, 0.1),
        (("rollout.quantization=fp8",), 1e-4, 0.2),
        (("rollout.quantization=fp8", "model.lora={rank: 4, alpha: 8}"), 1e-4, 0.2),
    ):
        for line in steps_of(run(*words)):
            assert least < line["training/rollout_logprobs_diff_mean"] < most
            assert line["rollout_corr/weight/min"] < 1 < line["rollout_corr/weight/max"] <= 2


@pytest.mark.slow
def test_online_dpo_begins_at_log_two_and_again_after_a_refresh(run, workshop):
    """A run that goes on after the refresh is the run that was not stopped."""
    words = ("algorithm.pairs=best_and_worst", "algorithm.pair_loss={fn: dpo, beta: 0.5}")
    words += ("batch.prompts_per_minibatch=null", "checkpoint.every=1", "checkpoint.keep=9")
    words += ("reference.refresh_every=2", "validation.before=false", "data.validation=[]")
    online = run(*words, "steps=4").ok()
    lines, log_two = steps_of(online), pytest.approx(np.log(2), abs=1e-5)
    losses = [line["actor/loss"] for line in lines]
    assert losses[0] == log_two and losses[2] == log_two
    assert abs(losses[1] - np.log(2)) > 1e-3 < abs(losses[3] - np.log(2))
    assert abs(lines[2]["actor/rewards/margins"]) < 1e-5 < abs(lines[1]["actor/rewards/margins"])
    for line in lines:
        assert 0 < line["pairs/count"] == 8 - line["pairs/tied_groups"]
        assert "critic/advantages/mean" not in line and line["actor/grad_norm"] > 0
    policy = workshop.params(online.run_dir, 2)
    for step, expected in ((2, policy), (3, policy), (4, workshop.params(online.run_dir, 4))):
        same(workshop.params(online.run_dir, step, role="reference"), expected)
    stopped = run(*words, "steps=3").ok()
    again = run(*words, "steps=4", run_dir=stopped.run_dir).ok()
    assert again.learned == online.learned
    for role in ("actor", "reference"):
        same(*(workshop.params(x.run_dir, 4, role=role) for x in (again, online)))
