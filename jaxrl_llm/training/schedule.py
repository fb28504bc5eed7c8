"""A run's schedule: how far each answer in flight had come when new weights were pushed.

It is all of a run with stale answers that its seed does not decide. A row is on disk before the
weights are pushed, so that a run can be replayed.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.sections import RolloutConfig
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training.update import TrainingError

log = logging.getLogger(__name__)

WHOLE = -1
"""Stands for the tokens of an answer that is whole."""

TRAINERS, OWN, NODES = "on the trainer's devices", "on devices of its own", "on nodes"
"""Where an engine is. One on nodes draws what its messages leave it time for."""

FILE = "schedule.jsonl"
"""A run's own schedule, in its folder."""


class Row(NamedTuple):
    """Where the answers stood at a push.

    Attributes:
        step: whose update made the weights.
        engine: `TRAINERS` or `OWN` devices, or `NODES`.
        turns: that it took while the step was trained, on devices of its own.
        slots: sequences that it ran at once.
        drawn: tokens of each answer of each group that is begun and not trained, by the group's
            ordinal; `WHOLE` where it is whole.
    """

    step: int
    engine: str
    turns: int
    slots: int
    drawn: Mapping[int, list[int]]

    def as_json(self) -> str:
        """Return a line of the file."""
        return json.dumps(self._asdict(), separators=(",", ":"))

    @classmethod
    def of_json(cls, line: str) -> "Row":
        """Read a line of the file."""
        row = json.loads(line)
        return cls(**{**row, "drawn": {int(k): drawn for k, drawn in row["drawn"].items()}})


class Schedule:
    """Writes the schedule of a run, and gives the rows that it has to follow.

    Args:
        folder: of the run; None: nothing is written.
        slots: sequences that the engine runs at once.
        done: steps that the run has taken; rows after them are of a run that was killed.
        replayed: file of the schedule to follow at every step; None: follow what was killed.
        repeats: whether the engine draws the same tokens again. If not, nothing is followed.

    Raises:
        ConfigError: `replayed` can't be read.

    Attributes:
        slots: sequences that the engine runs at once.
        replays: whether a schedule is replayed.
    """

    def __init__(
        self, folder: Path | None, *, slots: int, done: int, replayed: str | None, repeats: bool
    ) -> None:
        """Drop the rows after the steps that are done from the file."""
        self.slots, self.replays = slots, replayed is not None
        self._path = folder and folder / FILE
        rows = _read(self._path) if self._path is not None and self._path.exists() else {}
        if replayed is not None:
            self._followed = _read(Path(replayed), key="rollout.schedule: ")
        else:  # at no step done, the rows are of a run that was begun with another config, maybe
            later = {step: row for step, row in rows.items() if step > done}
            self._followed = later if done and repeats else {}
        if self._path is not None:
            kept = "".join(f"{row.as_json()}\n" for step, row in rows.items() if step <= done)
            new = self._path.with_suffix(".new")
            new.write_text(kept)
            new.replace(self._path)

    def row(self, step: int) -> Row | None:
        """Return the row that a step has to follow; None: it is free.

        Raises:
            TrainingError: the schedule that is replayed has none.
        """
        row = self._followed.get(step)
        if row is None and self.replays:
            raise TrainingError(
                f"rollout.schedule has no row of step {step}, expected one: its last is of step "
                f"{max(self._followed, default=0)}"
            )
        return row

    def record(self, row: Row) -> None:
        """Write a row, which is on disk then.

        Raises:
            TrainingError: the step has not come to the row that is replayed.
        """
        followed = self._followed.get(row.step)
        if followed is not None and followed.drawn != row.drawn and not self.replays:
            log.warning("the config has changed: the run goes on otherwise than it was killed")
            self._followed = {}
        elif followed is not None and followed.drawn != row.drawn:
            number = next(
                n
                for n in sorted({*row.drawn, *followed.drawn})
                if row.drawn.get(n) != followed.drawn.get(n)
            )
            raise TrainingError(
                f"step {row.step} does not follow the schedule: the answers of group {number} have "
                f"{row.drawn.get(number)} tokens, expected {followed.drawn.get(number)}. It was "
                "recorded with another config, data, model or version"
            )
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{row.as_json()}\n")
                file.flush()
                os.fsync(file.fileno())


def open_schedule(config: RolloutConfig, folder: Path, done: int) -> Schedule:
    """Return the schedule of a run.

    Args:
        config: how it samples.
        folder: of the run.
        done: steps that it has taken.

    Raises:
        ConfigError: the schedule to replay can't be read.
    """
    # of several processes, which take the same turns by themselves, only the first has the rows
    repeats = config.engine == "native" and config.at_push != "keep"
    repeats &= distributed.process_count() == 1
    repeats &= config.order == "lockstep" or not config.has_episodes
    return Schedule(
        folder if config.staleness and distributed.is_first() else None,
        slots=config.max_running_sequences,
        done=done,
        replayed=config.schedule,
        repeats=repeats,
    )


def _read(path: Path, *, key: str = "") -> dict[int, Row]:
    """Read the rows of a file, by step; the last line may have been cut off by the run's end.

    A message begins with the key that has named it.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        lines = path.read_text().splitlines(keepends=True)
        rows: list[Any] = [Row.of_json(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{key}{path} is no schedule of a run ({FILE}): {error}") from error
    return {row.step: row for row in rows}
