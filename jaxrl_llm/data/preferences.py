"""Preferences: rows of pairs and of labelled answers, and what a trainer makes of them.

A pair is packed as one sequence, in which the rejected answer follows the chosen one as a segment
of its own, so that both are always in the same micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import Tokenizer, encode_prompt
from jaxrl_llm.data.dataset import count_dropped, fits
from jaxrl_llm.data.rows import Row, abbreviated, check_messages, field_error
from jaxrl_llm.types import Batch

REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps")
"""Columns of rows that bring log-probs under the reference along."""


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


def normalize_row(row: Any, where: str) -> Row:
    """Return a row in this library's form, from any of the forms that data sets have.

    A pair is `{"prompt", "chosen", "rejected"}`, with answers that are texts, messages of the
    assistant, or whole chats that begin with the prompt, which need no `prompt` then; optionally
    `margin`, or `score_chosen` and `score_rejected`, whose difference it is. An answer with a
    label is `{"prompt", "completion" or "response", "label": bool}`. A prompt is a list of
    messages, or a text, which is then the user's.

    Args:
        row: as it is in a file.
        where: it stands, for messages.

    Returns:
        The row with `prompt` as messages and answers as texts.

    Raises:
        ValueError: it is neither.

    >>> chat = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    >>> row = {"chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "5"}]}
    >>> normalize_row(row, "row 0")
    {'prompt': [{'role': 'user', 'content': '2+2='}], 'chosen': '4', 'rejected': '5'}
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a row as a dict, got {abbreviated(row)}")
    is_pair = "chosen" in row or "rejected" in row
    names = ("chosen", "rejected") if is_pair else (_answer_name(row),)
    answers = {name: row.get(name) for name in names}
    prompt = row.get("prompt")
    if is_pair and _is_whole_chat(answers["chosen"]):
        prompt, answers = _split_chats(answers, where)
    if isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}]
    check_messages({"prompt": prompt}, where)
    made = {"prompt": prompt} | {n: _answer_text(a, n, where) for n, a in answers.items()}
    if not is_pair:
        if not isinstance(row.get("label"), bool | np.bool_):
            raise field_error(where, "label", row.get("label"), "true or false")
        made = {"prompt": prompt, "response": made[names[0]], "label": bool(row["label"])}
    elif made["chosen"] == made["rejected"]:
        raise ValueError(f"{where}: chosen and rejected are the same text: remove such rows")
    return made | _numbers(row, where)


def tokenize_preferences(
    rows: Sequence[Row],
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


def _answer_name(row: Row) -> str:
    return "completion" if "completion" in row else "response"


def _is_whole_chat(answer: Any) -> bool:
    """Return whether an answer is a chat with its prompt."""
    return (
        isinstance(answer, list)
        and bool(answer)
        and isinstance(answer[0], dict)
        and answer[0].get("role") in ("user", "system")
    )


def _split_chats(answers: Row, where: str) -> tuple[list[Any], Row]:
    """Return the prompt that two chats begin with, and the rest of each."""
    chosen, rejected = answers["chosen"], answers["rejected"]
    if not _is_whole_chat(rejected):
        raise field_error(where, "rejected", rejected, "a chat that begins as 'chosen' does")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if len(chosen) - shared != 1 or len(rejected) - shared != 1:
        raise ValueError(
            f"{where}: expected chats that differ in their last message, got {len(chosen)} and "
            f"{len(rejected)} messages, of which the first {shared} are the same"
        )
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def _answer_text(answer: Any, name: str, where: str) -> str:
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        if answer[0].get("role") != "assistant":
            raise field_error(where, f"{name}[0].role", answer[0].get("role"), "'assistant'")
        answer = answer[0].get("content")
    if not isinstance(answer, str) or not answer:
        raise field_error(where, name, answer, "a non-empty string or one assistant's message")
    return answer


def _numbers(row: Row, where: str) -> dict[str, float]:
    numbers = {}
    for name in ("margin", "score_chosen", "score_rejected", *REFERENCE_COLUMNS):
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise field_error(where, name, value, "a finite number")
        numbers[name] = float(value)
    scores = [numbers.pop(name, None) for name in ("score_chosen", "score_rejected")]
    if scores[0] is not None and scores[1] is not None:
        numbers.setdefault("margin", scores[0] - scores[1])
    return numbers


def _columns(row: Row) -> dict[str, float | bool]:
    columns: dict[str, float | bool] = {n: row[n] for n in REFERENCE_COLUMNS if n in row}
    if "margin" in row:
        columns["margins"] = row["margin"]
    if "label" in row:
        columns["labels"] = row["label"]
    return columns


def _check_alike(rows: Sequence[Row]) -> None:
    """Raise ValueError unless all rows have the columns of the first one."""
    for index, row in enumerate(rows):
        for name in ("chosen", "label", "margin", *REFERENCE_COLUMNS):
            if (name in row) != (name in rows[0]):
                having, missing = (index, 0) if name in row else (0, index)
                raise ValueError(
                    f"dataset: row {having} has {name!r}, row {missing} has not: expected it in "
                    "all rows or in none"
                )
