"""A model's weights as vLLM takes them: Hugging Face's arrays, in memory that sidecars can map."""

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
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
