"""What `grpo_step` prints of its measurements, as Markdown."""

import statistics
import sys
from typing import Any

from benchmarks.tables import describe_run, markdown_table

RATE_SHAPES = [[1024, 1024, 1024], [2048, 2048, 2048], [8192, 512, 1536]]
"""Matrix products by which the machine's rate is measured."""


def row(name: str, system: str, result: dict[str, Any], flops: float, rate: float) -> list[str]:
    """Return a system's line of the table."""
    steps = result["measured"]
    seconds = [step["seconds"] for step in steps]
    middle = statistics.median(seconds)
    generation = statistics.median(step["generation_s"] for step in steps)
    rest = statistics.median(step["seconds"] - step["generation_s"] for step in steps)
    return [
        name,
        system,
        f"{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
        f"{generation:.2f}",
        f"{rest:.2f}",
        f"{result['first_s']:.0f}",
        f"{result['peak_gb']:.1f}",
        f"{steps[0]['generated']:,}",
        f"{steps[0]['tokens']:,.0f}",
        f"{flops / middle / rate / 1e9:.0%}",
        f"{statistics.mean(step['other_cores'] for step in steps):.1f}",
    ]


HEADS = [
    "workload",
    "system",
    "s a step (least to most)",
    "generation",
    "rest",
    "start to end of step 1, s",
    "peak GB",
    "tokens generated",
    "tokens trained, with prompts",
    "of the machine's rate",
    "others",
]


def table(results: dict[str, Any], rate: float) -> str:
    """Return a Markdown table: one row for each workload and system."""
    rows = [
        row(name, system, result, workload["flops"], rate)
        for name, workload in results.items()
        for system, result in workload["systems"].items()
    ]
    return markdown_table(HEADS, rows)


def comparison(results: dict[str, Any]) -> list[str]:
    """Return a line for each workload: how many times as fast as the fastest peer, and memory."""
    lines = []
    for name, workload in results.items():
        systems = {
            system: statistics.median(step["seconds"] for step in result["measured"])
            for system, result in workload["systems"].items()
        }
        peers = {system: seconds for system, seconds in systems.items() if system != "ours"}
        if "ours" in systems and peers:
            peer = min(peers, key=lambda system: peers[system])
            memory = (workload["systems"][system]["peak_gb"] for system in ("ours", peer))
            lines.append(
                f"- {name}: {peers[peer] / systems['ours']:.2f} times as fast as {peer}, the "
                f"fastest of them; {' against '.join(f'{gb:.1f}' for gb in memory)} GB"
            )
    return lines


def stages(results: dict[str, Any]) -> list[str]:
    """Return a line for each workload: where a step of ours spends its seconds."""
    lines = []
    for name, workload in results.items():
        if "ours" in workload["systems"]:
            ours = workload["systems"]["ours"]
            parts = [f"{k.removeprefix('timing_s/')} {s:.2f}" for k, s in ours["stages"].items()]
            compiled = f"{ours['compilations']:.0f} compilations after the warm-up"
            lines.append(f"- {name}: {', '.join(parts)}; {compiled}")
    return lines


def learned(results: dict[str, Any]) -> list[str]:
    """Return a line for each workload: rewards and KLs, which show that the work is the same."""
    lines = []
    for name, workload in results.items():
        parts = []
        for system, result in workload["systems"].items():
            kl = f", {result['kl']:.1e}" if "kl" in result else ""
            parts.append(f"{system} {statistics.mean(result['rewards']):.3f}{kl}")
        lines.append(f"- {name}: {'; '.join(parts)}")
    return lines


def report(results: dict[str, Any], measured: dict[str, list[float]], rate: float) -> None:
    """Print everything as Markdown."""
    print(describe_run("training.grpo_step", sys.argv[1:]))
    systems = {s: r for workload in results.values() for s, r in workload["systems"].items()}
    for system, result in systems.items():
        print(f"- {system}: {', '.join(f'{n} {v}' for n, v in result['versions'].items())}")
    for library, rates in measured.items():
        by_shape = zip(RATE_SHAPES, rates, strict=True)
        products = ", ".join(f"{'×'.join(map(str, shape))} {r:.0f}" for shape, r in by_shape)
        print(f"- float32 products with {library}, GFLOP/s: {products}")
    needed = ", ".join(
        f"{name} {workload['flops'] / 1e12:.2f}" for name, workload in results.items()
    )
    print(f"- TFLOP that a step needs: {needed}\n\n{table(results, rate)}\n")
    print("\n".join(comparison(results)))
    print("\nMean reward of all steps, KL to the reference in the last one:\n")
    print("\n".join(learned(results)))
    print("\nSeconds of the stages of ours:\n\n" + "\n".join(stages(results)))
