"""What a run has written to its folder, for reading: it needs no device, and the run may go on."""

import contextlib
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree, read_yaml
from jaxrl_llm.config.programs import PreferConfig, SftConfig, TrainConfig, program_of
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.monitoring.tables import AnswerTable, MetricsTable

if TYPE_CHECKING:
    from jaxrl_llm.evaluation.policy import Policy


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
        from jaxrl_llm.evaluation.policy import load_policy  # the rest needs no jax

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
