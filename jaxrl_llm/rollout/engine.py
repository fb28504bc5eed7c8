"""What every engine that samples from the policy can do."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.functions import RunError
from jaxrl_llm.types import Completion, Receipt, Request


class EngineError(RunError):
    """A request that an engine can't serve, or an engine that failed."""


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and log-probs out, under a known version of the weights."""

    async def generate(self, request: Request) -> Completion:
        """Sample one answer; cancelling the coroutine gives the request up.

        Raises:
            EngineError: the request does not fit, the engine is closed or has no weights.
        """
        ...

    def stream(self, request: Request) -> AsyncIterator[Completion]:
        """Sample one answer and yield its pieces as they come; the last one has a `finish`.

        Raises:
            EngineError: as `generate`.
        """
        ...

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order; requests may share their prompt."""
        ...

    def load(self, params: Any, version: int) -> Receipt:
        """Take new weights into the engine's layout and echo their version and checksum."""
        ...

    def pause(self) -> None:
        """Start nothing new until `resume`; what has started goes on."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def sleep(self) -> None:
        """Pause, and free the cache."""
        ...

    def wake(self) -> None:
        """Allocate the cache again and resume."""
        ...

    def close(self) -> None:
        """Stop; requests that wait fail."""
        ...
