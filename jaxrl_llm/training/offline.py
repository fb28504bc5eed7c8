"""Training on files of examples: on responses (`sft`), and on preferences (`prefer`).

Both are the update of RL with another loss, and the loop that `train` has, too.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.losses import negative_log_likelihood
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean, token_mean
from jaxrl_llm.compilation import BACKGROUND, Task, compiler_options
from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import asks_for, check_fields, load_function
from jaxrl_llm.config.programs import PreferConfig, PreferValidationConfig, SftConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.dataset import (
    Example,
    Preference,
    preference_batch,
    rotate_answers,
    tokenize_examples,
    tokenize_preferences,
)
from jaxrl_llm.data.rows import Row, load_rows, normalize_example_row, normalize_preference_row
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.lora import combine_params
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.monitoring.trackers import check_trackers
from jaxrl_llm.runs.checkpoint import Saved
from jaxrl_llm.runs.directory import check_same_data, ending_together, prepare_files, run_folder
from jaxrl_llm.runs.preemption import Watchdog
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.training import loop
from jaxrl_llm.training.bind import check_divergence, find_divergence
from jaxrl_llm.training.export import check_export, save_model, scoring_of
from jaxrl_llm.training.forward import (
    Fields,
    Inference,
    MicroBatchStep,
    check_room,
    logprob_pass,
    row_visuals,
)
from jaxrl_llm.training.load_model import (
    LoadedModel,
    forward_config,
    merged_into_base,
    microbatch_shape,
    open_layout,
    open_model,
    open_scorer,
    packed_shape,
)
from jaxrl_llm.training.optimizer import check_learning_rates, make_optimizer
from jaxrl_llm.training.run_files import closing_lines
from jaxrl_llm.training.teachers import open_teacher_model
from jaxrl_llm.training.update import (
    ANSWER_FIELDS,
    COEFS,
    LOGITS,
    OF_LABELLED,
    OF_REFERENCE,
    OF_ROWS,
    OF_STEPS,
    SCORES,
    Distillation,
    Learner,
    PolicyObjective,
    PreferenceObjective,
    StepObjective,
    TrainableModel,
    UpdateSpec,
    check_skipped,
    finished_metrics,
    split_sums,
)
from jaxrl_llm.types import VISUALS, Batch

log = logging.getLogger(__name__)

# What both programs share.


class OfflineTrainer(loop.Trainer):
    """Updates a model on the next items of its data.

    Args:
        config: of the run.
        learner: the update.
        schedule: updates -> learning rate.
        opened: files of the run, and where it stands.
        coefs: of the objective.
        validation: when it validates; None: nothing is held out.
    """

    def __init__(
        self,
        config: SftConfig | PreferConfig,
        learner: Learner,
        schedule: Callable[[Any], Any],
        opened: tuple[loop.OpenFiles, Saved],
        *,
        coefs: Fields = COEFS,
        validation: PreferValidationConfig | None = None,
    ) -> None:
        """Compile nothing yet."""
        super().__init__(*opened, validation)
        self.config, self.learner, self.schedule, self.coefs = config, learner, schedule, coefs

    def step(self, clock: Clock) -> loop.Metrics:
        """Update the model on the next items; return the metrics."""
        state, visuals = self.states["actor"], self.learner.model.visuals
        rate = float(self.schedule(int(state.updates)))
        batch = self.batch(next(self.files.stream), clock)
        with clock("update_actor"):
            if visuals is not None and visuals.tower is not None:
                visuals.tower.keep(batch)
            state, updated = self.learner.update(state, batch, self.coefs)
            updated = jax.device_get(updated)
        check_skipped(int(updated["skipped"]), self.config.optim.max_skipped)
        self.states = {"actor": state}
        return self.metrics(updated) | {"train/lr": rate}

    def batch(self, items: list[Any], clock: Clock) -> Batch:
        """Lay items out as a mini-batch."""
        raise NotImplementedError

    def metrics(self, updated: Fields) -> loop.Metrics:
        """Return the metrics of an update by the names that the log has."""
        raise NotImplementedError


def _run(
    config: SftConfig | PreferConfig,
    title: str,
    load: Callable[[Any], UpdateSpec],
    open_trainer: Callable[..., tuple[OfflineTrainer, LoadedModel]],
    *,
    hints: bool = True,
) -> None:
    """Train on a config's examples, then export the model.

    Args:
        config: of the run.
        title: of the run, for the log.
        load: finds the functions that the config names.
        open_trainer: (config, update, layout, watchdog, stack) -> what trains the model; loads it
            and its data.
        hints: whether to print what can be done with the model.
    """
    with contextlib.ExitStack() as stack:
        loop.enter_process(config, stack)
        check_trackers(config)
        update = load(config)
        if config.steps is not None:
            check_learning_rates(update.schedule, config.optim, config.steps)
        held_out = config.data.validation if isinstance(config, PreferConfig) else ()
        prepare_files(config.data.prepare, (*config.data.train, *held_out))
        check_export(config.export_to)
        record = stack.enter_context(run_folder(config.run_dir, config))
        with ending_together():  # the others, before this process waits for its files to close
            loop.compile_on_demand(stack)
            watchdog = stack.enter_context(loop.open_watchdog(config))
            log.info("%s %s", title, config.model.path)
            own_axes = config.model.function is not None
            with activity("opening the devices"):
                layout = open_layout(config.mesh, "train", config.mesh.train, has_own_axes=own_axes)
            trainer, loaded = open_trainer(config, update, layout, watchdog, stack)
            record()
            model, base = loaded.model, jax.tree.map(lambda leaf: leaf.sharding, loaded.frozen)
            del loaded
            loop.validate_before(trainer)
            loop.train_to_the_end(trainer, loop.run_steps(trainer))
            display, params = trainer.files.display, trainer.states["actor"].params
            del trainer  # merging and saving hold the model once
            BACKGROUND.clear()  # its programs' shapes hold on to the weights
            source = config.model.path
            scoring = scoring_of(config) if isinstance(config, PreferConfig) else None
            if base is not None:
                params, model = merged_into_base(params, model, source, base)
            save_model(
                config.export_to, params, model, source=source, dtype="float32", scoring=scoring
            )
            for line in closing_lines(config) if hints else ():
                display.line(line)


@activity("reading the data")
def _read_rows(
    config: SftConfig | PreferConfig, normalize: Callable[..., Any]
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Read the rows to train and to validate on."""

    def read(key: str, paths: Sequence[str]) -> Sequence[Row]:
        with config_errors_at(key):
            return load_rows(config.data.dataset, paths, normalize=normalize)

    held_out = config.data.validation if isinstance(config, PreferConfig) else ()
    rows = read("data.train", config.data.train)
    return rows, read("data.validation", held_out) if held_out else []


# Responses.


class SftTrainer(OfflineTrainer):
    """Trains a model to imitate responses, and the distributions of a teacher where it has one."""

    config: SftConfig

    def batch(self, items: list[Example], clock: Clock) -> Batch:
        """Lay examples out."""
        del clock
        return to_batch(items, self.config.data.max_tokens)

    def metrics(self, updated: Fields) -> loop.Metrics:
        """Return the metrics of an update's loss by the names that the log has."""
        loss, teacher = float(updated["pg_loss"]), self.config.teacher
        metrics = {
            f"train/{name}": float(value)
            for name, value in updated.items()
            if name.startswith(("router_", "divergence/")) or name == "top1_agreement"
        } | {"train/grad_norm": float(updated["grad_norm"])}
        if teacher.path is None:
            return {"train/loss": loss} | metrics
        whole = (1 - teacher.share) * loss + teacher.share * float(updated["distillation_loss"])
        return {"train/loss": whole, "train/nll": loss} | metrics

    def line(self, number: int, metrics: loop.Metrics) -> str:
        """Return a step's line on the screen."""
        return f"sft step {number}/{self.files.total_steps}  loss {metrics['train/loss']:.4f}"


def run_sft(config: SftConfig, *, hints: bool = True) -> None:
    """Train on a config's examples, then export the model.

    Args:
        config: of the run.
        hints: whether to print what can be done with the model.
    """
    weights = "random weights of" if config.model.random_init else "weights of"
    title = f"supervised training: making ready {weights}"
    _run(config, title, _load_imitation, _open_sft, hints=hints)


def _load_imitation(config: SftConfig) -> UpdateSpec:
    """Return the update that a config describes, with the divergence from its teacher, if any."""
    objective = PolicyObjective(loss=negative_log_likelihood)
    if config.teacher.path is not None:
        divergence = find_divergence(config.teacher.divergence, "teacher.divergence")
        check_divergence("teacher.divergence", divergence)
        objective = PolicyObjective(
            loss=negative_log_likelihood,
            share=1 - config.teacher.share,
            distillation=Distillation(divergence=divergence),
        )
    optimizer, schedule = make_optimizer(config.optim)
    return UpdateSpec(objective, token_mean, optimizer, schedule, config.optim.max_skipped)


def _open_sft(
    config: SftConfig,
    update: UpdateSpec,
    layout: Layout,
    watchdog: Watchdog,
    stack: contextlib.ExitStack,
) -> tuple[SftTrainer, LoadedModel]:
    """Load a model and the examples that it is trained on."""
    data, coefs, frozen = config.data, dict[str, Any](COEFS), {}
    rows, _ = _read_rows(config, normalize_example_row)
    model = open_model(config.model, layout, seed=config.seed).for_length(data.max_tokens)
    examples = _tokenize_examples(config, rows, model.model.vocab_size)
    forward = forward_config(config.model, model.model, layout, 1.0, model.tower, data.max_pixels)
    sequences = config.batch.examples_per_step
    shape = microbatch_shape(
        config.batch, forward, layout, longest=data.max_tokens, sequences=sequences
    )
    named = (
        (f"data.train: {e.load.where if e.load else i}", e.tokens) for i, e in enumerate(examples)
    )
    check_room(named, forward.visuals, shape)
    if config.teacher.path is not None:
        tokenizer = load_tokenizer(config.model.path)
        with config_errors_at("teacher.path"):
            teacher = open_teacher_model(
                config.teacher.path,
                config.model,
                tokenizer,
                model.model,
                layout,
                longest=data.max_tokens,
            )
        update = teacher.taught(update, shape)
        coefs |= {"distillation_coef": config.teacher.share, "teacher": teacher.params}
        frozen["teacher.path"] = teacher.params
    learner = update.learner(forward, shape, layout, model.like, model.frozen)
    trained = {"actor": TrainableModel(model, learner)}
    opened = loop.open_files(config, trained, examples, watchdog, stack, frozen=frozen)
    return SftTrainer(config, learner, update.schedule, opened, coefs=coefs), model


@activity("tokenizing the examples")
def _tokenize_examples(config: SftConfig, rows: Sequence[Row], vocab_size: int) -> list[Example]:
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


# Preferences.


PAIRS, LABELLED, STEPS = "pairs", "answers with a label", "answers with labelled steps"


def load_preference_loss(config: PreferConfig) -> Callable[..., Any]:
    """Return the loss that a config names.

    Raises:
        ConfigError: there is no such function, or it asks for a field that there is not.
    """
    loss = load_function(config.loss, functions.PREFERENCES, passed=None, key="loss")
    check_fields(loss, "loss", available=ANSWER_FIELDS | OF_STEPS)
    names = set(asks_for(loss))
    kinds_of = {PAIRS: ANSWER_FIELDS - OF_LABELLED, LABELLED: OF_LABELLED, STEPS: OF_STEPS}
    asked = [
        f"{sorted(names & fields)} of {kind}" for kind, fields in kinds_of.items() if names & fields
    ]
    if len(asked) > 1:
        raise ConfigError(
            f"loss: {config.loss.fn} asks for {' and for '.join(asked)}; a run has one kind"
        )
    if names & (SCORES | {LOGITS}) and (config.model.lora or config.model.adapter):
        raise ConfigError(
            f"loss: {config.loss.fn} trains a reward model, whose head an adapter can't hold: "
            "remove model.lora and model.adapter"
        )
    return loss


@activity("tokenizing the answers")
def tokenize_preference_rows(
    config: PreferConfig,
    loss: Callable[..., Any],
    rows: tuple[Sequence[Row], Sequence[Row]],
    vocab_size: int,
) -> tuple[list[Preference], list[Preference]]:
    """Tokenize the rows to train and to validate on.

    Args:
        config: of the run.
        loss: that it names.
        rows: to train and to validate on.
        vocab_size: of the model.

    Raises:
        ConfigError: they don't fit, or the loss asks for what they have not.
    """
    with config_errors_at("model.path"):
        tokenizer = load_tokenizer(config.model.path)

    def tokenized(key: str, rows: Sequence[Row]) -> list[Preference]:
        with config_errors_at(key):
            items, _ = tokenize_preferences(
                rows,
                tokenizer,
                max_tokens=config.data.max_tokens,
                filter_overlong=config.data.filter_overlong,
                template_kwargs=config.data.chat_template_kwargs,
                step_separator=config.data.step_separator,
                vocab_size=vocab_size,
            )
        check_same_data(key, (item.tokens for item in items))
        check_rows(items[0], loss, f"{key}: loss {config.loss.fn!r}")
        return items

    train = tokenized("data.train", rows[0])
    return train, tokenized("data.validation", rows[1]) if config.data.validation else []


def check_rows(item: Preference, loss: Callable[..., Any], where: str) -> None:
    """Raise ConfigError unless rows like this one have what a loss asks for."""
    names = set(asks_for(loss))
    expected = STEPS if names & OF_STEPS else PAIRS if names - OF_LABELLED else LABELLED
    got = STEPS if item.step_ends else PAIRS if item.is_pair else LABELLED
    if got != expected:
        raise ConfigError(f"{where} is of {expected}, but the rows are {got}")
    for name in sorted(names & OF_ROWS - set(item.columns)):
        raise ConfigError(f"{where} asks for {name!r}, but the rows have no such column")


# The policy that preferences are measured against: the model as its run begins, or another one.


def annotate(
    items: Sequence[Preference],
    infer: Inference,
    params: Params,
    *,
    width: int,
    size: int,
    tell: Callable[[int], None] = lambda rows: None,
) -> list[Preference]:
    """Return preferences with the log-probs of their answers under the reference.

    Args:
        items: without them.
        infer: (params, batch) -> log-probs of its tokens.
        params: of the reference; where the policy is an adapter, of that adapter as it began.
        width: of a batch, in tokens.
        size: of a batch, in rows.
        tell: is told how many rows are done, after each batch.
    """
    annotated = []
    for first in range(0, len(items), size):
        some = list(items[first : first + size])
        sums = answer_sums(infer, params, preference_batch(some, width))
        for index, item in enumerate(some):
            known = {f"ref_{name}": float(values[index]) for name, values in sums.items()}
            annotated.append(dataclasses.replace(item, columns={**item.columns, **known}))
        tell(len(some))
    return annotated


def kl_baseline(policy: np.ndarray, reference: np.ndarray) -> float:
    """Return KTO's z₀ in nats: the mean log-ratio of answers to other prompts, at least 0.

    KTO (https://arxiv.org/abs/2402.01306, section 4.1).

    Args:
        policy: log-probs of the answers of other rows [P].
        reference: the same under the reference.
    """
    return max(0.0, float(np.mean(policy - reference)))


def answer_sums(infer: Inference, params: Params, batch: Batch) -> dict[str, np.ndarray]:
    """Return the sums of log-probs of each answer [P], by the names that losses ask for."""
    logprobs = np.where(batch["mask"], infer(params, batch)["logprobs"], 0.0)
    sums = split_sums(logprobs, dict(batch.fields), ("chosen_logps", "rejected_logps"), "logps")
    return {name: np.asarray(values, np.float32) for name, values in sums.items()}


def open_pair_reference(
    config: PreferConfig, model: LoadedModel, policy: Inference, learner: Learner, layout: Layout
) -> tuple[Inference, Params]:
    """Take the model as it was loaded for the reference, or load the one that the config names.

    Args:
        config: of the run.
        model: as it was loaded, before any update.
        policy: its pass.
        learner: of the policy.
        layout: of the policy.

    Raises:
        ConfigError: the reference can't be loaded, or knows other tokens.
    """
    if config.reference is None:
        return policy, model.params  # updates have a copy
    with config_errors_at("reference"):
        alone = dataclasses.replace(
            config.model, path=config.reference, lora=None, adapter=None, random_init=False
        )
        other = open_model(alone, layout, seed=config.seed).for_length(config.data.max_tokens)
        if other.model.vocab_size != model.model.vocab_size:
            raise ValueError(
                f"{config.reference} has vocab_size={other.model.vocab_size}, expected the "
                f"policy's {model.model.vocab_size}"
            )
    forward = forward_config(alone, other.model, layout).over(learner.shape)
    return logprob_pass(forward, learner.shape, learner.mesh, ("logprobs",)), other.params


# The run.


SHOWN = {
    "loss": "train/loss",
    "accuracy": "train/rewards/accuracies",
    "margin": "train/rewards/margins",
    "accuracy of steps": "train/accuracy/steps",
    "held-out loss": "val/loss",
    "held-out accuracy": "val/rewards/accuracies",
    "of steps": "val/accuracy/steps",
    "of answers": "val/accuracy/answers",
}
"""Metrics that have a place in a step's line, by their labels there."""


class PreferTrainer(OfflineTrainer):
    """Trains a policy or a reward model on preferences.

    Args:
        config: of the run.
        learner: the update.
        schedule: updates -> learning rate.
        opened: files of the run, and where it stands.
        held_out: rows to validate on, with log-probs under the reference where the loss asks for
            them; none: nothing is validated.
        compare: (parameters, answers of other rows) -> their log-probs under the policy and under
            the reference, where each step asks for them; None where the rows have all.
    """

    def __init__(
        self,
        config: PreferConfig,
        learner: Learner,
        schedule: Callable[[Any], Any],
        opened: tuple[loop.OpenFiles, Saved],
        *,
        held_out: list[Preference],
        compare: Callable[[Params, Batch], tuple[np.ndarray, np.ndarray]] | None,
    ) -> None:
        """Compile nothing yet."""
        validation = config.validation if held_out else None
        super().__init__(config, learner, schedule, opened, validation=validation)
        self.held_out, self.compare = held_out, compare
        objective, forward, mesh = learner.objective, learner.model, learner.mesh

        @functools.partial(
            jax.jit, compiler_options=compiler_options(Task.TRAIN, mesh.devices.flat)
        )
        def measure(params: Any, rest: Any, micro: Any) -> Any:
            metrics = objective(combine_params(params, rest), micro, {}, forward, mesh)[1]
            return {name: value for name, value in metrics.items() if name != "router"}

        self._measure = MicroBatchStep("validation", measure, learner.shape, mesh, place=2)

    def metrics(self, updated: Fields) -> loop.Metrics:
        """Return the metrics of an update by the names that the log has."""
        return _named("train", updated)

    @activity("validating")
    def validate(self, number: int) -> loop.Metrics:
        """Return the loss and diagnostics of the held-out rows."""
        del number
        learner, params = self.learner, self.states["actor"].params
        rest = learner.frozen or {}
        batch = self.batch(self.held_out, Clock())
        batch = batch.add(weights=np.asarray(learner.reduce(jnp.asarray(batch["mask"]))))
        names = learner.objective.asks_for() | {"mask", "weights"}
        cut = self._measure.microbatches(batch, names)
        parts = [self._measure(params, rest, micro) for _, micro in cut]
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)
        return _named("val", finished_metrics(jax.device_get(total)))

    def line(self, number: int, metrics: loop.Metrics) -> str:
        """Return a step's line on the screen."""
        parts = [f"{label} {metrics[name]:.4f}" for label, name in SHOWN.items() if name in metrics]
        return f"step {number}/{self.files.total_steps}  " + "  ".join(parts)

    def batch(self, items: list[Preference], clock: Clock) -> Batch:
        """Lay a mini-batch out, with what the objective asks of the whole of it."""
        names, most = self.learner.objective.asks_for(), self.config.data.max_tokens
        width = width_of(items, most)
        batch = preference_batch(items, width)
        if "answer_share" in names:
            batch = batch.add(answer_share=np.full(len(items), 1 / len(items), np.float32))
        if "kl_baseline" in names:
            assert self.compare is not None
            with clock("kl_baseline"):
                rotated = preference_batch(rotate_answers(items, most), width)
                baseline = kl_baseline(*self.compare(self.states["actor"].params, rotated))
            batch = batch.add(kl_baseline=np.full(len(items), baseline, np.float32))
        return batch


def run_prefer(config: PreferConfig) -> None:
    """Train on a config's preferences, then export the model."""
    title = "training on preferences: making ready the weights of"
    _run(config, title, _load_preference, _open_prefer)


def _load_preference(config: PreferConfig) -> UpdateSpec:
    """Return the update that a config describes."""
    loss = load_preference_loss(config)
    of_steps = LOGITS in asks_for(loss)
    objective = StepObjective(loss=loss) if of_steps else PreferenceObjective(loss=loss)
    reduce = token_mean if of_steps else sequence_mean_token_mean
    optimizer, schedule = make_optimizer(config.optim)
    return UpdateSpec(objective, reduce, optimizer, schedule, config.optim.max_skipped)


def _open_prefer(
    config: PreferConfig,
    update: UpdateSpec,
    layout: Layout,
    watchdog: Watchdog,
    stack: contextlib.ExitStack,
) -> tuple[PreferTrainer, LoadedModel]:
    """Load a model and the preferences that it is trained on."""
    rows, loss = _read_rows(config, normalize_preference_row), update.objective.loss
    assert loss is not None, "of preferences there is always one"
    of_steps = isinstance(update.objective, StepObjective)
    if of_steps or SCORES & set(asks_for(loss)):
        model = open_scorer(config.model, layout, seed=config.seed, of_steps=of_steps)
    else:
        model = open_model(config.model, layout, seed=config.seed)
    model = model.for_length(config.data.max_tokens)
    train, held_out = tokenize_preference_rows(config, loss, rows, model.model.vocab_size)
    shape = packed_shape(
        layout,
        model.model,
        tokens=config.batch.max_tokens_per_device,
        longest=width_of(train, config.data.max_tokens),
        sequences=config.batch.pairs_per_step,
    )
    forward = forward_config(config.model, model.model, layout)
    learner = update.learner(forward, shape, layout, model.like, model.frozen)
    compare, (train, held_out) = _with_reference(
        config, (train, held_out), model, learner, layout, watchdog
    )
    trained = {"actor": TrainableModel(model, learner)}
    opened = loop.open_files(config, trained, train, watchdog, stack)
    trainer = PreferTrainer(
        config, learner, update.schedule, opened, held_out=held_out, compare=compare
    )
    return trainer, model


def width_of(items: Sequence[Preference], most: int) -> int:
    """Return the tokens of the longest row: two answers with their prompts for a pair."""
    return 2 * most if items[0].is_pair else most


def _with_reference(
    config: PreferConfig,
    data: Sequence[list[Preference]],
    model: LoadedModel,
    learner: Learner,
    layout: Layout,
    watchdog: Watchdog,
) -> tuple[Callable[..., Any] | None, Sequence[list[Preference]]]:
    """Return what compares policy and reference in each step, if it is asked for; and the rows.

    The rows have the reference's log-probs then.
    """
    names = learner.objective.asks_for()
    asked = names & OF_REFERENCE
    if not asked and "kl_baseline" not in names:
        return None, data
    brings = asked <= set(data[0][0].columns) and "kl_baseline" not in names
    if brings and (not data[1] or asked <= set(data[1][0].columns)):
        log.info("the rows bring the reference's log-probs along")
        return None, data
    shape, mesh = learner.shape, learner.mesh
    policy = logprob_pass(learner.model, shape, mesh, ("logprobs",), frozen=model.frozen)
    infer, params = open_pair_reference(config, model, policy, learner, layout)
    size = config.batch.pairs_per_step
    width = width_of(data[0], config.data.max_tokens)
    with activity("log-probs under the reference", total=sum(map(len, data))) as progress:

        def tell(done: int) -> None:
            progress.advance(done)
            watchdog.beat()

        data = [annotate(items, infer, params, width=width, size=size, tell=tell) for items in data]

    def compare(current: Params, rotated: Batch) -> tuple[np.ndarray, np.ndarray]:
        sums = answer_sums(policy, current, rotated), answer_sums(infer, params, rotated)
        return sums[0]["logps"], sums[1]["logps"]

    return (compare if "kl_baseline" in names else None), data


def _named(prefix: str, metrics: dict[str, Any]) -> dict[str, float]:
    """Return an update's metrics by the names that the log has."""
    names = {"pg_loss": "loss"}
    return {
        f"{prefix}/{names.get(name, name)}": float(value)
        for name, value in metrics.items()
        if name not in ("loss", "skipped")
    }
