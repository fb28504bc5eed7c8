"""What XLA's GPU compiler makes of planned runs, for H200s that are not there: a table.

    python -m benchmarks.planning.gpu_programs --json after.json
    python -m benchmarks.planning.gpu_programs --tree ../before --json before.json
    python -m benchmarks.planning.gpu_programs --tables before.json after.json

    python -m benchmarks.planning.gpu_programs --cases Qwen3-1.7B-1 --steps "engine decode"

It needs jax's CUDA plugin (the extra `gpu-compiler`). Each case compiles in a process of its own
with the library of `--tree`, so that an older tree can be measured; the texts are kept in
`--programs` and read by this tree. Small models take seconds, the largest minutes a program.

Exit status 1: a program was not compiled.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import markdown_table, parser_of
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import parameter_count
from jaxrl_llm.planning.program import count_operations, list_loops
from jaxrl_llm.planning.steps import UNMERGED, UNTUNED, describe_topology, gpu_devices

ROOT = Path(__file__).resolve().parents[2]
ACCUMULATE, DECODE = "actor accumulate", "engine decode"
REST = ("actor apply", "actor infer", "engine prefill")
LIMIT = 1800
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
GIB = 2**30


class Case(NamedTuple):
    """A model, its config in `configs/plan/`, the number of GPUs, and keys to change."""

    model: str
    config: str
    devices: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return its name in files."""
        return f"{self.model}-{self.devices}"


def _spread(data: int, fsdp: int) -> tuple[str, ...]:
    devices = data * fsdp
    return (
        f"mesh.train.data={data}",
        f"mesh.train.fsdp={fsdp}",
        f"mesh.rollout.data={devices}",
        f"rollout.max_running_sequences={64 * devices}",
        f"batch.prompts_per_step={min(64 * devices, 2048)}",
    )


CASES = (
    Case("Qwen3-1.7B", "qwen3_1.7b", 1),
    Case("Qwen3-1.7B", "qwen3_1.7b", 8, _spread(1, 8)),
    Case("Qwen3-1.7B", "qwen3_1.7b", 256, _spread(32, 8)),
    Case("Qwen3-8B", "qwen3_8b", 8),
    Case("Qwen3-32B", "qwen3_32b", 32),
    Case("Qwen3-235B-A22B", "qwen3_235b", 128),
    Case("DeepSeek-V3", "deepseek_v3", 256),
)


def compile_case(case: Case, steps: Sequence[str], tree: Path, programs: Path) -> None:
    """Compile a case's steps that are not in the folder yet, with the library of a tree."""
    target, topology = describe_topology("H200", case.devices)
    order = {
        "config": str(ROOT / "configs/plan" / f"{case.config}.yaml"),
        "overrides": list(case.overrides),
        "target": target,
        "topology": topology,
        "steps": list(steps),
        "options": {step: {**UNTUNED, **(UNMERGED if step == DECODE else {})} for step in steps},
        "folder": str((programs / case.name).resolve()),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(order, file)
        file.flush()
        script = str(Path(__file__).with_name("compile_steps.py"))
        # the plugin may stand in a folder of PYTHONPATH, beside the environment
        paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-P", script, file.name]
        try:
            subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=LIMIT)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{case.name}: {error}", file=sys.stderr)


def read_step(case: Case, step: str, programs: Path) -> dict[str, Any] | None:
    """Return what a compiled step does, as JSON; None if it is not in the folder."""
    known = programs / case.name / f"{step.replace(' ', '_')}.json"
    if not known.exists():
        return None
    facts = json.loads(known.read_text())
    text = gzip.decompress(known.with_suffix(".hlo.gz").read_bytes()).decode()
    counted = count_operations(text, facts["axes"])
    sent: Counter[str] = Counter()
    for over, size in counted.sent.items():
        sent[over.kind] += round(size)
    loops = Counter(
        (
            loop.source.partition("/")[2],
            loop.depth,
            loop.trips,
            round(loop.once.plus(loop.branches).fewest),
            round(loop.once.plus(loop.branches).kernels),
            round(loop.once.moved),
            sum(n for over, n in loop.once.arrays.items() if over.kind == "all-gather"),
        )
        for loop in list_loops(text, facts["axes"])
    )
    names = ("source", "depth", "trips", "fewest", "kernels", "moved", "gathered")
    return {
        "model": case.model,
        "devices": case.devices,
        "step": step,
        "axes": facts["axes"],
        "scratch": facts["sizes"]["temp"],
        "alias": facts["sizes"]["alias"],
        "seconds": facts["seconds"],
        "host": facts["host"],
        "tflop": counted.flops / 1e12,
        "sent": dict(sent),
        "kernels": [counted.fewest, counted.kernels],
        "moved": counted.moved,
        "loops": [
            dict(zip(names, loop, strict=True)) | {"times": times} for loop, times in loops.items()
        ],
    }


def formula_gb(row: dict[str, Any]) -> float | None:
    """Return the bytes of two gathers in bfloat16 and one scatter of gradients in float32, in GB.

    Over `data` gradients are added up besides. None for mixtures of experts.
    """
    spec, axes = read_spec(ROOT / "configs/plan" / row["model"]), row["axes"]
    if spec.moe is not None:
        return None
    data, fsdp, tensor = (axes.get(axis, 1) for axis in ("data", "fsdp", "tensor"))
    weights = parameter_count(spec) / tensor / 1e9
    return weights * (8 * (fsdp - 1) + 8 * (data - 1) / data) / fsdp


def update_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of an update: memory, bytes by kind, gathers, trips, kernels, seconds."""
    formula, sent = formula_gb(row), row["sent"]
    gathers = [loop["gathered"] for loop in row["loops"] if loop["gathered"] and not loop["depth"]]
    others = [loop["trips"] for loop in row["loops"] if not loop["gathered"] and not loop["depth"]]
    return [
        f"{row['scratch'] / GIB:.2f}",
        *(f"{sent.get(kind, 0) / 1e9:.2f}" for kind in KINDS),
        f"{sum(sent.values()) / 1e9:.2f}",
        "-" if formula is None else f"{formula:.2f}",
        " + ".join(map(str, gathers)) or "-",
        ", ".join(map(str, others)) or "-",
        f"{row['kernels'][1]:.0f}",
        f"{row['moved'] / 1e9:.0f}",
        f"{row['seconds']:.0f}",
    ]


def decode_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of decoding: memory, bytes of collectives, kernels of a token, seconds."""
    token = next((loop for loop in row["loops"] if loop["trips"] is None), None)
    kernels = [token["fewest"], token["kernels"]] if token else row["kernels"]
    inner = sum(loop["times"] * loop["trips"] for loop in row["loops"] if loop["trips"])
    return [
        f"{row['scratch'] / GIB:.2f}",
        f"{sum(row['sent'].values()) / 1e6:.1f}",
        " to ".join(f"{n:.0f}" for n in dict.fromkeys(kernels)),
        str(inner),
        f"{(token or row)['moved'] / 1e9:.1f}",
        f"{row['seconds']:.0f}",
    ]


def other_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of any other step."""
    return [
        f"{row['scratch'] / GIB:.2f}",
        f"{sum(row['sent'].values()) / 1e9:.2f}",
        f"{row['kernels'][1]:.0f}",
        f"{row['seconds']:.0f}",
    ]


TABLES = (
    (
        (ACCUMULATE,),
        update_cells,
        "scratch, GiB|all-gather, GB|reduce-scatter|all-reduce|all-to-all|together|formula"
        "|gathered per layer|trips of others|kernels|memory, GB|compiled in, s",
    ),
    (
        (DECODE,),
        decode_cells,
        "scratch, GiB|collectives, MB|kernels per token|trips of inner loops|memory, GB"
        "|compiled in, s",
    ),
    (REST, other_cells, "scratch, GiB|collectives, GB|kernels|compiled in, s"),
)


def join_tables(results: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return the tables of one tree's results, or of several: cells that differ as `a → b`."""
    tables = []
    for steps, cells, columns in TABLES:
        rows: dict[tuple[str, int, str], list[list[str]]] = {}
        for result in results:
            for row in result:
                if row["step"] in steps:
                    key = row["model"], row["devices"], row["step"]
                    rows.setdefault(key, []).append(cells(row))
        lines = [
            [*key, *(" → ".join(dict.fromkeys(cell)) for cell in zip(*trees, strict=True))]
            for key, trees in rows.items()
        ]
        if lines:
            tables.append(markdown_table(["model", "GPUs", "program", *columns.split("|")], lines))
    return "\n\n".join(tables)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where a program is missing."""
    parser = parser_of(__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose library is compiled")
    parser.add_argument("--programs", type=Path, help="folder of the texts; a temporary one")
    parser.add_argument("--cases", help="some of them, as Qwen3-1.7B-8,Qwen3-8B-8")
    parser.add_argument("--steps", default=",".join((ACCUMULATE, DECODE, *REST)))
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--tables", nargs="+", type=Path, help="print results that were written")
    options = parser.parse_args(words)
    if options.tables:
        print(join_tables([json.loads(path.read_text()) for path in options.tables]))
        return 0
    try:
        gpu_devices("H200", 1)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    chosen = options.cases.split(",") if options.cases else [case.name for case in CASES]
    cases, steps = [case for case in CASES if case.name in chosen], options.steps.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        programs = options.programs or Path(temporary)
        for case in cases:
            compile_case(case, steps, options.tree.resolve(), programs)
        rows = [read_step(case, step, programs) for case in cases for step in steps]
    results = [row for row in rows if row is not None]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print(join_tables([results]))
    return int(len(results) < len(rows))


if __name__ == "__main__":
    sys.exit(main())
