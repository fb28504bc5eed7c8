"""The answers that a run has kept, as many as a page takes."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.load import read_yaml
from jaxrl_llm.data.call_formats import DEEPSEEK, HERMES, LLAMA, MISTRAL, PYTHONIC
from jaxrl_llm.data.harmony import HARMONY
from jaxrl_llm.monitoring.answers import message_text
from jaxrl_llm.reporting.curves import short
from jaxrl_llm.reporting.tokens import TokenTexts, decoder
from jaxrl_llm.runs.files import RunFiles

STEPS = 24
"""Dumped steps that are shown at most, if not all answers of all steps fit."""

CALLS = [
    *(HERMES, PYTHONIC[:2], PYTHONIC[2:], DEEPSEEK[:2]),
    *((marker, "") for marker in (LLAMA[0], MISTRAL[0])),
    (f"{HARMONY[0]}commentary to=", HARMONY[4]),
]
"""Beginning and end of a tool's call in an answer; without an end it goes on to the turn's end."""

PER_TOKEN = ("advantages", "logprobs", "rollout_logprobs", "entropies")
"""Columns with a number for each drawn token."""


class KeptAnswers:
    """Reads the answers of a run; what has been read is not read again.

    Args:
        run: the files.
    """

    def __init__(self, run: RunFiles) -> None:
        """Read nothing yet."""
        self._run = run
        self._tables = dict[int, _Table]()
        self._texts = dict[str, int]()

    def version(self) -> list[Any]:
        """Return what changes when there are other answers."""
        return [(step, _state(self._path(step))) for step in self._run.dumped_steps]

    def read(self, budget: int) -> dict[str, Any]:
        """Return answers of steps at equal distances, the first and the last among them.

        Args:
            budget: bytes of JSON at most, about; each of these steps has one answer at least.

        Returns:
            `rows`, the answers; `prompts` and `texts` (of tokens), to which they point; `steps` and
            `shown_steps`; `total`, the answers of all steps; `problems`; `plain`, why the tokens'
            texts are not known, or None; `calls`, the markers of tools' calls.
        """
        steps, problems = self._run.dumped_steps, list[str]()
        self._open(steps, problems)
        shown = [step for step in steps if step in self._tables]
        token_texts, plain = self._token_texts()
        if sum(self._tables[step].state[1] for step in shown) > budget // 2:  # bytes of parquet
            shown = evenly(shown, STEPS)
        for step in self._tables.keys() - shown:  # others are shown than before
            self._tables[step].forget()
        rows, prompts = self._choose(shown, budget, token_texts, problems)
        return {
            "rows": rows,
            "prompts": list(map(_shown_prompt, prompts)),
            "texts": list(self._texts),
            "steps": steps,
            "shown_steps": sorted({row["step"] for row in rows}),
            "total": sum(len(table.prompts) for table in self._tables.values()),
            "problems": problems,
            "plain": plain,
            "calls": CALLS,
        }

    def _path(self, step: int) -> Path:
        return self._run.folder / "rollouts" / f"step_{step:06d}.parquet"

    def _open(self, steps: Sequence[int], problems: list[str]) -> None:
        """Open the files that are new or other ones, and say which of all are damaged."""
        known, self._tables = self._tables, {}
        for step in steps:
            path = self._path(step)
            try:
                table = known.get(step)
                current = table is not None and table.state == _state(path)
                self._tables[step] = table if table and current else _Table(path)
            except (OSError, ValueError, LookupError) as error:  # pyarrow's are among these
                problems.append(_damage(path, error))

    def _token_texts(self) -> tuple[TokenTexts | None, str | None]:
        """Return what gives tokens their texts; else why there is nothing."""
        try:
            tree = read_yaml(self._run.folder / "config.yaml")
            return TokenTexts(_decoder(str((tree.get("model") or {}).get("path")))), None
        except (ValueError, OSError) as error:
            return None, str(error)

    def _choose(
        self,
        steps: Sequence[int],
        budget: int,
        token_texts: TokenTexts | None,
        problems: list[str],
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return as many answers as there is room for, and their prompts, to which they point.

        Those to prompts that several steps have come first. Each step has the same room; what one
        leaves is for those after it.
        """
        seen = Counter(prompt for step in steps for prompt in set(self._tables[step].prompts))
        rows, numbers, size = list[dict[str, Any]](), dict[str, int](), 0
        for place, step in enumerate(steps):
            table, end = self._tables[step], size + (budget - size) // (len(steps) - place)
            of_step = list[dict[str, Any]]()
            often = [number for number, prompt in enumerate(table.prompts) if seen[prompt] > 1]
            order = [*often, *sorted({*range(len(table.prompts))} - {*often})]
            try:
                for row, bytes_of_row in table.answers(order, token_texts, self._texts):
                    prompt = table.prompts[row["number"]]
                    size += bytes_of_row + (0 if prompt in numbers else len(prompt))
                    of_step.append({**row, "step": step, "prompt": _number_of(prompt, numbers)})
                    if size >= end:
                        break
            except (OSError, ValueError) as error:
                problems.append(_damage(self._path(step), error))
            rows += sorted(of_step, key=lambda row: row["number"])
        return rows, list(numbers)


@functools.cache
def _decoder(model: str) -> Callable[[list[int]], str]:
    return decoder(model)


def _damage(path: Path, error: Exception) -> str:
    return f"rollouts/{path.name} can't be read: {' '.join(str(error).split())}"


def _state(path: Path) -> tuple[int, int]:
    """Return what changes with a file: when it was written, and its size in bytes."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size


class _Table:
    """One step's answers on disk; an answer is made ready when it is first asked for.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self.state = _state(path)
        self._path = path
        with pyarrow.parquet.ParquetFile(path) as file:
            self.prompts: list[str] = file.read(["prompt"]).column("prompt").to_pylist()
        self._ready = dict[int, tuple[dict[str, Any], int]]()

    def answers(
        self, numbers: Iterable[int], token_texts: TokenTexts | None, texts: dict[str, int]
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield answers as the page has them, without prompts, each with its bytes as JSON.

        Args:
            numbers: of the answers in their step.
            token_texts: gives tokens their texts, if that is possible.
            texts: the numbers of all texts of tokens, to which new ones are added.
        """
        import pyarrow.parquet

        whole = None  # it is large, and let go of when these answers are there
        for number in numbers:
            if number not in self._ready:
                whole = pyarrow.parquet.read_table(self._path) if whole is None else whole
                row = _shown_answer(whole.slice(number, 1).to_pylist()[0])
                tokens = row.pop("tokens")
                if token_texts is not None and tokens is not None:
                    row["tokens"] = [_number_of(text, texts) for text in token_texts(tokens)]
                row["number"] = number
                self._ready[number] = row, len(json.dumps(row)) + 30
            yield self._ready[number]

    def forget(self) -> None:
        """Let go of the answers that were made ready."""
        self._ready.clear()


def _shown_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "answer": answer.get("answer") or "",
        "score": _finite(answer.get("score")),
        "advantage": _finite(answer.get("advantage")),
        "finish": answer.get("finish"),
        "data_source": answer.get("data_source"),
        "error": answer.get("error"),
        "truth": answer.get("ground_truth"),
        "extra": answer.get("extra"),
        "tokens": answer.get("tokens"),
    }
    turns = answer.get("turn_ids") or []
    if any(turn != 0 for turn in turns):
        row["turns"] = turns
        row["turn_rewards"] = [_finite(reward) for reward in answer.get("turn_rewards") or []]
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
    is_text = isinstance(content, str | list)
    return message_text(content) if is_text else json.dumps(content, ensure_ascii=False)


def evenly(values: Sequence[int], count: int) -> list[int]:
    """Return `count` values at equal distances, with the first and the last.

    >>> evenly([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
