"""Published datasets as rows: competition math, Geometry3K, Search-R1's questions."""

import contextlib
import io
import json
import random
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.data.call_formats import ToolCall, write_hermes
from jaxrl_llm.data.row_fields import map_rows
from jaxrl_llm.data.rows import Row, Written, read_rows, write_splits
from jaxrl_llm.data.task_rows import Messages, chat_message, turn_rows

HUB_TIMEOUT_S = 10.0
"""Seconds in which the hub must answer, or it is taken for unreachable."""


def source_rows(source: str, config: str, split: str) -> list[Row]:
    """Read the rows of a published dataset, from the hub or from a copy.

    Args:
        source: a dataset on the Hugging Face hub; or a directory with parquet or jsonl files named
            as the split and more; or two such files as "TRAIN,TEST".
        config: of a dataset on the hub that has several.
        split: train or test.

    Raises:
        ValueError: there is no such dataset, or it can't be read.
    """
    if Path(source).is_dir():
        return _directory_rows(Path(source), config, split)
    if source.endswith((".parquet", ".jsonl")):
        files = source.split(",")
        if len(files) != 2:
            raise ValueError(f"{source}: expected two files as 'TRAIN,TEST', got {len(files)}")
        return read_rows(files[split == "test"])
    return hub_rows(source, config, split)


def _directory_rows(directory: Path, config: str, split: str) -> list[Row]:
    # A snapshot of a hub dataset keeps each configuration in a folder of its own.
    home = directory / config if (directory / config).is_dir() else directory
    files = sorted(
        path for path in home.rglob(f"{split}*") if path.suffix in (".parquet", ".jsonl")
    )
    if not files:
        raise ValueError(f"{home}: no file named {split}*.parquet or {split}*.jsonl")
    return [row for path in files for row in read_rows(path)]


def hub_rows(source: str, config: str, split: str) -> list[Row]:
    """Read the rows of a split of a dataset on the hub.

    Raises:
        ValueError: the package that reads is not installed, or the hub does not give the split.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{source}: no such directory, and reading from the hub needs the datasets package:"
            " pip install 'jaxrl_llm[hub]'"
        ) from error
    with _offline_if_unreachable() as problem:
        try:
            return [dict(row) for row in load_dataset(source, config, split=split)]
        except (OSError, ValueError, RuntimeError) as error:
            reason = problem or " ".join(str(error).split())[:300]
            raise ValueError(
                f"{source}: no such directory, and the hub did not give split {split!r}: {reason}"
            ) from error


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[str | None]:
    """Have only what is kept of the hub read where it can't be reached, without several attempts.

    Yields:
        Why it can't be reached; None if it can be.
    """
    import datasets.config
    from huggingface_hub import constants

    problem = None
    try:
        if not constants.HF_HUB_OFFLINE:
            urllib.request.urlopen(constants.ENDPOINT, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        reason = getattr(error, "reason", error)
        problem = (
            f"{constants.ENDPOINT} can't be reached ({reason}), and nothing of it is kept here"
        )
    switches: list[Any] = [constants, datasets.config]
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches if problem else ():
            switch.HF_HUB_OFFLINE = True
        yield problem
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


QUESTION = "*user question:*"
PART = re.compile(r"<(code|interpreter)>(.*?)</\1>", re.DOTALL)
FENCE = re.compile(r"```(?:python)?\n?(.*?)```", re.DOTALL)


def dapo_math(
    out: str | Path,
    *,
    source: str = "BytedTsinghua-SIA/DAPO-Math-17k",
    validation_source: str = "BytedTsinghua-SIA/AIME-2024",
) -> Written:
    """Write DAPO's math problems (https://arxiv.org/abs/2503.14476), each of them once.

    The published files are in verl's schema, as ours, but have each problem many times.

    Args:
        out: directory for train.parquet and validation.parquet.
        source: a dataset on the Hugging Face hub, or a parquet or jsonl file of it.
        validation_source: the same, to validate with.

    Returns:
        The files and their rows.

    Raises:
        ValueError: a source can't be read, or a row of it has no prompt or no reference answer.

    >>> dapo_math("out", source="no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    splits = {
        split: _once_each(_read(given), given, split)
        for split, given in (("train", source), ("validation", validation_source))
    }
    return write_splits(Path(out), splits)


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
        _read(source),
        name=lambda number, _: f"{source}, row {number}",
    )
    return write_splits(Path(out), {"sft": [turn for some in turns for turn in some]})


def _read(source: str) -> list[Row]:
    if source.endswith((".parquet", ".jsonl")):
        return read_rows(source)
    return hub_rows(source, "default", "train")


def _once_each(rows: list[Row], source: str, split: str) -> list[Row]:
    unique: dict[str, Row] = {}

    def add(_: int, row: Row) -> None:
        prompt, reference = row.get("prompt"), row.get("reward_model")
        if not prompt or not isinstance(reference, dict) or "ground_truth" not in reference:
            raise ValueError(
                "expected a prompt and reward_model.ground_truth, got columns "
                f"{', '.join(sorted(row))}"
            )
        unique.setdefault(
            json.dumps(prompt),
            {
                "data_source": "math_dapo",
                "prompt": prompt,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(reference["ground_truth"])},
                "extra_info": {"split": split, "index": len(unique)},
            },
        )

    map_rows(add, rows, name=lambda number, _: f"{source}, row {number}")
    return [*unique.values()]


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


BOX_INSTRUCTION = (
    r"Reason first, inside <think> and </think>, as if you talked to yourself. Then give the final"
    r" answer inside \boxed{}."
)


def geo3k(
    out: str | Path, *, source: str = "hiyouga/geometry3k", instruction: str = BOX_INSTRUCTION
) -> Written:
    """Write Geometry3K (https://arxiv.org/abs/2105.04165) in verl's schema, with its drawings.

    Args:
        out: directory for train.parquet and validation.parquet (Geometry3K's test split).
        source: the dataset on the hub, or a copy: a directory, or two files as "TRAIN,TEST". The
            columns are `problem`, which holds `<image>`, `answer` and `images`.
        instruction: behind each problem.

    Returns:
        The files and their rows.

    Raises:
        ValueError: the source can't be read, or a row has no such columns.

    >>> geo3k("out", source="no.jsonl,no.jsonl")
    Traceback (most recent call last):
    ValueError: no.jsonl: no such file
    """
    splits = {
        split: map_rows(
            lambda number, row, split=split: _problem_row(row, instruction, split, number),
            source_rows(source, "default", theirs),
            name=lambda number, _, theirs=theirs: f"{source}, {theirs} row {number}",
        )
        for split, theirs in (("train", "train"), ("validation", "test"))
    }
    return write_splits(Path(out), splits)


def _problem_row(row: Row, instruction: str, split: str, number: int) -> Row:
    problem, answer, images = (row.get(name) for name in ("problem", "answer", "images"))
    if not isinstance(problem, str) or not isinstance(answer, str) or not isinstance(images, list):
        raise ValueError(
            "expected texts as problem and answer, and images as a list, got columns"
            f" {', '.join(sorted(row))}"
        )
    if problem.count("<image>") != len(images):
        raise ValueError(
            "expected as many images as the problem says <image>,"
            f" {problem.count('<image>')}, got {len(images)}"
        )
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{problem.strip()} {instruction}"}],
        "images": [{"bytes": _file(image)} for image in images],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": number, "answer": answer, "question": problem},
    }


def _file(image: Any) -> bytes:
    """Return an image as a file: as it is in a copy, or as PNG where the hub's reader opened it."""
    given = image.get("bytes") if isinstance(image, dict) else None
    if isinstance(given, bytes):
        return given
    save = getattr(image, "save", None)
    if save is None:
        raise ValueError(f"expected an image with its bytes, got {image!r:.80}")
    file = io.BytesIO()
    save(file, "PNG")
    return file.getvalue()


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
