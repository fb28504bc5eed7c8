"""What somebody hurt themselves on who tried the library for the first time, a test for each.

Functions: `tests/training/test_check_functions.py`, `tests/config/test_functions.py`. Folders:
`tests/runs/test_directory.py`.
"""

import json
import re
import time
from pathlib import Path

import jax
import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.train import train
from jaxrl_llm.training import run as run_module
from tests.e2e.test_errors import refused


@pytest.fixture
def one_device(monkeypatch):
    """Runs take one of the eight devices, as those of `run` do."""
    some = jax.devices()[:1]
    monkeypatch.setattr("jax.devices", lambda: some)


def contents(folder):
    """Return the bytes of all files of a folder, by path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------- users' functions

CAPPED = """
def capped(logprobs, old_logprobs, advantages, *, cap=2.0):
    return -logprobs * advantages * cap
"""


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_an_edited_loss_is_noticed_when_a_run_is_continued(run, workshop):
    """Its sign was flipped, and the same command went on without a word."""
    path = workshop.root / "edited.py"
    path.write_text(CAPPED)
    words = [f"algorithm.loss={path}:capped", "validation.before=false", "checkpoint.every=1"]
    first = run("steps=1", *words).ok()
    kept = first.run_dir / "functions/algorithm.loss.py"
    assert kept.read_text().strip() == CAPPED.strip()
    path.write_text(CAPPED.replace("-logprobs", "logprobs"))
    before = contents(first.run_dir)
    again = run("steps=2", *words, run_dir=first.run_dir)
    refused(again, 2, rf"algorithm\.loss: the source of {path}:capped is no longer that in {kept}")
    assert contents(first.run_dir) == before
    path.write_text(CAPPED)
    assert [line["step"] for line in run("steps=2", *words, run_dir=first.run_dir).metrics] == [
        1,
        2,
    ]


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_an_edited_file_is_read_again_by_the_next_run_of_a_session(run, workshop):
    """The old code ran, for it was in `sys.modules`."""
    path = workshop.root / "scorer.py"
    words = [f"reward.function={path}:score", "steps=1", "validation.before=false"]
    for score in (0.25, 0.75):
        path.write_text(f"def score(*arguments, **more):\n    return {score}\n")
        assert run(*words).ok().metrics[-1]["critic/score/mean"] == score


CELL = """
def even(data_source, solution_str, ground_truth, extra_info=None):
    return SCALE * digits(solution_str)

def digits(text):
    return sum(int(c) for c in text if c.isdigit())

SCALE = 0.125
"""


def test_functions_given_from_python_reach_the_workers(workshop, one_device):
    """`FunctionSpec("__main__:my_scorer")` failed there, and a loss raised an AttributeError."""
    cell = {"__name__": "__main__"}
    exec(CELL, cell)
    keys = {
        "run_dir": str(workshop.folder()),
        "steps": 1,
        "validation.before": False,
        "reward.function": cell["even"],
        "algorithm.loss": lambda logprobs, advantages: -logprobs * advantages,
    }
    files = train(load(TrainConfig, workshop.root / "train.yaml", keys))
    (metrics,) = files.metrics
    assert metrics["critic/score/mean"] > 0
    assert metrics["critic/score/max"] % 0.125 == 0
    assert metrics["reward/errors"] == 0


# ------------------------------------------------------------------------------------ early checks


@pytest.fixture
def without_models(monkeypatch):
    """Lets nothing load a model, or make one by a warm start."""

    def loaded(*arguments, **more):
        raise AssertionError("a model was loaded before the config was checked")

    monkeypatch.setattr(run_module, "open_model", loaded)
    monkeypatch.setattr(run_module, "run_sft", loaded)


@pytest.mark.usefixtures("without_models")
@pytest.mark.parametrize(
    ("override", "pattern"),
    [
        (
            "reward.function={root}/mine.py:digit_som",
            r"reward\.function: no function 'digit_som' in {root}/mine\.py; did you mean 'digit_su",
        ),
        ("reward.function={root}/mine.py:kl", r"'.*:kl' needs a value for logprobs, ref_logprob"),
        ("data.dataset={root}/mine.py:rowss", r"data\.dataset: no function 'rowss' in {root}/min"),
        ("data.prepare.fn=arithmetics", r"data\.prepare: no function 'arithmetics'.*'arithmetic'"),
        ("data.prepare=null data.train={root}/no.parquet", r"data\.train: .*/no\.parquet: no suc"),
        ("data.train={root}/mine.py data.prepare=null", r"data\.train: .*expected a \.parquet or"),
        ("algorithm.loss={root}/mine.py:loss_of_answers", r"algorithm\.loss: loss 'loss_of_answ"),
        ("algorithm.loss={root}/broken.py:f", r"algorithm\.loss: .*broken\.py:2: SyntaxError: "),
        (
            "optim.schedule.value=-1e-3",
            r"optim\.schedule: 'constant_schedule' gives the learning r",
        ),
        (
            "rollout.engine=vllm rollout.vllm.python=/nowhere/python",
            r"there is no interpreter /nowhere/python to run vLLM: make its environment by",
        ),
        ("run_dir=''", r"run_dir: expected a text that is not empty"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(run, workshop, override, pattern):
    """A scorer's typo took 14 s and had a mangled name; missing data waited for a warm start."""
    (workshop.root / "broken.py").write_text("x = 1\ndef f(:\n")
    words = override.format(root=workshop.root).split(" ")
    warm = ["model.path=not_made_yet", f"model.warm_start={workshop.root}/sft.yaml"]
    result = run(*warm, *words)
    refused(result, 2, pattern.format(root=workshop.root))
    assert not result.run_dir.exists(), "a refused run leaves no folder"


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_a_typo_in_a_scorer_s_name_takes_two_seconds(workshop):
    started = time.monotonic()
    run_dir = workshop.folder()
    process = workshop.start(f"reward.function={workshop.mine('digit_som')}", run_dir=run_dir)
    refused(workshop.finish(process, run_dir), 2, "did you mean 'digit_sum'")
    assert time.monotonic() - started < 10, "much more than the two seconds of a quiet machine"


# ------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def page(workshop):
    """The file that the page about users' functions has its reader write."""
    text = (Path(__file__).parents[2] / "docs" / "your_functions.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    path = workshop.root / "page.py"
    path.write_text("\n\n".join(block for block in blocks if "def " in block))
    return path


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_the_functions_of_the_page_train(run, page):
    words = [
        f"reward.function={page}:score",
        f"algorithm.advantage={page}:centred",
        f"algorithm.loss={page}:capped",
        "algorithm.loss.cap=1.5",
        f"log.trackers=[{{fn: '{page}:csv_file', columns: [critic/score/mean, global_step]}}]",
    ]
    result = run(*words, "steps=1").ok()
    line = result.metrics[-1]
    (row,) = (result.run_dir / "metrics.csv").read_text().splitlines()[-1:]
    assert row == f"1,{line['critic/score/mean']},"
    assert 0 < line["critic/score/mean"] <= 1
    assert line["critic/advantages/min"] < 0 < line["critic/advantages/max"]
    assert line["reward/errors"] == 0


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_the_dataset_of_the_page_is_read(run, page, workshop):
    items = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(5)]
    path = workshop.root / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, items)))
    words = ["data.validation=[]", "data.prepare=null", "batch.prompts_per_step=4", "steps=1"]
    result = run(f"data.dataset={page}:questions", f"data.train={path}", *words).ok()
    assert result.metrics[-1]["critic/score/mean"] > 0


# ---------------------------------------------------------------------------------------- nonsense


@pytest.fixture
def warned(run, caplog):
    """Runs, and returns the warnings of the run besides it."""

    def warned(*words):
        caplog.clear()
        result = run(*words).ok()
        return result, [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]

    return warned


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_groups_of_one_and_more_prompts_than_rows_are_warned_of(warned):
    words = ["rollout.samples_per_prompt=1", "batch.prompts_per_step=96", "steps=1"]
    words += ["batch.prompts_per_minibatch=null", "validation.before=false"]
    _, (groups, rows) = warned(*words)
    assert "rollout.samples_per_prompt=1, but grpo (algorithm.advantage) compares the" in groups
    assert "batch.prompts_per_step=96, but data.train has only 64 prompts" in rows
    words = ["rollout.samples_per_prompt=1", "algorithm.advantage=reinforce_plus_plus", "steps=1"]
    assert warned(*words, "validation.before=false")[1] == []


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_scores_without_spread_are_warned_of_once(warned, workshop):
    (workshop.root / "constant.py").write_text("def one(*arguments, **more):\n    return 1.0\n")
    words = [f"reward.function={workshop.root}/constant.py:one", "validation.before=false"]
    _, (line,) = warned("steps=5", *words)
    assert "all advantages of the last 3 step(s) are zero" in line
    assert "equal scores (from 1 to 1 in this step)" in line


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_answers_that_fail_to_be_scored_are_on_the_screen(warned, workshop):
    """52 of 64 failed with 88 lines of warnings, and the run looked fine."""
    scorer = f"reward.function={workshop.mine('raises_on_odd')}"
    words = ["steps=1", "reward.max_error_share=0.9"]
    result, (validation, training, _) = warned(scorer, *words)
    assert re.search(r"failed on \d+ of 16 answers \(\d+ exception\); the first: row ", validation)
    assert "exception: LookupError: no such answer (mine.py:" in training
    errors = result.metrics[-1]["reward/errors"]
    assert 0 < errors <= 0.9 * 32
    assert f"  errors {errors:g}  " in next(x for x in result.out.splitlines() if "step 1/" in x)


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_a_reward_function_that_fails_too_often_stops_the_run(run, workshop):
    scorer = f"reward.function={workshop.mine('reward_raises')}"
    refused(
        run(scorer),
        1,
        r"failed on 16 of 16 answers, more than reward\.max_error_share=0\.5 of them; the first "
        r"failure: exception: LookupError: no such answer",
    )
    run(scorer, "reward.max_error_share=1", "steps=1").ok()


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_a_skipped_update_is_told(warned, workshop):
    """No line said so, and tensorboardX warned of each NaN."""
    loss = f"algorithm.loss={workshop.mine('loss_nan_for_group_0')}"
    _, (line,) = warned(loss, "steps=1", "validation.before=false", "log.trackers=tensorboard")
    assert "step 1: 1 update(s) skipped, for the actor's gradient was not finite; more than" in line
    assert "optim.max_skipped=3 in a row stop the run" in line


# ---------------------------------------------------------------------------- folders and resuming


def test_a_run_that_has_taken_all_its_steps_ends_at_once(run, finished, copy_of, without_models):
    """It took 10 s, most of which the model was loaded and compiled in."""
    folder = copy_of(finished)
    before = contents(folder)
    result = run("steps=4", run_dir=folder).ok()
    first, *table = result.out.splitlines()
    assert first.startswith(f"nothing to do: the run in '{folder}' has taken 4 steps, and steps=4")
    assert any("before and after" in line for line in table)
    assert contents(folder) == before


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_a_refused_resume_changes_no_file(run, finished, copy_of, workshop):
    """It overwrote `config.yaml`."""
    folder = copy_of(finished)
    before = contents(folder)
    refused(run("seed=1", "steps=9", run_dir=folder), 2, "seed: 0 -> 1: the run in")
    refused(
        run("steps=9", "model.random_init=true", run_dir=folder), 2, "was begun otherwise|its c"
    )
    other = workshop.root / "other_rows.jsonl"
    rows = read_rows(workshop.data / "train.parquet")[1:]
    other.write_text("\n".join(map(json.dumps, rows)))
    (folder / "config.yaml").write_bytes(
        before[folder / "config.yaml"].replace(b"data/train.parquet", b"other_rows.jsonl")
    )
    before = contents(folder)
    result = run("steps=9", f"data.train={other}", "data.prepare=null", run_dir=folder)
    refused(result, 2, "data.train: its contents are not those that this run began with")
    assert contents(folder) == before


# ------------------------------------------------------------------------------------- the screen


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cli.py", "jaxrl_llm/config", "jaxrl_llm/runs", "jaxrl_llm/training")
def test_each_validation_shows_answers(run):
    """No answer of the policy was ever on the screen."""
    result = run("steps=1", "validation.every=1", "reward.function=arithmetic").ok()
    shown = [line for line in result.out.splitlines() if " → " in line]
    assert len(shown) == 6
    for line in shown:
        assert re.fullmatch(r"  \d\+\d= → .*  (✓ 1|✗ 0)", line), line
    prompts = [line.partition(" → ")[0] for line in shown]
    assert prompts[:3] == prompts[3:], "the same prompts each time"
