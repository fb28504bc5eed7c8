"""Runs the systems that are compared, each in a process of its own."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

PEERS = Path(__file__).resolve().parent
"""Folder of the scripts that a system's own interpreter runs."""


def check_python(python: str | Path, *modules: str) -> None:
    """Check that an interpreter has modules of others.

    Raises:
        SystemExit: it lacks one, or does not run.
    """
    try:
        command = [python, "-c", f"import {', '.join(modules)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"error: {python}: {error.strerror}") from None
    if done.returncode:
        raise SystemExit(f"error: {python}: {done.stderr.strip().splitlines()[-1]}")


def measure(
    python: str,
    script: Path,
    job: dict[str, Any],
    name: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run one system in a process of its own; return what it wrote.

    Args:
        python: its interpreter.
        script: what it runs.
        job: what the script is told.
        name: of the files for the job, the result and the log, which differ in their ends.
        environment: variables besides this process's.

    Raises:
        SystemExit: it failed.
    """
    given, result, log = (name.with_suffix(end) for end in (".job.json", ".result.json", ".log"))
    given.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    with log.open("w") as file:
        command = [python, script, given, result]
        env, folder = os.environ | environment, name.parent
        done = subprocess.run(command, cwd=folder, env=env, stdout=file, stderr=file, check=False)
    if done.returncode:
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise SystemExit(f"{command} stopped with status {done.returncode}:\n{last}")
    return json.loads(result.read_text())
