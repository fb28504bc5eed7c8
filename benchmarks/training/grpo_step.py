"""One GRPO step of this library against TRL's and Tunix's, on the CPU: time, memory, tokens.

    python -m benchmarks.training.grpo_step --setup peers   makes peers/trl and peers/tunix with pip
    python -m benchmarks.training.grpo_step --trl-python peers/trl/bin/python \\
        --tunix-python peers/tunix/bin/python           the tables, as Markdown

Every system gets the same random Qwen3 model, 16 prompts x 8 answers a step, the same length for
each answer, float32, AdamW, a KL to a reference in the loss, one update a step, and the same cheap
reward. Each runs in a process of its own, one after the other. The script fails where the tokens
that the systems generate or train on are not the same.

Workloads: a model, `tiny` (0.85M) or `small` (25M), with answers of 64 tokens each; with `-spread`
their lengths are log-normal (sigma 1) with a mean of 64 and are cut at 256. Ours is held to them by
a limit in each request, TRL by a logits processor that forces the end of sequence; Tunix generates
256 tokens for every answer, which are then cut. TRL and Tunix pad to the longest. Every system
trains in small micro-batches (`PROMPTS_AT_ONCE` prompts, `TOKENS_AT_ONCE` tokens), in which it was
at least as fast on a CPU as in one, and takes the least memory. Tunix can pack the update's rows,
but makes an update of each row then, where this asks for one a step.

A step runs from the end of one to the end of the next: sampling, rewards, reference, update.
FLOPs are those that no system can do without: two for each matrix parameter and token, and
4·N·H for each token that another attends to in a layer. A step takes one forward pass to prefill
each distinct prompt, one for each generated token, one for the reference, and three for the update;
padding, a second prefill of the same prompt or another pass over the tokens are not counted. The
machine's rate is the best that jax or torch reaches on three shapes in the same run.

Compare only on a machine that does nothing else: torch's threads spin, and one busy foreign core
makes TRL several times slower. "others" is how many cores other processes kept busy meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import PEERS, measure
from benchmarks.training.grpo_tables import RATE_SHAPES, report
from benchmarks.training.workloads import (
    GRAD_CLIP,
    KL_COEF,
    LEARNING_RATE,
    MODELS,
    PROMPTS_AT_ONCE,
    ROPE_THETA,
    SAMPLES,
    TOKENS_AT_ONCE,
    WORKLOADS,
    lengths_of,
    make_model,
    make_tokenizer,
    spec_of,
    step_flops,
    sums,
)

INSTALL = {"trl": (["torch==2.13.0"], ["trl==1.16.0"]), "tunix": (["google-tunix==0.1.7"],)}
SYSTEMS = ("ours", "trl", "tunix")


def rates(pythons: dict[str, str]) -> dict[str, list[float]]:
    """Return the GFLOP/s of float32 matrix products, by library and shape."""
    by_library = {}
    for library, systems in (("jax", ("ours", "tunix")), ("torch", ("trl",))):
        if using := [pythons[system] for system in systems if system in pythons]:
            command = [using[0], PEERS / "rate.py", library, json.dumps(RATE_SHAPES)]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            output = subprocess.run(command, check=True, capture_output=True, env=environment)
            by_library[library] = json.loads(output.stdout)
    return by_library


def check_tokens(expected: dict[str, Sequence[float]], results: dict[str, dict[str, Any]]) -> None:
    """Raise SystemExit unless every system has done the work that was asked of it.

    >>> step = {"generated": 3, "trained": 3, "tokens": 5}
    >>> expected = {name: [count] for name, count in step.items()}
    >>> check_tokens(expected, {"ours": {"steps": [step]}})
    >>> check_tokens(expected, {"trl": {"steps": [step | {"trained": 2}]}})
    Traceback (most recent call last):
    SystemExit: trl, trained: [2] tokens by step, expected [3]
    """
    for system, result in results.items():
        for name, numbers in expected.items():
            counts = [step.get(name) for step in result["steps"]]
            if counts != list(numbers):
                raise SystemExit(f"{system}, {name}: {counts} tokens by step, expected {numbers}")


def run_workload(name: str, pythons: dict[str, str], options: Any, folder: Path) -> dict[str, Any]:
    """Run every system on a workload; return what each took, by name."""
    from transformers import AutoTokenizer

    workload, steps = WORKLOADS[name], options.steps
    tokenizer = AutoTokenizer.from_pretrained(folder / workload.model)
    prompts, lengths = sums(steps), lengths_of(workload, steps)
    prompt_tokens = [[len(tokenizer(p)["input_ids"]) for p in step] for step in prompts]
    job = {
        "model": str(folder / workload.model),
        "prompts": prompts,
        "lengths": lengths,
        "samples": SAMPLES,
        "max_new_tokens": workload.max_new_tokens,
        "longest_prompt": max(map(max, prompt_tokens)),
        "microbatch": PROMPTS_AT_ONCE,
        "overrides": [f"batch.max_tokens_per_device={TOKENS_AT_ONCE}", *options.set],
        "warm": options.warm,
        "rope_theta": ROPE_THETA,
        "kl_coef": KL_COEF,
        "learning_rate": LEARNING_RATE,
        "grad_clip": GRAD_CLIP,
    }
    results = {}
    for system, python in pythons.items():
        result = measure(python, PEERS / f"run_{system}.py", job, folder / f"{name}-{system}")
        results[system] = result | {"measured": result["steps"][options.warm :]}
    generated = [sum(step) for step in lengths]
    whole = [g + SAMPLES * sum(step) for g, step in zip(generated, prompt_tokens, strict=True)]
    check_tokens({"generated": generated, "trained": generated, "tokens": whole}, results)
    flops = statistics.median(
        step_flops(spec_of(MODELS[workload.model]), *step)
        for step in list(zip(prompt_tokens, lengths, strict=True))[options.warm :]
    )
    return {"flops": flops, "systems": results}


def set_up(folder: Path, bases: dict[str, str]) -> None:
    """Make the peers' virtual environments."""
    for name, packages in INSTALL.items():
        subprocess.run([bases[name], "-m", "venv", folder / name], check=True)
        for arguments in packages:
            subprocess.run([folder / name / "bin/pip", "install", *arguments], check=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", type=Path, metavar="DIR", help="make the environments and stop")
    parser.add_argument(
        "--trl-base", default="python3.11", help="interpreter of TRL's environment, for --setup"
    )
    parser.add_argument(
        "--tunix-base", default="python3.12", help="of Tunix's, 3.12 or newer, for --setup"
    )
    parser.add_argument("--trl-python", metavar="PATH", help="interpreter that has TRL")
    parser.add_argument("--tunix-python", metavar="PATH", help="interpreter that has Tunix")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=10, help="all steps, with the warm-up")
    parser.add_argument("--warm", type=int, default=2, help="steps that are left out")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="config keys for ours"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every step's figures")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep models, jobs, logs and results"
    )
    options = parser.parse_args()
    if not 0 <= options.warm < options.steps:
        parser.error(f"--warm {options.warm}, expected 0 to {options.steps - 1}, less than --steps")
    return options


def main() -> None:
    """Make the models, run everything, print the tables."""
    options = arguments()
    if options.setup:
        set_up(options.setup, {"trl": options.trl_base, "tunix": options.tunix_base})
        return
    given = {"ours": sys.executable, "trl": options.trl_python, "tunix": options.tunix_python}
    pythons = {
        system: str(Path(given[system]).absolute()) for system in options.systems if given[system]
    }
    os.environ |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.work.absolute() if options.work else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = make_tokenizer()
        for name in dict.fromkeys(WORKLOADS[workload].model for workload in options.workloads):
            make_model(folder / name, MODELS[name], tokenizer)
        measured = rates(pythons)
        rate = max(map(max, measured.values()))
        results = {name: run_workload(name, pythons, options, folder) for name in options.workloads}
    if options.json:
        options.json.write_text(json.dumps({"rates": measured, "workloads": results}) + "\n")
    report(results, measured, rate)


if __name__ == "__main__":
    main()
