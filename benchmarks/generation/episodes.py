"""Episodes a second with many at once, with and without what the engine keeps of earlier turns.

    python -m benchmarks.generation.episodes
    python -m benchmarks.generation.episodes --episodes 24 --sequences 8

Each episode has 2 to 8 turns with an environment between them, over the small model of
configs/agents with random weights. Three ways take turns, in rounds:

- ours: the next turn goes on where the last one ended, as the engine keeps keys and values.
- small cache: the same, with room for the running sequences only.
- no reuse: each turn is a request that is read from its beginning, as where a loop sends the whole
  chat to a server without a prefix cache. The streams are the same but for near ties, of which
  keys and values that were computed in other company may take the other one.

Exit status 1: an episode is broken, or more than one in a hundred streams differ.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.cli import take_huge_pages
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.chat import encode_prompt, load_tokenizer, stop_ids
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.rollout.agents.sampler import EpisodeSampler
from jaxrl_llm.rollout.engine import Completion, EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.sharding.layout import Layout, make_mesh

MODEL = Path(__file__).parents[2] / "configs" / "agents" / "model"
TURN_TOKENS, NEW_TOKENS = 12, 200
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def chatters(rng: Any) -> Any:
    """Say some letters after each of 2 to 8 turns."""
    turns = rng.randint(2, 8)
    yield ""
    for _ in range(turns - 1):
        yield "".join(rng.choices(LETTERS, k=12))
    return 0.0


class Forgetful(NativeEngine):
    """An engine that forgets all it has read before each round."""

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Free the cache, then sample."""
        self.sleep()
        self.wake()
        return super().sample(requests)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--sequences", type=int, default=64, help="decoded at once")
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args(words)


def measure(engine: NativeEngine, sampler: EpisodeSampler, prompts: list[Prompt]) -> dict[str, Any]:
    """Sample all episodes once more; return seconds, tokens that were read, and the episodes."""
    before, begun = engine.stats(), time.monotonic()
    rollouts = sampler.sample(
        engine, prompts, SamplingParams(NEW_TOKENS, stop_ids=()), samples=1, seed=(0, 1)
    )
    seconds, after = time.monotonic() - begun, engine.stats()
    read = after.prompt_tokens - before.prompt_tokens
    reused = after.reused_tokens - before.reused_tokens
    return {"seconds": seconds, "read": read, "reused": reused, "rollouts": rollouts}


def streams(rollouts: Rollouts) -> list[list[int]]:
    """Return the tokens of all episodes."""
    return [episode.tokens.tolist() for episode in rollouts.episodes]


def build(kind: type[NativeEngine], args: argparse.Namespace, *, kept: int | None) -> NativeEngine:
    """Build an engine with random weights that keeps so many sequences."""
    spec = read_spec(MODEL)
    gigabytes = None if kept is None else 16
    settings = EngineSettings(args.sequences, 256, gigabytes, cached_sequences=kept)
    layout = Layout(make_mesh({"fsdp": -1}, jax.devices()[:1]))
    engine = kind(Decoder(spec), settings, layout=layout)
    engine.load(init_params(spec, key=jax.random.key(0)), version=0)
    return engine


def main(words: Sequence[str] | None = None) -> int:
    """Measure all ways in turn, and print a table."""
    args = arguments(words)
    if words is None:
        take_huge_pages()
    tokenizer = load_tokenizer(MODEL)
    config = AgentConfig(
        environment=FunctionSpec.of(chatters),
        limits={"turn_tokens": TURN_TOKENS},
        tool_process={"workers": 2},
    )
    sampler = EpisodeSampler(
        config, tokenizer, stop_ids(tokenizer, MODEL), template_kwargs={}, prompt_tokens=40
    )
    chats = [[{"role": "user", "content": f"question {i}"}] for i in range(args.episodes)]
    prompts = [
        Prompt(i, tuple(encode_prompt(tokenizer, chat)), messages=chat)
        for i, chat in enumerate(chats)
    ]
    engines = {
        "ours": build(NativeEngine, args, kept=args.episodes),
        "small cache": build(NativeEngine, args, kept=None),
        "no reuse": build(Forgetful, args, kept=None),
    }
    best: dict[str, dict[str, Any]] = {}
    for number in range(args.repeats + 1):
        for name, engine in engines.items():
            measured = measure(engine, sampler, prompts)
            if number and measured["seconds"] < best.get(name, measured)["seconds"] + 1e-9:
                best[name] = measured
    rows = []
    for name, measured in best.items():
        seconds, base = measured["seconds"], best["no reuse"]["seconds"]
        share = measured["reused"] / (measured["reused"] + measured["read"])
        rows.append(
            [name, f"{args.episodes / seconds:.1f}", f"{base / seconds:.2f}", f"{share:.0%}"]
        )
    print(describe_run("generation.episodes", words))
    print(markdown_table(["way", "episodes a second", "against no reuse", "reused"], rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    turns = [episode.turns for episode in best["ours"]["rollouts"].episodes]
    print(f"{min(turns)} to {max(turns)} turns; at most {peak:.2f} GiB of memory")
    for engine in engines.values():
        engine.close()
    sampler.close()
    first = streams(best["ours"]["rollouts"])
    differing = max(
        sum(one != other for one, other in zip(streams(m["rollouts"]), first, strict=True))
        for m in best.values()
    )
    print(f"{differing} of {len(first)} streams differ at most between two ways")
    whole = all(e.usable for measured in best.values() for e in measured["rollouts"].episodes)
    return int(not whole or differing > 0.01 * len(first))


if __name__ == "__main__":
    sys.exit(main())
