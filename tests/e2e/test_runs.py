"""What whole runs do, show and leave behind."""

import json
import re
import shlex

import jax
import numpy as np
import pytest
import yaml

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.export import main as export_main
from jaxrl_llm.monitoring.activity import ACTIVITIES
from jaxrl_llm.training import run as run_module
from tests.e2e.comparing import EVERY_SECOND, same
from tests.guarded import RUN

LEARNING = pytest.mark.guards("algorithms", "jaxrl_llm/training")


def compilations(result):
    lines = [line for line in result.metrics if line["step"]]
    assert lines[0]["perf/compilations"] > 0, "the counter counts nothing"
    assert len({line["perf/total_num_tokens"] for line in lines}) > 1, "shapes could vary"
    return [line["perf/compilations"] for line in lines[2:]]


def test_nothing_compiles_after_the_second_step(run, workshop, tmp_path, caplog, patient):
    """Prompts of 2 to 50 characters: three widths of prefill, and rows filled differently."""
    dice = np.random.default_rng(0)
    rows = read_rows(workshop.data / "train.parquet")
    for number, row in enumerate(rows):
        size = 2 + 48 * (number % 8) // 7 + int(dice.integers(0, 3))
        row["prompt"][0]["content"] = "".join(dice.choice(list("0123456789+="), size))
    jax.clear_caches()  # what other tests have compiled in this process would not be counted
    result = run(
        f"data.train={workshop.write_rows('ragged', rows)}",
        "data.max_prompt_tokens=52",
        "data.filter_overlong=true",
        "algorithm.kl_loss=k3",
        "steps=6",
        "validation.every=2",
        "rollout.dump_every=2",
        "checkpoint.every=1",  # the first one compiles its checksums
        compiled=tmp_path / "compiled",
    ).ok()
    lines = result.metrics[1:]
    assert max(line["prompt_length/max"] for line in lines) > 32
    assert min(line["prompt_length/min"] for line in lines) < 16
    assert "max_prompt_tokens=52" in caplog.text, "rows are filtered"
    assert compilations(result) == [0] * 4


def test_every_function_can_be_the_users_own(run, workshop):
    mine = workshop.mine
    result = run(
        f"algorithm.loss={{fn: '{mine('loss')}', weight: 2.5}}",
        f"algorithm.advantage={{fn: '{mine('advantage')}', shift: 0.25}}",
        f"algorithm.reduce={{fn: '{mine('reduce')}', total: 3.0}}",
        f"algorithm.kl_loss={mine('kl')}",
        f"reward.function={{fn: '{mine('reward_with_more')}', bonus: 0.5}}",
        f"data.dataset={{fn: '{mine('Rows')}', source: sums}}",
        "rollout.dump_every=1",
        "batch.prompts_per_minibatch=8",
    ).ok()
    before, first, last = result.metrics
    assert set(before) == {"step", "val-core/sums/acc/mean@1"}
    assert first["actor/my_weight"] == pytest.approx(2.5)
    assert first["critic/advantages/mean"] >= first["critic/score/min"] - 0.25
    assert first["critic/score/min"] >= 0.5
    assert first["actor/kl_loss"] == pytest.approx(3.0, rel=1e-5)  # reduce's total times kl's 1.0
    loss = last["actor/pg_loss"] + 0.001 * last["actor/kl_loss"]
    assert last["actor/loss"] == pytest.approx(loss, rel=1e-3)
    seen = {json.loads(row["extra"])["seen"].partition("/")[0] for row in result.rows(1)}
    assert seen == {"sums"}


def test_a_finished_run_prints_its_table_again_and_changes_nothing(
    run, finished, copy_of, monkeypatch
):
    """No model is loaded for it."""
    monkeypatch.setattr(run_module, "open_model", None)
    folder = copy_of(finished)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = ("steps=4", *EVERY_SECOND, "log={trackers: tensorboard, answers_every: 3}")
    again = run(*words, run_dir=folder).ok()
    assert again.out.startswith("nothing to do: ") and "step 4/4" not in again.out
    tables = [text[text.index("before and after") :] for text in (again.out, finished.out)]
    assert tables[0] == tables[1].replace(str(finished.run_dir), str(folder))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.guards(*RUN, "jaxrl_llm/training/optimizer.py")
@pytest.mark.parametrize("optimizer", ["adamw", "optax.contrib:muon", "lamb"])
def test_a_run_with_any_optimizer_continues_bit_for_bit(run, workshop, optimizer):
    words = (f"optim.optimizer={optimizer}", "optim.schedule.value=1e-2", *EVERY_SECOND)
    folder = run(*words, "steps=2").ok().run_dir
    ended = run(*words, "steps=4", run_dir=folder).ok()
    whole = run(*words, "steps=4").ok()
    assert whole.learned == ended.learned
    same(workshop.params(folder), workshop.params(whole.run_dir))


@pytest.mark.slow
@LEARNING
def test_epochs_decide_where_steps_do_not(run):
    assert run("steps=null", "epochs=1", "batch.prompts_per_step=32").ok().steps == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rewards", "jaxrl_llm/training")
def test_rewards_that_fail_are_counted_or_stop_the_run(run, workshop):
    often = f"reward.function={workshop.mine('reward_often_fails')}"
    words = ("reward.timeout_s=0.3", "data.shuffle=false", "data.validation=[]")
    result = run(often, *words, "reward.on_error=0.0", "rollout.dump_every=1").ok()
    assert [line["reward/errors"] for line in result.metrics] == [12.0, 0.0]
    kinds = [str(row["error"]).partition(":")[0] for row in result.rows(1)]
    assert kinds == ["exception"] * 4 + ["timeout"] * 4 + ["invalid"] * 4 + ["None"] * 20
    for name in ("reward_raises", "reward_hangs", "reward_nan"):
        function = f"reward.function={workshop.mine(name)}"
        run(function, *words, "reward.on_error=null").refused("reward ", "row", status=1)
    raising = f"reward.function={workshop.mine('reward_raises')}"
    run(raising).refused("reward.max_error_share", "LookupError", status=1)
    run(raising, "reward.max_error_share=1", "steps=1").ok()


def test_the_rollouts(finished):
    names = sorted(p.name for p in (finished.run_dir / "rollouts").iterdir())
    assert names == [f"step_{step:06d}.parquet" for step in (1, 2, 4)], "the first one, too"
    rows, line = finished.rows(2), finished.metrics[2]
    assert len(rows) == 32
    known = "step prompt answer tokens finish turn_ids chain_ids turn_rewards data_source"
    known += " ground_truth score extra error advantage advantages logprobs rollout_logprobs"
    assert set(rows[0]) == {*known.split(), "entropies"}
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
        np.testing.assert_allclose(row["logprobs"], row["rollout_logprobs"], atol=1e-4)
    entropies = [entropy for row in rows for entropy in row["entropies"]]
    assert np.mean(entropies) == pytest.approx(line["actor/entropy"], rel=1e-5)


def test_the_other_files(finished, workshop):
    folder = finished.run_dir
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    versions = json.loads((folder / "versions.json").read_text())
    assert {"jaxrl_llm", "jax", "python", "devices", "seed", "git_commit"} <= set(versions)
    words = ["steps=4", *EVERY_SECOND, f"run_dir={folder}"]
    words += ["log={trackers: tensorboard, answers_every: 3}"]
    expected = load(TrainConfig, workshop.root / "train.yaml", words)
    assert load(TrainConfig, folder / "config.yaml") == expected
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == 0
    assert not list(folder.rglob("*.tmp"))


PREPARING = ("starting", "opening the devices", "reading the data", "loading the weights")


def come_in_order(texts, labels):
    """Assert that some activities began one after another."""
    left = iter(texts)
    for label in labels:
        assert any(label in text for text in left), f"{label!r} does not follow in {texts}"


def test_each_stage_of_training_says_what_it_is(finished):
    stages = "starting the engine|tokenizing the prompts|reading the weights' checksums"
    stages += "|syncing weights|sampling 0/32|scoring|advantages|updating 0/2|syncing weights"
    stages += "|validating: sampling 0/16|saving|ending the run"
    come_in_order(finished.began, [*PREPARING, *stages.split("|")])
    assert "log-probs" in " ".join(finished.began) and ACTIVITIES.text == "", "all have ended"


def test_answers_are_shown_every_n_th_step_at_both_ends_and_of_each_validation(finished):
    assert re.findall(r"answers of step (\d)", finished.out) == ["1", "3", "4"]
    for table in finished.out.split("answers of step ")[1:]:
        rows = [line for line in table.splitlines() if re.match(r"│ +\d\+\d=", line)]
        assert 1 <= len(rows) <= 4
    prompts = re.findall(r"^  (\d\+\d=) → ", finished.out, re.MULTILINE)
    assert len(prompts) == 9 and prompts == prompts[:3] * 3, "the same ones each time"


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/monitoring", "jaxrl_llm/training/loop.py", "jaxrl_llm/evaluation")
def test_the_commands_at_the_end_of_runs_work(run, workshop, monkeypatch, capsys):
    monkeypatch.chdir(workshop.root)
    result = run("reward.function=arithmetic", "validation.every=1").ok()
    pattern = re.compile(r"^([a-z ]+): python -m jaxrl_llm\.(.*)$", re.MULTILINE)
    commands = dict(pattern.findall(result.out))
    assert commands["look at it"] == f"report {result.run_dir}"
    name, *words = shlex.split(commands["export"])
    assert name == "export" and export_main(words) == 0
    name, *words = shlex.split(commands["evaluate"])
    assert name == "evaluate" and evaluate_main([*words, f"out={workshop.folder()}"]) == 0
    validated = result.metrics[-1]["val-core/arithmetic/acc/mean@1"]
    assert f"mean@1     {validated:.4f}" in capsys.readouterr().out, "as validation says"
