"""Where metrics go, and how they survive a resumed run."""

import errno
import functools
import json
import logging
import os
import sys
import threading

import numpy as np
import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import LogConfig
from jaxrl_llm.training import loop
from jaxrl_llm.training.loop import MetricsFile, MetricsLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------------- metrics.jsonl


def test_one_line_for_each_step_is_on_disk_at_once(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1, {"loss": 0.5})
    assert lines(path) == [{"step": 1, "loss": 0.5}]
    file.write(2, {"loss": 0.25, "ä": 1.0})
    assert lines(path)[1] == {"step": 2, "loss": 0.25, "ä": 1.0}
    file.close()


def test_floats_come_back_bit_for_bit(tmp_path):
    values = {"a": 0.1 + 0.2, "b": 1e-323, "c": float(np.float32(0.1)), "d": 3}
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write(1, values)
    file.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, **values}]


def test_position_is_the_length_in_bytes(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    assert file.position() == 0
    for step in (1, 2, 3):
        file.write(step, {"äöü": float(step)})
        assert file.position() == path.stat().st_size
    file.close()


def test_a_resumed_run_cuts_back_to_its_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    first = MetricsFile(path)
    first.write(1, {"x": 1.0})
    first.write(2, {"x": 2.0})
    saved = first.position()
    first.write(3, {"x": 3.0})
    first._file.write(b'{"step": 4, "x"')  # killed in the middle of a line
    first.close()
    second = MetricsFile(path, saved)
    assert second.position() == saved
    second.write(3, {"x": 30.0})
    second.write(4, {"x": 40.0})
    assert second.position() == path.stat().st_size
    second.close()
    assert [(line["step"], line["x"]) for line in lines(path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
        (4, 40.0),
    ]


def test_a_run_that_starts_anew_leaves_no_old_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsFile(path).close()
    assert path.read_bytes() == b""


def test_a_file_that_lost_lines_is_not_filled_with_zeros(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n')
    with caplog.at_level(logging.WARNING):
        file = MetricsFile(path, 100)
    assert "has lost lines: 12 bytes, expected 100" in caplog.text
    assert file.position() == 12
    file.write(2, {})
    file.close()
    assert lines(path) == [{"step": 1}, {"step": 2}]


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
    whole = path.read_bytes()
    stored._file.room = 7
    stored.write(2, {"x": 2.0})
    assert path.read_bytes() == whole, "a reader sees whole lines"
    stored._file.room, stored._file.truncates = 7, False
    stored.write(3, {"x": 3.0})
    assert path.read_bytes() == whole + b'{"step"'
    stored._file.room = None
    stored.write(4, {"x": 4.0})
    stored._file.truncates = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored._file, "room", 0)
        with pytest.raises(OSError, match="No space left"):
            stored.position()
    assert stored.position() == path.stat().st_size
    assert [line["x"] for line in lines(path)] == [1.0, 2.0, 3.0, 4.0]
    assert caplog.messages == [
        f"can't write to {path}: No space left on device; its lines are kept in memory until it "
        "works",
        f"{path} works again; records dropped: 0",
    ]


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
    assert (stored.dropped, "records dropped at the end: 1" in caplog.messages[-1]) == (4, True)


# ------------------------------------------------------------------------------------------ sinks


def open_log(folder, *trackers, step=0, position=0, config=None):
    specs = LogConfig(trackers=trackers).trackers
    return MetricsLog(folder, step=step, position=position, trackers=specs, config=config or {})


def test_the_file_alone(tmp_path):
    log = open_log(tmp_path)
    log.write(1, {"a": 1.0})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard(tmp_path):
    log = open_log(tmp_path, "tensorboard")
    log.write(1, {"actor/loss": 0.5})
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    content = file.read_bytes()
    assert b"actor/loss" in content
    assert np.float32(0.5).tobytes() in content


class Kept:
    """A tracker that keeps what it is given."""

    name = "kept"

    def __init__(self, run, records):
        self.run, self.records = run, records

    def open(self):
        self.records.append(self.run)

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.records.append("closed")


SECRETIVE = {"seed": 1, "cluster": {"env": {"NCCL": "hush"}}}


def test_a_function_of_ones_own_is_a_tracker(tmp_path):
    records = []

    def mine(run, *, tag):
        assert tag == "t"
        return Kept(run, records)

    log = open_log(tmp_path, functools.partial(mine, tag="t"), step=2, config=SECRETIVE)
    answers = [{"answer": "4", "score": np.float32(1), "tokens": [1], "gone": np.nan, "ok": True}]
    log.write(3, {"a": 1.0}, answers, {"score": np.array([1.0, 3.0]), "none": np.array([np.nan])})
    log.close()
    run, record, closed = records
    shown = {"seed": 1, "cluster": {"env": {"NCCL": "(not published)"}}}
    assert run == (tmp_path, shown, 3)
    assert record[:2] == (3, {"a": 1.0, "perf/dropped_log_records": 0.0})
    assert record.answers == ({"answer": "4", "score": 1.0, "gone": None, "ok": True},)
    (seen,) = record.histograms.values()
    assert (seen.total, seen.squares, seen.edges[0], seen.edges[-1]) == (4.0, 10.0, 1.0, 3.0)
    assert closed == "closed"
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, **record.metrics}]


def test_a_tracker_that_is_behind_gets_metrics_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "DETAILED", 3)
    records, goes_on = [], threading.Event()

    class Slow(Kept):
        def write(self, record):
            goes_on.wait()
            super().write(record)

    log = open_log(tmp_path, lambda run: Slow(run, records))
    for step in range(1, 9):
        log.write(step, {"a": 1.0}, [{"answer": "x"}], {"score": np.ones(5)})
    goes_on.set()
    log.close()
    written = records[1:-1]
    assert [record.step for record in written] == list(range(1, 9))
    assert [len(record.answers) for record in written] == [1] * 3 + [0] * 5
    assert [len(record.histograms) for record in written] == [1] * 3 + [0] * 5


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab", "comet"])
def test_a_tracker_whose_package_is_not_installed(tmp_path, monkeypatch, name):
    package = {"comet": "comet_ml"}.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"log\.trackers: '{name}' needs the package {package}: pip install .*\[{name}\]'"
    with pytest.raises(ConfigError, match=message):
        open_log(tmp_path, name)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_trackers_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"log\.trackers: remove 'console', the terminal has a"):
        open_log(tmp_path, "console")
    with pytest.raises(ConfigError, match=r"log\.trackers: remove 'file', metrics\.jsonl in run_"):
        open_log(tmp_path, "file")
    with pytest.raises(ConfigError, match=r"an object with name, open, write and close, got a int"):
        open_log(tmp_path, lambda run: 3)
    with pytest.raises(ConfigError, match=r"log\.trackers: .*lambda.*ZeroDivisionError"):
        open_log(tmp_path, lambda run: 1 / 0)
    with pytest.raises(ConfigError, match=r"no function 'tensorbord' .*mean 'tensorboard'"):
        open_log(tmp_path, "tensorbord")
