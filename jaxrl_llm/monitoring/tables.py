"""Tables of a run for people: metrics and sampled answers, as HTML in a notebook, else as text."""

import html
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import closest
from jaxrl_llm.workers.values import UNSCORED, shorten

COLUMNS = ("prompt", "answer", "score", "advantage")
PROMPT_LINES, ANSWER_LINES, ERROR_CHARS = 2, 4, 80
"""How much of each is shown at most; lines are those of a whole screen."""


def choose_answers(scores: Sequence[float], samples: int) -> list[int]:
    """Return at most four answers to show, of one or two groups, in their order.

    They are the best and the worst answer to the prompt that has the best one, and the same of the
    prompt that has the worst one. Answers without a score are shown if there are no others.

    Args:
        scores: of the answers [B]; NaN of one that is unscored.
        samples: answers to each prompt, which lie side by side.

    >>> choose_answers([0.0, 0.5, 1.0, 0.0, 0.0, 0.0], 2)
    [0, 1, 2, 3]
    >>> choose_answers([1.0, 1.0, 1.0, 1.0], 2)
    [0]
    >>> choose_answers([float("nan"), 1.0, 0.0, float("nan")], 2)
    [1, 2]
    """
    values = np.asarray(scores, float)
    high, low = np.nan_to_num(values, nan=-np.inf), np.nan_to_num(values, nan=np.inf)
    chosen = {int(high.argmax()), int(low.argmin())}
    for answer in tuple(chosen):
        first = answer - answer % samples
        group = slice(first, first + samples)
        chosen |= {first + int(high[group].argmax()), first + int(low[group].argmin())}
    return sorted(chosen)


def answer_cells(rows: Sequence[Mapping[str, Any]], width: int = 120) -> Iterator[list[str]]:
    """Yield the texts of `COLUMNS` for each answer; nothing in them controls a terminal.

    Args:
        rows: of answers, as `trained_rows` has them.
        width: of the screen, in characters; what is longer loses its middle.
    """
    for row in rows:
        parts = [] if row["score"] is None else [f"{row['score']:.4g}"]
        if row["error"] is not None:
            parts.append(shorten(printable(explained(row["error"])), ERROR_CHARS))
        advantage = row["advantage"]
        yield [
            shorten(printable(_last_message(row["prompt"])), PROMPT_LINES * width),
            shorten(printable(row["answer"]), ANSWER_LINES * width),
            "\n".join(parts),
            "" if advantage is None else f"{advantage:.3g}",
        ]


def last_message(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a chat's last message, with a mark for each image; "" without any.

    >>> last_message([{"content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}])
    '[image] How many?'
    """
    return message_text(messages[-1]["content"]) if messages else ""


def message_text(content: Any) -> str:
    """Return what is shown of a message's content: its texts, and a mark for each image."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = (part if isinstance(part, Mapping) else {"text": part} for part in content)
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)


def explained(error: str) -> str:
    """Return what is shown of why an answer has no score of its own.

    >>> explained("timeout: no answer within 5 s"), explained("unscored: no verdict")
    ('failed: timeout: no answer within 5 s', 'unscored: no verdict')
    """
    return error if error.startswith(f"{UNSCORED}:") else f"failed: {error}"


def printable(text: str) -> str:
    r"""Return a text with what has no picture of its own, but controls a terminal, as escapes.

    >>> printable("a\tb\nc\x1b[31m")
    'a b⏎c\\x1b[31m'
    """
    text = text.replace("\r\n", "\n").replace("\n", "⏎")
    return "".join(
        " " if c.isspace() else c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )


SHOWN = {
    "score": "critic/score/mean",
    "length": "response_length/mean",
    "entropy": "actor/entropy",
    "kl": "actor/kl",
    "grad": "actor/grad_norm",
    "s": "timing_s/step",
}
"""Metrics in a step's line on the screen, by their labels."""

TRAINING_RESULTS = ("critic/score/mean", "train/loss")
"""Metrics that say what training has come to, besides validations, whose names have an @."""

BEFORE_AND_AFTER = ["metric", "before", "after", "best"]
"""The columns of `MetricsTable.before_and_after`."""

LINES = 20  # of a table on the screen
VISIBLE = 0.01  # nats by which log-probs differ if a token is to be as orange as can be
GREEN, RED, ORANGE = "46,160,67", "218,54,51", "219,124,38"
CELL = "text-align:left;vertical-align:top;white-space:pre-wrap"


class MetricsTable(list[dict[str, Any]]):
    """The metrics of a run: a list of mappings, one for each step, as pandas takes it.

    >>> table = MetricsTable([{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0, "b": None}])
    >>> table.curve("a"), table.names
    (([0, 1], [1.0, 2.0]), ['a', 'b'])
    """

    @classmethod
    def read(cls, path: Path) -> "MetricsTable":
        """Return the whole lines of a `metrics.jsonl`; none where there is no such file yet.

        Raises:
            ConfigError: a line is no step's metrics.
        """
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        table = cls()
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                try:
                    table.append(_step_metrics(line))
                except (ValueError, TypeError, LookupError, AttributeError) as error:
                    raise ConfigError(
                        f"{path}: line {number} is no step's metrics: expected JSON such as "
                        '{"step": 1, "critic/score/mean": 0.5}; remove that line'
                    ) from error
        return table

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they first came."""
        return [name for name in dict.fromkeys(n for line in self for n in line) if name != "step"]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a metric, and its values. NaN and infinity are left out.

        Raises:
            KeyError: no step has this metric.
        """
        if name not in self.names:
            raise KeyError(f"no metric {name!r}; {closest(name, self.names)}")
        lines = [line for line in self if line.get(name) is not None]
        return [line["step"] for line in lines], [line[name] for line in lines]

    def before_and_after(self) -> list[list[str]]:
        """Return name, first, last and best value of each score, and of the loss of `sft`.

        >>> MetricsTable([{"step": 0, "val/acc/mean@1": 0.5}, {"step": 9}]).before_and_after()
        [['val/acc/mean@1', '0.500 (step 0)', '0.500 (step 0)', '0.500']]
        """
        rows = []
        for name in self.names:
            is_result = "@" in name or name in TRAINING_RESULTS
            steps, values = self.curve(name) if is_result else ([], [])
            if not values:
                continue
            best = min(values) if name == "train/loss" else max(values)
            ends = (f"{values[end]:.3f} (step {steps[end]})" for end in (0, -1))
            rows.append([name, *ends, f"{best:.3f}"])
        return rows

    def _columns(self) -> dict[str, str]:
        named = {label: name for label, name in SHOWN.items() if name in self.names}
        validated = {
            n.removeprefix("val-core/"): n for n in self.names if n.startswith("val-core/")
        }
        others = {n: n for n in self.names[:6]} if not named else {}
        return {**named, **validated, **others}

    def _cells(self) -> list[list[str]]:
        names = self._columns().values()
        return [[str(line["step"]), *(_number(line.get(n)) for n in names)] for line in self]

    def __str__(self) -> str:
        """Return the newest steps as a table of text."""
        return text_table(["step", *self._columns()], self._cells()[-LINES:])

    def _repr_html_(self) -> str:
        return html_table(["step", *self._columns()], self._cells()[-LINES:])


def _step_metrics(line: bytes) -> dict[str, Any]:
    """Return the metrics in a line, which are numbers or null."""
    metrics = json.loads(line)
    if not isinstance(metrics["step"], int):
        raise TypeError("step: expected a whole number")
    for name, value in metrics.items():
        if not isinstance(value, int | float | None):
            raise TypeError(f"{name}: expected a number")
    return metrics


class AnswerTable(Sequence[Mapping[str, Any]]):
    """Sampled answers with what came of them, a mapping for each.

    In a notebook an answer's background is green where its advantage is positive and red where it
    is negative; a token's is orange where the trainer's and the engine's log-prob differ. What was
    told to the policy, by tools or an environment, is gray.

    Args:
        rows: with `prompt` (JSON of its messages), `answer`, `tokens`, `score`, where there are
            such `turn_ids` (-1 on tokens that were told to the policy), and where they are known
            `advantage`, and `logprobs` and `rollout_logprobs` of the drawn tokens.
        decode: token ids -> text.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], decode: Callable[[list[int]], str]
    ) -> None:
        """Decode nothing yet."""
        self.rows, self._decode = rows, decode

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return an answer, or a table of some."""
        rows = self.rows[index]
        return AnswerTable(rows, self._decode) if isinstance(index, slice) else rows

    def pieces(self, index: int) -> list[tuple[str, float | None]]:
        """Return the text of each of an answer's tokens, and how far its log-probs differ.

        The difference is the trainer's log-prob less the engine's, in nats; None where it is not
        known.
        """
        row = self.rows[index]
        texts = [self._decode([token]) for token in row["tokens"]]
        if row.get("logprobs") is None:
            return [(text, None) for text in texts]
        differences = np.asarray(row["logprobs"]) - np.asarray(row["rollout_logprobs"])
        of_drawn = iter(differences.tolist())
        drawn = self._drawn(index)
        return [
            (text, next(of_drawn) if is_drawn else None)
            for text, is_drawn in zip(texts, drawn, strict=True)
        ]

    def _drawn(self, index: int) -> list[bool]:
        row = self.rows[index]
        return [turn >= 0 for turn in row.get("turn_ids") or [0] * len(row["tokens"])]

    def __str__(self) -> str:
        """Return the first answers as a table of text, with the largest difference of a token."""
        rows = []
        for index, row in enumerate(self.rows[:LINES]):
            known = [abs(d) for _, d in self.pieces(index) if d is not None]
            rows.append(
                [
                    _last_message(row["prompt"]),
                    row["answer"],
                    *(_number(row.get(name)) for name in ("score", "advantage")),
                    _number(max(known, default=None)),
                ]
            )
        return text_table(["prompt", "answer", "score", "advantage", "max |Δ log-prob|"], rows)

    def _repr_html_(self) -> str:
        some = self.rows[:LINES]
        advantages = [abs(row.get("advantage") or 0.0) for row in some]
        differences = [[abs(d or 0.0) for _, d in self.pieces(index)] for index in range(len(some))]
        widest = max(VISIBLE, *(d for row in differences for d in row))
        body = []
        for index, row in enumerate(some):
            color = GREEN if (row.get("advantage") or 0.0) > 0 else RED
            share = advantages[index] / (max(advantages) or 1.0)
            answer = "".join(
                _token(*piece, widest) if drawn else _span(piece[0], "color:gray", "told")
                for piece, drawn in zip(self.pieces(index), self._drawn(index), strict=True)
            )
            cells = [
                f"<td style='{CELL}'>{html.escape(_last_message(row['prompt']))}</td>",
                f"<td style='{CELL};background:rgba({color},{0.35 * share:.2f})'>{answer}</td>",
                *(f"<td>{_number(row.get(name))}</td>" for name in ("score", "advantage")),
            ]
            body.append(f"<tr>{''.join(cells)}</tr>")
        head = "".join(f"<th>{name}</th>" for name in ("prompt", "answer", "score", "advantage"))
        return f"<table><tr>{head}</tr>{''.join(body)}</table>"


class TokenTable(list[tuple[str, float]]):
    """The tokens of a text and their log-probs in nats, as pairs.

    In a notebook a token is the more orange, the less likely it is.

    >>> print(TokenTable([("7", -0.25), ("3", -1.0)]))
    7 (-0.25)  3 (-1)
    """

    @property
    def total(self) -> float:
        """The log-prob of the whole text."""
        return sum(value for _, value in self)

    def __str__(self) -> str:
        """Return the tokens as text."""
        return "  ".join(f"{piece} ({value:.4g})" for piece, value in self)

    def _repr_html_(self) -> str:
        spans = (
            _span(text, f"background:rgba({ORANGE},{1 - math.exp(x):.2f})", f"{x:.4g} nats")
            for text, x in self
        )
        return f"<div style='{CELL}'>{''.join(spans)}</div>"


def _span(text: str, style: str, title: str) -> str:
    """Return a token as HTML, with what it shows when it is pointed at."""
    return f"<span style='{style}' title='{title}'>{html.escape(text)}</span>"


def _token(text: str, difference: float | None, widest: float) -> str:
    """Return a drawn token as HTML; the difference of its log-probs is in nats."""
    if difference is None:
        return html.escape(text)
    style = f"background:rgba({ORANGE},{abs(difference) / widest:.2f})"
    return _span(text, style, f"trainer - engine: {difference:+.2e} nats")


def _last_message(prompt: str) -> str:
    """Return the text of a prompt's last message; none of one that was given as tokens."""
    return last_message(json.loads(prompt))


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def text_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text.

    >>> "7+3=" in text_table(["prompt"], [["7+3="]])
    True
    """
    table = Table(*(Column(Text(name)) for name in columns))  # not markup
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    text: Any = console.file
    return text.getvalue()


def html_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML.

    >>> html_table(["a"], [["<1"]])
    '<table><tr><th>a</th></tr><tr><td>&lt;1</td></tr></table>'
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
