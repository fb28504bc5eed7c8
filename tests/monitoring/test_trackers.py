"""Whatever a tracker does, or a disk, a run goes on; and what was not written is counted."""

import contextlib
import errno
import functools
import json
import logging
import os
import struct
import sys
import threading
import time

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from jaxrl_llm.config.sections import LogConfig
from jaxrl_llm.monitoring.trackers import TensorBoard, TrackedRun, TrackedStep
from jaxrl_llm.monitoring.writer import BackgroundWriter
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.training import loop
from jaxrl_llm.training.dumps import RolloutDumps
from jaxrl_llm.training.loop import MetricsLog
from jaxrl_llm.types import Batch
from tests.refusals import refuses
from tests.waiting import wait_until

SOON_S = 120.0  # what takes longer hangs


class Memory:
    """A sink that keeps what it is given; `before` is called first."""

    name = "memory"

    def __init__(self, before=lambda call: None):
        self.before, self.records, self.calls = before, [], []

    def call(self, name):
        self.calls.append(name)
        self.before(name)

    def open(self):
        self.call("open")

    def write(self, record):
        self.call("write")
        self.records.append(record)

    def close(self):
        self.call("close")


@pytest.fixture
def released():
    """An event for which hanging calls wait; they are let go at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def warnings(caplog):
    """What was logged as a warning, so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder):
    """Return the events of all files of TensorBoard's, in its order; each must be whole."""
    parsed = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("Q", content[:8])
            assert struct.unpack("I", content[8:12])[0] == masked_crc32c(content[:8])
            event, content = content[12 : 12 + size], content[12 + size :]
            assert struct.unpack("I", content[:4])[0] == masked_crc32c(event)
            content = content[4:]
            parsed.append(Event.FromString(event))
    return parsed


def steps(folder):
    return [event.step for event in events(folder) if event.summary.value]


def test_of_a_sink_that_hangs_the_newest_records_wait(released, warnings):
    sink = Memory(lambda call: released.wait() if call == "write" else None)
    writer = BackgroundWriter(sink, limit=10)
    writer.write(0)
    wait_until(lambda: "write" in sink.calls)
    for step in range(1, 100):
        writer.write(step)
    assert (writer.waiting, writer.dropped, len(warnings())) == (11, 89, 1)
    released.set()
    writer.close(SOON_S)
    assert sink.records == [0, *range(90, 100)]
    assert len(warnings()) == 2 and "89" in warnings()[1]


def test_a_sink_that_fails_for_a_while(warnings):
    left = iter(range(3))

    def fail(call):
        if call == "write" and next(left, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = Memory(fail)
    writer = BackgroundWriter(sink)
    for step in range(6):
        writer.write(step)
        wait_until(lambda: not writer.waiting)
    writer.close(SOON_S)
    assert sink.records == [3, 4, 5] and writer.dropped == 3
    first, last = warnings()
    assert "memory: No space left on device" in first and "3" in last


def test_a_clock_that_is_set_back_and_forth(tmp_path, monkeypatch, warnings):
    log, now = open_log(tmp_path, "tensorboard"), time.time()
    for step, days in enumerate((0, -60, -120, 0, 60), start=1):
        monkeypatch.setattr(time, "time", lambda days=days: now + days * 86400)
        log.write(step, {"loss": 0.5})
    log.close()
    assert steps(tmp_path / "tensorboard") == [1, 2, 3, 4, 5] and warnings() == []


def test_a_run_that_is_continued_hides_the_steps_after_its_checkpoint(tmp_path):
    for step in (0, 5):
        tracker = TensorBoard(TrackedRun(tmp_path, {}, step))
        tracker.open()
        tracker.write(TrackedStep(step + 1, {"loss": 0.5, "b c": 2.0}))
        tracker.close()
    first, second = sorted((tmp_path / "tensorboard").iterdir())
    assert second.name.startswith("events.out.tfevents.") and first != second
    written = events(tmp_path / "tensorboard")
    assert [event.file_version for event in written[::3]] == ["brain.Event:2"] * 2
    assert [(e.step, e.session_log.status) for e in written[1::3]] == [
        (0, SessionLog.START),
        (5, SessionLog.START),
    ]
    values = [(value.tag, value.simple_value) for value in written[2].summary.value]
    assert values == [("loss", 0.5), ("b_c", 2.0)]
    assert written[2].step == 1 and written[2].wall_time > 1e9


@pytest.fixture
def disk(small_disk, tmp_path):
    with small_disk(tmp_path, "256k") as folder:
        yield folder


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))


def test_a_disk_that_is_full_and_is_freed(disk, warnings):
    run_dir = disk / "run"
    log = open_log(run_dir, "tensorboard")
    row = {f"metric/{number}": number + 0.5 for number in range(50)}
    (writer,), record = log._trackers, log._file
    for step in range(1, 31):
        if step == 6:
            fill(disk / "filling")
            with (run_dir / "metrics.jsonl").open("ab") as file:  # its last page
                file.truncate(record.position())
        if step == 21:
            with pytest.raises(OSError, match="space"):
                record.position()
            (disk / "filling").unlink()
        log.write(step, row)
        wait_until(lambda: not writer.waiting)
    assert record.position() == (run_dir / "metrics.jsonl").stat().st_size
    log.close()
    written = lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in written] == list(range(1, 31))
    assert all(line.items() >= row.items() for line in written)
    dropped = written[-1]["perf/dropped_log_records"]
    assert 5 <= dropped <= 20
    shown = steps(run_dir / "tensorboard")
    assert len(shown) == 30 - dropped
    assert shown[:5] == [1, 2, 3, 4, 5] and shown[-10:] == list(range(21, 31))
    assert sum("No space left" in warning for warning in warnings()) == 2
    assert sum("works again" in warning for warning in warnings()) == 2


def open_log(folder, *trackers, step=0, position=0, config=None):
    specs = LogConfig(trackers=trackers).trackers
    return MetricsLog(folder, step=step, position=position, trackers=specs, config=config or {})


FAULTS = ("raises at open", "exits at write", "hangs at open", "hangs at write", "hangs at close")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tracker_costs_no_step(tmp_path, monkeypatch, released, warnings, fault):
    """The steps are all taken while what hangs is let go of only after the test."""
    kind, _, at = fault.split()

    def called(call):
        if call == at and kind == "hangs":
            released.wait()
        elif call == at:
            raise SystemExit(1) if kind == "exits" else RuntimeError("down")

    monkeypatch.setattr(loop, "TRACKERS_CLOSE_S", 0.1 if "hangs" in fault else SOON_S)
    few = functools.partial(BackgroundWriter, limit=30)
    monkeypatch.setattr(loop, "BackgroundWriter", few)
    sink, total = Memory(called), 45
    log = open_log(tmp_path, lambda run: sink, "tensorboard")
    (faulty, sound) = log._trackers
    wait_until(lambda: "open" in sink.calls)
    rows = [{"prompt": "p", "answer": "x" * 1000}] * 4
    for step in range(total):
        log.write(step, {"loss": 0.5}, rows, {"score": np.ones(8)})
        assert faulty.waiting <= 31
        wait_until(lambda: not sound.waiting)
    assert not released.is_set()
    log.close()
    written = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written] == list(range(total))
    assert steps(tmp_path / "tensorboard") == list(range(total)) and sound.dropped == 0
    assert len(sink.records) + faulty.dropped == total
    assert bool(faulty.dropped) == (fault != "hangs at close") and warnings()


def test_trackers_end_side_by_side_each_in_a_thread_of_its_own(tmp_path, warnings):
    """So that two which hang cost a run no more than one."""
    both, threads = threading.Barrier(2), set()

    def called(call):
        threads.add(threading.current_thread().name)
        if call == "close":
            both.wait(SOON_S)

    sinks = [Memory(called) for _ in range(2)]
    log = open_log(tmp_path, *(lambda run, sink=sink: sink for sink in sinks))
    log.write(1, {"loss": 0.5})
    log.close()
    assert not both.broken and warnings() == []
    assert threads == {"writer: memory"}


def test_a_function_of_ones_own_is_a_tracker_which_gets_no_secret(tmp_path):
    sink, runs = Memory(), []

    def mine(run, *, tag):
        runs.append((run, tag))
        return sink

    config = {"seed": 1, "cluster": {"env": {"NCCL": "hush"}}}
    log = open_log(tmp_path, functools.partial(mine, tag="t"), step=2, config=config)
    answers = [{"answer": "4\ud800", "score": np.float32(1), "tokens": [1], "gone": np.nan}]
    log.write(3, {"a": 1.0}, answers, {"score": np.array([1.0, 3.0]), "none": np.array([np.nan])})
    log.close()
    shown = {"seed": 1, "cluster": {"env": {"NCCL": "(not published)"}}}
    assert runs == [((tmp_path, shown, 3), "t")]
    (record,) = sink.records
    assert record[:2] == (3, {"a": 1.0, "perf/dropped_log_records": 0.0})
    assert record.answers == ({"answer": "4?", "score": 1.0, "gone": None},)
    (seen,) = record.histograms.values()
    assert (seen.total, seen.squares, seen.edges[0], seen.edges[-1]) == (4.0, 10.0, 1.0, 3.0)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, **record.metrics}]


def test_a_tracker_that_is_behind_gets_metrics_alone(tmp_path, monkeypatch, released):
    monkeypatch.setattr(loop, "DETAILED", 3)
    sink = Memory(lambda call: released.wait() if call == "write" else None)
    log = open_log(tmp_path, lambda run: sink)
    for step in range(1, 9):
        log.write(step, {"a": 1.0}, [{"answer": "x"}], {"score": np.ones(5)})
    released.set()
    log.close()
    assert [record.step for record in sink.records] == list(range(1, 9))
    counts = [(len(record.answers), len(record.histograms)) for record in sink.records]
    assert counts == [(1, 1)] * 3 + [(0, 0)] * 5


def test_what_is_no_tracker_or_lacks_its_package_is_refused(tmp_path, monkeypatch):
    clients = ("wandb", "mlflow", "trackio", "swanlab", "comet")
    for name in clients:
        monkeypatch.setitem(sys.modules, {"comet": "comet_ml"}.get(name, name), None)
    own = (lambda run: 3, lambda run: 1 / 0, "console", "file", "tensorbord")
    for tracker in (*clients, *own):
        with refuses("log.trackers"):
            open_log(tmp_path, tracker)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_answers_that_the_disk_does_not_take(disk, warnings):
    dump = RolloutDumps(disk / "rollouts")
    empty = Rollouts([], [], [])
    tokens, no = np.zeros((0, 4), np.int32), np.zeros((0, 4), bool)
    batch = Batch(tokens, np.zeros(0, np.int32), {"mask": no})
    dump(1, batch, empty, [])
    fill(disk / "filling")
    for step in range(2, 5):
        dump(step, batch, empty, [])
    (disk / "filling").unlink()
    dump(5, batch, empty, [])
    names = sorted(path.name for path in (disk / "rollouts").iterdir())
    assert names == ["step_000001.parquet", "step_000005.parquet"]
    assert dump.dropped == 3 and len(warnings()) == 2
