"""Sampling of episodes: agents, tools and environments around an engine."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import RunError, config_errors_at
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.chat import Message
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.rollout.chat import Chat, EpisodeEnd, Generate
from jaxrl_llm.rollout.contents import MessageContents
from jaxrl_llm.rollout.engine import Engine, Stop
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.load_agent import asked_by, load_agent, open_gateway
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.runner import (
    after_turns,
    log_broken,
    run_all,
    run_episode,
    run_in_loop,
)
from jaxrl_llm.rollout.sampling import (
    EpisodeState,
    OnEnd,
    Rollouts,
    as_rollouts,
    begin_episodes,
    sampling_activity,
)
from jaxrl_llm.rollout.seeds import tool_seed
from jaxrl_llm.rollout.sessions import EpisodeEnvironment, Tools, record_end
from jaxrl_llm.rollout.tools.journal import Journal
from jaxrl_llm.rollout.tools.pool import SessionPool, SessionSettings
from jaxrl_llm.rollout.types import EpisodeLimits, SamplingParams
from jaxrl_llm.workers.limits import Limits

log = logging.getLogger(__name__)

DRIFT_SAMPLE = 8
"""Episodes of a step whose streams are compared with the template's rendering."""


class EpisodeSampler:
    """Samples episodes of many turns; the counterpart of `rollout.sampling.sample`.

    Args:
        config: agent, tools and environment.
        tokenizer: with a chat template.
        stops: tokens that end a turn.
        template_kwargs: variables of the chat template.
        prompt_tokens: the longest prompt.
        example: a row of the data, with which tools are tried.
        processor: of images and videos; None: the policy reads text alone.
        visual_tokens: as for `EpisodeLimits`.

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
        processor: VisualProcessor | None = None,
        visual_tokens: int | None = None,
    ) -> None:
        """Load the functions; worker processes start when they are needed."""
        self._processor = processor
        self._agent_config, self._tokenizer = config, tokenizer
        self._room = prompt_tokens, visual_tokens
        self._agent = load_agent(config)
        template = functools.partial(
            TurnTemplate,
            tokenizer,
            stops,
            call_format=config.call_format,
            template_kwargs=template_kwargs,
        )
        self._gateway = open_gateway(config, self._agent, lambda tools: template(tools=tools))
        self._pool = SessionPool(session_settings(config), example_row=example)
        try:
            with config_errors_at("rollout.tools"):
                self._template = template(tools=self._pool.schemas)
                self._template.check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()
        if self._gateway is not None:
            self._gateway.close()

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of a prompt, in which the model is told of its tools.

        Each image has one placeholder in it.

        Args:
            messages: of the prompt.
            tools: those that its row names.

        Raises:
            ValueError: the row names other tools than the run gives; the chat template refuses the
                prompt, or leaves out something that it says.
        """
        if tools and list(tools) != self._pool.schemas:
            raise ValueError(
                "field 'tools': expected none, or the tools that the run gives the model "
                f"(rollout.tools): {self._pool.schemas}; remove the column"
            )
        return self._template.opening(messages)

    def with_tools_in_prompt(self, prompt: Prompt) -> Prompt:
        """Return a prompt in which the model is told of its tools, if it is a chat."""
        if not prompt.messages:
            return prompt
        prompt, tokens = prompt.loaded(), self.opening(prompt.messages)
        contents = MessageContents(self._tokenizer, self._processor)
        tokens = contents.expand(tokens, prompt.visuals)
        return dataclasses.replace(prompt, tokens=tuple(tokens))

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
        states = begin_episodes(prompts, samples, seed)
        self.sample_states(engine, states, sampling, journal=lambda _: journal)
        return self.examine(self.as_rollouts(states))

    def sample_states(
        self,
        engine: Engine,
        states: Sequence[EpisodeState],
        sampling: SamplingParams,
        *,
        needed: int | None = None,
        stop: Stop | None = None,
        on_end: OnEnd | None = None,
        journal: Callable[[tuple[int, ...]], Path | None],
    ) -> None:
        """Draw episodes, or go on with them.

        What was begun before is led again from its start: the turns that it has are not drawn
        again, and the journal has what its tools answered.

        Args:
            engine: holds the policy.
            states: episodes; those that have ended stay as they are.
            sampling: how to sample; `max_new_tokens` are those of an episode, drawn and told.
            needed: return once the first so many have ended, with the others as they stand;
                None: all.
            stop: return once it is set, whatever has ended.
            on_end: called with each that ends before all have.
            journal: from the entropy of a draw to the file of what its tools answer.

        Raises:
            RunError: the engine failed, or tools can't be run at all.
        """
        needed = len(states) if needed is None else needed
        first = [state for state in states[:needed] if state.episode is None]
        begun = first + [state for state in states[needed:] if state.episode is None]
        if not first or (stop is not None and stop.is_set):
            return
        limits = episode_limits(self._agent_config, sampling.max_new_tokens, *self._room)
        lockstep = self._agent_config.order == "lockstep"
        with sampling_activity(begun), contextlib.ExitStack() as stack:
            journals = {
                draw: stack.enter_context(opened_journal(journal(draw), self._agent_config, draw))
                for draw in dict.fromkeys(state.draw for state in begun)
            }
            runs = [
                functools.partial(self._run, state, sampling, limits, journals[state.draw], on_end)
                for state in begun
            ]
            ran = run_in_loop(
                lambda: run_all(runs, engine, lockstep=lockstep, needed=len(first), stop=stop)
            )
        for number, (state, episode) in enumerate(zip(begun, ran.episodes, strict=True)):
            state.episode = state.episode or episode
            if number in ran.unfinished:
                state.keep_unfinished(ran.unfinished[number])

    def as_rollouts(self, states: Sequence[EpisodeState]) -> Rollouts:
        """Return episodes that have ended, with their texts."""
        return as_rollouts(
            states, functools.partial(self._tokenizer.decode, skip_special_tokens=True)
        )

    def examine(self, rollouts: Rollouts) -> Rollouts:
        """Return rollouts with metrics of how well the template fits.

        Raises:
            RunError: too many episodes are broken.
        """
        self.check_broken(rollouts.episodes)
        return rollouts._replace(metrics=self._drift(rollouts.episodes))

    async def _run(
        self,
        state: EpisodeState,
        sampling: SamplingParams,
        limits: EpisodeLimits,
        journal: Journal | None,
        on_end: OnEnd | None,
        generate: Generate,
    ) -> Episode:
        generate = after_turns(state, generate)
        prompt, seed = state.prompt, state.seed
        chat = Chat(
            *(prompt, self._template, generate, sampling, limits),
            seed=seed,
            contents=MessageContents(self._tokenizer, self._processor),
        )
        row = row_of(prompt)
        session = self._pool.open(state.number, row, tool_seed(seed), journal)
        given = {
            "chat": chat,
            "tools": Tools(chat, session, self._pool.schemas),
            "environment": EpisodeEnvironment(chat, session),
            "row": row,
            "rng": random.Random(tool_seed(seed)),
            "gateway": self._gateway and self._gateway.episode(chat, generate),
        }
        asked = {name: given[name] for name in asked_by(self._agent)}

        async def lead() -> None:
            with contextlib.suppress(EpisodeEnd):
                await self._agent(**asked)
            if chat.turn:
                record_end(chat, await session.end())

        try:
            episode = await run_episode(lead, chat, self._agent_config.limits.timeout_s)
            if on_end is not None:
                state.episode = episode
                on_end(state)
            return episode
        finally:
            await asyncio.shield(session.close())

    def check_broken(self, episodes: Sequence[Episode]) -> None:
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
        if self._gateway is not None:  # whose requests have tools of their own
            return self._gateway.metrics()
        chosen = [
            e
            for e in episodes
            if e.usable
            and e.turns > 1
            and e.chains == 1
            and not e.visuals  # whose tokens the template does not write
            and not any("as_tokens" in m for m in e.messages)
        ][:DRIFT_SAMPLE]
        if not chosen:
            return {}
        drifts = [
            self._template.drifts(e.messages, (*e.prompt, *e.tokens.tolist())) for e in chosen
        ]
        return {"rollout/template_drift": sum(drifts) / len(drifts)}


def open_episode_sampler(
    config: AgentConfig,
    tokens: tuple[Any, tuple[int, ...]],
    rows: Sequence[Mapping[str, Any]],
    template_kwargs: dict[str, Any],
    prompt_tokens: int,
    stack: contextlib.ExitStack,
    processor: VisualProcessor | None = None,
    visual_tokens: int | None = None,
) -> EpisodeSampler | None:
    """Build what samples episodes of many turns, if the config has an agent, tools or environment.

    Args:
        config: of episodes.
        tokens: the policy's tokenizer, and the tokens that end a turn.
        rows: of the data; tools are tried with the first.
        template_kwargs: variables of the chat template.
        prompt_tokens: the longest prompt.
        stack: ends the tools' processes.
        processor: as for `EpisodeSampler`.
        visual_tokens: as there.

    Raises:
        ConfigError: as for `EpisodeSampler`.
    """
    if not config.has_episodes:
        return None
    episodes = EpisodeSampler(
        config,
        *tokens,
        template_kwargs=template_kwargs,
        prompt_tokens=prompt_tokens,
        example=as_episode_row(rows[0]),
        processor=processor,
        visual_tokens=visual_tokens,
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


def episode_limits(
    config: AgentConfig, new_tokens: int, prompt_tokens: int, visual_tokens: int | None
) -> EpisodeLimits:
    """Return what bounds an episode."""
    limits = config.limits
    return EpisodeLimits(
        new_tokens=new_tokens,
        prompt_tokens=prompt_tokens,
        turns=limits.turns,
        turn_tokens=limits.turn_tokens,
        observation_tokens=limits.observation_tokens,
        parallel_calls=limits.parallel_calls,
        visual_tokens=visual_tokens,
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
