"""What a function asks for by name is there: each producer of a field, in whole runs."""

import dataclasses
import json
from collections import Counter

import jax
import numpy as np
import pyarrow.parquet
import pytest

from jaxrl_llm import export
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.training.export import export_model
from tests.guarded import NATIVE, RUN

pytestmark = pytest.mark.guards(*RUN, *NATIVE)

PPO = (
    "algorithm.advantage=gae_whitened",
    "critic.optim.schedule.value=1e-3",
    "critic.loss.clip=0.2",
    "checkpoint.every=1",
    "checkpoint.keep=9",
)
PER_DRAW = 8 * 4
REFILL = (
    "algorithm.group_filter=with_spread",
    "algorithm.max_generation_batches=4",
    "rollout.dump_every=1",
)


def critic_at(workshop, run_dir, step):
    spec = dataclasses.replace(read_spec(workshop.base), value_head=True)
    like = jax.eval_shape(lambda: init_params(spec, key=jax.random.key(0)))
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=None, read_only=True)
    tree = checkpoints.restore_params(like, step, role="critic").state
    checkpoints.close()
    return by_path(tree)


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


# ----------------------------------------------------------------------------------- the critic


@pytest.fixture(scope="module")
def ppo(run):
    return run(*PPO, "critic.warmup_steps=1", "steps=4").ok()


def test_the_critic_warms_up_before_the_actor_learns(ppo, workshop, same):
    _, first, second, *_ = ppo.metrics
    assert first["critic/grad_norm"] > 0 and "actor/grad_norm" not in first
    assert second["critic/grad_norm"] > 0 and second["actor/grad_norm"] > 0
    base = by_path(load_params(workshop.base, read_spec(workshop.base)))
    same(workshop.params(ppo.run_dir, 1), base)
    moved = critic_at(workshop, ppo.run_dir, 1)
    assert all(np.any(moved[name] != array) for name, array in base.items() if name in moved)


@pytest.mark.slow
def test_a_new_critic_begins_at_zero_and_learns_the_returns(ppo, run):
    lines = ppo.metrics[1:]
    assert lines[0]["critic/values/max"] == lines[0]["critic/values/min"] == 0
    assert lines[-1]["critic/values/mean"] > 0
    patient = run(*PPO, "critic.warmup_steps=8", "steps=8", "critic.loss=squared_value_loss").ok()
    losses = [line["critic/vf_loss"] for line in patient.metrics[1:]]
    assert np.mean(losses[-2:]) < 0.5 * losses[0]


@pytest.mark.slow
def test_a_run_with_a_critic_continues_bit_for_bit(ppo, run, workshop, same):
    short = run(*PPO, "critic.warmup_steps=1", "steps=2").ok()
    result = run(*PPO, "critic.warmup_steps=1", "steps=4", run_dir=short.run_dir).ok()
    for mine, expected in zip(result.learned[1:], ppo.learned[1:], strict=True):
        assert {name: mine[name] for name in expected} == expected
    same(workshop.params(result.run_dir), workshop.params(ppo.run_dir))
    same(critic_at(workshop, result.run_dir, 4), critic_at(workshop, ppo.run_dir, 4))


@pytest.mark.slow
def test_a_critic_starts_from_another_checkpoint(ppo, run, workshop, same, tmp_path):
    saved = tmp_path / "critic"
    assert export.main([str(ppo.run_dir), str(saved), "--step", "1", "--role", "critic"]) == 0
    assert read_spec(saved).value_head
    again = by_path(load_params(saved, read_spec(saved)))
    same(again, critic_at(workshop, ppo.run_dir, 1))
    first = run(*PPO, f"critic.path={saved}", "steps=1").ok().metrics[1]
    assert first["critic/values/mean"] != 0


# --------------------------------------------------------------- what else functions may ask for


@pytest.mark.slow
def test_greedy_scores_are_those_of_greedy_answers(run, workshop):
    """Validated on the prompts of the only step, in the same order or another."""
    result = run(
        f"algorithm.advantage={workshop.mine('greedy_mean')}",
        f"data.validation={workshop.data}/train.parquet",
        "batch.prompts_per_step=64",
        "batch.prompts_per_minibatch=64",
        "steps=1",
    ).ok()
    greedy = result.metrics[0]["val-core/arithmetic/reward/mean@1"]
    assert result.metrics[1]["critic/advantages/mean"] == pytest.approx(greedy, rel=1e-4)
    assert result.metrics[1]["critic/score/mean"] != pytest.approx(greedy, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("column", "metric"), [(0, "reward/acc/mean"), (1, "critic/score/mean")])
def test_score_components_are_what_the_reward_function_reported(run, workshop, column, metric):
    result = run(
        f"algorithm.advantage={{fn: '{workshop.mine('component_mean')}', column: {column}}}",
        f"reward.function={workshop.mine('reward_with_more')}",
        "reward.components=[acc, score]",
        "steps=1",
    ).ok()
    line = result.metrics[1]
    assert line["critic/advantages/mean"] == pytest.approx(line[metric], rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_covariance_is_over_the_whole_mini_batch(run):
    """So that the tokens that clip_cov drops do not depend on the cut into micro-batches."""
    select = "algorithm.high_covariance={fn: select_clip_cov, ratio: 0.2, low: 0.0}"
    results = [
        run("algorithm.loss=clip_cov", select, f"batch.max_tokens_per_device={size}").ok()
        for size in (16, 512)
    ]
    for small, large in zip(*(result.metrics for result in results), strict=True):
        assert small.get("actor/pg_clipfrac", 1) > 0.1
        for name in small.keys() & {"actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac"}:
            assert small[name] == pytest.approx(large[name], rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimal_token_baseline", "optimal_token_baseline_multi_turn"])
def test_optimal_token_baselines_run(run, name):
    line = run(f"algorithm.advantage={name}", "steps=1").ok().metrics[1]
    assert line["critic/advantages/max"] > 0 > line["critic/advantages/min"]
    assert line["actor/grad_norm"] > 0


@pytest.mark.slow
def test_the_reward_model_of_prime_learns_from_the_labels(run):
    expected = (
        "algorithm.advantage=prime",
        "implicit_reward_model.optim.schedule.value=3e-3",
        "steps=6",
    )
    lines = run(*expected, "reward.function=arithmetic").ok().metrics[1:]
    assert lines[0]["implicit_reward_model/loss"] == pytest.approx(
        np.log(2), abs=0.05
    )  # of two updates
    assert min(line["implicit_reward_model/loss"] for line in lines) < np.log(2) - 0.1
    assert all(line["implicit_reward_model/grad_norm"] > 0 for line in lines)


@pytest.mark.slow
def test_an_update_on_policy_needs_no_pass_for_old_logprobs(run, workshop):
    """Another advantage that asks for them brings the pass back; nothing else changes."""
    words = ("batch.prompts_per_minibatch=null", "algorithm.kl_loss=k3", "algorithm.kl_coef=0.1")
    asking = f"algorithm.advantage={workshop.mine('grpo_that_asks_for_old_logprobs')}"
    actual, expected = run(*words).ok(), run(*words, asking).ok()
    for a, b in zip(actual.learned[1:], expected.learned[1:], strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert a[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert actual.learned[2]["actor/kl"] > 0
    passes = ["timing_s/old_log_prob" in result.metrics[1] for result in (actual, expected)]
    assert passes == [False, True]


# ---------------------------------------------------------------------------------- corrections


@pytest.mark.slow
def test_corrections_multiply_the_policy_loss(run, workshop):
    half = workshop.mine("half")
    plain, halved = (
        run(f"algorithm.correction={chain}", "batch.prompts_per_minibatch=8", "steps=1")
        .ok()
        .metrics[1]
        for chain in ("[truncated_token]", f"[truncated_token, '{half}', '{half}']")
    )
    assert halved["rollout_corr/weight/mean"] == pytest.approx(0.25, rel=1e-4)
    assert plain["rollout_corr/weight/mean"] == pytest.approx(1.0, rel=1e-4)
    assert halved["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"] / 4, rel=1e-3)


@pytest.mark.slow
def test_low_precision_in_the_cache_is_measured_and_corrected(run):
    _, line = run("rollout.kv_cache_dtype=int8", "steps=1").ok().metrics
    assert 1e-5 < line["training/rollout_logprobs_diff_mean"] < 0.1
    assert line["rollout_corr/weight/min"] < 1 < line["rollout_corr/weight/max"] <= 2


@pytest.mark.slow
def test_bypass_trusts_the_engine_s_log_probs(run):
    plain, bypassed = (
        run(f"algorithm.use_rollout_logprobs={flag}").ok().metrics[1:] for flag in ("false", "true")
    )
    for mine, expected in zip(bypassed, plain, strict=True):
        assert mine["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
        assert abs(mine["rollout_corr/kl"]) < 1e-5
        assert mine["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=0.2)


# ----------------------------------------------------------------------------- compiling only once


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("algorithm.advantage=remax", "algorithm.correction=[icepop]", *REFILL),
            marks=pytest.mark.slow,
            id="remax",
        ),
        pytest.param(
            (
                "algorithm.advantage=gae",
                "algorithm.use_rollout_logprobs=true",
                "batch.epochs_per_step=2",
            ),
            id="gae",
        ),
        pytest.param(
            ("algorithm.advantage=prime", "reward.function=arithmetic"),
            marks=pytest.mark.slow,
            id="prime",
        ),
    ],
)
def test_nothing_compiles_after_the_second_step(run, workshop, tmp_path, overrides, patient):
    scorer = f"reward.function={workshop.mine('spread_if_even')}"
    penalty = "algorithm.penalty={fn: overlong_penalty, max_tokens: 4, buffer: 2}"
    own = tmp_path / "compiled"  # what another test has compiled would not be counted
    lines = run(scorer, penalty, *overrides, "steps=6", compiled=own).ok().metrics[1:]
    assert len({line["perf/total_num_tokens"] for line in lines}) > 1, "shapes could vary"
    assert lines[0]["perf/compilations"] > 0, "the counter counts nothing"
    assert [line["perf/compilations"] for line in lines[2:]] == [0] * 4


# ----------------------------------------------------------------------------- dynamic sampling


@pytest.fixture(scope="module")
def refilled(run, workshop):
    scorer = f"reward.function={workshop.mine('spread_if_even')}"
    return run(*REFILL, scorer, "steps=3", "checkpoint.every=1").ok()


def test_groups_without_spread_are_drawn_again(refilled):
    for line in refilled.metrics[1:]:
        assert line["critic/groups_without_spread"] == 0
        assert line["batch/dropped_groups"] >= 2
        assert line["batch/generation_batches"] == 1 + line["batch/dropped_groups"] / 8
    for path in refilled.run_dir.glob("rollouts/*.parquet"):
        rows = pyarrow.parquet.read_table(path).to_pylist()
        assert len(rows) == PER_DRAW
        answers = [row["prompt"] for row in rows]
        assert all(answers[i] == answers[i - i % 4] for i in range(len(answers))), "whole groups"


@pytest.mark.slow
def test_errors_of_answers_that_are_dropped_are_counted(run, workshop):
    scorer = f"reward.function={workshop.mine('raises_on_odd')}"
    words = [scorer, "steps=1", "reward.max_error_share=1"]
    line = run(*REFILL, *words).ok().metrics[1]
    assert line["reward/errors"] == 4 * line["batch/dropped_groups"] > 0
    greedy = run("algorithm.advantage=remax", *words).ok().metrics[1]
    assert 0 < greedy["reward/greedy_errors"] < greedy["reward/errors"]


@pytest.mark.slow
def test_a_run_that_drew_too_often_goes_on_with_more_draws(run, workshop):
    scorer = f"reward.function={workshop.mine('spread_if_even')}"
    words = (*REFILL, scorer, "checkpoint.every=1")
    first = run(*words, "steps=1").ok()
    stopped = run(*words, "steps=2", "algorithm.max_generation_batches=1", run_dir=first.run_dir)
    refused(stopped, 1, "Raise algorithm.max_generation_batches and run the same command again")
    assert run(*words, "steps=2", run_dir=first.run_dir).ok().metrics[-1]["step"] == 2


def test_no_prompt_is_used_twice_in_an_epoch(refilled, workshop):
    assert sum(line["batch/generation_batches"] for line in refilled.metrics[1:]) <= 8, (
        "of 8 prompts, of 64"
    )
    used = Counter(
        row["prompt"]
        for path in refilled.run_dir.glob("rollouts/*.parquet")
        for row in pyarrow.parquet.read_table(path).to_pylist()[::4]
    )
    data = read_rows(workshop.data / "train.parquet")
    assert used.total() == 24
    assert used <= Counter(json.dumps(row["prompt"], ensure_ascii=False) for row in data)


@pytest.mark.slow
def test_a_run_killed_while_it_draws_again_continues_bit_for_bit(
    refilled, workshop, until, same, tmp_path
):
    """Killed while the groups that step 2 draws again are being scored."""
    calls, run_dir = tmp_path / "calls", workshop.folder()
    words = (
        *REFILL,
        f"reward.function={{fn: '{workshop.mine('spread_if_even')}', log: '{calls}'}}",
        "steps=3",
        "checkpoint.every=1",
    )
    moment = 16 + int(PER_DRAW * (refilled.metrics[1]["batch/generation_batches"] + 1)) + 4
    process = workshop.start(*words, run_dir=run_dir)
    reached = until(lambda: calls.exists() and calls.stat().st_size >= moment, process)
    process.kill()
    process.communicate()
    assert reached and calls.stat().st_size < moment + PER_DRAW
    result = workshop.finish(workshop.start(*words, run_dir=run_dir), run_dir).ok()
    assert result.learned == refilled.learned
    same(workshop.params(result.run_dir), workshop.params(refilled.run_dir))


# ------------------------------------------------------------------------------------- mistakes


def refused(result, status, text):
    assert result.status == status
    assert text in result.err.splitlines()[-1], result.err


def test_what_has_no_producer_is_refused(run, workshop):
    for overrides, text in {
        ("algorithm.loss=clip_cov",): "algorithm.high_covariance is not set, but a function asks",
        ("algorithm.advantage=gdpo",): "reward.components is not set, but a function asks for",
        ("reward.components=[acc]",): "reward.components is set, but no function asks for",
        ("critic.warmup_steps=2",): "critic is set, but no function asks for old_values or returns",
        (
            "implicit_reward_model.path=x",
        ): "implicit_reward_model is set, but no function asks for reward_logprobs",
        (
            "algorithm.use_rollout_logprobs=true",
            "algorithm.correction=[icepop]",
        ): "has nothing to correct",
        (
            "algorithm.use_rollout_logprobs=true",
            "algorithm.advantage=optimal_token_baseline",
        ): "skips the pass that computes 'sum_pi_squared'",
        ("algorithm.group_filter=with_spread", "steps=null"): "set steps",
        ("algorithm.group_filter=grpo",): "no function 'grpo' in jaxrl_llm.algorithms.shaping",
        (
            f"algorithm.group_filter={workshop.mine('greedy_mean')}",
        ): "asks for 'greedy_scores', which",
        ("algorithm.correction=[truncated_tokn]",): "did you mean 'truncated_token'?",
        ("critic.loss.clp=1", "algorithm.advantage=gae"): "critic.loss: 'clipped_value_loss' takes",
        ("critic.optim.schedule=x", "algorithm.advantage=gae"): "critic.optim.schedule: ",
        ("critic.path=nowhere", "algorithm.advantage=gae"): "critic.path: ",
        ("algorithm.loss.clip_low=-1.0",): "algorithm.loss: ppo_clip: got clip_low -1.0",
        ("critic.loss.clip=-1.0", "algorithm.advantage=gae"): "critic.loss: clipped_value_loss: ",
        ("algorithm.correction=[{fn: icepop, low: 9.0}]",): "algorithm.correction[0]: icepop: ",
        (
            "algorithm.penalty={fn: overlong_penalty, max_tokens: 1, buffer: 2}",
        ): "algorithm.penalty:",
        (
            "algorithm.advantage={fn: gdpo, weights: [1.0, 2.0]}",
            "reward.components=[score]",
        ): "algorithm.advantage: gdpo: ",
        ("algorithm.advantage={fn: prime, beta: 0.5}",): "implicit_reward_model.loss has beta=0.05",
        (
            "algorithm.advantage=gdpo",
            "reward.components=[score]",
            "algorithm.kl_reward=k1",
        ): "algorithm.kl_reward changes the scores and rewards, but no function asks for them",
    }.items():
        refused(run(*overrides), 2, text)


@pytest.mark.slow
def test_what_a_function_returns_is_checked(run, workshop):
    mine = workshop.mine
    for overrides, status, text in [
        (
            [f"algorithm.group_filter={mine('half_of_each_group')}"],
            1,
            "kept 2 of the 4 answers of a group",
        ),
        (
            [f"algorithm.group_filter={mine('numbers')}"],
            2,
            "expected one true or false for each answer",
        ),
        (
            [f"algorithm.group_filter={mine('none_at_all')}", "algorithm.max_generation_batches=2"],
            1,
            "kept 0 of 16 groups",
        ),
        ([f"algorithm.correction=['{mine('nan_weights')}']"], 1, "returned NaN or infinity"),
        ([f"algorithm.correction=['{mine('weight_of_an_answer')}']"], 2, "one weight for each tok"),
        (
            [f"algorithm.advantage={mine('baseline_of_values')}"],
            2,
            "expected a pair (advantages, returns",
        ),
        (
            ["algorithm.advantage=gdpo", "reward.components=[style]"],
            1,
            "reward.components names 'style', but the reward function reported a bare number",
        ),
        (
            [
                "algorithm.advantage=prime",
                f"reward.function={{fn: '{mine('reward_with_more')}', bonus: 2.0}}",
            ],
            1,
            "learns from labels in [0, 1]",
        ),
    ]:
        refused(run(*overrides, "validation.before=false", "steps=1"), status, text)


@pytest.mark.slow
def test_a_role_that_was_not_trained_is_not_exported(finished, tmp_path, capsys):
    status = export.main([str(finished.run_dir), str(tmp_path / "out"), "--role", "critic"])
    assert status == 2
    assert "trains no critic, only actor" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("vocab_size", 8), ("max_position_embeddings", 8)], ids=["tokens", "places"]
)
def test_a_critic_must_know_the_policy_s_tokens(run, workshop, tmp_path, name, size):
    saved = tmp_path / "small"
    config = json.loads((workshop.base / "config.json").read_text()) | {name: size}
    saved.mkdir()
    (saved / "config.json").write_text(json.dumps(config))
    result = run("algorithm.advantage=gae", f"critic.path={saved}")
    refused(result, 2, f"={size}, expected the policy's ")


def test_a_critic_is_no_policy(run, ppo, tmp_path):
    saved = tmp_path / "critic"
    export_model(ppo.run_dir, saved, step=2, dtype="float32", role="critic")
    refused(run(f"model.path={saved}"), 2, "ends in a value head, expected a language model")
