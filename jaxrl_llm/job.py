"""From a config to everything that the loop calls."""

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import keys
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import as_tree, load, to_yaml
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.data.dataset import (
    Prompt,
    batches,
    check_prompt_row,
    load_rows,
    tokenize_prompts,
)
from jaxrl_llm.data.packing import RowShape, row_shape
from jaxrl_llm.dataflow import asks_for, check_fields
from jaxrl_llm.evaluate import validation_metrics
from jaxrl_llm.experience import Rollouts, advantage_step, sample
from jaxrl_llm.functions import ConfigError, FunctionSpec, load_function
from jaxrl_llm.keys import SftConfig, TrainConfig
from jaxrl_llm.loop import Job, Progress, run
from jaxrl_llm.metrics import Display, MetricsLog
from jaxrl_llm.rewards.pool import RewardItem, RewardPool, Score
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.setup import (
    Model,
    forward_settings,
    made_once,
    make_optimizer,
    open_mesh,
    open_model,
    origin,
    prepare_files,
    quiet_libraries,
    restore_or_start,
    run_folder,
)
from jaxrl_llm.sharding.mesh import batch_shards
from jaxrl_llm.sharding.reshard import reshard
from jaxrl_llm.step import Objective, logprob_pass, make_learner
from jaxrl_llm.supervised import run_sft
from jaxrl_llm.types import Sampling

log = logging.getLogger(__name__)


def run_job(config: TrainConfig) -> Progress:
    """Build a run, run it to its end and print what it has learned."""
    quiet_libraries()
    functions = Functions(config)  # wrong names fail before anything is loaded
    prepare_files(config.data.prepare, (*config.data.train, *config.data.validation))
    warm_start(config)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(run_folder(config.run_dir, config))
        job, start, prompt_batches = build(config, functions, folder, stack)
        done = run(job, start, prompt_batches)
        print_before_and_after(folder, job.display)
    return done


class Functions:
    """The functions that a config names, found and checked against the dataflow."""

    def __init__(self, config: TrainConfig) -> None:
        """Find them all; raise ConfigError where one is wrong."""
        wanted = config.algorithm

        def find(spec: FunctionSpec, home: str, key: str) -> Callable[..., Any]:
            return load_function(spec, home, passed=None, key=f"algorithm.{key}")

        def checked(
            spec: FunctionSpec, home: str, key: str, after: frozenset[str]
        ) -> Callable[..., Any]:
            function = find(spec, home, key)
            check_fields(function, f"algorithm.{key}", after=after)
            return function

        estimate = frozenset({"advantages", "logprobs"})
        self.advantage = checked(wanted.advantage, keys.ADVANTAGES, "advantage", estimate)
        self.loss = checked(wanted.loss, keys.LOSSES, "loss", frozenset())
        self.reduce = find(wanted.reduce, keys.REDUCTIONS, "reduce")
        kl_spec, kl_key = (
            (wanted.kl_loss, "kl_loss") if wanted.kl_loss else (wanted.kl_reward, "kl_reward")
        )
        self.kl = checked(kl_spec, keys.KLS, kl_key, frozenset()) if kl_spec else None
        self.controller = find(wanted.kl_controller, keys.KLS, "kl_controller")
        self.optimizer, self.schedule = make_optimizer(config.optim)
        self.objective = Objective(
            loss=self.loss,
            kl=self.kl if wanted.kl_loss else None,
            entropy=config.algorithm.entropy_coef != 0,
        )
        needs = self.objective.asks_for() | set(asks_for(self.advantage))
        self.needs_reference = self.kl is not None or "ref_logprobs" in needs


def warm_start(config: TrainConfig) -> None:
    """Make the base model by supervised training where there is none yet."""
    if config.model.warm_start is None:
        return
    path = Path(config.model.path)
    overrides = [f"export_to={path}", f"run_dir={path}.sft"]
    sft = load(SftConfig, config.model.warm_start, overrides)
    made_once(path, to_yaml(sft), lambda: run_sft(sft))


def build(
    config: TrainConfig, functions: Functions, folder: Path, stack: contextlib.ExitStack
) -> tuple[Job, Progress, Any]:
    """Build everything that the loop calls, and find out where it starts."""
    mesh = open_mesh(config.mesh)
    model = open_model(config.model, mesh, seed=config.seed)
    tokenizer = load_tokenizer(config.model.path)
    shape = _row_shape(config, batch_shards(mesh))
    settings = forward_settings(config.model, model.spec, config.rollout.temperature)
    learner = make_learner(
        functions.objective,
        settings,
        functions.optimizer,
        reduce=functions.reduce,
        shape=shape,
        mesh=mesh,
        params_like=model.like,
    )
    pool = stack.enter_context(
        RewardPool(
            config.reward.scorer,
            workers=config.reward.workers,
            timeout_s=config.reward.timeout_s,
            on_error=config.reward.on_error,
        )
    )
    engine = _make_engine(config, model, mesh)
    stack.callback(engine.close)
    checkpoints = Checkpoints(
        folder / "checkpoints", keep=config.checkpoint.keep, best="validation"
    )
    stack.callback(checkpoints.close)
    train, validation = _read_prompts(config, tokenizer)
    prompt_batches = batches(
        train,
        batch_size=config.batch.prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
        epochs=None if config.steps else config.epochs,
        drop_remainder=True,
    )
    began = origin(model, train)
    step, state, extra = restore_or_start(
        checkpoints,
        learner,
        model,
        prompt_batches,
        resume=config.checkpoint.resume,
        origin=began,
    )
    start = Progress(step, state, extra.get("kl_coef", config.algorithm.kl_coef))
    total = config.steps or len(train) * config.epochs // config.batch.prompts_per_step
    metrics = MetricsLog(
        folder,
        step=start.step,
        position=extra.get("metrics_bytes", 0),
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        config=as_tree(config),
    )
    stack.callback(metrics.close)
    display = Display("training", total, start.step)
    stack.callback(display.close)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    score = functools.partial(_score, pool)
    stops = stop_ids(tokenizer, config.model.path)
    _check_lengths(config, model, stops)
    job = Job(
        config=config,
        total_steps=total,
        origin=began,
        engine=engine,
        sample=functools.partial(_sample, config, engine, stops, decode),
        score=score,
        logprobs=logprob_pass(settings, shape, mesh),
        advantage=advantage_step(functions.advantage),
        kl=functions.kl,
        kl_reward=config.algorithm.kl_reward is not None,
        next_kl_coef=lambda *seen: float(functions.controller(*seen)),
        reference=_reference(config, model) if functions.needs_reference else None,
        learner=learner,
        learning_rate=functions.schedule,
        validate=functools.partial(_validate, config, engine, stops, decode, score, validation)
        if validation
        else None,
        dump=functools.partial(_dump, folder / "rollouts"),
        checkpoints=checkpoints,
        log=metrics,
        display=display,
    )
    return job, start, prompt_batches


def _row_shape(config: TrainConfig, shards: int) -> RowShape:
    groups = config.batch.prompts_per_minibatch or config.batch.prompts_per_step
    try:
        return row_shape(
            config.batch.tokens_per_microbatch,
            config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            sequences=groups * config.rollout.samples_per_prompt,
            multiple_of=shards,
        )
    except ValueError as error:
        raise ConfigError(f"batch.tokens_per_microbatch: {error}") from error


def _make_engine(config: TrainConfig, model: Model, mesh: Any) -> NativeEngine:
    rollout = config.rollout
    try:
        return NativeEngine(
            model.spec,
            mesh=mesh,
            slots=rollout.slots,
            max_tokens=config.data.max_prompt_tokens + rollout.max_new_tokens,
            max_prompt_tokens=config.data.max_prompt_tokens,
            prompts_per_fill=min(
                config.batch.prompts_per_step, rollout.slots // rollout.samples_per_prompt
            ),
            dtype=config.model.dtype,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_lengths(config: TrainConfig, model: Model, stops: Sequence[int]) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > model.spec.max_positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}, but the model has "
            f"{model.spec.max_positions} positions (max_position_embeddings)"
        )
    if not stops:
        raise ConfigError("model.path: neither the tokenizer nor generation_config.json has an eos")


def _read_prompts(config: TrainConfig, tokenizer: Any) -> tuple[list[Prompt], list[Prompt]]:
    data = config.data

    def read(paths: Sequence[str], key: str) -> list[Prompt]:
        try:
            rows = load_rows(data.dataset, paths, check=check_prompt_row)
            return tokenize_prompts(
                rows,
                tokenizer,
                max_prompt_tokens=data.max_prompt_tokens,
                filter_overlong=data.filter_overlong,
                template_kwargs=data.template,
            )[0]
        except (ValueError, OSError) as error:
            raise ConfigError(f"{key}: {error}") from error

    train = read(data.train, "data.train")
    validation = read(data.validation, "data.validation") if data.validation else []
    wanted = config.batch.prompts_per_step
    if not config.steps and len(train) * config.epochs < wanted:
        raise ConfigError(
            f"batch.prompts_per_step={wanted}, but data.train has only {len(train)} prompts for "
            f"{config.epochs} epochs: lower it, or set steps"
        )
    return train, validation[: config.validation.rows]


def _reference(config: TrainConfig, model: Model) -> Any:
    layout = jax.tree.map(lambda like: like.sharding, model.like)
    return reshard(model.params, layout, dtype=config.model.dtype)


def _sample(
    config: TrainConfig,
    engine: NativeEngine,
    stops: tuple[int, ...],
    decode: Callable[..., str],
    prompts: list[Prompt],
    step: int,
) -> Rollouts:
    rollout = config.rollout
    sampling = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=stops,
    )
    return sample(
        engine,
        prompts,
        sampling,
        samples=rollout.samples_per_prompt,
        seed=(config.seed, step, 0),
        decode=decode,
    )


def _validate(
    config: TrainConfig,
    engine: NativeEngine,
    stops: tuple[int, ...],
    decode: Callable[..., str],
    score: Callable[[Rollouts], list[Score]],
    prompts: list[Prompt],
    step: int,
) -> dict[str, float]:
    how = config.validation
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=how.temperature,
        top_p=how.top_p,
        stop_ids=stops,
    )
    rollouts = sample(
        engine, prompts, sampling, samples=how.samples, seed=(config.seed, step, 1), decode=decode
    )
    return validation_metrics(rollouts.prompts, score(rollouts), samples=how.samples)


def _score(pool: RewardPool, rollouts: Rollouts) -> list[Score]:
    return pool.score(
        [
            RewardItem(p.data_source, text, p.ground_truth, p.extra_info)
            for p, text in zip(rollouts.prompts, rollouts.texts, strict=True)
        ]
    )


def _dump(folder: Path, step: int, rollouts: Rollouts, scores: list[Score]) -> None:
    """Write a step's answers to parquet."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    rows = [
        {
            "step": step,
            "prompt": json.dumps(prompt.messages),
            "answer": text,
            "tokens": completion.tokens.tolist(),
            "finish": completion.finish,
            "data_source": prompt.data_source,
            "ground_truth": json.dumps(prompt.ground_truth),
            "score": score.score,
            "extra": json.dumps(score.extra),
            "error": score.error,
        }
        for prompt, completion, text, score in zip(*rollouts, scores, strict=True)
    ]
    path = folder / f"step_{step:06d}.parquet"
    temporary = path.with_suffix(".tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
    temporary.replace(path)


def print_before_and_after(folder: Path, display: Display) -> None:
    """Print a table of the first and the last validation, and of the score in training."""
    with (folder / "metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    names = dict.fromkeys(n for line in lines for n in line if "@" in n or n == "critic/score/mean")
    rows = []
    for name in names:
        found = [(line["step"], line[name]) for line in lines if name in line]
        (first, before), (last, after) = found[0], found[-1]
        best = float(np.max([value for _, value in found]))
        rows.append(
            [name, f"{before:.3f} (step {first})", f"{after:.3f} (step {last})", f"{best:.3f}"]
        )
    display.table("before and after", ["metric", "before", "after", "best"], rows)
