"""Generation by this library's engine against transformers (torch) and Tunix's sampler.

    python -m benchmarks.generation.generate --trl-python peers/trl/bin/python \\
        --tunix-python peers/tunix/bin/python               the tables, as Markdown
    python -m benchmarks.generation.generate --baseline ../v0   also the engine of another checkout
    python -m benchmarks.generation.generate --vllm             also this library's vLLM sidecar

`benchmarks.training.grpo_step --setup` makes the peers' environments. Every system gets the same
random Qwen3 model and the same prompts in float32: batches of 16 prompts x 8 answers, 128 at a
time, sampled at temperature 1. Each runs in a process of its own, one after the other; the first
pass over all batches is a warm-up, the median of the others counts.

Workloads: a model of `grpo_step`, `tiny` or `small`, with answers of `--new-tokens` each; with
`-spread` lengths are log-normal (sigma 1) with that mean, cut at four times as many, in an order
drawn with a fixed seed. Ours gets all requests at once, each with its own length, and keeps 128 in
flight. The peers get batches of 128 and generate for all of a batch until its longest answer is
done, which is what they do where answers end by themselves: none of them can put another request
into a row that is done. What goes beyond the lengths asked for is not counted, for any system.

The script fails where a system returns fewer tokens than asked for, where ours compiles something
after its warm-up, which ends when all programs of the engine are compiled, or where ours and
transformers don't generate the same tokens greedily.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.measure import PEERS, check_python, measure
from benchmarks.tables import describe_run, markdown_table, parser_of
from benchmarks.training import workloads

ROOT = Path(__file__).resolve().parents[2]
CONCURRENT = workloads.PROMPTS * workloads.SAMPLES
GREEDY_PROMPTS, GREEDY_TOKENS = 4, 24


class Workload(NamedTuple):
    """A model and whether its answers' lengths differ."""

    model: str
    spread: bool


WORKLOADS = {
    "tiny": Workload("tiny", False),
    "tiny-spread": Workload("tiny", True),
    "small": Workload("small", False),
    "small-spread": Workload("small", True),
}


def lengths_of(workload: Workload, batches: int, new_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return the length of each answer of each batch.

    >>> lengths = lengths_of(WORKLOADS["tiny-spread"], 4, 64)
    >>> [len(batch) for batch in lengths], max(map(max, lengths))
    ([128, 128, 128, 128], 256)
    >>> round(sum(map(sum, lengths)) / 512)
    64
    """
    count = batches * CONCURRENT
    if not workload.spread:
        return [[new_tokens] * CONCURRENT] * batches
    drawn = workloads.lognormal_lengths(count, new_tokens, 4 * new_tokens)
    random.Random(seed).shuffle(drawn)
    return [drawn[first : first + CONCURRENT] for first in range(0, count, CONCURRENT)]


def job_of(workload: Workload, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return what every system is told."""
    prompts = workloads.sums(options.batches)
    texts = [[p for p in batch for _ in range(workloads.SAMPLES)] for batch in prompts]
    tokens = [[tokenizer(text)["input_ids"] for text in batch] for batch in texts]
    return {
        "texts": texts,
        "tokens": tokens,
        "longest_prompt": max(len(ids) for batch in tokens for ids in batch),
        "distinct": workloads.PROMPTS,
        "lengths": lengths_of(workload, options.batches, options.new_tokens),
        "passes": options.passes + 1,
        "greedy": [ids for ids in tokens[0][:: workloads.SAMPLES][:GREEDY_PROMPTS]],
        "greedy_tokens": GREEDY_TOKENS,
        "rope_theta": workloads.ROPE_THETA,
        "device": options.device,
    }


def systems(options: argparse.Namespace) -> Iterator[tuple[str, str, Path, dict[str, str]]]:
    """Yield name, interpreter, script and environment of each system.

    Another checkout runs its own script, as modules may have other homes there.
    """
    checkouts = {"ours": ROOT} | {
        Path(d).resolve().name: Path(d).resolve() for d in options.baseline
    }
    for name, root in checkouts.items():
        script = root / "benchmarks/peers/generate_ours.py"
        yield name, sys.executable, script, {"PYTHONPATH": str(root)}
    if options.vllm:
        yield "vllm", sys.executable, PEERS / "generate_vllm.py", {"PYTHONPATH": str(ROOT)}
    for name, python in (("transformers", options.trl_python), ("tunix", options.tunix_python)):
        if python:
            script = PEERS / f"generate_{name}.py"
            yield name, str(Path(python).absolute()), script, {"PYTHONPATH": ""}


def check(name: str, job: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    """Raise SystemExit unless all have done the work, and ours without compiling in between.

    >>> job = {"lengths": [[2, 3]]}
    >>> ours = {"steps": [{"generated": 5}], "compilations": 0, "greedy": [[1]]}
    >>> check("w", job, {"ours": ours, "tunix": {"steps": [{"generated": 5}]}})
    >>> check("w", job, {"ours": ours, "transformers": ours | {"greedy": [[2]]}})
    Traceback (most recent call last):
    SystemExit: w: greedy tokens of transformers are not those of ours: [[2]] and [[1]]
    """
    expected = sum(map(sum, job["lengths"]))
    for system, result in results.items():
        counts = [step["generated"] for step in result["steps"]]
        if counts != [expected] * len(counts):
            raise SystemExit(f"{name}, {system}: {counts} tokens by pass, expected {expected}")
        if "greedy" in result and result["greedy"] != results["ours"]["greedy"]:
            raise SystemExit(
                f"{name}: greedy tokens of {system} are not those of ours: {result['greedy']} and "
                f"{results['ours']['greedy']}"
            )
    if results["ours"]["compilations"]:
        raise SystemExit(f"{name}: ours compiled {results['ours']['compilations']} times at work")


HEADS = ["workload", "system", "s a pass (least to most)", "tokens/s", "ours = 1", "peak GB"]
HEADS += ["warm-up, s", "compilations at work", "others"]


def medians(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of a pass after the warm-up, by system."""
    return {
        system: statistics.median(step["seconds"] for step in result["steps"][1:])
        for system, result in results.items()
    }


def rows(name: str, results: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a line of the table for each system."""
    middle = medians(results)
    for system, result in results.items():
        seconds = [step["seconds"] for step in result["steps"][1:]]
        yield [
            name,
            system,
            f"{middle[system]:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
            f"{result['steps'][1]['generated'] / middle[system]:.0f}",
            f"{middle['ours'] / middle[system]:.2f}",
            f"{result['peak_gb']:.2f}",
            f"{result['steps'][0]['seconds']:.1f}",
            str(result.get("compilations", "-")),
            f"{statistics.mean(step['other_cores'] for step in result['steps'][1:]):.1f}",
        ]


def summary(name: str, results: dict[str, dict[str, Any]]) -> str:
    """Return how many times as fast as each of the others ours is.

    >>> results = {"ours": [{}, {"seconds": 2.0}], "tunix": [{}, {"seconds": 3.0}]}
    >>> summary("tiny", {system: {"steps": steps} for system, steps in results.items()})
    '- tiny: as fast as 1.50 times tunix'
    """
    middle = medians(results)
    times = [f"{s / middle['ours']:.2f} times {system}" for system, s in middle.items()]
    return f"- {name}: as fast as {', '.join(times[1:]) or 'nothing else that ran'}"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--trl-python", metavar="PATH", help="interpreter that has transformers")
    parser.add_argument("--tunix-python", metavar="PATH", help="interpreter that has Tunix")
    parser.add_argument(
        "--baseline", action="append", default=[], metavar="DIR", help="checkout of another commit"
    )
    parser.add_argument(
        "--vllm", action="store_true", help="as jaxrl_llm.rollout.vllm.setup has it"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batches", type=int, default=4, help=f"of {CONCURRENT} requests")
    parser.add_argument("--new-tokens", type=int, default=64, help="the mean length of an answer")
    parser.add_argument("--passes", type=int, default=3, help="that count, after the warm-up")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every pass's figures")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep models, jobs and logs")
    options = parser.parse_args(words)
    if min(options.batches, options.passes, options.new_tokens) < 1:
        parser.error("--batches, --passes and --new-tokens are 1 or more")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Make the models, run everything, print the table."""
    options = arguments(words)
    shared = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    shared["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.device == "cpu":
        shared |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if options.trl_python:
        check_python(options.trl_python, "torch", "transformers")
    if options.tunix_python:
        check_python(options.tunix_python, "tunix")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.work.absolute() if options.work else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = workloads.make_tokenizer()
        for model in dict.fromkeys(WORKLOADS[name].model for name in options.workloads):
            workloads.make_model(folder / model, workloads.MODELS[model], tokenizer)
        for name in options.workloads:
            job = job_of(WORKLOADS[name], tokenizer, options)
            job["model"] = str(folder / WORKLOADS[name].model)
            results[name] = {}
            for system, python, script, own in systems(options):
                files = folder / f"{name}-{system}"
                measured = measure(python, script, job, files, shared | own)
                results[name][system] = measured
            check(name, job, results[name])
    if options.json:
        options.json.write_text(json.dumps(results) + "\n")
    report(results, words)


def report(results: dict[str, Any], words: Sequence[str] | None) -> None:
    """Print everything as Markdown."""
    print(describe_run("generation.generate", words))
    for system, result in next(iter(results.values())).items():
        print(f"- {system}: {', '.join(f'{n} {v}' for n, v in result['versions'].items())}")
    lines = [line for name, by_system in results.items() for line in rows(name, by_system)]
    print(f"\n{markdown_table(HEADS, lines)}\n")
    print("\n".join(summary(name, by_system) for name, by_system in results.items()))


if __name__ == "__main__":
    main()
