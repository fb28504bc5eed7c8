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
import numpy as np
import pytest
import yaml
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.train import main as train_main
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
PREPARE = {
    "fn": "arithmetic",
    "operators": "+",
    "digits": 1,
    "train_rows": 64,
    "validation_rows": 16,
    "sft_rows": 64,
}
UNCOMPARED = ("timing_s/", "perf/")


@dataclasses.dataclass
class Result:
    """What a run left: its exit status, what it printed, and its folder."""

    status: int
    out: str
    err: str
    run_dir: Path

    @property
    def metrics(self):
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def learned(self):
        """The metrics that must be the same in every repetition."""
        return [
            {name: value for name, value in line.items() if not name.startswith(UNCOMPARED)}
            for line in self.metrics
        ]

    def ok(self):
        assert self.status == 0, self.err
        return self


class Workshop:
    """A folder with everything that a run needs, and the runs."""

    def __init__(self, root):
        self.root = root
        self.count = 0
        self.running = []
        self.base, self.data = root / "base", root / "data"
        shutil.copy(USER_FUNCTIONS, root / "mine.py")
        shutil.copytree(QUICKSTART, root / "random")
        shape = json.loads((root / "random/config.json").read_text())
        (root / "random/config.json").write_text(json.dumps(shape | SHRUNK))
        prepare = PREPARE | {"out": str(self.data)}
        self.write(
            "sft.yaml",
            {
                "run_dir": str(root / "base.sft"),
                "export_to": str(self.base),
                "steps": 40,
                "model": {"path": str(root / "random"), "random_init": True},
                "data": {
                    "train": str(self.data / "sft.parquet"),
                    "prepare": prepare,
                    "max_tokens": 16,
                },
                "optim": {"schedule": {"fn": "constant_schedule", "value": 1e-2}},
                "batch": {"examples_per_step": 16, "max_tokens_per_device": 256},
                "checkpoint": {"every": 4},
                "log": {"trackers": []},
            },
        )
        self.write(
            "train.yaml",
            {
                "run_dir": str(root / "run"),
                "steps": 2,
                "model": {"path": str(self.base)},
                "data": {
                    "train": str(self.data / "train.parquet"),
                    "validation": str(self.data / "validation.parquet"),
                    "prepare": prepare,
                    "max_prompt_tokens": 12,
                },
                "rollout": {
                    "samples_per_prompt": 4,
                    "max_new_tokens": 4,
                    "max_running_sequences": 32,
                },
                "reward": {"function": f"{root}/mine.py:digit_sum", "workers": 1},
                "optim": {"schedule": {"fn": "constant_schedule", "value": 1e-3}},
                "batch": {
                    "prompts_per_step": 8,
                    "prompts_per_minibatch": 4,
                    "max_tokens_per_device": 128,
                },
                "log": {"trackers": []},
            },
        )

    def write(self, name, tree):
        (self.root / name).write_text(yaml.safe_dump(tree))

    def folder(self):
        self.count += 1
        return self.root / f"run{self.count}"

    def mine(self, name):
        return f"{self.root}/mine.py:{name}"

    def __call__(
        self,
        *overrides,
        main=train_main,
        config="train.yaml",
        run_dir=None,
        devices=1,
        compiled=None,
    ):
        """Run a program in this process, with a folder of compiled programs or with that of all."""
        run_dir = run_dir or self.folder()
        words = ["--config", str(self.root / config), f"run_dir={run_dir}", *overrides]
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            self.caching(compiled),
        ):
            some = jax.devices()[:devices]
            patch.setattr("jax.devices", lambda: some)
            status = main(words)
        return Result(status, out.getvalue(), err.getvalue(), run_dir)

    @contextlib.contextmanager
    def caching(self, folder=None):
        """Keep compiled programs in a folder instead of that of all tests, if one is given."""
        name = "jax_compilation_cache_dir"
        before = getattr(jax.config, name)
        jax.config.update(name, before if folder is None else str(folder))
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update(name, before)
            compilation_cache.reset_cache()

    def start(
        self, *overrides, run_dir, program="train", config="train.yaml", cached=True, prefix=()
    ):
        """Start a program as a process; `finish` waits for it.

        It shares compiled programs with the other runs; if not, it compiles them as a user's does.
        """
        tests_own = ("XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
        env = {k: v for k, v in os.environ.items() if cached or not k.startswith(tests_own)}
        env |= {"JAX_PLATFORMS": "cpu", "JAXRL_LLM_HEARTBEAT_TIMEOUT_S": "30"}
        if not cached:
            env["XDG_CACHE_HOME"] = str(run_dir / "home")
        words = ["-m", f"jaxrl_llm.{program}", "--config", str(self.root / config)]
        process = subprocess.Popen(
            [*prefix, sys.executable, *words, f"run_dir={run_dir}", *overrides],
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

    def params(self, run_dir, step=None, model=None):
        """Return a checkpoint's parameters by name."""
        spec = read_spec(model or self.base)
        like = jax.eval_shape(lambda: init_params(spec, key=jax.random.key(0)))
        checkpoints = Checkpoints(run_dir / "checkpoints", keep=None, read_only=True)
        tree = checkpoints.restore_params(like, step).state
        checkpoints.close()
        return {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }


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
    """A run that nothing disturbed: dumps, validation and checkpoints in between."""
    return run(
        "steps=4",
        "rollout.dump_every=2",
        "validation.every=2",
        "checkpoint.every=2",
        "log.trackers=tensorboard",
    ).ok()


@pytest.fixture
def copy_of(workshop):
    """Copies a run's folder, to damage it or to go on with it."""

    def copy(result):
        target = workshop.folder()
        shutil.copytree(result.run_dir, target)
        return target

    return copy


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
def same():
    """Asserts that two mappings from names to arrays are equal, bit for bit."""

    def check(actual, expected):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value, err_msg=name)

    return check


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
