"""The actor through which the processes of a job on a cluster find each other's data."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any


class Coordinator:
    """An asynchronous Ray actor with what the processes of a job and their launcher share.

    It holds references to weights and answers; these themselves stay in the nodes' object stores.

    Args:
        processes: how many train; each of them publishes its parts of the weights.
        counters: of the job's earlier starts, as `get_counters` returned them.
    """

    def __init__(self, processes: int, counters: Mapping[str, int]) -> None:
        self._processes = processes
        self._display_calls: list[tuple[str, tuple[Any, ...]]] = []
        self._failure: tuple[str, str] | None = None
        self._counters = defaultdict(int, counters)
        self._engines: dict[int, Any] = {}
        self._objects: dict[int, tuple[Any, int]] = {}
        self._stop_requested = False
        self._sync = -1
        self._parts: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by bucket and process
        self._changed = asyncio.Condition()

    async def put_display_call(self, method: str, *arguments: Any) -> None:
        """Keep a call of a display's method until the launcher takes it."""
        self._display_calls.append((method, arguments))

    async def take_display_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the calls since the last time."""
        calls, self._display_calls = self._display_calls, []
        return calls

    async def report_failure(self, error: tuple[str, str]) -> None:
        """Note the error for which a process ends: its class and its text. The first one counts."""
        self._failure = self._failure or error

    async def get_failure(self) -> tuple[str, str] | None:
        """Return that error."""
        return self._failure

    async def request_stop(self) -> None:
        """Have the job save, and end."""
        self._stop_requested = True

    async def is_stop_requested(self) -> bool:
        """Return whether the job is to save and to end."""
        return self._stop_requested

    async def increment(self, counter: str, amount: int) -> None:
        """Add to a counter."""
        self._counters[counter] += amount

    async def get_counters(self) -> dict[str, int]:
        """Return all counters."""
        return dict(self._counters)

    async def register_engine(self, index: int, process: Any) -> None:
        """Note the process in which an engine runs; count those that replace another."""
        self._counters["engine_restarts"] += index in self._engines
        self._engines[index] = process

    async def get_engines(self) -> list[Any]:
        """Return the processes in which the engines run."""
        return list(self._engines.values())

    async def put(self, key: int, reference: list[Any]) -> None:
        """Store the first process's reference, until each of the others has got it."""
        self._objects[key] = (reference[0], self._processes - 1)

    async def get(self, key: int) -> Any:
        """Return the reference under a key."""
        reference, waiting = self._objects.pop(key)
        if waiting > 1:
            self._objects[key] = (reference, waiting - 1)
        return reference

    async def publish(self, sync: int, bucket: int, process: int, reference: list[Any]) -> None:
        """Store the reference to a process's parts of a bucket; those of earlier syncs are dropped.

        Args:
            sync: number of the weight sync, from 0 on.
            bucket: which part of the arrays.
            process: index of the process.
            reference: of the object store, in a list, else Ray would send the object itself.
        """
        async with self._changed:
            if sync > self._sync:
                self._sync, self._parts = sync, defaultdict(dict)
            self._parts[bucket][process] = reference[0]
            self._changed.notify_all()

    async def get_parts(self, sync: int, bucket: int) -> list[Any]:
        """Return the references to a bucket's parts, as soon as all processes have published.

        Raises:
            LookupError: a later sync has begun.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._sync > sync
                    or (self._sync == sync and len(self._parts[bucket]) == self._processes)
                )
            )
            if self._sync > sync:
                raise LookupError(f"weight sync {sync} is over, as sync {self._sync} has begun")
            parts = self._parts[bucket]
            return [parts[process] for process in sorted(parts)]
