"""The public names: imported when they are used, seen by editors, and frozen in docs/api.md."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.code import api
from jaxrl_llm import algorithms

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxrl_llm", *(f"jaxrl_llm.{part}" for part in api.PARTS))


def run(source):
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_nothing_else():
    loaded = run("import sys, jaxrl_llm; print(*(n for n in sys.modules if n[:9] == 'jaxrl_llm'))")
    assert set(loaded) == {"jaxrl_llm", "jaxrl_llm.lazy", "jaxrl_llm.version"}
    heavy = run("import sys, jaxrl_llm; dir(jaxrl_llm); print(*{'jax', 'numpy'} & {*sys.modules})")
    assert heavy == []


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_exists_where_editors_see_it(name):
    package = importlib.import_module(name)
    assert package.__all__
    assert set(package.__all__) <= set(dir(package))
    for exported, home in package.__exports__.items():
        assert getattr(package, exported) is getattr(importlib.import_module(home), exported)
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing


@pytest.mark.parametrize(
    "before", ["", "import jaxrl_llm.train, jaxrl_llm.sft", "from jaxrl_llm.train import main"]
)
def test_a_program_does_not_hide_the_function_of_its_name(before):
    lines = [before, "from jaxrl_llm import sft, train", "import jaxrl_llm, jaxrl_llm.train"]
    lines += ["from jaxrl_llm.train import main, train as own", "print(train.__name__)"]
    lines += ["print(jaxrl_llm.train is train, own is train, main.__module__, callable(sft))"]
    assert run("\n".join(lines)) == ["train", "True", "True", "jaxrl_llm.train", "True"]


def test_the_page_lists_every_public_name_and_its_signature():
    assert api.page() == api.PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.code.api"


PARTS_OF_LOGPROBS = {"TokenChunks"}  # for `distillation`, too


@pytest.mark.parametrize(
    "kind", ["advantages", "correction", "kl", "logprobs", "losses", "reduce", "shaping", "values"]
)
def test_every_algorithm_is_exported(kind):
    module = importlib.import_module(f"jaxrl_llm.algorithms.{kind}")
    own = {n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    public = {name for name in own if not name.startswith("_")} - PARTS_OF_LOGPROBS
    assert len(public) > 1
    assert public <= set(dir(algorithms))


def test_every_package_that_exports_names_has_a_section():
    inits = [*(ROOT / "jaxrl_llm").glob("*/__init__.py")]
    exporting = {path.parent.name for path in inits if "attach(__name__)" in path.read_text()}
    assert exporting == set(api.PARTS)
