"""A run's folder as plain data, for its page. What is damaged is named, and the rest is read."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import dotted_items, read_yaml, without_secrets
from jaxrl_llm.config.programs import learned_by, program_of
from jaxrl_llm.reporting.curves import axes, curves
from jaxrl_llm.reporting.health import check_run
from jaxrl_llm.reporting.history import is_held
from jaxrl_llm.reporting.stages import stage_seconds
from jaxrl_llm.runs.files import RunFiles

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
    tokens = sum(line.get("perf/total_num_tokens") or 0.0 for line in lines)
    seconds = sum(line.get("timing_s/step") or 0.0 for line in lines)
    facts = {
        "model": model.get("path"),
        "first taught by": model.get("warm_start"),
        "data": _listed((tree.get("data") or {}).get("train")),
        **{key.replace("_", " "): name for key, name in learned_by(algorithm).items()},
        "seed": tree.get("seed", 0),
        "tokens": f"{tokens:,.0f}" if tokens else None,
        "time of the steps": _duration(seconds) if seconds else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _listed(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _duration(seconds: float) -> str:
    """Return seconds as text.

    >>> _duration(4000.0), _duration(75.0), _duration(7.25)
    ('1 h 6 min', '1 min 15 s', '7.2 s')
    """
    minutes, rest = divmod(seconds, 60)
    if minutes >= 60:
        return f"{minutes // 60:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
