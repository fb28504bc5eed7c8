"""What takes records to slow or failing places without holding a run up.

A `BackgroundWriter` has a thread and a bounded queue of its own for each sink. What a sink can't
take is dropped and counted; what the sink does, or fails to do, never reaches the run.
"""

import collections
import logging
import threading
import time
from typing import Generic, Protocol, TypeVar, runtime_checkable

log = logging.getLogger(__name__)

PENDING = 1000
"""Records that wait for a sink at most."""

Record = TypeVar("Record")
Taken = TypeVar("Taken", contravariant=True)


@runtime_checkable
class Sink(Protocol[Taken]):
    """Where records go. A thread of its own calls it, so it may block and raise.

    Attributes:
        name: for messages.
    """

    name: str

    def open(self) -> None:
        """Begin; called before the first record, and again after it has raised."""
        ...

    def write(self, record: Taken, /) -> None:
        """Write a record for good."""
        ...

    def close(self) -> None:
        """End, if it was opened."""
        ...


class Outages:
    """Logs once when something can't be written, and once when it can again.

    Args:
        name: of what is written.
        meanwhile: what is done with what can't be written.
    """

    def __init__(self, name: str, meanwhile: str) -> None:
        """Take for granted that it works."""
        self._name, self._meanwhile = name, meanwhile
        self._is_out, self._told = False, 0

    def begin(self, error: BaseException) -> None:
        """Log an error, unless it is one of several in a row."""
        if not self._is_out:
            known = error.strerror if isinstance(error, OSError) else None
            text = known or f"{type(error).__name__}: {error}"
            log.warning(
                "can't write to %s: %s; %s until it works", self._name, text, self._meanwhile
            )
        self._is_out = True

    def end(self, dropped: int) -> None:
        """Log that it works, if it did not before, and how many of all `dropped` are new."""
        if self._is_out or dropped > self._told:
            log.warning("%s works again; records dropped: %d", self._name, dropped - self._told)
        self._is_out, self._told = False, dropped

    def close(self, dropped: int) -> None:
        """Log what was dropped and is not told yet."""
        if dropped > self._told:
            log.warning("%s: records dropped at the end: %d", self._name, dropped - self._told)
        self._told = dropped


class BackgroundWriter(Generic[Record]):
    """A thread that hands records to a sink, in their order.

    Args:
        sink: opened, written and closed in the thread.
        limit: records that wait; the oldest is dropped for one more.
    """

    def __init__(self, sink: Sink[Record], *, limit: int = PENDING) -> None:
        """Start the thread, which opens the sink."""
        self._sink, self._limit = sink, limit
        self._pending: collections.deque[Record] = collections.deque()
        self._changed = threading.Condition()
        self._writing, self._dropped, self._ended_at = 0, 0, 0.0
        self._is_open = self._is_behind = self._is_closing = self._is_left = False
        self._outages = Outages(sink.name, "records are dropped")
        self._thread = threading.Thread(target=self._run, name=f"writer: {sink.name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Return how many records were not written, so far."""
        with self._changed:
            return self._dropped

    @property
    def waiting(self) -> int:
        """Return how many records are still to be written."""
        with self._changed:
            return len(self._pending) + self._writing

    def write(self, record: Record) -> None:
        """Take a record, to be written soon or dropped. Does not block or raise."""
        with self._changed:
            if self._is_closing:
                self._dropped += 1
                return
            is_full = len(self._pending) >= self._limit
            if is_full:
                self._pending.popleft()
                self._dropped += 1
            self._pending.append(record)
            is_news = is_full and not self._is_behind
            self._is_behind |= is_full
            self._changed.notify()
        if is_news:
            log.warning(
                "%s does not keep up: %d records wait, the oldest are dropped until it does",
                self._sink.name,
                self._limit,
            )

    def end(self) -> None:
        """Take no more records; what waits is still written, and then the sink is closed."""
        with self._changed:
            if not self._is_closing:
                self._is_closing, self._ended_at = True, time.monotonic()
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """End, and wait for it; `timeout_s` after `end` leave the sink as it is."""
        self.end()
        self._thread.join(max(0.0, self._ended_at + timeout_s - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                self._dropped += len(self._pending) + self._writing
                self._pending.clear()
                self._is_left = True
            log.warning(
                "%s has not ended within %g s and is left alone", self._sink.name, timeout_s
            )
        self._outages.close(self.dropped)

    def _run(self) -> None:
        self._deliver([])
        while records := self._take():
            self._deliver(records)
        if self._is_open:
            try:
                self._sink.close()
            except (Exception, SystemExit) as error:
                self._end_delivery(error)

    def _take(self) -> list[Record]:
        """Wait for a record; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            records = [self._pending.popleft()] if self._pending else []
            self._writing = len(records)
            return records

    def _deliver(self, records: list[Record]) -> None:
        """Open the sink if it is not open, and write records; nothing that it raises goes on."""
        try:
            if not self._is_open:
                self._sink.open()
                self._is_open = True
            for record in records:
                self._sink.write(record)
        except (Exception, SystemExit) as error:  # clients of services have called sys.exit
            self._end_delivery(error)
        else:
            self._end_delivery(None)

    def _end_delivery(self, error: BaseException | None) -> None:
        """Count and log how a delivery has ended, unless nobody waits for it any more."""
        with self._changed:
            if self._is_left:
                return
            self._dropped += self._writing if error else 0
            self._writing = 0
            is_done, dropped = not self._pending, self._dropped
            self._is_behind &= not is_done
        if error:
            self._outages.begin(error)
        elif is_done:
            self._outages.end(dropped)
