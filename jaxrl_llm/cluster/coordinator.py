"""Where the processes of a job on a cluster leave what others look for."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any


class Board:
    """An asynchronous Ray actor: what the first process shows, counts, and where weights lie.

    Weights themselves stay in the object stores of the nodes; the board has references to them.

    Args:
        processes: that train, each of which publishes its parts of the weights.
        counts: of the job's earlier starts, as `counts` returned them.
    """

    def __init__(self, processes: int, counts: Mapping[str, int]) -> None:
        """Know nothing else."""
        self._processes = processes
        self._shown: list[tuple[str, tuple[Any, ...]]] = []
        self._failure: tuple[str, str] | None = None
        self._counts = defaultdict(int, counts)
        self._engines: dict[int, Any] = {}
        self._left: dict[int, tuple[Any, int]] = {}
        self._ending = False
        self._push = -1
        self._parts: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by bucket and process
        self._changed = asyncio.Condition()

    async def show(self, method: str, *arguments: Any) -> None:
        """Keep a call of a display's method until the launcher takes it."""
        self._shown.append((method, arguments))

    async def take(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return what was shown since the last time."""
        found, self._shown = self._shown, []
        return found

    async def fail(self, error: tuple[str, str]) -> None:
        """Note the error for which a process ends: its class and its text. The first one counts."""
        self._failure = self._failure or error

    async def failure(self) -> tuple[str, str] | None:
        """Return that error."""
        return self._failure

    async def end(self) -> None:
        """Note that the job is to save and to end."""
        self._ending = True

    async def is_ending(self) -> bool:
        """Return whether it is."""
        return self._ending

    async def count(self, name: str, more: int) -> None:
        """Add to a count."""
        self._counts[name] += more

    async def came(self, number: int, machine: Any) -> None:
        """Note where an engine runs, and count those that came in another's place."""
        self._counts["engine_restarts"] += number in self._engines
        self._engines[number] = machine

    async def engines(self) -> list[Any]:
        """Return where the engines run."""
        return list(self._engines.values())

    async def counts(self) -> dict[str, int]:
        """Return all counts."""
        return dict(self._counts)

    async def leave(self, turn: int, reference: list[Any]) -> None:
        """Note where the first process has left something, until each of the others has asked."""
        self._left[turn] = (reference[0], self._processes - 1)

    async def left(self, turn: int) -> Any:
        """Return the reference to it."""
        reference, waiting = self._left.pop(turn)
        if waiting > 1:
            self._left[turn] = (reference, waiting - 1)
        return reference

    async def publish(self, push: int, bucket: int, process: int, reference: list[Any]) -> None:
        """Note where a process's parts of a bucket lie; those of the push before are forgotten.

        Args:
            push: which one, from 0 on.
            bucket: which part of the arrays.
            process: which one this is.
            reference: of the object store, in a list, else Ray would send the object itself.
        """
        async with self._changed:
            if push > self._push:
                self._push, self._parts = push, defaultdict(dict)
            self._parts[bucket][process] = reference[0]
            self._changed.notify_all()

    async def parts(self, push: int, bucket: int) -> list[Any]:
        """Return the references to a bucket's parts, as soon as all processes have published.

        Raises:
            LookupError: a later push has begun.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._push > push
                    or (self._push == push and len(self._parts[bucket]) == self._processes)
                )
            )
            if self._push > push:
                raise LookupError(f"push {push} is over, as push {self._push} has begun")
            found = self._parts[bucket]
            return [found[process] for process in sorted(found)]
