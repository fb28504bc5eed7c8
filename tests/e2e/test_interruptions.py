"""A full disk, a clock that jumps: nothing is lost, and nobody waits for ever."""

import contextlib
import itertools
import random
import re
import shutil
import time

import pytest

from tests.e2e.comparing import EVERY_SECOND, same
from tests.guarded import RUN

pytestmark = [pytest.mark.slow, pytest.mark.guards(*RUN, "jaxrl_llm/monitoring/")]

LONG = (
    "steps=120",
    "validation.before=false",
    "data.validation=[]",
    "checkpoint.every=15",
    "rollout.dump_every=20",
    "log.trackers=tensorboard",
)


@contextlib.contextmanager
def full(disk):
    """Let there be no byte left on a disk for the block."""
    path = disk / "filling"
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        try:
            yield
        finally:
            path.unlink()


def fill_now_and_then(process, disk, dice, count):
    """Fill a disk for a moment, again and again, until a process ends; return how often."""
    filled = 0
    while process.poll() is None and filled < count:
        time.sleep(dice.uniform(0.05, 0.4))
        if process.poll() is None and (disk / "run/metrics.jsonl").exists():
            with full(disk):
                time.sleep(dice.choice([0.05, 0.3, 1.0]))
            filled += 1
    return filled


def test_a_disk_that_is_full_at_twenty_moments(workshop, small_disk, tmp_path):
    """Between saves the run goes on; a save fails clearly, and the same command continues."""
    undisturbed = workshop(*LONG).ok()
    dice, filled, failures = random.Random(0), 0, []
    with small_disk(tmp_path, "4m") as disk:
        run_dir = disk / "run"
        while filled < 20:
            process = workshop.start(*LONG, run_dir=run_dir)
            filled += fill_now_and_then(process, disk, dice, 20 - filled)
            result = workshop.finish(process, run_dir)
            assert result.status in (0, 1) and "Traceback" not in result.err, result.err
            if result.status == 0 and filled < 20:
                shutil.rmtree(run_dir)  # it has come to its end: another one from the beginning
            if result.status == 1:
                failures.append(result.err.splitlines()[-1])
        result = workshop.finish(workshop.start(*LONG, run_dir=run_dir), run_dir).ok()
        assert failures, "no save met a full disk"
        for line in failures:
            assert re.match(r"error: .*(save step \d+|/run/).*No space left on device", line)
        assert result.learned == undisturbed.learned
        same(workshop.params(run_dir), workshop.params(undisturbed.run_dir))


def test_a_clock_that_is_set_back_and_forth(workshop, finished, monkeypatch):
    """By 60 days, at each look at it."""
    now, days = time.time, itertools.cycle((0, -60, 60))
    monkeypatch.setattr(time, "time", lambda: now() + 86400 * next(days))
    words = ("steps=4", *EVERY_SECOND, "log={trackers: tensorboard, answers_every: 3}")
    result = workshop(*words).ok()
    assert result.learned == finished.learned
    same(workshop.params(result.run_dir), workshop.params(finished.run_dir))
