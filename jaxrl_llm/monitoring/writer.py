"""What takes records to slow or failing places without holding a run up.

A `BackgroundWriter` has a thread and a bounded queue of its own for each sink. What a sink can't
take is dropped and counted; what the sink does, or fails to do, never reaches the run.
"""

import atexit
import collections
import contextlib
import errno
import io
import logging
import os
import select
import sys
import threading
import time
import warnings
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrl_llm.monitoring.activity import ACTIVITIES
from jaxrl_llm.sharding import distributed

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


PIECE = 1000
"""Characters written at once: at most 4000 bytes, for which a pipe that is ready has room."""


class Stream:
    """A text stream of the process, written only when it takes what is written.

    So nothing hangs in a write, with the stream's lock, when the other side has stopped reading.
    Once stdout's reader is gone for good, what others print there is discarded, too: it would be an
    error wherever they print.

    Args:
        name: for messages.
        stream: stdout or stderr, or what stands in for them.
    """

    def __init__(self, name: str, stream: Any) -> None:
        """Make sure that the interpreter can end, whatever becomes of the stream."""
        self.name, self._stream, self._is_writing = name, stream, False
        self._is_broken = False
        self._is_own = stream in (sys.__stdout__, sys.__stderr__)
        if self._is_own:
            atexit.register(self._let_go)

    def open(self) -> None:
        """Do nothing: it is open."""

    def write(self, record: str, /) -> None:
        """Write a text as soon as it is taken."""
        self.write_within(record, None)

    def close(self) -> None:
        """Leave it open for others."""

    def write_within(self, text: str, timeout_s: float | None) -> str:
        """Write as much of a text as is taken, waiting so long for each piece; return the rest."""
        if self._is_broken:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        for start in range(0, len(text), PIECE):
            if not self._takes(timeout_s):
                return text[start:]
            self._write_piece(text[start : start + PIECE])
        return ""

    def _write_piece(self, text: str) -> None:
        self._is_writing = True
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            if self._is_own:
                self._discard().close()
                self._is_broken = True
            raise
        finally:
            self._is_writing = False

    def _takes(self, timeout_s: float | None) -> bool:
        try:
            return bool(select.select([], [self._stream.fileno()], [], timeout_s)[1])
        except ValueError:  # no file of the system: a StringIO, a notebook
            return True

    def _let_go(self) -> None:
        """Discard what is left in the stream if it can't be written, when the interpreter ends.

        Python itself would wait for it, or print an error and change the exit status to 120.
        """
        try:
            if not self._is_writing and self._takes(0.0):
                self._stream.flush()
                return
        except (OSError, ValueError):
            pass
        nothing = self._discard()
        if self._is_writing:  # a thread has the stream's lock for ever
            if self._stream is sys.__stdout__:
                sys.stdout = sys.__stdout__ = nothing
            else:
                sys.stderr = sys.__stderr__ = nothing

    def _discard(self) -> Any:
        """Let what is written to the stream go nowhere, and return a file that does so as well."""
        nothing = open(os.devnull, "w")  # noqa: SIM115, PTH123 - as long as the process lives
        os.dup2(nothing.fileno(), self._stream.fileno())
        return nothing


class BackgroundFile(io.TextIOBase):
    """A text file whose writes go to a stream in the background; rich's console writes to it.

    A new picture of a progress bar, which is drawn again soon, is left out while texts wait.

    Args:
        writer: of the stream.
        stream: says what it is.
    """

    def __init__(self, writer: BackgroundWriter[str], stream: Any) -> None:
        """Write nothing yet."""
        self._writer, self._stream = writer, stream

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the stream's encoding."""
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def write(self, text: str, /) -> int:
        """Hand a text over."""
        is_picture = text.startswith("\r") and "\n" not in text
        if not (is_picture and self._writer.waiting):
            self._writer.write(text)
        return len(text)


class StderrHandler(logging.Handler):
    """Writes log lines to stderr at once, or where it does not take them, before the next line.

    The oldest of more than a thousand lines that wait are dropped.
    """

    def __init__(self) -> None:
        """Write to what is stderr now."""
        super().__init__()
        self._stream = Stream("stderr", sys.stderr)
        self._kept: collections.deque[str] = collections.deque(maxlen=PENDING)
        atexit.register(self.flush)  # before the stream lets go

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, and those that wait."""
        ACTIVITIES.say()
        try:
            self._kept.append(self.format(record) + "\n")
        except Exception:
            self.handleError(record)
        self._write(0.0)

    def flush(self) -> None:
        """Write the lines that wait; give up where stderr takes nothing for a second."""
        with contextlib.ExitStack() as stack:
            if self.lock:
                stack.enter_context(self.lock)
            self._write(1.0)

    def _write(self, timeout_s: float) -> None:
        while self._kept:
            try:
                rest = self._stream.write_within(self._kept[0], timeout_s)
            except (OSError, ValueError):  # closed, or on a full disk: there is nowhere to say so
                rest = ""
            if rest:
                self._kept[0] = rest
                return
            self._kept.popleft()


def log_to_stderr(level: int, line: str) -> None:
    """Let the root logger write to stderr by a `StderrHandler`, in place of Python's own handler.

    Handlers of other kinds stay, and a root logger that has some is left as it is.

    Args:
        level: of the root logger.
        line: format of a line, as logging takes it.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h) in (logging.StreamHandler, StderrHandler)]:
        root.removeHandler(handler)
    if not root.handlers:
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter(line))
        root.addHandler(handler)
        root.setLevel(level)


_shown = sys.unraisablehook


def quiet_libraries() -> None:
    """Keep libraries' chatter off the screen; warnings and errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, in a notebook
    who = f"process {distributed.process_index()} " if distributed.process_count() > 1 else ""
    log_to_stderr(logging.WARNING, f"%(levelname)s {who}%(name)s: %(message)s")
    for name in ("huggingface_hub", "datasets"):  # they print by themselves, too
        logging.getLogger(name).propagate = False
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # it warns of each NaN
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax raises its errors, too
    logging.getLogger("jaxrl_llm").setLevel(
        logging.INFO if distributed.is_first() else logging.WARNING
    )
    global _shown
    if sys.unraisablehook is not _show_unraisable:
        _shown, sys.unraisablehook = sys.unraisablehook, _show_unraisable


def _show_unraisable(unraisable: Any) -> None:
    """Leave out what comes back to orbax after its first error, which the run reports."""
    late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
    if not late:
        _shown(unraisable)
