"""A run's folder, and where the run stands in it: config, checkpoints, data position, metrics."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError, Preempted, config_errors_at
from jaxrl_llm.config.load import as_tree, changes, read_yaml, to_yaml
from jaxrl_llm.config.sft import SftConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.data.dataset import batches
from jaxrl_llm.monitoring.display import Display, open_display
from jaxrl_llm.monitoring.metrics_log import MetricsLog
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.runs.preemption import Preemption
from jaxrl_llm.runs.watchdog import Watchdog
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.checksum import checksum
from jaxrl_llm.training.setup import Model, write_text
from jaxrl_llm.training.step import Learner, TrainState

log = logging.getLogger(__name__)

LEASE_S = 180.0  # until a file server has missed a client that is gone
PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "grain", "numpy")

CHANGEABLE = (
    "run_dir",
    "steps",
    "stall_timeout_s",
    "epochs",
    "log",
    "checkpoint",
    "cluster",
    "compilation_cache",
    "validation",
    "mesh",
    "offload",
    "export_to",
    "algorithm.max_draws",
    "model.attention",
    "batch.max_tokens_per_device",
    "critic.optim.max_skipped",
    "data.prepare",
    "data.validation",
    "model.remat",
    "model.logprob_chunk",
    "model.warm_start",
    "optim.max_skipped",
    "reward.workers",
    "reward.timeout_s",
    "reward.memory_gb",
    "reward.max_processes",
    "reward.pass_env",
    "reward_model.optim.max_skipped",
    "rollout.cache_gb",
    "rollout.devices",
    "rollout.nodes",
    "rollout.dump_every",
    "rollout.slots",
)
"""Keys that may change when a run is continued: they move what is written, or only rounding."""


@contextlib.contextmanager
def run_folder(run_dir: str | Path, config: TrainConfig | SftConfig) -> Iterator[Path]:
    """Hold a run's folder: one run at a time; its config, versions, commit and programs inside.

    Raises:
        ConfigError: another run is there, or nothing can be written there.
    """
    folder = Path(run_dir)
    with contextlib.ExitStack() as stack:
        distributed.once(lambda: stack.enter_context(_held(folder, config)))
        if config.compilation_cache:
            stack.enter_context(compiled_into(programs_in(folder)))
        yield folder


def programs_in(folder: Path) -> Path:
    """Return the folder of a run's compiled programs.

    >>> programs_in(Path("/runs/a"))
    PosixPath('/runs/a/cache/compilation')
    """
    return folder.resolve() / "cache" / "compilation"


@contextlib.contextmanager
def compiled_into(folder: Path) -> Iterator[None]:
    """Keep what XLA compiles in a folder, where a later process with the same programs finds it.

    Small programs are kept, too: a run has dozens of them. All processes read, the first one
    writes. A folder that the user has given to jax is taken as it is, and so is each of its
    settings that the environment makes.
    """
    settings: Any = jax.config
    wanted = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if settings.jax_compilation_cache_dir:
        wanted = {}
    own = {name: value for name, value in wanted.items() if name.upper() not in os.environ}
    before = {name: getattr(settings, name) for name in own}
    try:
        for name, value in own.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        if own:
            compilation_cache.reset_cache()  # it stays in the folder that it was first used with


def _locked(lock: IO[str]) -> bool:
    """Lock a file, unless another process has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _held(folder: Path, config: Any) -> Iterator[None]:
    with config_errors_at("run_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    with (folder / ".lock").open("w") as lock:
        # a file server may hold the lock of a node that is lost for a while
        until = time.monotonic() + (LEASE_S if context.is_restarted() else 0.0)
        while not _locked(lock):
            if time.monotonic() > until:
                raise ConfigError(f"run_dir: another process is running in {str(folder)!r}")
            time.sleep(1.0)
        resolved = folder / "config.yaml"
        if resolved.exists():
            check_changes(folder, changes(read_yaml(resolved), as_tree(config)))
        write_text(resolved, to_yaml(config))
        write_text(folder / "versions.json", json.dumps(versions(config.seed), indent=1) + "\n")
        yield


def check_changes(folder: Path, changed: Sequence[str]) -> None:
    """Log what changed in a run's config; refuse what would mix two runs into one.

    Before the first checkpoint there is nothing to mix, and a run starts anew.
    """
    for line in changed:
        name = line.partition(":")[0]
        if not any(name == free or name.startswith(f"{free}.") for free in CHANGEABLE) and any(
            (folder / "checkpoints").glob("[0-9]*")
        ):
            raise ConfigError(
                f"{line}: the run in {str(folder)!r} was begun otherwise and can't be continued "
                "with it; put it back, or name another run_dir"
            )
        log.warning("config changed since this run began: %s", line)


def versions(seed: int) -> dict[str, Any]:
    """Return what a run can be repeated with: versions, devices, git commit and seed."""
    root = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str | None:
        if not (root / ".git").exists() or not shutil.which("git"):
            return None
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "jaxrl_llm": importlib.metadata.version("jaxrl_llm"),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changed_files": git("status", "--porcelain"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": [d.device_kind for d in jax.devices()],
        "processes": distributed.count(),
        "seed": seed,
    }


class Trainee(NamedTuple):
    """A model to train: the weights to start from, how it learns, and the key that names it."""

    model: Model
    learner: Learner
    key: str = "model.path"


def origin(
    trainees: Mapping[str, Trainee], items: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return digests of what a run starts from: its weights and its tokenised data."""
    data = hashlib.sha256()
    for item in items:
        data.update(np.asarray(item.tokens, np.int32).tobytes() + b"|")
    weights = {name: (t.model.params, t.model.frozen) for name, t in trainees.items()}
    sums = {name: int(jax.jit(checksum)(found)) for name, found in (weights | {**given}).items()}
    return {**sums, "data": data.hexdigest()}


def restore_or_start(
    checkpoints: Checkpoints,
    trainees: Mapping[str, Trainee],
    stream: Any,
    *,
    resume: str,
    origin: dict[str, Any],
) -> tuple[int, dict[str, TrainState], dict[str, Any]]:
    """Return the step, states and other contents of the newest checkpoint, or a fresh start.

    Args:
        checkpoints: of the run.
        trainees: by name.
        stream: the data; it is set to the checkpoint's position.
        resume: the key checkpoint.resume.
        origin: of the run as it is configured now.

    Raises:
        ConfigError: the run in this folder started from other weights or other data.
    """
    if checkpoints.latest() is None:
        return 0, {name: t.learner.init(t.model.params) for name, t in trainees.items()}, {}
    if resume == "never" and not context.is_restarted():
        raise ConfigError(
            f"checkpoint.resume=never, but {str(checkpoints.directory)!r} holds step "
            f"{checkpoints.latest()}: set it to auto, or name another run_dir"
        )
    like = {
        name: jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(trainee.learner.init, trainee.model.like),
            trainee.learner.state_shardings,
        )
        for name, trainee in trainees.items()
    }
    saved = checkpoints.restore(like)
    blamed = {name: trainee.key for name, trainee in trainees.items()} | {"data": "data.train"}
    for name, digest in origin.items():
        if saved.extra["origin"][name] != digest:
            what = blamed.get(name, name)
            raise ConfigError(
                f"{what}: its contents are not those that this run began with, so it can't be "
                f"continued: put them back, or name another run_dir than {checkpoints.directory}"
            )
    stream.set_state(saved.extra["data"])
    log.info("continuing after step %d", saved.step)
    return saved


class OpenRun(NamedTuple):
    """Where a run stands, and what it goes on reading and writing.

    Attributes:
        step: steps done.
        total_steps: steps in all.
        states: what updates change, by the name of the trainee.
        extra: what else the newest checkpoint holds; empty at a fresh start.
        stream: the data, at the run's position.
        origin: digests of the weights and data that the run began with.
        preemption: whether the run was told to end.
    """

    step: int
    total_steps: int
    states: dict[str, TrainState]
    extra: dict[str, Any]
    stream: Any
    origin: dict[str, Any]
    checkpoints: Checkpoints
    log: MetricsLog
    display: Display
    preemption: Preemption


def open_watchdog(config: TrainConfig | SftConfig) -> Watchdog:
    """Return what ends a run that hangs; on a cluster the launcher does it."""
    return Watchdog(config.stall_timeout_s if context.current() is None else None)


def check_whole(step: int, total: int) -> None:
    """Raise Preempted where a run has ended before its last step; until there it is saved."""
    if step < total:
        saved = f"saved after step {step} of {total}" if step else "there was no step to save"
        raise Preempted(f"{saved}; the same command continues")


def open_run(
    config: TrainConfig | SftConfig,
    folder: Path,
    trainees: Mapping[str, Trainee],
    items: Sequence[Any],
    stack: contextlib.ExitStack,
    *,
    best: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> OpenRun:
    """Open a run's data, checkpoints and metrics at the place where it stands.

    Args:
        config: of the run.
        folder: of the run.
        trainees: the models to train, by name.
        items: the tokenised data, in the files' order.
        stack: closes what is opened.
        best: metric by which the best checkpoint is kept besides the newest.
        given: parameters of the models that the run reads and does not train, by their config key.
    """
    is_rl = isinstance(config, TrainConfig)
    size = config.batch.prompts_per_step if is_rl else config.batch.examples_per_step
    with config_errors_at("data.train"):
        stream = batches(
            items,
            batch_size=size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            epochs=None if config.steps else config.epochs,
            drop_remainder=True,
        )
    checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep, best=best)
    stack.callback(checkpoints.close)
    began = origin(trainees, items, given or {})
    step, states, extra = restore_or_start(
        checkpoints, trainees, stream, resume=config.checkpoint.resume, origin=began
    )
    log = MetricsLog(
        folder,
        step=step,
        position=extra.get("metrics_bytes", 0),
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        config=as_tree(config),
    )
    stack.callback(log.close)
    total = config.steps or len(items) * config.epochs // size
    display = open_display("training" if is_rl else "supervised training", total, step)
    stack.callback(display.close)
    preemption = stack.enter_context(Preemption(config.checkpoint.grace_s))
    return OpenRun(step, total, states, extra, stream, began, checkpoints, log, display, preemption)
