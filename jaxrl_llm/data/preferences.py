"""Preferences: tokenized pairs, labelled answers and labelled steps, and batches of them.

A pair is packed as one sequence, in which the rejected answer follows the chosen one as a segment
of its own, so that both are always in the same micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import Tokenizer
from jaxrl_llm.data.chat_template import ChatTemplate
from jaxrl_llm.data.dataset import as_answer, check_ids, count_dropped, fits
from jaxrl_llm.data.preference_rows import REFERENCE_COLUMNS
from jaxrl_llm.data.row_fields import Row, map_rows, row_name
from jaxrl_llm.data.steps import check_steps, encode_steps
from jaxrl_llm.types import Batch


@dataclass(frozen=True)
class Preference:
    """A tokenized pair, or a tokenized answer that has a label, or one for each of its steps.

    Attributes:
        prompt: tokens of the prompt.
        answers: tokens of the chosen and the rejected answer, or of the one that has a label.
        columns: numbers for the loss: margins, labels, log-probs under a reference.
        step_ends: index of each step's last token in the answer, where steps have labels.
        step_labels: of each step, from 0 to 1.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    columns: Mapping[str, float | bool] = field(default_factory=dict)
    step_ends: tuple[int, ...] = ()
    step_labels: tuple[float, ...] = ()

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
    step_separator: str = "\n",
    vocab_size: int | None = None,
) -> tuple[list[Preference], int]:
    """Tokenize rows: the templated prompt, and each answer to the token that ends its turn.

    An answer is what the chat template writes behind the prompt; see `ChatTemplate.answer`. One
    with labelled steps is its text alone, with the separator behind each step.

    Args:
        rows: as `normalize_preference_row` returns them, all of one kind.
        tokenizer: with a chat template.
        max_tokens: the longest prompt plus answer, in tokens.
        filter_overlong: drop rows with a longer answer (counted and logged) instead of refusing
            them.
        template_kwargs: variables for the chat template.
        step_separator: what is put behind each step.
        vocab_size: of the model, whose token ids are below it; None: they are not compared.

    Returns:
        The preferences, and how many rows were dropped.

    Raises:
        RowError: of rows, an answer is too long and `filter_overlong` is off, the chat template
            does not fit, a step holds the separator, or the model does not have a token.
        ValueError: rows of several kinds; none is left; only some of the rows bring log-probs under
            a reference.
    """
    template = ChatTemplate(tokenizer, template_kwargs)
    _check_alike(rows)

    def tokenized(_: int, row: Row) -> Preference | None:
        item = _tokenize(row, template, step_separator)
        check_ids(item.tokens, vocab_size, tokenizer)
        longest = len(item.prompt) + max(map(len, item.answers))
        return item if fits(longest, max_tokens, "max_tokens", filter_overlong) else None

    made = [item for item in map_rows(tokenized, rows) if item is not None]
    return made, count_dropped(len(rows), len(made), "max_tokens", max_tokens)


def _tokenize(row: Row, template: ChatTemplate, step_separator: str) -> Preference:
    chat, tools = row["prompt"], row.get("tools") or ()
    if "completions" in row:
        check_steps(row["completions"], step_separator)
        tokens, ends = encode_steps(template.tokenizer, row["completions"], step_separator)
        prompt = template.prompt(chat, tools)
        return Preference(tuple(prompt), (tokens,), {}, ends, tuple(row["labels"]))
    names = [name for name in ("chosen", "rejected", "response") if name in row]
    prompt, answers = template.answers(chat, [as_answer(row[name]) for name in names], tools)
    return Preference(tuple(prompt), tuple(map(tuple, answers)), _columns(row))


def preference_batch(preferences: Sequence[Preference], width: int) -> Batch:
    """Lay preferences out as a batch [P W], each pair as one sequence.

    Its fields: `mask`, true on the answers; of pairs `second_start`, where the rejected answer's
    prompt begins; and the columns. Where steps have labels, `mask` is true on the last token of
    each, and `step_labels` [P W] has its label there.

    Args:
        preferences: all of one kind.
        width: W, at least the longest.
    """
    tokens = np.zeros((len(preferences), width), np.int32)
    mask = np.zeros(tokens.shape, bool)
    labels = np.zeros(tokens.shape, np.float32)
    starts = np.zeros(len(preferences), np.int32)
    for i, preference in enumerate(preferences):
        tokens[i, : len(preference.tokens)] = preference.tokens
        at = 0
        for answer in preference.answers:
            starts[i] = at
            at += len(preference.prompt)
            mask[i, at : at + len(answer)] = not preference.step_ends
            at += len(answer)
        ends = len(preference.prompt) + np.array(preference.step_ends, np.int32)
        mask[i, ends], labels[i, ends] = True, preference.step_labels
    sizes = np.array([len(p.tokens) for p in preferences], np.int32)
    fields: dict[str, np.ndarray] = {"mask": mask}
    if preferences[0].is_pair:
        fields["second_start"] = starts
    if preferences[0].step_ends:
        fields["step_labels"] = labels
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
        for name in ("chosen", "label", "completions", "margin", *REFERENCE_COLUMNS):
            if (name in row) != (name in rows[0]):
                names = row_name(index, row), row_name(0, rows[0])
                having, missing = names if name in row else names[::-1]
                raise ValueError(
                    f"{having} has {name!r}, {missing} has not: expected it in all rows or in none"
                )
