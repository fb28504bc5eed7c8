"""What whole runs do, show and leave behind."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.training import run as run_module
from tests.e2e.comparing import EVERY_SECOND, files, same
from tests.guarded import MODEL, NATIVE, RUN


def test_nothing_compiles_after_the_second_step(run, workshop, caplog, patient, compiles_alone):
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
        "steps=5",
        "validation.every=2",
        "rollout.dump_every=2",
        "checkpoint.every=1",  # the first one compiles its checksums
    ).ok()
    lines = result.metrics[1:]
    assert max(line["prompt_length/max"] for line in lines) > 32
    assert min(line["prompt_length/min"] for line in lines) < 16
    assert "max_prompt_tokens=52" in caplog.text, "rows are filtered"
    assert lines[0]["perf/compilations"] > 0, "the counter counts something"
    assert [line["perf/compilations"] for line in lines[2:]] == [0] * 3


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
    before = files(folder)
    words = ("steps=4", *EVERY_SECOND, "log={trackers: tensorboard, answers_every: 3}")
    again = run(*words, run_dir=folder).ok()
    assert again.out.startswith("nothing to do: ") and "step 4/4" not in again.out
    tables = [text[text.index("before and after") :] for text in (again.out, finished.out)]
    assert tables[0] == tables[1].replace(str(finished.run_dir), str(folder))
    assert files(folder) == before


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
@pytest.mark.guards("jaxrl_llm/rewards", "jaxrl_llm/training")
def test_rewards_that_fail_stop_the_run(run, workshop):
    raising = f"reward.function={workshop.mine('reward_raises')}"
    run(raising, "reward.on_error=null").refused("reward ", "row", status=1)
    run(raising).refused("reward.max_error_share", "LookupError", status=1)


def test_the_rollouts(finished):
    names = sorted(p.name for p in (finished.run_dir / "rollouts").iterdir())
    assert names == [f"step_{step:06d}.parquet" for step in (1, 2, 4)], "the first one, too"
    rows, line = finished.rows(2), finished.metrics[2]
    assert len(rows) == 32
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
    assert json.loads((folder / "versions.json").read_text())["seed"] == 0
    words = ["steps=4", *EVERY_SECOND, f"run_dir={folder}"]
    words += ["log={trackers: tensorboard, answers_every: 3}"]
    expected = load(TrainConfig, workshop.root / "train.yaml", words)
    assert load(TrainConfig, folder / "config.yaml") == expected
    assert not list(folder.rglob("*.tmp"))


def test_answers_are_shown_every_n_th_step_at_both_ends_and_of_each_validation(finished):
    assert re.findall(r"answers of step (\d)", finished.out) == ["1", "3", "4"]
    for table in finished.out.split("answers of step ")[1:]:
        rows = [line for line in table.splitlines() if re.match(r"│ +\d\+\d=", line)]
        assert 1 <= len(rows) <= 4
    prompts = re.findall(r"^  (\d\+\d=) → ", finished.out, re.MULTILINE)
    assert len(prompts) == 9 and prompts == prompts[:3] * 3, "the same ones each time"


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *RUN, *NATIVE, "jaxrl_llm/planning/")
def test_a_continued_run_finds_its_programs_and_a_step_can_be_profiled(workshop):
    """Two processes, of which the first compiles for itself: about half a minute."""
    run_dir = workshop.folder()
    words = ("data.validation=[]", "checkpoint.every=1", "log.profile_steps=[1, 3]")
    for steps in (3, 4):
        process = workshop.start(f"steps={steps}", *words, run_dir=run_dir, cached=False)
        second = workshop.finish(process, run_dir).ok()
    counts = [
        (line["perf/compilations"], line["perf/compilation_cache_hits"]) for line in second.metrics
    ]
    assert second.steps == [1, 2, 3, 4] and counts[0][0] > 0
    assert counts[-1][0] == 0 and counts[-1][1] >= 8
    folders = sorted(path.name for path in (run_dir / "profile").iterdir())
    assert folders == ["step_1", "step_3"]
    text = (run_dir / "profile/step_3/summary.txt").read_text()
    seconds = dict(re.findall(r"^([a-z_ ]+?) +(\d+\.\d+) ", text, re.MULTILINE))
    stages = {name.removeprefix("timing_s/") for name in second.metrics[2] if "timing_s/" in name}
    assert stages - {"step"} < set(seconds) and float(seconds["matrix products"]) > 0


@pytest.mark.slow
@pytest.mark.guards(*RUN, "models/functional.py", "models/nnx.py", "jaxrl_llm/training")
def test_a_model_of_ones_own_is_trained_and_continued(run, workshop):
    """Bit for bit, and not with another module, or other keywords of the same one."""
    pytest.importorskip("flax")  # an extra, which dev has
    own = Path(__file__).parents[1] / "own_models.py"
    words = (f"model.path={workshop.root}/random", "model.random_init=true")
    words += ("steps=4", "checkpoint.every=2", "validation.every=2", "algorithm.kl_loss=k3")
    words += (f"model.function={own}:Cached", "mesh.rules={mine: tensor}")
    trained = run(*words).ok()
    kls = [line["actor/kl"] for line in trained.metrics[1:]]
    assert kls[0] == 0.0 and kls[3] > 1e-5, "the reference is what the run began with"
    for line in trained.metrics[1:]:
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-5
    half = run(*words, "steps=2").ok()
    again = run(*words, run_dir=half.run_dir).ok()
    assert again.learned == trained.learned
    same(*(workshop.arrays(result.run_dir, "actor") for result in (again, trained)))
    more = {"run_dir": half.run_dir}
    other = run(*words, "steps=6", "model.function.layers=1", **more)
    other.refused("model.function.layers: None -> 1")
    plain = f"model.function={own}:Plain"
    run(*words, plain, "steps=6", **more).refused("model.function.fn")
