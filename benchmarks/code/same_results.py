"""Show that a change of the code changes no result: metrics and final parameters, bit for bit.

    python -m benchmarks.code.same_results record v0.1.0 before.json
    python -m benchmarks.code.same_results record HEAD after.json
    python -m benchmarks.code.same_results compare before.json after.json

`record` runs a commit's own configs in a clone of it: the quickstart whole, every recipe for 5
steps, the quickstart with an adapter, on 8 devices, by two processes and asynchronously, an agent
with a tool and a model that sees (5 steps each, after a short warm start), 100 steps of supervised
training and 20 of DPO. It writes each run's metrics and the SHA-256 of each tensor that it exports.
Both records must be of one machine, as processors round differently. About 30 minutes on 2 cores.

`compare` leaves timings out, and knows what was renamed in between by `--renamed OLD=NEW`.

Exit status 1: a run failed, or a result differs.
"""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from safetensors.numpy import load_file

from benchmarks.tables import parser_of

ROOT = Path(__file__).resolve().parents[2]
TIMINGS = re.compile(r"timing_s/|perf/|episode/seconds|tools/.*/seconds")
SHORT = ("steps=5", "validation.every=5")
PAIRS = "runs/quickstart/data/pairs.jsonl"
PREFER = {
    "export_to": "runs/same_prefer_model",
    "model": {"path": "runs/quickstart/base"},
    "steps": 20,
    "loss": {"fn": "dpo", "beta": 0.5},
    "data": {"train": PAIRS, "validation": PAIRS, "max_tokens": 16},
    "optim": {"schedule": {"fn": "constant_schedule", "value": 3e-5}},
    "batch": {"pairs_per_step": 64, "max_tokens_per_device": 1024},
    "validation": {"every": 10},
}
SHORTER = {r"^steps: \d{3,}": "steps: 100", r"sft_(rows|episodes): \d{4,}": r"sft_\1: 1024"}
"""What a warm start's config, and the data of its run, have in place of their own."""


class Run(NamedTuple):
    """A program with its config; every process has a half of the environment's devices."""

    program: str
    config: str
    overrides: Sequence[str] = SHORT
    devices: int = 1
    processes: int = 1


def runs(clone: Path) -> dict[str, Run]:
    """Return what is run, by name."""
    quickstart = "configs/quickstart.yaml"
    recipes = sorted(path.stem for path in (clone / "configs/recipes").glob("*.yaml"))
    mesh = (*SHORT, "mesh.train.data=2", "mesh.train.fsdp=2", "mesh.train.tensor=2")
    sft = ("steps=100", "export_to=runs/same_sft_model")
    return {
        "quickstart": Run("train", quickstart, ()),
        "eight_devices": Run("train", quickstart, mesh, devices=8),
        "two_processes": Run("train", quickstart, mesh, devices=8, processes=2),
        "asynchronous": Run("train", quickstart, (*SHORT, "rollout.staleness=2")),
        "lora": Run("train", "configs/quickstart_lora.yaml"),
        "online_dpo": Run("train", "configs/quickstart_online_dpo.yaml"),
        "raft": Run("train", "configs/quickstart_raft.yaml"),
        "sft": Run("sft", "configs/quickstart_sft.yaml", sft),
        "prefer": Run("prefer", "prefer.yaml", ()),
        "agent": Run("train", "configs/agents/look_up.yaml"),
        "images": Run("train", "configs/vision/pictures.yaml"),
        **{f"recipes/{n}": Run("train", f"configs/recipes/{n}.yaml") for n in recipes},
    }


def record(commit: str, out: Path, only: Sequence[str] = ()) -> None:
    """Run everything at one commit, or only some runs by name, and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run(["git", "-C", clone, "checkout", "--quiet", commit], check=True)
        chosen = runs(clone)
        if unknown := sorted({*only} - chosen.keys()):
            sys.exit(f"no run {', '.join(unknown)}; expected some of {', '.join(chosen)}")
        shorten(clone)
        # the base model, which is another one on eight devices
        start(clone, "jaxrl_llm.train", "--config", "configs/quickstart.yaml", "steps=1")
        write_pairs(clone)
        results = {}
        for name, run in chosen.items():
            if only and name not in only:
                continue
            print(name, flush=True)
            results[name] = finish(clone, name, run)
            out.write_text(json.dumps(results, indent=1))


def shorten(clone: Path) -> None:
    """Let warm starts of agents and of images be short."""
    for folder in ("agents", "vision"):
        for path in (clone / "configs" / folder).glob("*.yaml"):
            text = path.read_text()
            for pattern, replacement in SHORTER.items():
                text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
            path.write_text(text)


def write_pairs(clone: Path) -> None:
    """Write pairs of a right and a wrong sum, and the config of a run that learns from them."""
    rows = [(a, b) for a in range(0, 100, 7) for b in range(0, 100, 3)]
    path = clone / PAIRS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(
            json.dumps({"prompt": f"{a:02}+{b:02}=", "chosen": f"{a + b:03}", "rejected": "000"})
            + "\n"
            for a, b in rows
            if a + b
        )
    )
    (clone / "prefer.yaml").write_text(yaml.safe_dump(PREFER))


def start(clone: Path, *words: str, devices: int = 1, processes: int = 1) -> None:
    """Run a program of the clone to its end, in one process or in several.

    Raises:
        SystemExit: it failed.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(clone),
        "JAX_COMPILATION_CACHE_DIR": str(clone / "compiled"),
        "JAX_NUM_CPU_DEVICES": str(devices // processes),
    }
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    with tempfile.TemporaryFile("w+") as errors:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=clone,
                env=environment | ({"JAX_PROCESS_ID": str(number)} if processes > 1 else {}),
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            for number in range(processes)
        ]
        if any([process.wait() for process in started]):
            errors.seek(0)
            sys.exit(f"{' '.join(words)}: {errors.read()[-2000:]}")


def finish(clone: Path, name: str, run: Run) -> dict[str, Any]:
    """Run one program to its end; return its metrics and the digests of its parameters."""
    run_dir = f"runs/same/{name}"
    words = (f"jaxrl_llm.{run.program}", "--config", run.config, f"run_dir={run_dir}")
    start(clone, *words, *run.overrides, devices=run.devices, processes=run.processes)
    lines = (clone / run_dir / "metrics.jsonl").read_text().splitlines()
    model = f"runs/same/model_{name}"
    start(clone, "jaxrl_llm.export", run_dir, model)
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
            {renamed.get(n, n): v for n, v in line.items() if not TIMINGS.match(n)}
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
