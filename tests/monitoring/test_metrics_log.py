"""Where metrics go, and how they survive a resumed run."""

import errno
import json
import os

import numpy as np
import pytest

from jaxrl_llm.training import loop
from jaxrl_llm.training.loop import MetricsFile


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_is_a_line_on_disk_at_once_and_floats_come_back_bit_for_bit(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.position() == 0
    values = {"a": 0.1 + 0.2, "b": 1e-323, "c": float(np.float32(0.1)), "d": 3, "äöü": 1.0}
    for step in (1, 2, 3):
        file.write(step, values)
        assert lines(path)[step - 1] == {"step": step, **values}
        assert file.position() == path.stat().st_size, "in bytes"
    file.close()


def test_a_resumed_run_cuts_back_to_its_checkpoint(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    first = MetricsFile(path)
    first.write(1, {"x": 1.0})
    saved = first.position()
    first.write(2, {"x": 2.0})
    first._file.write(b'{"step": 3, "x"')  # killed in the middle of a line
    first.close()
    second = MetricsFile(path, saved)
    second.write(2, {"x": 20.0})
    second.close()
    assert lines(path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 20.0}]
    size = path.stat().st_size
    file = MetricsFile(path, 2 * size)  # it has lost lines, and is not filled with zeros
    assert file.position() == size and str(2 * size) in caplog.text
    file.close()
    MetricsFile(path).close()
    assert path.read_bytes() == b"", "a run that starts anew leaves no old line"


class Disk:
    """Stands in for a file: it takes `room` bytes, and confirms that it has them `if syncs`."""

    def __init__(self, file):
        self.file, self.room, self.truncates, self.syncs = file, None, True, True

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, content):
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self.file.write(content[: self.room])
        self.room = None if self.room is None else self.room - count
        return count

    def truncate(self, size):
        if not self.truncates:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.file.truncate(size)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A metrics file on a disk that fails as it is told to."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file._file = Disk(file._file)
    sync = os.fsync

    def fsync(number):
        if not file._file.syncs:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(number)

    monkeypatch.setattr(os, "fsync", fsync)
    yield file
    file._file.file.close()


def test_half_a_line_is_cut_off_before_the_next(stored, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    stored.write(1, {"x": 1.0})
    whole, disk = path.read_bytes(), stored._file
    disk.room = 7
    stored.write(2, {"x": 2.0})
    assert path.read_bytes() == whole, "a reader sees whole lines"
    disk.room, disk.truncates = 7, False
    stored.write(3, {"x": 3.0})
    assert path.read_bytes() == whole + b'{"step"'
    disk.truncates, disk.room = True, 0
    with pytest.raises(OSError, match="space"):
        stored.position()
    disk.room = None
    assert stored.position() == path.stat().st_size
    assert [line["x"] for line in lines(path)] == [1.0, 2.0, 3.0]
    assert len(caplog.messages) == 2


def test_what_the_disk_has_not_confirmed_is_written_again(stored, tmp_path):
    path = tmp_path / "metrics.jsonl"
    stored.write(1, {})
    first = stored.position()
    stored.write(2, {})
    stored.write(3, {})
    stored._file.syncs = False
    with pytest.raises(OSError, match="Input/output"):
        stored.position()
    path.write_bytes(path.read_bytes()[:first] + bytes(30))  # the disk has lost it
    stored._file.syncs = True
    assert stored.position() == path.stat().st_size
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_memory_for_lines_is_bounded(stored, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loop, "KEPT_LINES", 3)
    stored._file.room = 0
    for step in range(1, 6):
        stored.write(step, {})
    assert stored.dropped == 2
    stored._file.room = None
    stored.write(6, {})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [4, 5, 6]
    stored._file.room = 0
    stored.write(7, {})
    stored.close()
    assert stored.dropped == 4 and "1" in caplog.messages[-1]
