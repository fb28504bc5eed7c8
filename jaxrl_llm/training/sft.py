"""Supervised training: the update of RL with another loss, on packed examples."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.losses import negative_log_likelihood
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.compilation import BACKGROUND, compiling_on_demand
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.programs import SftConfig, SftTeacherConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.dataset import Example, tokenize_examples
from jaxrl_llm.data.generated import prepare_files
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.data.rows import Row, load_rows, normalize_example_row
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.model import Model, decoder_spec, model_of
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity
from jaxrl_llm.monitoring.clock import Clock, CompileCounter, Pace, is_due
from jaxrl_llm.monitoring.compiling import reporting_compilation
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.logs import quiet_libraries
from jaxrl_llm.monitoring.profiler import Profiler
from jaxrl_llm.monitoring.trackers.loading import check_trackers
from jaxrl_llm.runs.directory import RunFolder, run_folder
from jaxrl_llm.runs.export import save_model
from jaxrl_llm.runs.resume import (
    ResumedRun,
    TrainableModel,
    check_finished,
    open_watchdog,
    resume_run,
)
from jaxrl_llm.runs.summary import closing_lines
from jaxrl_llm.runs.together import check_same_data, ending_together, join
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.bind import check_divergence, find_divergence
from jaxrl_llm.training.layouts import all_devices, open_layout, packed_shape, takes_long_rows
from jaxrl_llm.training.load_model import forward_config, merged_into_base, open_model
from jaxrl_llm.training.microbatches import Fields
from jaxrl_llm.training.objectives import COEFS, PolicyObjective
from jaxrl_llm.training.optimizer import OptimizerOf, check_learning_rates, make_optimizer
from jaxrl_llm.training.teachers import open_teacher_model
from jaxrl_llm.training.update import Learner, TrainState, check_skipped, router_hooks
from jaxrl_llm.training.visuals import check_room, row_visuals
from jaxrl_llm.types import VISUALS, Batch

logger = logging.getLogger(__name__)  # `log` is the run's


def run_sft(config: SftConfig, *, hints: bool = True) -> None:
    """Train on a config's examples, then export the model.

    Args:
        config: of the run.
        hints: whether to print what can be done with the model.
    """
    join(config)
    with ending_together(), ACTIVITIES.reported():
        quiet_libraries()
        all_devices()
        check_trackers(config)
        optimizer, schedule = make_optimizer(config.optim)
        if config.teacher.path is not None:
            key = "teacher.divergence"
            check_divergence(key, find_divergence(config.teacher.divergence, key))
        if config.steps is not None:
            check_learning_rates(schedule, config.optim, config.steps)
        prepare_files(config.data.prepare, config.data.train)
        if distributed.run_on_first(Path(config.export_to).exists):
            raise ConfigError(
                f"export_to: {config.export_to!r} exists; remove it or name another one"
            )
        with contextlib.ExitStack() as stack, ending_together():
            folder = stack.enter_context(run_folder(config.run_dir, config))
            params, model, base, display = _train(config, optimizer, schedule, folder, stack)
            source = config.model.path
            if base is not None:
                params, spec = merged_into_base(params, decoder_spec(model), source, base)
                model = model_of(spec)
            save_model(config.export_to, params, model, source=source, dtype="float32")
            for line in closing_lines(config) if hints else ():
                display.line(line)


def _train(
    config: SftConfig,
    optimizer: OptimizerOf,
    schedule: Callable[[Any], Any],
    folder: RunFolder,
    stack: contextlib.ExitStack,
) -> tuple[Params, Model, Any, Display]:
    """Return what was trained, the model, the layout of an adapter's base, and the display.

    All other arrays are let go of, so that merging and saving hold the model once.
    """
    watchdog = stack.enter_context(open_watchdog(config))
    learner, coefs, opened, model, base = _start(config, optimizer, folder, stack)
    state, stream = opened.states["actor"], opened.stream
    log, total = opened.log, opened.total_steps
    step, compiled, has_line = opened.step, CompileCounter(), Pace(total)
    left = range(step + 1, total + 1)
    profiler = Profiler(left, config.log.profile_steps, folder.path, opened.display)
    for step in left:
        watchdog.beat()
        profiler.turn_to(step)
        clock = Clock()
        batch, updates = to_batch(next(stream), config.data.max_tokens), int(state.updates)
        with clock("update_actor"):
            _keep_features(learner, batch)
            state, update_metrics = learner.update(state, batch, coefs)
            update_metrics = jax.device_get(update_metrics)
        check_skipped(int(update_metrics["skipped"]), config.optim.max_skipped)
        metrics = {
            **_loss_metrics(update_metrics, config.teacher),
            "train/grad_norm": float(update_metrics["grad_norm"]),
            "train/lr": float(schedule(updates)),
            **clock.metrics(),
            **compiled.metrics(),
        }
        log.write(step, metrics)
        line = f"sft step {step}/{total}  loss {metrics['train/loss']:.4f}"
        opened.display.advance(line if has_line(step) else "")
        opened.display.plot(step, metrics)
        BACKGROUND.release()
        opened.checkpoints.check()
        ending = opened.preemption.requested()
        if ending or is_due(step, config.checkpoint.every, total):
            _save(step, state, opened)
        if ending:
            break
    profiler.close()
    compiled.close()
    with activity("saving"):
        opened.checkpoints.wait()
    check_finished(step, total)
    BACKGROUND.clear()  # its programs' shapes hold on to the base
    return state.params, model, base, opened.display


def _keep_features(learner: Learner, batch: Batch) -> None:
    """Compute the features of a step's images where the vision tower is frozen."""
    tower = learner.model.visuals and learner.model.visuals.tower
    if tower is not None:
        tower.keep(batch)


def _loss_metrics(updated: Fields, teacher: SftTeacherConfig) -> dict[str, float]:
    """Return the metrics of an update's loss by the names that the log has."""
    loss = float(updated["pg_loss"])
    metrics = {
        f"train/{name}": float(value)
        for name, value in updated.items()
        if name.startswith(("router_", "divergence/")) or name == "top1_agreement"
    }
    if teacher.path is None:
        return {"train/loss": loss} | metrics
    whole = (1 - teacher.share) * loss + teacher.share * float(updated["distillation_loss"])
    return {"train/loss": whole, "train/nll": loss} | metrics


@activity("saving")
def _save(step: int, state: TrainState, opened: ResumedRun) -> None:
    extra = {
        "data": opened.stream.get_state(),
        "metrics_bytes": opened.log.position(step),
        "origin": opened.start_digests,
    }
    opened.checkpoints.save(step, {"actor": state}, extra)


def _start(
    config: SftConfig,
    optimizer: OptimizerOf,
    folder: RunFolder,
    stack: contextlib.ExitStack,
) -> tuple[Learner, Fields, ResumedRun, Model, Any]:
    """Return the updates and their coefficients, where the run stands, the model and its base."""
    stack.enter_context(reporting_compilation())
    stack.enter_context(compiling_on_demand())
    weights = "random weights of" if config.model.random_init else "weights of"
    logger.info("supervised training: making ready %s %s", weights, config.model.path)
    has_own_axes = config.model.function is not None
    with activity("opening the devices"):
        layout = open_layout(config.mesh, "train", config.mesh.train, has_own_axes=has_own_axes)
    rows = _read_rows(config)
    model = open_model(config.model, layout, seed=config.seed).for_length(config.data.max_tokens)
    examples = _tokenize(config, rows, model.model.vocab_size)
    forward = forward_config(
        config.model, model.model, layout, 1.0, model.tower, config.data.max_pixels
    )
    shape = packed_shape(
        layout,
        model.model,
        tokens=config.batch.max_tokens_per_device,
        longest=config.data.max_tokens,
        sequences=config.batch.examples_per_step,
        long_rows=takes_long_rows(forward, layout, config.data.max_tokens),
        visual_tokens=config.batch.max_visual_tokens_per_device,
    )
    forward = forward.over(shape)
    named = (
        (f"data.train: {e.load.where if e.load else i}", e.tokens) for i, e in enumerate(examples)
    )
    check_room(named, forward.visuals, shape)
    objective, coefs = _objective(config, model.model, layout, shape)
    learner = Learner(
        objective,
        forward,
        optimizer(model.model.declare(), model.like),
        reduce=token_mean,
        shape=shape,
        mesh=layout.mesh,
        params_like=model.like,
        frozen=model.frozen,
        hooks=router_hooks(forward, shape, layout.mesh, model.frozen),
    )
    opened = resume_run(
        config,
        folder.path,
        {"actor": TrainableModel(model, learner)},
        examples,
        stack,
        frozen={"teacher.path": coefs["teacher"]} if "teacher" in coefs else None,
    )
    folder.record()
    base = jax.tree.map(lambda leaf: leaf.sharding, model.frozen)  # None without an adapter
    return learner, coefs, opened, model.model, base


def _objective(
    config: SftConfig, model: Model, layout: Layout, shape: RowShape
) -> tuple[PolicyObjective, Fields]:
    """Return what an update minimises, and its coefficients with the teacher's weights in them."""
    if config.teacher.path is None:
        return PolicyObjective(loss=negative_log_likelihood), dict(COEFS)
    share, tokenizer = config.teacher.share, load_tokenizer(config.model.path)
    with config_errors_at("teacher.path"):
        teacher = open_teacher_model(
            config.teacher.path,
            config.model,
            tokenizer,
            model,
            layout,
            longest=config.data.max_tokens,
        )
    divergence = find_divergence(config.teacher.divergence, "teacher.divergence")
    objective = PolicyObjective(
        loss=negative_log_likelihood,
        share=1 - share,
        distillation=teacher.compared_by(divergence, shape),
    )
    return objective, COEFS | {"distillation_coef": share, "teacher": teacher.params}


@activity("reading the data")
def _read_rows(config: SftConfig) -> Sequence[Row]:
    with config_errors_at("data.train"):
        return load_rows(config.data.dataset, config.data.train, normalize=normalize_example_row)


@activity("tokenizing the examples")
def _tokenize(config: SftConfig, rows: Sequence[Row], vocab_size: int) -> list[Example]:
    with config_errors_at("model.path"):
        tokenizer = load_tokenizer(config.model.path)
    visuals = row_visuals(config.model, config.data)
    with config_errors_at("data.train"):
        examples, _ = tokenize_examples(
            rows,
            tokenizer,
            max_tokens=config.data.max_tokens,
            filter_overlong=config.data.filter_overlong,
            train_on=config.data.train_on,
            template_kwargs=config.data.chat_template_kwargs,
            visuals=visuals,
            vocab_size=vocab_size,
        )
    check_same_data("data.train", (example.tokens for example in examples))
    return examples


def to_batch(examples: Sequence[Example], max_tokens: int) -> Batch:
    """Lay examples out as a batch [B T] with their masks; decode images."""
    tokens = np.zeros((len(examples), max_tokens), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, example in enumerate(examples):
        tokens[i, : len(example.tokens)] = example.tokens
        mask[i, : len(example.mask)] = example.mask
    sizes = np.array([len(example.tokens) for example in examples], np.int32)
    batch = Batch(tokens, sizes, {"mask": mask})
    if any(example.load for example in examples):
        visuals = np.empty(len(examples), object)
        for i, example in enumerate(examples):
            visuals[i] = example.load() if example.load else ()
        batch = batch.add(**{VISUALS: visuals})
    return batch
