"""Supervised training: the update of RL with another loss, on packed examples."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.losses import negative_log_likelihood
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.compilation import BACKGROUND
from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.programs import SftConfig, SftTeacherConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.dataset import Example, tokenize_examples
from jaxrl_llm.data.generated import prepare_files
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.data.rows import Row, load_rows, normalize_example_row
from jaxrl_llm.models.model import Model
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.monitoring.metrics_log import check_trackers
from jaxrl_llm.runs.checkpoint import Saved
from jaxrl_llm.runs.directory import RunFolder, check_same_data, ending_together, run_folder
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training.bind import check_divergence, find_divergence
from jaxrl_llm.training.export import check_export, export_trained
from jaxrl_llm.training.layouts import open_layout, packed_shape, takes_long_rows
from jaxrl_llm.training.load_model import forward_config, open_model
from jaxrl_llm.training.loop import (
    Metrics,
    OpenFiles,
    Step,
    Trainer,
    compile_on_demand,
    enter_process,
    open_files,
    open_watchdog,
    run_steps,
    train_to_the_end,
)
from jaxrl_llm.training.microbatches import Fields
from jaxrl_llm.training.objectives import COEFS, PolicyObjective
from jaxrl_llm.training.optimizer import OptimizerOf, check_learning_rates, make_optimizer
from jaxrl_llm.training.run_files import closing_lines
from jaxrl_llm.training.teachers import open_teacher_model
from jaxrl_llm.training.update import Learner, TrainableModel, check_skipped
from jaxrl_llm.training.visuals import check_room, row_visuals
from jaxrl_llm.types import VISUALS, Batch

log = logging.getLogger(__name__)


class SftTrainer(Trainer[Step]):
    """Trains a model to imitate responses, and the distributions of a teacher where it has one.

    Args:
        config: of the run.
        learner: the update.
        coefs: of the objective, with the teacher's weights.
        schedule: updates -> learning rate.
        files: of the run.
        saved: where it stands.
    """

    def __init__(
        self,
        config: SftConfig,
        learner: Learner,
        coefs: Fields,
        schedule: Callable[[Any], Any],
        files: OpenFiles,
        saved: Saved,
    ) -> None:
        """Compile nothing yet."""
        super().__init__(files, saved)
        self.config, self.learner, self.coefs, self.schedule = config, learner, coefs, schedule

    def step(self, clock: Clock) -> Step:
        """Update the model on the next examples."""
        state, config = self.states["actor"], self.config
        batch = to_batch(next(self.files.stream), config.data.max_tokens)
        rate = float(self.schedule(int(state.updates)))
        with clock("update_actor"):
            visuals = self.learner.model.visuals
            if visuals is not None and visuals.tower is not None:
                visuals.tower.keep(batch)
            state, updated = self.learner.update(state, batch, self.coefs)
            updated = jax.device_get(updated)
        check_skipped(int(updated["skipped"]), config.optim.max_skipped)
        self.states = {"actor": state}
        metrics = _loss_metrics(updated, config.teacher)
        metrics |= {"train/grad_norm": float(updated["grad_norm"]), "train/lr": rate}
        return Step(self.number + 1, metrics)

    def line(self, number: int, metrics: Metrics) -> str:
        """Return a step's line on the screen."""
        return f"sft step {number}/{self.files.total_steps}  loss {metrics['train/loss']:.4f}"


def run_sft(config: SftConfig, *, hints: bool = True) -> None:
    """Train on a config's examples, then export the model.

    Args:
        config: of the run.
        hints: whether to print what can be done with the model.
    """
    with contextlib.ExitStack() as stack:
        enter_process(config, stack)
        check_trackers(config)
        optimizer, schedule = make_optimizer(config.optim)
        if config.teacher.path is not None:
            key = "teacher.divergence"
            check_divergence(key, find_divergence(config.teacher.divergence, key))
        if config.steps is not None:
            check_learning_rates(schedule, config.optim, config.steps)
        prepare_files(config.data.prepare, config.data.train)
        check_export(config.export_to)
        folder = stack.enter_context(run_folder(config.run_dir, config))
        with ending_together():  # the others, before this process waits for its files to close
            trainer, model, base = _open(config, optimizer, schedule, folder, stack)
            train_to_the_end(trainer, run_steps(trainer))
            display, params = trainer.files.display, trainer.states["actor"].params
            del trainer  # merging and saving hold the model once
            BACKGROUND.clear()  # its programs' shapes hold on to the weights
            export_trained(config.export_to, params, model, base, source=config.model.path)
            for line in closing_lines(config) if hints else ():
                display.line(line)


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


def _open(
    config: SftConfig,
    optimizer: OptimizerOf,
    schedule: Callable[[Any], Any],
    folder: RunFolder,
    stack: contextlib.ExitStack,
) -> tuple[SftTrainer, Model, Any]:
    """Return what trains, the model, and the layout of an adapter's base."""
    watchdog = stack.enter_context(open_watchdog(config))
    compile_on_demand(stack)
    weights = "random weights of" if config.model.random_init else "weights of"
    log.info("supervised training: making ready %s %s", weights, config.model.path)
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
    )
    trained = {"actor": TrainableModel(model, learner)}
    files, saved = open_files(
        *(config, trained, examples, watchdog, stack),
        frozen={"teacher.path": coefs["teacher"]} if "teacher" in coefs else None,
    )
    folder.record()
    base = jax.tree.map(lambda leaf: leaf.sharding, model.frozen)  # None without an adapter
    return SftTrainer(config, learner, coefs, schedule, files, saved), model.model, base


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
