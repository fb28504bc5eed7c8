"""Train, and hold that what was trained on is what the engine drew, token by token.

    python -m benchmarks.learning.external.watched --config FILE.yaml rollout.dump_every=1 a.b=c …

What the native engine draws is kept beside the trainer. After the run each turn of each dumped
episode must be one that was drawn, with its log-probs, after exactly the tokens that stand before
it, and no draw may be used twice. `drawn.json` in the run's folder counts them.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.tables import parser_of
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.rollout.engine import Completion, Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.train import train

Drawn = dict[bytes, list[tuple[int, ...]]]
"""From what was drawn, tokens and log-probs, to the prompts after which it was."""


def watch(drawn: Drawn) -> None:
    """Keep what each engine draws from now on."""
    sample, sample_until, generate = (
        getattr(NativeEngine, name) for name in ("sample", "sample_until", "generate")
    )

    def keep(request: Request, completion: Completion) -> Completion:
        drawn[key(completion.tokens, completion.logprobs)].append(tuple(request.prompt))
        return completion

    def kept_sample(self: Any, requests: Sequence[Request]) -> list[Completion]:
        return [*map(keep, requests, sample(self, requests))]

    def kept_sample_until(
        self: Any, requests: Sequence[Request], *args: Any, **more: Any
    ) -> list[Completion]:
        return [*map(keep, requests, sample_until(self, requests, *args, **more))]

    async def kept_generate(self: Any, request: Request) -> Completion:
        return keep(request, await generate(self, request))

    for name, kept in (
        ("sample", kept_sample),
        ("sample_until", kept_sample_until),
        ("generate", kept_generate),
    ):
        setattr(NativeEngine, name, kept)


def key(tokens: Any, logprobs: Any) -> bytes:
    """Return tokens and log-probs as bytes, all bits of them."""
    return np.asarray(tokens, np.int32).tobytes() + np.asarray(logprobs, np.float32).tobytes()


def turns(row: Any) -> Iterator[tuple[int, list[int], bytes]]:
    """Yield the turns of a dumped episode: the chain, the tokens before it in this, its key."""
    number = np.cumsum(row.turn_ids >= 0) - 1  # drawn tokens alone have log-probs
    for chain in np.unique(row.chain_ids):
        places = np.flatnonzero(row.chain_ids == chain)
        ids = row.turn_ids[places]
        for turn in dict.fromkeys(ids[ids >= 0].tolist()):
            own = places[ids == turn]
            before = row.tokens[places[places < own[0]]].tolist()
            yield int(chain), before, key(row.tokens[own], row.rollout_logprobs[number[own]])


def count_trained(folder: Path, drawn: Drawn) -> dict[str, int]:
    """Return how many turns and tokens a run has trained on.

    Raises:
        AssertionError: one of the turns was not drawn, or not after these tokens.
    """
    counts = {"episodes": 0, "chains": 0, "turns": 0, "tokens": 0}
    for file in sorted((folder / "rollouts").glob("*.parquet")):
        for row in pd.read_parquet(file).itertuples():
            openings: dict[int, tuple[int, ...]] = {}
            for chain, before, what in turns(row):
                prompts = drawn.get(what, [])
                opening = openings.get(chain)
                fits = [
                    prompt
                    for prompt in prompts
                    if list(prompt[len(prompt) - len(before) :]) == before
                    and opening in (None, prompt[: len(prompt) - len(before)])
                ]
                assert fits, f"{file.name}: a turn of {row.prompt} was not drawn so"
                prompts.remove(fits[0])
                openings[chain] = fits[0][: len(fits[0]) - len(before)]
                counts["turns"] += 1
                counts["tokens"] += len(what) // 8
            counts["episodes"] += 1
            counts["chains"] += len(openings)
    return counts


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(words)
    config, drawn = load(TrainConfig, options.config, options.overrides), defaultdict(list)
    if config.rollout.dump_every != 1:
        parser.error("expected rollout.dump_every=1: each step is checked")
    watch(drawn)
    train(config)
    counts = count_trained(Path(config.run_dir), drawn)
    (Path(config.run_dir) / "drawn.json").write_text(json.dumps(counts))
    print(f"trained on what was drawn: {counts}")


if __name__ == "__main__":
    main()
