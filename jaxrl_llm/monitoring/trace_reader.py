"""The trace of a step that jax writes, read back: phases, and operations by kind.

jax writes a trace as an `XSpace` (a protocol buffer, `*.xplane.pb`) and as Chrome's JSON
(`*.trace.json.gz`). `jax.profiler.ProfileData` reads the events of the first. The programs that ran
are in it too, but only as bytes, of which `_fields` reads what tells a matrix product from a copy.

`planning.hlo` reads the text of compiled programs instead. A trace holds no text, and jax has
no public function that makes text of these bytes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxrl_llm.monitoring.clock import PHASE

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


class HloOperation(NamedTuple):
    """An operation of a compiled program.

    Attributes:
        opcodes: its own, and those of what is fused into it.
        source: its path in the Python program, and the library function that it calls, if any.
    """

    opcodes: frozenset[str]
    source: str


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
    plane: Any, programs: Mapping[str, Mapping[str, HloOperation]]
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
    plane: Any, programs: Mapping[str, Mapping[str, HloOperation]]
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
    programs: Mapping[str, Mapping[str, HloOperation]],
    start: float,
    end: float,
) -> Operation | None:
    """Return an event as an operation; None for one that only holds others."""
    program, name = str(stats.get("hlo_module", "")), str(stats.get("hlo_op", event))
    instruction = programs.get(f"{program}({stats.get('program_id')})", {}).get(name)
    opcodes = instruction.opcodes if instruction else frozenset({re.sub(r"[.\d]*$", "", name)})
    if opcodes & NO_WORK:
        return None
    source = instruction.source if instruction else ""
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


def read_programs(data: bytes) -> dict[str, dict[str, HloOperation]]:
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


def _instructions(module: bytes) -> dict[str, HloOperation]:
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
            instructions[name] = HloOperation(frozenset(within), source)
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
