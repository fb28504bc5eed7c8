"""What a person sees of whole runs: no silence, answers, and what to do next."""

import re
import shlex

import pyarrow.parquet
import pytest

from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.export import main as export_main
from jaxrl_llm.monitoring.activity import ACTIVITIES
from jaxrl_llm.monitoring.display import NotebookDisplay
from jaxrl_llm.sft import main as sft_main

SCORED = ("reward.function=arithmetic",)
PREPARING = ("starting", "opening the devices", "reading the data", "loading the weights")


@pytest.fixture
def stages(monkeypatch):
    """What went on, each as it began: the texts of all activities at that time."""
    texts, begin = [], ACTIVITIES.begin

    def begun(activity):
        begin(activity)
        texts.append(ACTIVITIES.text)

    monkeypatch.setattr(ACTIVITIES, "begin", begun)
    return texts


def come_in_order(texts, labels):
    """Assert that some activities began one after another."""
    left = iter(texts)
    for label in labels:
        assert any(label in text for text in left), f"{label!r} does not follow in {texts}"


@pytest.fixture(scope="module")
def shown(run):
    """A run that shows answers of its second step, besides those of the first and the last."""
    words = ("steps=5", "log.answers_every=2", "validation.every=5", "checkpoint.every=2")
    return run(*words, *SCORED).ok()


def test_each_stage_of_training_says_what_it_is(run, stages):
    run("steps=1", "validation.before=false").ok()
    come_in_order(
        stages,
        [
            *PREPARING,
            "starting the engine",
            "tokenizing the prompts",
            "reading the weights' checksums",
            "syncing weights",
            "sampling 0/32",
            "scoring",
            "advantages",
            "updating 0/2",
            "syncing weights",
            "validating: sampling 0/16",
            "saving",
            "ending the run",
        ],
    )
    assert "log-probs" in " ".join(stages)
    assert ACTIVITIES.text == "", "all have ended"


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/monitoring", "jaxrl_llm/training/loop.py")
def test_each_stage_of_supervised_training_says_what_it_is(workshop, stages):
    folder = workshop.folder()
    words = ("steps=4", f"export_to={folder}.base")
    result = workshop(*words, main=sft_main, config="sft.yaml", run_dir=folder).ok()
    come_in_order(
        stages, [*PREPARING[:3], "loading the weights", "updating", "saving", "exporting"]
    )
    first, second, *_, standing, model, look, evaluate = result.out.splitlines()
    assert re.fullmatch(r"training .*/random: \d+\.?\d* K parameters, on 1 cpu device", first)
    assert second == f"64 examples, 4 steps of 16 examples; everything is written to {folder}"
    assert standing == f"run: {folder} (4 steps, 1 checkpoint)"
    assert model == f"model: {folder}.base (Hugging Face's format)"
    assert look.endswith(f"jaxrl_llm.report {folder}")
    assert evaluate.endswith(f"jaxrl_llm.evaluate --model {folder}.base --data PROMPTS.parquet")


def test_answers_are_shown_every_n_th_step_and_at_both_ends(shown):
    assert re.findall(r"answers of step (\d)", shown.out) == ["1", "2", "4", "5"]
    tables = shown.out.split("answers of step ")[1:]
    for table in tables:
        rows = [line for line in table.splitlines() if re.match(r"│ +\d\+\d=", line)]
        assert 1 <= len(rows) <= 4


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/monitoring", "jaxrl_llm/training/loop.py")
def test_the_first_and_the_last_steps_answers_are_always_kept(shown, run):
    names = [path.name for path in sorted((shown.run_dir / "rollouts").iterdir())]
    assert names == ["step_000001.parquet", "step_000005.parquet"]
    assert len(pyarrow.parquet.read_table(shown.run_dir / "rollouts" / names[1])) == 32
    more = run(
        "steps=6", "rollout.dump_every=2", "log.answers_every=0", *SCORED, run_dir=shown.run_dir
    )
    assert "answers of step" not in more.ok().out
    names = [path.name for path in sorted((shown.run_dir / "rollouts").iterdir())]
    assert names == [f"step_{n:06d}.parquet" for n in (1, 5, 6)]


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/monitoring", "jaxrl_llm/training/loop.py")
def test_the_commands_at_the_end_of_a_run_work(shown, workshop, monkeypatch, capsys):
    monkeypatch.chdir(workshop.root)
    lines = shown.out.splitlines()
    commands = dict(re.findall(r"^([a-z ]+): python -m jaxrl_llm\.(.*)$", shown.out, re.MULTILINE))
    assert lines[-4].startswith(f"run: {shown.run_dir} (5 steps, ")
    assert commands["look at it"] == f"report {shown.run_dir}"
    name, *words = shlex.split(commands["export"])
    assert name == "export" and export_main(words) == 0
    assert (shown.run_dir / "exported" / "config.json").exists()
    name, *words = shlex.split(commands["evaluate"])
    assert name == "evaluate" and evaluate_main([*words, f"out={workshop.folder()}"]) == 0
    validated = shown.metrics[-1]["val-core/arithmetic/acc/mean@1"]
    assert f"mean@1     {validated:.4f}" in capsys.readouterr().out, "as validation says"


def test_a_notebook_shows_answers_below_its_lines(monkeypatch):
    display = NotebookDisplay("training", 2)
    monkeypatch.setattr(display, "_show", lambda **_: None)
    row = {"prompt": '[{"content": "7<3="}]', "answer": "<script>\x1b", "score": 1.0}
    display.answers(1, [row | {"advantage": 0.5, "error": None}])
    text = display._as_html()
    assert "answers of step 1" in text and "7&lt;3=" in text
    assert "&lt;script&gt;\\x1b" in text and "<script>" not in text
