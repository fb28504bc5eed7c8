"""Text streams that can't hold a run up: stdout in the background, and log lines on stderr."""

import atexit
import collections
import contextlib
import errno
import io
import logging
import os
import select
import sys
from typing import Any

from jaxrl_llm.monitoring.activity import ACTIVITIES
from jaxrl_llm.monitoring.writer import PENDING, BackgroundWriter

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
