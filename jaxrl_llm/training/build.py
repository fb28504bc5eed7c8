"""From a config to everything that the loop calls."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError, Preempted, config_errors_at
from jaxrl_llm.config.fields import describe
from jaxrl_llm.config.files import load
from jaxrl_llm.config.load import to_yaml
from jaxrl_llm.config.sections.mesh import RolloutSizes
from jaxrl_llm.config.sft import SftConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.data.balance import imbalance
from jaxrl_llm.data.bin_packing import padding, plan_microbatches
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.data.dataset import Prompt, tokenize_prompts
from jaxrl_llm.data.generated import build_once, digest, prepare_files
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.data.rows import check_prompt_row, load_rows
from jaxrl_llm.evaluation.validation import validation_metrics
from jaxrl_llm.models.lora import combine_params, merge_adapter, without_adapter
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.logs import quiet_libraries
from jaxrl_llm.monitoring.report import RolloutDumps, print_before_and_after
from jaxrl_llm.rewards.scoring import Scoring, check_sources, make_scoring
from jaxrl_llm.rollout.build import make_engine
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Rollouts, sample
from jaxrl_llm.rollout.types import SamplingParams
from jaxrl_llm.runs.directory import run_folder
from jaxrl_llm.runs.resume import check_finished, open_run, open_watchdog
from jaxrl_llm.runs.watchdog import Watchdog
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.cast import cast_tree
from jaxrl_llm.sharding.checksum import checksum
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import on_device, to_host
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.training.experience import (
    ScoreError,
    advantage_step,
    correction_step,
    lay_out,
    per_answer,
    with_scores,
)
from jaxrl_llm.training.inference import logprob_pass
from jaxrl_llm.training.layouts import Layouts, open_layouts, packed_shape
from jaxrl_llm.training.load_model import LoadedModel, forward_config, open_model
from jaxrl_llm.training.loop import Job, Progress, minibatch_size, run
from jaxrl_llm.training.precompile import compiling_ahead
from jaxrl_llm.training.resolve import Functions
from jaxrl_llm.training.reward_model import open_reward_model
from jaxrl_llm.training.roles import Role, make_roles, old_logprob_step
from jaxrl_llm.training.supervised import run_sft
from jaxrl_llm.types import Batch

TRAINING, VALIDATION, GREEDY = range(3)
"""What a seed of sampling is for."""


def run_job(config: TrainConfig) -> Progress:
    """Build a run, run it to its end and print what it has learned."""
    quiet_libraries()
    functions = Functions(config)  # wrong names fail before anything is loaded
    prepare_files(config.data.prepare, (*config.data.train, *config.data.validation))
    warm_start(config)
    with (
        contextlib.ExitStack() as stack,
        distributed.abort_together((Preempted,)),
        context.reporting_failure(),
    ):
        watchdog = stack.enter_context(open_watchdog(config))
        folder = stack.enter_context(run_folder(config.run_dir, config))
        with compiling_ahead(config, folder) as wait:
            job, start, prompt_batches = build(config, functions, folder, stack, watchdog)
            wait()
        done = run(job, start, prompt_batches)
        check_finished(done.step, job.total_steps)
        if distributed.is_first():
            print_before_and_after(folder, job.display)
    return done


def warm_start(config: TrainConfig) -> None:
    """Make the base model by supervised training where there is none yet."""
    if config.model.warm_start is None:
        return
    path = Path(config.model.path)
    try:
        sft = load(SftConfig, config.model.warm_start)
    except ConfigError as error:
        raise ConfigError(f"model.warm_start: {error}") from error
    sft = dataclasses.replace(sft, export_to=str(path), run_dir=f"{path}.sft")
    recipe = to_yaml(sft)
    # another recipe must not continue this one's checkpoints
    sft = dataclasses.replace(sft, run_dir=f"{path}.sft_{digest(recipe)[:8]}")
    build_once(path, recipe, lambda: run_sft(sft))


def build(
    config: TrainConfig,
    functions: Functions,
    folder: Path,
    stack: contextlib.ExitStack,
    watchdog: Watchdog,
) -> tuple[Job, Progress, Any]:
    """Build everything that the loop calls, and find out where it starts."""
    mesh = config.mesh
    if config.rollout.nodes:  # mesh.rollout is of the engines' devices, not of these
        mesh = dataclasses.replace(mesh, rollout=RolloutSizes())
    layouts = open_layouts(mesh)
    model = open_model(config.model, layouts.train, seed=config.seed)
    with config_errors_at("model.path"):
        tokenizer = load_tokenizer(config.model.path)
        stops = stop_ids(tokenizer, config.model.path)
    check_model(config, model)
    train, validation = read_prompts(config, tokenizer)
    shape_on = functools.partial(microbatch_shape, config, model.spec)
    roles, trainees = make_roles(config, functions, model, layouts, shape_on)
    engine = make_engine(config, model.spec, layouts.rollout, folder)
    stack.callback(engine.close)
    draw = make_sampler(engine, functools.partial(tokenizer.decode, skip_special_tokens=True))
    reward_model = (
        open_reward_model(
            config.reward.classifier,
            config.model.dtype,
            tokenizer,
            model.spec,
            layouts.reward_model,
            shape_on(layouts.reward_model),
        )
        if config.reward.classifier
        else None
    )
    score, score_validation = make_scoring(
        config.reward, reward_model.score if reward_model else None, stack
    )
    arrange = functools.partial(
        lay_out,
        samples=config.rollout.samples_per_prompt,
        max_tokens=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
    )
    add_scores = functools.partial(with_scores, components=config.reward.components)
    penalty = functions.penalty and per_answer(functions.penalty, "algorithm.penalty", np.floating)
    keep = functions.keep and per_answer(functions.keep, "algorithm.group_filter", np.bool_)
    given = {"reward.classifier": reward_model.params} if reward_model else None
    opened = open_run(config, folder, trainees, train, stack, best="validation", frozen=given)
    aside = ThreadPoolExecutor(1, "aside")
    stack.callback(aside.shutdown, wait=False, cancel_futures=True)
    job = Job(
        config=config,
        engine=engine,
        whole=whole_model(model, config.model.dtype),
        checksum=as_held(model, config.model.dtype),
        sample=training_sampler(config, draw, stops),
        score=score,
        aside=aside,
        # elsewhere than on the devices, and not together with other processes
        scored_aside=reward_model is None
        and config.reward.workers > 0
        and distributed.process_count() == 1,
        lay_out=arrange,
        add_scores=add_scores,
        keep=keep and whole_groups(keep, config.rollout.samples_per_prompt),
        penalty=penalty,
        greedy_scores=make_greedy(
            config,
            draw,
            stops,
            score,
            lambda rollouts, scores, **how: add_scores(arrange(rollouts, **how), scores),
            penalty,
        )
        if "greedy_scores" in functions.needs
        else None,
        old_logprobs=None
        if functions.on_policy
        else old_logprob_step(
            roles["actor"].infer,
            bypass=config.algorithm.use_rollout_logprobs,
            probe_tokens=config.batch.max_tokens_per_device,
        ),
        advantage=advantage_step(functions.advantage, with_returns="critic" in roles),
        correct=correction_step(functions.corrections) if functions.corrections else None,
        kl=functions.kl,
        kl_reward=config.algorithm.kl_reward is not None,
        next_kl_coef=checked_controller(functions.controller),
        reference=make_reference(config, model, layouts, roles["actor"], shape_on)
        if functions.needs_reference
        else None,
        actor=roles["actor"],
        critic=roles.get("critic"),
        reward_model=roles.get("implicit_reward_model"),
        balance=functools.partial(
            imbalance_of, shape=shape_on(layouts.train), minibatch=minibatch_size(config)
        ),
        validate=make_validator(config, draw, stops, score_validation, validation),
        dump=RolloutDumps(folder / "rollouts"),
        total_steps=opened.total_steps,
        origin=opened.start_digests,
        checkpoints=opened.checkpoints,
        log=opened.log,
        display=opened.display,
        preemption=opened.preemption,
        watchdog=watchdog,
    )
    kl_coef = opened.extra.get("kl_coef", config.algorithm.kl_coef)
    return job, Progress(opened.step, opened.states, kl_coef), opened.stream


def microbatch_shape(config: TrainConfig, spec: ModelSpec, layout: Layout) -> RowShape:
    """Return the shape of the micro-batches of a run's updates and passes in one layout."""
    return packed_shape(
        layout,
        spec,
        tokens=config.batch.max_tokens_per_device,
        longest=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        sequences=minibatch_size(config),
    )


def imbalance_of(batch: Batch, *, shape: RowShape, minibatch: int) -> dict[str, float]:
    """Return how evenly the updates of a batch load the devices, and how much of them is padding.

    Args:
        batch: of a step.
        shape: of the micro-batches.
        minibatch: sequences in an update.
    """
    batches, sizes = [], batch.sizes
    for first in range(0, len(sizes), minibatch):
        found = plan_microbatches(sizes[first : first + minibatch], shape)
        batches += [[[first + i for i in row] for row in rows] for rows in found]
    found = imbalance(sizes, batches, shape.rows, shape.ranks, shape.cost)
    return found | {"perf/padding": padding(sizes, batches, shape)}


def make_sampler(engine: Engine, decode: Callable[[Any], str]) -> Callable[..., Rollouts]:
    """Return `sample` on an engine that holds its cache only while it samples."""

    def draw(prompts: list[Prompt], sampling: SamplingParams, **how: Any) -> Rollouts:
        engine.wake()
        try:
            return sample(engine, prompts, sampling, decode=decode, **how)
        finally:
            engine.sleep()

    return draw


def training_sampler(
    config: TrainConfig, draw: Callable[..., Rollouts], stops: tuple[int, ...]
) -> Callable[[list[Prompt], int, int], Rollouts]:
    """Return the function that samples a step's answers; a step may draw several times."""
    rollout = config.rollout
    sampling = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=stops,
    )

    def sample_step(prompts: list[Prompt], step: int, number: int) -> Rollouts:
        seed = (config.seed, step, TRAINING, number)
        return draw(prompts, sampling, samples=rollout.samples_per_prompt, seed=seed)

    return sample_step


def make_greedy(
    config: TrainConfig,
    draw: Callable[..., Rollouts],
    stops: tuple[int, ...],
    score: Scoring,
    lay_out: Callable[..., Batch],
    penalty: Callable[[Batch], np.ndarray] | None,
) -> Callable[[Rollouts, int], tuple[np.ndarray, int]]:
    """Return the function from a step's answers to the scores of its prompts' greedy answers.

    Args:
        config: of the run.
        draw: samples answers to prompts.
        stops: ids that end an answer.
        score: rollouts -> one score for each answer.
        lay_out: (rollouts, scores, samples=1) -> batch.
        penalty: batch -> what is added to the scores [B], if anything is.
    """
    samples = config.rollout.samples_per_prompt
    longest = config.rollout.max_new_tokens
    sampling = SamplingParams(max_new_tokens=longest, temperature=0.0, stop_ids=stops)

    def greedy_scores(rollouts: Rollouts, step: int) -> tuple[np.ndarray, int]:
        prompts = rollouts.prompts[::samples]
        greedy = draw(prompts, sampling, samples=1, seed=(config.seed, step, GREEDY))
        scores = score(greedy)
        batch = lay_out(greedy, scores, samples=1)
        added = penalty(batch) if penalty else np.float32(0)
        errors = sum(found.error is not None for found in scores)
        return np.repeat(batch["scores"] + added, samples), errors

    return greedy_scores


def whole_groups(
    keep: Callable[[Batch], np.ndarray], samples: int
) -> Callable[[Batch], np.ndarray]:
    """Return `keep`, checked to decide for groups of `samples` answers as wholes."""

    def checked(batch: Batch) -> np.ndarray:
        kept = keep(batch)
        groups = kept.reshape(-1, samples)
        split = np.flatnonzero(groups.any(1) != groups.all(1))
        if split.size:
            raise ScoreError(
                f"algorithm.group_filter kept {int(groups[split[0]].sum())} of the {samples} "
                "answers of a group; wanted all or none, as baselines are over whole groups"
            )
        return kept

    return checked


def make_validator(
    config: TrainConfig,
    draw: Callable[..., Rollouts],
    stops: tuple[int, ...],
    score: Scoring,
    prompts: list[Prompt],
) -> Callable[[int], dict[str, float]] | None:
    """Return the function that validates at a step, or None without validation prompts."""
    if not prompts:
        return None
    how = config.validation
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        stop_ids=stops,
    )

    def validate(step: int) -> dict[str, float]:
        rollouts = draw(
            prompts, sampling, samples=how.samples, seed=(config.seed, step, VALIDATION)
        )
        return validation_metrics(rollouts.prompts, score(rollouts), samples=how.samples)

    return validate


def checked_controller(controller: Callable[..., Any]) -> Callable[[float, float, int], float]:
    """Return the KL controller, with its result checked to be a coefficient."""

    def next_coef(coef: float, observed_kl: float, batch_size: int) -> float:
        found = controller(coef, observed_kl, batch_size)
        is_number = isinstance(found, int | float | jax.Array | np.number) and np.ndim(found) == 0
        if not is_number or not 0 <= float(found) < float("inf"):
            raise ScoreError(
                f"algorithm.kl_controller: {describe(controller)!r} returned {found!r} for "
                f"coef={coef:g} and observed_kl={observed_kl:g}; wanted a number of 0 or more"
            )
        return float(found)

    return next_coef


def check_model(config: TrainConfig, model: LoadedModel) -> None:
    """Refuse a model that can't hold the longest sequence."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > model.spec.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}, but the model has "
            f"{model.spec.max_positions} positions (max_position_embeddings)"
        )


def read_prompts(config: TrainConfig, tokenizer: Any) -> tuple[list[Prompt], list[Prompt]]:
    """Read and tokenise the prompts to train and to validate on."""
    data = config.data

    def read(paths: Sequence[str], key: str) -> list[Prompt]:
        with config_errors_at(key):
            rows = load_rows(data.dataset, paths, check=check_prompt_row)
            return tokenize_prompts(
                rows,
                tokenizer,
                max_prompt_tokens=data.max_prompt_tokens,
                filter_overlong=data.filter_overlong,
                template_kwargs=data.chat_template_kwargs,
            )[0]

    train = read(data.train, "data.train")
    validation = read(data.validation, "data.validation") if data.validation else []
    check_sources(config.reward.function, [*train, *validation])
    wanted = config.batch.prompts_per_step
    if not config.steps and len(train) * config.epochs < wanted:
        raise ConfigError(
            f"batch.prompts_per_step={wanted}, but data.train has only {len(train)} prompts for "
            f"{config.epochs} epochs: lower it, or set steps"
        )
    return train, validation[: config.validation.rows]


def whole_model(model: LoadedModel, dtype: str) -> Callable[[Any], Any]:
    """Return the function from trained parameters to those of the model, as the engine takes them.

    An adapter is merged into its base in float32, and the sum is cast to the engine's dtype.
    """
    if model.frozen is None:
        return lambda params: params
    spec, frozen = model.spec, model.frozen
    dtypes = compute_dtypes(without_adapter(spec), dtype)
    layout = jax.tree.map(lambda leaf: leaf.sharding, frozen)

    @functools.partial(jax.jit, out_shardings=layout)
    def merged(adapter: Any, frozen: Any) -> Any:
        return cast_tree(merge_adapter(combine_params(adapter, frozen), spec)[0], dtypes)

    return lambda adapter: merged(adapter, frozen)


def as_held(model: LoadedModel, dtype: str) -> Callable[[Any], Any]:
    """Return the checksum of a model's parameters after the engine's cast."""
    dtypes = compute_dtypes(without_adapter(model.spec), dtype)
    return jax.jit(lambda params: checksum(cast_tree(params, dtypes)))


def make_reference(
    config: TrainConfig,
    model: LoadedModel,
    layouts: Layouts,
    actor: Role,
    shape_on: Callable[[Layout], RowShape],
) -> Callable[[Batch], dict[str, np.ndarray]]:
    """Copy the weights that a run begins with, in the compute dtype; return what they say.

    With an adapter nothing is copied: the reference is the base, and so an adapter of zeros.

    Raises:
        ConfigError: it has a mesh of its own or is offloaded, but there is an adapter.
    """
    layout = layouts.reference
    if model.frozen is not None:
        if layout is not layouts.train or config.offload.reference:
            key = "offload.reference" if config.offload.reference else "mesh.reference"
            raise ConfigError(
                f"{key} is set, but beside an adapter the reference is the frozen model "
                "itself, where it is trained: remove it"
            )
        split = jax.tree.map(lambda like: like.sharding, model.like)
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return functools.partial(actor.infer, jax.jit(zeros, out_shardings=split)(model.like))
    split, dtypes = layout.of(declare(model.spec)), compute_dtypes(model.spec, config.model.dtype)
    infer = actor.infer
    if layout is not layouts.train:
        how = forward_config(config.model, model.spec, layout, config.rollout.temperature)
        infer = logprob_pass(how, shape_on(layout), layout.mesh, ("logprobs",))
    params = reshard(model.params, split, dtype=dtypes)
    if config.offload.reference:
        params = to_host(params)

    def ask(batch: Batch) -> dict[str, np.ndarray]:
        with on_device(params) as held:
            return infer(held, batch)

    return ask
