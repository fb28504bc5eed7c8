"""The run stage: log, display, checkpoints, validation, preemption and the watchdog."""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.packing import RowShape
from jaxrl_llm.evaluation.validation import validation_metrics
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import is_due
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.dumps import RolloutDumps, chosen_rows, example_lines
from jaxrl_llm.monitoring.metrics_log import MetricsLog
from jaxrl_llm.monitoring.step_warnings import StepWarnings
from jaxrl_llm.monitoring.tables import SHOWN
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import Scoring
from jaxrl_llm.rollout.sampling import Rollouts
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.runs.preemption import Preemption
from jaxrl_llm.runs.resume import ResumedRun
from jaxrl_llm.runs.watchdog import Watchdog
from jaxrl_llm.sharding.distributed import is_first
from jaxrl_llm.training.batch_metrics import load_balance, step_histograms
from jaxrl_llm.training.stages.rollout import RolloutStage
from jaxrl_llm.types import Batch

SHOWN_WAIT_S = 1.0
"""From which on a step's wait for programs has a line of its own."""


@dataclass(frozen=True, kw_only=True)
class RunStage:
    """Where a run reads and writes, and when it ends.

    Attributes:
        config: of the run.
        total_steps: steps in all.
        start_digests: of the weights and data that the run began with.
        executor: a thread for work on the host while the devices work.
        balance: mini-batches -> metrics of how evenly they load the devices.
        should_validate: whether a step ends with a validation; step 0 is before the first update.
        validate: step -> metrics.
        dump: (step, batch, rollouts, scores) -> writes the answers to a file.
        preemption: whether the run was told to end.
        watchdog: ends the run when it hangs; `record` tells it of each step.
        warn: (step, metrics) -> logs what is wrong with a step.
        prompts: to train on.
        validation_prompts: to validate on.
    """

    config: TrainConfig
    total_steps: int
    start_digests: dict[str, Any]
    executor: Executor
    balance: Callable[[Sequence[Batch]], dict[str, float]]
    should_validate: Callable[[int], bool]
    validate: Callable[[int], dict[str, float]]
    dump: Callable[[int, Batch, Rollouts, list[Score]], None]
    checkpoints: Checkpoints
    log: MetricsLog
    display: Display
    preemption: Preemption
    watchdog: Watchdog
    warn: Callable[[int, dict[str, float]], None]
    prompts: list[Prompt] = field(default_factory=list)
    validation_prompts: list[Prompt] = field(default_factory=list)

    def should_dump(self, step: int) -> bool:
        """Tell whether this process writes a step's answers to a file."""
        every = self.config.rollout.dump_every
        return is_first() and (step == 1 or is_due(step, every, self.total_steps))

    def some_answers(
        self, step: int, batch: Batch, rollouts: Rollouts, scores: list[Score]
    ) -> dict[str, Any]:
        """Return what `record` shows of a step's answers, in the steps that show some."""
        every = self.config.log.answers_every
        if not (every and is_first() and (step == 1 or is_due(step, every, self.total_steps))):
            return {}
        samples = self.config.rollout.samples_per_prompt
        return {
            "answers": chosen_rows(batch, rollouts, scores, samples=samples),
            "histograms": step_histograms(batch, scores),
        }

    def record(
        self,
        step: int,
        metrics: dict[str, float],
        answers: Sequence[Mapping[str, Any]] = (),
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write a step's metrics, and one line on the screen.

        Args:
            step: its number.
            metrics: by name.
            answers: rows of some of its answers, to show below the line.
            histograms: values by name, for trackers.
        """
        self.watchdog.beat()
        self.log.write(step, metrics, answers=answers, histograms=histograms)
        parts = [f"{label} {metrics[k]:.4g}" for label, k in SHOWN.items() if k in metrics]
        parts += [
            f"{name} {metrics[f'reward/{name}']:.4g}"
            for name in ("errors", "unscored")
            if metrics.get(f"reward/{name}")
        ]
        parts += [f"{k.removeprefix('val-core/')} {v:.4g}" for k, v in metrics.items() if "@" in k]
        line = f"step {step}/{self.total_steps}  " + "  ".join(parts)
        self.display.advance(line) if step else self.display.line(line)
        waited = metrics.get("perf/compile_wait_s", 0.0)
        if waited >= SHOWN_WAIT_S:
            compiled, loaded = (
                metrics[f"perf/{name}"] for name in ("compilations", "compilation_cache_hits")
            )
            self.display.line(
                f"waited {waited:.1f} s for programs: {compiled:.0f} compiled, {loaded:.0f} loaded"
            )
        self.display.plot(step, metrics)
        if answers:
            self.display.answers(step, answers)
        if step:
            self.warn(step, metrics)


def build_run(
    config: TrainConfig,
    opened: ResumedRun,
    folder: Path,
    executor: Executor,
    watchdog: Watchdog,
    shape: RowShape,
    validate: Callable[[int], dict[str, float]] | None,
) -> RunStage:
    """Build the stage from an opened run.

    Args:
        config: of the run.
        opened: its data, checkpoints and logs.
        folder: of the run.
        executor: a thread for work on the host.
        watchdog: ends the run when it hangs.
        shape: of the updates' micro-batches.
        validate: step -> metrics; None without validation prompts.
    """
    return RunStage(
        config=config,
        total_steps=opened.total_steps,
        start_digests=opened.start_digests,
        executor=executor,
        balance=functools.partial(load_balance, shape=shape),
        should_validate=functools.partial(is_validation_due, config, opened.total_steps)
        if validate
        else never,
        validate=validate or no_validation,
        dump=RolloutDumps(folder / "rollouts"),
        checkpoints=opened.checkpoints,
        log=opened.log,
        display=opened.display,
        preemption=opened.preemption,
        watchdog=watchdog,
        warn=StepWarnings(config, opened.total_steps),
    )


def is_validation_due(config: TrainConfig, total_steps: int, step: int) -> bool:
    """Tell whether a step ends with a validation; step 0 is before the first update."""
    validation = config.validation
    return is_due(step, validation.every, total_steps) if step else validation.before


def never(step: int) -> bool:
    """Return false, where there are no prompts to validate."""
    del step
    return False


def no_validation(step: int) -> dict[str, float]:
    """Return no metrics, where there are no prompts to validate."""
    del step
    return {}


def make_validation(
    config: TrainConfig,
    rollout: RolloutStage,
    score: Scoring,
    prompts: list[Prompt],
    show: Callable[[str], None],
) -> Callable[[int], dict[str, float]] | None:
    """Return the function that validates at a step, or None without validation prompts.

    Args:
        config: of the run.
        rollout: samples the answers.
        score: rollouts -> one score for each answer.
        prompts: to answer.
        show: takes lines for the screen, with the answers to the first prompts.
    """
    if not prompts:
        return None

    def validate(step: int) -> dict[str, float]:
        with activity("validating"):
            rollouts = rollout.sample_validation(prompts, step)
            scores, samples = score(rollouts), config.validation.samples
        for line in example_lines(rollouts, scores, samples=samples):
            show(line)
        return validation_metrics(rollouts.prompts, scores, samples=samples)

    return validate
