"""A full disk, a clock that jumps, a run that hangs: nothing is lost, and nobody waits for ever."""

import contextlib
import random
import re
import shutil
import subprocess
import time

import pytest

from tests.e2e.comparing import same
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


@pytest.fixture(scope="module")
def undisturbed(workshop):
    run_dir = workshop.folder()
    return workshop.finish(workshop.start(*LONG, run_dir=run_dir), run_dir).ok()


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


def test_a_disk_that_is_full_at_twenty_moments(workshop, undisturbed, small_disk, tmp_path):
    """Between saves the run goes on; a save fails clearly, and the same command continues."""
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


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
  long days = 0;
  FILE *file = fopen(getenv("CLOCK_OFFSET"), "r");
  if (file) { if (fscanf(file, "%ld", &days) != 1) days = 0; fclose(file); }
  return days * 86400;
}
int clock_gettime(clockid_t clock, struct timespec *time) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
  int status = next(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += offset();
  return status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec time;
  int status = clock_gettime(CLOCK_REALTIME, &time);
  now->tv_sec = time.tv_sec;
  now->tv_usec = time.tv_nsec / 1000;
  return status;
}
time_t time(time_t *now) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  if (now) *now = time.tv_sec;
  return time.tv_sec;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_clock_that_is_set_back_and_forth(workshop, undisturbed, tmp_path):
    """By 60 days, many times: more than any timer of a library can be late."""
    source, library, days = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "days"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    days.write_text("0")
    run_dir, jumps = workshop.folder(), 0
    variables = ("env", f"LD_PRELOAD={library}", f"CLOCK_OFFSET={days}")
    process = workshop.start(*LONG, run_dir=run_dir, prefix=variables)
    while process.poll() is None:  # pytest's own limit ends a run that hangs
        time.sleep(0.2)
        jumps += 1
        days.write_text(str((0, -60, 60)[jumps % 3]))
    result = workshop.finish(process, run_dir).ok()
    assert jumps > 10
    assert result.learned == undisturbed.learned
    same(workshop.params(run_dir), workshop.params(undisturbed.run_dir))
