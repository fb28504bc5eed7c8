"""What a run has written to its folder, read without a device; and the lines for its user."""

import contextlib
import functools
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import NOT_IMPORTABLE, split_name
from jaxrl_llm.config.load import as_tree, from_tree, read_yaml
from jaxrl_llm.config.programs import (
    EvaluateConfig,
    PreferConfig,
    RunConfig,
    SftConfig,
    TrainConfig,
    program_of,
)
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.monitoring.tables import AnswerTable, MetricsTable

if TYPE_CHECKING:
    from jaxrl_llm.training.policy import Policy


class RunFiles:
    """The folder of a run of `train`, `sft` or `prefer`: finished, crashed, or still going on.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read nothing yet."""
        self.folder = Path(folder)

    @property
    def config(self) -> TrainConfig | SftConfig | PreferConfig:
        """The resolved config. Functions of a notebook are there by name alone."""
        tree = read_yaml(self.folder / "config.yaml")
        classes = {"train": TrainConfig, "sft": SftConfig, "prefer": PreferConfig}
        return from_tree(classes[program_of(tree)], tree)

    @property
    def metrics(self) -> MetricsTable:
        """The lines of `metrics.jsonl`, one mapping for each step; as far as they are written."""
        return MetricsTable.read(self.folder / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints that are whole, the newest last."""
        found = (self.folder / "checkpoints").glob("[0-9]*")
        return sorted(int(path.name) for path in found if path.name.isdigit())

    @property
    def best_checkpoint(self) -> int | None:
        """The step of the checkpoint with the best validation; None where none was validated."""
        scores = {}
        for step in self.checkpoints:
            record = self.folder / "checkpoints" / str(step) / "extra" / "metadata"
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # damaged
                scores[step] = json.loads(record.read_bytes())["record"]["metrics"]["validation"]
        return max(scores, key=lambda step: (scores[step], step), default=None)

    @property
    def policy(self) -> "Policy":
        """The policy of the newest checkpoint when this is first asked for, on the devices.

        `load_policy(run.folder, step=run.best_checkpoint)` loads another one.

        Raises:
            ConfigError: there is no checkpoint.
        """
        return self._newest_policy

    @functools.cached_property
    def _newest_policy(self) -> "Policy":
        from jaxrl_llm.training.policy import load_policy  # the rest needs no jax

        return load_policy(self.folder)

    @property
    def dumped_steps(self) -> list[int]:
        """The steps whose answers are kept: the first, the last, and by `rollout.dump_every`."""
        return sorted(
            int(p.stem.removeprefix("step_")) for p in self.folder.glob("rollouts/step_*.parquet")
        )

    def answers(self, step: int | None = None) -> AnswerTable:
        """Return the sampled answers of a step; without one, of the newest step that has them.

        Raises:
            ConfigError: no answers of this step are kept.
        """
        steps = self.dumped_steps
        step = steps[-1] if step is None and steps else step
        if step not in steps:
            raise ConfigError(
                f"no answers of step {step} in {str(self.folder)!r}, only of {steps}: "
                "rollout.dump_every names those that are kept besides the first and the last"
            )
        import pyarrow.parquet  # slow, and not all that read a run need it

        from jaxrl_llm.data.chat import load_tokenizer

        path = self.folder / "rollouts" / f"step_{step:06d}.parquet"
        rows: Sequence[Any] = pyarrow.parquet.read_table(path).to_pylist()
        model = read_yaml(self.folder / "config.yaml")["model"]["path"]  # of any version
        return AnswerTable(rows, text_decoder(load_tokenizer(model), skip_special_tokens=False))

    def __repr__(self) -> str:
        """Return where the run is and how far it has come."""
        metrics = self.metrics
        step = metrics[-1]["step"] if metrics else "none"
        return f"{type(self).__name__}({str(self.folder)!r}, newest step: {step})"


def read_run(folder: str | Path) -> RunFiles:
    """Return what a run has written: its config, metrics, answers and checkpoints.

    Args:
        folder: the run's `run_dir`.

    Raises:
        ConfigError: there is no run in this folder.
    """
    if not (Path(folder) / "config.yaml").is_file():
        raise ConfigError(f"{str(folder)!r} is not a run: expected a folder with a config.yaml")
    return RunFiles(folder)


def journal_path(run_dir: Path, seed: tuple[int, ...]) -> Path:
    """Return the journal of a call of the sampler; remove those of steps that are saved.

    Args:
        run_dir: folder of the run; that of the journal is made.
        seed: of the call: the run's, the step, the use and more numbers.
    """
    folder = run_dir / "tools"
    folder.mkdir(exist_ok=True)
    newest = max(RunFiles(run_dir).checkpoints, default=-1)
    for old in folder.glob("step_*.jsonl"):
        if int(old.name.split("_")[1]) <= newest:
            old.unlink(missing_ok=True)
    _, step, *use = seed
    return folder / f"step_{step:06d}_{'_'.join(map(str, use))}.jsonl"


EPISODE_KEYS = ("agent", "tools", "environment", "call_format", "order", "limits", "tool_process")
"""Keys of episodes, which an evaluation has, too."""
BOUNDS = ("max_pixels", "min_pixels")
"""Keys of the sizes of images, which an evaluation has, too."""


def opening_lines(
    config: TrainConfig | SftConfig | PreferConfig,
    trained: Mapping[str, Any],
    rows: int,
    total: int,
) -> list[str]:
    """Return what a run trains, on which devices, and on what data.

    Args:
        config: of the run.
        trained: shapes of the arrays of each model that is trained, by its name.
        rows: prompts or examples that are trained on.
        total: steps in all.
    """
    import jax  # who reads the last lines of a run needs none

    leaves = {name: jax.tree.leaves(tree) for name, tree in trained.items()}
    sizes = {name: sum(math.prod(a.shape) for a in arrays) for name, arrays in leaves.items()}
    devices = next(iter(leaves["actor"])).sharding.device_set
    kind = next(iter(devices)).device_kind
    counts = ", ".join(
        f"{'' if name == 'actor' else name.replace('_', ' ') + ' '}{_count(size)} parameters"
        for name, size in sizes.items()
    )
    adapter = "an adapter of " if config.model.lora or config.model.adapter else ""
    where = f"{len(devices)} {kind} device{'s' if len(devices) > 1 else ''}"
    if isinstance(config, TrainConfig):
        step = f"{config.batch.prompts_per_step} x {config.rollout.samples_per_prompt} answers"
        data = f"{rows} prompts"
    elif isinstance(config, SftConfig):
        step, data = f"{config.batch.examples_per_step} examples", f"{rows} examples"
    else:
        step, data = f"{config.batch.pairs_per_step} preferences", f"{rows} preferences"
    return [
        f"training {adapter}{config.model.path}: {counts}, on {where}",
        f"{data}, {total} steps of {step}; everything is written to {config.run_dir}",
    ]


def _count(number: int) -> str:
    """Return a number of parameters in a few letters.

    >>> [_count(n) for n in (812, 108_672, 1_720_000_000)]
    ['812', '109 K', '1.72 B']
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def closing_lines(config: TrainConfig | SftConfig | PreferConfig) -> list[str]:
    """Return where a run is, how far it has come, and the commands that go on from there.

    Args:
        config: of the run, whose folder has a checkpoint.
    """
    files = RunFiles(config.run_dir)
    folder = str(files.folder)
    lines = [f"run: {folder} ({_standing(files)})"]
    commands = {"look at it": ["report", folder]}
    if isinstance(config, SftConfig | PreferConfig):
        lines.append(f"model: {config.export_to} (Hugging Face's format)")
        if _is_reward_model(config.export_to):
            lines.append(f"let it score answers: reward.classifier={config.export_to}")
        else:
            words = ["--model", config.export_to, "--data", "PROMPTS.parquet"]
            if isinstance(config, SftConfig) and config.model.vision != "none":
                bounds = {name: getattr(config.data, name) for name in BOUNDS}
                words += ["vision=true", *(f"{k}={v}" for k, v in bounds.items() if v is not None)]
            commands["evaluate"] = ["evaluate", *words]
    else:
        words, function = evaluation_words(config), config.model.function
        if words is not None:
            commands["evaluate"] = ["evaluate", *words]
        if function is None or split_name(function.fn)[0] != NOT_IMPORTABLE:
            commands["export"] = ["export", folder, str(files.folder / "exported")]
    for name, words in commands.items():
        lines.append(f"{name}: python -m jaxrl_llm.{shlex.join(words)}")
    return lines


def _is_reward_model(directory: str) -> bool:
    """Return whether an exported model gives scores."""
    path = Path(directory) / "config.json"
    named = json.loads(path.read_text()).get("architectures") if path.exists() else None
    heads = ("ForSequenceClassification", "ForTokenClassification")
    return any(name.endswith(heads) for name in named or ())


def interruption_line(config: RunConfig) -> str:
    """Return what becomes of a run that was interrupted; it may not have begun."""
    files = RunFiles(config.run_dir)
    metrics, saved = files.metrics, files.checkpoints
    if not saved:
        return "the same command begins again: there is no checkpoint yet"
    return (
        f"the same command continues after step {saved[-1]}, the newest checkpoint in "
        f"{config.run_dir} ({metrics[-1]['step'] if metrics else 0} steps were done)"
    )


def _standing(files: RunFiles) -> str:
    means = ((line["step"], _validation(line)) for line in files.metrics)
    validated = {step: mean for step, mean in means if mean is not None}
    kept, best = files.checkpoints, files.best_checkpoint
    parts = [_plural(kept[-1], "step"), _plural(len(kept), "checkpoint")]
    if best is not None and best in validated:
        parts.append(f"the best is step {best} with {validated[best]:.3f}")
    return ", ".join(parts)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _validation(line: Mapping[str, Any]) -> float | None:
    """Return the mean over data sources of a step's mean@k, None without."""
    values = [value for name, value in line.items() if "/mean@" in name and value is not None]
    return sum(values) / len(values) if values else None


def evaluation_words(config: TrainConfig) -> list[str] | None:
    """Return the arguments of `jaxrl_llm.evaluate` that validate a run's newest checkpoint.

    None where the run has functions that only the process has which defined them, or no function
    that scores.

    Args:
        config: of the run.
    """
    tree = as_tree(config)
    rollout, validation, data = tree["rollout"], tree["validation"], tree["data"]
    if f"{NOT_IMPORTABLE}:" in json.dumps(tree) or tree["reward"]["function"] is None:
        return None
    files = data["validation"] or data["train"]
    wanted = {
        "dataset": data["dataset"],
        **{name: data[name] for name in ("image_key", "video_key", *BOUNDS)},
        "chat_template_kwargs": data["chat_template_kwargs"],
        "max_prompt_tokens": data["max_prompt_tokens"] if data["filter_overlong"] else None,
        "max_new_tokens": rollout["max_new_tokens"],
        "dtype": tree["model"]["dtype"],
        **{name: validation[name] for name in ("samples", "temperature", "top_p", "rows")},
        **{name: rollout[name] for name in EPISODE_KEYS},
        "reward": tree["reward"],
    }
    known = as_tree(EvaluateConfig(model=config.run_dir, data=tuple(files)))
    words = ["--model", config.run_dir]
    for path in files:
        words += ["--data", path]
    return words + [f"{key}={_as_yaml(value)}" for key, value in _changes(wanted, known)]


def _changes(
    wanted: Mapping[str, Any], known: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the keys, with dots, and values in which a tree differs from another one."""
    for key, value in wanted.items():
        if key not in known or value == known[key] or key == "workers":  # which decide no result
            continue
        if isinstance(known[key], Mapping) and known[key] and "fn" not in known[key]:  # a section
            yield from _changes(value, known[key], f"{prefix}{key}.")
        elif isinstance(value, Mapping) and [*value] == ["fn"]:
            yield f"{prefix}{key}", value["fn"]
        else:
            yield f"{prefix}{key}", value


def _as_yaml(value: Any) -> str:
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
