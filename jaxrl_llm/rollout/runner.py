"""Many episodes at once: who waits for whom, and what becomes of those that fail."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxrl_llm.config.errors import RunError, described_error
from jaxrl_llm.rollout.chat import BrokenEpisode, Chat, EpisodeEnd, Generate
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.episode import Episode
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
    """

    def __init__(self, engine: Engine, episodes: int) -> None:
        """Wait for all episodes."""
        self._engine, self._live = engine, episodes
        self._waiting: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._round: asyncio.Task[None] | None = None

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

    def leave(self) -> None:
        """Wait for one episode less."""
        self._live -= 1
        self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._live and self._round is None:
            self._round = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        asked = [self._waiting[number] for number in sorted(self._waiting)]
        self._waiting = {}
        try:
            requests = [request for request, _ in asked]
            completions = await asyncio.to_thread(self._engine.sample, requests)
        except BaseException as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(EngineFailure(error))
        else:
            for (_, future), completion in zip(asked, completions, strict=True):
                if not future.done():  # else its episode ran out of time
                    future.set_result(completion)
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
) -> list[Episode]:
    """Run episodes at once; return them in their order.

    Args:
        episodes: each takes what samples its turns.
        engine: samples.
        lockstep: sample in rounds.

    Raises:
        Exception: what the engine raised; all episodes are given up.
    """
    rounds = Rounds(engine, len(episodes)) if lockstep else None

    async def run(number: int) -> Episode:
        generate = sampled_freely(engine) if rounds is None else rounds.generate(number)
        try:
            return await episodes[number](generate)
        finally:
            if rounds is not None:
                rounds.leave()

    tasks = [asyncio.create_task(run(number)) for number in range(len(episodes))]
    try:
        return list(await asyncio.gather(*tasks))
    except EngineFailure as failure:
        raise failure.error from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
