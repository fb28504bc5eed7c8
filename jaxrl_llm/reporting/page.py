"""The page of one or more runs: one file of HTML that needs no network."""

import base64
import contextlib
import functools
import gzip
import hashlib
import importlib.resources
import itertools
import json
import math
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrl_llm.config.errors import RELATIVE, ConfigError
from jaxrl_llm.config.load import dotted_items, read_yaml, without_secrets
from jaxrl_llm.config.programs import learned_by, program_of
from jaxrl_llm.data.call_formats import DEEPSEEK, HARMONY, HERMES, LLAMA, MISTRAL, PYTHONIC
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.files import write_text
from jaxrl_llm.models.hf.hub import HUB_ID
from jaxrl_llm.monitoring.tables import message_text
from jaxrl_llm.reporting.health import check_run, is_held
from jaxrl_llm.training.run_files import RunFiles, read_run

# What a run's folder holds, as the JSON of its page.

AXIS_POINTS = 4000
"""Points at most by which a step's seconds and tokens are found; between them they are straight."""


@functools.cache
def metric_table() -> dict[str, dict[str, dict[str, str]]]:
    """Return what each metric means, by its group and its pattern, as `metrics.yaml` says."""
    return read_yaml(Path(__file__).with_name("metrics.yaml"))


@functools.cache
def metric_pattern(name: str) -> re.Pattern[str]:
    """Return the expression that a pattern of metrics stands for.

    >>> metric_pattern("async/{age,k3_kl}/<k>").pattern
    'async/(age|k3_kl)/[0-9]+'
    """
    with_words = re.sub(r"<\w+>", ".+", name.replace("<k>", "[0-9]+"))
    return re.compile(re.sub(r"\{(.*?)\}", lambda m: f"({m[1].replace(',', '|')})", with_words))


def find_metric(metric: str) -> tuple[str, Mapping[str, str]]:
    """Return the group of a metric and its row of the table, which is empty for unknown ones."""
    for group, rows in metric_table().items():
        for name, row in rows.items():
            if metric_pattern(name).fullmatch(metric):
                return group, row
    return "Other", {}


def describe_metric(metric: str) -> tuple[str, str]:
    """Return the group of a metric, and a sentence on it, empty where it is not known.

    >>> describe_metric("response_length/max")
    ('Lengths and turns', 'tokens that were generated for a response, stop token included')
    >>> describe_metric("actor/of_my_own")
    ('Other', '')
    """
    group, row = find_metric(metric)
    return group, row.get("meaning", "").replace("`", "")


def curves(lines: Sequence[Mapping[str, Any]], points: int) -> dict[str, dict[str, Any]]:
    """Return the curve of each metric, with `points` points at most.

    Args:
        lines: of the steps, in order; None stands for values that are not finite.
        points: of a curve, at least 4.

    Returns:
        For each metric `x` (steps) and `y`, and `gaps`, the steps whose value is not finite. Of a
        curve with too many points `x` and `y` are the lowest and the highest of each of equal
        parts, `mean_x` and `mean_y` the parts' means, and `per_part` the points of a part.
    """
    named = dict[str, list[tuple[int, float | None]]]()
    for line in lines:
        for name, value in line.items():
            if name != "step":
                named.setdefault(name, []).append((line["step"], value))
    return {name: _curve(pairs, points) for name, pairs in named.items()}


def _curve(pairs: Sequence[tuple[int, float | None]], points: int) -> dict[str, Any]:
    known = [(step, value) for step, value in pairs if value is not None]
    gaps = [step for step, value in pairs if value is None]
    kept = known if len(known) <= points else extremes(known, points)
    curve: dict[str, Any] = {"x": [x for x, _ in kept], "y": [short(y) for _, y in kept]}
    if gaps:
        curve["gaps"] = gaps[:: max(1, len(gaps) // points)]
    if len(known) > points:
        parts = split_evenly(known, points // 2)
        curve["mean_x"] = [part[len(part) // 2][0] for part in parts]
        curve["mean_y"] = [short(sum(y for _, y in part) / len(part)) for part in parts]
        curve["per_part"] = -(-len(known) // len(parts))
    return curve


def extremes(pairs: Sequence[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    """Return the lowest and the highest of each of equal parts, and both ends.

    >>> extremes([(0, 0.0), (1, 9.0), (2, 1.0), (3, -5.0), (4, 0.0), (5, 0.5)], 4)
    [(0, 0.0), (1, 9.0), (3, -5.0), (5, 0.5)]
    """
    kept = {pairs[0], pairs[-1]}
    for part in split_evenly(pairs, points // 2):
        kept |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
    return sorted(kept)


def split_evenly(values: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Return consecutive parts whose lengths differ by one at most, none of them empty.

    >>> split_evenly([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4, 5]]
    """
    parts = min(parts, len(values))
    edges = [len(values) * i // parts for i in range(parts + 1)] if parts else []
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def axes(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[int | float]]:
    """Return for some steps, the first and the last among them, all seconds and tokens so far."""
    rows, seconds, tokens = [], 0.0, 0.0
    for line in lines:
        seconds += line.get("timing_s/step") or 0.0
        tokens += line.get("perf/total_num_tokens") or 0.0
        rows.append((line["step"], round(seconds, 2), int(tokens)))
    stride = -(-len(rows) // AXIS_POINTS) or 1
    rows = [row for i, row in enumerate(rows) if i % stride == 0 or i == len(rows) - 1]
    return {name: [row[i] for row in rows] for i, name in enumerate(("step", "seconds", "tokens"))}


def short(value: float) -> float:
    """Return a number with five significant digits, which take less room.

    >>> short(1234.5678), short(1 / 3)
    (1234.6, 0.33333)
    """
    return float(f"{value:.5g}")


BARS = 240
"""Bars at most; those of a longer run are means over a few steps."""

BESIDE = ("step", "engine_idle")
"""What is timed besides the stages: the whole step, and the engine's idle time in it."""


def stage_seconds(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds of the stages of each step, in the order in which a step takes them.

    Args:
        lines: of the steps.

    Returns:
        `stages`, the names; `steps`, the first and last step of each bar; `seconds`, for each stage
        the seconds of a step of each bar; `whole`, those of the whole steps.
    """
    timed = [line for line in lines if line.get("timing_s/step") is not None]
    orders = dict.fromkeys(tuple(n for n in line if n.startswith("timing_s/")) for line in timed)
    stages = [n for n in _merge(orders) if n.removeprefix("timing_s/") not in BESIDE]
    bars = split_evenly(timed, BARS)

    def mean(part: Sequence[Mapping[str, Any]], name: str) -> float:
        return short(sum(line.get(name) or 0.0 for line in part) / len(part))

    return {
        "stages": [name.removeprefix("timing_s/") for name in stages],
        "steps": [[part[0]["step"], part[-1]["step"]] for part in bars],
        "seconds": [[mean(part, name) for part in bars] for name in stages],
        "whole": [mean(part, "timing_s/step") for part in bars],
    }


def _merge(orders: Iterable[Sequence[str]]) -> list[str]:
    """Return all names in an order that agrees with the given ones, as far as they agree.

    >>> _merge([["gen", "adv"], ["gen", "reward", "adv"], ["gen", "adv", "testing"]])
    ['gen', 'reward', 'adv', 'testing']
    """
    merged = list[str]()
    for order in orders:
        at = 0
        for name in order:
            if name not in merged:
                merged.insert(at, name)
            at = merged.index(name) + 1
    return merged


Line = dict[str, Any]

KEY_NUMBERS = {
    "val-core/": ("held-out {}", "max"),
    "critic/score/mean": ("training score", "max"),
    "val/rewards/accuracies": ("held-out accuracy", "max"),
    "val/accuracy/": ("held-out accuracy of {}", "max"),
    "val/loss": ("held-out loss", "min"),
    "train/loss": ("loss", "min"),
    "train/rewards/accuracies": ("accuracy", "max"),
    "response_length/mean": ("tokens of an answer", None),
    "actor/entropy": ("entropy (nats)", None),
    "actor/kl": ("KL to the reference (nats)", None),
    "timing_s/step": ("seconds of a step", "min"),
}
"""The metrics of the overview, by their beginnings: a label, and which value is the best."""


MOST_SOURCES = 6
"""Of held-out prompts, whose means are among the key numbers; the curves have the others."""

TORN = "the last line is not whole, and is left out"
"""What is said of a line whose writing was interrupted, or is under way."""


def read_lines(path: Path) -> tuple[list[Line], list[str]]:
    """Return the lines of a `metrics.jsonl` that can be read, and what is wrong with the others.

    Values that are not finite are None.

    Args:
        path: of the file; it may be missing.
    """
    lines, problems = list[Line](), list[str]()
    content = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(content, start=1):
        if not line.endswith(b"\n"):
            problems.append(f"{path.name}: {TORN}")
            continue
        try:
            values = json.loads(line)
            step = values.pop("step")
            lines.append({"step": int(step), **{n: _finite(v) for n, v in values.items()}})
        except (ValueError, AttributeError, LookupError, TypeError, OverflowError):
            problems.append(f"{path.name}: line {number} is no step's metrics, and is left out")
    return lines, problems


def _finite(value: Any) -> float | None:
    number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if number else None


def flat_config(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a config with dots, and their values as text.

    >>> flat_config({"model": {"path": "m"}, "steps": 3, "stop": [1]})
    {'model.path': 'm', 'steps': '3', 'stop': '[1]'}
    """
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in dotted_items(tree)
    }


def read_for_page(run: RunFiles, *, points: int) -> dict[str, Any]:
    """Return what a run's page shows, but for its answers. Secrets of its config are left out.

    Args:
        run: the files.
        points: of each curve at most.

    Raises:
        ConfigError: `config.yaml` can't be read.
    """
    tree = without_secrets(read_yaml(run.folder / "config.yaml"))
    lines, problems = read_lines(run.folder / "metrics.jsonl")
    findings = None  # not known
    try:
        findings = [finding._asdict() for finding in check_run(run)]
    except (ConfigError, ValueError) as error:
        problems.append(f"what looks wrong could not be checked: {error}")
    status = status_of(run, tree, lines)
    if status["state"] == "training":
        problems = [text for text in problems if not text.endswith(TORN)]
    return {
        "folder": str(run.folder),
        "kind": program_of(tree),
        "status": status,
        "seed": tree.get("seed", 0),
        "problems": problems,
        "findings": findings,
        "key_numbers": key_numbers(lines),
        "summary": outcome_of(lines),
        "facts": run_facts(tree, lines),
        "config": flat_config(tree),
        "curves": curves(lines, points),
        "axes": axes(lines),
        "times": stage_seconds(lines),
    }


def status_of(run: RunFiles, tree: Mapping[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """Return whether a run is training, finished or stopped, and how far it has come."""
    planned, step = tree.get("steps"), lines[-1]["step"] if lines else None
    ended = planned is not None and step is not None and step >= planned
    if planned is None and "export_to" in tree and step:
        ended = Path(str(tree["export_to"])).is_dir()
    if is_held(run.folder):
        state = "training"
    elif step is None:
        state = "empty"
    else:
        state = "finished" if ended else "stopped"
    return {"state": state, "step": step, "planned": planned}


def key_numbers(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the metrics of the overview with their first, last and best value."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    found = []
    for start, (label, best) in KEY_NUMBERS.items():
        validated = [n for n in names if n.startswith(start) and ("@" not in n or "/mean@" in n)]
        for name in validated[:MOST_SOURCES]:
            pairs = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if not pairs:
                continue
            choose = {"max": max, "min": min}.get(best or "")
            found.append(
                {
                    "metric": name,
                    "label": label.format(name.removeprefix(start)),
                    "first": pairs[0],
                    "last": pairs[-1],
                    "best": choose(pairs, key=lambda pair: pair[1]) if choose else None,
                    "span": [min(v for _, v in pairs), max(v for _, v in pairs)],
                }
            )
    return found


def outcome_of(lines: Sequence[Line]) -> str:
    """Return what came of a run, in a sentence or two."""
    sentences = []
    for number in key_numbers(lines):
        (first, before), (last, after) = number["first"], number["last"]
        if number["best"] and first != last and number["metric"] != "timing_s/step":
            moved = "rose" if after > before else "fell" if after < before else "stayed"
            sentences.append(
                f"The {number['label']} {moved} from {before:.4g} (step {first}) "
                f"to {after:.4g} (step {last})."
            )
    return " ".join(sentences[:3])


def run_facts(tree: Mapping[str, Any], lines: Sequence[Line]) -> dict[str, str]:
    """Return what a run trains, and how much of it, by short names."""
    model, algorithm = tree.get("model") or {}, tree.get("algorithm") or {}
    data = (tree.get("data") or {}).get("train")
    tokens = sum(line.get("perf/total_num_tokens") or 0.0 for line in lines)
    seconds = sum(line.get("timing_s/step") or 0.0 for line in lines)
    facts = {
        "model": model.get("path"),
        "first taught by": model.get("warm_start"),
        "data": ", ".join(map(str, data)) if isinstance(data, list) else data,
        **{key.replace("_", " "): name for key, name in learned_by(algorithm).items()},
        "seed": tree.get("seed", 0),
        "tokens": f"{tokens:,.0f}" if tokens else None,
        "time of the steps": _duration(seconds) if seconds else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _duration(seconds: float) -> str:
    """Return seconds as text.

    >>> _duration(4000.0), _duration(75.0), _duration(7.25)
    ('1 h 6 min', '1 min 15 s', '7.2 s')
    """
    minutes, rest = divmod(seconds, 60)
    if minutes >= 60:
        return f"{minutes // 60:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


REPLACEMENT = "\ufffd"
"""What stands for bytes that are no whole character."""

LONGEST_CHARACTER = 8
"""Tokens that are tried at most until they make a whole character."""

Decode = Callable[[list[int]], str]


@functools.cache
def decoder(model: str) -> Decode:
    """Return a function from token ids to text, special tokens included.

    Nothing is downloaded: a model of the hub must be in its cache.

    Args:
        model: a directory or a hub repository, as `model.path` names it.

    Raises:
        ValueError: its tokenizer is not on this machine, or can't be read.
    """
    path = Path(model)
    if not path.is_dir():
        path = _cached(model)
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer  # takes a hundredth of the time of transformers

        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # it raises nothing more special
            raise ValueError(f"{path / 'tokenizer.json'} can't be read: {error}") from error
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    slow = load_tokenizer(path)
    return lambda ids: slow.decode(ids, clean_up_tokenization_spaces=False)


def _cached(model: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    if match := HUB_ID.fullmatch(model):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            found = try_to_load_from_cache(match["repo"], name, revision=match["revision"])
            if isinstance(found, str):
                return Path(found).parent
    hint = "" if Path(model).is_absolute() else f" ({RELATIVE})"
    raise ValueError(f"the tokenizer of {model!r} is not on this machine{hint}")


class TokenTexts:
    """Splits token ids into texts that together are the text of all.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, decode: Decode) -> None:
        """Know nothing yet."""
        self._decode = decode
        self._known = dict[tuple[int, ...], str]()

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, as it reads after the one before.

        Of a character that takes several tokens, the first has the character and the others are
        empty.

        >>> byte = lambda ids: bytes(ids).decode("utf-8", "replace")
        >>> TokenTexts(byte)([0x61, 0xC3, 0xBC, 0x21])
        ['a', 'ü', '', '!']
        """
        texts = list[str]()
        while (at := len(texts)) < len(ids):
            before = tuple(ids[max(at - 1, 0) : at])
            taken, text = 1, ""
            for count in range(1, min(LONGEST_CHARACTER, len(ids) - at) + 1):
                tried = self._after(before, tuple(ids[at : at + count]))
                if count == 1 or tried == REPLACEMENT or not tried.endswith(REPLACEMENT):
                    taken, text = count, tried
                if not tried.endswith(REPLACEMENT):
                    break
            texts += [text] + [""] * (taken - 1)
        return texts

    def _after(self, before: tuple[int, ...], ids: tuple[int, ...]) -> str:
        """Return what token ids add to the text of the one before them."""
        key = (*before, -1, *ids)
        if key not in self._known:
            start = self._decode(list(before)) if before else ""
            whole = self._decode([*before, *ids])
            self._known[key] = whole[len(start) :]
        return self._known[key]


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
            return TokenTexts(decoder(str((tree.get("model") or {}).get("path")))), None
        except (ValueError, OSError) as error:
            return None, str(error)

    def _choose(
        self, steps: Sequence[int], budget: int, token_texts: TokenTexts | None, problems: list[str]
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
        "score": _short_finite(answer.get("score")),
        "advantage": _short_finite(answer.get("advantage")),
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
        row["turn_rewards"] = [_short_finite(reward) for reward in answer.get("turn_rewards") or []]
    return row | _token_values(answer)


def _token_values(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the drawn tokens; a single one if all are equal."""
    known = {name: answer[name] for name in PER_TOKEN if answer.get(name) is not None}
    values = dict[str, list[float | None]]()
    for name, short_name in (("advantages", "adv"), ("logprobs", "lp"), ("entropies", "ent")):
        if name in known:
            values[short_name] = [_short_finite(v) for v in known[name]]
    if "logprobs" in known and "rollout_logprobs" in known:
        pairs = zip(known["logprobs"], known["rollout_logprobs"], strict=True)
        differences = [_short_finite(trainer - engine) for trainer, engine in pairs]
        values["diff"] = [None if d is None else float(f"{d:.2g}") for d in differences]
    return {n: v[0] if len(set(v)) == 1 and len(v) > 1 else v for n, v in values.items()}


def _number_of(text: str, numbers: dict[str, int]) -> int:
    """Return the number of a text, a new one if it has none."""
    return numbers.setdefault(text, len(numbers))


def _short_finite(value: float | None) -> float | None:
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


MAX_BYTES = 10_000_000
"""Of a page."""

ANSWER_BYTES = 10_000_000
"""Of all answers as JSON, which is compressed; halved until the page is small enough."""

CURVE_POINTS = 1000
"""Of a curve of one run; several runs share three times as many."""

SCRIPTS = (
    *("text.js", "dom.js", "state.js", "overview.js", "plots.js", "curves.js", "config.js"),
    *("answers.js", "answer.js", "prompts.js", "times.js", "main.js"),
)
"""In the order in which they are run."""

DOCS = Path(__file__).resolve().parents[2] / "docs"
"""Of a checkout; an installed package has none."""


class Page:
    """The page of some runs, which may be asked for again while they train.

    Args:
        runs: the runs' folders.

    Raises:
        ConfigError: there is no run in a folder.
    """

    def __init__(self, runs: Sequence[str | Path | RunFiles]) -> None:
        """Read nothing yet."""
        self._runs = [run if isinstance(run, RunFiles) else read_run(run) for run in runs]
        self._answers = [KeptAnswers(run) for run in self._runs]

    def versions(self) -> dict[str, str]:
        """Return texts that differ whenever the metrics, or the answers, are other ones."""
        paths = [run.folder / "metrics.jsonl" for run in self._runs]
        seen = [(p.stat().st_mtime_ns, p.stat().st_size) if p.exists() else None for p in paths]
        seen += [is_held(run.folder) for run in self._runs]
        kept = [answers.version() for answers in self._answers]
        return {"metrics": _digest(seen), "answers": _digest(kept)}

    def metrics(self) -> dict[str, Any]:
        """Return all that the page shows but the answers."""
        points = min(CURVE_POINTS, 3 * CURVE_POINTS // len(self._runs))
        runs = [read_for_page(run, points=points) for run in self._runs]
        for run, name in zip(runs, _names([run.folder for run in self._runs]), strict=True):
            run["name"] = name
        metrics = dict.fromkeys(name for run in runs for name in run["curves"])
        return {
            "made": datetime.now().astimezone().isoformat(timespec="seconds"),
            "docs": DOCS.as_uri() if DOCS.is_dir() else None,
            "runs": runs,
            "groups": list(metric_table()),
            "metrics": {name: describe_metric(name) for name in metrics},
        }

    def answers(self, budget: int = ANSWER_BYTES) -> list[dict[str, Any]]:
        """Return each run's answers.

        Args:
            budget: bytes of JSON of all of them at most, about.
        """
        return [answers.read(budget // len(self._answers)) for answers in self._answers]

    def html(self) -> str:
        """Return the page as one file of less than 10 MB, whatever the runs have kept."""
        metrics, budget = self.metrics(), ANSWER_BYTES
        while True:
            html = fill_page(metrics, self.answers(budget))
            if len(html.encode()) < MAX_BYTES or budget < 1000:
                return html
            budget //= 2


def write_report(
    runs: str | Path | RunFiles | Sequence[str | Path | RunFiles], out: str | Path | None = None
) -> Path:
    """Write one or more runs as a page of HTML, which a browser opens without a network.

    Args:
        runs: a run's folder, or several, whose curves are laid over each other. They may be
            training.
        out: the file to write; None: `report.html` in the first run's folder.

    Returns:
        The file.

    Raises:
        ConfigError: there is no run in a folder, or the file can't be written.
    """
    several = [runs] if isinstance(runs, str | Path | RunFiles) else list(runs)
    if not several:
        raise ConfigError("a page needs a run: expected one folder or more, got none")
    first = several[0].folder if isinstance(several[0], RunFiles) else Path(several[0])
    path = first / "report.html" if out is None else Path(out)
    html = Page(several).html()
    if not path.name:
        raise ConfigError(f"can't write {str(out)!r}: expected the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, html)
    except OSError as error:
        raise ConfigError(
            f"can't write {str(path)!r}: {error.strerror or error}; name another file (--out)"
        ) from error
    return path


def fill_page(metrics: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of a page with its data, styles and scripts in it.

    Scripts run only with the page's nonce, and data is packed, so that no text in it can be one.

    Args:
        metrics: as `Page.metrics` returns them; with `live`, the versions, a server is asked for
            newer ones.
        answers: of each run.
    """
    parts = {
        "nonce": secrets.token_urlsafe(16),
        "style": _static("page.css"),
        "metrics": packed(as_json({"live": None, **metrics})),
        "answers": packed(as_json(answers)),
        "plotly": _plotly(),
        "script": "\n".join(map(_static, SCRIPTS)),
    }
    html = _static("page.html")
    for name, text in parts.items():
        html = html.replace(f"{{{{{name}}}}}", text)
    return html


def as_json(value: Any) -> bytes:
    """Return a value as JSON that every browser reads."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def packed(content: bytes) -> str:
    """Return bytes compressed and as letters and digits, which no text can break out of."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


@functools.cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs().encode())


def _static(name: str) -> str:
    return (importlib.resources.files("jaxrl_llm.reporting") / "static" / name).read_text("utf-8")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return short names of folders that tell them apart.

    >>> _names([Path("runs/a"), Path("other/a")]), _names([Path("runs/a"), Path("runs/b")])
    (['runs/a', 'other/a'], ['a', 'b'])
    """
    paths = [folder.resolve() for folder in folders]
    deepest = max(len(path.parts) for path in paths)
    named = [["/".join(path.parts[-d:]) for path in paths] for d in range(1, deepest + 1)]
    return next(names for names in named if len(set(names)) == len(set(paths)))


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


HOSTS = {"127.0.0.1", "localhost"}
"""Names by which the page may be asked for, also through a forwarded port: no other site's."""

HTML, JSON, PLAIN = "text/html", "application/json", "text/plain"


def open_server(runs: Sequence[str | Path], port: int) -> ThreadingHTTPServer:
    """Return a server of the page of some runs, which listens but does not answer yet.

    Args:
        runs: the runs' folders.
        port: on 127.0.0.1; 0: one that is free.

    Raises:
        ConfigError: there is no run in a folder, or the port is taken or no port.
    """
    page, lock = Page(runs), threading.Lock()

    def answer(path: str, known: dict[str, list[str]]) -> tuple[str, bytes] | None:
        if path.startswith("/docs/"):
            name = path.removeprefix("/docs/")
            pages = {page.name: page for page in DOCS.glob("*.md")}
            return (PLAIN, pages[name].read_bytes()) if name in pages else None
        if path not in ("/", "/data"):
            return None
        with lock:  # one reader of files at a time
            versions = page.versions()  # before the files are read
            if path == "/":
                metrics = {"live": versions} | page.metrics()
                return HTML, fill_page(metrics, page.answers()).encode()
            read = {"metrics": page.metrics, "answers": page.answers}
            news = {part: read[part]() for part, v in versions.items() if known.get(part) != [v]}
            return JSON, as_json({"versions": versions, **news})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if (host or self.headers.get("Host")) not in HOSTS:
                self.send_error(403, f"expected one of the hosts {', '.join(sorted(HOSTS))}")
                return
            address = urlsplit(self.path)
            try:
                found = answer(address.path, parse_qs(address.query))
            except (ConfigError, OSError) as error:  # as where a folder is moved meanwhile
                self.send_error(503, explain=str(error))  # a status line takes Latin letters
                return
            if found is None:
                self.send_error(404)
                return
            kind, content = found
            body = gzip.compress(content, 1)
            self.send_response(200)
            headers = {
                "Content-Type": f"{kind}; charset=utf-8",
                "Content-Encoding": "gzip",
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the reader has gone
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: the page asks every two seconds."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:  # the latter: no such number
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: can't listen there: {reason}; name another") from error
