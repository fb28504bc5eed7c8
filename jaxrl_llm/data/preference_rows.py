"""Rows of preferences as data sets have them: pairs, answers with a label, labelled steps."""

from typing import Any

from jaxrl_llm.data.row_fields import abbreviated, check_messages, field_error
from jaxrl_llm.data.steps import normalize_step_row
from jaxrl_llm.workers.answers import finite_number

Row = dict[str, Any]
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps")
"""Columns of rows that bring log-probs under the reference along."""


def normalize_row(row: Any, where: str) -> Row:
    """Return a row in this library's form, from any of the forms that data sets have.

    A pair is `{"prompt", "chosen", "rejected"}`, with answers that are texts, messages of the
    assistant, or whole chats that begin with the prompt, which need no `prompt` then; optionally
    `margin`, or `score_chosen` and `score_rejected`, whose difference it is. An answer with a
    label is `{"prompt", "completion" or "response", "label": bool}`. An answer whose steps have
    labels is `{"prompt", "completions", "labels"}`; see `normalize_step_row`. A prompt is a list
    of messages, or a text, which is then the user's.

    Args:
        row: as it is in a file.
        where: it stands, for messages.

    Returns:
        The row with `prompt` as messages and answers, or steps, as texts.

    Raises:
        ValueError: it is none of these.

    >>> chat = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    >>> row = {"chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "5"}]}
    >>> normalize_row(row, "row 0")
    {'prompt': [{'role': 'user', 'content': '2+2='}], 'chosen': '4', 'rejected': '5'}
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a row as a dict, got {abbreviated(row)}")
    if columns := [name for name in ("images", "videos") if row.get(name)]:
        raise field_error(where, columns[0], row[columns[0]], "nothing: preferences are of text")
    if "completions" in row:
        return normalize_step_row(row, _as_messages(row.get("prompt")), where)
    is_pair = "chosen" in row or "rejected" in row
    names = ("chosen", "rejected") if is_pair else (_answer_name(row),)
    answers = {name: row.get(name) for name in names}
    prompt = row.get("prompt")
    if is_pair and _is_whole_chat(answers["chosen"]):
        prompt, answers = _split_chats(answers, where)
    prompt = _as_messages(prompt)
    check_messages({"prompt": prompt}, where)
    made = {"prompt": prompt} | {n: _answer_text(a, n, where) for n, a in answers.items()}
    if not is_pair:
        if not isinstance(row.get("label"), bool):
            raise field_error(where, "label", row.get("label"), "true or false")
        made = {"prompt": prompt, "response": made[names[0]], "label": bool(row["label"])}
    elif made["chosen"] == made["rejected"]:
        raise ValueError(f"{where}: chosen and rejected are the same text: remove such rows")
    return made | _numbers(row, where)


def _as_messages(prompt: Any) -> Any:
    """Return a text as the user's message; anything else as it is."""
    is_text = isinstance(prompt, str) and prompt
    return [{"role": "user", "content": prompt}] if is_text else prompt


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
        number = None if isinstance(value, bool) else finite_number(value)
        if number is None:
            raise field_error(where, name, value, "a finite number (float32)")
        numbers[name] = number
    scores = [numbers.pop(name, None) for name in ("score_chosen", "score_rejected")]
    if scores[0] is not None and scores[1] is not None:
        numbers.setdefault("margin", scores[0] - scores[1])
    return numbers
