"""GSM8K: problems of grade-school math."""

import re
from pathlib import Path

from jaxrl_llm.configs.tasks._rows import math_row
from jaxrl_llm.configs.tasks._sources import convert_splits, text_columns
from jaxrl_llm.data.rows import Row, Written, write_splits


def gsm8k(out: str | Path, *, source: str = "openai/gsm8k") -> Written:
    """Write GSM8K (https://arxiv.org/abs/2110.14168) in verl's schema.

    Args:
        out: directory for train.parquet and validation.parquet (GSM8K's test split).
        source: a dataset on the Hugging Face hub, or a local copy: a directory with parquet or
            jsonl files named train* and test*, or two such files as "TRAIN,TEST". The columns are
            `question` and `answer`, which ends in "#### NUMBER".

    Returns:
        The files and their rows.

    Raises:
        ValueError: the source can't be read, or a row has no such columns or no final number.

    >>> gsm8k("out", source="no.jsonl,no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    instruction = 'Think step by step, and end with the final number after "####".'

    def convert(row: Row, split: str, index: int) -> Row:
        question, answer = text_columns(row, ("question", "answer"))
        final = answer.rpartition("####")[2].strip().replace(",", "")
        if "####" not in answer or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", final):
            raise ValueError("column 'answer' does not end in '#### NUMBER'")
        prompt = f"{question.strip()}\n{instruction}"
        return math_row("openai/gsm8k", prompt, final, split=split, index=index, solution=answer)

    return write_splits(Path(out), convert_splits(source, "main", convert))
