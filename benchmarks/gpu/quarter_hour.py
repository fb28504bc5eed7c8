"""The most that a few minutes of one NVIDIA GPU can say, what decides most first.

    python -m benchmarks.gpu.quarter_hour --out DIR                 everything, in 8 minutes
    python -m benchmarks.gpu.quarter_hour --only decode,updates     some phases
    python -m benchmarks.gpu.quarter_hour --small                   a tiny model on any device

From the repository's root; the library need not be installed, and no network is needed. Each phase
runs in a process of its own, has a time limit, and shares what XLA compiles with the others; one
that fails, hangs or no longer fits into `--minutes` is a row that says so. Rows are written as they
come to `rows.jsonl` in `--out`, tables and what follows from them to `page.md`, the output of all
phases to `log.txt`, and the device as XLA's compiler knows it to `target.txtpb`.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.__main__ import NEEDED, PEERS, ROOT, describe_run, lacking, probe
from benchmarks.gpu.cases import describe_error
from benchmarks.gpu.jobs import Row
from benchmarks.gpu.next_steps import next_steps
from benchmarks.gpu.shapes import FULL, SMALL, Sizes
from benchmarks.tables import markdown_table

COMPILES = "XLA_FLAGS"
CACHE = "JAX_COMPILATION_CACHE_DIR"
TESTS = ("pytest", "hypothesis")
OURS = ("transformers", "grain", "pyarrow")  # what a run needs besides `NEEDED`
THEIRS = ("torch", "transformers", "trl", "datasets")
NO_MODEL = "needs --model DIR, the folder of a model (docs/real_model.md says how to make one)"
LEAST = 12
"""Seconds that must be left for a phase to begin, if it names no others."""


class Phase(NamedTuple):
    """One process.

    Attributes:
        name: For `--only` and `--skip`, and of its rows.
        command: A module and its arguments; a job for `ours` or `theirs` is a dictionary.
        limit: Seconds that it may take.
        least: Seconds without which it does not begin.
        environment: What it has besides the common one.
        lacks: What it needs and is not there: it is a row that says so.
    """

    name: str
    command: tuple[Any, ...]
    limit: float
    least: float = LEAST
    environment: Mapping[str, str] = {}
    lacks: str = ""


class Facts(NamedTuple):
    """What is there: the device's platform, and packages that are missing."""

    platform: str
    missing: tuple[str, ...]

    def lacking(self, *names: str) -> str:
        """Return which of the packages are missing, as a sentence; empty: none."""
        absent = [name for name in names if name in self.missing]
        return f"not installed: {', '.join(absent)}" if absent else ""

    @property
    def has_gpu(self) -> bool:
        """Tell whether jax has an NVIDIA GPU."""
        return self.platform == "gpu"


# ------------------------------------------------------------------------------------ the phases


def list_phases(options: argparse.Namespace, facts: Facts) -> list[Phase]:
    """Return the phases in their order, at full or small size."""
    small = ("--small",) if options.small else ()
    sizes = SMALL if options.small else FULL
    few, *middle, many = sizes.decode
    one_loop = {COMPILES: "--xla_gpu_enable_command_buffer=+WHILE"}
    longest = "1024" if options.small else "32768"

    def decode(name: str, *words: str, limit: float = 80, **settings: Any) -> Phase:
        command = ("benchmarks.gpu.decode_probe", *small, *words)
        return Phase(f"decode{name}", command, limit, 40, **settings)

    return [
        Phase("target", ("benchmarks.gpu.ours", {"do": "target", "cases": [{}]}), 40),
        decode("", limit=150),
        decode("-while", "--no-trace", limit=100, environment=one_loop),
        Phase("decode-torch", _torch_decode(sizes, many), 60, 25, lacks=facts.lacking(*PEERS)),
        Phase("kernel", ("benchmarks.gpu.kernel_sweep", *small), 70, 20),
        Phase("updates", ("benchmarks.gpu.ours", _updates(sizes, options.small)), 150, 30),
        Phase("push", ("benchmarks.gpu.push_probe", *small), 60, 20),
        decode("-long", "--longest", longest, "--answer", "64", "--no-trace", limit=90),
        decode("-int8", "--engine", "int8 cache", "--no-trace"),
        decode("-fp8", "--engine", "fp8 weights", "--no-trace"),
        decode("-32", "--requests", str((middle or [many])[0]), "--no-trace"),
        decode("-1", "--requests", str(few), "--no-trace"),
        _learn(options, facts, "learn", "ours", OURS),
        _learn(options, facts, "learn-trl", "trl", THEIRS),
        _tests(facts),
    ]


def _torch_decode(sizes: Sizes, requests: int) -> tuple[Any, ...]:
    case = {"shape": sizes.shape, "answer": sizes.answer, "requests": requests}
    return "benchmarks.gpu.theirs", {"do": "decode", "cases": [case]}


def _updates(sizes: Sizes, small: bool) -> dict[str, Any]:
    """Return updates with each chunk of log-probs, and a trace of one, in one process."""
    common = {
        "shape": sizes.shape,
        "tokens": sizes.tokens,
        "row": sizes.row,
        "runs": 3,
        "lengths": "equal",
        "length": sizes.length,
        "micro": sizes.micro[1],
        "remat": "dots",
        "attention": "auto",
    }
    cases = ("update", 1024), ("update", 2048), ("update", 8192), ("profile", 1024)
    return common | {
        "cases": [
            {"do": do, "logprob_chunk": chunk // 32 if small else chunk} for do, chunk in cases
        ]
    }


def _learn(
    options: argparse.Namespace, facts: Facts, name: str, system: str, packages: Sequence[str]
) -> Phase:
    if options.model is None:
        return Phase(name, (), 0, lacks=NO_MODEL)
    words = ["--model", str(options.model), "--system", system]
    words += ["--small"] if options.small else []
    command = ("benchmarks.gpu.learn", *words)
    return Phase(name, command, 110, 60, lacks=facts.lacking(*packages))


def _tests(facts: Facts) -> Phase:
    lacks = facts.lacking(*TESTS)
    if not facts.has_gpu:
        lacks = "needs an NVIDIA GPU"
    words = "-m gpu tests/gpu -x -q -W default -p no:cacheprovider"
    options = ("-o", "addopts=--import-mode=importlib")
    environment = {"JAX_PLATFORMS": "cuda,cpu"}
    return Phase("tests", ("pytest", *words.split(), *options), 150, 40, environment, lacks)


# --------------------------------------------------------------------------------- the processes


class Record:
    """Rows, which are written as they come, and the page made of them.

    Args:
        folder: Where the files go.
        about: The command, the machine and the versions.
        begun: When, by `time.monotonic`.
    """

    def __init__(self, folder: Path, about: Row, begun: float) -> None:
        """Begin the files."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.about, self.rows = folder, about, []
        self._begun, self._lock = begun, threading.Lock()
        (folder / "rows.jsonl").write_text(json.dumps({"phase": "machine", **about}) + "\n")

    def seconds(self) -> float:
        """Return the time since the begin."""
        return time.monotonic() - self._begun

    def add(self, phase: str, row: Row) -> None:
        """Write a row, and the page with it."""
        with self._lock:
            if target := row.pop("text", None):
                (self.folder / "target.txtpb").write_text(target)
                row["file"] = "target.txtpb"
            self.rows.append({"phase": phase, "at": round(self.seconds(), 1), **row})
            with (self.folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")
            print(
                f"{self.seconds():6.1f} s  {phase}: {row.get('what', '')} {shorten(row)}",
                flush=True,
            )
            try:
                text = page(self.about, self.rows)
            except Exception as error:  # the rows are written, and the next phase is to run
                text = f"no page: {describe_error(error)}; see rows.jsonl\n"
            (self.folder / "page.md").write_text(text)

    def log(self, text: str) -> None:
        """Keep a line of a phase's output."""
        with self._lock, (self.folder / "log.txt").open("a") as file:
            file.write(text if text.endswith("\n") else text + "\n")


def run_phase(phase: Phase, limit: float, record: Record, cache: Path) -> None:
    """Run a phase in a process group of its own, which ends with it or with its limit."""
    begun, seen = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        command, environment = _command_of(phase, Path(folder), cache)
        record.log(f"===== {phase.name}: {' '.join(command)}, at most {limit:.0f} s")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(
            target=_read_rows, args=(process.stdout, phase.name, record, seen), daemon=True
        )
        reader.start()
        try:
            status = process.wait(limit)
            ended = "done" if status == 0 else f"ended with {status}: {(seen or ['-'])[-1][:200]}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            reader.join(5)
    kind = "ended" if ended == "done" else "error"
    record.add(phase.name, {kind: ended, "wall_seconds": round(time.monotonic() - begun, 1)})


def _command_of(phase: Phase, folder: Path, cache: Path) -> tuple[list[str], dict[str, str]]:
    """Return a phase's command, with a job in a file, and what its environment has besides."""
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4" if phase.name == "push" else "0.95",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        **phase.environment,
    }
    flags = [os.environ.get(COMPILES, ""), phase.environment.get(COMPILES, "")]
    module, *words = phase.command
    if phase.name == "target":
        flags.append(f"--xla_dump_to={folder / 'dump'}")
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    else:
        environment[CACHE] = str(cache)
    environment[COMPILES] = " ".join(filter(None, flags))
    if words and isinstance(words[0], dict):
        job, results = folder / "job.json", folder / "results.json"
        job.write_text(json.dumps(words[0] | {"dump": str(folder / "dump")}))
        words = [str(job), str(results)]
    return [sys.executable, "-m", module, *words], environment


def _read_rows(stream: Any, phase: str, record: Record, seen: list[str]) -> None:
    """Add each line of JSON as a row; keep the others."""
    with stream:
        for line in stream:
            try:
                row = json.loads(line) if line.startswith("{") else None
            except json.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                record.add(phase, row)
            elif line.strip():
                seen.append(line.strip())
                record.log(line)


def run_phases(phases: Sequence[Phase], seconds: float, record: Record) -> None:
    """Run phases one after another while there is time; the others are rows that say so."""
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get(CACHE, folder)
        for phase in phases:
            left = seconds - record.seconds()
            if phase.lacks:
                record.add(phase.name, {"error": phase.lacks})
            elif left < phase.least:
                record.add(phase.name, {"error": f"not begun: {max(left, 0):.0f} s were left"})
            else:
                run_phase(phase, min(phase.limit, left), record, Path(cache))


# -------------------------------------------------------------------------------------- the page


HIDDEN = {"phase", "at", "what", "kernels", "summary", "device", "all_seconds"}


def shorten(value: Any) -> str:
    """Return a row, or a value of it, as short text.

    >>> shorten({"what": "a", "seconds": 1.23456, "shares": {"copies": 0.5}, "peak_bytes": None})
    'seconds 1.235, shares (copies 0.5), peak_bytes -'
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        shown = ((k, v) for k, v in value.items() if k not in HIDDEN)
        return ", ".join(
            f"{k} ({shorten(v)})" if isinstance(v, dict) else f"{k} {shorten(v)}" for k, v in shown
        )
    return "-" if value is None else str(value)


def page(about: Row, rows: Sequence[Row]) -> str:
    """Return what follows from the rows, and all of them, as Markdown."""
    steps = next_steps(rows) or ["No row says anything yet."]
    lines = [f"`{about['command']}`, {about['date']}", json.dumps(about["machine"])]
    lines += ["### What to do next", "\n".join(f"- {step}" for step in steps)]
    for name in dict.fromkeys(row["phase"] for row in rows):
        of_phase = [row for row in rows if row["phase"] == name]
        cells = [[row.get("what", ""), shorten(row)] for row in of_phase]
        lines += [f"### {name}", markdown_table(["of", "result"], cells)]
        lines += [_kernels(row["kernels"]) for row in of_phase if row.get("kernels")]
        lines += [f"```\n{row['summary']}```" for row in of_phase if row.get("summary")]
    return "\n\n".join(lines) + "\n"


def _kernels(kernels: Sequence[Sequence[Any]]) -> str:
    head = ["kernel", "group", "ms a token", "a token"]
    return markdown_table(head, [[k, g, f"{ms:.4f}", f"{n:.2f}"] for k, g, ms, n in kernels])


# ----------------------------------------------------------------------------------- the command


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.quarter_hour", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=8.0, help="in all; by default 8")
    parser.add_argument("--out", default="runs/quarter_hour", type=Path, help="folder of results")
    parser.add_argument("--small", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--model", type=Path, metavar="DIR", help="for the phases learn*")
    parser.add_argument("--only", metavar="NAME,NAME", help="phases; * stands for anything")
    parser.add_argument("--skip", metavar="NAME,NAME", help="phases that are left out")
    return parser.parse_args(words)


def choose(phases: Sequence[Phase], only: str | None, skip: str | None) -> list[Phase]:
    """Return the phases of `only`, all by default, without those of `skip`.

    >>> phases = [Phase("decode", (), 1), Phase("decode-1", (), 1), Phase("push", (), 1)]
    >>> [phase.name for phase in choose(phases, "decode*,push", "decode-1")]
    ['decode', 'push']

    Raises:
        ValueError: no phase has such a name.
    """

    def named(asked: str) -> set[str]:
        names, found = [phase.name for phase in phases], set()
        for pattern in asked.split(","):
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise ValueError(f"expected some of {','.join(names)}, got {pattern}")
            found.update(matching)
        return found

    kept = named(only or "*") - (named(skip) if skip else set())
    return [phase for phase in phases if phase.name in kept]


def main(words: Sequence[str] | None = None) -> int:
    """Run the phases; 2 where something is missing, 1 where no phase was done."""
    options, begun = arguments(words), time.monotonic()
    with ThreadPoolExecutor() as pool:
        needed, peers = pool.map(probe, (NEEDED, sorted({*PEERS, *TESTS, *OURS, *THEIRS})))
    if texts := lacking(needed, options.small):
        sys.stderr.write("\n".join(texts) + "\nwanted one NVIDIA GPU, or --small\n")
        return 2
    missing = tuple(text.partition(" ")[0] for text in peers["missing"])
    try:
        phases = choose(
            list_phases(options, Facts(needed["platform"], missing)), options.only, options.skip
        )
    except ValueError as error:
        sys.stderr.write(f"error: --only or --skip: {error}\n")
        return 2
    about = describe_run("benchmarks.gpu.quarter_hour", words, needed, peers)
    record = Record(options.out, about, begun)
    if options.small:  # it is for machines on which everything takes longer
        phases = [phase._replace(limit=4 * phase.limit) for phase in phases]
    run_phases(phases, 60 * options.minutes, record)
    print(f"\n{(options.out / 'page.md').read_text()}\nwritten to {options.out}")
    return 0 if any(row.get("ended") for row in record.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
