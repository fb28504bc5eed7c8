"""Small generated pictures with a question about each, for models that see."""

import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.rows import Row, Written, write_splits

SHAPES = ("square", "disc", "cross", "wedge")
DIGITS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71122", "75757", "75717")
"""Rows of each digit from the top, three dots each, as octal numbers."""

CELLS = 4
"""Cells in a row and a column of a picture with dots, each with one dot at most."""

MOST_DOTS = 9
GREY = 128
SIDES = (16, 512)
"""The shortest and the longest side of a picture, in pixels."""


class Question(NamedTuple):
    """A picture, and what is asked about it.

    Attributes:
        ink: which pixels are drawn, [side side].
        text: of the question.
        answer: the right one.
        mistake: the wrong one of a teacher who makes mistakes.
    """

    ink: np.ndarray
    text: str
    answer: str
    mistake: str


def pictures(  # noqa: PLR0913 - each is a key of a config
    out: str | Path,
    *,
    kinds: Sequence[str] | None = None,
    side: int = 32,
    train_rows: int = 4096,
    validation_rows: int = 512,
    sft_rows: int = 4096,
    mistakes: float = 0.0,
    blank: bool = False,
    seed: int = 0,
) -> Written:
    """Write generated pictures with a question about each, for models that see.

    There are three kinds: how many dots there are, from 1 to 9; which two digits; which shape is on
    the left of two. The rows of a file take turns. Those of a kind have a data source of their own,
    as `pictures/dots`. No validation row comes in another file.

    Args:
        out: directory for train.parquet, validation.parquet and sft.parquet (prompt + response).
        kinds: some of dots, digits and shapes; None takes all.
        side: of a picture, in pixels, from 16 to 512.
        train_rows: questions to train on.
        validation_rows: questions held out.
        sft_rows: questions with their answers, for a supervised warm-up; 0 writes no such file.
        mistakes: share of the responses in sft.parquet that are wrong: they count a dot too few,
            read each digit one too low (0 as 9), or name the shape that follows in `SHAPES`.
        blank: write the same rows with grey pictures, from which nothing can be learned.
        seed: of all draws.

    Returns:
        The files and their rows.

    Raises:
        ValueError: a number out of range, or an unknown kind.

    >>> import tempfile
    >>> files = pictures(tempfile.mkdtemp(), train_rows=8, validation_rows=2, sft_rows=0)
    >>> {path.name: rows for path, rows in files.items()}
    {'train.parquet': 8, 'validation.parquet': 2}
    """
    counts = {"validation": validation_rows, "train": train_rows, "sft": sft_rows}
    kinds = tuple(KINDS) if kinds is None else kinds
    _check(kinds, side, counts, mistakes)
    draw = _Drawing(kinds, side, mistakes, blank, random.Random(seed), set())
    splits = {split: draw.rows(split, count) for split, count in counts.items() if count}
    order = ("train", "validation", "sft")
    return write_splits(Path(out), {split: splits[split] for split in order if split in splits})


class _Drawing(NamedTuple):
    """The keywords of `pictures`, and the pictures that other files must not have."""

    kinds: Sequence[str]
    side: int
    mistakes: float
    blank: bool
    rng: random.Random
    held_out: set[bytes]

    def rows(self, split: str, count: int) -> list[Row]:
        """Draw the rows of a file."""
        rows: list[Row] = []
        while len(rows) < count:
            kind = self.kinds[len(rows) % len(self.kinds)]
            question = KINDS[kind](self.side, self.rng)
            wrong = self.rng.random() < self.mistakes
            file = png(colours(question.ink, self.rng))
            if split == "validation":
                self.held_out.add(file)
            elif file in self.held_out:
                continue
            row = self._row(question, file)
            if split == "sft":
                row["response"] = question.mistake if wrong else question.answer
            else:
                row |= _reward_fields(kind, question.answer, split, len(rows))
            rows.append(row)
        return rows

    def _row(self, question: Question, file: bytes) -> Row:
        if self.blank:
            file = png(np.full((self.side, self.side, 3), GREY, np.uint8))
        return {
            "prompt": [{"role": "user", "content": f"<image>{question.text}"}],
            "images": [{"bytes": file}],
        }


def _check(kinds: Sequence[str], side: int, counts: dict[str, int], mistakes: float) -> None:
    if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS):
        raise ValueError(f"pictures: expected as kinds some of {', '.join(KINDS)}, got {kinds!r}")
    if not SIDES[0] <= side <= SIDES[1]:
        raise ValueError(f"pictures: expected a side from {SIDES[0]} to {SIDES[1]}, got {side}")
    if min(counts["train"], counts["validation"]) < 1 or counts["sft"] < 0:
        raise ValueError(
            "pictures: expected at least 1 row each (sft_rows: 0), got "
            + ", ".join(f"{split}_rows={count}" for split, count in counts.items())
        )
    if not 0 <= mistakes <= 1:
        raise ValueError(f"pictures: expected mistakes from 0 to 1, got {mistakes}")


def _reward_fields(kind: str, answer: str, split: str, index: int) -> Row:
    return {
        "data_source": f"pictures/{kind}",
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def png(pixels: np.ndarray) -> bytes:
    """Return the PNG file of colours [height width 3], uint8."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def colours(ink: np.ndarray, rng: random.Random) -> np.ndarray:
    """Return a drawing in a light colour on a dark one, each drawn by chance.

    Args:
        ink: which pixels are drawn, [height width].
        rng: draws the colours.

    Returns:
        Colours [height width 3], uint8.
    """
    dark = [rng.randrange(64) for _ in range(3)]
    light = [rng.randrange(160, 256) for _ in range(3)]
    return np.where(ink[..., None], light, dark).astype(np.uint8)


# ------------------------------------------------------------------------------------ the questions


def dots(side: int, rng: random.Random) -> Question:
    """Draw some dots, none of which touch.

    Args:
        side: of the picture, in pixels.
        rng: of all draws.

    Returns:
        How many there are; the mistake is one too few.
    """
    ink = np.zeros((side, side), bool)
    cell = side // CELLS
    number = rng.randint(1, MOST_DOTS)
    for place in rng.sample(range(CELLS * CELLS), number):
        top, left = (cell * at for at in divmod(place, CELLS))
        _paste(ink, np.ones((cell // 2, cell // 2), bool), (top, left), (cell - 1, cell - 1), rng)
    return Question(ink, "How many dots?", str(number), str(number - 1))


def digits(side: int, rng: random.Random) -> Question:
    """Draw two different digits, one in each half.

    Args:
        side: of the picture, in pixels.
        rng: of all draws.

    Returns:
        The number that they make; the mistake has each of them one too low.
    """
    ink = np.zeros((side, side), bool)
    number = rng.sample(range(10), 2)
    scale = side // 10
    for half, digit in enumerate(number):
        drawn = np.kron(digit_of(digit), np.ones((scale, scale), bool))
        _paste(ink, drawn, (0, half * side // 2), (side, side // 2), rng)
    text = "".join(map(str, number))
    wrong = "".join(str((digit - 1) % 10) for digit in number)
    return Question(ink, "Which digits?", text, wrong)


def digit_of(digit: int) -> np.ndarray:
    """Return the dots of a digit, [5 3] bool."""
    return np.array([[int(row, 8) >> bit & 1 for bit in (2, 1, 0)] for row in DIGITS[digit]], bool)


def shapes(side: int, rng: random.Random) -> Question:
    """Draw two different shapes, one in each half.

    Args:
        side: of the picture, in pixels.
        rng: of all draws.

    Returns:
        The name of the left one; the mistake is the name that follows in `SHAPES`.
    """
    ink = np.zeros((side, side), bool)
    names = rng.sample(SHAPES, 2)
    for half, name in enumerate(names):
        _paste(ink, shape_of(name, 3 * side // 8), (0, half * side // 2), (side, side // 2), rng)
    wrong = SHAPES[(SHAPES.index(names[0]) + 1) % len(SHAPES)]
    return Question(ink, "What is left?", names[0], wrong)


def shape_of(name: str, side: int) -> np.ndarray:
    """Return the pixels of a shape, [side side] bool."""
    row, column = np.indices((side, side)) - (side - 1) / 2
    inside = {
        "square": np.ones((side, side), bool),
        "disc": row**2 + column**2 <= side**2 / 4,
        "cross": np.minimum(abs(row), abs(column)) <= side / 6,
        "wedge": abs(column) <= (row + side / 2) / 2,
    }
    return inside[name]


def _paste(
    ink: np.ndarray,
    drawn: np.ndarray,
    corner: tuple[int, int],
    room: tuple[int, int],
    rng: random.Random,
) -> None:
    """Draw something somewhere in a part of a picture, given by its corner and its sides."""
    top, left = (
        start + rng.randint(0, space - need)
        for start, space, need in zip(corner, room, drawn.shape, strict=True)
    )
    ink[top : top + drawn.shape[0], left : left + drawn.shape[1]] |= drawn


KINDS: dict[str, Callable[[int, random.Random], Question]] = {
    function.__name__: function for function in (dots, digits, shapes)
}
