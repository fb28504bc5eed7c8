"""An installed package runs without its checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from jaxrl_llm.config.files import read_config

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("algorithms", "configs", "models", "sharding")
"""Folders at the root that are packages in `jaxrl_llm/`, by links."""


def tracked_files(*paths):
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *paths]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.slow
@pytest.mark.guards("configs/", "pyproject.toml", "jaxrl_llm/config/")
def test_a_wheel_holds_the_whole_package_and_finds_its_configs(tmp_path):
    clone = tmp_path / "clone"
    for name in tracked_files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(clone)]
    subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("jaxrl_llm/")}
        archive.extractall(tmp_path / "installed")
    links = {f"jaxrl_llm/{name}" for name in LINKED}
    linked = {f"jaxrl_llm/{name}" for name in tracked_files(*LINKED)}
    assert packed == (set(tracked_files("jaxrl_llm")) - links) | linked

    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "recipes/dapo"]
    done = subprocess.run(
        [*command, "--print-config"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    printed = yaml.safe_load(done.stdout)
    packaged = tmp_path / "installed" / "jaxrl_llm" / "configs"
    assert printed["model"]["warm_start"] == str(packaged / "quickstart_sft.yaml")
    loss = read_config("recipes/dapo")["algorithm"]["loss"]
    assert printed["algorithm"]["loss"] == loss
