"""Whatever a tracker does, or a disk, a run goes on; and what was not written is counted."""

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import resource
import struct
import subprocess
import threading
import time

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from tensorboardX.record_writer import masked_crc32c

from jaxrl_llm.config.sections import LogConfig
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.profiler import Profiler
from jaxrl_llm.monitoring.trackers import TensorBoard, TrackedRun, TrackedStep
from jaxrl_llm.monitoring.writer import BackgroundWriter
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.training import loop
from jaxrl_llm.training.dumps import RolloutDumps
from jaxrl_llm.training.loop import MetricsLog
from jaxrl_llm.types import Batch
from tests.waiting import wait_until

STEPS = 1000
SOON_S = 20.0  # what takes longer hangs


class Memory:
    """A sink that keeps what it is given; `before` is called first."""

    name = "memory"

    def __init__(self, before=lambda call: None):
        self.before, self.records, self.calls = before, [], []

    def open(self):
        self._call("open")

    def write(self, record):
        self._call("write")
        self.records.append(record)

    def close(self):
        self._call("close")

    def _call(self, name):
        self.calls.append(name)
        self.before(name)


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


@contextlib.contextmanager
def soon():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SOON_S


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


# --------------------------------------------------------------------------------------- a writer


def test_a_slow_sink_gets_everything_in_order_and_only_the_end_waits(warnings):
    sink = Memory(lambda call: time.sleep(0.001))
    writer = BackgroundWriter(sink, limit=STEPS)
    for step in range(STEPS):
        writer.write(step)
    assert writer.waiting, "it is slower than we are"
    writer.close(SOON_S)
    assert sink.records == list(range(STEPS))
    assert sink.calls == ["open", *["write"] * STEPS, "close"]
    assert (writer.dropped, warnings()) == (0, [])


def test_of_a_sink_that_hangs_the_newest_records_wait(released, warnings):
    sink = Memory(lambda call: released.wait() if call == "write" else None)
    writer = BackgroundWriter(sink, limit=10)
    writer.write(0)
    wait_until(lambda: "write" in sink.calls)
    with soon():
        for step in range(1, STEPS):
            writer.write(step)
    assert (writer.waiting, writer.dropped) == (11, STEPS - 11)
    assert warnings() == [
        "memory does not keep up: 10 records wait, the oldest are dropped until it does"
    ]
    released.set()
    wait_until(lambda: len(sink.records) == 11)
    writer.close(SOON_S)
    assert sink.records == [0, *range(STEPS - 10, STEPS)]
    assert warnings()[1:] == [f"memory works again; records dropped: {STEPS - 11}"]


def test_a_sink_that_hangs_at_the_end_is_left_alone(released, warnings):
    writer = BackgroundWriter(Memory(lambda call: released.wait()))
    for step in range(3):
        writer.write(step)
    with soon():
        writer.close(0.01)
    assert writer.dropped == 3
    writer.write(3)
    assert writer.dropped == 4
    assert warnings() == [
        "memory has not ended within 0.01 s and is left alone",
        "memory: records dropped at the end: 3",
    ]


@pytest.mark.parametrize("at", ["open", "write"])
def test_a_sink_that_fails_for_a_while(warnings, at):
    failures = itertools.count()

    def fail(call):
        if call == at and next(failures) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = Memory(fail)
    writer = BackgroundWriter(sink)
    wait_until(lambda: "open" in sink.calls)
    for step in range(6):
        writer.write(step)
        wait_until(lambda: not writer.waiting)
    writer.close(SOON_S)
    dropped = 2 if at == "open" else 3  # it is opened before there is a record
    assert sink.records == list(range(dropped, 6))
    assert writer.dropped == dropped
    assert warnings() == [
        "can't write to memory: No space left on device; records are dropped until it works",
        f"memory works again; records dropped: {dropped}",
    ]


def test_a_sink_that_never_works(warnings):
    def fail(call):
        raise RuntimeError("no key")

    sink = Memory(fail)
    writer = BackgroundWriter(sink)
    for step in range(5):
        writer.write(step)
    writer.close(SOON_S)
    assert sink.records == [] and "close" not in sink.calls
    assert warnings() == [
        "can't write to memory: RuntimeError: no key; records are dropped until it works",
        "memory: records dropped at the end: 5",
    ]


# ------------------------------------------------------------------------------------ TensorBoard


def test_a_clock_that_is_set_back_and_forth(tmp_path, monkeypatch, warnings):
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    log = open_log(tmp_path, "tensorboard")
    for step, days in enumerate((0, -60, -60, 120, 0), start=1):
        now[0] += days * 86400
        log.write(step, {"loss": 0.5})
    log.close()
    assert steps(tmp_path / "tensorboard") == [1, 2, 3, 4, 5]
    assert warnings() == []


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


def test_the_config_is_shown_as_text_and_as_hyper_parameters(tmp_path):
    config = {"seed": 3, "model": {"path": "m", "lora": None}, "data": {"shuffle": True}}
    tracker = TensorBoard(TrackedRun(tmp_path, config, 0))
    tracker.open()
    tracker.close()
    values = [value for event in events(tmp_path / "tensorboard") for value in event.summary.value]
    text, *_ = values
    assert (text.tag, text.metadata.plugin_data.plugin_name) == ("config/text_summary", "text")
    assert text.tensor.string_val == [b"    seed: 3\n    model.path: m\n    data.shuffle: True"]
    contents = {v.tag: HParamsPluginData.FromString(v.metadata.plugin_data.content) for v in values}
    hyper = contents["_hparams_/session_start_info"].session_start_info.hparams
    assert hyper["seed"].number_value == 3
    assert hyper["model.path"].string_value == "m"
    assert hyper["data.shuffle"].bool_value
    named = contents["_hparams_/experiment"].experiment
    assert [info.name for info in named.hparam_infos] == ["seed", "model.path", "data.shuffle"]
    assert [info.name.tag for info in named.metric_infos] == ["critic/score/mean", "train/loss"]


# ---------------------------------------------------------------------------------------- a disk


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
            with pytest.raises(OSError, match="No space left"):
                record.position()
            (disk / "filling").unlink()
        with soon():
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


def test_a_limit_on_file_sizes(tmp_path, warnings):
    log = open_log(tmp_path, "tensorboard")
    (writer,) = log._trackers
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for step in range(1, 9):
            limit = {3: 40, 7: before[0]}.get(step)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            log.write(step, {"a long name of a metric": 0.5})
            wait_until(lambda: not writer.waiting)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))
    shown = steps(tmp_path / "tensorboard")
    assert shown[:2] == [1, 2] and shown[-2:] == [7, 8] and len(shown) < 8
    assert sum("File too large" in warning for warning in warnings()) == 2


# --------------------------------------------------------------------------------- all of them


def open_log(folder, *trackers, step=0, position=0, config=None):
    specs = LogConfig(trackers=trackers).trackers
    return MetricsLog(folder, step=step, position=position, trackers=specs, config=config or {})


class Piped(Memory):
    """Hands records to a process, which is killed after the third."""

    def open(self):
        super().open()
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def write(self, record):
        if len(self.records) == 3:
            self.process.kill()
            self.process.wait()
        self.process.stdin.write(b"x" * 4096)
        self.process.stdin.flush()
        super().write(record)

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def raising(at, error):
    def raise_(call):
        if call == at:
            raise error

    return raise_


FAULTS = {
    "raises at open": lambda hang: Memory(raising("open", RuntimeError("no key"))),
    "raises at write": lambda hang: Memory(raising("write", RuntimeError("down"))),
    "exits at write": lambda hang: Memory(raising("write", SystemExit(1))),
    "hangs at open": lambda hang: Memory(lambda call: hang() if call == "open" else None),
    "hangs at write": lambda hang: Memory(lambda call: hang() if call == "write" else None),
    "hangs at close": lambda hang: Memory(lambda call: hang() if call == "close" else None),
    "is slow": lambda hang: Memory(lambda call: time.sleep(0.001)),
    "is killed": lambda hang: Piped(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tracker_costs_no_step(tmp_path, monkeypatch, released, warnings, fault):
    """The steps are all taken while what hangs is let go of only after the test."""
    monkeypatch.setattr(loop, "TRACKERS_CLOSE_S", 0.1 if "hangs" in fault else SOON_S)
    few = functools.partial(BackgroundWriter, limit=30)
    monkeypatch.setattr(loop, "BackgroundWriter", few)
    sink, total = FAULTS[fault](released.wait), 45
    log = open_log(tmp_path, lambda run: sink, "tensorboard")
    (faulty, sound) = log._trackers
    wait_until(lambda: "open" in sink.calls)
    rows = [{"prompt": "p", "answer": "x" * 1000}] * 4
    for step in range(total):
        log.write(step, {"loss": 0.5}, rows, {"score": np.ones(8)})
        assert faulty.waiting <= 31
        if fault in ("is killed", "is slow"):  # so that none is dropped because too many wait
            wait_until(lambda: faulty.waiting < 30)
        wait_until(lambda: not sound.waiting)
    assert not released.is_set()
    log.close()
    written = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written] == list(range(total))
    assert steps(tmp_path / "tensorboard") == list(range(total)) and sound.dropped == 0
    assert len(sink.records) + faulty.dropped == total
    assert bool(faulty.dropped) == (fault not in ("hangs at close", "is slow"))
    if "hangs" in fault:
        assert "memory has not ended within 0.1 s and is left alone" in warnings()
    elif faulty.dropped:
        (first, last) = warnings()
        assert first.startswith("can't write to memory: ") and str(faulty.dropped) in last


def test_trackers_end_side_by_side(tmp_path, warnings):
    """So that two which hang cost a run no more than one."""
    both = threading.Barrier(2)
    sinks = [Memory(lambda call: call == "close" and both.wait(SOON_S)) for _ in range(2)]
    log = open_log(tmp_path, *(lambda run, sink=sink: sink for sink in sinks))
    log.close()
    assert not both.broken and warnings() == []


def test_no_thread_but_the_trackers_own_calls_it(tmp_path):
    threads = set()
    sink = Memory(lambda call: threads.add(threading.current_thread().name))
    log = open_log(tmp_path, lambda run: sink)
    log.write(1, {"loss": 0.5})
    log.close()
    assert threads == {"writer: memory"}


# ---------------------------------------------------------------------------- answers and profiles


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
    assert dump.dropped == 3
    assert len(warnings()) == 2 and warnings()[1].endswith("works again; records dropped: 3")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), RuntimeError("No space")])
def test_a_trace_that_cannot_be_written_is_the_last(tmp_path, monkeypatch, warnings, error):
    begun = []

    @contextlib.contextmanager
    def trace(folder, **options):
        begun.append(folder)
        yield
        raise error

    monkeypatch.setattr("jax.profiler.trace", trace)
    profiler = Profiler(range(1, 5), (2, 4), tmp_path, Display("training", 4))
    for step in range(1, 5):
        profiler.turn_to(step)
    profiler.close()
    assert len(begun) == 1
    assert len(warnings()) == 1
    assert warnings()[0].startswith("can't write the trace of step 2, no step is traced: ")
