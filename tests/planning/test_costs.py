"""The programs of a step cost what `benchmarks/planning/costs.yaml` says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planning import costs
from tests.guarded import MODEL, NATIVE, UPDATE

ROOT = Path(__file__).resolve().parents[2]
GUARDS = pytest.mark.guards(*MODEL, *UPDATE, *NATIVE, "jaxrl_llm/planning/", "benchmarks/planning/")
REMEDY = """

CONTRIBUTING.md, "What a step costs": mend what made it dearer, or write it down with its reason by
python -m benchmarks.planning.costs --write --why REASON"""


def check_costs(models, backend):
    """Compare in a process of its own, without the tests' checks of types, devices and flags."""
    file = costs.read_file()
    if not file.is_of_this_jaxlib(backend):
        pytest.skip(f"costs.yaml has {backend} of jaxlib {file.versions[backend]}: --write it anew")
    inherited = {"XLA_FLAGS", "PJRT_NPROC"}
    environ = {k: v for k, v in os.environ.items() if k not in inherited and k[:4] != "JAX_"}
    environ["JAX_PLATFORMS"] = "cpu"
    words = ("-m", "benchmarks.planning.costs", "--backends", backend, "--models", models)
    command = [sys.executable, *words]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr[-2000:]}{REMEDY}"


@pytest.mark.repository
def test_traced_programs_cost_what_the_file_says():
    check_costs(",".join(costs.MODELS), "traced")


@GUARDS
@pytest.mark.slow
@pytest.mark.parametrize("model", costs.MODELS)
def test_programs_for_a_cpu_cost_what_the_file_says(model):
    check_costs(model, "cpu")


@GUARDS
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("model", costs.MODELS)
def test_programs_for_an_h200_cost_what_the_file_says(model, compiler):
    check_costs(model, "H200")
