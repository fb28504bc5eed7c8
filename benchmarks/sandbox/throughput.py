"""How fast code of a model runs at each level of the sandbox: 500 calls at once, on two workers.

    python -m benchmarks.sandbox.throughput
    python -m benchmarks.sandbox.throughput --levels process --calls 500

- start: seconds from nothing to the first result, and that of a further run, in this process.
- bare: all calls from two threads, with a new interpreter for each one.
- tool: as many episodes at once that each call the tool `python` once, through worker processes.
- with state: each episode calls it twice, the second time for what it kept, and no episode ends
  before all of them have called; the memory is what their processes hold then besides this one.

Exit status 1: a call was lost, or had another result.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import AgentConfig, ToolProcessConfig
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.session import SessionPool
from jaxrl_llm.sandbox.interpreter import open_interpreter

LEVELS = ("expression", "process")
WORKERS = 2
TRIES = 10


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    return parser.parse_args(words)


def time_start(level: str) -> tuple[float, float]:
    """Return the seconds to a first result, and to another one; medians."""
    firsts, others = [], []
    for _ in range(TRIES):
        began = time.monotonic()
        with open_interpreter(level, keep_state=True) as interpreter:
            interpreter.run("6 * 7")
            firsts.append(time.monotonic() - began)
            began = time.monotonic()
            interpreter.run("6 * 7")
            others.append(time.monotonic() - began)
    return statistics.median(firsts), statistics.median(others)


def time_bare(level: str, calls: int) -> tuple[float, int]:
    """Return the seconds of all calls from two threads, and how many had the right result."""

    def call(number: int) -> bool:
        with open_interpreter(level) as interpreter:
            return interpreter.run(f"{number} + 1").output.strip() == str(number + 1)

    began = time.monotonic()
    with ThreadPoolExecutor(WORKERS) as threads:
        right = sum(threads.map(call, range(calls)))
    return time.monotonic() - began, right


def time_tool(level: str, calls: int, *, keep_state: bool) -> tuple[float, int, int]:
    """Return seconds and right results of episodes that call at once, and megabytes at the peak."""
    tool = FunctionSpec("python", {"sandbox": level, "keep_state": keep_state, "cpu_s": 5.0})
    process = {"workers": WORKERS, "timeout_s": 600.0}
    config = AgentConfig(tools=(tool,), tool_process=ToolProcessConfig(**process))
    codes = ("x = {0}", "x + 1") if keep_state else ("{0} + 1",)

    async def play(pool: SessionPool) -> tuple[float, int, int]:
        sessions = [pool.open(n, EpisodeRow(n), n, None) for n in range(calls)]

        async def episode(number: int) -> bool:
            for code in codes:
                arguments = {"code": code.format(number)}
                result = await sessions[number].call(ToolCall("python", arguments))
            return (result.text, result.failure) == (str(number + 1), None)

        began = time.monotonic()
        right = sum(await asyncio.gather(*map(episode, range(calls))))
        seconds, held = time.monotonic() - began, held_megabytes()
        await asyncio.gather(*(session.close() for session in sessions))
        return seconds, right, held

    with SessionPool(config) as pool:
        return asyncio.run(play(pool))


def held_megabytes() -> int:
    """Return the memory of all processes below this one, shared pages in equal parts."""
    parents, held = {}, 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(status[1])
        except OSError:  # it has ended
            continue
    below = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= found
    for pid in below - {os.getpid()}:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        held += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return held // 1000


def main(words: Sequence[str] | None = None) -> int:
    """Measure all levels, and print a table."""
    args, rows, lost = arguments(words), [], 0
    load = os.getloadavg()[0]
    for level in args.levels:
        first, other = time_start(level)
        bare_s, right = time_bare(level, args.calls)
        tool_s, tool_right, _ = time_tool(level, args.calls, keep_state=False)
        lost += 2 * args.calls - right - tool_right
        row = [level, f"{1000 * first:.1f}", f"{1000 * other:.1f}"]
        row += [f"{args.calls / bare_s:.0f}", f"{args.calls / tool_s:.0f}"]
        if level == "expression":
            rows.append([*row, "", ""])
            continue
        state_s, state_right, held = time_tool(level, args.calls, keep_state=True)
        lost += args.calls - state_right
        rows.append([*row, f"{2 * args.calls / state_s:.0f}", f"{held:,}"])
    print(f"{describe_run('sandbox.throughput', words)}; load at the start {load:.1f}")
    head = ["level", "start, ms", "further run, ms", "bare, calls/s", "tool, calls/s"]
    print(markdown_table([*head, "tool with state, calls/s", "memory held, MB"], rows))
    print(f"{lost} calls lost or wrong")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
