"""The package as it is released: its archives, and an install that runs without a checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata

import jaxrl_llm
from jaxrl_llm.config.load import read_config

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("algorithms", "configs", "models", "sharding")
"""Folders at the root that are packages in `jaxrl_llm/`, by links."""

SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
SMALL = ("data.prepare.train_rows=256", "data.prepare.validation_rows=32")
SMALL += ("data.prepare.sft_rows=256", "log.trackers=[]")

GUARDED = ("configs/", "pyproject.toml", "MANIFEST.in", "jaxrl_llm/cli.py", "jaxrl_llm/config/")
GUARDED += ("jaxrl_llm/reporting/metrics.yaml", "jaxrl_llm/command.py", "jaxrl_llm/version.py")
GUARDED += ("jaxrl_llm/train.py", "jaxrl_llm/sft.py")
pytestmark = [pytest.mark.slow, pytest.mark.guards(*GUARDED)]


def tracked_files(*paths):
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *paths]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


def run(*words, **options):
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def build_wheel(source, out):
    run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a checkout without git, its wheel, and its source archive."""
    folder = tmp_path_factory.mktemp("built")
    clone = folder / "clone"
    for name in tracked_files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    run("-c", SDIST, folder, cwd=clone)
    build_wheel(clone, folder)
    return folder


@pytest.fixture(scope="module")
def installed(built):
    """The folder into which the wheel is installed, beside the packages that are here."""
    target = built / "installed"
    (wheel,) = built.glob("*.whl")
    run("-m", "pip", "install", "--no-deps", "--no-compile", "--target", target, wheel)
    return target


def test_a_wheel_holds_the_whole_package(built):
    (wheel,) = built.glob("*.whl")
    packed = {name for name in contents(wheel) if name.startswith("jaxrl_llm/")}
    links = {f"jaxrl_llm/{name}" for name in LINKED}
    linked = {f"jaxrl_llm/{name}" for name in tracked_files(*LINKED)}
    assert packed == (set(tracked_files("jaxrl_llm")) - links) | linked


def test_a_wheel_from_the_source_archive_is_the_same(built, tmp_path):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    again = build_wheel(archive, tmp_path)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names
    assert not {name for name in names if name.startswith(("tests", "benchmarks"))}


def test_the_metadata_is_valid_and_has_the_one_version(built):
    (wheel,) = built.glob("*.whl")
    (name,) = (name for name in contents(wheel) if name.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(contents(wheel)[name], validate=True)
    assert (metadata.name, str(metadata.version)) == ("jaxrl_llm", jaxrl_llm.__version__)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert "argcomplete" in {requirement.name for requirement in metadata.requires_dist}


def test_the_installed_package_finds_its_configs(installed, tmp_path):
    words = ("-m", "jaxrl_llm.train", "--config", "recipes/dapo", "--print-config")
    printed = yaml.safe_load(run(*words, cwd=tmp_path, env={"PYTHONPATH": str(installed)}))
    packaged = installed / "jaxrl_llm" / "configs"
    assert printed["model"]["warm_start"] == str(packaged / "quickstart_sft.yaml")
    loss = read_config("recipes/dapo")["algorithm"]["loss"]
    assert printed["algorithm"]["loss"] == loss


def test_the_installed_command_trains_the_quickstart_and_exports_it(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}

    def command(*words):
        return run(installed / "bin" / "jaxrl-llm", *words, cwd=tmp_path, env=environment)

    assert command("--version") == f"jaxrl_llm {jaxrl_llm.__version__}\n"
    command("sft", "--config", "quickstart_sft", "steps=20", *SMALL)
    command("train", "--config", "quickstart", "steps=2", "validation.every=1", *SMALL)
    folder = tmp_path / "runs" / "quickstart"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["jaxrl_llm"] == jaxrl_llm.__version__
    assert versions["git_commit"] is None, "it runs from a checkout"
    assert command("export", "runs/quickstart", "out") == "wrote step 2 to out\n"
    assert "# out" in (tmp_path / "out" / "README.md").read_text()
