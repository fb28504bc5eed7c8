"""The programs of a step cost what `benchmarks/planning/costs.yaml` says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planning import costs
from benchmarks.planning.costs import Cost, Row
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.planning.steps import gpu_devices
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
def test_programs_for_an_h200_cost_what_the_file_says(model):
    try:
        gpu_devices("H200", 1)
    except ConfigError as error:
        pytest.skip(str(error))
    check_costs(model, "H200")


def test_every_program_stands_in_the_file_with_a_reason():
    file = costs.read_file()
    names = [f"{model} {program}" for model in costs.MODELS for program in costs.PROGRAMS]
    for backend, rows in file.rows.items():
        assert list(rows) == names, backend
        assert all(
            row.why[:2] == "20" and len(row.why) > len("2026-01-01 x") for row in rows.values()
        )


def test_a_dearer_program_and_a_cheaper_one_differ():
    known = {"update": Row(Cost(100e9, 1000e6, 50e6), "2026-01-01 first")}
    assert costs.changes(known, {"update": Cost(101.9e9, 981e6, 50.9e6)}, 0.02) == []
    dearer, cheaper, scratch = costs.changes(known, {"update": Cost(102.1e9, 979e6, 51.1e6)}, 0.02)
    assert dearer.startswith("update: flops") and dearer.endswith("(+2.1%)")
    assert cheaper.startswith("update: bytes") and cheaper.endswith("(-2.1%)")
    assert scratch.startswith("update: temp")
    assert costs.changes(known, {"new": Cost(1.0, 1.0)}, 0.02) == ["new: not in the file"]


def test_what_has_changed_is_written_with_its_reason(tmp_path):
    file = costs.read_file()
    name, other = "tiny accumulate", "tiny decode"
    cost = file.rows["cpu"][name].cost
    dearer = cost._replace(flops=1.1 * cost.flops)
    measured = {name: dearer, other: file.rows["cpu"][other].cost}
    costs.write_file(
        costs.updated(file, "cpu", measured, 'a "reason": why'), tmp_path / "costs.yaml"
    )
    read = costs.read_file(tmp_path / "costs.yaml")
    assert read.rows["cpu"][name].why.endswith(' a "reason": why')
    assert read.rows["cpu"][name].cost.flops == pytest.approx(dearer.flops, rel=1e-4)
    assert read.rows["cpu"][other] == file.rows["cpu"][other]
    assert read.rows["H200"] == file.rows["H200"]


def test_the_command_asks_for_a_reason(capsys):
    with pytest.raises(SystemExit):
        costs.main(["--write"])
    assert "--why" in capsys.readouterr().err
