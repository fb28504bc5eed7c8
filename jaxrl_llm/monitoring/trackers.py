"""What takes a run's metrics to trackers without holding it up: TensorBoard, Weights & Biases.

A `BackgroundWriter` has a thread and a bounded queue of its own for each sink. What a sink can't
take is dropped and counted; what the sink does, or fails to do, never reaches the run.
"""

import collections
import contextlib
import hashlib
import itertools
import logging
import socket
import struct
import threading
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrl_llm.config.errors import ConfigError

log = logging.getLogger(__name__)

PENDING = 1000
"""Records that wait for a sink at most."""

Record = TypeVar("Record")
Taken = TypeVar("Taken", contravariant=True)
Row = tuple[int, Mapping[str, float]]
"""A step, and its metrics."""


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


Tracker = Sink[Row]
"""A sink of metrics."""


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
        self._writing = self._dropped = 0
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

    def close(self, timeout_s: float) -> None:
        """Write what waits and close the sink; after `timeout_s` leave it as it is."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
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
            except Exception as error:
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
        except Exception as error:
            self._end_delivery(error)
        else:
            self._end_delivery(None)

    def _end_delivery(self, error: Exception | None) -> None:
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


# --------------------------------------------------------------------------------------- trackers


HEADLINES = ("critic/score/mean", "train/loss")
"""Metrics beside the hyper-parameters in TensorBoard, where a run has them."""


def dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return the values of a nested mapping by their dotted keys; lists as text, without nulls.

    >>> dotted_keys({"a": {"b": 1, "c": [2, 3]}, "d": None})
    {'a.b': 1, 'a.c': '[2, 3]'}
    """
    flat: dict[str, bool | int | float | str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= dotted_keys(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, bool | int | float) else str(value)
    return flat


class TensorBoard:
    """Event files in a folder; a step is one event, which is written at once.

    Readers stop at an event that is broken, so a file that could not be written is cut back to its
    last whole event, and the next event begins a new file. Its name sorts behind the others,
    whatever the clock says by then.

    Args:
        folder: of the files.
        step: the first one; later ones that a run before this one wrote are not shown.
        config: the resolved config, which is shown as text and as hyper-parameters.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any] | None = None) -> None:
        """Import the library; nothing is written yet."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import hparams, scalar, text

        keys = dotted_keys(config or {})
        listing = "\n".join(f"    {key}: {value}" for key, value in keys.items())  # as markdown
        self._about: list[Any] = []
        if keys:
            self._about = [text("config", listing), *hparams(keys, dict.fromkeys(HEADLINES))]

        self._protocol: Any = event_pb2
        self._scalar, self._checksum = scalar, masked_crc32c
        self._folder, self._step, self._whole = folder, step, 0
        started = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._names = (f"{started}.{number:06}" for number in itertools.count())
        self._file: FileIO | None = None

    def open(self) -> None:
        """Begin a file, with the mark that hides what an earlier run wrote of these steps."""
        started = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
        self._append(self._protocol.Event(step=self._step, session_log=started))
        for summary in self._about:
            self._append(self._protocol.Event(step=self._step, summary=summary))

    def write(self, record: Row, /) -> None:
        """Write a step."""
        step, metrics = record
        event = self._protocol.Event(step=step)
        for name, value in metrics.items():
            event.summary.MergeFrom(self._scalar(name, value))
        self._append(event)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, event: Any) -> None:
        event.wall_time = time.time()
        content = self._framed(event)
        if self._file is None:
            version = self._protocol.Event(wall_time=event.wall_time, file_version="brain.Event:2")
            content = self._framed(version) + content
            self._file, self._whole = self._new_file(), 0
        try:
            left = memoryview(content)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._leave_file(self._file)
            raise
        self._whole += len(content)

    def _framed(self, event: Any) -> bytes:
        """Return an event as it stands in a file: its length and itself, each with a checksum."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        parts = [part + struct.pack("<I", self._checksum(part)) for part in (length, content)]
        return b"".join(parts)

    def _new_file(self) -> FileIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                return (self._folder / next(self._names)).open("xb", buffering=0)

    def _leave_file(self, file: FileIO) -> None:
        """Leave a file with whole events only; the next event begins another one."""
        self._file = None
        with contextlib.suppress(OSError):
            if self._whole:
                file.truncate(self._whole)
            else:
                Path(str(file.name)).unlink()
        with contextlib.suppress(OSError):
            file.close()


class WeightsAndBiases:
    """A run at Weights & Biases; a run folder that is continued continues its run there.

    Args:
        project: name of the project.
        run_dir: folder of the run.
        config: the resolved config.

    Raises:
        ConfigError: the package is not installed.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Import the package; nothing is sent yet."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"log.wandb={project!r} needs the package wandb: pip install 'jaxrl_llm[wandb]'"
            ) from error
        self._client: Any = wandb
        self._settings = {
            "project": project,
            "id": hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16],
            "name": run_dir.name,
            "dir": run_dir,
            "config": dict(config),
            "resume": "allow",  # the folder's own run, when it is continued
        }
        self._run: Any = None

    def open(self) -> None:
        """Begin the run, or continue it."""
        self._run = self._client.init(**self._settings)

    def write(self, record: Row, /) -> None:
        """Send a step."""
        step, metrics = record
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
