"""The questions of Search-R1, for a model that can search."""

import random
from pathlib import Path
from typing import Any

from jaxrl_llm.configs.tasks._sources import source_rows
from jaxrl_llm.data.rows import Row, Written, map_rows, write_splits

SEARCH_INSTRUCTION = (
    "Answer the question below. Reason inside <think> and </think> whenever you have learned"
    " something new. Where you lack knowledge, search, as often as you need to. Then give the"
    " answer alone inside <answer> and </answer>, as in <answer>Beijing</answer>. Question: "
)


def search_r1(
    out: str | Path,
    *,
    source: str = "PeterJinGo/nq_hotpotqa_train",
    instruction: str = SEARCH_INSTRUCTION,
    validation_rows: int = 512,
    seed: int = 0,
) -> Written:
    """Write the questions of Search-R1 (https://arxiv.org/abs/2503.09516) in verl's schema.

    Args:
        out: directory for train.parquet and validation.parquet.
        source: the dataset on the hub, or a copy: a directory, or two files as "TRAIN,TEST". The
            columns are `question`, `golden_answers` and `data_source`.
        instruction: before each question.
        validation_rows: so many questions of the test split, drawn from all its data sets; 0 takes
            all, 50,000.
        seed: of that draw.

    Returns:
        The files and their rows.

    Raises:
        ValueError: the source can't be read, or a row has no such columns.

    >>> search_r1("out", source="no.jsonl,no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    splits = {}
    for split, theirs in (("train", "train"), ("validation", "test")):
        found = [*enumerate(source_rows(source, "default", theirs))]
        if split == "validation" and 0 < validation_rows < len(found):
            found = sorted(random.Random(seed).sample(found, validation_rows), key=lambda r: r[0])
        splits[split] = map_rows(
            lambda _, pair, split=split: _question_row(pair[1], instruction, split, pair[0]),
            found,
            name=lambda _, pair, theirs=theirs: f"{source}, {theirs} row {pair[0]}",
        )
    return write_splits(Path(out), splits)


def _question_row(row: Row, instruction: str, split: str, number: int) -> Row:
    question, answers, source = (row.get(n) for n in ("question", "golden_answers", "data_source"))
    if not isinstance(question, str) or not isinstance(source, str) or not _are_texts(answers):
        raise ValueError(
            "expected texts as question and data_source, and golden_answers as a list of"
            f" texts, got columns {', '.join(sorted(row))}"
        )
    return {
        "data_source": f"searchR1_{source}",
        "prompt": [{"role": "user", "content": instruction + question.strip()}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": number},
    }


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
