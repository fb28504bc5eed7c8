"""What digests cost a checkpoint: seconds of a save and of a restore, with and without them.

    python -m benchmarks.training.checkpoint [--gb 1] [--repeats 15] [--folder DIR] [--cold]

The state has matrices and Adam's two moments of them. What is measured with digests alternates with
the same without; the table has the best of each, and their ratio. A save is timed to its end on the
disk, and begins when the disk has nothing else to write. Restores read files that the system has in
memory; with --cold, which needs root, they read the disk, as after a restart. Programs are compiled
before.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.runs import checkpoint
from jaxrl_llm.runs.checkpoint import Checkpoints


def make_state(gb: float) -> dict[str, Any]:
    """Return arrays of so many GB in all, as those of 12 stacked matrices with moments."""
    width, rng = 1024, np.random.default_rng(0)
    layers = max(1, round(gb * 1e9 / (4 * width * width * 12 * 3)))
    shape = (layers, width, width)
    names = [f"{part}/{i}" for part in ("params", "mu", "nu") for i in range(12)]
    return {name: jax.device_put(rng.normal(size=shape).astype(np.float32)) for name in names}


@contextlib.contextmanager
def without_digests() -> Iterator[None]:
    """Let digests be zeros that nobody computes, and nobody compares, for the block."""

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: np.uint32(0), tree)

    with (
        mock.patch.object(checkpoint, "digests", zeros),
        mock.patch.object(checkpoint, "_check_digests", lambda arrays, state: None),
    ):
        yield


def seconds_of_save(folder: Path, state: Any) -> float:
    """Return the seconds of a save, to its end on the disk; the folder is gone afterwards."""
    checkpoints = Checkpoints(folder, keep=None)
    os.sync()
    start = time.perf_counter()
    checkpoints.save(1, state, {})
    checkpoints.wait()
    seconds = time.perf_counter() - start
    checkpoints.close()
    shutil.rmtree(folder)
    return seconds


def seconds_of_restore(folder: Path, like: Any, *, cold: bool) -> float:
    """Return the seconds of a restore."""
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    checkpoints = Checkpoints(folder, keep=None, read_only=True)
    start = time.perf_counter()
    jax.block_until_ready(checkpoints.restore(like).state)
    seconds = time.perf_counter() - start
    checkpoints.close()
    return seconds


def compare(measure: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Return the least seconds with and without digests; the first measurement counts for none."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    measure()
    for _ in range(repeats):
        for kind, context in (("with", contextlib.nullcontext()), ("without", without_digests())):
            with context:
                times[kind].append(measure())
    return min(times["with"]), min(times["without"])


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--folder", help="on the disk to measure; default a temporary one")
    parser.add_argument("--cold", action="store_true", help="let restores read the disk")
    options = parser.parse_args(words)
    folder = Path(options.folder or tempfile.mkdtemp()) / "checkpoints"
    state = make_state(options.gb)
    like = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in state.items()
    }
    rows = {"save": compare(partial(seconds_of_save, folder, state), options.repeats)}
    checkpoints = Checkpoints(folder, keep=None)
    checkpoints.save(1, state, {})
    checkpoints.close()
    del state
    rows["restore"] = compare(
        partial(seconds_of_restore, folder, like, cold=options.cold), options.repeats
    )
    shutil.rmtree(folder)
    print(f"{describe_run('training.checkpoint', words)}, jax {jax.__version__}\n")
    lines = [[n, f"{yes:.2f}", f"{no:.2f}", f"{yes / no:.2f}"] for n, (yes, no) in rows.items()]
    print(markdown_table(["operation", "with digests, s", "without, s", "ratio"], lines))


if __name__ == "__main__":
    main()
