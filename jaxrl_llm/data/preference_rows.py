"""Rows of preferences as data sets have them: pairs, answers with a label, labelled steps."""

from typing import Any

from jaxrl_llm.data.row_fields import (
    Row,
    as_row,
    check_columns,
    field_error,
    normalize_answer,
    normalize_messages,
    with_tool_schemas,
)
from jaxrl_llm.data.steps import normalize_step_row
from jaxrl_llm.workers.answers import finite_number

REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps")
"""Columns of rows that bring log-probs under the reference along."""


def normalize_preference_row(row: Any) -> Row:
    """Return a row in this library's form, from any of the forms that data sets have.

    A pair is `{"prompt", "chosen", "rejected"}`, with answers that are texts, messages of the
    assistant, or whole chats that begin with the prompt, which need no `prompt` then; optionally
    `margin`, or `score_chosen` and `score_rejected`, whose difference it is. An answer with a
    label is `{"prompt", "completion" or "response", "label": bool}`. An answer whose steps have
    labels is `{"prompt", "completions", "labels"}`; see `normalize_step_row`. A prompt is a list
    of messages, or a text, which is then the user's. All may have `tools`.

    Args:
        row: as it is in a file, or as it is returned here.

    Returns:
        The row with `prompt` as messages, and answers as messages of the assistant, or steps as
        texts.

    Raises:
        ValueError: it is none of these.

    >>> chat = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    >>> row = {"chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "5"}]}
    >>> made = normalize_preference_row(row)
    >>> made["prompt"], made["chosen"]["content"], made["rejected"]["content"]
    ([{'role': 'user', 'content': '2+2='}], '4', '5')
    """
    row = as_row(row)
    check_columns(row)
    if columns := [name for name in ("images", "videos") if row.get(name)]:
        raise field_error(columns[0], row[columns[0]], "nothing: preferences are of text")
    prompt, tools = row.get("prompt"), {"tools": row.get("tools", [])}
    if isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}]
    if "completions" in row:
        return with_tool_schemas(
            normalize_step_row(row, normalize_messages(prompt, "prompt")) | tools
        )
    if "chosen" in row or "rejected" in row:
        made = _pair(row, prompt)
    else:
        name = "completion" if "completion" in row else "response"
        if not isinstance(row.get("label"), bool):
            raise field_error("label", row.get("label"), "true or false")
        answer = normalize_answer(row.get(name), name)
        made = {
            "prompt": normalize_messages(prompt, "prompt"),
            "response": answer,
            "label": row["label"],
        }
    return with_tool_schemas(made | tools | _numbers(row))


def _pair(row: Row, prompt: Any) -> Row:
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if _is_whole_chat(chosen):
        if not _is_whole_chat(rejected):
            raise field_error("rejected", rejected, "a chat that begins as 'chosen' does")
        chosen, rejected = (normalize_messages(row[n], n) for n in ("chosen", "rejected"))
        shared = _count_shared(chosen, rejected)
        if (
            isinstance(row.get("prompt"), list)
            and normalize_messages(prompt, "prompt") != (chosen[:shared])
        ):
            raise field_error("prompt", prompt, "the messages with which both chats begin, or none")
        prompt, chosen, rejected = chosen[:shared], chosen[shared], rejected[shared]
    made = {
        "prompt": normalize_messages(prompt, "prompt"),
        "chosen": normalize_answer(chosen, "chosen"),
        "rejected": normalize_answer(rejected, "rejected"),
    }
    if made["chosen"] == made["rejected"]:
        raise ValueError("chosen and rejected are the same answer: remove such rows")
    return made


def _is_whole_chat(answer: Any) -> bool:
    """Return whether an answer is a chat with its prompt."""
    return (
        isinstance(answer, list)
        and bool(answer)
        and isinstance(answer[0], dict)
        and answer[0].get("role") in ("user", "system", "developer")
    )


def _count_shared(chosen: list[Row], rejected: list[Row]) -> int:
    """Return with how many messages two chats begin that differ in their last one."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same chat: remove such rows")
    if len(chosen) - shared != 1 or len(rejected) - shared != 1:
        raise ValueError(
            f"expected chats that differ in their last message, got {len(chosen)} and "
            f"{len(rejected)} messages, of which the first {shared} are the same"
        )
    return shared


def _numbers(row: Row) -> dict[str, float]:
    numbers = {}
    for name in ("margin", "score_chosen", "score_rejected", *REFERENCE_COLUMNS):
        value = row.get(name)
        if value is None:
            continue
        number = None if isinstance(value, bool) else finite_number(value)
        if number is None:
            raise field_error(name, value, "a finite number (float32)")
        numbers[name] = number
    scores = [numbers.pop(name, None) for name in ("score_chosen", "score_rejected")]
    if scores[0] is not None and scores[1] is not None:
        numbers.setdefault("margin", scores[0] - scores[1])
    return numbers
