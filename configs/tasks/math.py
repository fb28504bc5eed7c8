"""MATH: problems of competitions in mathematics."""

from pathlib import Path

from jaxrl_llm.configs.tasks._rows import math_row
from jaxrl_llm.configs.tasks._sources import convert_splits, text_columns
from jaxrl_llm.data.rows import Row, Written, write_splits
from jaxrl_llm.rewards.functions import last_boxed


def math(out: str | Path, *, source: str = "DigitalLearningGmbH/MATH-lighteval") -> Written:
    r"""Write MATH (https://arxiv.org/abs/2103.03874) in verl's schema.

    Args:
        out: directory for train.parquet and validation.parquet (MATH's test split).
        source: as for `gsm8k`. The columns are `problem`, `solution` with its answer in a \boxed,
            `level` and `type`.

    Returns:
        The files and their rows.

    Raises:
        ValueError: the source can't be read, or a row has no such columns or no \boxed answer.

    >>> math("out", source="no.jsonl,no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    instruction = r"Think step by step, and put the final answer into \boxed{}."

    def convert(row: Row, split: str, index: int) -> Row:
        problem, solution, level, kind = text_columns(row, ("problem", "solution", "level", "type"))
        answer = last_boxed(solution)
        if not answer:
            raise ValueError(r"column 'solution' has no answer in a \boxed")
        prompt = f"{problem.strip()}\n{instruction}"
        more = {"solution": solution, "level": level, "type": kind}
        return math_row("DigitalLearningGmbH/MATH-lighteval", prompt, answer, split, index, **more)

    return write_splits(Path(out), convert_splits(source, "default", convert))
