"""What one NVIDIA GPU does with this library, and with plain torch in the same run.

    python -m benchmarks.gpu                           everything, in under 20 minutes
    python -m benchmarks.gpu --parts update,decode=90  some parts, the last one in 90 seconds
    python -m benchmarks.gpu --small                   a tiny model on any device: does it all run?

From the repository's root; the library need not be installed. It needs jax 0.11.2 or later with
CUDA and the packages of `NEEDED`, and of `PEERS` for the comparison; no network. Models have the
shape of Qwen3-1.7B and random weights. Each measurement runs in a process of its own, one at a
time, so that none finds memory taken, and has a time limit; what runs out of memory or time is a
row that says so. Results are written as they come, to `gpu.json` and `gpu.md` in `--out`. The
device's description for XLA's compiler goes to `target.txtpb` there.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import shapes
from benchmarks.gpu.jobs import LIMITS, PARTS, Job, Row, merged

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    *("jax", "numpy", "optax", "orbax.checkpoint", "jaxtyping", "safetensors", "yaml", "rich"),
    *("pydantic", "PIL", "cloudpickle", "filelock"),
)
PEERS = ("torch", "transformers")
PROBE_SECONDS = 120
SYSTEMS = {"ours": "jaxrl_llm", "theirs": "torch", "parity": "both"}

PROBE = """
import importlib, json, sys
report = {"missing": [], "versions": {"python": sys.version.split()[0]}}
for name in sys.argv[1].split(","):
    try:
        module = importlib.import_module(name)
        report["versions"][name] = str(getattr(module, "__version__", "?"))
    except ImportError as error:
        report["missing"].append(f"{name} ({error})")
if "jax" in report["versions"]:
    import jax
    try:
        devices = jax.devices()
        report["device"], report["count"] = devices[0].device_kind, len(devices)
        report["platform"] = devices[0].platform
    except RuntimeError as error:
        report["device"], report["count"], report["platform"] = str(error), 0, "none"
print(json.dumps(report))
"""

# --------------------------------------------------------------------------------- the processes


def measure(job: Job, limit: float, folder: Path) -> list[Row]:
    """Run a job in a process of its own and return a row for each of its cases."""
    given, results, log = (folder / name for name in ("job.json", "results.json", "log.txt"))
    results.unlink(missing_ok=True)
    given.write_text(json.dumps({"do": job.do, "cases": job.cases, "dump": str(folder / "dump")}))
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    if job.do == "target":
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_dump_to={folder / 'dump'}"
        environment["XLA_FLAGS"] = flags.strip()
    else:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
    command = [sys.executable, "-m", f"benchmarks.gpu.{job.system}", given, results]
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            )
            lines = log.read_text(errors="replace").strip().splitlines()
            lines = [line for line in lines if not line.startswith("{")] or ["-"]
            stopped = f"the process ended with {done.returncode}: {lines[-1][:200]}"
        except subprocess.TimeoutExpired:
            stopped = f"not done after {limit:.0f} s"
    outcomes = json.loads(results.read_text()) if results.exists() else []
    outcomes += [{"error": stopped}] * (len(job.cases) - len(outcomes))
    return [
        {"part": job.do, "system": SYSTEMS.get(job.system, job.system), "case": case, **result}
        for case, result in zip(job.cases, outcomes, strict=True)
    ]


def run_part(jobs: Sequence[Job], missing: str, folder: Path, limit: float) -> Iterator[list[Row]]:
    """Run a part's jobs while there is time, and yield their rows; the rest get a row, too."""
    until = time.monotonic() + limit
    for job in jobs:
        left = until - time.monotonic()
        if job.system != "ours" and missing:
            reason = f"not installed: {missing}"
        elif left < 5:
            reason = f"not begun: the {limit:.0f} s of this part were over"
        else:
            yield measure(job, left, folder)
            continue
        common = {"part": job.do, "system": SYSTEMS[job.system], "error": reason}
        yield [common | {"case": case} for case in job.cases]


# ----------------------------------------------------------------------------------- the command


def probe(names: Sequence[str]) -> Row:
    """Return versions, what is missing and jax's first device, seen by a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, ",".join(names)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
        lines = done.stderr.strip().splitlines() or ["no output"]
    except subprocess.TimeoutExpired:
        done, lines = None, [f"importing {', '.join(names)} took over {PROBE_SECONDS} s"]
    if done is None or done.returncode:
        return {"missing": [f"a working Python: {lines[-1]}"], "versions": {}, "platform": "none"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def driver() -> str:
    """Return what nvidia-smi says of the GPUs."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip().replace("\n", "; ")


def describe_run(module: str, words: Sequence[str] | None, needed: Row, peers: Row) -> Row:
    """Return the command of a run, its date, and the machine with its versions.

    Args:
        module: that runs.
        words: of its command line; None: those of this process.
        needed: what `probe` says of the packages that it needs.
        peers: and of those that it compares with.
    """
    return {
        "command": " ".join(["python -m", module, *(sys.argv[1:] if words is None else words)]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": {
            "device": needed["device"],
            "driver": driver(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "versions": needed["versions"] | peers["versions"],
        },
    }


def lacking(probed: Row, small: bool) -> list[str]:
    """Return what keeps the benchmarks from running."""
    texts = [f"missing packages: {', '.join(probed['missing'])}"] if probed["missing"] else []
    if not small and probed.get("platform") != "gpu":
        texts.append(f"no GPU: jax sees {probed.get('device', 'nothing')}, the driver: {driver()}")
    return texts


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help="of these, by commas; PART=SECONDS gives one another limit",
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, on any device")
    parser.add_argument(
        "--bandwidth", type=float, metavar="TB/s", help="of the memory; measured by default"
    )
    parser.add_argument("--out", default="runs/gpu_benchmarks", type=Path, help="folder of results")
    options = parser.parse_args(words)
    try:
        options.parts = limits_of(options.parts)
    except ValueError as error:
        parser.error(f"--parts: {error}")
    return options


def limits_of(parts: str) -> dict[str, float]:
    """Return the seconds of each part that `--parts` names.

    >>> limits_of("target,update=90")
    {'target': 20, 'update': 90.0}
    """
    given = dict(part.partition("=")[::2] for part in parts.split(","))
    if unknown := sorted(given.keys() - PARTS.keys()):
        raise ValueError(f"expected some of {','.join(PARTS)}, got {','.join(unknown)}")
    return {name: float(limit) if limit else LIMITS[name] for name, limit in given.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; 2 where something is missing, 1 where no measurement of ours succeeded."""
    options = arguments(words)
    needed, peers = probe(NEEDED), probe((*PEERS, "flash_attn"))
    if texts := lacking(needed, options.small):
        sys.stderr.write("\n".join(texts) + "\nwanted one NVIDIA GPU, or --small\n")
        return 2
    from benchmarks.gpu.tables import page, summary  # which import jax, and that may be missing

    absent = [text for text in peers["missing"] if not text.startswith("flash_attn")]
    results: Row = {**describe_run("benchmarks.gpu", words, needed, peers), "rows": []}
    options.out.mkdir(parents=True, exist_ok=True)
    sizes, has_flash = shapes.SMALL if options.small else shapes.FULL, len(peers["missing"]) == 0
    if options.bandwidth:
        sizes = sizes._replace(bandwidth=1e12 * options.bandwidth)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, limit in options.parts.items():
            jobs = list(PARTS[name](sizes, has_flash))
            jobs = merged(jobs) if options.small else jobs
            for rows in run_part(jobs, ", ".join(absent), Path(folder), limit):
                results["rows"] += rows
                for text in (row.pop("text") for row in rows if "text" in row):
                    (options.out / "target.txtpb").write_text(text)
                results["seconds"] = round(time.monotonic() - begun, 1)
                (options.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
                (options.out / "gpu.md").write_text(page(results))
                for row in rows:
                    print(f"{results['seconds']:7.1f} s  {summary(row)}", flush=True)
    print(f"\n{page(results)}\nwritten to {options.out}/gpu.json and gpu.md")
    return 0 if any("error" not in row for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
