"""A run at the place where it stands: a fresh start, or continued from its newest checkpoint."""

import contextlib
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError, Preempted, config_errors_at
from jaxrl_llm.config.load import as_tree
from jaxrl_llm.config.programs import PreferConfig, SftConfig, TrainConfig
from jaxrl_llm.data.dataset import batches
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.metrics_log import MetricsLog
from jaxrl_llm.monitoring.notebook import open_display
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.runs.preemption import Preemption
from jaxrl_llm.runs.summary import opening_lines
from jaxrl_llm.runs.watchdog import Watchdog
from jaxrl_llm.sharding.checksum import checksum_of_leaves
from jaxrl_llm.sharding.offload import on_device
from jaxrl_llm.training.load_model import LoadedModel
from jaxrl_llm.training.update import Learner, MovingAverage, TrainState

log = logging.getLogger(__name__)


class TrainableModel(NamedTuple):
    """A model that changes in a run: one that is trained, or follows such a one.

    Attributes:
        model: the weights to start from.
        learner: makes its state, and changes it.
        key: of the config, that names the model.
    """

    model: LoadedModel
    learner: Learner | MovingAverage
    key: str = "model.path"


@activity("reading the weights' checksums")
def starting_digests(
    models: Mapping[str, TrainableModel], items: Sequence[Any], frozen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return digests of the weights and the tokenised data that a run starts from."""
    data = hashlib.sha256()
    for item in items:
        data.update(np.asarray(item.tokens, np.int32).tobytes() + b"|")
        data.update(b"" if (load := getattr(item, "load", None)) is None else load.digest())
        given = {n: v for n, v in getattr(item, "columns", {}).items() if not n.startswith("ref_")}
        data.update(repr(sorted(given.items())).encode() if given else b"")
    loaded = {name: m.model for name, m in models.items()}
    weights = {name: (m.params, m.frozen, m.tower_params) for name, m in loaded.items()}
    sums = {}
    for name, tree in (weights | {**frozen}).items():
        with on_device(tree) as held:  # some wait on the host
            sums[name] = int(checksum_of_leaves(held))
    return {**sums, "data": data.hexdigest()}


def restore_or_start(
    checkpoints: Checkpoints,
    models: Mapping[str, TrainableModel],
    stream: Any,
    *,
    resume: str,
    digests: dict[str, Any],
    beside: Mapping[str, TrainState] | None = None,
) -> tuple[int, dict[str, TrainState], dict[str, Any]]:
    """Return the step, states and other contents of the newest checkpoint, or a fresh start.

    Args:
        checkpoints: of the run.
        models: to train, by name.
        stream: the data; it is set to the checkpoint's position.
        resume: the key checkpoint.resume.
        digests: `starting_digests` of the run as it is configured now.
        beside: states, by name, that checkpoints hold besides the models', as the run starts.

    Raises:
        ConfigError: the run in this folder started from other weights or other data.
    """
    if checkpoints.latest() is None:
        begun = {name: m.learner.init(m.model.params) for name, m in models.items()}
        return 0, {**begun, **(beside or {})}, {}
    if resume == "never" and not context.is_restarted():
        raise ConfigError(
            f"checkpoint.resume=never, but {str(checkpoints.directory)!r} holds step "
            f"{checkpoints.latest()}: set it to auto, or name another run_dir"
        )
    like = {
        name: jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(trainable.learner.init, trainable.model.like),
            trainable.learner.state_shardings,
        )
        for name, trainable in models.items()
    }
    like |= jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), {**(beside or {})}
    )
    with activity("reading the checkpoint"):
        saved = checkpoints.restore(like)
    keys = {name: trainable.key for name, trainable in models.items()} | {"data": "data.train"}
    for name, digest in digests.items():
        if saved.extra["origin"][name] != digest:
            raise ConfigError(
                f"{keys.get(name, name)}: its contents are not those that this run began with, so "
                "it can't be continued: put them back, or name another run_dir than "
                f"{checkpoints.directory}"
            )
    stream.set_state(saved.extra["data"])
    log.info("continuing after step %d", saved.step)
    return saved


class ResumedRun(NamedTuple):
    """A run at the step where it stands, with the files that it goes on reading and writing.

    Attributes:
        step: steps done.
        total_steps: steps in all.
        states: parameters and optimizer states, by the model's name.
        extra: the newest checkpoint's other contents; empty at a fresh start.
        stream: the data, at the run's position.
        start_digests: of the weights and data that the run began with.
        preemption: whether the run was told to end.
    """

    step: int
    total_steps: int
    states: dict[str, TrainState]
    extra: dict[str, Any]
    stream: Any
    start_digests: dict[str, Any]
    checkpoints: Checkpoints
    log: MetricsLog
    display: Display
    preemption: Preemption


def open_watchdog(config: TrainConfig | SftConfig | PreferConfig) -> Watchdog:
    """Return the watchdog that ends a run that hangs; on a cluster the launcher does it."""
    return Watchdog(config.stall_timeout_s if context.current() is None else None)


def _title_and_size(config: TrainConfig | SftConfig | PreferConfig) -> tuple[str, int]:
    """Return what a run does, and how many items a step of it has."""
    if isinstance(config, TrainConfig):
        return "training", config.batch.prompts_per_step
    if isinstance(config, SftConfig):
        return "supervised training", config.batch.examples_per_step
    return "training on preferences", config.batch.pairs_per_step


def check_finished(step: int, total: int) -> None:
    """Raise Preempted where a run has ended before its last step; until there it is saved."""
    if step < total:
        saved = f"saved after step {step} of {total}" if step else "there was no step to save"
        raise Preempted(f"{saved}; the same command continues")


def resume_run(
    config: TrainConfig | SftConfig | PreferConfig,
    folder: Path,
    models: Mapping[str, TrainableModel],
    items: Sequence[Any],
    stack: contextlib.ExitStack,
    *,
    best: str | None = None,
    frozen: Mapping[str, Any] | None = None,
    beside: Mapping[str, TrainState] | None = None,
) -> ResumedRun:
    """Open a run's data, checkpoints and metrics at the place where it stands.

    Args:
        config: of the run.
        folder: of the run.
        models: to train, by name.
        items: the tokenised data, in the files' order.
        stack: closes the files at the run's end.
        best: metric by which the best checkpoint is kept besides the newest.
        frozen: parameters of models that the run does not train, by their config key.
        beside: states that checkpoints hold besides those of `models`, as the run starts.
    """
    title, size = _title_and_size(config)
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
    digests = starting_digests(models, items, frozen or {})
    step, states, extra = restore_or_start(
        *(checkpoints, models, stream),
        resume=config.checkpoint.resume,
        digests=digests,
        beside=beside,
    )
    log = MetricsLog(
        folder,
        step=step,
        position=extra.get("metrics_bytes", 0),
        trackers=config.log.trackers,
        config=as_tree(config),
    )
    stack.callback(log.close)
    total = config.steps or len(items) * config.epochs // size
    display = open_display(title, total, step)
    stack.callback(display.close)
    trained = {n: m.model.like for n, m in models.items() if isinstance(m.learner, Learner)}
    for line in opening_lines(config, trained, len(items), total):
        display.line(line)
    preemption = stack.enter_context(Preemption(config.checkpoint.grace_s))
    return ResumedRun(
        step, total, states, extra, stream, digests, checkpoints, log, display, preemption
    )
