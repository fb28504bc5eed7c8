"""Runs the cases of a job one after another, and writes what each gave as soon as it is known."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Job = Callable[[dict[str, Any]], dict[str, Any]]
FULL = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory")


def describe_error(error: Exception) -> str:
    """Return an error in a few words.

    >>> describe_error(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"))
    'out of memory'
    >>> describe_error(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    text = f"{type(error).__name__}: {error}"
    return "out of memory" if any(sign in text for sign in FULL) else text.splitlines()[0][:200]


def run_cases(jobs: Mapping[str, Job], device: str) -> None:
    """Run the job in the file that the command line names first; results go to the second."""
    job, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rows: list[dict[str, Any]] = []
    for case in job["cases"]:
        try:
            result = jobs[job["do"]](job | case)
        except Exception as error:  # a row of the table says what happened
            result = {"error": describe_error(error)}
        rows.append({"device": device, **result})
        results.write_text(json.dumps(rows))
