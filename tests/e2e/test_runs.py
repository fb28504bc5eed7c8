"""What whole runs do and leave behind."""

import json
import math

import jax
import numpy as np
import pyarrow.parquet
import pytest
import yaml

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.sft import main as sft_main
from tests.guarded import RUN


def trained(result):
    """The metrics of a run's steps, without those of the validation before them."""
    return [line for line in result.metrics if line["step"] > 0]


# ------------------------------------------------------------------------- compiling only once


def test_nothing_compiles_after_the_second_step(run, workshop, tmp_path, caplog, patient):
    """Prompts of 2 to 50 characters: three widths of prefill, and rows filled differently."""
    dice = np.random.default_rng(0)
    rows = read_rows(workshop.data / "train.parquet")
    for number, row in enumerate(rows):
        size = 2 + 48 * (number % 8) // 7 + int(dice.integers(0, 3))
        row["prompt"][0]["content"] = "".join(dice.choice(list("0123456789+="), size))
    path = tmp_path / "ragged.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    jax.clear_caches()  # what other tests have compiled in this process would not be counted
    result = run(
        f"data.train={path}",
        "data.max_prompt_tokens=52",
        "data.filter_overlong=true",
        "algorithm.kl_loss=k3",
        "batch.epochs_per_step=2",
        "steps=7",
        "validation.every=2",
        "rollout.dump_every=2",
        "checkpoint.every=1",  # the first one compiles its checksums
        compiled=tmp_path / "compiled",
    ).ok()
    lines = trained(result)
    longest = {line["prompt_length/max"] for line in lines}
    assert max(longest) > 32 and min(line["prompt_length/min"] for line in lines) < 16
    assert "rows longer than max_prompt_tokens=52" in caplog.text
    assert lines[0]["perf/compilations"] > 0, "the counter counts nothing"
    assert [line["perf/compilations"] for line in lines[2:]] == [0] * 5


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_supervised_training_moves_its_bar_at_each_step(workshop, monkeypatch, caplog):
    """And says what goes on before the first one."""
    moves, before = [], []
    advance = Display.advance

    def moved(self, text=""):
        before.append(list(caplog.messages))
        moves.append(text)
        advance(self, text)

    monkeypatch.setattr(Display, "advance", moved)
    with caplog.at_level("INFO", "jaxrl_llm"):
        folder = workshop.folder()
        words = ("steps=20", f"export_to={folder}.base")
        workshop(*words, main=sft_main, config="sft.yaml", run_dir=folder).ok()
    assert len(moves) == 20
    assert {step for step, text in enumerate(moves, 1) if text} >= {1, *range(2, 21, 2)}
    said = f"supervised training: making ready random weights of {workshop.root}/random"
    assert before[0][0] == said


# ----------------------------------------------------------------------------- user functions


def test_every_function_can_be_the_users_own(run, workshop):
    mine = workshop.mine
    result = run(
        f"algorithm.loss={{fn: '{mine('loss')}', weight: 2.5}}",
        f"algorithm.advantage={{fn: '{mine('advantage')}', shift: 0.25}}",
        f"algorithm.reduce={{fn: '{mine('reduce')}', total: 3.0}}",
        f"algorithm.kl_loss={mine('kl')}",
        f"reward.function={{fn: '{mine('reward_with_more')}', bonus: 0.5}}",
        f"data.dataset={{fn: '{mine('rows')}', source: sums}}",
        "rollout.dump_every=1",
        "batch.prompts_per_minibatch=8",
    ).ok()
    before, first, last = result.metrics
    assert set(before) == {"step", "val-core/sums/acc/mean@1"}
    assert first["actor/my_weight"] == pytest.approx(2.5)
    assert first["critic/advantages/mean"] >= first["critic/score/min"] - 0.25
    assert first["critic/score/min"] >= 0.5
    assert first["actor/kl_loss"] == pytest.approx(3.0, rel=1e-5)  # reduce's total times kl's 1.0
    assert last["actor/loss"] == pytest.approx(
        last["actor/pg_loss"] + 0.001 * last["actor/kl_loss"], rel=1e-3
    )
    rows = pyarrow.parquet.read_table(result.run_dir / "rollouts/step_000001.parquet").to_pylist()
    seen = {json.loads(row["extra"])["seen"].partition("/")[0] for row in rows}
    assert seen == {"sums"}


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_a_dataset_may_be_a_class(run, workshop):
    result = run(f"data.dataset={workshop.mine('Rows')}", "steps=1").ok()
    assert "val-core/class/reward/mean@1" in result.metrics[0]


# ------------------------------------------------------------------------------- algorithms


def both_steps(result, *names):
    lines = trained(result.ok())
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        for name in (*names, "actor/loss", "actor/grad_norm"):
            assert math.isfinite(line[name]), (name, line)
        assert line["actor/grad_norm"] > 0
    return lines


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_kl_in_the_loss(run):
    first, last = both_steps(run("algorithm.kl_loss=k3", "algorithm.kl_coef=0.5"), "actor/kl")
    assert first["actor/kl"] == pytest.approx(0, abs=1e-5), "the reference is the first policy"
    assert last["actor/kl"] > 1e-5 and last["actor/kl_loss"] > 0
    assert first["actor/kl_coef"] == last["actor/kl_coef"] == 0.5
    for line in (first, last):
        whole = line["actor/pg_loss"] + 0.5 * line["actor/kl_loss"]
        assert line["actor/loss"] == pytest.approx(whole, abs=1e-6)


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_kl_in_the_reward_with_a_coefficient_that_adapts(run):
    controller = "algorithm.kl_controller={fn: adaptive, target: 0.1, horizon: 64}"
    result = run("algorithm.kl_reward=k1", controller, "algorithm.kl_coef=0.5", "steps=3")
    lines = trained(result.ok())
    # 32 answers of no KL: the error is clipped to -0.2, so the factor is 1 - 0.2 * 32 / 64.
    assert lines[1]["actor/kl_coef"] == pytest.approx(0.5 * 0.9)
    assert lines[2]["actor/kl_coef"] != lines[1]["actor/kl_coef"]
    assert lines[1]["critic/rewards/mean"] != lines[1]["critic/score/mean"]
    assert "actor/kl_loss" not in lines[0]


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_an_entropy_bonus(run):
    for line in both_steps(run("algorithm.entropy_coef=0.5"), "actor/entropy_loss"):
        whole = line["actor/pg_loss"] - 0.5 * line["actor/entropy_loss"]
        assert line["actor/loss"] == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_dr_grpo(run):
    norm = "algorithm.reduce={fn: sequence_mean_token_sum_norm, horizon: 4}"
    both_steps(run("algorithm.advantage=dr_grpo", norm))


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_rloo_and_two_epochs_a_step(run):
    result = run("algorithm.advantage=rloo", "batch.epochs_per_step=2")
    lines = both_steps(result, "actor/ppo_kl")
    once = both_steps(run("algorithm.advantage=rloo"), "actor/ppo_kl")
    # Two mini-batches, and the first sees the policy that sampled; in the second epoch none does.
    assert abs(lines[0]["actor/ppo_kl"]) > abs(once[0]["actor/ppo_kl"])


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_bfloat16_with_rematerialisation(run, workshop):
    words = ["model.dtype=bfloat16", "model.remat=full"]
    both_steps(run(*words))
    assert {v.dtype for v in workshop.params(workshop.root / f"run{workshop.count}").values()} == {
        np.dtype(np.float32)
    }


# --------------------------------------------------------------------------- finishing and going on


def test_a_finished_run_prints_its_table_again_and_changes_nothing(run, finished, copy_of):
    folder = copy_of(finished)
    words = ["rollout.dump_every=2", "validation.every=2", "checkpoint.every=2", "steps=4"]
    before = (folder / "metrics.jsonl").read_bytes()
    again = run(*words, "log.trackers=tensorboard", run_dir=folder).ok()
    assert "before and after" in again.out and "critic/score/mean" in again.out
    table = again.out.index("before and after")
    first = finished.out[finished.out.index("before and after") :]
    assert again.out[table:] == first.replace(str(finished.run_dir), str(folder))
    assert "step 4/4" not in again.out[:table]
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2", "4"]


def test_more_steps_continue_a_finished_run(run, finished, copy_of, workshop, same):
    folder = copy_of(finished)
    words = ["rollout.dump_every=2", "validation.every=2", "checkpoint.every=2"]
    longer = run(*words, "steps=6", run_dir=folder).ok()
    assert [line["step"] for line in longer.metrics] == list(range(7))
    assert longer.learned[:5] == finished.learned
    whole = run(*words, "steps=6").ok()
    assert whole.learned == longer.learned
    same(workshop.params(folder), workshop.params(whole.run_dir))


@pytest.mark.slow
@pytest.mark.guards(*RUN, "jaxrl_llm/training/optimizer.py")
@pytest.mark.parametrize("optimizer", ["optax.contrib:muon", "lamb"])
def test_a_run_with_an_optimizer_of_matrices_continues_bit_for_bit(run, workshop, same, optimizer):
    words = [f"optim.optimizer={optimizer}", "optim.schedule.value=1e-2"]
    words += ["checkpoint.every=2", "validation.every=2"]
    folder = run(*words, "steps=2").ok().run_dir
    ended = run(*words, "steps=4", run_dir=folder).ok()
    whole = run(*words, "steps=4").ok()
    assert whole.learned == ended.learned
    same(workshop.params(folder), workshop.params(whole.run_dir))


@pytest.mark.slow
@pytest.mark.guards("algorithms", "jaxrl_llm/training")
def test_epochs_decide_where_steps_do_not(run):
    result = run("steps=null", "epochs=1", "batch.prompts_per_step=32").ok()
    assert [line["step"] for line in result.metrics] == [0, 1, 2]


# ----------------------------------------------------------------------------------- what it leaves


def test_the_rollouts(finished):
    names = sorted(p.name for p in (finished.run_dir / "rollouts").iterdir())
    assert names == [f"step_{step:06d}.parquet" for step in (1, 2, 4)], "the first one, too"
    rows = pyarrow.parquet.read_table(finished.run_dir / "rollouts" / names[1]).to_pylist()
    assert len(rows) == 32
    assert set(rows[0]) == {
        "step",
        "prompt",
        "answer",
        "tokens",
        "finish",
        "turn_ids",
        "chain_ids",
        "turn_rewards",
        "data_source",
        "ground_truth",
        "score",
        "extra",
        "error",
        "advantage",
        "advantages",
        "logprobs",
        "rollout_logprobs",
        "entropies",
    }
    line = next(line for line in finished.metrics if line["step"] == 2)
    assert np.mean([row["score"] for row in rows]) == pytest.approx(line["critic/score/mean"])
    lengths = [len(row["tokens"]) for row in rows]
    assert np.mean(lengths) == pytest.approx(line["response_length/mean"])
    for row in rows:
        (message,) = json.loads(row["prompt"])
        assert json.loads(row["ground_truth"]) == str(eval(message["content"].rstrip("=")))
        assert (row["finish"] == "length") <= (len(row["tokens"]) == 4)
        assert row["score"] == sum(int(c) for c in row["answer"] if c.isdigit()) / 10
        assert len(row["advantages"]) == len(row["tokens"])
        assert row["advantage"] == pytest.approx(np.mean(row["advantages"]), abs=1e-6)
    entropies = [entropy for row in rows for entropy in row["entropies"]]
    assert np.mean(entropies) == pytest.approx(line["actor/entropy"], rel=1e-5)


def test_the_other_files(finished, workshop):
    folder = finished.run_dir
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    versions = json.loads((folder / "versions.json").read_text())
    assert {"jaxrl_llm", "jax", "python", "devices", "seed", "git_commit"} <= set(versions)
    resolved = load(TrainConfig, folder / "config.yaml")
    words = ["steps=4", "rollout.dump_every=2", "validation.every=2", "checkpoint.every=2"]
    words += ["log.trackers=tensorboard", f"run_dir={folder}"]
    assert resolved == load(TrainConfig, workshop.root / "train.yaml", words)
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 0
    assert not list(folder.rglob("*.tmp"))
