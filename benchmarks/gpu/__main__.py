"""What one NVIDIA GPU does with this library, and with plain torch in the same run.

    python -m benchmarks.gpu                        everything, in under 20 minutes
    python -m benchmarks.gpu --parts update,decode  some parts
    python -m benchmarks.gpu --small                a tiny model on any device: does it all run?

From the repository's root; the library need not be installed. It needs jax 0.11.2 or later with
CUDA and the packages of `NEEDED`, and of `PEERS` for the comparison; no network. Models have the
shape of Qwen3-1.7B and random weights. Each measurement runs in a process of its own, one at a
time, so that none finds memory taken, and has a time limit; what runs out of memory or time is a
row that says so. Results are written as they come, to `gpu.json` and `gpu.md` in `--out`.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import shapes
from benchmarks.gpu.shapes import Sizes
from benchmarks.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("jax", "numpy", "optax", "orbax.checkpoint", "jaxtyping", "safetensors", "yaml", "rich")
PEERS = ("torch", "transformers")
SYSTEMS = {"ours": "jaxrl_llm", "theirs": "torch"}
LIMITS = {"update": 640, "attention": 130, "logprobs": 60, "profile": 100, "decode": 240}
"""Seconds for each part; together less than 20 minutes."""

PROBE = """
import importlib, json, sys
found = {"missing": [], "versions": {"python": sys.version.split()[0]}}
for name in sys.argv[1].split(","):
    try:
        module = importlib.import_module(name)
        found["versions"][name] = str(getattr(module, "__version__", "?"))
    except ImportError as error:
        found["missing"].append(f"{name} ({error})")
if "jax" in found["versions"]:
    import jax
    try:
        devices = jax.devices()
        found["device"], found["count"] = devices[0].device_kind, len(devices)
        found["platform"] = devices[0].platform
    except RuntimeError as error:
        found["device"], found["count"], found["platform"] = str(error), 0, "none"
print(json.dumps(found))
"""

Row = dict[str, Any]


class Job(NamedTuple):
    """One process.

    Attributes:
        system: The module of this folder that runs it.
        do: The function in it.
        cases: What it does one after another.
    """

    system: str
    do: str
    cases: list[Row]


# ------------------------------------------------------------------------------------ the jobs


def update_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield the updates, the most telling first: what there is no time for is left out."""
    return itertools.islice(_updates(sizes, has_flash), sizes.updates)


def _updates(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    low, middle, high = sizes.micro
    common = {"shape": sizes.shape, "tokens": sizes.tokens, "row": sizes.row, "runs": sizes.runs}
    equal = {"lengths": "equal", "length": sizes.length} | common
    spread = equal | {"lengths": "spread"}
    whole = equal | {"length": middle, "row": middle}

    def ours(micro: int, remat: str, case: Row = equal, attention: str = "auto") -> Job:
        return Job("ours", "update", [case | _of(micro=micro, remat=remat, attention=attention)])

    def torch(
        micro: int, again: bool, case: Row = equal, by: str = "sdpa", masters: bool = False
    ) -> Job:
        how = _of(micro=micro, checkpointing=again, attention=by, masters=masters)
        return Job("theirs", "update", [case | how])

    yield ours(middle, "dots")
    yield torch(middle, False)
    yield ours(middle, "none")
    yield torch(middle, True)
    if has_flash:
        yield torch(middle, False, by="flash_attention_2")
    yield ours(high, "dots")
    yield torch(high, True)
    yield ours(low, "none")
    yield torch(low, False)
    yield ours(middle, "dots", spread)
    yield torch(middle, False, spread)
    yield torch(middle, False, masters=True)
    yield ours(middle, "dots", attention="xla")
    yield ours(middle, "full")
    yield ours(high, "full")
    yield torch(high, False)
    yield ours(middle, "dots", whole)
    yield torch(middle, False, whole)
    yield ours(low, "dots")
    yield torch(low, True)
    yield ours(high, "none")


def _of(**values: Any) -> Row:
    return values


def attention_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield one process per way of attending."""
    common = {"heads": sizes.heads, "runs": 2 * sizes.runs}
    for system, by in (("ours", "cudnn"), ("ours", "xla"), ("theirs", "sdpa")):
        cases = [common | {"case": case, "by": by} for case in sizes.attention]
        yield Job(system, "attention", cases)


def logprob_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield one process for all chunk sizes."""
    common = {"scored": sizes.scored, "runs": sizes.runs}
    yield Job("ours", "logprobs", [common | {"chunk": chunk} for chunk in sizes.chunks])


def profile_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield the update of the middle size."""
    (case,) = next(update_jobs(sizes, has_flash)).cases
    yield Job("ours", "profile", [case])


def decode_jobs(sizes: Sizes, has_flash: bool) -> Iterator[Job]:
    """Yield each number of requests, for both systems."""
    common = _of(
        shape=sizes.shape,
        answer=sizes.answer,
        runs=2,
        read_bytes=sizes.read_bytes,
        bandwidth=sizes.bandwidth,
    )
    for requests in sizes.decode:
        for system in ("ours", "theirs"):
            yield Job(system, "decode", [common | {"requests": requests}])


def merged(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs with the cases of each system in one process, which saves importing it again.

    >>> [len(job.cases) for job in merged([Job("a", "f", [{}]), Job("b", "f", [{}])] * 2)]
    [2, 2]
    """
    names = dict.fromkeys((job.system, job.do) for job in jobs)
    return [
        Job(*name, [case for job in jobs if job[:2] == name for case in job.cases])
        for name in names
    ]


# --------------------------------------------------------------------------------- the processes


def measure(job: Job, limit: float, folder: Path) -> list[Row]:
    """Run a job in a process of its own and return a row for each of its cases."""
    given, results, log = (folder / name for name in ("job.json", "results.json", "log.txt"))
    results.unlink(missing_ok=True)
    given.write_text(json.dumps({"do": job.do, "cases": job.cases}))
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    if job.do != "profile":  # a trace says less of a program that was read from there
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
            stopped = f"the process ended with {done.returncode}: {(lines or ['-'])[-1][:200]}"
        except subprocess.TimeoutExpired:
            stopped = f"not done after {limit:.0f} s"
    found = json.loads(results.read_text()) if results.exists() else []
    found += [{"error": stopped}] * (len(job.cases) - len(found))
    return [
        {"part": job.do, "system": SYSTEMS.get(job.system, job.system), "case": case, **result}
        for case, result in zip(job.cases, found, strict=True)
    ]


def run_part(
    name: str, jobs: Sequence[Job], missing: str, folder: Path, until: float
) -> Iterator[list[Row]]:
    """Run a part's jobs while there is time, and yield their rows; the rest get a row, too."""
    for job in jobs:
        left = until - time.monotonic()
        if job.system == "theirs" and missing:
            reason = f"not installed: {missing}"
        elif left < 5:
            reason = f"not begun: the {LIMITS[name]} s of this part were over"
        else:
            yield measure(job, left, folder)
            continue
        common = {"part": job.do, "system": SYSTEMS[job.system], "error": reason}
        yield [common | {"case": case} for case in job.cases]


# ------------------------------------------------------------------------------------ the tables


def _gb(row: Row) -> str:
    return f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else "-"


def _share(part: float, peak: float | None) -> str:
    return f"{100 * part / peak:.1f} %" if peak else "-"


def update_table(rows: Sequence[Row], peak: shapes.Peak | None) -> str:
    """Return the updates, by micro-batch and lengths."""
    lines = []
    for row in rows:
        case = row["case"]
        lengths = shapes.lengths_of(case)
        what = [f"{case['micro']}", f"{case['lengths']}, mean {sum(lengths) / len(lengths):.0f}"]
        if row["system"] == "torch":
            weights = "float32 masters" if case["masters"] else "all bfloat16"
            again = "checkpointing" if case["checkpointing"] else "none"
            what += [f"torch, {weights}", again, case["attention"]]
        else:
            attended = row.get("attention", case["attention"]).partition(":")[0]
            what += ["jaxrl_llm, float32 masters", case["remat"], attended]
        if "error" in row:
            lines.append([*what, row["error"], "", "", ""])
            continue
        rate = shapes.update_flops(shapes.SHAPES[case["shape"]], lengths) / row["seconds"]
        speed = f"{sum(lengths) / row['seconds']:.0f}"
        mfu = _share(rate, peak and peak.flops)
        lines.append([*what, f"{row['seconds']:.3f}", speed, mfu, _gb(row)])
    head = "micro-batch, lengths, system, computed again, attention, s, tokens/s, MFU, peak GB"
    return markdown_table(head.split(", "), lines)


def attention_table(rows: Sequence[Row], peak: shapes.Peak | None) -> str:
    """Return attention alone: time, and rates of causal attention's operations."""
    lines = []
    for row in rows:
        count, length, segments = row["case"]["case"]
        heads, _, width = row["case"]["heads"]
        what = [f"{count} × {length}", str(segments), f"{row['system']} {row['case']['by']}"]
        if "error" in row:
            lines.append([*what, row["error"], "", "", "", ""])
            continue
        ops = shapes.attention_flops(heads, width, [length // segments] * segments * count)
        rates = ops / row["forward_seconds"], 3.5 * ops / row["seconds"]
        off = f"{row['difference']:.2%}" if "difference" in row else "-"
        lines.append(
            [
                *what,
                f"{1e3 * row['forward_seconds']:.3f}",
                f"{rates[0] / 1e12:.1f}",
                f"{1e3 * row['seconds']:.3f}",
                f"{rates[1] / 1e12:.1f} ({_share(rates[1], peak and peak.flops)})",
                off,
            ]
        )
    head = "rows, segments, by, forward ms, TFLOP/s, and backward ms, TFLOP/s, off from float32"
    return markdown_table(head.split(", "), lines)


def logprobs_table(rows: Sequence[Row], peak: shapes.Peak | None) -> str:
    """Return chunk sizes of log-probs: three products of tokens, width and vocabulary."""
    lines = []
    for row in rows:
        tokens, width, vocabulary = row["case"]["scored"]
        what = [f"{tokens} × {width} × {vocabulary}", str(row["case"]["chunk"])]
        if "error" in row:
            lines.append([*what, row["error"], "", ""])
            continue
        rate = 6 * tokens * width * vocabulary / row["seconds"]
        share = _share(rate, peak and peak.flops)
        scratch = f"{row['scratch_bytes'] / 1e9:.2f}"
        lines.append([*what, f"{1e3 * row['seconds']:.2f}", share, scratch])
    return markdown_table(["tokens × D × V", "chunk", "ms", "of peak", "scratch GB"], lines)


def profile_table(rows: Sequence[Row], peak: shapes.Peak | None) -> str:
    """Return where the time of an update went."""
    texts = []
    for row in rows:
        if "error" in row:
            texts.append(row["error"])
            continue
        shares = [[name, f"{100 * part:.1f} %"] for name, part in row["shares_of_busy"].items()]
        outside = f"{100 * row['outside_matrix_products_and_attention']:.1f} %"
        shares += [["outside matrix products and attention", outside]]
        shares += [["device busy, of the step", f"{100 * row['device_busy']:.1f} %"]]
        texts += [markdown_table(["operations", "share"], shares), f"```\n{row['summary']}```"]
    return "\n\n".join(texts)


def decode_table(rows: Sequence[Row], peak: shapes.Peak | None) -> str:
    """Return generation, and how near its steps are to the time that reading memory takes."""
    rate = max((row["bandwidth"] for row in rows if "bandwidth" in row), default=None)
    lines = []
    for row in rows:
        (prompt, new), requests = row["case"]["answer"], row["case"]["requests"]
        what = [str(requests), f"{prompt} + {new}", row["system"]]
        if "error" in row:
            lines.append([*what, row["error"], *[""] * 6])
            continue
        read = shapes.decoding_bytes(shapes.SHAPES[row["case"]["shape"]], requests, prompt, new)
        steps = row["seconds"] - row["half_seconds"]
        lines.append(
            [
                *what,
                f"{row['seconds']:.2f}",
                f"{requests * new / row['seconds']:.0f}",
                f"{requests * (new - new // 2) / steps:.0f}",
                f"{1e3 * steps / (new - new // 2):.2f}",
                _share(read / steps, rate),
                str(row.get("compilations", "-")),
                _gb(row),
            ]
        )
    head = "requests, prompt + answer, system, s, tokens/s, second half, ms a step"
    head += ", of the floor, compiled, peak GB"
    how = "given" if any(row["case"].get("bandwidth") for row in rows) else "measured"
    shown = f"{rate / 1e12:.2f} TB/s ({how})" if rate else "a rate that was not measured"
    note = "Tokens/s with prefill, and in the second half of the answers, as the columns after it. "
    note += f"The floor of a step: weights and the keys and values so far, read once at {shown}."
    nominal = f" The memory is said to give {peak.bandwidth / 1e12:.2f} TB/s." if peak else ""
    return f"{note}{nominal}\n\n{markdown_table(head.split(', '), lines)}"


class Part(NamedTuple):
    """A part: its title, its jobs, and how its rows are laid out."""

    title: str
    jobs: Callable[[Sizes, bool], Iterator[Job]]
    table: Callable[[Sequence[Row], shapes.Peak | None], str]


PARTS = {
    "update": Part("Actor updates", update_jobs, update_table),
    "attention": Part("Causal attention over packed rows", attention_jobs, attention_table),
    "logprobs": Part("Gradient of log-probs, by chunk", logprob_jobs, logprobs_table),
    "profile": Part("Where an update's time goes", profile_jobs, profile_table),
    "decode": Part("Generation", decode_jobs, decode_table),
}


def page(results: Row) -> str:
    """Return all tables as Markdown."""
    peak = shapes.peak_of(results["machine"]["device"])
    lines = [f"`{results['command']}`, {results['date']}", json.dumps(results["machine"])]
    if peak:
        lines.append(
            f"Peaks: {peak.flops / 1e12:.0f} TFLOP/s in bfloat16, {peak.bandwidth / 1e12:.2f} TB/s "
            f"({peak.source}). MFU counts 6 operations per parameter and token, causal attention "
            "within sequences, and nothing twice."
        )
    for name, part in PARTS.items():
        rows = [row for row in results["rows"] if row["part"] == name]
        if rows:
            lines += [f"### {part.title}", part.table(rows, peak)]
    return "\n\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------- the command


def probe(names: Sequence[str]) -> Row:
    """Return versions, what is missing and jax's first device, seen by a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, ",".join(names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return {"missing": [f"a working Python: {lines[-1]}"], "versions": {}, "platform": "none"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def driver() -> str:
    """Return what nvidia-smi says of the GPUs."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip().replace("\n", "; ")


def lacking(found: Row, small: bool) -> list[str]:
    """Return what keeps the benchmarks from running."""
    texts = [f"missing packages: {', '.join(found['missing'])}"] if found["missing"] else []
    if not small and found.get("platform") != "gpu":
        texts.append(f"no GPU: jax sees {found.get('device', 'nothing')}, the driver: {driver()}")
    return texts


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, by commas")
    parser.add_argument("--small", action="store_true", help="a tiny model, on any device")
    parser.add_argument(
        "--bandwidth", type=float, metavar="TB/s", help="of the memory; measured by default"
    )
    parser.add_argument("--out", default="runs/gpu_benchmarks", type=Path, help="folder of results")
    options = parser.parse_args(words)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}; wanted some of {','.join(PARTS)}")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; 2 where something is missing, 1 where no measurement of ours succeeded."""
    options = arguments(words)
    needed, peers = probe(NEEDED), probe((*PEERS, "flash_attn"))
    if texts := lacking(needed, options.small):
        sys.stderr.write("\n".join(texts) + "\nwanted one NVIDIA GPU, or --small\n")
        return 2
    absent = [text for text in peers["missing"] if not text.startswith("flash_attn")]
    results: Row = {
        "command": f"python -m benchmarks.gpu {' '.join(words or sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": {
            "device": needed["device"],
            "driver": driver(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "versions": needed["versions"] | peers["versions"],
        },
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    sizes, has_flash = shapes.SMALL if options.small else shapes.FULL, len(peers["missing"]) == 0
    if options.bandwidth:
        sizes = sizes._replace(bandwidth=1e12 * options.bandwidth)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.parts:
            jobs, until = list(PARTS[name].jobs(sizes, has_flash)), time.monotonic() + LIMITS[name]
            jobs = merged(jobs) if options.small else jobs
            for rows in run_part(name, jobs, ", ".join(absent), Path(folder), until):
                results["rows"] += rows
                results["seconds"] = round(time.monotonic() - begun, 1)
                (options.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
                (options.out / "gpu.md").write_text(page(results))
                for row in rows:
                    print(f"{results['seconds']:7.1f} s  {summary(row)}", flush=True)
    print(f"\n{page(results)}\nwritten to {options.out}/gpu.json and gpu.md")
    return 0 if any("error" not in row for row in results["rows"]) else 1


def summary(row: Row) -> str:
    """Return a row in one line."""
    case = {k: v for k, v in row["case"].items() if k not in ("shape", "runs", "tokens")}
    found = row.get("error") or f"{row['seconds']:.4f} s"
    return f"{row['part']}, {row['system']}, {case}: {found}"


if __name__ == "__main__":
    sys.exit(main())
