"""What the process of every system shares: its job, its clock, and the reward. Plain Python.

The three environments have no packages in common that matter here, so this imports none.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()


def read_job() -> dict[str, Any]:
    """Return what to run: the JSON file that the command line names first."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("job", type=Path, help="JSON: what to run")
    parser.add_argument("result", type=Path, help="JSON that is written: what it took")
    return json.loads(parser.parse_args().job.read_text())


def reward(text: str) -> float:
    """Return the share of digits in an answer.

    >>> reward("a1b2")
    0.5
    """
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None
) -> float:
    """Return the reward, called as our reward functions are."""
    return reward(solution_str)


def exact_match(text: str, answer: str) -> float:
    """Return 1 for an answer that is right, and nothing else, else 0.

    >>> exact_match(" 12 ", "12"), exact_match("It is 12", "12")
    (1.0, 0.0)
    """
    return float(text.strip() == answer)


def score_exact(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None
) -> float:
    """Return the reward of `exact_match`, called as our reward functions are."""
    return exact_match(solution_str, ground_truth)


def peak_gb() -> float:
    """Return the largest resident set of this process so far, in GB; Linux keeps it as VmHWM."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


def busy_seconds() -> float:
    """Return the seconds that all cores together have worked since the machine was started."""
    user, nice, system, _, _, irq, softirq = map(
        int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Meter:
    """Times steps from the end of one to the end of the next, and counts their tokens.

    Attributes:
        steps: what was measured of each, ready for JSON.
    """

    def __init__(self) -> None:
        """Start the clock of the first step."""
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._mark = self._read()

    def add(self, **amounts: float) -> None:
        """Add to the present step: seconds of its generation, or tokens."""
        for name, amount in amounts.items():
            self._now[name] = self._now.get(name, 0) + amount

    def end_step(self) -> None:
        """End the present step and begin the next one."""
        before, self._mark = self._mark, self._read()
        wall, own, all_busy = (b - a for a, b in zip(before, self._mark, strict=True))
        others = max(0.0, all_busy - own) / wall
        taken = {"seconds": wall, "cpu_seconds": own, "other_cores": others}
        self.steps.append(taken | self._now)
        self._now = {}

    def write(self, **more: Any) -> None:
        """Write all of it to the JSON file that the command line names second."""
        report = {"steps": self.steps, "peak_gb": peak_gb(), **more}
        Path(sys.argv[2]).write_text(json.dumps(report))

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), busy_seconds()


def since_begin() -> float:
    """Return the seconds since this module was imported, before everything slow."""
    return time.perf_counter() - BEGIN
