"""The versions, devices and commit that a run is made with."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.compiler_options import Task, compiler_options
from jaxrl_llm.sharding import distributed
from jaxrl_llm.version import __version__

PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "grain", "numpy")
"""Packages whose versions change a run's results."""


def package_versions() -> dict[str, str]:
    """Return the versions of this library, of Python and of `PACKAGES`."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"jaxrl_llm": __version__, "python": platform.python_version(), **versions}


def collect_versions(seed: int) -> dict[str, Any]:
    """Return what a run can be repeated by.

    Versions of packages, devices, git commit, seed, and the flags of XLA: those of the environment,
    and for each task those that the run adds (`compiler_options`).
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        if not (root / ".git").exists() or not shutil.which("git"):
            return None
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        **package_versions(),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changed_files": git("status", "--porcelain"),
        "devices": [d.device_kind for d in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compiler_options": {task: compiler_options(task, jax.devices()) or {} for task in Task},
        "processes": distributed.process_count(),
        "seed": seed,
    }
