"""Preferences: tokenized pairs, labelled answers and labelled steps, and batches of them.

A pair is packed as one sequence, in which the rejected answer follows the chosen one as a segment
of its own, so that both are always in the same micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import ChatTemplate, Tokenizer
from jaxrl_llm.data.dataset import as_answer, check_ids, count_dropped, fits
from jaxrl_llm.data.row_fields import Row, map_rows, row_name
from jaxrl_llm.data.rows import REFERENCE_COLUMNS
from jaxrl_llm.types import Batch


def encode_steps(
    tokenizer: Tokenizer, steps: Sequence[str], separator: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Encode steps, each alone, with the separator behind it.

    So no token spans the border of two steps, and what is scored is always the same token.

    Args:
        tokenizer: of the process reward model.
        steps: their texts.
        separator: a text.

    Returns:
        The tokens of an answer, and the index of each step's last token, which is the separator's.

    Raises:
        ValueError: the separator has no tokens.

    >>> class Bytes:
    ...     eos_token_id = 0
    ...     def __call__(self, text, *, add_special_tokens):
    ...         return {"input_ids": list(text.encode())}
    ...     def get_chat_template(self): return ""
    ...     def apply_chat_template(self, conversation, **kwargs): return []
    >>> encode_steps(Bytes(), ["a", "bc"], "\\n")
    ((97, 10, 98, 99, 10), (1, 4))
    """
    behind = tokenizer(separator, add_special_tokens=False)["input_ids"]
    if not behind:
        raise ValueError(f"steps: the tokenizer has no token for the separator {separator!r}")
    tokens: list[int] = []
    ends = []
    for step in steps:
        tokens += [*tokenizer(step, add_special_tokens=False)["input_ids"], *behind]
        ends.append(len(tokens) - 1)
    return tuple(map(int, tokens)), tuple(ends)


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    r"""Cut an answer into steps; return each with where it ends in the text.

    A step ends behind its separator, the last one at the end of the text. Blank ones are none;
    where all are blank, the answer is one empty step.

    Args:
        text: of the answer.
        separator: that ends a step.

    >>> split_steps("1+1=2\n\n2*2=4\n", "\n")
    [('1+1=2', 6), ('2*2=4', 13)]
    >>> split_steps("\n", "\n")
    [('', 1)]
    """
    steps, at = [], 0
    for part in text.split(separator):
        end = min(at + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part, end))
        at = end
    return steps or [("", len(text))]


def last_tokens(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """Return the index of the token with which the text of an answer reaches each of its ends.

    Args:
        decode: from token ids to the text in which the ends are.
        tokens: of the answer.
        ends: lengths of the text, in letters, in rising order. The last one is that of the whole
            text, whose last token is the answer's, a token that stopped it included.

    >>> last_tokens(lambda ids: "".join("ab\\n"[i] for i in ids), [0, 2, 1, 1], [2, 4])
    [1, 3]
    """
    places = []
    for end in ends[:-1]:
        low, high = 0, len(tokens) - 1
        while low < high:
            middle = (low + high) // 2
            if len(decode(tokens[: middle + 1])) >= end:
                high = middle
            else:
                low = middle + 1
        places.append(low)
    return [*places, len(tokens) - 1]


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
        for number, step in enumerate(row["completions"]):
            if step_separator in step:  # an answer's text would be cut there
                raise ValueError(
                    f"completions[{number}] holds data.step_separator={step_separator!r}, "
                    "which ends a step: expected the text of one step without it"
                )
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
