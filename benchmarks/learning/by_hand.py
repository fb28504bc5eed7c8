"""Train the quickstart's model by the loop of docs/by_hand.md and by the trainer; print a table.

    python -m benchmarks.learning.by_hand

Data, base model and hyper-parameters are the quickstart's, and so is the accuracy: greedy answers
to its held-out sums. Each seed takes about a minute by hand and one by the trainer.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.learning.recipes import ROOT, SHORT, place_configs
from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm import Policy, TrainConfig
from jaxrl_llm.config.load import load
from jaxrl_llm.data import Prompt, batches, load_tokenizer, tokenize_prompts, verl_rows
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rewards import arithmetic
from jaxrl_llm.rollout import Engine
from jaxrl_llm.training.optimizer import make_optimizer

METRIC = "val-core/arithmetic/acc/mean@1"
SHOWN = (0, 20, 60, 100)

Curve = dict[int, float]  # accuracy by step


def listing() -> str:
    """Return the loop of the page."""
    page = (ROOT / "docs/by_hand.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0]


def score(prompt: Prompt, text: str) -> float:
    """Return 1 for the right sum, else 0."""
    return arithmetic("arithmetic", text, prompt.ground_truth, None)["score"]


def train_by_trainer(seed: int, keys: Sequence[str]) -> Curve:
    """Run the quickstart here; make its data and base model where there are none."""
    own = [f"seed={seed}", f"run_dir=runs/{seed}", "rollout.dump_every=0", "checkpoint.every=0"]
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "quickstart", *own, *keys]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = map(json.loads, Path(f"runs/{seed}/metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[METRIC] for line in lines if METRIC in line}


def train_by_hand(seed: int, keys: Sequence[str]) -> Curve:
    """Run the page's loop on the quickstart's data, which are here."""
    config = load(TrainConfig, "quickstart", [f"seed={seed}", *keys])
    tokenizer, longest = load_tokenizer(config.model.path), config.data.max_prompt_tokens
    train, held_out = (
        tokenize_prompts(verl_rows(files), tokenizer, max_prompt_tokens=longest)[0]
        for files in (config.data.train, config.data.validation)
    )
    names: dict[str, Any] = {}
    curve: Curve = {}

    def validate(step: int) -> None:
        curve[step] = accuracy(names["policy"], names["engine"], held_out)

    def watched(steps: int) -> Iterator[list[Prompt]]:
        stream = batches(train, batch_size=config.batch.prompts_per_step, seed=seed)
        for step, prompts in enumerate(islice(stream, steps)):
            if step in SHOWN:
                validate(step)
            yield prompts
        validate(steps)

    assert config.steps is not None, "the quickstart has steps"
    declared = declare(read_spec(config.model.path))
    optimizer = make_optimizer(config.optim)[0](declared, declared)
    names |= {"model": config.model.path, "optimizer": optimizer}
    names |= {"seed": seed, "prompt_batches": watched(config.steps), "score": score}
    exec(compile(listing(), "docs/by_hand.md", "exec"), names)
    names["engine"].close()
    return curve


def accuracy(policy: Policy, engine: Engine, prompts: list[Prompt]) -> float:
    """Return the share of prompts whose greedy answer is right."""
    answers = policy.sample(engine, prompts, max_new_tokens=5, temperature=0.0)
    pairs = zip(answers.prompts, answers.texts, strict=True)
    return sum(score(prompt, text) for prompt, text in pairs) / len(prompts)


def main(words: Sequence[str] | None = None) -> None:
    """Run the seeds both ways."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="two steps of one seed")
    small = parser.parse_args(words).small
    rows, steps = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        place_configs(Path(folder), small=small)
        for seed in (0,) if small else (0, 1, 2):
            for name, run in (("trainer", train_by_trainer), ("by hand", train_by_hand)):
                curve = run(seed, SHORT if small else ())
                steps = [step for step in curve if step in (*SHOWN, max(curve))]
                rows.append([seed, name, *(f"{curve[step]:.3f}" for step in steps)])
                print(*rows[-1], file=sys.stderr, flush=True)
    print(describe_run("learning.by_hand", words), end="\n\n")
    print(markdown_table(["seed", "loop", *(f"step {step}" for step in steps)], rows))


if __name__ == "__main__":
    main()
