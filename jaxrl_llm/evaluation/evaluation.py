"""Evaluation: k answers to each prompt, their scores, and what these say of a model."""

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.compilation import compiling_on_demand
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.load import as_tree
from jaxrl_llm.config.programs import EvaluateConfig
from jaxrl_llm.config.sections import SftMeshConfig, episodes_have_one_process
from jaxrl_llm.data.dataset import Prompt, RowVisuals, tokenize_prompts
from jaxrl_llm.data.rows import Row, load_rows, normalize_prompt_row, write_rows
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.data.visuals.processor import configured_processor
from jaxrl_llm.files import write_text
from jaxrl_llm.models.model import for_length
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import reporting_compilation
from jaxrl_llm.monitoring.writer import quiet_libraries
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import check_reward_rows, make_function_scoring
from jaxrl_llm.rollout.agents.sampler import (
    EpisodeSampler,
    check_episode_functions,
    open_episode_sampler,
)
from jaxrl_llm.rollout.agents.verl_agent import check_agent_rows
from jaxrl_llm.rollout.build import loaded_engine
from jaxrl_llm.rollout.engine import EngineSettings, SamplingParams
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, answer_seeds, sample
from jaxrl_llm.runs.compile_cache import use_compilation_cache
from jaxrl_llm.runs.directory import ending_together, join
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training.dumps import answer_rows
from jaxrl_llm.training.load_model import all_devices, open_layout
from jaxrl_llm.training.policy import Policy, load_policy
from jaxrl_llm.training.validation import (
    LEVEL,
    best_at,
    interval,
    majority_at,
    mean_of_each,
    read_scores,
)

METHOD = "Wilson's at the effective number of prompts, or m ± t·s for scores outside 0 to 1"

Report = dict[str, Any]

log = logging.getLogger(__name__)


def run_evaluation(config: EvaluateConfig) -> Report:
    """Sample, score, print and write; return the contents of metrics.json."""
    join(config, episodes_have_one_process)
    with ending_together():
        all_devices()
        if config.has_episodes:
            check_episode_functions(config)
        return _evaluate(config)


def _evaluate(config: EvaluateConfig) -> Report:
    quiet_libraries()
    out = distributed.run_on_first(functools.partial(new_results_folder, config.out))
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_compilation_cache())
        stack.enter_context(reporting_compilation())
        stack.enter_context(compiling_on_demand())
        score = make_function_scoring(config.reward, config.reward.function, stack, out)
        with activity("opening the devices"):
            layout = open_layout(SftMeshConfig(), "rollout", config.mesh.rollout)
        log.info("loading %s", config.model)
        policy = load_policy(
            config.model,
            layout,
            step=config.step,
            on_host=True,
            function_from=config.function_from,
            vision=config.vision,
        )
        prompts, episodes = read_evaluation_prompts(config, policy, stack)
        answers = len(prompts) * config.samples
        settings = EngineSettings(
            max_running_sequences=config.max_running_sequences,
            max_tokens=longest_prompt(config, policy, prompts) + config.max_new_tokens,
            cache_gb=config.kv_cache_gb,
            dtype=config.dtype,
            cached_sequences=answers if episodes else None,
        )
        policy = dataclasses.replace(policy, model=for_length(policy.model, settings.max_tokens))
        engine = loaded_engine(
            policy.model,
            policy.params,
            settings,
            policy.layout,
            policy.tokenizer,
            sequences=answers,
        )
        stack.callback(engine.close)
        log.info("sampling %d answers to each of %d prompts", config.samples, len(prompts))
        decode = text_decoder(policy.tokenizer)
        sample_all = episodes.sample if episodes else functools.partial(sample, decode=decode)
        rollouts = sample_all(
            engine, prompts, sampling(config, policy), samples=config.samples, seed=(config.seed,)
        )
        scores = score(rollouts)
    report = {
        "model": config.model,
        "step": policy.step,
        "interval": {"level": LEVEL, "method": METHOD},
        **tables(rollouts, scores, samples=config.samples, ks=sample_counts(config)),
        "config": as_tree(config),
    }
    if distributed.is_first():
        write_rows(out / "samples.parquet", rows(config, rollouts, scores))
        write_text(out / "metrics.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        sys.stdout.write(f"{as_text(report)}written to {out}\n")
    return report


def new_results_folder(out: str | None) -> Path:
    """Make the folder of the results.

    Raises:
        ConfigError: it holds results already.
    """
    now = datetime.datetime.now(datetime.UTC)
    folder = Path(out or f"runs/evaluate/{now:%Y-%m-%d_%H-%M-%S}")
    if (folder / "metrics.json").exists():
        raise ConfigError(f"out: {str(folder)!r} holds results; remove it or name another one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_evaluation_rows(config: EvaluateConfig) -> Sequence[Row]:
    """Read the rows, which the reward function can score.

    Raises:
        ConfigError: a file can't be read, or the reward function can't score a row.
    """
    with config_errors_at("data"):
        rows = load_rows(config.dataset, config.data, normalize=normalize_prompt_row)
        rows = rows[: config.rows]
    check_agent_rows(config, rows, "data")
    check_reward_rows(config.reward.function, rows, "data")
    return rows


@activity("reading the data")
def read_evaluation_prompts(
    config: EvaluateConfig, policy: Policy, stack: contextlib.ExitStack
) -> tuple[list[Prompt], EpisodeSampler | None]:
    """Read and tokenise the prompts; return them with what samples their episodes, if anything.

    Args:
        config: of the evaluation.
        policy: whose tokenizer it is.
        stack: ends the tools' processes.

    Raises:
        ConfigError: as `read_evaluation_rows`; a prompt is too long; an agent, a tool or an
            environment does not fit.
    """
    rows, room = read_evaluation_rows(config), prompt_room(config, policy)
    kwargs, visuals = config.chat_template_kwargs, evaluated_visuals(config, policy)
    tokens = policy.tokenizer, policy.stops
    episodes = open_episode_sampler(config, tokens, rows, kwargs, room, stack, visuals.processor)
    with config_errors_at("data"):
        prompts, _ = tokenize_prompts(
            rows,
            policy.tokenizer,
            max_prompt_tokens=room,
            filter_overlong=config.max_prompt_tokens is not None,
            template_kwargs=kwargs,
            encode=episodes and episodes.opening,
            visuals=visuals,
            vocab_size=policy.model.vocab_size,
        )
    return prompts, episodes


def evaluated_visuals(config: EvaluateConfig, policy: Policy) -> RowVisuals:
    """Return what reads the images and videos of rows.

    Raises:
        ConfigError: bounds of images for a model that reads none, or such that don't fit.
    """
    sees = policy.model.vision is not None
    processor = configured_processor(
        policy.source if sees else None,
        "vision",
        max_pixels=config.max_pixels,
        min_pixels=config.min_pixels,
    )
    return RowVisuals(config.image_key, config.video_key, processor)


def prompt_room(config: EvaluateConfig, policy: Policy) -> int:
    """Return how many tokens a prompt may have.

    Raises:
        ConfigError: there is no room for any.
    """
    positions = policy.model.max_positions
    room = sys.maxsize if positions is None else positions - config.max_new_tokens
    if config.max_prompt_tokens is not None:
        room = min(room, config.max_prompt_tokens)
    if room < 1:
        raise ConfigError(
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in the model's "
            f"{positions} positions (max_position_embeddings)"
        )
    return room


def longest_prompt(config: EvaluateConfig, policy: Policy, prompts: Sequence[Prompt]) -> int:
    """Return the tokens of the longest prompt, with room for what an environment says first."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    if config.environment is None:
        return longest
    return min(prompt_room(config, policy), longest + config.limits.observation_tokens)


def sampling(config: EvaluateConfig, policy: Policy) -> SamplingParams:
    """Return how each answer is sampled."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_ids=policy.stops,
    )


def sample_counts(config: EvaluateConfig) -> list[int]:
    """Return the k of pass@k and maj@k, in rising order.

    >>> sample_counts(EvaluateConfig(model="m", data=("d",), samples=6, temperature=1.0))
    [2, 4, 6]
    """
    n = config.samples
    return sorted({*config.k} or {*(2**i for i in range(1, n.bit_length())), n} - {1})


def tables(
    rollouts: Rollouts, scores: Sequence[Score], *, samples: int, ks: Sequence[int]
) -> Report:
    """Return the metrics of all answers, and of those to the prompts of each data source.

    Args:
        rollouts: the answers; the n of a prompt lie side by side.
        scores: one for each answer.
        samples: n.
        ks: k of pass@k and maj@k.
    """
    sources = [prompt.data_source for prompt in rollouts.prompts]

    def of(source: str | None) -> Report:
        chosen = [i for i, name in enumerate(sources) if source in (None, name)]
        answers = [rollouts.episodes[i] for i in chosen]
        return table([scores[i] for i in chosen], answers, samples=samples, ks=ks)

    return {"all": of(None), "sources": {name: of(name) for name in dict.fromkeys(sources)}}


def table(
    scores: Sequence[Score], answers: Sequence[Episode], *, samples: int, ks: Sequence[int]
) -> Report:
    """Return mean@n, pass@k and maj@k with their intervals, and what went wrong.

    pass@k is called best@k where scores are not all 0 or 1. maj@k needs the reward functions'
    `pred`. Answers that are unscored are left out, and so are prompts with fewer than k others.
    """
    groups = [scores[first : first + samples] for first in range(0, len(scores), samples)]
    quantity, values, votes = read_scores(groups)
    best = "pass" if np.isin(values[~np.isnan(values)], (0, 1)).all() else "best"
    by_name = {f"mean@{samples}": mean_of_each(values)}
    by_name |= {f"{best}@{k}": best_at(values, k) for k in ks}
    if votes is not None:
        by_name |= {f"maj@{k}": majority_at(values, votes, k) for k in ks}
    failures = [str(score.error).partition(":")[0] for score in scores if score.has_failed]
    return {
        "quantity": quantity,
        "prompts": len(groups),
        "samples": samples,
        "metrics": {name: estimate(by_prompt) for name, by_prompt in by_name.items()},
        "reward_errors": dict(Counter(failures)),
        "unscored": sum(score.is_unscored for score in scores),
        "cut_off": float(np.mean([answer.finish == "length" for answer in answers])),
        "mean_tokens": float(np.mean([np.sum(answer.drawn) for answer in answers])),
    }


def estimate(by_prompt: np.ndarray) -> Report:
    """Return a mean over prompts that have a value, with its interval; a single one has none."""
    known = by_prompt[~np.isnan(by_prompt)]
    low, high = interval(known) or (None, None)
    return {"value": float(known.mean()) if known.size else None, "low": low, "high": high}


def rows(config: EvaluateConfig, rollouts: Rollouts, scores: Sequence[Score]) -> list[Report]:
    """Return a row of samples.parquet for each answer."""
    seeds = answer_seeds((config.seed,), len(scores))
    return [
        {
            "row": prompt.index,
            "sample": number % config.samples,
            "seed": seed,
            "token_count": len(row["tokens"]),
            **row,
        }
        for number, (prompt, seed, row) in enumerate(
            zip(rollouts.prompts, seeds, answer_rows(rollouts, scores), strict=True)
        )
    ]


def as_text(report: Report) -> str:
    """Return the tables as text for a terminal."""
    parts = report["sources"]
    if len(parts) > 1:
        parts = {**parts, "all sources": report["all"]}
    return "".join(_part(name, part) for name, part in parts.items())


def _part(name: str, part: Report) -> str:
    answers = "1 answer" if part["samples"] == 1 else f"{part['samples']} answers"
    lines = [f"{name}: {part['prompts']} prompts, {answers} each; {part['quantity']}"]
    for metric, estimated in part["metrics"].items():
        ends = (
            ""
            if estimated["low"] is None
            else f"  [{estimated['low']:.4f}, {estimated['high']:.4f}]"
        )
        value = "unknown" if estimated["value"] is None else f"{estimated['value']:.4f}"
        lines.append(f"  {metric:<10} {value}{ends}")
    lines.append(f"  answers of {part['mean_tokens']:.0f} tokens, {part['cut_off']:.1%} cut off")
    if part["reward_errors"]:
        counts = ", ".join(f"{count} {kind}" for kind, count in part["reward_errors"].items())
        lines.append(f"  the reward function failed: {counts}")
    if part["unscored"]:
        total = part["prompts"] * part["samples"]
        lines.append(f"  {part['unscored']} of {total} answers are unscored, and left out")
    return "\n".join(lines) + "\n"
