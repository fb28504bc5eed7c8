"""Greedy answers of one Hugging Face directory: the native engine, transformers and vLLM.

    python -m jaxrl_llm.export runs/real/logic/grpo OUT
    python -m benchmarks.generation.greedy OUT runs/real/logic/data/validation.parquet --vllm

All three get the same token ids, those of the file's first prompts in the model's chat template.
transformers needs torch, vLLM the environment that `jaxrl_llm.rollout.vllm.setup` makes.

Exit status 1: an answer differs.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import parser_of
from jaxrl_llm import load_policy
from jaxrl_llm.cli import take_huge_pages
from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.data.rows import verl_rows
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.vllm.engine import VllmEngine
from jaxrl_llm.training.policy import Policy, as_prompts

Answers = list[list[int]]


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("data", help="parquet or jsonl file with verl's columns")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--vllm", action="store_true")
    return parser.parse_args(words)


def by_native(policy: Policy, prompts: list[list[int]], new: int) -> Answers:
    """Return the native engine's answers."""
    engine = policy.open_engine(max_tokens=max(map(len, prompts)) + new)
    rollouts = policy.sample(engine, prompts, max_new_tokens=new, temperature=0.0)
    return [episode.tokens.tolist() for episode in rollouts.episodes]


def by_vllm(policy: Policy, directory: Path, prompts: list[list[int]], new: int) -> Answers:
    """Return the answers of a vLLM that got the directory's weights by a weight sync."""
    spec = read_spec(directory)
    settings = EngineSettings(len(prompts), max(map(len, prompts)) + new)
    with tempfile.TemporaryDirectory() as folder:
        engine = VllmEngine(
            spec, settings, source=str(directory), config=VllmConfig(), folder=Path(folder)
        )
        engine.load(load_params(directory, spec), version=0)
        rollouts = policy.sample(engine, prompts, max_new_tokens=new, temperature=0.0)
        engine.close()
    return [episode.tokens.tolist() for episode in rollouts.episodes]


def by_transformers(policy: Policy, directory: Path, prompts: list[list[int]], new: int) -> Answers:
    """Return the answers of transformers, one prompt after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        with torch.no_grad():
            whole = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                do_sample=False,
                max_new_tokens=new,
                eos_token_id=list(policy.stops),
                pad_token_id=policy.stops[0],
            )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def main(words: Sequence[str] | None = None) -> int:
    """Print how many answers are the same, and those that are not."""
    args = arguments(words)
    if words is None:
        take_huge_pages()
    policy, new = load_policy(args.directory), args.max_new_tokens
    messages = [row["prompt"] for row in verl_rows([args.data])[: args.prompts]]
    prompts = [list(prompt.tokens) for prompt in as_prompts(messages, policy.tokenizer)]
    ours = by_native(policy, prompts, new)
    others = {"transformers": by_transformers(policy, args.directory, prompts, new)}
    if args.vllm:
        others["vLLM"] = by_vllm(policy, args.directory, prompts, new)
    differ = 0
    for name, answers in others.items():
        same = sum(a == b for a, b in zip(ours, answers, strict=True))
        print(f"native and {name}: {same} of {len(ours)} greedy answers are the same")
        for prompt, a, b in zip(prompts, ours, answers, strict=True):
            if a != b:
                print(*(repr(policy.tokenizer.decode(x)) for x in (prompt, a, b)), sep="\n  ")
                differ += 1
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
