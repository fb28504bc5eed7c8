"""What a release is made by: the workflows on GitHub, and the notes that they take."""

import re
from pathlib import Path

import pytest
import yaml

import jaxrl_llm
from benchmarks.code.release import main, read_notes
from jaxrl_llm.runs.directory import collect_versions

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CHANGELOG = "# Changes\n\n## Unreleased\n\n- New.\n\n## 1.2.0 (2030-01-31)\n\n- A.\n\n### Fixed\n\n"
CHANGELOG += "- B.\n\n## 1.1.0 (2029-01-31)\n\n- Old.\n"


def test_a_release_has_its_own_section_as_notes(monkeypatch, capsys):
    assert read_notes("v1.2.0", "1.2.0", CHANGELOG) == "- A.\n\n### Fixed\n\n- B.\n"
    for tag, version in (("v1.2.1", "1.2.0"), ("v1.3.0", "1.3.0")):  # another tag, or no section
        with pytest.raises(ValueError, match=version):
            read_notes(tag, version, CHANGELOG)
    monkeypatch.setattr("sys.argv", ["release", "v0.0.0"])
    assert main() == 1
    assert "v0.0.0" in capsys.readouterr().err


def test_a_runs_record_has_the_one_version():
    assert collect_versions(0)["jaxrl_llm"] == jaxrl_llm.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", jaxrl_llm.__version__)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_bounds_and_few_rights(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow[True], "YAML's name of the key `on`"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1"))
            assert "${{" not in step.get("run", ""), "what a tag is called would be run"


def test_a_tag_is_published_once_it_is_built_and_tested():
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}
    jobs = release["jobs"]
    steps = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    for part in (
        "benchmarks.code.release",
        "build --outdir",
        "twine check",
        "tests/repository/test_wheel.py",
    ):
        assert part in steps
    assert (jobs["pypi"]["needs"], jobs["github"]["needs"]) == ("build", "pypi")
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    assert any("gh-action-pypi-publish" in step.get("uses", "") for step in jobs["pypi"]["steps"])


def test_continuous_integration_is_the_one_script():
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["checks"][
        "steps"
    ]
    assert steps[0]["with"]["fetch-depth"] == 0
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
