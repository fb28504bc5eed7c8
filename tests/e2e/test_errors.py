"""Every bad input ends with one line that says what is wrong, and a status; or is counted."""

import fcntl
import json
import re
import shutil

import jax
import pyarrow.parquet
import pytest
import yaml
from transformers import AutoTokenizer

from jaxrl_llm import export
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.prefer import main as prefer_main
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.train import main as train_main
from tests.guarded import RUN

pytestmark = pytest.mark.guards(*RUN)


def refused(result, status, pattern):
    """Assert that a run ended with this status and this one line, and no traceback."""
    line = failed(result, status, pattern)
    assert result.err.rstrip().endswith(line), "something was printed after the error"
    assert "Traceback" not in result.err


def failed(result, status, pattern):
    """Assert that a run ended with this status and one line of error, or one for each of ten bad
    rows and their count; return the last line.
    """
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    count = 11 if errors[-1].endswith(" more rows") else 1
    assert (result.status, len(errors)) == (status, count), result.err
    assert re.search(pattern, errors[0]), errors[0]
    return errors[-1]


# --------------------------------------------------------------------- found before anything runs


@pytest.mark.parametrize(
    ("override", "pattern"),
    [
        ("seeed=1", r"unknown key 'seeed'; did you mean 'seed'\?"),
        ("algorithm.loss=ppo_clipp", r"algorithm\.loss: no function 'ppo_clipp' .*'ppo_clip'\?"),
        ("algorithm.loss.clip_hihg=0.3", r"'ppo_clip' takes no 'clip_hihg'; .*'clip_high'\?"),
        ("reward.function=mine.py:nothing", r"no file '.*/mine\.py'"),
        ("data.train=no.parquet", r"'arithmetic' did not write no\.parquet; make its `out` the"),
        ("model.path=nowhere", r"model\.path: .*nowhere"),
        ("mesh.train.fsdp=3", r"mesh\.train: .*fsdp=3 does not cover 1 devices"),
        (
            "data.max_prompt_tokens=3",
            r"data\.train: .*row 0: expected at most max_prompt_tokens=3 tokens, got \d+",
        ),
        ("data.max_prompt_tokens=300", r"= 304, but the model has 256 positions"),
        ("rollout.kv_cache_gb=1e-6", r"rollout: a cache of 1e-06 GB holds 0 tokens: expected"),
    ],
)
def test_configs_that_cannot_be_run(run, override, pattern):
    # A micro-batch holds the longest sequence of all the cases.
    refused(run("batch.max_tokens_per_device=512", override), 2, pattern)


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no backend 'cuda'")])
def test_a_platform_that_jax_lacks_is_no_fault_of_the_optimizer(
    workshop, error, monkeypatch, capsys
):
    def devices(*_):
        raise error

    monkeypatch.setattr("jax.devices", devices)
    for main, config in ((sft_main, "sft.yaml"), (train_main, "train.yaml")):
        words = ["--config", str(workshop.root / config), f"run_dir={workshop.folder()}"]
        assert main(words) == 2
        printed = capsys.readouterr().err
        assert f"error: JAX_PLATFORMS={jax.config.jax_platforms}: jax can't open" in printed


@pytest.mark.parametrize("program", [{"config": "sft.yaml", "main": sft_main}, {}])
def test_a_tracker_that_cannot_be_used_is_told_before_a_model_is_looked_for(run, workshop, program):
    words = ["model.path=nowhere", f"log.trackers={workshop.mine('tracker_without_key')}"]
    result = run(*words, **program)
    refused(
        result, 2, r"log\.trackers: '.*:tracker_without_key': .*/mine\.py:\d+: KeyError: 'MY_KEY'"
    )


def test_a_missing_config_file(run):
    refused(run(config="no.yaml"), 2, r"can't read '.*no\.yaml': No such file")


def test_an_advantage_that_asks_for_what_nobody_produces(run, workshop):
    result = run(f"algorithm.advantage={workshop.mine('advantage_of_nobody')}")
    refused(result, 2, "advantage_of_nobody asks for 'temperature_of_the_sea', which nothing")


def test_a_malformed_row_is_named_with_its_file(run, workshop, tmp_path):
    rows = read_rows(workshop.data / "train.parquet")
    rows[17]["reward_model"] = {"style": "rule"}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = run(f"data.train={path}")
    refused(result, 2, r"data\.train: .*rows\.jsonl, row 17: .*reward_model\.ground_truth")
    path.write_text("\n".join([*map(json.dumps, rows[:3]), "{not json"]))
    refused(run(f"data.train={path}"), 2, r"rows\.jsonl, line 4: not JSON")


def test_ids_beyond_the_embedding_are_refused(run, workshop, tmp_path):
    """JAX looks such an id up as zeros, and drops its gradient, without a word."""
    grown, answer = tmp_path / "grown", "1<zz>"
    shutil.copytree(workshop.base, grown)
    tokenizer = AutoTokenizer.from_pretrained(grown)
    tokenizer.add_tokens([f"<q{i}>" for i in range(300)] + ["<zz>"])
    tokenizer.save_pretrained(grown)
    user = {"role": "user", "content": "1+2="}
    wrong = {"prompt": [{**user, "content": "1+<zz>="}]}
    verl = {"data_source": "sums", "reward_model": {"ground_truth": "3"}, "prompt": [user]}
    prefer = yaml.safe_load((workshop.root / "sft.yaml").read_text())
    del prefer["data"]["prepare"], prefer["model"]["random_init"]
    prefer["batch"] = {"pairs_per_step": 4, "max_tokens_per_device": 256}
    workshop.write("grown.yaml", prefer)
    programs = {
        "train": (verl, verl | wrong, {}),
        "sft": (
            {"prompt": [user], "response": "3"},
            {"prompt": [user], "response": answer},
            {"main": sft_main, "config": "sft.yaml"},
        ),
        "prefer": (
            {"prompt": [user], "chosen": "3", "rejected": "4"},
            {"prompt": [user], "chosen": "3", "rejected": answer},
            {"main": prefer_main, "config": "grown.yaml"},
        ),
    }
    for name, (fine, row, program) in programs.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, [fine, row, fine, fine])))
        words = [f"model.path={grown}", f"data.train={path}"]
        words += ["data.prepare=null", "model.random_init=false"] if program else []
        words += [f"export_to={tmp_path / 'out'}"] if program else ["data.validation=[]"]
        result = run(*words, **program)
        refused(result, 2, rf"data\.train: {path}, row 1: token id \d+ \('<zz>'\) .*vocabulary")


def test_a_filter_that_leaves_nothing(run):
    result = run("data.max_prompt_tokens=3", "data.filter_overlong=true")
    refused(result, 2, "none of 64 rows is left under max_prompt_tokens=3")


def test_a_truncated_model(run, workshop, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(workshop.base, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(run(f"model.path={broken}"), 2, r"model\.path: .*model\.safetensors")


def test_an_export_that_exists(run):
    result = run(main=sft_main, config="sft.yaml")
    refused(result, 2, "export_to: .*base' exists; remove it or name another one")


# ------------------------------------------------------------------------------- user functions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "name", "status", "pattern"),
    [
        ("loss", "loss_of_answers", 2, r"'loss_of_answers' returned float32\[\d+\].* \[B T\]"),
        (
            "advantage",
            "advantage_nan",
            1,
            r"'advantage_nan' returned NaN or infinity as advantages for \d+ of 32",
        ),
        (
            "advantage",
            "advantage_of_prompts",
            2,
            r"returned shape \[8\] as advantages; expected .* \[32\] or",
        ),
    ],
)
def test_a_function_that_returns_something_else(run, workshop, key, name, status, pattern):
    result = run(f"algorithm.{key}={workshop.mine(name)}", "validation.before=false")
    refused(result, status, pattern)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("reward_raises", r"exception: LookupError.*no such answer"),
        ("reward_hangs", r"timeout: no answer within 0\.3 s"),
        ("reward_nan", r"invalid: .*nan"),
    ],
)
def test_a_reward_that_fails_stops_the_run_if_asked_to(run, workshop, name, pattern):
    result = run(
        f"reward.function={workshop.mine(name)}", "reward.on_error=null", "reward.timeout_s=0.3"
    )
    refused(result, 1, rf"failed on row \d+ .*data_source 'arithmetic', reply .*{pattern}")


@pytest.mark.slow
def test_a_reward_that_fails_is_counted_and_the_run_goes_on(run, workshop):
    result = run(
        f"reward.function={workshop.mine('reward_often_fails')}",
        "reward.on_error=0.0",
        "reward.timeout_s=0.3",
        "data.shuffle=false",
        "data.validation=[]",
        "rollout.dump_every=1",
    ).ok()
    assert [line["reward/errors"] for line in result.metrics] == [12.0, 0.0]
    table = pyarrow.parquet.read_table(result.run_dir / "rollouts/step_000001.parquet")
    rows = table.to_pylist()
    kinds = [str(row["error"]).partition(":")[0] for row in rows]
    assert kinds == ["exception"] * 4 + ["timeout"] * 4 + ["invalid"] * 4 + ["None"] * 20
    assert all(row["score"] == 0.0 for row in rows[:12])


# ------------------------------------------------------------------------------------ numerics


def test_an_engine_that_disagrees_is_found_at_step_1(run):
    result = run("rollout.logprob_tolerance=1e-12")
    refused(result, 1, r"log-probs differ .* at step 1, above rollout\.logprob_tolerance=1e-12")
    assert [line["step"] for line in result.metrics] == [0]


@pytest.mark.slow
def test_updates_without_a_finite_gradient_are_skipped(run, workshop):
    loss = f"algorithm.loss={workshop.mine('loss_nan_for_group_0')}"
    result = run(loss, "optim.max_skipped=1").ok()  # one of two updates in each step
    assert [line["actor/skipped"] for line in result.metrics[1:]] == [1.0, 1.0]


@pytest.mark.slow
def test_a_gradient_that_is_never_finite_stops_the_run(run, workshop):
    loss = f"algorithm.loss={workshop.mine('loss_nan')}"
    result = run(loss, "optim.max_skipped=3", "steps=9")
    refused(result, 1, r"4 updates in a row .* not finite \(optim\.max_skipped=3\)")
    assert [line["step"] for line in result.metrics] == [0, 1]


# ---------------------------------------------------------------------- folders and checkpoints


def test_resume_never_refuses_a_used_folder(run, finished, copy_of):
    result = run("checkpoint.resume=never", run_dir=copy_of(finished))
    refused(result, 2, r"checkpoint\.resume=never, but .* holds step 4")


def test_a_second_process_in_the_same_folder(run, finished, copy_of):
    folder = copy_of(finished)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(run(run_dir=folder), 2, r"run_dir: another process is running in ")


def test_a_truncated_checkpoint_and_its_remedy(run, finished, copy_of):
    folder = copy_of(finished)
    newest = folder / "checkpoints/4"
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    words = ["validation.every=2", "checkpoint.every=2"]
    result = run("steps=5", *words, run_dir=folder)
    refused(result, 1, rf"{newest} is damaged .* remove the folder 4")
    shutil.rmtree(newest)
    assert run("steps=4", *words, run_dir=folder).ok().learned == finished.learned


@pytest.mark.slow
def test_a_limit_on_file_sizes_while_a_checkpoint_is_saved(workshop):
    if not shutil.which("prlimit"):
        pytest.skip("needs prlimit (util-linux)")
    run_dir = workshop.folder()
    words = ["steps=2", "checkpoint.every=1", "validation.before=false"]
    limit = ("prlimit", "--fsize=30000")
    limited = workshop.start(*words, run_dir=run_dir, prefix=limit, cached=False)
    pattern = rf"can't save .*{run_dir}/checkpoints.*File too large"
    # Not `refused`: tensorstore's threads, with more to write, print that orbax has given up.
    failed(workshop.finish(limited, run_dir), 1, pattern)
    again = workshop.finish(workshop.start(*words, run_dir=run_dir), run_dir).ok()
    assert [line["step"] for line in again.metrics] == [1, 2]


# --------------------------------------------------------------------------------------- export


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["{tmp}/none", "{tmp}/out"], r"none' is not a run"),
        (["{run}", "{run}"], r"exists"),
        (["{run}", "{tmp}/out", "--step", "3"], r"no checkpoint of step 3 .*have \[2, 4\]"),
    ],
)
def test_exports_that_cannot_be_made(finished, tmp_path, capsys, words, pattern):
    words = [word.format(tmp=tmp_path, run=finished.run_dir) for word in words]
    assert export.main(words) == 2
    printed = capsys.readouterr().err
    assert re.search(pattern, printed), printed
    assert printed.startswith("error: ") and printed.count("\n") == 1


def test_supervised_training_names_the_model_that_is_missing(run, workshop):
    words = (f"model.path={workshop.root}/none", f"export_to={workshop.root}/other")
    result = run(*words, main=sft_main, config="sft.yaml")
    assert result.status == 2
    assert result.err == f"error: model.path: no directory '{workshop.root}/none'\n"
