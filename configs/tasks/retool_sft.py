"""The cold start of ReTool: solutions whose code becomes calls of the tool `python`."""

import re
from pathlib import Path

from jaxrl_llm.configs.tasks._rows import Messages, chat_message, turn_rows
from jaxrl_llm.configs.tasks._sources import read_train
from jaxrl_llm.data.call_formats import ToolCall, write_hermes
from jaxrl_llm.data.rows import Row, Written, map_rows, write_splits

QUESTION = "*user question:*"
PART = re.compile(r"<(code|interpreter)>(.*?)</\1>", re.DOTALL)
FENCE = re.compile(r"```(?:python)?\n?(.*?)```", re.DOTALL)


def retool_sft(out: str | Path, *, source: str = "JoeYing/ReTool-SFT") -> Written:
    """Write the cold start of ReTool (https://arxiv.org/abs/2504.11536), a row for each turn.

    Code becomes a call of the tool `python`, as Qwen's templates write it, and what the interpreter
    says becomes a tool's message.

    Args:
        out: directory for sft.parquet.
        source: a dataset on the Hugging Face hub, or a parquet or jsonl file of it, with two
            `messages` in each row: the question, and the solution with <code> and <interpreter>.

    Returns:
        The file and its rows.

    Raises:
        ValueError: the source can't be read, or a row has another form.

    >>> retool_sft("out", source="no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    turns = map_rows(
        lambda _, row: turn_rows(_retool_chat(row)),
        read_train(source),
        name=lambda number, _: f"{source}, row {number}",
    )
    return write_splits(Path(out), {"sft": [turn for some in turns for turn in some]})


def _retool_chat(row: Row) -> Messages:
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) != 2:
        raise ValueError(f"expected two messages, got columns {', '.join(sorted(row))}")
    question, solution = (message["content"] for message in messages)
    before, marker, problem = question.partition(QUESTION)
    if not marker:
        raise ValueError(f"expected a question with {QUESTION!r}, got {before[:80]!r}")
    chat, place = [chat_message("user", _without_tags(problem))], 0
    for part in PART.finditer(solution):
        text, place = solution[place : part.start()].strip(), part.end()
        if part[1] == "code":
            chat.append(chat_message("assistant", f"{text}\n{_call(part[2])}".strip()))
        else:  # nothing is said between code and what it gives
            chat.append(chat_message("tool", part[2].strip()))
    return [*chat, chat_message("assistant", _without_tags(solution[place:]))]


def _call(code: str) -> str:
    fenced = FENCE.search(code)
    return write_hermes([ToolCall("python", {"code": (fenced[1] if fenced else code).strip()})])


def _without_tags(text: str) -> str:
    return re.sub(r"</?answer>", "", text).strip()
