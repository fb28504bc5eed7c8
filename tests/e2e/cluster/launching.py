"""What the tests on Ray clusters share: a launcher at work, and what is looked up of its job."""

import subprocess
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq

from tests.e2e.conftest import Result

TOGETHER = ("cluster.nodes=2", "cluster.devices=4", "mesh.train={data: 2, fsdp: 4}")
APART = ("cluster.nodes=1", "cluster.devices=4", "rollout.nodes=1", "rollout.devices=4")
EPOCH = ("steps=null", "rollout.dump_every=1")  # 64 prompts, 8 a step
ACTORS = ("ray::TrainProcess", "ray::EngineHost", "ray::_score")


class Launched:
    """A launcher at work, and what it has printed so far."""

    def __init__(self, process, run_dir):
        self.process, self.run_dir = process, run_dir
        self.lines = {"out": [], "err": []}
        streams = (("out", process.stdout), ("err", process.stderr))
        self.readers = [
            threading.Thread(target=self.read, args=(name, stream), daemon=True)
            for name, stream in streams
        ]
        for reader in self.readers:
            reader.start()

    def read(self, name, stream):
        with stream:
            self.lines[name].extend(stream)

    def steps(self):
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def until(self, condition, seconds=240):
        end = time.monotonic() + seconds
        while not (result := condition()):
            assert self.process.poll() is None, self.text("err")
            assert time.monotonic() < end, self.text("err")
            time.sleep(0.02)
        return result

    def text(self, name):
        return "".join(self.lines[name])

    def end(self, seconds=600):
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        for reader in self.readers:
            reader.join(10)
        return status

    def ok(self):
        assert self.end() == 0, self.text("err")
        return self

    @property
    def result(self):
        """What the run has left."""
        return Result(self.process.returncode, self.text("out"), self.text("err"), self.run_dir)

    def counted(self, name):
        return [x[f"cluster/{name}"] for x in self.result.metrics if f"cluster/{name}" in x]


class Processes:
    """The processes of one Ray cluster; others may be at work on this machine."""

    def __init__(self, address):
        """Take the address of its head."""
        self.address = address

    def titles(self, *expected):
        """Return its processes whose titles begin so, by number."""
        rows = subprocess.run(
            ["ps", "-wweo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        split = [row.split(None, 3) for row in rows[1:]]
        nodes = {pid for pid, _, _, args in split if f"--gcs-address={self.address}" in args}
        return {
            int(pid): args
            for pid, parent, stat, args in split
            if parent in nodes and args.startswith(expected) and stat[0] != "Z"
        }

    def await_end(self, seconds=60):
        """Wait until none of a job's are left."""
        end = time.monotonic() + seconds
        while alive := self.titles(*ACTORS):
            assert time.monotonic() < end, alive
            time.sleep(0.2)


def check_whole_epoch(run_dir, samples=4):
    """Assert that every prompt was answered exactly as often as an epoch does."""
    counts = {}
    for path in (run_dir / "rollouts").glob("*.parquet"):
        for prompt in pq.read_table(path)["prompt"].to_pylist():
            counts[prompt] = counts.get(prompt, 0) + 1
    assert sum(counts.values()) == 64 * samples
    return counts


def check_same(launched, expected):
    """Assert that nothing of a disturbed run differs from an undisturbed one's."""
    assert launched.result.learned == expected.result.learned
    assert check_whole_epoch(launched.run_dir) == check_whole_epoch(expected.run_dir)


SLOW_SCORER = """
import time
from mine import digit_sum
def score(data_source, solution_str, ground_truth, extra_info=None, *, seconds):
    time.sleep(seconds)
    return digit_sum(data_source, solution_str, ground_truth)
"""


def slowly(workshop, seconds):
    """Return what scores as the undisturbed runs' scorer does, but takes time for each answer."""
    (workshop.root / "slow.py").write_text(SLOW_SCORER)
    scorer = f"{{fn: '{workshop.root}/slow.py:score', seconds: {seconds}}}"
    return f"reward.function={scorer}"


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
