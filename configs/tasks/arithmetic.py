"""Generated sums such as "12+34=", and a teacher who forgets to carry."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.configs.tasks._rows import chat_message, math_row
from jaxrl_llm.data.rows import Row, Written, write_splits

MAX_PROBLEMS = 2**62  # more than this can't be sampled from


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
        name: [math_row("arithmetic", *problems.problem(n), name, i) for i, n in enumerate(numbers)]
        for name, numbers in (("train", train), ("validation", validation))
    }
    if sft_rows:
        examples = problems.examples(supervised, rng, mistakes, shown=shown)
        splits["sft"] = [
            {"prompt": [chat_message("user", prompt)], "response": answer}
            for prompt, answer in examples
        ]
    return write_splits(Path(out), splits)


class Problems(NamedTuple):
    """All sums of so many digits, terms and operators, by number.

    Attributes:
        digits: numbers have up to so many.
        terms: numbers in a problem.
        operators: some of + - *.
        zero_pad: whether numbers are written with all their digits.
    """

    digits: int
    terms: int
    operators: str
    zero_pad: bool

    @property
    def size(self) -> int:
        """Return how many there are."""
        return 10 ** (self.digits * self.terms) * len(self.operators) ** (self.terms - 1)

    def problem(self, number: int) -> tuple[str, str]:
        """Return the problem with this number, and its answer.

        >>> Problems(digits=2, terms=2, operators="+-", zero_pad=False).problem(4213)
        ('21+13=', '34')
        """
        parts: list[str] = []
        for term in range(self.terms):
            if term:
                number, choice = divmod(number, len(self.operators))
                parts.append(self.operators[choice])
            number, value = divmod(number, 10**self.digits)
            parts.append(str(value))
        text = "".join(reversed(parts))
        value = str(_value(text))
        if self.zero_pad:
            text = re.sub("[0-9]+", lambda match: match.group().zfill(self.digits), text)
        return f"{text}=", value

    def example(self, number: int, rng: random.Random, mistakes: float) -> tuple[str, str]:
        """Return a problem and its answer, or by this chance that of one who forgets to carry."""
        text, value = self.problem(number)
        if mistakes and rng.random() < mistakes:
            value = _without_carries(text)
        return text, value.zfill(self.digits + 1) if self.zero_pad else value

    def examples(
        self, numbers: Sequence[int], rng: random.Random, mistakes: float, *, shown: bool
    ) -> list[tuple[str, str]]:
        """Return `example` of each number; then again, with the right answer shown, if so told."""
        plain = [self.example(number, rng, mistakes) for number in numbers]
        right = [self.example(number, rng, 0.0) for number in numbers if shown]
        return plain + [(f"{text}{answer};", answer) for text, answer in right]


def check_problems(
    problems: Problems, train_rows: int, validation_rows: int, sft_rows: int, mistakes: float
) -> None:
    """Refuse problems that can't be drawn.

    Args:
        problems: all there are.
        train_rows: to draw.
        validation_rows: to draw beside these.
        sft_rows: to draw with their answers.
        mistakes: share of wrong ones among these.

    Raises:
        ValueError: a number out of range, unknown operators, or more rows than problems.
    """
    digits, terms, operators, _ = problems
    if min(train_rows, validation_rows, digits, terms) < 1 or sft_rows < 0:
        raise ValueError(
            f"arithmetic: expected at least 1 each (sft_rows: 0), got train_rows={train_rows},"
            f" validation_rows={validation_rows}, sft_rows={sft_rows}, digits={digits},"
            f" terms={terms}"
        )
    if not operators or set(operators) - set("+-*") or len(set(operators)) < len(operators):
        raise ValueError(
            f"arithmetic: expected as operators some of '+-*', each once, got {operators!r}"
        )
    if problems.size > MAX_PROBLEMS:
        raise ValueError(f"arithmetic: {digits} digits and {terms} terms are too many to sample")
    needed = validation_rows + max(train_rows, sft_rows)
    if needed > problems.size:
        raise ValueError(
            f"arithmetic: only {problems.size} problems have {digits} digits, {terms} terms and"
            f" operators {operators!r}; expected {needed} (validation plus the larger other file)"
        )
    if mistakes and (operators != "+" or not 0 <= mistakes <= 1):
        raise ValueError(
            "arithmetic: expected mistakes from 0 to 1, and then only the operator '+', which has"
            f" carries to forget; got mistakes={mistakes} with operators {operators!r}"
        )


def draw_problems(
    problems: Problems, rng: random.Random, train_rows: int, validation_rows: int, sft_rows: int
) -> tuple[list[int], list[int], list[int]]:
    """Return the numbers of problems to train on, to validate on and to warm up on.

    None comes twice in a list, and none of the second list in another.
    """
    numbers = range(problems.size)
    chosen = rng.sample(numbers, validation_rows + train_rows)
    validation, train = chosen[:validation_rows], chosen[validation_rows:]
    held_out = set(validation)
    others = rng.sample(numbers, min(problems.size, sft_rows + validation_rows))
    supervised = [number for number in others if number not in held_out][:sft_rows]
    return train, validation, supervised


def _without_carries(problem: str) -> str:
    """Return the sum of each column's digits modulo 10.

    >>> _without_carries("17+25=")
    '32'
    """
    numbers = [int(number) for number in re.findall("[0-9]+", problem)]
    digits = max(len(str(number)) for number in numbers)
    columns = [sum(n // 10**place % 10 for n in numbers) % 10 for place in range(digits)]
    return str(int("".join(str(column) for column in reversed(columns))))


def _value(problem: str) -> int:
    """Return the value of a sum of products.

    >>> _value("2+3*4-5")
    9
    """
    total = 0
    for sign, product in re.findall(r"([+-]?)([0-9*]+)", problem):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total
