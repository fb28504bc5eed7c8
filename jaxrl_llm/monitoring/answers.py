"""Some of a step's answers for people: which ones, and what of them is shown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards.worker import UNSCORED
from jaxrl_llm.workers.answers import shorten

COLUMNS = ("prompt", "answer", "score", "advantage")
PROMPT_LINES, ANSWER_LINES, ERROR_CHARS = 2, 4, 80
"""How much of each is shown at most; lines are those of a whole screen."""


def choose_answers(scores: Sequence[float], samples: int) -> list[int]:
    """Return at most four answers to show, of one or two groups, in their order.

    They are the best and the worst answer to the prompt that has the best one, and the same of the
    prompt that has the worst one. Answers without a score are shown if there are no others.

    Args:
        scores: of the answers [B]; NaN of one that is unscored.
        samples: answers to each prompt, which lie side by side.

    >>> choose_answers([0.0, 0.5, 1.0, 0.0, 0.0, 0.0], 2)
    [0, 1, 2, 3]
    >>> choose_answers([1.0, 1.0, 1.0, 1.0], 2)
    [0]
    >>> choose_answers([float("nan"), 1.0, 0.0, float("nan")], 2)
    [1, 2]
    """
    values = np.asarray(scores, float)
    high, low = np.nan_to_num(values, nan=-np.inf), np.nan_to_num(values, nan=np.inf)
    chosen = {int(high.argmax()), int(low.argmin())}
    for answer in tuple(chosen):
        first = answer - answer % samples
        group = slice(first, first + samples)
        chosen |= {first + int(high[group].argmax()), first + int(low[group].argmin())}
    return sorted(chosen)


def answer_cells(rows: Sequence[Mapping[str, Any]], width: int = 120) -> Iterator[list[str]]:
    """Yield the texts of `COLUMNS` for each answer; nothing in them controls a terminal.

    Args:
        rows: of answers, as `trained_rows` has them.
        width: of the screen, in characters; what is longer loses its middle.
    """
    for row in rows:
        messages = json.loads(row["prompt"])
        prompt = last_message(messages)
        parts = [] if row["score"] is None else [f"{row['score']:.4g}"]
        if row["error"] is not None:
            parts.append(shorten(printable(explained(row["error"])), ERROR_CHARS))
        advantage = row["advantage"]
        yield [
            shorten(printable(prompt), PROMPT_LINES * width),
            shorten(printable(row["answer"]), ANSWER_LINES * width),
            "\n".join(parts),
            "" if advantage is None else f"{advantage:.3g}",
        ]


def last_message(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a chat's last message, with a mark for each image; "" without any.

    >>> last_message([{"content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}])
    '[image] How many?'
    """
    return message_text(messages[-1]["content"]) if messages else ""


def message_text(content: Any) -> str:
    """Return what is shown of a message's content: its texts, and a mark for each image."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = (part if isinstance(part, Mapping) else {"text": part} for part in content)
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)


def explained(error: str) -> str:
    """Return what is shown of why an answer has no score of its own.

    >>> explained("timeout: no answer within 5 s"), explained("unscored: no verdict")
    ('failed: timeout: no answer within 5 s', 'unscored: no verdict')
    """
    return error if error.startswith(f"{UNSCORED}:") else f"failed: {error}"


def printable(text: str) -> str:
    r"""Return a text with what has no picture of its own, but controls a terminal, as escapes.

    >>> printable("a\tb\nc\x1b[31m")
    'a b⏎c\\x1b[31m'
    """
    text = text.replace("\r\n", "\n").replace("\n", "⏎")
    return "".join(
        " " if c.isspace() else c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )
