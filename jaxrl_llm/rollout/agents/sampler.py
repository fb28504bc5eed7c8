"""Sampling of many episodes at once: agents, tools and environments around an engine."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, RunError, config_errors_at, described_error
from jaxrl_llm.config.functions import FunctionSpec, closest, load_function
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.chat import Message
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.rollout.agents.chat import (
    BrokenEpisode,
    Chat,
    EpisodeEnd,
    EpisodeEnvironment,
    Generate,
    MessageContents,
    Tools,
    record,
)
from jaxrl_llm.rollout.engine import (
    Completion,
    Engine,
    EpisodeLimits,
    Request,
    SamplingParams,
    Stop,
)
from jaxrl_llm.rollout.gateway.programs import check_program
from jaxrl_llm.rollout.gateway.server import Gateway, check_server_packages
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.rollouts import (
    Episode,
    EpisodeState,
    OnEnd,
    Rollouts,
    as_rollouts,
    begin_episodes,
    sample_first,
    sampling_activity,
    tool_seed,
)
from jaxrl_llm.rollout.tools.session import Journal, SessionPool
from jaxrl_llm.rollout.tools.tool import (
    TOOLS_KEY,
    check_tool,
    load_environment,
    load_tools,
    tool_schema,
)
from jaxrl_llm.workers.pool import Limits

T = TypeVar("T")

log = logging.getLogger(__name__)


class Rounds:
    """Samples in rounds: once each episode that is left waits for a turn, all turns are sampled.

    Which turns are computed together then depends on what the episodes hold, and not on the time
    that tools take: the results are the same bit for bit.

    Args:
        engine: samples.
        episodes: how many there are.
        needed: once the first so many have left, no further round begins. Until then a round ends
            when their turns are whole; the others' turns go on in the next one.
        stop: once it is set, a round ends with what it has, and no further one begins.
    """

    def __init__(self, engine: Engine, episodes: int, needed: int, stop: Stop | None) -> None:
        """Wait for all episodes."""
        self._engine, self._live, self._needed = engine, set(range(episodes)), needed
        self._stop = stop
        self._waiting: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._round: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()

    def generate(self, number: int) -> Generate:
        """Return what samples the turns of an episode."""

        async def wait_for_turn(request: Request) -> Completion:
            future = asyncio.get_running_loop().create_future()
            self._waiting[number] = request, future
            self._begin_if_complete()
            try:
                return await future
            finally:
                self._waiting.pop(number, None)

        return wait_for_turn

    def leave(self, number: int) -> None:
        """Wait for one episode less."""
        self._live.discard(number)
        self._begin_if_complete()

    async def settle(self) -> None:
        """Wait until each episode that is left waits for a turn, whatever time its tools take."""
        while self._waiting.keys() != self._live:
            self._settled.clear()
            await self._settled.wait()

    def unfinished(self) -> dict[int, Completion]:
        """Return what is drawn of the turns that wait, by episode."""
        waiting = {number: request.drawn for number, (request, _) in self._waiting.items()}
        return {number: drawn for number, drawn in waiting.items() if drawn is not None}

    def _begin_if_complete(self) -> None:
        self._settled.set()  # or not: `settle` looks
        is_needed = any(number < self._needed for number in self._live)
        is_needed &= self._stop is None or not self._stop.is_set
        if is_needed and self._waiting.keys() == self._live and self._round is None:
            self._round = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        asked = {number: self._waiting[number] for number in sorted(self._waiting)}
        self._waiting = {}
        needed = sum(number < self._needed for number in asked)
        try:
            requests = [request for request, _ in asked.values()]
            completions = await asyncio.to_thread(
                sample_first, self._engine, requests, needed, self._stop
            )
        except BaseException as error:
            for _, future in asked.values():
                if not future.done():
                    future.set_exception(EngineFailure(error))
        else:
            for (number, (request, future)), completion in zip(
                asked.items(), completions, strict=True
            ):
                if future.done():
                    continue  # its episode ran out of time
                if completion.finish:
                    future.set_result(completion)
                else:
                    drawn = completion if len(completion.tokens) else None
                    self._waiting[number] = replace(request, drawn=drawn), future
        self._round = None
        self._begin_if_complete()


class EngineFailure(Exception):
    """Carries what the engine raised past the agents, which must not take it for their own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def after_turns(state: EpisodeState, generate: Generate) -> Generate:
    """Return what samples the turns of an episode: those that it has, by seed, and new ones.

    New turns are added to it.
    """

    async def turn(request: Request) -> Completion:
        place = next((i for i, seed in enumerate(state.seeds) if seed == request.seed), None)
        begun = None if place is None else state.turns[place]
        if begun is not None and begun.finish:
            return begun
        state.asked = request.seed
        completion = await generate(replace(request, drawn=begun))
        if place is None:
            state.seeds.append(request.seed)
            state.turns.append(completion)
        else:
            state.turns[place] = completion
        return completion

    return turn


async def run_episode(
    agent: Callable[[], Awaitable[Any]], chat: Chat, timeout_s: float | None
) -> Episode:
    """Let an agent lead an episode to its end.

    Args:
        agent: to await.
        chat: of the episode.
        timeout_s: after so many seconds the episode ends with what it has.

    Returns:
        The episode; a broken one where the agent raised.

    Raises:
        EngineFailure: the engine failed.
        RunError: tools can't be run at all.
    """
    begun, error, timer = time.monotonic(), None, asyncio.timeout(timeout_s)
    try:
        async with timer:
            await agent()
    except EpisodeEnd:
        pass
    except (EngineFailure, RunError):
        raise
    except BrokenEpisode as broken:
        error = str(broken)
    except TimeoutError as raised:
        if not timer.expired():
            error = described_error(raised)
        else:
            chat.end("timeout")
    except Exception as raised:
        log.warning("an agent raised", exc_info=raised)
        error = described_error(raised)
    if error is None and not chat.turn:
        error = "no turn was drawn"
    return chat.episode(time.monotonic() - begun, error)


async def run_all(
    episodes: Sequence[Callable[[Generate], Awaitable[Episode]]],
    engine: Engine,
    *,
    lockstep: bool,
    needed: int,
    stop: Stop | None = None,
) -> tuple[list[Episode | None], dict[int, Completion]]:
    """Run episodes at once, until the first of them have ended; the others are left then.

    Args:
        episodes: each takes what samples its turns.
        engine: samples.
        lockstep: sample in rounds.
        needed: how many have to end.
        stop: once it is set, all are left that have not ended.

    Returns:
        The episodes in order, None where one has not ended; and what is drawn of the turns of
        these, by number.

    Raises:
        Exception: what the engine raised; all episodes are given up.
    """
    rounds = Rounds(engine, len(episodes), needed, stop) if lockstep else None

    async def sample_at_once(request: Request) -> Completion:
        try:
            return await engine.generate(request)
        except Exception as error:
            raise EngineFailure(error) from error

    async def run(number: int) -> Episode:
        generate = sample_at_once if rounds is None else rounds.generate(number)
        try:
            return await episodes[number](generate)
        finally:
            if rounds is not None:
                rounds.leave(number)

    tasks = [asyncio.create_task(run(number)) for number in range(len(episodes))]
    unfinished = {}
    try:
        await first_of(asyncio.gather(*tasks[:needed]), stop)
        if rounds is not None:
            await rounds.settle()
            unfinished = rounds.unfinished()
    except EngineFailure as failure:
        raise failure.error from None
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for result in ended:
        if isinstance(result, Exception):
            raise result.error if isinstance(result, EngineFailure) else result
    return [result if isinstance(result, Episode) else None for result in ended], unfinished


async def first_of(ended: asyncio.Future[Any], stop: Stop | None) -> None:
    """Wait until something has ended, or it is to stop."""
    if stop is None:
        await ended
        return
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: all had ended before
            loop.call_soon_threadsafe(told.set)

    stop.on_set(tell)
    waiting = asyncio.create_task(told.wait())
    await asyncio.wait([ended, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if ended.done():
        ended.result()


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in an event loop of its own.

    Where this thread has one that runs, as that of a notebook, another thread does it.
    """
    try:
        is_inside = asyncio.get_running_loop() is not None
    except RuntimeError:
        is_inside = False
    if not is_inside:  # outside of the handler, so that errors of the work do not come "during" it
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "episodes") as executor:
        return executor.submit(asyncio.run, work).result()


GIVEN = ("chat", "tools", "environment", "row", "rng", "gateway")
"""What an agent may ask for by parameter name."""


def load_agent(config: AgentConfig) -> Callable[..., Any]:
    """Return the agent of a config.

    Raises:
        ConfigError: there is no such coroutine function, it asks for what there is not, or does
            not ask for tools or an environment that the config has.
    """
    default = "with_environment" if config.environment else "with_tools"
    spec = config.agent or FunctionSpec(default)
    agent = load_function(spec, functions.AGENTS, passed=None, key="rollout.agent")
    function = agent.func if isinstance(agent, functools.partial) else agent
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.agent: {spec.fn!r} is no coroutine, expected `async def`")
    for name in asked_by(agent):
        if name not in GIVEN:
            raise ConfigError(
                f"rollout.agent: {spec.fn!r} asks for {name!r}, which no episode has; "
                + closest(name, GIVEN)
            )
    if config.tools and "tools" not in asked_by(agent):
        raise ConfigError(
            f"rollout.tools is set, but the agent {spec.fn!r} does not ask for `tools`: no tool "
            "would ever be called"
        )
    if (config.environment is not None) != ("environment" in asked_by(agent)):
        state = "is set" if config.environment is not None else "is null"
        does = "asks" if "environment" in asked_by(agent) else "does not ask"
        raise ConfigError(
            f"rollout.environment {state}, but the agent {spec.fn!r} {does} for `environment`"
        )
    if function.__name__ == "openai_program":
        check_program(spec.kwargs)
        check_server_packages()
    return agent


def check_episode_functions(config: AgentConfig) -> None:
    """Import the agent, the tools and the environment of a config, before anything else is loaded.

    Raises:
        ConfigError: one of them is not there, does not fit, or can't be had on this machine.
    """
    load_agent(config)
    for spec in config.tools:
        for tool in load_tools(spec):
            if tool.schema is None and not tool.is_fixture:
                tool_schema(tool.definition, tool.name, hidden=spec.kwargs, key=TOOLS_KEY)
        check_tool(spec, config.tool_process.timeout_s)
    if config.environment is not None:
        load_environment(config.environment)


def asked_by(agent: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that an agent asks for."""
    return tuple(
        name
        for name, p in inspect.signature(agent).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    )


DRIFT_SAMPLE = 8
"""Episodes of a step whose streams are compared with the template's rendering."""


class EpisodeSampler:
    """Samples episodes of many turns; the counterpart of `rollout.rollouts.sample`.

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
        self._prompt_tokens, self._visual_tokens = prompt_tokens, visual_tokens
        self._agent = load_agent(config)
        template = functools.partial(
            TurnTemplate,
            tokenizer,
            stops,
            call_format=config.call_format,
            template_kwargs=template_kwargs,
        )
        self._gateway = None
        if "gateway" in asked_by(self._agent):
            process, lockstep = config.tool_process, config.order == "lockstep"
            limits = Limits(process.memory_gb, process.max_processes, process.pass_env)
            self._gateway = Gateway(
                lambda tools: template(tools=tools), limits, one_at_a_time=lockstep
            )
        self._pool = SessionPool(config, example_row=example)
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
        config = self._agent_config
        called = [spec for spec in (*config.tools, config.environment) if spec is not None]
        with sampling_activity(begun), contextlib.ExitStack() as stack:
            journals = dict[tuple[int, ...], Journal | None]()
            for draw in dict.fromkeys(state.draw for state in begun):
                path = journal(draw) if called else None
                settings = repr((draw, [spec.as_config() for spec in called]))
                journals[draw] = path and stack.enter_context(Journal(path, config=settings))
            runs = [
                functools.partial(self._run, state, sampling, journals[state.draw], on_end)
                for state in begun
            ]
            lockstep = config.order == "lockstep"
            episodes, unfinished = run_in_loop(
                run_all(runs, engine, lockstep=lockstep, needed=len(first), stop=stop)
            )
        for number, (state, episode) in enumerate(zip(begun, episodes, strict=True)):
            state.episode = state.episode or episode
            if number in unfinished:
                state.keep_unfinished(unfinished[number])

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
        journal: Journal | None,
        on_end: OnEnd | None,
        generate: Generate,
    ) -> Episode:
        generate = after_turns(state, generate)
        prompt, seed, limits = state.prompt, state.seed, self._agent_config.limits
        chat = Chat(
            prompt,
            self._template,
            generate,
            sampling,
            EpisodeLimits(
                sampling.max_new_tokens,
                self._prompt_tokens,
                limits.turns,
                limits.turn_tokens,
                limits.observation_tokens,
                limits.parallel_calls,
                self._visual_tokens,
            ),
            seed=seed,
            contents=MessageContents(self._tokenizer, self._processor),
        )
        row = EpisodeRow(
            prompt.index,
            prompt.data_source,
            prompt.ground_truth,
            prompt.extra_info,
            prompt.messages,
        )
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
                last = await session.end()
                if last.reward or last.failure is not None:
                    record(chat, last._replace(end=False))

        try:
            episode = await run_episode(lead, chat, limits.timeout_s)
            if on_end is not None:
                state.episode = episode
                on_end(state)
            return episode
        finally:
            await asyncio.shield(session.close())

    def check_broken(self, episodes: Sequence[Episode]) -> None:
        """Log how many episodes are broken, with the most frequent reason.

        Raises:
            RunError: they are too many.
        """
        errors = [episode.error for episode in episodes if episode.error is not None]
        broken, share = len(errors), self._agent_config.limits.broken_share
        if broken:
            (reason, times), *_ = Counter(errors).most_common(1)
            message = "%d of %d episodes are broken; %d of them: %s"
            log.warning(message, broken, len(episodes), times, reason)
        if broken > share * len(episodes) or broken == len(episodes):
            raise RunError(
                f"{broken} of {len(episodes)} episodes are broken, expected at most "
                f"{share:g} of them (limits.broken_share), and not all; the first: {errors[0]}"
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
    row = rows[0]
    truth, extra = row["reward_model"]["ground_truth"], row.get("extra_info") or {}
    episodes = EpisodeSampler(
        config,
        *tokens,
        template_kwargs=template_kwargs,
        prompt_tokens=prompt_tokens,
        example=EpisodeRow(0, row["data_source"], truth, extra, row["prompt"]),
        processor=processor,
        visual_tokens=visual_tokens,
    )
    stack.callback(episodes.close)
    return episodes
