"""Runs the cases of a job one after another, and writes what each gave as soon as it is known."""

import argparse
import json
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


def emit(**row: Any) -> None:
    """Print a row as a line of JSON, at once."""
    print(json.dumps(row), flush=True)


def run_cases(jobs: Mapping[str, Job], device: Callable[[], str], description: str | None) -> None:
    """Run the job of the file that the command line names first; results go to the second.

    Args:
        jobs: What can be done, by name.
        device: Names the device.
        description: For `--help`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("job", type=Path, help="JSON: cases, and what these share, as do, a name")
    parser.add_argument("results", type=Path, help="JSON that is written: a list, in their order")
    options = parser.parse_args()
    job, name = json.loads(options.job.read_text()), device()
    rows: list[dict[str, Any]] = []
    for case in job["cases"]:
        try:
            result = jobs[(job | case)["do"]](job | case)
        except Exception as error:  # a row of the table says what happened
            result = {"error": describe_error(error)}
        rows.append({"device": name, **result})
        options.results.write_text(json.dumps(rows))
        emit(case=case, **rows[-1])
