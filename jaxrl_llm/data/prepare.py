"""Write ready-made datasets: `python -m jaxrl_llm.data.prepare NAME --out DIR [--key value …]`.

Every function here whose first parameter is `out` is a NAME; its keyword arguments are the keys.
Files are written whole or not at all.
"""

import argparse
import inspect
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.data import row_fields
from jaxrl_llm.data.agent_tasks import agent_task_splits
from jaxrl_llm.data.arithmetic import Problems, check_problems, draw_problems
from jaxrl_llm.data.picture_task import pictures
from jaxrl_llm.data.published import dapo_math, geo3k, retool_sft, search_r1, source_rows
from jaxrl_llm.data.reasoning import TaskPlan
from jaxrl_llm.data.rows import Row, Written, write_splits
from jaxrl_llm.data.search_task import Search, write_corpus
from jaxrl_llm.data.verifiers_rows import verifiers
from jaxrl_llm.rewards.functions import last_boxed


def arithmetic(  # noqa: PLR0913 - each is a key of a config
    out: str | Path,
    *,
    train_rows: int = 4096,
    validation_rows: int = 512,
    sft_rows: int = 4096,
    digits: int = 2,
    terms: int = 2,
    operators: str = "+-",
    zero_pad: bool = False,
    mistakes: float = 0.0,
    shown: bool = False,
    seed: int = 0,
) -> Written:
    """Write generated sums such as "12+34=", with the integer as the answer.

    No problem comes twice in a file, and no validation problem comes in another file; the
    supervised file may share problems with the training file.

    Args:
        out: directory for train.parquet, validation.parquet and sft.parquet (prompt + response).
        train_rows: problems to train on.
        validation_rows: problems held out.
        sft_rows: problems with their answers, for a supervised warm-up; 0 writes no such file.
        digits: numbers have up to so many digits.
        terms: numbers in a problem.
        operators: any of + - *, each equally likely; * binds tighter.
        zero_pad: write every number with all its digits, as in "07+35=", and the responses of
            sft.parquet with one more, "042": small models learn aligned digits far sooner.
        mistakes: share of the responses in sft.parquet that add column by column and forget every
            carry: a base model that has seen them knows both ways. Only for sums.
        shown: write each problem of sft.parquet again, with the right answer behind it.
        seed: of the choice of problems.

    Returns:
        The files and their rows.

    Raises:
        ValueError: a number out of range, unknown operators, or more rows than there are problems.

    >>> import tempfile
    >>> files = arithmetic(tempfile.mkdtemp(), train_rows=8, validation_rows=2, sft_rows=0)
    >>> {path.name: rows for path, rows in files.items()}
    {'train.parquet': 8, 'validation.parquet': 2}
    """
    problems = Problems(digits, terms, operators, zero_pad)
    check_problems(problems, train_rows, validation_rows, sft_rows, mistakes)
    rng = random.Random(seed)
    train, validation, supervised = draw_problems(
        problems, rng, train_rows, validation_rows, sft_rows
    )
    splits: dict[str, list[Row]] = {
        name: [_rl_row("arithmetic", *problems.problem(n), name, i) for i, n in enumerate(numbers)]
        for name, numbers in (("train", train), ("validation", validation))
    }
    if sft_rows:
        examples = problems.examples(supervised, rng, mistakes, shown=shown)
        splits["sft"] = [_sft_row(*example) for example in examples]
    return write_splits(Path(out), splits)


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
        question, answer = _columns(row, ("question", "answer"))
        final = answer.rpartition("####")[2].strip().replace(",", "")
        if "####" not in answer or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", final):
            raise ValueError("column 'answer' does not end in '#### NUMBER'")
        prompt = f"{question.strip()}\n{instruction}"
        return _rl_row("openai/gsm8k", prompt, final, split=split, index=index, solution=answer)

    return write_splits(Path(out), _convert_splits(source, "main", convert))


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
        problem, solution, level, kind = _columns(row, ("problem", "solution", "level", "type"))
        answer = last_boxed(solution)
        if not answer:
            raise ValueError(r"column 'solution' has no answer in a \boxed")
        prompt = f"{problem.strip()}\n{instruction}"
        more = {"solution": solution, "level": level, "type": kind}
        return _rl_row("DigitalLearningGmbH/MATH-lighteval", prompt, answer, split, index, **more)

    return write_splits(Path(out), _convert_splits(source, "default", convert))


def reasoning_gym(  # noqa: PLR0913 - each is a key of a config
    out: str | Path,
    *,
    tasks: Mapping[str, Mapping[str, Any]] | None = None,
    train_rows: int = 4096,
    validation_rows: int = 512,
    sft_rows: int = 0,
    system: str = "",
    template: str = "{question}",
    response: str = "{answer}",
    seed: int = 0,
) -> Written:
    """Write tasks of reasoning-gym, for the reward function of the same name.

    No question comes twice in a file, and no validation question comes in another file; the
    supervised file may share questions with the training file.

    Args:
        out: directory for train.parquet, validation.parquet and sft.parquet (prompt + response).
        tasks: `{NAME: {weight: 1, SETTING: value, …}, …}`: which tasks, in which proportion, and
            the settings of their generators.
        train_rows: questions to train on.
        validation_rows: questions held out.
        sft_rows: questions with their answers, for a supervised warm-up; 0 writes no such file.
        system: the system message; empty for none.
        template: of the user's message, with `{question}` in it.
        response: of the supervised file's responses, with `{answer}` in it.
        seed: of the choice of questions.

    Returns:
        The files and their rows.

    Raises:
        ValueError: the package is not installed, there is no such task or setting, a number is out
            of range, a template lacks its field, or there are too few questions.
    """
    plan = TaskPlan(tasks or {}, system, template, response, seed)
    return write_splits(Path(out), plan.splits(train_rows, validation_rows, sft_rows))


def agent_task(
    out: str | Path,
    *,
    task: str = "look_up",
    settings: Mapping[str, Any] | None = None,
    train_rows: int = 4096,
    validation_rows: int = 256,
    sft_episodes: int = 4096,
    seed: int = 0,
) -> Written:
    """Write a task of several turns, with a tool or an environment, that a small model can learn.

    No validation row comes in another file, except for guess_number. For search there is a folder
    `corpus`, too, in which its tool searches.

    Args:
        out: directory for train.parquet, validation.parquet and sft.parquet (prompt + response).
        task: look_up, calculator, guess_number, grid, code or search.
        settings: of the task and its teacher (jaxrl_llm.data.agent_tasks).
        train_rows: rows to train on.
        validation_rows: rows held out.
        sft_episodes: of a flawed teacher, each turn a row, for a supervised warm-up; 0 writes no
            such file.
        seed: of all draws.

    Returns:
        The files and their rows.

    Raises:
        ValueError: no such task or setting, or a number out of range.
    """
    rows = {"train": train_rows, "validation": validation_rows}
    splits = agent_task_splits(
        task, settings or {}, rows=rows, sft_episodes=sft_episodes, seed=seed
    )
    if task == "search":
        write_corpus(Path(out), Search(**(settings or {})))
    return write_splits(Path(out), splits)


def _columns(row: Row, names: Sequence[str]) -> list[str]:
    for name in names:
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"expected text in column {name!r}, got columns {', '.join(sorted(row))}"
            )
    return [row[name] for name in names]


def _rl_row(data_source: str, prompt: str, answer: str, split: str, index: int, **more: str) -> Row:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, **more},
    }


def _sft_row(prompt: str, answer: str) -> Row:
    return {"prompt": [{"role": "user", "content": prompt}], "response": answer}


def _convert_splits(
    source: str, config: str, convert: Callable[[Row, str, int], Row]
) -> dict[str, list[Row]]:
    return {
        ours: row_fields.map_rows(
            lambda index, row, ours=ours: convert(row, ours, index),
            source_rows(source, config, theirs),
            name=lambda index, _, theirs=theirs: f"{source}, {theirs} row {index}",
        )
        for ours, theirs in (("train", "train"), ("validation", "test"))
    }


# ------------------------------------------------------------------------------------ command line

DATASETS: dict[str, Callable[..., Written]] = {
    function.__name__: function
    for function in (
        arithmetic,
        gsm8k,
        math,
        reasoning_gym,
        agent_task,
        dapo_math,
        retool_sft,
        search_r1,
        verifiers,
        pictures,
        geo3k,
    )
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.data.prepare", description="Write a ready-made dataset."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, function in DATASETS.items():
        summary = inspect.getdoc(function) or ""
        command = names.add_parser(
            name,
            help=summary.splitlines()[0],
            description=summary.partition("\nReturns:")[0],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("--out", required=True, help="directory to write to")
        for key, parameter in list(inspect.signature(function).parameters.items())[1:]:
            command.add_argument(
                *dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}")),
                dest=key,
                type=yaml.safe_load if parameter.default is None else type(parameter.default),
                default=parameter.default,
                help="default: %(default)s",
            )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; print one line per file written, or one line of error.

    Args:
        arguments: without the program's name; None takes the process's own.

    Raises:
        SystemExit: the arguments are wrong, or the dataset can't be prepared.
    """
    options = vars(_parser().parse_args(arguments))
    prepare, out = DATASETS[options.pop("name")], options.pop("out")
    try:
        written = prepare(out, **options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for path, rows in written.items():
        sys.stdout.write(f"{path}: {rows} rows\n")


if __name__ == "__main__":
    main()
