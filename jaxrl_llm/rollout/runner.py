"""Many episodes at once: who waits for whom, and what becomes of those that fail."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from jaxrl_llm.config.errors import RunError, described_error
from jaxrl_llm.rollout.chat import BrokenEpisode, Chat, EpisodeEnd, Generate
from jaxrl_llm.rollout.engine import Engine, Stop
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.sampling import EpisodeState, sample_first
from jaxrl_llm.rollout.types import Completion, Request

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


def sampled_freely(engine: Engine) -> Generate:
    """Return what samples each turn as soon as it is asked for."""

    async def generate(request: Request) -> Completion:
        try:
            return await engine.generate(request)
        except Exception as error:
            raise EngineFailure(error) from error

    return generate


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


class RanEpisodes(NamedTuple):
    """What came of episodes that were run.

    Attributes:
        episodes: in order; None where one has not ended.
        unfinished: what is drawn of the turns of these, by number.
    """

    episodes: list[Episode | None]
    unfinished: dict[int, Completion]


async def run_all(
    episodes: Sequence[Callable[[Generate], Awaitable[Episode]]],
    engine: Engine,
    *,
    lockstep: bool,
    needed: int,
    stop: Stop | None = None,
) -> RanEpisodes:
    """Run episodes at once, until the first of them have ended; the others are left then.

    Args:
        episodes: each takes what samples its turns.
        engine: samples.
        lockstep: sample in rounds.
        needed: how many have to end.
        stop: once it is set, all are left that have not ended.

    Raises:
        Exception: what the engine raised; all episodes are given up.
    """
    rounds = Rounds(engine, len(episodes), needed, stop) if lockstep else None

    async def run(number: int) -> Episode:
        generate = sampled_freely(engine) if rounds is None else rounds.generate(number)
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
    whole = [result if isinstance(result, Episode) else None for result in ended]
    return RanEpisodes(whole, unfinished)


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


def run_in_loop(make: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine to its end, in an event loop of its own.

    Where this thread has one that runs, as that of a notebook, another thread does it.
    """

    async def run() -> T:
        return await make()

    try:
        asyncio.get_running_loop()
        is_inside = True
    except RuntimeError:
        is_inside = False
    if not is_inside:
        return asyncio.run(run())
    with ThreadPoolExecutor(1, "episodes") as executor:
        return executor.submit(asyncio.run, run()).result()


def log_broken(episodes: Sequence[Episode]) -> None:
    """Log how many episodes are broken, with the most frequent reason."""
    errors = Counter(episode.error for episode in episodes if episode.error is not None)
    if errors:
        (reason, times), *_ = errors.most_common(1)
        log.warning(
            "%d of %d episodes are broken; %d of them: %s",
            *(errors.total(), len(episodes), times, reason),
        )
