"""TensorBoard: event files in the run's folder."""

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from jaxrl_llm.monitoring.trackers.records import (
    Plain,
    TrackedRun,
    TrackedStep,
    Tracker,
    as_table,
    dotted_keys,
)

HEADLINES = ("critic/score/mean", "train/loss")
"""Metrics beside the hyper-parameters in TensorBoard, where a run has them."""

MARKUP = frozenset("\\`*_{}[]()<>#+-.!|&~:$^=\"'/@")
"""What Markdown or HTML may read as more than itself."""


def tensorboard(run: TrackedRun) -> Tracker:
    """Write event files to `tensorboard` in the run's folder."""
    return TensorBoard(run)


def markdown_table(rows: Sequence[Mapping[str, Plain]]) -> str:
    """Return a Markdown table in which a text stands as it is, whatever it looks like.

    >>> print(markdown_table([{"answer": "<b>|", "score": 0.5}]))
    | answer | score |
    |---|---|
    | &#60;b&#62;&#124; | 0&#46;5 |
    """
    columns, values = as_table(rows)
    lines = [[escaped(name) for name in columns]]
    lines += [["" if value is None else escaped(str(value)) for value in row] for row in values]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def escaped(text: str) -> str:
    """Return a text as one line of Markdown.

    >>> escaped("1.\\n[x](y)")
    '1&#46;<br>&#91;x&#93;&#40;y&#41;'
    """
    lines = ("".join(f"&#{ord(c)};" if c in MARKUP else c for c in x) for x in text.splitlines())
    return "<br>".join(lines)


class TensorBoard:
    """Event files in a folder; a step is one event, which is written at once.

    Readers stop at an event that is broken, so a file that could not be written is cut back to its
    last whole event, and the next event begins a new file. Its name sorts behind the others,
    whatever the clock says by then.

    Args:
        run: whose config is shown as text and as hyper-parameters.
    """

    name = "TensorBoard"

    def __init__(self, run: TrackedRun) -> None:
        """Import the library; nothing is written yet."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import histogram_raw, hparams, scalar, text

        keys = dotted_keys(run.config)
        listing = "\n".join(f"    {key}: {value}" for key, value in keys.items())  # as markdown
        self._about: list[Any] = []
        if keys:
            self._about = [text("config", listing), *hparams(keys, dict.fromkeys(HEADLINES))]

        self._protocol: Any = event_pb2
        self._scalar, self._text, self._histogram = scalar, text, histogram_raw
        self._checksum = masked_crc32c
        self._folder, self._step, self._whole = run.folder / "tensorboard", run.first_step, 0
        started = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._names = (f"{started}.{number:06}" for number in itertools.count())
        self._file: FileIO | None = None

    def open(self) -> None:
        """Begin a file, with the mark that hides what an earlier run wrote of these steps."""
        started = self._protocol.SessionLog(status=self._protocol.SessionLog.START)
        self._append(self._protocol.Event(step=self._step, session_log=started))
        for summary in self._about:
            self._append(self._protocol.Event(step=self._step, summary=summary))

    def write(self, record: TrackedStep, /) -> None:
        """Write a step."""
        event = self._protocol.Event(step=record.step)
        for name, value in record.metrics.items():
            event.summary.MergeFrom(self._scalar(name, value))
        for name, seen in record.histograms.items():
            event.summary.MergeFrom(
                self._histogram(
                    f"histograms/{name}",
                    min=seen.edges[0],
                    max=seen.edges[-1],
                    num=seen.counts.sum(),
                    sum=seen.total,
                    sum_squares=seen.squares,
                    bucket_limits=seen.edges[1:].tolist(),
                    bucket_counts=seen.counts.tolist(),
                )
            )
        if record.answers:
            event.summary.MergeFrom(self._text("answers", markdown_table(record.answers)))
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
