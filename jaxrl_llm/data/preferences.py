"""Preferences: tokenized pairs and labelled answers, and batches of them.

A pair is packed as one sequence, in which the rejected answer follows the chosen one as a segment
of its own, so that both are always in the same micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import Tokenizer, encode_prompt
from jaxrl_llm.data.dataset import count_dropped, fits
from jaxrl_llm.data.preference_rows import REFERENCE_COLUMNS
from jaxrl_llm.types import Batch


@dataclass(frozen=True)
class Preference:
    """A tokenized pair, or a tokenized answer with a label.

    Attributes:
        prompt: tokens of the prompt.
        answers: tokens of the chosen and the rejected answer, or of the one that has a label.
        columns: numbers for the loss: margins, labels, log-probs under a reference.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    columns: Mapping[str, float | bool] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the sequences behind each other, as they are packed."""
        return tuple(token for answer in self.answers for token in (*self.prompt, *answer))

    @property
    def is_pair(self) -> bool:
        """Return whether there are two answers."""
        return len(self.answers) == 2


def tokenize_preferences(
    rows: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    filter_overlong: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[Preference], int]:
    """Tokenize rows: the templated prompt, each answer as it stands, the eos token.

    Args:
        rows: as `normalize_row` returns them, all pairs or all with a label.
        tokenizer: with a chat template and an eos token.
        max_tokens: the longest prompt plus answer plus eos, in tokens.
        filter_overlong: drop rows with a longer answer (counted and logged) instead of refusing
            them.
        template_kwargs: variables for the chat template.

    Returns:
        The preferences, and how many rows were dropped.

    Raises:
        ValueError: rows of both kinds; an answer is too long and `filter_overlong` is off; none is
            left; the chat template does not fit; there is no eos token; only some of the rows
            bring log-probs under a reference.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("preferences: the tokenizer has no eos token to end an answer")
    _check_alike(rows)
    made = []
    for index, row in enumerate(rows):
        prompt = tuple(encode_prompt(tokenizer, row["prompt"], **(template_kwargs or {})))
        texts = [row[name] for name in ("chosen", "rejected", "response") if name in row]
        answers = tuple(
            (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
            for text in texts
        )
        longest = len(prompt) + max(map(len, answers))
        if fits(longest, max_tokens, index, "max_tokens", filter_overlong):
            made.append(Preference(prompt, answers, _columns(row)))
    return made, count_dropped(len(rows), len(made), "max_tokens", max_tokens)


def preference_batch(preferences: Sequence[Preference], width: int) -> Batch:
    """Lay preferences out as a batch [P W], each pair as one sequence.

    Its fields: `mask`, true on the answers; of pairs `second_start`, where the rejected answer's
    prompt begins; and the columns.

    Args:
        preferences: all pairs, or all with a label.
        width: W, at least the longest.
    """
    tokens = np.zeros((len(preferences), width), np.int32)
    mask = np.zeros(tokens.shape, bool)
    starts = np.zeros(len(preferences), np.int32)
    for i, preference in enumerate(preferences):
        tokens[i, : len(preference.tokens)] = preference.tokens
        at = 0
        for answer in preference.answers:
            starts[i] = at
            at += len(preference.prompt)
            mask[i, at : at + len(answer)] = True
            at += len(answer)
    sizes = np.array([len(p.tokens) for p in preferences], np.int32)
    fields: dict[str, np.ndarray] = {"mask": mask}
    if preferences[0].is_pair:
        fields["second_start"] = starts
    for name in preferences[0].columns:
        kind = bool if name == "labels" else np.float32
        fields[name] = np.array([p.columns[name] for p in preferences], kind)
    return Batch(tokens, sizes, fields)


def rotate_answers(preferences: Sequence[Preference], max_tokens: int) -> list[Preference]:
    """Give each prompt the answer of the next row, cut to what fits, for KTO's baseline.

    >>> rows = [Preference((1,), ((2, 3),)), Preference((4,), ((5, 6, 7),))]
    >>> [p.tokens for p in rotate_answers(rows, 3)]
    [(1, 5, 6), (4, 2, 3)]
    """
    following = [*preferences[1:], preferences[0]]
    return [
        Preference(p.prompt, (other.answers[0][: max_tokens - len(p.prompt)],), p.columns)
        for p, other in zip(preferences, following, strict=True)
    ]


def _columns(row: dict[str, Any]) -> dict[str, float | bool]:
    columns: dict[str, float | bool] = {n: row[n] for n in REFERENCE_COLUMNS if n in row}
    if "margin" in row:
        columns["margins"] = row["margin"]
    if "label" in row:
        columns["labels"] = row["label"]
    return columns


def _check_alike(rows: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless all rows have the columns of the first one."""
    for index, row in enumerate(rows):
        for name in ("chosen", "label", "margin", *REFERENCE_COLUMNS):
            if (name in row) != (name in rows[0]):
                having, missing = (index, 0) if name in row else (0, index)
                raise ValueError(
                    f"dataset: row {having} has {name!r}, row {missing} has not: expected it in "
                    "all rows or in none"
                )
