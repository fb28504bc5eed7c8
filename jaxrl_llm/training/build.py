"""From a config to the stages that the loop runs, and the step where it starts."""

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_llm.compilation import compiling_on_demand
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import RolloutSizes
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.data.dataset import Prompt, tokenize_prompts
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.data.rows import Row, load_rows, normalize_prompt_row
from jaxrl_llm.models.model import Model
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.compiling import reporting_compilation
from jaxrl_llm.rewards.scoring import check_reward_rows
from jaxrl_llm.rollout.agent_rows import check_agent_rows
from jaxrl_llm.rollout.build import make_engine
from jaxrl_llm.rollout.multi_turn import EpisodeSampler, open_episode_sampler
from jaxrl_llm.runs.resume import ResumedRun, resume_run
from jaxrl_llm.runs.together import check_same_data
from jaxrl_llm.runs.watchdog import Watchdog
from jaxrl_llm.training.bind import AlgorithmFunctions, check_schedules
from jaxrl_llm.training.buffer import Window, open_schedule
from jaxrl_llm.training.layouts import Layouts, open_layouts, overlaps_training
from jaxrl_llm.training.load_model import open_model
from jaxrl_llm.training.loop import Coefs, Progress, Stages
from jaxrl_llm.training.precompile import compile_first_step
from jaxrl_llm.training.prompted_teacher import with_teachers
from jaxrl_llm.training.stages.algorithm import build_algorithm
from jaxrl_llm.training.stages.models import build_models
from jaxrl_llm.training.stages.rollout import PolicyTokens, RolloutStage, build_rollout
from jaxrl_llm.training.stages.run import build_run, make_validation
from jaxrl_llm.training.stages.scoring import ScoringStage, build_scoring, open_scoring_model
from jaxrl_llm.training.teachers import (
    check_teacher_sources,
    held_params,
    open_teachers,
    run_in_update,
    teacher_passes,
)
from jaxrl_llm.training.update import Learner
from jaxrl_llm.training.visuals import check_room, room_for_images, row_visuals

log = logging.getLogger(__name__)


def build_stages(
    config: TrainConfig,
    functions: AlgorithmFunctions,
    folder: Path,
    stack: contextlib.ExitStack,
    watchdog: Watchdog,
) -> tuple[Stages, Progress, Window]:
    """Build every stage of a run; return them with where it stands, and its window of prompts.

    Args:
        config: of the run.
        functions: that it names.
        folder: of the run.
        stack: closes at the run's end what is opened here.
        watchdog: ends the run when it hangs.
    """
    stack.enter_context(reporting_compilation())
    stack.enter_context(compiling_on_demand())
    log.info("loading %s", config.model.path)
    layouts = open_training_layouts(config)
    overlaps = overlaps_training(config, layouts)
    rows = read_checked_rows(config)
    model = open_model(config.model, layouts.train, seed=config.seed)
    model = model.for_length(check_longest_sequence(config, model.model))
    engine = make_engine(config, model.model, layouts.rollout, folder)
    stack.callback(engine.close)
    tokenizer, _ = tokens = load_policy_tokens(config.model.path, model.model.vocab_size)
    teachers = open_teachers(config, functions, tokens, model.model, layouts.teacher, stack)
    teacher = run_in_update(teachers)
    models, trainable, beside = build_models(config, functions, model, layouts, teacher)
    compile_first_step(config, functions, model.model, models, layouts)
    models = with_teachers(models, teacher_passes(teachers), config, functions, tokenizer)
    room = config.data.chat_template_kwargs, config.data.max_prompt_tokens
    learner = models.roles[-1].learner
    visual_tokens = room_for_images(learner.model.visuals, learner.shape)
    shown = row_visuals(config.model, config.data).processor, visual_tokens
    episodes = open_episode_sampler(config.rollout, tokens, rows[0], *room, stack, *shown)
    prompts, validation_prompts = tokenize_rows(config, rows, tokenizer, model.model, episodes)
    check_schedules(config, functions, count_steps(config, prompts))
    executor = open_executor(1, "background", stack)

    rollout = build_rollout(
        config, model, layouts.train, engine, tokens, episodes, overlaps_training=overlaps
    )
    reward_model = open_scoring_model(config, tokenizer, model.model, layouts.reward_model)
    scoring = build_scoring(config, functions, reward_model, rollout, stack)
    algorithm = build_algorithm(config, functions)
    frozen = held_params(teachers)
    frozen |= {"reward.classifier": reward_model.params} if reward_model else {}
    parts = config, folder, trainable, prompts, stack
    opened = resume_run(*parts, best="validation", frozen=frozen, beside=beside)
    validate = make_validation(
        config, rollout, scoring.score_validation, validation_prompts, opened.display.line
    )
    shape = shape_for(learner, prompts, validation_prompts if episodes else ())
    run = build_run(config, opened, folder, executor, watchdog, shape, validate)
    run = dataclasses.replace(run, prompts=prompts, validation_prompts=validation_prompts)

    window = open_window(config, opened, rollout, scoring, prompts, folder, stack)
    return Stages(rollout, scoring, models, algorithm, run), progress_of(config, opened), window


def shape_for(
    learner: Learner, prompts: Sequence[Prompt], of_validation: Sequence[Prompt]
) -> RowShape:
    """Return the shape of an update's micro-batches, in which all prompts have room.

    Args:
        learner: of the update.
        prompts: of training.
        of_validation: those of validation's episodes, which are bounded alike.

    Raises:
        ConfigError: a prompt has more images than a row has room for.
    """
    rows = (
        (f"{key}: {prompt.load.where if prompt.load else prompt.index}", prompt.tokens)
        for key, own in (("data.train", prompts), ("data.validation", of_validation))
        for prompt in own
    )
    check_room(rows, learner.model.visuals, learner.shape)
    return learner.shape


def progress_of(config: TrainConfig, opened: ResumedRun) -> Progress:
    """Return where a run stands: at its beginning, or as its newest checkpoint has it."""
    coefs, empty = Coefs.of(config.algorithm), opened.extra.get("empty_steps", 0)
    return Progress(opened.step, opened.states, coefs.restored(opened.extra), empty)


def count_steps(config: TrainConfig, prompts: Sequence[Prompt]) -> int:
    """Return the steps of a run, all together."""
    return config.steps or len(prompts) * config.epochs // config.batch.prompts_per_step


def load_policy_tokens(path: str, vocab_size: int) -> PolicyTokens:
    """Load a policy's tokenizer, and what ends its answers."""
    with config_errors_at("model.path"):
        tokenizer = load_tokenizer(path)
        return PolicyTokens(tokenizer, stop_ids(tokenizer, path, vocab_size=vocab_size))


def open_window(
    config: TrainConfig,
    opened: ResumedRun,
    rollout: RolloutStage,
    scoring: ScoringStage,
    prompts: list[Prompt],
    folder: Path,
    stack: contextlib.ExitStack,
) -> Window:
    """Return the window of a run, where its newest checkpoint left it.

    Raises:
        ConfigError: the schedule to replay can't be read.
    """
    executor = open_executor(2, "rollout", stack)
    window = Window(
        config=config,
        total_steps=opened.total_steps,
        rollout=rollout,
        scoring=scoring,
        prompt_batches=opened.stream,
        prompts=prompts,
        schedule=open_schedule(config.rollout, folder, opened.step),
        executor=executor,
    )
    if opened.extra:
        window.set_state(opened.extra["window"])
    return window


def open_executor(threads: int, name: str, stack: contextlib.ExitStack) -> ThreadPoolExecutor:
    """Return threads that end with a run."""
    executor = ThreadPoolExecutor(threads, name)
    stack.callback(executor.shutdown, wait=False, cancel_futures=True)
    return executor


@activity("opening the devices")
def open_training_layouts(config: TrainConfig) -> Layouts:
    """Lay out the devices of the training processes; engines may have nodes of their own."""
    mesh = config.mesh
    if config.rollout.nodes:  # mesh.rollout is of the engines' devices, not of these
        mesh = dataclasses.replace(mesh, rollout=RolloutSizes())
    return open_layouts(mesh, has_own_axes=config.model.function is not None)


def check_longest_sequence(config: TrainConfig, model: Model) -> int:
    """Return the tokens of the longest sequence; refuse a model that can't hold it."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
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
        check_same_data(key, (prompt.tokens for prompt in prompts))
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
            *(per_step, len(train), per_step / len(train)),
        )
    return train, validation[: config.validation.rows]
