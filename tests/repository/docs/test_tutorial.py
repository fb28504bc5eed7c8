"""The tutorial's pages are followed in an empty folder, in order, command for command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.config.load import PACKAGED, find_config
from tests.pages import ROOT, blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.guards("docs/tutorial/")]

PAGES = sorted((ROOT / "docs/tutorial").glob("*.md"))
NOT_HERE = (
    *("python3 -m venv", ". .venv/", "pip install", "mkdir"),  # the environment is there
    "ray start",  # a cluster that would stay
    "python -m jaxrl_llm.plan --config plan/qwen3_1.7b",  # half a minute
    "python -m jaxrl_llm.train --config gsm8k_qwen3_1.7b_grpo",  # a GPU, the hub
    "python -m jaxrl_llm.train --config sums.yaml cluster.address=",  # four machines
)
"""Commands that are not run; `test_commands.py` reads them as it does all others."""

LESS = {
    "--config quickstart ": "--config small.yaml ",
    "steps=20": "steps=3",
    "steps=24": "steps=4",
    "steps=500": "steps=60",
    "rows=64": "rows=8",
}
LESS_IN_FILES = {"steps: 20": "steps: 3", "every: 10": "every: 3"}
SMALL = {
    "steps: 1000": "steps: 100",
    "path: configs/quickstart": f"path: {PACKAGED}/quickstart",
    "configs/quickstart_sft.yaml": "small_sft.yaml",
}
"""What makes a config of the package one whose base model takes seconds, and learns less."""


def replaced(text, words):
    """Return a text with words replaced, where they are."""
    for old, new in words.items():
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    for name, packaged in {"small": "quickstart", "small_sft": "quickstart_sft"}.items():
        text = find_config(packaged).read_text(encoding="utf-8")
        (folder / f"{name}.yaml").write_text(replaced(text, SMALL))
    return folder


@pytest.fixture(scope="module")
def run_command(folder):
    """Runs a line of a page as its reader's shell would, on one CPU device."""
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": bin_first, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environ.pop("RAY_ADDRESS", None)

    def run(line):
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


def follow(page, folder, run_command):
    """Write the files of a page and run its commands, in order; return how many ran."""
    ran = 0
    for block in blocks_of(page):
        if block.file:
            (folder / block.file).write_text(replaced(block.text, LESS_IN_FILES))
        elif block.language == "sh":
            for line in block.commands:
                if not line.startswith(NOT_HERE):
                    run_command(replaced(line, LESS))
                    ran += 1
    return ran


def test_a_reader_can_follow(folder, run_command):
    """One test for all pages, as each needs what those before it leave."""
    assert len(PAGES) == 6
    for page in PAGES:
        assert follow(page, folder, run_command), f"{page.name}: nothing that can be run here"
    for name in ("quickstart", "sums", "leaky", "decoder_rl", "ray"):
        assert (folder / "runs" / name / "metrics.jsonl").is_file(), name
    assert (folder / "exported/model.safetensors").is_file()
