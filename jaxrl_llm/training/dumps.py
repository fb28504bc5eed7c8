"""A step's answers as rows, in parquet files and on the screen, and a table at a run's end."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data.rows import write_rows
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.tables import (
    BEFORE_AND_AFTER,
    MetricsTable,
    choose_answers,
    explained,
    last_message,
    printable,
)
from jaxrl_llm.monitoring.writer import Outages
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.types import Batch
from jaxrl_llm.workers.values import shorten

DUMPED = {
    "advantages": "advantages",
    "logprobs": "old_logprobs",
    "rollout_logprobs": "rollout_logprobs",
    "entropies": "entropy",
}
"""Columns of dumped answers with a number for each drawn token, and the field of each."""


def dump_rollouts(
    folder: Path, step: int, batch: Batch, rollouts: Rollouts, scores: list[Score]
) -> None:
    """Write a step's answers to `folder/step_NNNNNN.parquet`, one row for each."""
    folder.mkdir(exist_ok=True)
    rows = [{"step": step, **row} for row in trained_rows(batch, rollouts, scores)]
    write_rows(folder / f"step_{step:06d}.parquet", rows)


class RolloutDumps:
    """Writes the answers of chosen steps; those that the disk does not take are counted.

    Args:
        folder: of the parquet files.
    """

    def __init__(self, folder: Path) -> None:
        """Write nothing yet."""
        self._folder, self.dropped = folder, 0
        self._outages = Outages(str(folder), "answers are not kept")

    def __call__(self, step: int, batch: Batch, rollouts: Rollouts, scores: list[Score]) -> None:
        """Write a step's answers, or log once that it is not possible."""
        try:
            dump_rollouts(self._folder, step, batch, rollouts, scores)
        except OSError as error:
            self.dropped += 1
            self._outages.begin(error)
        else:
            self._outages.end(self.dropped)


def answer_rows(rollouts: Rollouts, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return a row for each answer, as parquet can hold it; of images only their digests."""
    seen = any(episode.visuals for episode in rollouts.episodes)
    return [
        {
            "prompt": json.dumps(prompt.messages, ensure_ascii=False),
            "answer": text,
            "tokens": episode.tokens.tolist(),
            "turn_ids": episode.turn_ids.tolist(),
            "chain_ids": episode.chain_ids.tolist(),
            "turn_rewards": list(episode.rewards),
            "finish": episode.finish,
            "data_source": prompt.data_source,
            "ground_truth": json.dumps(prompt.ground_truth, ensure_ascii=False),
            "score": None if score.is_unscored else score.score,
            "extra": json.dumps(score.extra, ensure_ascii=False),
            "error": score.error if episode.usable else f"broken: {episode.error}",
            **({"visuals": [visual.key.hex() for visual in episode.visuals]} if seen else {}),
        }
        for prompt, episode, text, score in zip(*rollouts[:3], scores, strict=True)
    ]


def trained_rows(batch: Batch, rollouts: Rollouts, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return a row for each answer of a training step, as parquet can hold it.

    Besides those of `answer_rows` it has the mean advantage of the drawn tokens, and of each drawn
    token its advantage if it has one, its log-probs under the trainer's and the engine's policy,
    and the trainer's entropy where the step has computed them; of an answer that is not usable
    none.
    """
    rows = answer_rows(rollouts, scores)
    for index, (row, mask) in enumerate(zip(rows, batch["mask"], strict=True)):
        used = mask.any()
        advantages = batch.fields.get("advantages")
        row["advantage"] = (
            None if advantages is None or not used else float(advantages[index][mask].mean())
        )
        for name, field in DUMPED.items():
            known = batch.fields.get(field)  # a critic's warm-up needs no log-probs of the policy
            row[name] = None if known is None or not used else known[index][mask].tolist()
    return rows


def chosen_rows(
    batch: Batch, rollouts: Rollouts, scores: Sequence[Score], *, samples: int
) -> list[dict[str, Any]]:
    """Return a row, as `trained_rows` has it, of each of a step's answers that are shown.

    Args:
        batch: with the advantages of B answers.
        rollouts: the answers.
        scores: one for each.
        samples: answers to each prompt.
    """
    chosen = choose_answers([score.score for score in scores], samples)
    some = batch.take(np.array(chosen))
    return trained_rows(some, rollouts.take(chosen), [scores[i] for i in chosen])


EXAMPLES = 3
"""Validation answers that are shown on the screen."""
EXAMPLE_CHARS = 80


def example_lines(rollouts: Rollouts, scores: Sequence[Score], *, samples: int) -> list[str]:
    """Return a line for the first answer to each of the first few prompts.

    A line has ✓ or ✗ where the reward function reports `acc`.

    Args:
        rollouts: answers; the k answers to a prompt lie side by side.
        scores: one for each answer.
        samples: k.
    """
    lines = []
    for index in range(0, len(scores), samples)[:EXAMPLES]:
        messages, score = rollouts.prompts[index].messages, scores[index]
        asked = last_message(messages)
        mark = "" if "acc" not in score.extra else "✓ " if score.extra["acc"] else "✗ "
        result = f"{mark}{score.score:.4g}" if score.error is None else explained(score.error)
        prompt, answer = (
            shorten(printable(" ".join(text.split())), EXAMPLE_CHARS)
            for text in (asked, rollouts.texts[index])
        )
        lines.append(f"  {prompt} → {answer}  {shorten(printable(result), EXAMPLE_CHARS)}")
    return lines


def print_before_and_after(lines: MetricsTable, display: Display) -> None:
    """Print a table of the first, the last and the best validation and training score."""
    display.table("before and after", BEFORE_AND_AFTER, lines.before_and_after())
