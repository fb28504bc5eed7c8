"""How weights can reach another process: over the host, and by CUDA IPC on the same GPU.

    python -m benchmarks.gpu.push_probe           arrays of 4 GB; needs torch for the other process
    python -m benchmarks.gpu.push_probe --small   tiny ones, on any device, without CUDA IPC

Prints a JSON object a line, each with a rate in GB/s: from the device to the host in both ways, a
copy on the host as it is and transposed, checksums, a transposed copy on the device, and what
`rollout.vllm.engine.WeightBuffer` does today, once after another. At last torch in another process
opens the memory of a jax array by its IPC handle, copies it and compares the sum.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import describe_error, emit

COLUMNS = 4096
CHILD_SECONDS = 60


class Handle(ctypes.Structure):
    """What names memory of a GPU to another process: `cudaIpcMemHandle_t`."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--small", action="store_true", help="tiny arrays, on any device")
    parser.add_argument("--gb", type=float, help="of the array; by default 4, or 0.01")
    parser.add_argument("--read", help=argparse.SUPPRESS)  # what the other process is given
    options = parser.parse_args(words)
    options.gb = options.gb or (0.01 if options.small else 4.0)
    return options


def report(what: str, size: int, run: Callable[[], Any], times: int = 2) -> Any:
    """Print the best rate of a few runs; return the last result."""
    seconds, result = [], None
    for _ in range(times):
        begun = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - begun)
    emit(what=what, gigabytes=size / 1e9, gigabytes_a_second=size / min(seconds) / 1e9)
    return result


def over_the_host(array: Any) -> None:
    """Print the rates of the steps that a push over the host consists of."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    size = array.nbytes
    copies = [jax.block_until_ready(array + 0) for _ in range(2)]  # numpy's copy would be kept
    on_host = report("device to host by numpy", size, lambda: np.asarray(copies.pop()))
    pinned = array.sharding.with_memory_kind("pinned_host")
    try:
        fetch = lambda: jax.block_until_ready(jax.device_put(array, pinned))  # noqa: E731
        report("device to pinned memory of the host", size, fetch)
    except Exception as error:
        emit(what="device to pinned memory of the host", error=describe_error(error))
    target = np.empty_like(on_host)
    report("copy on the host", size, lambda: np.copyto(target, on_host))
    part = on_host[: 2 * COLUMNS]
    turned = np.empty(part.shape[::-1], part.dtype)
    report("transposed copy on the host", part.nbytes, lambda: np.copyto(turned, part.T))
    report("crc32 on the host", part.nbytes, lambda: zlib.crc32(part.view(np.uint8)))
    turn = jax.jit(lambda x: jnp.transpose(x) + 0)
    jax.block_until_ready(turn(array))
    report("transposed copy on the device", size, lambda: jax.block_until_ready(turn(array)))


def by_the_buffer(shape: str) -> None:
    """Print the rate at which weights are written for vLLM today."""
    from benchmarks.gpu.ours import draw_params, layout_of
    from benchmarks.gpu.specs import spec_of
    from jaxrl_llm.rollout.vllm.engine import WeightBuffer

    spec = spec_of(shape)
    params, buffer = draw_params(spec, layout_of()), WeightBuffer(spec, "bfloat16")
    report(
        f"weights of {shape}, {len(buffer.entries)} arrays, written for vLLM",
        buffer.size,
        lambda: [None for _ in buffer.write(params, 0)],
    )
    buffer.close()


def by_ipc(array: Any) -> None:
    """Let torch in another process read a jax array; print what it prints."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    bits = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, jnp.int16))(array)
    total = int(np.asarray(bits).astype(np.int64).sum())
    driver, handle = _driver(), Handle()
    start, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    at = array.addressable_data(0).unsafe_buffer_pointer()
    found = driver.cuMemGetAddressRange_v2(
        ctypes.byref(start), ctypes.byref(size), ctypes.c_ulonglong(at)
    )
    got = driver.cuIpcGetMemHandle(ctypes.byref(handle), start)
    if found or got:
        emit(what="CUDA IPC", error=f"no handle: cuMemGetAddressRange {found}, handle {got}")
        return
    given = {
        "handle": bytes(handle).hex(),
        "offset": at - start.value,
        "size": array.nbytes,
        "total": total,
    }
    command = [sys.executable, "-m", "benchmarks.gpu.push_probe", "--read", json.dumps(given)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["-"]
        emit(what="CUDA IPC", error=f"the other process ended: {lines[-1][:200]}")
    for line in done.stdout.splitlines():
        print(line, flush=True)


def _driver() -> Any:
    """Return CUDA's driver, with the context that XLA uses as this thread's."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxSetCurrent(context)
    return driver


def read_by_torch(given: dict[str, Any]) -> None:
    """Copy the memory that a handle names, and print the rate and whether the sum is right."""
    import torch

    torch.empty(1, device="cuda")  # loads the runtime
    loaded = Path("/proc/self/maps").read_text().split()
    runtime = ctypes.CDLL(next(path for path in loaded if "libcudart" in path))
    handle, start = Handle(), ctypes.c_void_p()
    ctypes.memmove(ctypes.byref(handle), bytes.fromhex(given["handle"]), ctypes.sizeof(handle))
    opened = runtime.cudaIpcOpenMemHandle(ctypes.byref(start), handle, 1)
    if opened:
        emit(what="CUDA IPC", error=f"cudaIpcOpenMemHandle gave {opened}")
        return
    mine = torch.empty(given["size"] // 2, dtype=torch.int16, device="cuda")

    def copy() -> None:
        source = ctypes.c_void_p((start.value or 0) + given["offset"])
        to, size = ctypes.c_void_p(mine.data_ptr()), ctypes.c_size_t(given["size"])
        if status := runtime.cudaMemcpy(to, source, size, 3):  # from device to device
            raise RuntimeError(f"cudaMemcpy gave {status}")
        torch.cuda.synchronize()

    report("CUDA IPC: copy in torch's process", given["size"], copy, times=3)
    is_right = int(mine.sum(dtype=torch.int64)) == given["total"]
    emit(what="CUDA IPC: the sum is right", right=is_right)


def main(words: Sequence[str] | None = None) -> None:
    """Print the rows."""
    options = arguments(words)
    if options.read:
        read_by_torch(json.loads(options.read))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    import jax
    import jax.numpy as jnp

    rows = int(1e9 * options.gb) // 2 // COLUMNS
    draw = jax.jit(lambda key: jax.random.normal(key, (rows, COLUMNS), jnp.bfloat16))
    array = jax.block_until_ready(draw(jax.random.key(0)))
    if jax.default_backend() == "gpu":
        try:
            by_ipc(array)
        except Exception as error:
            emit(what="CUDA IPC", error=describe_error(error))
    else:
        emit(what="CUDA IPC", error="needs an NVIDIA GPU")
    over_the_host(array)
    by_the_buffer("tiny" if options.small else "qwen3-1.7b, 4 layers")


if __name__ == "__main__":
    main()
