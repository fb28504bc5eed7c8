"""What the programs of a step cost, in FLOPs and bytes: a table that needs no clock and no GPU.

    python -m benchmarks.planning.costs                         the costs beside those of the file
    python -m benchmarks.planning.costs --write --why REASON    put what has changed into the file

The programs are those of the first update, of the reference's log-probs and of the engine, as
`jaxrl_llm.plan` builds them from a config, for shapes alone. They are counted three times:

- `traced`: before any compiler has seen them, so with every version of jax alike. FLOPs are of
  matrix products. Bytes are what all operations read and write, if none are fused; those of
  unsigned integers are left out, as jax draws random bits otherwise in each version.
- `cpu` and `H200`: as XLA compiles them in float32 for a CPU and in bfloat16 for a GPU that is not
  there (with jax's CUDA plugin), by `planning.program`. Temporary bytes are what XLA plans besides
  arguments and results. They hold for the version of jaxlib that the file names.

A loop counts as often as it runs, of a conditional the costliest branch, and of the loop over
drawn tokens, which ends where all sequences have, one token. `costs.yaml` holds the figures of
each program with the day and the reason of their last change. `tests/planning/test_costs.py` fails
where one differs from its program by more than 2 %, in either direction: what has become cheaper
stays so. Compiling takes five minutes on a quiet core; `--backends traced --models tiny`, seconds.
"""

import argparse
import dataclasses
import datetime
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend
import numpy as np
import yaml
from jaxlib.version import __version__ as JAXLIB

from benchmarks.training import workloads
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.packing import choose_rows
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.config import make_config
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.planning.program import count_operations
from jaxrl_llm.planning.steps import UNMERGED, UNTUNED, gpu_devices
from jaxrl_llm.training.compile import ENGINE, RunShapes, StepId, StepKind, plan_shapes

FILE = Path(__file__).with_name("costs.yaml")
TOLERANCE = 0.02
LEAST = 1e5
"""FLOPs or bytes that are no difference, as of an update's few scalars."""

PROMPT_TOKENS = 16
DTYPES = {"traced": "float32", "cpu": "float32", "H200": "bfloat16"}
TINY = workloads.spec_of(workloads.MODELS["tiny"])
MODELS: Mapping[str, ModelSpec] = {
    "tiny": TINY,
    "small": workloads.spec_of(workloads.MODELS["small"]),
    "mixture": dataclasses.replace(TINY, moe=MoeSpec(experts=8, experts_per_token=2, ff_width=192)),
    "hybrid": dataclasses.replace(
        TINY,
        gated_attention=True,
        unit_offset_norms=True,  # as Qwen3.5
        delta=DeltaSpec(key_heads=2, value_heads=4, key_width=32, value_width=32),
        delta_layers=(True, True, True, False),
    ),
}
PROGRAMS = {
    "accumulate": StepId("actor", StepKind.ACCUMULATE),
    "apply": StepId("actor", StepKind.APPLY),
    "log-probs": StepId("reference", StepKind.INFER),
    "prefill": StepId(ENGINE, StepKind.PREFILL),
    "decode": StepId(ENGINE, StepKind.DECODE),
}


class Cost(NamedTuple):
    """What a program costs in one run; `temp` is 0 for one that is only traced."""

    flops: float
    bytes: float
    temp: float = 0.0


class Row(NamedTuple):
    """A line of the file: a cost, and why it is what it is."""

    cost: Cost
    why: str


class File(NamedTuple):
    """The file: rows by backend and program, and the jaxlib that compiled those of a backend."""

    versions: dict[str, str]
    rows: dict[str, dict[str, Row]]

    def is_of_this_jaxlib(self, backend: str) -> bool:
        """Tell whether the figures of a backend hold for the jaxlib that is installed."""
        return backend == "traced" or self.versions[backend] == JAXLIB


UNITS = {"flops": ("mflop", 1e6), "bytes": ("mb", 1e6), "temp": ("temp_mb", 1e6)}


def plan_model(model: str, backend: str) -> RunShapes:
    """Return the run of a model of the comparison with other libraries, as shapes."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(make_config(MODELS[model]))
        Path(folder, "config.json").write_text(config)
        tree = {
            "run_dir": folder,
            "steps": 1,
            "model": {"path": folder, "random_init": True, "dtype": DTYPES[backend]},
            "data": {"train": "none.parquet", "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "samples_per_prompt": workloads.SAMPLES,
                "max_new_tokens": workloads.NEW_TOKENS,
                "max_running_sequences": workloads.PROMPTS * workloads.SAMPLES,
            },
            "algorithm": {
                "advantage": "grpo",
                "loss": "ppo_clip",
                "kl_loss": "k3",
                "kl_coef": workloads.KL_COEF,
            },
            "optim": {"optimizer": {"fn": "adamw"}, "grad_clip": workloads.GRAD_CLIP},
            "batch": {"prompts_per_step": workloads.PROMPTS},
        }
        devices = gpu_devices(backend, 1) if backend == "H200" else jax.devices("cpu")[:1]
        return plan_shapes(from_tree(TrainConfig, tree), devices)


def measure(model: str, backend: str) -> dict[str, Cost]:
    """Return what each program of a model costs.

    Args:
        model: one of `MODELS`.
        backend: one of `DTYPES`.

    Raises:
        ConfigError: XLA's compiler for GPUs is not installed.
    """
    shapes, costs = plan_model(model, backend), {}
    for name, step in PROGRAMS.items():
        inputs = []
        role = shapes.roles.get(step.role)
        if role and step.kind is not StepKind.APPLY:  # these two read micro-batches
            longest = np.full(role.update_shape.sequences, role.update_shape.width)
            inputs = [choose_rows(longest, role.update_shape)]
        traced = shapes.trace[step](*inputs)
        if backend == "traced":
            costs[f"{model} {name}"] = count_traced(traced.jaxpr.jaxpr)
            continue
        options = {**UNTUNED, **(UNMERGED if name == "decode" else {})} if backend == "H200" else {}
        compiled = traced.lower().compile(compiler_options=options)
        counted = count_operations(compiled.as_text(), {"data": 1})
        temp = compiled.memory_analysis().temp_size_in_bytes
        costs[f"{model} {name}"] = Cost(counted.flops, counted.moved, temp)
    return costs


def count_traced(program: Any) -> Cost:
    """Count the products and bytes of a traced program, a jaxpr.

    >>> import jax.numpy as jnp
    >>> def run(x): return jax.lax.scan(lambda x, _: (x @ x, None), x, length=3)[0]
    >>> traced = jax.jit(run).trace(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    >>> count_traced(traced.jaxpr.jaxpr)[:2]  # three products of 4 x 4, and 4 bytes of each number
    (384.0, 576.0)
    """
    flops = moved = 0.0
    for line in program.eqns:
        parts = [count_traced(part) for part in _parts(line.params)]
        if line.primitive.name == "cond":
            parts = [max(parts)]
        times = line.params["length"] if line.primitive.name == "scan" else 1
        flops += times * sum(part.flops for part in parts)
        moved += times * sum(part.bytes for part in parts)
        if not parts and line.primitive.name != "reshard":  # which jax 0.12 adds and moves nothing
            moved += sum(_size(variable.aval) for variable in (*line.invars, *line.outvars))
        if line.primitive.name == "dot_general":
            (contracted, _), _ = line.params["dimension_numbers"]
            sizes = [line.invars[0].aval.shape[axis] for axis in contracted]
            flops += 2 * math.prod((*line.outvars[0].aval.shape, *sizes))
    return Cost(float(flops), float(moved))


def _parts(values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the programs that an operation runs."""
    for value in values.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, jax.extend.core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, jax.extend.core.Jaxpr):
                yield part


def _size(aval: Any) -> int:
    """Return the bytes of an array, or of what a reference is to."""
    aval = getattr(aval, "inner_aval", aval)
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype.kind == "u":
        return 0
    return math.prod(aval.shape) * dtype.itemsize


def read_file(path: Path = FILE) -> File:
    """Read the file."""
    tree = yaml.safe_load(path.read_text())
    rows = {
        backend: {
            name: Row(Cost(**{k: line.get(n, 0.0) * u for k, (n, u) in UNITS.items()}), line["why"])
            for name, line in (tree[backend] or {}).items()
        }
        for backend in DTYPES
    }
    return File(tree["jaxlib"], rows)


def write_file(file: File, path: Path = FILE) -> None:
    """Write the file, a line for each program."""
    lines = [
        "# What the programs of a step cost. `python -m benchmarks.planning.costs` writes it; its",
        "# docstring says how they are counted. Who makes one dearer says why in its line.",
        "# mflop: a million operations; mb: a million bytes, read or written; temp_mb: of scratch.",
        f"jaxlib: {json.dumps(file.versions)}",
    ]
    for backend, rows in file.rows.items():
        lines += ["", f"{backend}:"]
        lines += [format_row(name, row) for name, row in rows.items()]
    path.write_text("".join(f"{line}\n" for line in lines))


def format_row(name: str, row: Row) -> str:
    """Return a line of the file."""
    figures = [
        f"{unit}: {float(f'{value / size:.5g}'):.10g}"
        for value, (unit, size) in zip(row.cost, UNITS.values(), strict=True)
        if value
    ]
    return f"  {name}: {{{', '.join(figures)}, why: {json.dumps(row.why, ensure_ascii=False)}}}"


def changes(known: Mapping[str, Row], measured: Mapping[str, Cost], tolerance: float) -> list[str]:
    """Return a line for each figure that differs from the file's by more than a share of it."""
    lines = []
    for name, cost in measured.items():
        if name not in known:
            lines.append(f"{name}: not in the file")
            continue
        for kind, was, now in zip(Cost._fields, known[name].cost, cost, strict=True):
            if abs(now - was) > max(tolerance * was, LEAST):
                share = f" ({now / was - 1:+.1%})" if was else ""
                lines.append(f"{name}: {kind} {was:.5g} -> {now:.5g}{share}")
    return lines


def updated(file: File, backend: str, measured: Mapping[str, Cost], why: str) -> File:
    """Return the file with a reason for what has changed by a thousandth or more."""
    known = dict(file.rows[backend])
    for name, cost in measured.items():
        if changes(known, {name: cost}, 0.001):
            known[name] = Row(cost, f"{datetime.date.today()} {why}")
    return file._replace(rows={**file.rows, backend: known})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning.costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, with commas")
    parser.add_argument("--backends", default=",".join(DTYPES), help="some of them, with commas")
    parser.add_argument("--write", action="store_true", help="put what has changed into the file")
    parser.add_argument("--why", metavar="REASON", help="for each line that has changed")
    options = parser.parse_args(arguments)
    if options.write and not options.why:
        parser.error("--write: expected --why REASON, which stands beside each figure that changes")
    file, lines, models = read_file(), [], options.models.split(",")
    for backend in options.backends.split(","):
        if not file.is_of_this_jaxlib(backend):
            print(f"{backend}: of jaxlib {file.versions[backend]}; installed is {JAXLIB}")
            if options.write and set(models) != set(MODELS):
                parser.error("--models: expected all models for another version of jaxlib")
        for model in models:
            measured = measure(model, backend)
            for name, cost in measured.items():
                print(backend, format_row(name, Row(cost, "")).strip(), flush=True)
            differing = changes(file.rows[backend], measured, TOLERANCE)
            lines += [f"{backend} {line}" for line in differing]
            file = updated(file, backend, measured, options.why or "")
        if backend in file.versions:
            file.versions[backend] = JAXLIB
    print("\n".join(["", *lines]) if lines else "nothing differs by more than 2 %")
    if options.write:
        write_file(file)
    return bool(lines) and not options.write


if __name__ == "__main__":
    sys.exit(main())
