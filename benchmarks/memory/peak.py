"""What training and loading cost in memory: log-probs, rematerialisation, loading.

    python -m benchmarks.memory.peak            all tables, as Markdown
    python -m benchmarks.memory.peak --small    their smallest sizes
    python -m benchmarks.memory.peak load DIRECTORY DTYPE    one measurement of loading, as JSON

The first two tables give the scratch memory that XLA plans for the compiled gradient, besides
inputs and results; nothing is run, so that a busy machine gives the same. The third is measured in
fresh processes on a model of over 1 GB with random weights: the peak of the resident set.
"""

import gc
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tables import describe_run, markdown_head, markdown_row, parser_of
from jaxrl_llm.algorithms.logprobs import token_stats
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.files import find_arrays
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.layers import POLICIES
from jaxrl_llm.models.parameters import declare, init_params
from jaxrl_llm.models.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
GPU = jax.default_backend() != "cpu"
WIDTH = 2048 if GPU else 128
MIB, GB = 2**20, 10**9

SMALL: dict[str, Any] = dict(
    heads=8,
    kv_heads=4,
    head_dim=64,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=4096,
)


def scratch(function: Any, *arguments: Any) -> float:
    """Return the scratch memory in MiB of a function under jit, of arguments or their shapes."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes / MIB


class Sizes(NamedTuple):
    """What is measured: tokens, vocabularies and chunks of log-probs, rows x length of layers."""

    tokens: tuple[int, ...]
    vocabularies: tuple[int, ...]
    chunks: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


SIZES = Sizes((1024, 4096), (8000, 32000), (256, 1024), ((2, 512), (8, 128)))
GPU_SIZES = Sizes((8192, 32768), (32000, 151936), (1024, 4096), ((8, 4096), (32, 1024)))
SMALL_SIZES = Sizes((1024,), (8000,), (256,), ((2, 128),))


def print_logprobs(dtype: str, sizes: Sizes) -> None:
    """Print the scratch of a gradient through log-probs and entropies, by tokens, V and chunk."""
    print(f"\nGradient of log-probs and entropies, D = {WIDTH}, {dtype}:\n")
    names = ["tokens T", "V", "chunk", "T·V float32, MiB", "chunk·V float32, MiB", "scratch, MiB"]
    print(markdown_head(names))
    for tokens, vocab in itertools.product(sizes.tokens, sizes.vocabularies):
        hidden = jax.ShapeDtypeStruct((tokens, WIDTH), dtype)
        head = jax.ShapeDtypeStruct((WIDTH, vocab), jnp.float32)
        targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        for chunk in sorted({*sizes.chunks, tokens}):

            def total(hidden: Any, head: Any, targets: Any, chunk: int = chunk) -> Any:
                stats = token_stats(hidden, head, targets, chunk=chunk)
                return stats.logprobs.sum() + stats.entropy.sum()

            arrays = [4 * n * vocab / MIB for n in (tokens, chunk)]
            taken = scratch(jax.grad(total, (0, 1)), hidden, head, targets)
            cells = [tokens, vocab, chunk, *(f"{size:.0f}" for size in (*arrays, taken))]
            print(markdown_row(cells), flush=True)


def print_remat(dtype: str, sizes: Sizes) -> None:
    """Print the scratch of a gradient through the decoder, by policy and rows."""
    spec = ModelSpec(vocab_size=1000, hidden_size=512, layers=8, ff_width=1536, **SMALL)
    params = jax.eval_shape(lambda: init_params(spec, key=jax.random.key(0)))
    print(f"\nGradient through {spec.layers} layers, D = {spec.hidden_size}, {dtype}:\n")
    unit_name = "scratch / (layers · token · D numbers)"
    print(markdown_head(["rows × length", "remat", "scratch, MiB", unit_name]))
    for shape, policy in itertools.product(sizes.rows, POLICIES):
        rows = [jax.ShapeDtypeStruct(shape, jnp.int32)] * 3

        def total(params: Any, rows: Any, policy: str = policy) -> Any:
            options = {"dtype": jnp.dtype(dtype), "remat": policy}
            hidden, _ = Decoder(spec).hidden_states(params, *rows, **options)
            return jnp.square(hidden.astype(jnp.float32)).sum()

        taken = scratch(jax.grad(total), params, rows)
        numbers = spec.layers * shape[0] * shape[1] * spec.hidden_size
        unit = numbers * jnp.dtype(dtype).itemsize / MIB
        size = f"{shape[0]} × {shape[1]}"
        cells = [size, f"`{policy}`", f"{taken:.0f}", f"{taken / unit:.1f}"]
        print(markdown_row(cells), flush=True)


def peak_gb() -> float:
    """Return the largest resident set of this process so far.

    On Linux getrusage also counts what the parent held when it started this process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 / GB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GB


def make_model(directory: Path, dtype: str, *, small: bool) -> None:
    """Save a model of 1 GB, or of 20 MB, in 500 MB files."""
    size = {"float32": (1024, 3072, 20), "bfloat16": (1536, 4096, 22)}[dtype]
    width, ff_width, layers = (256, 512, 2) if small else size
    spec = ModelSpec(
        vocab_size=8000 if small else 32000,
        hidden_size=width,
        layers=layers,
        ff_width=ff_width,
        **SMALL,
    )
    params = jax.jit(init_params, static_argnums=0)(spec, key=jax.random.key(0))
    kind = jnp.dtype(dtype)
    save_params(directory, params, spec, source=None, dtype=kind, max_shard_bytes=5 * 10**8)


def measure_loading(directory: Path) -> dict[str, float]:
    """Load a directory in float32 and save it again; return what the host held, in GB."""
    spec = read_spec(directory)
    jax.block_until_ready(jnp.zeros(8) + 1)
    gc.collect()
    declared = jax.tree.leaves(declare(spec))
    figures: dict[str, float] = {
        "before_gb": peak_gb(),
        "model_gb": sum(4 * np.prod(decl.shape) for decl in declared) / GB,
        "largest_array_gb": max(4 * np.prod(decl.shape) for decl in declared) / GB,
    }
    stored = find_arrays(directory)
    sizes = [array.map().nbytes for array in stored.values()]
    figures |= {"stored_gb": sum(sizes) / GB, "largest_stored_gb": max(sizes) / GB}
    params = jax.block_until_ready(load_params(directory, spec))
    figures["load_peak_gb"] = peak_gb()
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        save_params(Path(folder) / "x", params, spec, source=directory, dtype=jnp.float32)
        figures["save_peak_gb"] = peak_gb()
    return figures


def load_in_processes(directory: Path, dtype: str, *, small: bool) -> dict[str, float]:
    """Make a model in one process and load it in another, so that only loading is measured."""
    here = [sys.executable, "-m", "benchmarks.memory.peak", *(["--small"] if small else [])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    for step in ("make", "measure"):
        command = [*here, step, directory / dtype, dtype]
        done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def print_loading(*, small: bool) -> None:
    """Print the peak of host memory while a model is loaded, and after it is saved."""
    print(
        "\nLoading into float32 on the CPU, each in a separate process, GB of the resident set:\n"
    )
    names = ["stored as", "on disk", "model", "largest array", "before", "peak, loaded"]
    print(markdown_head([*names, "peak, saved"]))
    columns = ("stored_gb", "model_gb", "largest_array_gb", "before_gb", "load_peak_gb")
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            figures = load_in_processes(Path(folder), dtype, small=small)
        cells = [f"{figures[name]:.2f}" for name in (*columns, "save_peak_gb")]
        print(markdown_row([dtype, *cells]), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Run what the command line names."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="to see that all of it runs")
    parser.add_argument(
        "what", nargs="?", choices=("all", "load", "make", "measure"), default="all"
    )
    parser.add_argument("directory", nargs="?", type=Path, help="of a model that is made there")
    parser.add_argument("dtype", nargs="?", choices=("float32", "bfloat16"))
    options = parser.parse_args(words)
    directory, dtype, small = options.directory, options.dtype, options.small
    if options.what != "all" and dtype is None:
        parser.error(f"{options.what}: expected DIRECTORY and DTYPE")
    if options.what == "make":
        make_model(directory, dtype, small=small)
    elif options.what == "measure":
        print(json.dumps(measure_loading(directory)))
    elif options.what == "load":
        print(json.dumps(load_in_processes(directory, dtype, small=small)))
    else:
        print(f"{describe_run('memory.peak', words)}, jax {jax.__version__}")
        print(jax.devices()[0].device_kind)
        sizes = SMALL_SIZES if small else GPU_SIZES if GPU else SIZES
        for dtype in ("float32", "bfloat16"):
            print_logprobs(dtype, sizes)
        for dtype in ("float32", "bfloat16"):
            print_remat(dtype, sizes)
        print_loading(small=small)


if __name__ == "__main__":
    main()
