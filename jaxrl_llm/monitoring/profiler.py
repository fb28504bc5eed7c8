"""Traces of chosen steps, for XProf and Perfetto, and summaries of where their time went."""

import contextlib
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.files import write_text
from jaxrl_llm.monitoring.clock import PHASE
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.sharding.distributed import is_first

GROUPS = ("matrix products", "attention", "collectives", "copies", "other")
RUN = {"kernel_details", "memcpy_details", "Memset_details"}
"""Statistics that CUDA's tracer gives events that took a GPU's time."""
NO_WORK = {"while", "call", "conditional"}  # their time is that of what they contain
MOVING = {
    *("copy", "copy-start", "copy-done", "transpose", "reverse", "slice", "concatenate", "pad"),
    *("broadcast", "gather", "dynamic-slice", "dynamic-update-slice"),
}
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "fusion", "reshape"}
ATTENTION = re.compile(r"attention|fmha|flash|sdpa", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|matmul|cutlass|cublas|nvjet|xmma|\bdot\b|convolution", re.IGNORECASE)
COLLECTIVE = re.compile(
    r"^(all-|reduce-scatter|collective-|ragged-all|nccl|ncclDevKernel)", re.IGNORECASE
)
COPY = re.compile(r"^(memcpy|memset|copy|transpose)", re.IGNORECASE)


# The trace of a step that jax writes, read back: phases, and operations by kind.
#
# jax writes a trace as an `XSpace` (a protocol buffer, `*.xplane.pb`) and as Chrome's JSON
# (`*.trace.json.gz`). `jax.profiler.ProfileData` reads the events of the first. The programs that
# ran are in it too, but only as bytes, of which `_fields` reads what tells a matrix product from
# a copy.
#
# `planning.program` reads the text of compiled programs instead. A trace holds no text, and jax
# has no public function that makes text of these bytes.


class Operation(NamedTuple):
    """One run of one operation of a program on a device, in nanoseconds.

    Attributes:
        device: that ran it.
        program: jax's name of the compiled function.
        name: of the operation in it, or of the kernel where nothing says which one it was.
        source: what it was in the Python program, if known.
        group: one of GROUPS.
        start: in the trace's time.
        end: likewise.
    """

    device: str
    program: str
    name: str
    source: str
    group: str
    start: float
    end: float


class Span(NamedTuple):
    """A step or one of its phases, in nanoseconds of the trace's time."""

    name: str
    start: float
    end: float


class Trace(NamedTuple):
    """One step, its phases, and the operations that devices ran in it."""

    step: Span
    phases: list[Span]
    operations: list[Operation]


Hlo = tuple[frozenset[str], str]
"""An operation of a compiled program: its opcodes, with those of what is fused into it; and its
path in the Python program, with the library function that it calls, if any."""

# ------------------------------------------------------------------------------------ the events


def read_trace(path: Path) -> Trace:
    """Read the step, its phases and all operations of devices off an `*.xplane.pb`."""
    data = path.read_bytes()
    programs = read_programs(data)
    step, phases, operations = None, [], []
    for plane in ProfileData.from_serialized_xspace(data).planes:
        if plane.name.startswith("/device:"):
            operations += _read_device(plane, programs)
        elif plane.name == "/host:CPU":
            on_host, marks = _read_host(plane, programs)
            operations += on_host
            for name, stats, start, end in marks:
                if PHASE in stats:
                    phases.append(Span(name, start, end))
                else:
                    step = Span(name, start, end)
    if step is None:
        raise ValueError(f"{path} holds no step")
    return Trace(step, phases, [o for o in operations if o is not None])


def _read_device(
    plane: Any, programs: Mapping[str, Mapping[str, Hlo]]
) -> Iterator[Operation | None]:
    """Yield what the streams of a GPU ran: kernels and copies, not allocations or whole graphs."""
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue  # summaries of the same events
        for event in line.events:
            stats = dict(event.stats)
            if not stats.keys().isdisjoint(RUN):
                span = event.start_ns, event.start_ns + event.duration_ns
                yield _operation(plane.name, event.name, stats, programs, *span)


def _read_host(
    plane: Any, programs: Mapping[str, Mapping[str, Hlo]]
) -> tuple[list[Operation | None], list[tuple[str, dict[str, Any], float, float]]]:
    """Return what CPU devices ran, and the marks of steps and phases.

    A CPU operation may go on in other threads when its own event is over. Then an event `end: …`
    that names it in `_c`, as `_p` does in its own, says when it was done.
    """
    ends, begun, marks = {}, [], []
    for line in plane.lines:
        for event in line.events:
            name, start = event.name, event.start_ns
            if name.startswith("ThreadpoolListener"):
                continue
            stats = dict(event.stats)
            if name.startswith("end: "):
                ends[stats.get("_c")] = start
            elif "hlo_op" in stats:
                begun.append((name, stats, start, start + event.duration_ns))
            elif PHASE in stats or "step_num" in stats:
                marks.append((name, stats, start, start + event.duration_ns))
    operations = [
        _operation(
            f"CPU {stats.get('device_ordinal', 0)}",
            name,
            stats,
            programs,
            start,
            max(end, ends.get(stats.get("_p"), end)),
        )
        for name, stats, start, end in begun
    ]
    return operations, marks


def _operation(
    device: str,
    event: str,
    stats: Mapping[str, Any],
    programs: Mapping[str, Mapping[str, Hlo]],
    start: float,
    end: float,
) -> Operation | None:
    """Return an event as an operation; None for one that only holds others."""
    program, name = str(stats.get("hlo_module", "")), str(stats.get("hlo_op", event))
    unknown = frozenset({re.sub(r"[.\d]*$", "", name)}), ""
    known = programs.get(f"{program}({stats.get('program_id')})", {})
    opcodes, source = known.get(name, unknown)
    if opcodes & NO_WORK:
        return None
    group = operation_group(f"{event} {name}", opcodes, source)
    return Operation(device, program, name, source, group, start, end)


def operation_group(name: str, opcodes: Iterable[str], source: str = "") -> str:
    """Return which of GROUPS an operation belongs to.

    Args:
        name: of the operation, and of the kernel that did it.
        opcodes: of all that is fused in it.
        source: its path in the Python program, and the library function that it calls.

    >>> operation_group("fusion.3", ["dot", "add"])
    'matrix products'
    >>> operation_group("fusion.3", ["dot"], "f/attention/dot")
    'attention'
    >>> operation_group("nvjet_tst_128x256 custom-call.7", ["custom-call"])
    'matrix products'
    """
    kinds = set(opcodes) - FREE
    if COLLECTIVE.search(name) or any(COLLECTIVE.search(opcode) for opcode in kinds):
        return "collectives"
    if ATTENTION.search(f"{name} {source}"):
        return "attention"
    if kinds & {"dot", "convolution"} or PRODUCT.search(name):
        return "matrix products"
    if "custom-call" in kinds and PRODUCT.search(source):
        return "matrix products"
    if (kinds and kinds <= MOVING) or COPY.search(name):
        return "copies"
    return "other"


# ---------------------------------------------------------------------------------- the programs


def read_programs(data: bytes) -> dict[str, dict[str, Hlo]]:
    """Return the instructions of all programs in a serialized XSpace, by program and by name.

    Field numbers are those of `xplane.proto` and `hlo.proto`.
    """
    programs = {}
    for plane in _all(data, 1):
        if b"/host:metadata" not in _all(plane, 2):
            continue
        for entry in _all(plane, 4):
            for event in _all(entry, 2):
                (name,) = _all(event, 2)
                for stat in _all(event, 5):
                    for program in _all(stat, 6):  # an HloProto
                        for module in _all(program, 1):
                            programs[name.decode()] = _instructions(module)
    return programs


def _instructions(module: bytes) -> dict[str, Hlo]:
    inside: dict[int, frozenset[str]] = {}
    instructions = {}
    for computation in _all(module, 3):  # those that are called come first
        opcodes = set()
        for instruction in _all(computation, 2):
            name, opcode = (_all(instruction, n)[0].decode() for n in (1, 2))
            within = {opcode}
            if opcode not in NO_WORK:
                within.update(*(inside.get(n, ()) for n in _called(instruction)))
            opcodes |= within
            paths = [p for metadata in _all(instruction, 7) for p in _all(metadata, 2)]
            source = " ".join(part.decode() for part in (*paths, *_all(instruction, 28)))
            instructions[name] = frozenset(within), source
        inside[_all(computation, 5)[0]] = frozenset(opcodes)
    return instructions


def _called(instruction: bytes) -> Iterator[int]:
    for packed in _all(instruction, 38):
        if isinstance(packed, int):
            yield packed
            continue
        at = 0
        while at < len(packed):
            number, at = _varint(packed, at)
            yield number


def _all(message: bytes, number: int) -> list[Any]:
    """Return the values of one field of a protocol buffer: integers, or bytes of all else."""
    return [value for field, value in _fields(message) if field == number]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


log = logging.getLogger(__name__)

STEP = "step"
OUTSIDE = "outside of phases"
LISTED = 15


class Profiler:
    """Traces chosen steps of a run; of several processes the first one, about its own devices.

    A trace that can't be written, as on a full disk, is the last one: a warning says so, and the
    run goes on.

    Args:
        steps: that the run has still to do.
        chosen: numbers of steps.
        run_dir: `profile/step_<n>` in it holds a step's trace, and summary.txt.
        display: shows the beginning of the summary.

    Raises:
        ConfigError: a chosen step comes after the last one.
    """

    def __init__(
        self, steps: range, chosen: Sequence[int], run_dir: str | Path, display: Display
    ) -> None:
        """Look at what is chosen; nothing is traced yet."""
        late = [step for step in chosen if step >= steps.stop]
        if late:
            raise ConfigError(
                f"log.profile_steps={list(chosen)}, but the run ends after {steps.stop - 1} steps"
            )
        for step in sorted(set(chosen)):
            if step < steps.start:
                log.info("step %d is not profiled: the run goes on at %d", step, steps.start)
        self._chosen = set(chosen) if is_first() else set()
        self._folder, self._display = Path(run_dir) / "profile", display
        self._tracing, self._step = contextlib.ExitStack(), 0

    def turn_to(self, step: int) -> None:
        """End the trace of the step before, if there is one; begin that of this step, if chosen."""
        self.close()
        if step in self._chosen:
            with self._giving_up(step):
                self._tracing.enter_context(tracing(self._folder / f"step_{step}", step))
                self._step = step

    def close(self) -> None:
        """End the trace of the last step."""
        step, self._step = self._step, 0
        if step:
            with self._giving_up(step):
                self._tracing.close()
                self._report(self._folder / f"step_{step}", step)

    @contextlib.contextmanager
    def _giving_up(self, step: int) -> Iterator[None]:
        """Trace no other step after an error of the disk or of jax, which can't begin again."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._chosen = set()
            log.warning("can't write the trace of step %d, no step is traced: %s", step, error)

    def _report(self, folder: Path, step: int) -> None:
        (path,) = folder.rglob("*.xplane.pb")
        text = summarize(read_trace(path), step)
        write_text(folder / "summary.txt", text)
        self._display.line(text.partition("\n\n")[0] + f"\nmore in {folder / 'summary.txt'}")


@contextlib.contextmanager
def tracing(folder: Path, step: int) -> Iterator[None]:
    """Write a trace of what happens, in place of one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function would be an event
    with (
        jax.profiler.trace(str(folder), profiler_options=options),
        jax.profiler.StepTraceAnnotation(STEP, step_num=step),
    ):
        yield


# ------------------------------------------------------------------------------------ the summary


class DeviceTimeline(NamedTuple):
    """The operations that a device ran, and when it was busy.

    Attributes:
        operations: in the trace's order.
        seconds: of each of them, less what others had of it.
        times: at which an operation begins or ends, in nanoseconds.
        worked: seconds that the device was busy until then.
    """

    operations: list[Operation]
    seconds: np.ndarray
    times: np.ndarray
    worked: np.ndarray

    def busy(self, span: Span) -> float:
        """Return the seconds of a span in which the device ran at least one operation."""
        first, last = np.interp([span.start, span.end], self.times, self.worked)
        return float(last - first)


def device_timeline(trace: Trace, device: str) -> DeviceTimeline:
    """Return the operations of one of a trace's devices, and when it was busy.

    With n(t) operations at time t, one from a to b has the integral of 1 / n(t) from a to b.

    >>> spans = [(0, 3e9), (2e9, 4e9), (6e9, 7e9)]
    >>> ops = [Operation("0", "", "", "", "other", *span) for span in spans]
    >>> timeline = device_timeline(Trace(Span("step", 0, 9e9), [], ops), "0")
    >>> timeline.seconds.tolist(), timeline.busy(Span("gen", 1e9, 6.5e9))
    ([2.5, 1.5, 1.0], 3.5)
    """
    operations = [operation for operation in trace.operations if operation.device == device]
    times = np.array([o.start for o in operations] + [o.end for o in operations])
    order = np.argsort(times, kind="stable")
    begun = np.repeat([1, -1], len(operations))[order]
    times, running = times[order], np.cumsum(begun)[:-1]
    gaps = np.diff(times) / 1e9 * (running > 0)
    divided = np.concatenate([[0.0], np.cumsum(gaps / np.maximum(running, 1))])
    place = np.argsort(order)
    first, last = place[: len(operations)], place[len(operations) :]
    worked = np.concatenate([[0.0], np.cumsum(gaps)])
    return DeviceTimeline(operations, divided[last] - divided[first], times, worked)


def summarize(trace: Trace, number: int) -> str:
    """Return the text that says where a step's time went.

    In a phase's line stands how much of its time the devices were busy, with whatever. Where a
    device runs several operations at once, each gets its part of that time: their seconds add up to
    the time that the device was busy. Seconds of several devices are their mean.

    >>> span = Span("step", 0.0, 4e9)
    >>> product = Operation("0", "f", "dot.1", "f/dot", "matrix products", 1e9, 2e9)
    >>> print(summarize(Trace(span, [Span("gen", 0.0, 2e9)], [product]), 5).partition("\\n\\n")[0])
    step 5: 4.000 s, devices busy 25.0 %
    phase                 seconds    share   devices busy
    gen                     2.000   50.0 %         50.0 %
    outside of phases       2.000   50.0 %          0.0 %
    """
    names = sorted({operation.device for operation in trace.operations})
    devices = [device_timeline(trace, name) for name in names]
    parts = (_phases(trace, devices, number), *_operations(devices))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _phases(trace: Trace, devices: Sequence[DeviceTimeline], number: int) -> list[str]:
    def busy(spans: Sequence[Span]) -> str:
        times = [device.busy(span) for device in devices for span in spans]
        return _share(sum(times) / max(1, len(devices)), sum(map(_seconds, spans)))

    whole = _seconds(trace.step)
    lines = [
        f"step {number}: {whole:.3f} s, devices busy {busy([trace.step])}",
        f"{'phase':<20}{'seconds':>9}{'share':>9}{'devices busy':>15}",
    ]
    for name, spans in phases_of(trace).items():
        length = sum(map(_seconds, spans))
        lines.append(f"{name:<20}{length:>9.3f}{_share(length, whole):>9}{busy(spans):>15}")
    return lines


def _operations(devices: Sequence[DeviceTimeline]) -> tuple[list[str], list[str]]:
    spent: defaultdict[str, float] = defaultdict(float)
    runs: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for device in devices:
        for operation, length in zip(device.operations, device.seconds, strict=True):
            spent[operation.group] += length / len(devices)
            runs[operation[1:5]].append(length / len(devices))
    total = sum(spent.values())
    groups = [f"{'operations':<20}{'seconds':>9}{'share':>9}"]
    groups += [f"{name:<20}{spent[name]:>9.3f}{_share(spent[name], total):>9}" for name in GROUPS]
    listed = [f"{'seconds':>9}{'share':>9}{'times':>8}  {'of':<16}operation"]
    longest = sorted(runs.items(), key=lambda item: -sum(item[1]))[:LISTED]
    for (program, name, source, group), seconds in longest:
        length, times = sum(seconds), len(seconds)
        line = f"{length:>9.3f}{_share(length, total):>9}{times:>8}  {group:<16}"
        listed.append(f"{line}{program} {name}  {source[-80:]}".rstrip())
    return groups, listed


def phases_of(trace: Trace) -> dict[str, list[Span]]:
    """Return the spans of each phase, and those of the step that are in none; they tile the step.

    >>> spans = phases_of(Trace(Span("step", 0, 9), [Span("gen", 1, 4), Span("adv", 4, 6)], []))
    >>> [tuple(span) for span in spans["outside of phases"]]
    [('outside of phases', 0, 1), ('outside of phases', 6, 9)]
    """
    phases: dict[str, list[Span]] = {}
    outside, at = [], trace.step.start
    for phase in sorted(trace.phases, key=lambda phase: phase.start):
        phases.setdefault(phase.name, []).append(phase)
        outside.append(Span(OUTSIDE, at, phase.start))
        at = phase.end
    outside.append(Span(OUTSIDE, at, trace.step.end))
    return phases | {OUTSIDE: [span for span in outside if span.end > span.start]}


def _seconds(span: Span) -> float:
    return (span.end - span.start) / 1e9


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
