"""What bounds a request: how many there are, how long they take, and that somebody waits."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.types import Completion, Request
from jaxrl_llm.serving.fields import APIError

T = TypeVar("T")


class Disconnected(Exception):
    """The client has gone: nobody reads the answer."""


class AdmissionLimiter:
    """Lets so many requests in at once, makes some others wait, and refuses the rest.

    Args:
        running: requests at once.
        waiting: requests that wait.

    >>> async def two():
    ...     limiter = AdmissionLimiter(1, 0)
    ...     async with limiter:
    ...         limiter.check()
    >>> asyncio.run(two())
    Traceback (most recent call last):
    jaxrl_llm.serving.fields.APIError: 1 requests run and 0 wait already: try again later
    """

    def __init__(self, running: int, waiting: int) -> None:
        """Begin empty."""
        self._most, self._free = waiting, asyncio.Semaphore(running)
        self.running = self.waiting = 0

    def check(self) -> None:
        """Refuse a request where there is no room for it.

        Raises:
            APIError: with status 429.
        """
        if self._free.locked() and self.waiting >= self._most:
            raise APIError(
                f"{self.running} requests run and {self.waiting} wait already: try again later",
                status=429,
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

    async def __aenter__(self) -> None:
        """Wait until there is room."""
        self.check()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1

    async def __aexit__(self, *_: object) -> None:
        """Make room."""
        self.running -= 1
        self._free.release()


async def while_connected(
    work: Coroutine[Any, Any, T], receive: Callable[[], Awaitable[Any]], deadline: float
) -> T:
    """Do work as long as its client is there; cancel it when its time is over.

    Args:
        work: what is done.
        receive: of ASGI, with the request's body read to its end.
        deadline: on the event loop's clock.

    Raises:
        Disconnected: the client has gone.
        APIError: with status 504, out of time.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        left = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait(
            tasks, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
        )
        if tasks[0] in done:
            return tasks[0].result()
        if done:
            raise Disconnected
        raise APIError("the request took too long and was given up", status=504, code="timeout")
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_answers(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return the answers to several requests; when one fails, all are given up."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def all_pieces(
    engine: Engine, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, Completion], None]:
    """Yield the pieces of several answers as they come, each with its request's index.

    When one fails, or when this iterator is closed, all are given up.
    """
    pieces: asyncio.Queue[tuple[int, Completion | None]] = asyncio.Queue()

    async def pump(index: int, request: Request) -> None:
        try:
            async for piece in engine.stream(request):
                pieces.put_nowait((index, piece))
        finally:
            pieces.put_nowait((index, None))

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            index, piece = await pieces.get()
            if piece is not None:
                yield index, piece
                continue
            await tasks[index]  # raises what it failed with
            left -= 1
    finally:
        await cancel_all(tasks)
