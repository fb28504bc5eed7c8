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
256 tokens for every answer, which are then cut. TRL and Tunix pad to the longest. Where rows of
256 would not fit into memory they train in micro-batches of `prompts_at_once` prompts. Tunix can
pack the update's rows, but makes an update of each row then, where this asks for one a step.

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
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import describe_run, markdown_table

PEERS = Path(__file__).resolve().parents[1] / "peers"
INSTALL = {
    "trl": (["torch==2.13.0"], ["trl==1.16.0"]),
    "tunix": (["google-tunix==0.1.7"],),
}
PROMPTS, SAMPLES, NEW_TOKENS, VOCABULARY = 16, 8, 64, 512
ROPE_THETA, KL_COEF, LEARNING_RATE, GRAD_CLIP = 1e6, 0.01, 1e-5, 1.0
RATE_SHAPES = [[1024, 1024, 1024], [2048, 2048, 2048], [8192, 512, 1536]]
SYSTEMS = ("ours", "trl", "tunix")


class Shape(NamedTuple):
    """The numbers of a decoder that its FLOPs depend on."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff_width: int


class Workload(NamedTuple):
    """A model and its answers' lengths.

    Attributes:
        model: name of its shape.
        spread: whether lengths differ.
        prompts_at_once: prompts, with all their answers, in a micro-batch of the peers.
        tokens_at_once: tokens in a micro-batch of ours.
    """

    model: str
    spread: bool
    prompts_at_once: int
    tokens_at_once: int

    @property
    def max_new_tokens(self) -> int:
        """Return the longest answer."""
        return NEW_TOKENS * (4 if self.spread else 1)


MODELS = {
    "tiny": Shape(width=128, layers=4, heads=4, kv_heads=2, head_dim=32, ff_width=384),
    "small": Shape(width=512, layers=8, heads=8, kv_heads=4, head_dim=64, ff_width=1536),
}
WORKLOADS = {
    "tiny": Workload("tiny", False, PROMPTS, 16384),
    "small": Workload("small", False, PROMPTS, 16384),
    "tiny-spread": Workload("tiny", True, PROMPTS, 4096),
    "small-spread": Workload("small", True, 4, 4096),
}


def sums(steps: int, seed: int = 0) -> list[list[str]]:
    """Return the prompts of every step: sums to work out."""
    rng = random.Random(seed)

    def prompt() -> str:
        a, b, c = (rng.randrange(1000) for _ in range(3))
        return f"Question: what is {a} {rng.choice('+-*')} {b} {rng.choice('+-*')} {c}? Answer:"

    return [[prompt() for _ in range(PROMPTS)] for _ in range(steps)]


def lognormal_lengths(count: int, mean: int, most: int, sigma: float = 1.0) -> list[int]:
    """Return lengths at evenly spaced quantiles of a log-normal distribution, cut at `most`.

    The scale is such that their mean is the one wanted, up to rounding.

    >>> lengths = lognormal_lengths(128, 64, 256)
    >>> round(sum(lengths) / 128), min(lengths), max(lengths)
    (64, 3, 256)
    """
    normal = statistics.NormalDist()
    drawn = [math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]

    def cut(scale: float) -> list[int]:
        return [max(1, min(most, round(scale * value))) for value in drawn]

    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) <= mean * count else (low, middle)
    return cut(low)


def lengths_of(workload: Workload, steps: int, seed: int = 0) -> list[list[int]]:
    """Return the length of each answer of every step; steps differ in their order."""
    count = PROMPTS * SAMPLES
    if not workload.spread:
        return [[NEW_TOKENS] * count] * steps
    rng = random.Random(seed)
    lengths = lognormal_lengths(count, NEW_TOKENS, workload.max_new_tokens)
    return [rng.sample(lengths, count) for _ in range(steps)]


def matrix_parameters(shape: Shape) -> tuple[int, int]:
    """Return the parameters in matrices of all layers, and those of the head.

    >>> layers, head = matrix_parameters(MODELS["tiny"])
    >>> layers + head
    851968
    """
    attention = 2 * shape.width * shape.head_dim * (shape.heads + shape.kv_heads)
    feed_forward = 3 * shape.width * shape.ff_width
    return shape.layers * (attention + feed_forward), shape.width * VOCABULARY


def forward_flops(shape: Shape, start: int, end: int, scored: int) -> int:
    """Return the FLOPs of a forward pass over the tokens start to end of a sequence.

    Args:
        shape: of the model.
        start: tokens before them, in the cache.
        end: tokens up to the last of them.
        scored: tokens whose logits are wanted.

    >>> tiny = MODELS["tiny"]
    >>> whole, parts = (2, 5, 0), [(2, 3, 0), (3, 5, 0)]
    >>> forward_flops(tiny, *whole) == sum(forward_flops(tiny, *part) for part in parts)
    True
    """
    layers, head = matrix_parameters(shape)
    attended = (end * (end + 1) - start * (start + 1)) // 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * attended
    return 2 * layers * (end - start) + 2 * head * scored + attention


def step_flops(shape: Shape, prompts: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the FLOPs that a step needs: see the top of this file.

    Args:
        shape: of the model.
        prompts: tokens of each distinct prompt.
        lengths: tokens of each answer, those of one prompt side by side.
    """
    samples = len(lengths) // len(prompts)
    total = sum(forward_flops(shape, 0, prompt, 1) for prompt in prompts)
    for i, length in enumerate(lengths):
        prompt = prompts[i // samples]
        decoded = forward_flops(shape, prompt, prompt + length - 1, length - 1)
        total += decoded + 4 * forward_flops(shape, 0, prompt + length, length)
    return total


def make_tokenizer() -> Any:
    """Train a byte-level tokenizer of 512 tokens on prompts like those of the benchmark."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p for step in sums(250, seed=1) for p in step), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def make_model(folder: Path, shape: Shape, tokenizer: Any) -> None:
    """Write a Qwen3 model with random weights, as transformers describes one, with a tokenizer."""
    import jax
    import jax.numpy as jnp
    from transformers import Qwen3Config

    from jaxrl_llm.models.hf.config import read_spec
    from jaxrl_llm.models.hf.save import save_params
    from jaxrl_llm.models.parameters import initialize

    source = folder.with_suffix(".config")
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ff_width,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    config.save_pretrained(source)
    tokenizer.save_pretrained(source)
    spec = read_spec(source)
    params = jax.jit(initialize, static_argnums=0)(spec, key=jax.random.key(0))
    save_params(folder, params, spec, source=source, dtype=jnp.float32)


def measure(python: str, script: Path, job: dict[str, Any], name: Path) -> dict[str, Any]:
    """Run one system in a process of its own; return what it wrote.

    Args:
        python: its interpreter.
        script: what it runs.
        job: what the script is told.
        name: of the files for the job, the result and the log, which differ in their ends.

    Raises:
        SystemExit: it failed.
    """
    given, result, log = (name.with_suffix(end) for end in (".job.json", ".result.json", ".log"))
    given.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    with log.open("w") as file:
        command = [python, script, given, result]
        done = subprocess.run(command, cwd=name.parent, stdout=file, stderr=file, check=False)
    if done.returncode:
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise SystemExit(f"{command} stopped with status {done.returncode}:\n{last}")
    return json.loads(result.read_text())


def rates(pythons: dict[str, str]) -> dict[str, list[float]]:
    """Return the GFLOP/s of float32 matrix products, by library and shape."""
    found = {}
    for library, system in (("jax", "ours"), ("torch", "trl")):
        if system in pythons:
            command = [pythons[system], PEERS / "rate.py", library, json.dumps(RATE_SHAPES)]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            output = subprocess.run(command, check=True, capture_output=True, env=environment)
            found[library] = json.loads(output.stdout)
    return found


def check_tokens(expected: dict[str, Sequence[float]], found: dict[str, dict[str, Any]]) -> None:
    """Raise SystemExit unless every system has done the work that was asked of it.

    >>> step = {"generated": 3, "trained": 3, "tokens": 5}
    >>> expected = {name: [count] for name, count in step.items()}
    >>> check_tokens(expected, {"ours": {"steps": [step]}})
    >>> check_tokens(expected, {"trl": {"steps": [step | {"trained": 2}]}})
    Traceback (most recent call last):
    SystemExit: trl, trained: [2] tokens by step, wanted [3]
    """
    for system, result in found.items():
        for name, wanted in expected.items():
            counts = [step.get(name) for step in result["steps"]]
            if counts != list(wanted):
                raise SystemExit(f"{system}, {name}: {counts} tokens by step, wanted {wanted}")


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
        "microbatch": workload.prompts_at_once,
        "overrides": [f"batch.max_tokens_per_device={workload.tokens_at_once}", *options.set],
        "warm": options.warm,
        "rope_theta": ROPE_THETA,
        "kl_coef": KL_COEF,
        "learning_rate": LEARNING_RATE,
        "grad_clip": GRAD_CLIP,
    }
    found = {}
    for system, python in pythons.items():
        result = measure(python, PEERS / f"run_{system}.py", job, folder / f"{name}-{system}")
        found[system] = result | {"measured": result["steps"][options.warm :]}
    generated = [sum(step) for step in lengths]
    whole = [g + SAMPLES * sum(step) for g, step in zip(generated, prompt_tokens, strict=True)]
    check_tokens({"generated": generated, "trained": generated, "tokens": whole}, found)
    flops = statistics.median(
        step_flops(MODELS[workload.model], *step)
        for step in list(zip(prompt_tokens, lengths, strict=True))[options.warm :]
    )
    return {"flops": flops, "systems": found}


def table(results: dict[str, Any], rate: float) -> str:
    """Return a Markdown table: one row for each workload and system."""
    rows = [
        row(name, system, result, found["flops"], rate)
        for name, found in results.items()
        for system, result in found["systems"].items()
    ]
    return markdown_table(HEADS, rows)


def comparison(results: dict[str, Any]) -> list[str]:
    """Return a line for each workload: how many times as fast as the fastest peer, and memory."""
    lines = []
    for name, found in results.items():
        systems = {
            system: statistics.median(step["seconds"] for step in result["measured"])
            for system, result in found["systems"].items()
        }
        peers = {system: seconds for system, seconds in systems.items() if system != "ours"}
        if "ours" in systems and peers:
            peer = min(peers, key=lambda system: peers[system])
            memory = (found["systems"][system]["peak_gb"] for system in ("ours", peer))
            lines.append(
                f"- {name}: {peers[peer] / systems['ours']:.2f} times as fast as {peer}, the "
                f"fastest of them; {' against '.join(f'{gb:.1f}' for gb in memory)} GB"
            )
    return lines


def stages(results: dict[str, Any]) -> list[str]:
    """Return a line for each workload: where a step of ours spends its seconds."""
    lines = []
    for name, found in results.items():
        if "ours" in found["systems"]:
            ours = found["systems"]["ours"]
            parts = [f"{k.removeprefix('timing_s/')} {s:.2f}" for k, s in ours["stages"].items()]
            compiled = f"{ours['compilations']:.0f} compilations after the warm-up"
            lines.append(f"- {name}: {', '.join(parts)}; {compiled}")
    return lines


def learned(results: dict[str, Any]) -> list[str]:
    """Return a line for each workload: rewards and KLs, which show that the work is the same."""
    lines = []
    for name, found in results.items():
        parts = []
        for system, result in found["systems"].items():
            kl = f", {result['kl']:.1e}" if "kl" in result else ""
            parts.append(f"{system} {statistics.mean(result['rewards']):.3f}{kl}")
        lines.append(f"- {name}: {'; '.join(parts)}")
    return lines


def set_up(folder: Path, bases: dict[str, str]) -> None:
    """Make the peers' virtual environments."""
    for name, packages in INSTALL.items():
        subprocess.run([bases[name], "-m", "venv", folder / name], check=True)
        for wanted in packages:
            subprocess.run([folder / name / "bin/pip", "install", *wanted], check=True)


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
        parser.error(f"--warm {options.warm}, wanted 0 to {options.steps - 1}, less than --steps")
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


def report(results: dict[str, Any], measured: dict[str, list[float]], rate: float) -> None:
    """Print everything as Markdown."""
    print(describe_run("training.grpo_step", sys.argv[1:]))
    systems = {s: r for found in results.values() for s, r in found["systems"].items()}
    for system, result in systems.items():
        print(f"- {system}: {', '.join(f'{n} {v}' for n, v in result['versions'].items())}")
    for library, found in measured.items():
        by_shape = zip(RATE_SHAPES, found, strict=True)
        products = ", ".join(f"{'×'.join(map(str, shape))} {r:.0f}" for shape, r in by_shape)
        print(f"- float32 products with {library}, GFLOP/s: {products}")
    needed = ", ".join(f"{name} {found['flops'] / 1e12:.2f}" for name, found in results.items())
    print(f"- TFLOP that a step needs: {needed}\n\n{table(results, rate)}\n")
    print("\n".join(comparison(results)))
    print("\nMean reward of all steps, KL to the reference in the last one:\n")
    print("\n".join(learned(results)))
    print("\nSeconds of the stages of ours:\n\n" + "\n".join(stages(results)))


if __name__ == "__main__":
    main()
