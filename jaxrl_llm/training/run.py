"""A training run of this process, and the others that the environment tells of."""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import SftConfig, TrainConfig, processes_can_train
from jaxrl_llm.config.sections import RolloutSizes
from jaxrl_llm.data.chat import load_policy_tokens
from jaxrl_llm.data.dataset import Prompt, PromptLike, as_prompts, tokenize_prompts
from jaxrl_llm.data.rows import Row, load_rows, normalize_prompt_row
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.models.model import Model
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.display import Display, open_display
from jaxrl_llm.monitoring.tables import AnswerTable
from jaxrl_llm.rewards.scoring import check_reward_rows
from jaxrl_llm.rollout.agents.sampler import EpisodeSampler, open_episode_sampler
from jaxrl_llm.rollout.agents.verl_agent import check_agent_rows
from jaxrl_llm.rollout.build import make_engine
from jaxrl_llm.rollout.engine import SamplingParams
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.runs import directory
from jaxrl_llm.runs.directory import build_once, digest, prepare_files
from jaxrl_llm.runs.preemption import interrupted_between_steps
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training import loop
from jaxrl_llm.training.bind import (
    AlgorithmFunctions,
    check_inputs,
    check_schedules,
    resolve_functions,
)
from jaxrl_llm.training.buffer import Buffer, PolicyWeights, Sampler, Scorer, open_schedule
from jaxrl_llm.training.compile import compiling_ahead
from jaxrl_llm.training.dumps import answer_rows, print_before_and_after
from jaxrl_llm.training.forward import check_room, room_for_images, row_visuals
from jaxrl_llm.training.load_model import Layouts, open_layouts, open_model, overlaps_training
from jaxrl_llm.training.offline import run_sft
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.reward_model import open_reward_model
from jaxrl_llm.training.roles import compile_first_step, open_models
from jaxrl_llm.training.run_files import RunFiles, closing_lines
from jaxrl_llm.training.teachers import check_teacher_sources, open_teachers
from jaxrl_llm.training.trainer import FinishedStep, RLTrainer
from jaxrl_llm.training.update import Learner

log = logging.getLogger(__name__)

CLOSED = "the run is closed: open_run opens it again"
UNFINISHED = (
    "step {} did not come to its end: open the run again, it continues from its newest checkpoint"
)


class Run(RunFiles):
    """A run that is open: it holds its folder and the devices, and trains a step at a time.

    Iterating over it takes the steps that are left, each when it is asked for. Ctrl-C lets the step
    end that is being taken; a later loop goes on after it, with the same result. It is closed by
    `close`, or at the end of a `with`; it goes on from its newest checkpoint when it is opened
    again.

    Attributes:
        last: the newest step; None before the first one that was taken here.
    """

    def __init__(self, folder: Path, trainer: RLTrainer, stack: contextlib.ExitStack) -> None:
        """Take over what is open; see `open_run`."""
        super().__init__(folder)
        self._trainer, self._stack = trainer, stack
        self._steps = loop.run_steps(trainer)
        stack.callback(trainer.close)
        self._unusable: str | None = None
        self.last: FinishedStep | None = None
        self._watchdog.rest()

    @property
    def config(self) -> TrainConfig:
        """The config, with the functions that were given from Python."""
        return self._trainer.config

    @property
    def number(self) -> int:
        """How many steps are done, those before the run was opened included."""
        return self._trainer.number

    @property
    def total_steps(self) -> int:
        """How many steps the run has in all."""
        return self._trainer.files.total_steps

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that the run trains on."""
        return list(self._trainer.buffer.prompts)

    @property
    def validation_prompts(self) -> list[Prompt]:
        """The prompts that it validates on."""
        return list(self._trainer.validation_prompts)

    @property
    def policy(self) -> Policy:
        """The policy as it is now. The next step writes over its weights.

        Of a run that is closed it is that of the newest checkpoint.
        """
        if self._unusable == CLOSED:
            return super().policy
        self._check_usable()
        return self._trainer.policy()

    @property
    def kl_coef(self) -> float:
        """The coefficient of the KL term from the next step on; it may be set."""
        return self._trainer.coefs["kl_coef"]

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        algorithm = self.config.algorithm
        self._set_coef("kl_coef", value, algorithm.kl_loss or algorithm.kl_reward, "kl_loss")

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus from the next step on; it may be set."""
        return self._trainer.coefs["entropy_coef"]

    @entropy_coef.setter
    def entropy_coef(self, value: float) -> None:
        self._set_coef("entropy_coef", value, self.config.algorithm.entropy_coef, "entropy_coef")

    def __iter__(self) -> Iterator[FinishedStep]:
        """Take the steps that are left."""
        try:
            while self.number < self.total_steps and not self._trainer.has_ended:
                yield self.step()
        finally:  # of the loop, also where it is left before the last step
            self._trainer.files.display.flush()

    def step(self) -> FinishedStep:
        """Take the next step. A run that was preempted saves it, within checkpoint.grace_s.

        Raises:
            RunError: it failed, the run is closed, or all its steps are done.
            KeyboardInterrupt: Ctrl-C was pressed; the step is `last` then, and the run can go on.
        """
        if self._unusable is None and self.number >= self.total_steps:
            raise RunError(f"all {self.total_steps} steps are done: give the run more (steps)")
        self._check_usable()
        self._unusable = UNFINISHED.format(self.number + 1)
        try:
            with interrupted_between_steps():
                next(self._steps)
                self.last, self._unusable = self._trainer.finished, None
        finally:
            self._watchdog.rest()
        return self.last

    def sample(
        self, prompts: Sequence[PromptLike], *, n: int = 1, seed: int = 0, **sampling: Any
    ) -> Rollouts:
        """Draw n answers to each prompt from the policy as it is now; no step depends on them.

        They are episodes with the run's agent, tools and environment, where it has such.

        Args:
            prompts: some of `prompts` or `validation_prompts`; texts or chats, which are put into
                the chat template; or token ids.
            n: answers to each.
            seed: the same weights and seed give the same answers.
            **sampling: `max_new_tokens`, `temperature`, `top_p` and `top_k`, where they are not the
                config's.

        Raises:
            EngineError: a prompt and its answer don't fit.
            RunError: the run is closed, or a step has failed.
        """
        self._check_usable()
        rollout, policy, sampler = self.config.rollout, self.policy, self._trainer.sampler
        names = ("max_new_tokens", "temperature", "top_p", "top_k")
        settings = {name: getattr(rollout, name) for name in names} | sampling
        variables = self.config.data.chat_template_kwargs
        chats = as_prompts(
            prompts, policy.tokenizer, vocab_size=policy.model.vocab_size, **variables
        )
        if sampler.episodes is not None:
            chats = [sampler.episodes.with_tools_in_prompt(chat) for chat in chats]
        with sampler.awake():
            if sampler.episodes is None:
                return policy.sample(sampler.engine, chats, n=n, seed=seed, **settings)
            params = SamplingParams(**settings, stop_ids=policy.stops)
            return sampler.episodes.sample(sampler.engine, chats, params, samples=n, seed=(seed,))

    def score(self, rollouts: Rollouts) -> AnswerTable:
        """Return answers with the scores that the run's reward function gives them."""
        self._check_usable()
        scores = self._trainer.scorer.score_validation(rollouts)
        decode = text_decoder(self._trainer.sampler.tokens.tokenizer, skip_special_tokens=False)
        return AnswerTable(answer_rows(rollouts, scores), decode)

    def save(self) -> int:
        """Write a checkpoint where the run stands, and return its step once it is on disk.

        Raises:
            RunError: it could not be written, or the run has taken no step yet.
        """
        self._check_usable()
        if self.number not in self.checkpoints:
            if self.last is None:
                raise RunError("there is nothing to save: expected a step to be taken first")
            loop.save(self._trainer, self.last.metrics)
        self._trainer.files.checkpoints.wait()
        return self.number

    def finish(self) -> None:
        """Take all steps that are left, and print what the run has learned. Ctrl-C ends it at once.

        Raises:
            RunError: it failed; `Preempted` if it was preempted and has saved.
        """
        self._check_usable()
        self._unusable = UNFINISHED.format(self.number + 1)
        loop.train_to_the_end(self._trainer, self._remembered())
        self._unusable = None
        if distributed.is_first():
            display = self._trainer.files.display
            print_before_and_after(self.metrics, display)
            print_closing(self.config, display)

    def _remembered(self) -> Iterator[int]:
        """Take the steps that are left, each of which is `last` then."""
        for number in self._steps:
            self.last = self._trainer.finished
            yield number

    def close(self) -> None:
        """Wait for the last checkpoint, and let go of the folder and the devices."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "Run":
        """Return the run."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the run, as `close`."""
        self._unusable, opened = CLOSED, self._stack.pop_all()
        self._watchdog.beat()
        with activity("ending the run"):
            opened.__exit__(kind, error, traceback)

    @property
    def _watchdog(self) -> Any:
        return self._trainer.files.watchdog

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise RunError(self._unusable)

    def _set_coef(self, name: str, value: float, is_used: Any, key: str) -> None:
        if not is_used:
            raise ConfigError(
                f"algorithm.{key} is {getattr(self.config.algorithm, key)}, so there is no such "
                f"term for {name}={value}: open the run with one"
            )
        if not math.isfinite(value):
            raise ConfigError(f"{name}: got {value}, expected a finite number")
        log.info("%s=%g from step %d on, set by hand", name, value, self.number + 1)
        self._trainer.coefs[name] = float(value)


def open_run(config: TrainConfig) -> Run:
    """Open a run where it stands: make it, or continue the one in its folder.

    Raises:
        ConfigError: it can't be run.
        RunError: it failed.
    """
    if config.cluster is not None:
        raise ConfigError("cluster is set: a run on a cluster is run to its end, by `train`")
    with contextlib.ExitStack() as stack:  # on an error, closes what was opened
        return _build(config, *_claim(config, stack), stack)


def run_training(config: TrainConfig) -> None:
    """Open a run, run it to its end and print what it has learned."""
    with contextlib.ExitStack() as stack:
        functions, record = _claim(config, stack)
        if _is_finished(config, Path(config.run_dir)):
            return
        with _build(config, functions, record, stack) as run, directory.ending_together():
            run.finish()


def _claim(
    config: TrainConfig, stack: contextlib.ExitStack
) -> tuple[AlgorithmFunctions, Callable[[], None]]:
    """Check what needs no model, and hold the run's folder.

    Returns:
        The functions of the config, and what writes the run's record into its folder.
    """
    loop.enter_process(config, stack, processes_can_train)
    with activity("checking the config"):
        functions = resolve_functions(config)  # wrong names fail before anything is loaded
        check_inputs(config, functions)
    return functions, stack.enter_context(directory.run_folder(config.run_dir, config))


def _build(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    record: Callable[[], None],
    stack: contextlib.ExitStack,
) -> Run:
    """Make what the run needs, and build it where it stands; it takes over the stack."""
    prepare_files(config.data.prepare, (*config.data.train, *config.data.validation))
    warm_start(config)
    stack.enter_context(directory.ending_together())
    stack.enter_context(job_context.reporting_failure())
    folder = Path(config.run_dir)
    with compiling_ahead(config, folder) as wait:
        trainer = open_trainer(config, functions, folder, stack)
        wait()
    record()
    trainer.files.compiled.metrics()  # what was compiled until here is none of a step's
    trainer.sync(trainer.number)
    loop.validate_before(trainer)
    return Run(folder, trainer, stack.pop_all())


def open_trainer(
    config: TrainConfig, functions: AlgorithmFunctions, folder: Path, stack: contextlib.ExitStack
) -> RLTrainer:
    """Load the models and the data of a run, start its engine, and return what trains it.

    Args:
        config: of the run.
        functions: that it names.
        folder: of the run.
        stack: closes at the run's end what is opened here.
    """
    loop.compile_on_demand(stack)
    watchdog = stack.enter_context(loop.open_watchdog(config))
    log.info("loading %s", config.model.path)
    layouts = open_training_layouts(config)
    rows = read_checked_rows(config)
    model = open_model(config.model, layouts.train, seed=config.seed)
    model = model.for_length(check_longest_sequence(config, model.model))
    engine = make_engine(config, model.model, layouts.rollout, folder)
    stack.callback(engine.close)
    with config_errors_at("model.path"):
        tokens = load_policy_tokens(config.model.path, vocab_size=model.model.vocab_size)
    teachers = open_teachers(config, functions, tokens, model.model, layouts.teacher, stack)
    models, trainable, extra_states = open_models(
        config, functions, model, layouts, teachers, tokens.tokenizer
    )
    compile_first_step(config, functions, model.model, models, layouts)
    learner = models.actor.learner
    episodes = open_episode_sampler(
        config.rollout,
        tokens,
        rows=rows[0],
        template_kwargs=config.data.chat_template_kwargs,
        prompt_tokens=config.data.max_prompt_tokens,
        stack=stack,
        processor=row_visuals(config.model, config.data).processor,
        visual_tokens=room_for_images(learner.model.visuals, learner.shape),
    )
    prompts, validation_prompts = tokenize_rows(
        config, rows, tokens.tokenizer, model.model, episodes
    )
    per_step = config.batch.prompts_per_step
    check_schedules(config, functions, loop.count_steps(config, len(prompts), per_step))
    frozen, by_model = {} if teachers is None else teachers.held_params, None
    if path := config.reward.classifier:
        frozen["reward.classifier"], by_model = open_reward_model(
            config, path, tokens.tokenizer, actor=model.model, layout=layouts.reward_model
        )
    scorer = Scorer(config, functions, by_model, stack)
    files, saved = loop.open_files(
        config,
        models=trainable,
        items=prompts,
        watchdog=watchdog,
        stack=stack,
        best="validation",
        frozen=frozen,
        extra_states=extra_states,
    )
    check_images(learner, prompts, validation_prompts if episodes else ())
    sampler = Sampler(
        config.rollout,
        engine,
        tokens,
        weights=PolicyWeights(config.rollout, model, layouts.train, config.model.dtype),
        seed=config.seed,
        folder=folder,
        episodes=episodes,
        overlaps_training=overlaps_training(config.rollout, layouts),
    )
    buffer = Buffer(
        config=config,
        total_steps=files.total_steps,
        sampler=sampler,
        scorer=scorer,
        prompt_batches=files.stream,
        prompts=prompts,
        schedule=open_schedule(config.rollout, folder, saved.step),
        executor=loop.open_executor(2, "rollout", stack),
    )
    return RLTrainer(
        config,
        functions,
        (files, saved),
        models=models,
        sampler=sampler,
        scorer=scorer,
        buffer=buffer,
        validation_prompts=validation_prompts,
    )


def check_images(
    learner: Learner, prompts: Sequence[Prompt], of_validation: Sequence[Prompt]
) -> None:
    """Raise ConfigError where a prompt has more images than a row of an update has room for.

    Args:
        learner: of the update.
        prompts: of training.
        of_validation: those of validation's episodes, which are bounded alike.
    """
    rows = (
        (f"{key}: {prompt.load.where if prompt.load else prompt.index}", prompt.tokens)
        for key, own in (("data.train", prompts), ("data.validation", of_validation))
        for prompt in own
    )
    check_room(rows, learner.model.visuals, learner.shape)


@activity("opening the devices")
def open_training_layouts(config: TrainConfig) -> Layouts:
    """Lay out the devices of the training processes; engines may have nodes of their own."""
    mesh = config.mesh
    if config.rollout.nodes:  # mesh.rollout is of the engines' devices, not of these
        mesh = dataclasses.replace(mesh, rollout=RolloutSizes())
    return open_layouts(mesh, has_own_axes=config.model.function is not None)


def check_longest_sequence(config: TrainConfig, model: Model) -> int:
    """Return the tokens of the longest sequence; refuse a model that can't hold it."""
    longest = config.longest_sequence
    if model.max_positions is not None and longest > model.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}, but the model has "
            f"{model.max_positions} positions (max_position_embeddings)"
        )
    return longest


@activity("reading the data")
def read_checked_rows(config: TrainConfig) -> tuple[Sequence[Row], Sequence[Row]]:
    """Read the rows to train and to validate on, and check that they can be scored."""
    data = config.data

    def read(paths: Sequence[str], key: str) -> Sequence[Row]:
        with config_errors_at(key):
            rows = load_rows(data.dataset, paths, normalize=normalize_prompt_row)
        check_agent_rows(config.rollout, rows, key)
        check_reward_rows(config.reward.function, rows, key)
        return rows

    train = read(data.train, "data.train")
    validation = read(data.validation, "data.validation") if data.validation else []
    check_teacher_sources(config, (row["data_source"] for row in train))
    return train, validation


@activity("tokenizing the prompts")
def tokenize_rows(
    config: TrainConfig,
    rows: tuple[Sequence[Row], Sequence[Row]],
    tokenizer: Any,
    model: Model,
    episodes: EpisodeSampler | None = None,
) -> tuple[list[Prompt], list[Prompt]]:
    """Tokenise the prompts to train and to validate on.

    Args:
        config: of the run.
        rows: to train and to validate on.
        tokenizer: the policy's.
        model: the policy.
        episodes: whose prompts tell of tools; None: the chat template alone is applied.
    """
    data, visuals = config.data, row_visuals(config.model, config.data)

    def tokenized(rows: Sequence[Row], key: str) -> list[Prompt]:
        with config_errors_at(key):
            prompts, _ = tokenize_prompts(
                rows,
                tokenizer,
                max_prompt_tokens=data.max_prompt_tokens,
                filter_overlong=data.filter_overlong,
                template_kwargs=data.chat_template_kwargs,
                encode=episodes and episodes.opening,
                visuals=visuals,
                vocab_size=model.vocab_size,
            )
        directory.check_same_data(key, (prompt.tokens for prompt in prompts))
        return prompts

    train = tokenized(rows[0], "data.train")
    validation = tokenized(rows[1], "data.validation") if rows[1] else []
    per_step = config.batch.prompts_per_step
    if not config.steps and len(train) * config.epochs < per_step:
        raise ConfigError(
            f"batch.prompts_per_step={per_step}, but data.train has only {len(train)} prompts for "
            f"{config.epochs} epochs: lower it, or set steps"
        )
    if len(train) < per_step:
        log.warning(
            "batch.prompts_per_step=%d, but data.train has only %d prompts: each comes %.3g times "
            "in a step; lower it, or add data",
            per_step,
            len(train),
            per_step / len(train),
        )
    return train, validation[: config.validation.rows]


def _is_finished(config: TrainConfig, folder: Path) -> bool:
    """Tell whether a run has no step left to take, and print then what it has learned."""
    done = distributed.run_on_first(lambda: max(RunFiles(folder).checkpoints, default=0))
    if config.steps is None or done < config.steps or config.checkpoint.resume == "never":
        return False
    display = open_display("training", config.steps, config.steps)
    display.line(
        f"nothing to do: the run in {str(folder)!r} has taken {done} steps, and steps="
        f"{config.steps}; more steps continue it"
    )
    if distributed.is_first():
        print_before_and_after(RunFiles(folder).metrics, display)
        print_closing(config, display)
    display.close()
    return True


def print_closing(config: TrainConfig, display: Display) -> None:
    """Print where a run is, and what to do next."""
    for line in closing_lines(config):
        display.line(line)


def warm_start(config: TrainConfig) -> None:
    """Make the base model by supervised training where there is none yet.

    The rows to train on are read first: what is wrong with them should not wait for it.
    """
    if config.model.warm_start is None:
        return
    path = Path(config.model.path)
    with _errors_of_warm_start():
        sft = load(SftConfig, config.model.warm_start)
    if not path.exists():
        read_checked_rows(config)
    sft = dataclasses.replace(sft, export_to=str(path), run_dir=f"{path}.sft")
    if config.model.function is not None:
        own = dataclasses.replace(sft.model, function=config.model.function)
        mesh = dataclasses.replace(sft.mesh, rules=config.mesh.rules)
        sft = dataclasses.replace(sft, model=own, mesh=mesh)
    recipe = directory.recipe_of(sft)
    text = json.dumps(recipe, sort_keys=True)  # another one has checkpoints of its own
    sft = dataclasses.replace(sft, run_dir=f"{path}.sft_{digest(text)[:8]}")
    with _errors_of_warm_start(), activity("making the base model"):
        build_once(path, recipe, lambda: run_sft(sft, hints=False))


@contextlib.contextmanager
def _errors_of_warm_start() -> Iterator[None]:
    """Say of which config an error is, as the run has keys of the same names."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"model.warm_start: {line}" for line in error.args)) from error
