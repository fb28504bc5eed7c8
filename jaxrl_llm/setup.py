"""What `train` and `sft` share: run folders, files made on demand, models and optimizers."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import keys
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import as_tree, changes, read_yaml, to_yaml
from jaxrl_llm.data.dataset import batches
from jaxrl_llm.functions import ConfigError, FunctionSpec, load_function
from jaxrl_llm.keys import MeshConfig, ModelConfig, OptimConfig, SftConfig, TrainConfig
from jaxrl_llm.metrics import Display, MetricsLog
from jaxrl_llm.models.hf import load_params
from jaxrl_llm.models.hf_config import read_spec
from jaxrl_llm.models.spec import ModelSpec, declare, initialize
from jaxrl_llm.objective import Forward
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.sharding.rules import DEFAULT_RULES, fallbacks, shardings
from jaxrl_llm.step import Learner, TrainState

log = logging.getLogger(__name__)

PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "grain", "numpy")


CHANGEABLE = (
    "run_dir",
    "steps",
    "epochs",
    "log",
    "checkpoint",
    "validation",
    "mesh",
    "export_to",
    "algorithm.max_draws",
    "batch.tokens_per_microbatch",
    "critic.optim.max_skipped",
    "data.prepare",
    "data.validation",
    "model.remat",
    "model.logprob_chunk",
    "model.warm_start",
    "optim.max_skipped",
    "reward.workers",
    "reward.timeout_s",
    "reward_model.optim.max_skipped",
    "rollout.dump_every",
    "rollout.slots",
)
"""Keys that may change when a run is continued: they move what is written, or only rounding."""


class Model(NamedTuple):
    """A model in the training layout.

    Attributes:
        spec: the architecture.
        params: float32 master weights.
        like: shape, dtype and sharding of each array.
    """

    spec: ModelSpec
    params: Any
    like: Any


@contextlib.contextmanager
def blamed_on(key: str) -> Iterator[None]:
    """Turn a TypeError, ValueError or OSError into a one-line ConfigError that begins with `key`.

    For what runs functions with keywords of the config, which are the likely cause.
    """
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, OSError) as error:
        text = str(error).strip() or type(error).__name__
        raise ConfigError(f"{key}: {text.splitlines()[0]}") from error


@contextlib.contextmanager
def run_folder(run_dir: str | Path, config: Any) -> Iterator[Path]:
    """Hold a run's folder: one process at a time; its config, versions and commit inside.

    Raises:
        ConfigError: another process runs there, or nothing can be written there.
    """
    folder = Path(run_dir)
    with blamed_on("run_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"run_dir: another process is running in {str(folder)!r}") from error
        resolved = folder / "config.yaml"
        if resolved.exists():
            check_changes(folder, changes(read_yaml(resolved), as_tree(config)))
        write_text(resolved, to_yaml(config))
        write_text(folder / "versions.json", json.dumps(versions(config.seed), indent=1) + "\n")
        yield folder


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


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


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
        "seed": seed,
    }


def prepare_files(spec: FunctionSpec | None, wanted: tuple[str, ...]) -> None:
    """Run a preparation if any of the files it should write is missing.

    Raises:
        ConfigError: it failed, or left a file unwritten.
    """
    if spec is None:
        return
    stamp = Path(wanted[0]).parent / ".prepared_by"
    recipe = digest(json.dumps(spec.as_config(), sort_keys=True, default=str))
    if all(Path(path).exists() for path in wanted):
        if stamp.exists() and stamp.read_text() != recipe:
            raise ConfigError(
                f"data.prepare: the files in {str(stamp.parent)!r} were prepared with other "
                "keywords; remove that folder, or name another one"
            )
        return
    print(f"preparing data: {spec.fn}", flush=True)  # noqa: T201
    with blamed_on("data.prepare"):
        load_function(spec, keys.PREPARATIONS, key="data.prepare")()
    missing = [path for path in wanted if not Path(path).exists()]
    if missing:
        raise ConfigError(
            f"data.prepare: {spec.fn!r} did not write {', '.join(missing)}; "
            "make its `out` the folder of these files"
        )
    write_text(stamp, recipe)


def open_mesh(config: MeshConfig) -> Mesh:
    """Lay this process's devices out as the config says."""
    try:
        return make_mesh({"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor})
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from error


def open_model(config: ModelConfig, mesh: Mesh, *, seed: int) -> Model:
    """Load a Hugging Face directory, or draw its weights at random, in the training layout.

    Raises:
        ConfigError: the directory can't be read, or holds a critic.
    """
    with blamed_on("model.path"):
        spec = read_spec(config.path)
        if spec.value_head:
            raise ValueError(f"{config.path} ends in a value head, wanted a language model")
        if not config.random_init:
            return read_model(config.path, spec, mesh)
        layout = split(spec, mesh)
        draw = jax.jit(lambda key: initialize(spec, key=key), out_shardings=layout)
        return laid_out(spec, draw(jax.random.key(seed)), mesh)


def read_model(path: str, spec: ModelSpec, mesh: Mesh) -> Model:
    """Load the weights of a Hugging Face directory in the training layout."""
    return laid_out(spec, load_params(path, spec, shardings=split(spec, mesh)), mesh)


def split(spec: ModelSpec, mesh: Mesh) -> Any:
    """Return the training layout of a model."""
    return shardings(declare(spec), mesh)


def laid_out(spec: ModelSpec, params: Any, mesh: Mesh) -> Model:
    """Return parameters that are in the training layout as a Model; log where rules don't apply."""
    for name, left in fallbacks(declare(spec), mesh, DEFAULT_RULES).items():
        log.warning("%s is not split as the rules say: %s", name, left)
    like = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, split(spec, mesh)
    )
    return Model(spec, params, like)


def forward_settings(config: ModelConfig, spec: ModelSpec, temperature: float = 1.0) -> Forward:
    """Return how the model is run in training."""
    return Forward(
        spec=spec,
        dtype=config.dtype,
        remat=config.remat,
        logprob_chunk=config.logprob_chunk,
        temperature=temperature,
    )


def make_optimizer(
    config: OptimConfig, key: str = "optim"
) -> tuple[optax.GradientTransformation, Callable[[Any], Any]]:
    """Return the optimizer, with clipping and learning rate in it, and its schedule.

    Raises:
        ConfigError: one of the functions is no such thing, or does not work with its keywords.
    """
    with blamed_on(f"{key}.schedule: {config.schedule.fn!r} does not work"):
        schedule = load_function(config.schedule, keys.SCHEDULES, key=f"{key}.schedule")()
        rate = schedule(jnp.zeros((), jnp.int32)) if callable(schedule) else None
        if not isinstance(rate, int | float | np.generic | jax.Array) or np.ndim(rate) != 0:
            raise ConfigError(
                f"{key}.schedule: {config.schedule.fn!r} is not an optax schedule: got {rate!r} as "
                "the learning rate of update 0, wanted a number; did you mean constant_schedule?"
            )
    with blamed_on(f"{key}.optimizer: {config.optimizer.fn!r} does not work"):
        optimizer = load_function(
            config.optimizer, keys.OPTIMIZERS, passed=("learning_rate",), key=f"{key}.optimizer"
        )(learning_rate=schedule)
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ConfigError(
                f"{key}.optimizer: {config.optimizer.fn!r} is not an optax optimizer; "
                "did you mean adamw?"
            )
        tried = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}  # optax checks when it is used
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), tried)
    if config.grad_clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.grad_clip), optimizer)
    return optimizer, schedule


class Trainee(NamedTuple):
    """A model to train: the weights to start from, how it learns, and the key that names it."""

    model: Model
    learner: Learner
    key: str = "model.path"


def origin(trainees: Mapping[str, Trainee], items: Sequence[Any]) -> dict[str, Any]:
    """Return digests of what a run starts from: its weights and its tokenised data."""
    data = hashlib.sha256()
    for item in items:
        data.update(np.asarray(item.tokens, np.int32).tobytes() + b"|")
    sums = {name: int(jax.jit(checksum)(found.model.params)) for name, found in trainees.items()}
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
    if resume == "never":
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
    for name, what in blamed.items():
        if saved.extra["origin"][name] != origin[name]:
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


def open_run(
    config: TrainConfig | SftConfig,
    folder: Path,
    trainees: Mapping[str, Trainee],
    items: Sequence[Any],
    stack: contextlib.ExitStack,
    *,
    best: str | None = None,
) -> OpenRun:
    """Open a run's data, checkpoints and metrics at the place where it stands.

    Args:
        config: of the run.
        folder: of the run.
        trainees: the models to train, by name.
        items: the tokenised data, in the files' order.
        stack: closes what is opened.
        best: metric by which the best checkpoint is kept besides the newest.
    """
    is_rl = isinstance(config, TrainConfig)
    size = config.batch.prompts_per_step if is_rl else config.batch.examples_per_step
    with blamed_on("data.train"):
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
    began = origin(trainees, items)
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
    display = Display("training" if is_rl else "supervised training", total, step)
    stack.callback(display.close)
    return OpenRun(step, total, states, extra, stream, began, checkpoints, log, display)


def digest(text: str) -> str:
    """Return a text's SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def made_once(directory: Path, recipe: str, make: Callable[[], None]) -> None:
    """Make a directory if it does not exist; refuse one that was made by another recipe.

    Args:
        directory: what `make` writes.
        recipe: everything that decides the result.
        make: writes the directory, whole or not at all.
    """
    stamp = directory.with_name(directory.name + ".made_by")
    if directory.exists():
        if stamp.exists() and stamp.read_text() != digest(recipe):
            raise ConfigError(
                f"{directory} was made by another config than the one given now: "
                "remove it, or name another directory"
            )
        return
    make()
    write_text(stamp, digest(recipe))


def quiet_libraries() -> None:
    """Keep libraries' chatter off the screen; warnings and errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax raises its errors, too
    logging.getLogger("jaxrl_llm").setLevel(logging.INFO)
