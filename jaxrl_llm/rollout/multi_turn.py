"""Sampling of episodes: agents, tools and environments around an engine."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config import kinds
from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec, closest, load_function
from jaxrl_llm.config.sections.agent import AgentConfig
from jaxrl_llm.data.chat import Message
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.rollout.chat import Chat, EpisodeEnd, EpisodeLimits, Generate, tool_seed
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.runner import log_broken, run_all, run_episode, run_in_loop
from jaxrl_llm.rollout.sampling import Rollouts, answer_seeds, episode_text
from jaxrl_llm.rollout.sessions import EpisodeEnvironment, Tools, record_end
from jaxrl_llm.rollout.tools.journal import Journal
from jaxrl_llm.rollout.tools.loading import TOOLS_KEY, load_environment, load_tools
from jaxrl_llm.rollout.tools.pool import SessionPool, SessionSettings
from jaxrl_llm.rollout.tools.signature import tool_schema
from jaxrl_llm.rollout.types import SamplingParams
from jaxrl_llm.workers.limits import Limits

log = logging.getLogger(__name__)

GIVEN = ("chat", "tools", "environment", "row", "rng")
"""What an agent may ask for by parameter name."""
DRIFT_SAMPLE = 8
"""Episodes of a step whose streams are compared with the template's rendering."""
CUT = " ... "


class EpisodeSampler:
    """Samples episodes of many turns; the counterpart of `rollout.sampling.sample`.

    Args:
        config: agent, tools and environment.
        tokenizer: with a chat template.
        stops: tokens that end a turn.
        template_kwargs: variables of the chat template.
        prompt_tokens: the longest prompt.
        example: a row of the data, with which tools are tried.

    Raises:
        ConfigError: a function can't be found or called, or the chat template does not fit.
    """

    _agent_config: AgentConfig

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: Any,
        stops: tuple[int, ...],
        *,
        template_kwargs: dict[str, Any],
        prompt_tokens: int,
        example: EpisodeRow | None = None,
    ) -> None:
        """Load the functions; worker processes start when they are needed."""
        self._agent_config, self._tokenizer, self._prompt_tokens = config, tokenizer, prompt_tokens
        self._cut_tokens = len(tokenizer(CUT, add_special_tokens=False)["input_ids"])
        self._agent = load_agent(config)
        self._pool = SessionPool(session_settings(config), example_row=example)
        try:
            with config_errors_at("rollout.tools"):
                self._template = TurnTemplate(
                    tokenizer,
                    stops,
                    tools=self._pool.schemas,
                    call_format=config.call_format,
                    template_kwargs=template_kwargs,
                )
                self._template.check()
        except BaseException:
            self._pool.close()
            raise

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt, in which the model is told of its tools."""
        return self._template.opening(messages)

    def with_tools_in_prompt(self, prompt: Prompt) -> Prompt:
        """Return a prompt in which the model is told of its tools, if it is a chat."""
        if not prompt.messages:
            return prompt
        return dataclasses.replace(prompt, tokens=tuple(self.opening(prompt.messages)))

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        samples: int,
        seed: tuple[int, ...],
        journal: Path | None = None,
    ) -> Rollouts:
        """Draw G episodes for each prompt.

        Args:
            engine: holds the policy.
            prompts: P prompts.
            sampling: how to sample; `max_new_tokens` are those of an episode, drawn and told.
            samples: G.
            seed: entropy of this call; each episode gets a seed of its own from it.
            journal: file of what tools answer, from which the same call is repeated.

        Raises:
            RunError: too many episodes are broken; the engine failed.
        """
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        seeds = answer_seeds(seed, len(repeated))
        limits = episode_limits(self._agent_config, sampling.max_new_tokens, self._prompt_tokens)
        with opened_journal(journal, self._agent_config, seed) as opened:
            runs = [
                functools.partial(self._run, number, prompt, own, sampling, limits, opened)
                for number, (prompt, own) in enumerate(zip(repeated, seeds, strict=True))
            ]
            lockstep = self._agent_config.order == "lockstep"
            episodes = run_in_loop(lambda: run_all(runs, engine, lockstep=lockstep))
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=True)
        texts = [episode_text(episode, decode) for episode in episodes]
        rollouts = Rollouts(repeated, episodes, texts, self._drift(episodes))
        self._check_broken(episodes)
        return rollouts

    async def _run(
        self,
        number: int,
        prompt: Prompt,
        seed: int,
        sampling: SamplingParams,
        limits: EpisodeLimits,
        journal: Journal | None,
        generate: Generate,
    ) -> Episode:
        chat = Chat(
            prompt, self._template, generate, sampling, limits, seed=seed, cut_text=self._cut
        )
        row = row_of(prompt)
        session = self._pool.open(number, row, tool_seed(seed), journal)
        given = {
            "chat": chat,
            "tools": Tools(chat, session, self._pool.schemas),
            "environment": EpisodeEnvironment(chat, session),
            "row": row,
            "rng": random.Random(tool_seed(seed)),
        }
        asked = {name: given[name] for name in asked_by(self._agent)}

        async def lead() -> None:
            with contextlib.suppress(EpisodeEnd):
                await self._agent(**asked)
            if chat.turn:
                record_end(chat, await session.end())

        try:
            return await run_episode(lead, chat, self._agent_config.limits.timeout_s)
        finally:
            await asyncio.shield(session.close())

    def _cut(self, text: str, tokens: int) -> str:
        """Return a text of at most so many tokens, its middle left out."""
        if len(text) <= tokens:  # a token has a character at least
            return text
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= tokens:
            return text
        head, tail = tokens // 2, tokens - tokens // 2 - self._cut_tokens
        decode = functools.partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
        return decode(ids[:tokens]) if tail < 1 else decode(ids[:head]) + CUT + decode(ids[-tail:])

    def _check_broken(self, episodes: Sequence[Episode]) -> None:
        """Log episodes that are broken.

        Raises:
            RunError: they are too many.
        """
        log_broken(episodes)
        broken, share = sum(not e.usable for e in episodes), self._agent_config.limits.broken_share
        if broken > share * len(episodes) or broken == len(episodes):
            error = next(e.error for e in episodes if e.error is not None)
            raise RunError(
                f"{broken} of {len(episodes)} episodes are broken, expected at most "
                f"{share:g} of them (limits.broken_share), and not all; the first: {error}"
            )

    def _drift(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return the share of streams that the template would have written otherwise."""
        chosen = [
            e
            for e in episodes
            if e.usable and e.turns > 1 and not any("as_tokens" in m for m in e.messages)
        ][:DRIFT_SAMPLE]
        if not chosen:
            return {}
        drifts = [
            self._template.drifts(e.messages, (*e.prompt, *e.tokens.tolist())) for e in chosen
        ]
        return {"rollout/template_drift": sum(drifts) / len(drifts)}


def open_episode_sampler(
    config: AgentConfig,
    tokenizer: Any,
    stops: tuple[int, ...],
    rows: Sequence[Mapping[str, Any]],
    template_kwargs: dict[str, Any],
    prompt_tokens: int,
    stack: contextlib.ExitStack,
) -> EpisodeSampler | None:
    """Build what samples episodes of many turns, if the config has an agent, tools or environment.

    Args:
        config: of episodes.
        tokenizer: the policy's.
        stops: tokens that end a turn.
        rows: of the data; tools are tried with the first.
        template_kwargs: variables of the chat template.
        prompt_tokens: the longest prompt.
        stack: ends the tools' processes.

    Raises:
        ConfigError: as for `EpisodeSampler`.
    """
    if not config.has_episodes:
        return None
    episodes = EpisodeSampler(
        config,
        tokenizer,
        stops,
        template_kwargs=template_kwargs,
        prompt_tokens=prompt_tokens,
        example=as_episode_row(rows[0]),
    )
    stack.callback(episodes.close)
    return episodes


def session_settings(config: AgentConfig) -> SessionSettings:
    """Return how tools and environments run."""
    process = config.tool_process
    return SessionSettings(
        config.tools,
        config.environment,
        workers=process.workers,
        timeout_s=process.timeout_s,
        retries=process.retries,
        limits=Limits(process.memory_gb, process.max_processes, process.pass_env),
    )


def episode_limits(config: AgentConfig, new_tokens: int, prompt_tokens: int) -> EpisodeLimits:
    """Return what bounds an episode."""
    limits = config.limits
    return EpisodeLimits(
        new_tokens=new_tokens,
        prompt_tokens=prompt_tokens,
        turns=limits.turns,
        turn_tokens=limits.turn_tokens,
        observation_tokens=limits.observation_tokens,
        parallel_calls=limits.parallel_calls,
    )


def load_agent(config: AgentConfig) -> Callable[..., Any]:
    """Return the agent of a config.

    Raises:
        ConfigError: there is no such coroutine function, or it asks for what there is not.
    """
    default = "with_environment" if config.environment else "with_tools"
    spec = config.agent or FunctionSpec(default)
    agent = load_function(spec, kinds.AGENTS, passed=None, key="rollout.agent")
    function = agent.func if isinstance(agent, functools.partial) else agent
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.agent: {spec.fn!r} is no coroutine, expected `async def`")
    for name in asked_by(agent):
        if name not in GIVEN:
            raise ConfigError(
                f"rollout.agent: {spec.fn!r} asks for {name!r}, which no episode has; "
                + closest(name, GIVEN)
            )
    check_asked(spec, asked_by(agent), config)
    return agent


def check_episode_functions(config: AgentConfig) -> None:
    """Import the agent, the tools and the environment of a config, before anything else is loaded.

    Raises:
        ConfigError: one of them is not there, or does not fit.
    """
    load_agent(config)
    for spec in config.tools:
        for tool in load_tools(spec):
            if tool.schema is None and not tool.is_fixture:
                tool_schema(tool.definition, tool.name, hidden=spec.kwargs, key=TOOLS_KEY)
    if config.environment is not None:
        load_environment(config.environment)


def check_asked(spec: FunctionSpec, asked: Sequence[str], config: AgentConfig) -> None:
    """Refuse tools or an environment that the agent does not ask for, and one without it.

    Raises:
        ConfigError: one of these.
    """
    if config.tools and "tools" not in asked:
        raise ConfigError(
            f"rollout.tools is set, but the agent {spec.fn!r} does not ask for `tools`: no tool "
            "would ever be called"
        )
    if (config.environment is not None) != ("environment" in asked):
        state = "is set" if config.environment is not None else "is null"
        does = "asks" if "environment" in asked else "does not ask"
        raise ConfigError(
            f"rollout.environment {state}, but the agent {spec.fn!r} {does} for `environment`"
        )


def asked_by(agent: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that an agent asks for."""
    return tuple(
        name
        for name, p in inspect.signature(agent).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    )


def row_of(prompt: Prompt) -> EpisodeRow:
    """Return the row of data of a prompt."""
    return EpisodeRow(
        prompt.index, prompt.data_source, prompt.ground_truth, prompt.extra_info, prompt.messages
    )


def as_episode_row(row: Mapping[str, Any], index: int = 0) -> EpisodeRow:
    """Return a row of a data file as tools and environments get it."""
    truth, extra = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    return EpisodeRow(index, row["data_source"], truth, extra, row["prompt"])


@contextlib.contextmanager
def opened_journal(
    path: Path | None, config: AgentConfig, seed: tuple[int, ...]
) -> Iterator[Journal | None]:
    """Open the journal of a call, if it has one."""
    if path is None or not (config.tools or config.environment):
        yield None
        return
    named = [spec.as_config() for spec in (*config.tools, config.environment) if spec is not None]
    with Journal(path, config=repr((seed, named))) as journal:
        yield journal
