"""Show that a change of the code changes no result: metrics and final parameters, bit for bit.

    python -m benchmarks.code.same_results record v0.1.0 before.json
    python -m benchmarks.code.same_results record HEAD after.json
    python -m benchmarks.code.same_results compare before.json after.json

`record` runs a commit's own configs in a clone of it: the quickstart whole, every recipe for 5
steps, the quickstart with an adapter and on 8 devices for 5 steps, and 100 steps of supervised
training. It writes each run's metrics and the SHA-256 of each tensor that it exports.
Both records must be of one machine, as processors round differently. About 25 minutes on 2 cores.

`compare` leaves timings out, and knows what was renamed in between by `--renamed OLD=NEW`.

Exit status 1: a run failed, or a result differs.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from benchmarks.tables import parser_of

ROOT = Path(__file__).resolve().parents[2]
TIMINGS = ("timing_s/", "perf/")
SHORT = ("steps=5", "validation.every=5")
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

Run = tuple[str, str, tuple[str, ...], dict[str, str]]  # program, config, overrides, environment


def runs(clone: Path) -> dict[str, Run]:
    """Return what is run, by name."""
    recipes = sorted(path.stem for path in (clone / "configs/recipes").glob("*.yaml"))
    mesh = ("mesh.train.data=2", "mesh.train.fsdp=2", "mesh.train.tensor=2")
    sft = ("steps=100", "export_to=runs/same_sft_model")
    return {
        "quickstart": ("train", "configs/quickstart.yaml", (), {}),
        "eight_devices": ("train", "configs/quickstart.yaml", (*SHORT, *mesh), EIGHT),
        "lora": ("train", "configs/quickstart_lora.yaml", SHORT, {}),
        "online_dpo": ("train", "configs/quickstart_online_dpo.yaml", SHORT, {}),
        "raft": ("train", "configs/quickstart_raft.yaml", SHORT, {}),
        "sft": ("sft", "configs/quickstart_sft.yaml", sft, {}),
        **{f"recipes/{n}": ("train", f"configs/recipes/{n}.yaml", SHORT, {}) for n in recipes},
    }


def record(commit: str, out: Path, only: Sequence[str] = ()) -> None:
    """Run everything at one commit, or only some runs by name, and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run(["git", "-C", clone, "checkout", "--quiet", commit], check=True)
        results = {}
        chosen = runs(clone)
        if unknown := sorted({*only} - chosen.keys()):
            sys.exit(f"no run {', '.join(unknown)}; expected some of {', '.join(chosen)}")
        for name, run in chosen.items():
            if only and name not in only:
                continue
            print(name, flush=True)
            results[name] = finish(clone, name, *run)
            out.write_text(json.dumps(results, indent=1))


def finish(
    clone: Path, name: str, program: str, config: str, overrides: tuple[str, ...], env: Any
) -> dict[str, Any]:
    """Run one program to its end; return its metrics and the digests of its parameters."""
    run_dir = f"runs/same/{name}"

    def start(*words: str) -> None:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(clone)} | env
        environment["JAX_COMPILATION_CACHE_DIR"] = str(clone / "compiled")
        done = subprocess.run(
            [sys.executable, "-m", *words],
            check=False,
            cwd=clone,
            env=environment,
            capture_output=True,
        )
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.decode()[-2000:]}")

    start(f"jaxrl_llm.{program}", "--config", config, f"run_dir={run_dir}", *overrides)
    lines = (clone / run_dir / "metrics.jsonl").read_text().splitlines()
    model = f"runs/same/model_{name}"
    start("jaxrl_llm.export", run_dir, model)
    tensors = {
        key: hashlib.sha256(value.tobytes()).hexdigest()
        for path in sorted((clone / model).glob("*.safetensors"))
        for key, value in load_file(path).items()
    }
    return {"metrics": [json.loads(line) for line in lines], "tensors": tensors}


def compare(before: Path, after: Path, renamed: dict[str, str]) -> list[str]:
    """Return a line for each run whose results differ."""

    def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {renamed.get(n, n): v for n, v in line.items() if not n.startswith(TIMINGS)}
            for line in lines
        ]

    first, second = json.loads(before.read_text()), json.loads(after.read_text())
    wrong = [f"{name}: only in one record" for name in sorted(first.keys() ^ second.keys())]
    for name in sorted(first.keys() & second.keys()):
        metrics, others = (untimed(results[name]["metrics"]) for results in (first, second))
        differing = {
            key
            for one, other in zip(metrics, others, strict=False)
            for key in one.keys() | other.keys()
            if one.get(key) != other.get(key)
        }
        if len(metrics) != len(others) or differing:
            wrong.append(
                f"{name}: {len(metrics)} and {len(others)} lines of metrics, different are "
                f"{', '.join(sorted(differing)) or 'none'}"
            )
        if first[name]["tensors"] != second[name]["tensors"]:
            wrong.append(f"{name}: other parameters")
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("commit")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some runs")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW")
    options = parser.parse_args(words)
    if options.command == "record":
        record(options.commit, options.out, options.only)
        return 0
    renamed = dict(pair.split("=") for pair in options.renamed)
    wrong = compare(options.before, options.after, renamed)
    same = len(json.loads(options.before.read_text()))
    print("\n".join(wrong) or f"{same} runs: the same metrics and parameters, bit for bit")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
