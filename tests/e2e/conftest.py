"""A tiny model, data set and config, and two ways to run the programs: here, and as processes.

Runs in this process take one of its eight devices, and all share compiled programs, so that most
of them last two or three seconds. Runs as processes see one CPU device, as a laptop's would.
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pyarrow.parquet
import pytest
import yaml

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.train import main as train_main
from tests.e2e.comparing import EVERY_SECOND, EXACTLY, by_name
from tests.waiting import wait_until

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
USER_FUNCTIONS = Path(__file__).with_name("user_functions.py")

SHRUNK = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PREPARE = {"fn": "arithmetic", "operators": "+", "digits": 1}
PREPARE |= {"train_rows": 64, "validation_rows": 16, "sft_rows": 64}
SFT = """
run_dir: {root}/base.sft
export_to: {root}/base
steps: 40
model: {{path: {root}/random, random_init: true}}
data: {{train: {root}/data/sft.parquet, prepare: {prepare}, max_tokens: 16}}
optim: {{schedule: {{fn: constant_schedule, value: 0.01}}}}
batch: {{examples_per_step: 16, max_tokens_per_device: 256}}
checkpoint: {{every: 4}}
log: {{trackers: []}}
"""
TRAIN = """
run_dir: {root}/run
steps: 2
model: {{path: {root}/base}}
data:
  train: {root}/data/train.parquet
  validation: {root}/data/validation.parquet
  prepare: {prepare}
  max_prompt_tokens: 12
rollout: {{samples_per_prompt: 4, max_new_tokens: 4, max_running_sequences: 32}}
reward: {{function: '{root}/mine.py:digit_sum', workers: 1}}
optim: {{schedule: {{fn: constant_schedule, value: 0.001}}}}
batch: {{prompts_per_step: 8, prompts_per_minibatch: 4, max_tokens_per_device: 128}}
log: {{trackers: []}}
"""


@dataclasses.dataclass
class Result:
    """What a run left: its exit status, what it printed, and its folder."""

    status: int
    out: str
    err: str
    run_dir: Path
    uncompared = ("timing_s/", "perf/", "cluster/")

    @property
    def metrics(self):
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def steps(self):
        return [line["step"] for line in self.metrics]

    @property
    def learned(self):
        """The metrics that must be the same in every repetition."""
        return [
            {name: value for name, value in line.items() if not name.startswith(self.uncompared)}
            for line in self.metrics
        ]

    def rows(self, step):
        """Return the answers of a step that were kept."""
        path = self.run_dir / f"rollouts/step_{step:06d}.parquet"
        return pyarrow.parquet.read_table(path).to_pylist()

    def ok(self):
        assert self.status == 0, self.err
        return self

    def refused(self, *names, status=2):
        """Assert that the run ended with this status, in lines of which the first has the names."""
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert (self.status, bool(errors)) == (status, True), self.err
        assert self.err.rstrip().endswith(errors[-1]) and "Traceback" not in self.err, self.err
        assert all(name in errors[0] for name in names), (names, errors[0])
        return self


class Workshop:
    """A folder with everything that a run needs, and the runs."""

    def __init__(self, root):
        self.root, self.base, self.data = root, root / "base", root / "data"
        self.count, self.running = 0, []
        shutil.copy(USER_FUNCTIONS, root / "mine.py")
        shutil.copytree(QUICKSTART, root / "random")
        self.shrink(root / "random")
        prepare = json.dumps(PREPARE | {"out": str(self.data)})
        for name, text in (("sft.yaml", SFT), ("train.yaml", TRAIN)):
            (root / name).write_text(text.format(root=root, prepare=prepare))

    @staticmethod
    def shrink(model):
        shape = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(shape | SHRUNK))

    def write(self, name, tree):
        (self.root / name).write_text(yaml.safe_dump(tree))

    def write_rows(self, name, rows):
        path = self.root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def folder(self):
        self.count += 1
        return self.root / f"run{self.count}"

    def mine(self, name):
        return f"{self.root}/mine.py:{name}"

    def words(self, text):
        """Return the overrides of a row of a table, which has "; " between them."""
        return text.format(root=self.root, base=self.base, mine=f"{self.root}/mine.py").split("; ")

    def __call__(self, *words, main=train_main, config="train.yaml", run_dir=None, devices=1):
        """Run a program in this process."""
        run_dir = run_dir or self.folder()
        words = ["--config", str(self.root / config), f"run_dir={run_dir}", *words]
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            some = jax.devices()[:devices]
            patch.setattr("jax.devices", lambda: some)
            status = main(words)
        return Result(status, out.getvalue(), err.getvalue(), run_dir)

    def start(self, *overrides, run_dir, config="train.yaml", cached=True):
        """Start `train` as a process; `finish` waits for it.

        It shares compiled programs with the other runs; if not, it compiles them as a user's does.
        """
        tests_own = ("XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
        env = {k: v for k, v in os.environ.items() if cached or not k.startswith(tests_own)}
        env |= {"JAX_PLATFORMS": "cpu", "JAXRL_LLM_HEARTBEAT_TIMEOUT_S": "30"}
        if not cached:
            env["XDG_CACHE_HOME"] = str(run_dir / "home")
        words = ["-m", "jaxrl_llm.train", "--config", str(self.root / config)]
        process = subprocess.Popen(
            [sys.executable, *words, f"run_dir={run_dir}", *overrides],
            cwd=self.root,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.running.append(process)
        return process

    def finish(self, process, run_dir):
        out, err = process.communicate(timeout=300)
        return Result(process.returncode, out, err, run_dir)

    def arrays(self, run_dir, *roles, step=None):
        """Return all arrays of a checkpoint's state, or those of some roles, by name."""
        checkpoints = (run_dir / "checkpoints").glob("[0-9]*")
        step = step or max(int(path.name) for path in checkpoints)
        tree = ocp.PyTreeCheckpointer().restore(run_dir / f"checkpoints/{step}/state")
        return by_name({role: tree[role] for role in roles} if roles else tree)

    def params(self, run_dir, step=None, model=None, role="actor", **changes):
        """Return a checkpoint's parameters by name; `changes` are those of the model's spec."""
        spec = dataclasses.replace(read_spec(model or self.base), **changes)
        like = jax.eval_shape(lambda: init_params(spec, key=jax.random.key(0)))
        checkpoints = Checkpoints(run_dir / "checkpoints", keep=None, read_only=True)
        tree = checkpoints.restore_params(like, step, role=role).state
        checkpoints.close()
        return by_name(tree)


@pytest.fixture(scope="session")
def client_port():
    """Where Ray clusters listen for launchers that are not on a node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(ray_nodes, client_port):
    """The address of a Ray cluster of three nodes."""
    with ray_nodes(count=3, cpus=3, client_port=client_port) as address:
        yield address


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """The folder, with the data prepared and the base model trained."""
    made = Workshop(tmp_path_factory.mktemp("workshop"))
    made(main=sft_main, config="sft.yaml", run_dir=made.root / "base.sft").ok()
    return made


@pytest.fixture(autouse=True)
def nothing_goes_on(workshop):
    """Ends what a test has started and, because it failed, not waited for."""
    yield
    for process in workshop.running:
        with process:
            process.kill()
    workshop.running.clear()


@pytest.fixture(scope="session")
def run(workshop):
    """Runs `train` in this process, with overrides."""
    return workshop


@pytest.fixture(scope="session")
def finished(run):
    """A run that nothing disturbed."""
    return run("steps=4", *EVERY_SECOND, "log={trackers: tensorboard, answers_every: 3}").ok()


@pytest.fixture(scope="session")
def plain(run):
    """What runs on other devices are compared with."""
    return run(*EXACTLY).ok()


@pytest.fixture
def copy_of(workshop):
    """Copies a run's folder, to damage it or to go on with it."""
    return lambda result: Path(shutil.copytree(result.run_dir, workshop.folder()))


@pytest.fixture
def preempt(monkeypatch):
    """Sends SIGTERM to a run in this process while a trainer of a class takes a step."""

    def tell(trainer_class, number):
        take = trainer_class.step

        def step(trainer, clock):
            if trainer.number == number - 1:
                signal.raise_signal(signal.SIGTERM)
                wait_until(trainer.files.preemption.is_told)
            return take(trainer, clock)

        monkeypatch.setattr(trainer_class, "step", step)

    return tell


@pytest.fixture(scope="session")
def until():
    """Waits until a condition holds while a process runs; False if the process ended first."""

    def wait(condition, process):
        while process.poll() is None:
            if condition():
                return True
            time.sleep(0.001)
        return False

    return wait
