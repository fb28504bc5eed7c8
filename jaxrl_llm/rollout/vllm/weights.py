"""A model's weights as vLLM takes them: Hugging Face's arrays, in memory that sidecars can map."""

import contextlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.hf.fp8 import BLOCK, blocked_host_arrays, is_blocked
from jaxrl_llm.models.hf.quantized import SCALE_SUFFIX
from jaxrl_llm.models.hf.save import host_arrays, joined
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.quantization import FP8
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineError
from jaxrl_llm.rollout.vllm.process import RefusedError, Sidecar, SidecarLost
from jaxrl_llm.sharding.reshard import group_by_bytes

ALIGNMENT = 64
BUCKET_BYTES = 2**28


class Entry(NamedTuple):
    """One array in the map, under its name in a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class WeightBuffer:
    """One copy of the weights in the host's memory, which all sidecars read.

    The memory has no name in the file system, so that nothing is left of it when the process ends,
    however it ends, and no mount limits its size. It is kept from one weight sync to the next: a
    sidecar that is started again gets its weights from here.

    Args:
        spec: the model, without an adapter.
        dtype: of the weights.
        quantized: write layers' matrices in float8, with a scale for each block of them.

    Attributes:
        entries: what lies where.
        buckets: the same, cut where about 256 MB are together.
        checksums: CRC-32 of the bytes of each array, by name.
        version: of the weights; None while they are not whole.

    Raises:
        EngineError: the host has not enough memory.
    """

    def __init__(self, spec: ModelSpec, dtype: str, *, quantized: bool = False) -> None:
        """Allocate the memory."""
        self._host_arrays = blocked_host_arrays if quantized else host_arrays
        declarations = declare(spec)
        kinds = jax.tree.leaves(compute_dtypes(spec, dtype))
        self._leaves = list(zip(jax.tree.leaves(declarations), kinds, strict=True))
        self.entries = list(_lay_out(self._leaves, quantized=quantized))
        groups = group_by_bytes([entry.bytes for entry in self.entries], BUCKET_BYTES)
        self.buckets = [[self.entries[i] for i in group] for group in groups]
        self.size = self.entries[-1].offset + self.entries[-1].bytes
        self.checksums: dict[str, int] = {}
        self.version: int | None = None
        self._file = os.memfd_create("jaxrl-weights")
        try:
            os.posix_fallocate(self._file, 0, self.size)
        except OSError as error:
            os.close(self._file)
            raise EngineError(
                f"the host has no {self.size / 1e9:.3g} GB for the weights on their way to vLLM: "
                f"{error}"
            ) from error
        self._map = mmap.mmap(self._file, self.size)

    @property
    def path(self) -> str:
        """Where other processes of this user find the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, params: Any, version: int) -> Iterator[list[Entry]]:
        """Write new weights, one layer of one array after the other.

        Args:
            params: nested as `declare(spec)`.
            version: that they have when all is written.

        Yields:
            Each of the `buckets`, when it is written.
        """
        self.version = None
        leaves = jax.tree.leaves(params)
        parts = (
            (decl, leaf, kind) for (decl, kind), leaf in zip(self._leaves, leaves, strict=True)
        )
        arrays = self._host_arrays(parts)
        for bucket in self.buckets:
            for entry, (name, values) in zip(bucket, arrays, strict=False):
                assert (entry.name, entry.shape) == (name, values.shape)
                self._array(entry)[...] = values
                self.checksums[name] = zlib.crc32(self.data(entry.offset, entry.bytes))
            yield bucket
        assert next(arrays, None) is None
        self.version = version

    def data(self, offset: int, size: int) -> memoryview:
        """Return some of the bytes."""
        return memoryview(self._map)[offset : offset + size]

    def verify(self, echoed: Mapping[str, int]) -> None:
        """Compare checksums that a worker found with those of what was written.

        Raises:
            EngineError: one differs.
        """
        for name, checksum in echoed.items():
            if checksum != self.checksums[name]:
                raise EngineError(
                    f"expected checksum {self.checksums[name]:08x} of {name}, got {checksum:08x}: "
                    "vLLM does not hold the weights that were sent"
                )

    def close(self) -> None:
        """Free the memory, as soon as nobody maps it or has a view of it."""
        with contextlib.suppress(BufferError):  # a view goes with whoever has it
            self._map.close()
        os.close(self._file)

    def _array(self, entry: Entry) -> np.ndarray:
        kind = np.dtype(entry.dtype)
        flat = np.frombuffer(self._map, kind, entry.bytes // kind.itemsize, entry.offset)
        return flat.reshape(entry.shape)


def _lay_out(leaves: list[tuple[Any, Any]], *, quantized: bool) -> Iterator[Entry]:
    """Lay arrays out one after the other, in the order in which they are written."""
    end = 0
    for (declaration, _, dtype), *_ in joined((decl, None, dtype) for decl, dtype in leaves):
        for name, _ in declaration.hf_indices():
            shape = tuple(declaration.hf_shape)
            forms = [(name, shape, np.dtype(dtype))]
            if quantized and is_blocked(declaration):
                blocks = tuple(-(-side // BLOCK) for side in shape)
                scales = (name + SCALE_SUFFIX, blocks, np.dtype(np.float32))
                forms = [(name, shape, FP8), scales]
            for label, sides, kind in forms:
                size = int(np.prod(sides)) * kind.itemsize
                start = -(-end // ALIGNMENT) * ALIGNMENT
                yield Entry(label, kind.name, sides, start, size)
                end = start + size


class SidecarGroup:
    """Sidecars that are asked for the same; one that is lost on the way is left out from then on.

    Args:
        members: by number.
    """

    def __init__(self, members: Mapping[int, Sidecar]) -> None:
        """Take all of them."""
        self.members = dict(members)

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """Ask all at once, wait for all, and return their answers.

        Raises:
            RefusedError: one could not do it.
        """
        return self.begin(op, **fields)()

    def begin(
        self, op: str, data: memoryview | None = None, **fields: Any
    ) -> Callable[[], list[Any]]:
        """Ask all at once; return what waits for their answers, and raises as `ask`."""
        waits = {}
        for number, sidecar in list(self.members.items()):
            try:
                waits[number] = sidecar.ask(op, data, **fields)
            except SidecarLost:
                del self.members[number]

        def finish() -> list[Any]:
            answers, refusals = [], []
            for number, wait in waits.items():
                try:
                    answers.append(wait())
                except SidecarLost:
                    self.members.pop(number, None)
                except RefusedError as error:  # raised when all have answered
                    refusals.append(error)
            if refusals:
                raise refusals[0]
            return answers

        return finish


def send_weights(
    group: SidecarGroup,
    buffer: WeightBuffer,
    buckets: Iterable[list[Entry]],
    version: int,
) -> None:
    """Let paused sidecars take new weights, and compare their checksums with those sent.

    Args:
        group: of sidecars.
        buffer: the weights.
        buckets: those of its buckets that are written, as they come.
        version: of the weights.

    Raises:
        EngineError: a sidecar does not take the weights, or got others.
    """
    through = "memory"
    if not all(sidecar.shared for sidecar in group.members.values()):
        through = "connection"
    _check(buffer, group.ask("start", through=through))
    before: Callable[[], list[Any]] = list
    for bucket in buckets:  # each is written while the one before is taken
        _check(buffer, before())
        first, last = bucket[0], bucket[-1]
        data = None
        if through == "connection":
            data = buffer.data(first.offset, last.offset + last.bytes - first.offset)
        before = group.begin("take", data, entries=_as_messages(bucket), offset=first.offset)
    _check(buffer, before())
    entries = _as_messages(buffer.entries)
    _check(buffer, group.ask("finish", entries=entries, version=str(version)))


def _as_messages(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [entry._asdict() for entry in entries]


def _check(buffer: WeightBuffer, answers: Iterable[list[dict[str, Any]]]) -> None:
    for ranks in answers:
        for rank in ranks:
            if "error" in rank:
                raise RefusedError(f"vLLM: {rank['error']}")
            buffer.verify(rank["checksums"])
