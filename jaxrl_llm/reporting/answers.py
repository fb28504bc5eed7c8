"""The answers that a run has kept, as many as a page takes."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.load import read_yaml
from jaxrl_llm.data.call_formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, PYTHONIC
from jaxrl_llm.reporting.curves import short
from jaxrl_llm.reporting.tokens import TokenTexts, decoder
from jaxrl_llm.runs.files import RunFiles

STEPS = 24
"""Dumped steps that are shown at most, if not all answers of all steps fit."""

CALLS = [
    *(HERMES, PYTHONIC[:2], PYTHONIC[2:], DEEPSEEK[:2]),
    *((marker, "") for marker in (LLAMA[0], MISTRAL[0])),
]
"""Beginning and end of a tool's call in an answer; without an end it goes on to the turn's end."""

PER_TOKEN = ("advantages", "logprobs", "rollout_logprobs", "entropies")
"""Columns with a number for each drawn token."""


class KeptAnswers:
    """Reads the answers of a run; steps that have been read are not read again.

    Args:
        run: the files.
    """

    def __init__(self, run: RunFiles) -> None:
        """Read nothing yet."""
        self._run = run
        self._tables = dict[Path, tuple[Any, Any]]()

    def version(self) -> list[Any]:
        """Return what changes when there are other answers."""
        paths = sorted((self._run.folder / "rollouts").glob("step_*.parquet"))
        return [(path.name, path.stat().st_mtime_ns) for path in paths]

    def read(self, budget: int) -> dict[str, Any]:
        """Return answers of steps at equal distances, the first and the last among them.

        Args:
            budget: bytes of JSON at most, about.

        Returns:
            `rows`, the answers; `prompts` and `texts` (of tokens), to which they point; `steps` and
            `shown_steps`; `total`, the answers of all steps; `problems`; `plain`, why the tokens'
            texts are not known, or None; `calls`, the markers of tools' calls.
        """
        steps, problems = self._run.dumped_steps, list[str]()
        counts = {step: self._count(step, problems) for step in steps}
        readable = [step for step, count in counts.items() if count is not None]
        texts, plain = self._token_texts()
        rows, shown = _Rows(texts), readable
        size = sum(self._path(step).stat().st_size for step in readable)
        if size * 2 > budget:  # a page holds about as many bytes for an answer as parquet, or more
            shown = evenly(readable, STEPS)
        often = self._recurring(shown)
        for number, step in enumerate(shown):
            share = (budget - rows.size) // (len(shown) - number)
            rows.add(step, self._chosen(step, often), share)
        return {
            "rows": rows.rows,
            "prompts": list(map(_shown_prompt, rows.prompts)),
            "texts": list(rows.texts),
            "steps": steps,
            "shown_steps": [step for step in shown if step in rows.steps],
            "total": sum(filter(None, counts.values())),
            "problems": problems,
            "plain": plain,
            "calls": CALLS,
        }

    def _path(self, step: int) -> Path:
        return self._run.folder / "rollouts" / f"step_{step:06d}.parquet"

    def _count(self, step: int, problems: list[str]) -> int | None:
        """Return how many answers of a step there are; None if its file is damaged."""
        try:
            return self._table(step).num_rows
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            reason = " ".join(str(error).split())
            problems.append(f"rollouts/{self._path(step).name} can't be read: {reason}")
            return None

    def _table(self, step: int) -> Any:
        """Return a step's file, opened; its columns are read when they are needed."""
        import pyarrow.parquet

        path = self._path(step)
        state = path.stat()
        key = (state.st_mtime_ns, state.st_size)
        if path not in self._tables or self._tables[path][0] != key:
            with pyarrow.parquet.ParquetFile(path) as file:
                count = file.metadata.num_rows
            self._tables[path] = (key, _Table(path, count))
        return self._tables[path][1]

    def _token_texts(self) -> tuple[TokenTexts | None, str | None]:
        """Return what gives tokens their texts; else why there is nothing."""
        try:
            tree = read_yaml(self._run.folder / "config.yaml")
            return TokenTexts(_decoder(str((tree.get("model") or {}).get("path")))), None
        except (ValueError, OSError) as error:
            return None, str(error)

    def _recurring(self, steps: Sequence[int]) -> set[str]:
        """Return the prompts that several steps have."""
        seen = Counter(prompt for step in steps for prompt in set(self._table(step).prompts()))
        return {prompt for prompt, count in seen.items() if count > 1}

    def _chosen(self, step: int, often: set[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the answers of a step with their numbers, first those to recurring prompts."""
        table = self._table(step)
        prompts = table.prompts()
        for number in sorted(range(len(prompts)), key=lambda i: (prompts[i] not in often, i)):
            yield number, table.row(number)


@functools.cache
def _decoder(model: str) -> Callable[[list[int]], str]:
    return decoder(model)


class _Table:
    """One step's answers on disk, read when first needed."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self.num_rows = path, count

    def prompts(self) -> list[str]:
        return self._rows.column("prompt").to_pylist()

    def row(self, number: int) -> Mapping[str, Any]:
        return self._rows.slice(number, 1).to_pylist()[0]

    @functools.cached_property
    def _rows(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.read_table(self._path)


class _Rows:
    """Answers as the page has them, and how large they are as JSON."""

    def __init__(self, token_texts: TokenTexts | None) -> None:
        self.rows = list[dict[str, Any]]()
        self.prompts, self.texts = dict[str, int](), dict[str, int]()
        self.size, self.steps = 0, set[int]()
        self._token_texts = token_texts

    def add(self, step: int, answers: Iterator[tuple[int, Mapping[str, Any]]], budget: int) -> None:
        """Add answers of a step, at least one, while there is room."""
        added, end = list[dict[str, Any]](), self.size + budget
        for number, answer in answers:
            row = self._row(answer) | {"step": step, "number": number}
            self.size += len(json.dumps(row)) + 1
            added.append(row)
            if self.size >= end:
                break
        self.rows += sorted(added, key=lambda row: row["number"])
        self.steps |= {step} if added else set()

    def _row(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        if answer["prompt"] not in self.prompts:
            self.size += len(json.dumps(answer["prompt"]))
        row: dict[str, Any] = {
            "prompt": _number_of(answer["prompt"], self.prompts),
            "answer": answer["answer"],
            "score": _finite(answer.get("score")),
            "advantage": _finite(answer.get("advantage")),
            "finish": answer.get("finish"),
            "data_source": answer.get("data_source"),
            "error": answer.get("error"),
            "truth": answer.get("ground_truth"),
            "extra": answer.get("extra"),
        }
        turns = [*(answer.get("turn_ids") or [])]
        if any(turn != 0 for turn in turns):
            row["turns"] = turns
            row["turn_rewards"] = [_finite(r) for r in answer.get("turn_rewards") or []]
        if self._token_texts is not None and answer.get("tokens") is not None:
            pieces = self._token_texts(answer["tokens"])
            row["tokens"] = [_number_of(text, self.texts) for text in pieces]
        return row | _token_values(answer)


def _token_values(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the drawn tokens; a single one if all are equal."""
    known = {name: answer[name] for name in PER_TOKEN if answer.get(name) is not None}
    values = dict[str, list[float | None]]()
    for name, short_name in (("advantages", "adv"), ("logprobs", "lp"), ("entropies", "ent")):
        if name in known:
            values[short_name] = [_finite(v) for v in known[name]]
    if "logprobs" in known and "rollout_logprobs" in known:
        pairs = zip(known["logprobs"], known["rollout_logprobs"], strict=True)
        values["diff"] = [_difference(*pair) for pair in pairs]
    return {n: v[0] if len(set(v)) == 1 and len(v) > 1 else v for n, v in values.items()}


def _difference(trainer: float, engine: float) -> float | None:
    value = _finite(trainer - engine)
    return None if value is None else float(f"{value:.2g}")


def _number_of(text: str, numbers: dict[str, int]) -> int:
    """Return the number of a text, a new one if it has none."""
    return numbers.setdefault(text, len(numbers))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else short(value)


def _shown_prompt(prompt: str) -> list[list[str]]:
    """Return the messages of a prompt as pairs of role and text."""
    try:
        messages = json.loads(prompt)
        return [[str(m.get("role", "")), _text(m.get("content"))] for m in messages]
    except (ValueError, AttributeError, TypeError):
        return [["", prompt]]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def evenly(values: Sequence[int], count: int) -> list[int]:
    """Return `count` values at equal distances, with the first and the last.

    >>> evenly([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
