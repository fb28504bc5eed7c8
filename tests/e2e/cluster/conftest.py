"""Jobs on a Ray cluster of several nodes, each with CPU devices, all on this machine."""

import functools
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.comparing import count_lines
from tests.e2e.conftest import Result
from tests.waiting import wait_until

TOGETHER = ("cluster.nodes=2", "cluster.devices=4", "mesh.train={data: 2, fsdp: 4}")
APART = ("cluster.nodes=1", "cluster.devices=4", "rollout.nodes=1", "rollout.devices=4")
EPOCH = ("steps=null", "rollout.dump_every=1")  # 64 prompts, 8 a step
ACTORS = ("ray::TrainProcess", "ray::EngineHost", "ray::_score")
QUICKLY = ("cluster.backoff_s=0.1", "cluster.start_timeout_s=180")


class Launched:
    """A launcher at work, and what it has printed so far."""

    def __init__(self, process, run_dir):
        self.process, self.run_dir = process, run_dir
        self.lines = {"out": [], "err": []}
        streams = ((self.lines["out"], process.stdout), (self.lines["err"], process.stderr))
        self.readers = [threading.Thread(target=list.extend, args=pair) for pair in streams]
        for reader in self.readers:
            reader.start()

    def steps(self):
        return count_lines(self.run_dir / "metrics.jsonl")

    def until(self, condition):
        """Wait for something true, and return it."""
        end = time.monotonic() + 240
        while not (result := condition()):
            assert self.process.poll() is None and time.monotonic() < end, self.text("err")
            time.sleep(0.02)
        return result

    def text(self, name):
        return "".join(self.lines[name])

    def end(self, seconds=600):
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            for reader in self.readers:
                reader.join(10)

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
    """The processes of the Ray cluster at an address; others may be at work on this machine."""

    def __init__(self, address):
        self.address = address

    def titles(self, *expected):
        """Return those whose titles begin so, by number."""
        words = ["ps", "-wweo", "pid,ppid,stat,args"]
        output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        rows = [row.split(None, 3) for row in output.splitlines()[1:]]
        nodes = {pid for pid, _, _, args in rows if f"--gcs-address={self.address}" in args}
        return {
            int(pid): args
            for pid, parent, stat, args in rows
            if parent in nodes and args.startswith(expected) and stat[0] != "Z"
        }

    def await_end(self):
        """Wait until none of a job's are left."""
        wait_until(lambda: not self.titles(*ACTORS), 60)


def answered(run_dir):
    """Count how often each prompt was answered."""
    tables = map(pq.read_table, (run_dir / "rollouts").glob("*.parquet"))
    return Counter(prompt for table in tables for prompt in table["prompt"].to_pylist())


def check_same(launched, expected):
    """Assert that a disturbed run is an undisturbed one of a whole epoch."""
    assert launched.result.learned == expected.result.learned
    assert answered(launched.run_dir) == answered(expected.run_dir)
    assert answered(launched.run_dir).total() == 64 * 4


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


@pytest.fixture(scope="module")
def processes(cluster):
    """The processes of that cluster."""
    return Processes(cluster)


@pytest.fixture
def launchers(client_port):
    """Overrides for a launcher on a node of the cluster, and for one that is elsewhere."""
    return {"a node": (), "a client": (f"cluster.address=ray://127.0.0.1:{client_port}",)}


@pytest.fixture
def launch(workshop, cluster, processes):
    """Starts `train` on the cluster; ends what is left of it."""
    started = []

    def run(*overrides):
        run_dir = workshop.folder()
        words = (f"cluster.address={cluster}", *QUICKLY, *overrides)
        started.append(Launched(workshop.start(*words, run_dir=run_dir), run_dir))
        return started[-1]

    yield run
    for launched in started:
        launched.process.kill()
        launched.end()
    processes.await_end()


@pytest.fixture(scope="module")
def undisturbed(workshop, cluster):
    """Returns the run of some overrides on the cluster, made once."""

    @functools.cache
    def run(*overrides):
        run_dir = workshop.folder()
        words = (f"cluster.address={cluster}", *QUICKLY, *overrides)
        return Launched(workshop.start(*words, run_dir=run_dir), run_dir).ok()

    return run
