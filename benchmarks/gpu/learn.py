"""GRPO of a small pretrained model on sums, end to end, by this library or by TRL.

    python -m benchmarks.gpu.learn --model runs/real/sums/base
    python -m benchmarks.gpu.learn --model runs/real/sums/base --system trl

Batch, limits, loss, rate and reward are those of configs/real/sums.yaml, as in
`benchmarks.learning.against_trl`, and both systems get the same prompts in the same order. The
model is the recipe's after its warm-up (docs/real_model.md says how it is made); a chat model that
answers in sentences earns nothing at first. Prints a JSON object: mean rewards of the first and the
last steps, seconds of a step and until the first one has ended.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import emit
from benchmarks.peers.measure import PEERS, measure

STEPS = 70
PROMPTS, SAMPLES = 16, 8
SYSTEM = "Answer with the number only."
ENDS = 5
"""Steps whose rewards are averaged at both ends."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="folder, as Hugging Face's")
    parser.add_argument("--system", choices=("ours", "trl"), default="ours")
    parser.add_argument("--seconds", type=float, default=80, help="no step begins after them")
    parser.add_argument("--small", action="store_true", help="two tiny steps on the processor")
    return parser.parse_args(words)


def sums(count: int) -> list[tuple[list[dict[str, str]], str]]:
    """Draw sums of two numbers of one or two digits, with their answers.

    >>> [(_, user), answer] = sums(1)[0]
    >>> sum(int(word) for word in user["content"].split() if word.isdigit()) == int(answer)
    True
    """
    draw, rows = random.Random(0), []
    for _ in range(count):
        a, b = (draw.randrange(10 ** draw.randint(1, 2)) for _ in range(2))
        system = {"role": "system", "content": SYSTEM}
        rows.append(([system, {"role": "user", "content": f"Calculate {a} + {b} ."}], str(a + b)))
    return rows


def job_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what either system is to do."""
    small = options.small
    steps, prompts = (2, 2) if small else (STEPS, PROMPTS)
    return {
        "model": str(options.model.resolve()),
        "rows": sums(steps * prompts),
        "seed": 0,
        "steps": steps,
        "seconds": options.seconds,
        "prompts_per_step": prompts,
        "samples": SAMPLES,
        "max_new_tokens": 8,
        "max_prompt_tokens": 64,
        "max_tokens_per_device": 4096,
        "model_keys": {"logprob_chunk": 256, "dtype": "float32" if small else "bfloat16"},
        "microbatch": prompts * SAMPLES,
        "learning_rate": 1e-5,
        "grad_clip": 1.0,
        "engine": "native",
        "device": "cpu" if small else "cuda",
    }


def main(words: Sequence[str] | None = None) -> None:
    """Train, and print the row."""
    options = arguments(words)
    with tempfile.TemporaryDirectory() as folder:
        script = PEERS / f"learn_{options.system}.py"
        done = measure(sys.executable, script, job_of(options), Path(folder) / "run")
    rewards, ends = done["rewards"], done["ends"]
    later = [after - before for before, after in itertools.pairwise(ends)]
    emit(
        what=options.system,
        steps=len(ends),
        first_rewards=statistics.mean(rewards[:ENDS]),
        last_rewards=statistics.mean(rewards[-ENDS:]),
        seconds_to_step_1=ends[0],
        seconds_a_step=statistics.median(later) if later else None,
        versions=json.dumps(done["versions"]),
    )


if __name__ == "__main__":
    main()
