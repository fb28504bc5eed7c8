"""GRPO steps of jaxrl_llm for `benchmarks.training.grpo_step`: `run_ours.py JOB RESULT`.

A run as `jaxrl_llm.train` builds it, with two of its parts replaced: the engine gets requests
without stop tokens whose limit is the length that the workload gives the answer, and
what is logged goes to the meter, too.
"""

from meter import Meter, read_job, since_begin  # isort: skip  (first: it starts the clock)

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import jax

from jaxrl_llm.cli import take_huge_pages
from jaxrl_llm.config.load import apply_override, from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.monitoring.writer import quiet_libraries
from jaxrl_llm.rollout.engine import Completion, Engine, Request
from jaxrl_llm.runs.directory import run_folder
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.loop import run_steps, train_to_the_end
from jaxrl_llm.training.run import open_trainer


class FixedLengths:
    """An engine whose answers have given lengths, whatever they say."""

    def __init__(self, engine: Engine, lengths: Iterator[list[int]], meter: Meter) -> None:
        """Keep the lengths of every step to come."""
        self._engine, self._lengths, self._meter = engine, lengths, meter
        self.wake, self.sleep, self.load = engine.wake, engine.sleep, engine.load
        self.stats = engine.stats

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one step's answers."""
        limited = [
            dataclasses.replace(
                request, sampling=dataclasses.replace(request.sampling, max_new_tokens=length)
            )
            for request, length in zip(requests, next(self._lengths), strict=True)
        ]
        answers = self._engine.sample(limited)
        self._meter.add(generated=sum(len(answer.tokens) for answer in answers))
        return answers


class MeteredLog:
    """A run's log; each step's line ends the meter's step."""

    def __init__(self, log: Any, meter: Meter, sequences: int) -> None:
        """Keep what the metrics are of."""
        self._log, self._meter, self._sequences = log, meter, sequences
        self.first_s, self.lines = 0.0, []

    def write(self, step: int, metrics: Mapping[str, float], **tables: Any) -> None:
        """Write one step's metrics, with its table of answers and its histograms."""
        self._log.write(step, metrics, **tables)
        self.lines.append(dict(metrics))
        self._meter.add(
            generation_s=metrics["timing_s/gen"],
            trained=round(metrics["response_length/mean"] * self._sequences),
            tokens=metrics["perf/total_num_tokens"],
        )
        self._meter.end_step()
        self.first_s = self.first_s or since_begin()

    def position(self, step: int) -> int:
        """Return the length of the log up to a step."""
        return self._log.position(step)


def settings(job: dict[str, Any], folder: Path) -> TrainConfig:
    """Return the config of a run."""
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "data_source": "digits",
            "reward_model": {"ground_truth": ""},
        }
        for prompts in job["prompts"]
        for prompt in prompts
    ]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run_dir": str(folder / "run"),
        "steps": len(job["prompts"]),
        "model": {"path": job["model"]},
        "data": {"train": str(data), "shuffle": False, "max_prompt_tokens": job["longest_prompt"]},
        "rollout": {
            "samples_per_prompt": job["samples"],
            "max_new_tokens": job["max_new_tokens"],
            "max_running_sequences": len(job["lengths"][0]),
        },
        "reward": {"function": f"{Path(__file__).parent / 'meter.py'}:score", "workers": 0},
        "algorithm": {
            "advantage": "grpo",
            "loss": "ppo_clip",
            "reduce": "sequence_mean_token_mean",
            "kl_loss": "k3",
            "kl_coef": job["kl_coef"],
        },
        "optim": {
            "optimizer": {"fn": "adamw", "weight_decay": 0.0},
            "schedule": {"fn": "constant_schedule", "value": job["learning_rate"]},
            "grad_clip": job["grad_clip"],
        },
        "batch": {"prompts_per_step": len(job["prompts"][0])},
        "log": {"trackers": []},
    }
    for override in job["overrides"]:
        apply_override(tree, override)
    return from_tree(TrainConfig, tree)


def medians(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each stage of a step."""
    names = [name for name in lines[-1] if name.startswith("timing_s/")]
    return {n: statistics.median(line[n] for line in lines if n in line) for n in names}


def main() -> None:
    """Run all steps and write what they took."""
    take_huge_pages()  # as the programs of jaxrl_llm do
    quiet_libraries()
    job = read_job()
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        config = settings(job, Path(work))
        stack.enter_context(run_folder(config.run_dir, config))
        trainer = open_trainer(config, resolve_functions(config), Path(config.run_dir), stack)
        stack.callback(trainer.close)
        if trainer.models.reference is None:
            raise RuntimeError("the run has no reference, but its loss has a KL term")
        meter, files = Meter(), trainer.files
        engine: Any = FixedLengths(trainer.sampler.engine, iter(job["lengths"]), meter)
        trainer.sync(0)
        trainer.sampler.engine = engine
        trainer.sampler.tokens = trainer.sampler.tokens._replace(stops=())
        log: Any = MeteredLog(files.log, meter, len(job["lengths"][0]))
        trainer.files = dataclasses.replace(files, log=log)
        train_to_the_end(trainer, run_steps(trainer))
    measured = log.lines[job["warm"] :]
    meter.write(
        first_s=log.first_s,
        versions={"Python": sys.version.split()[0], "jax": jax.__version__},
        rewards=[line["critic/score/mean"] for line in log.lines],
        kl=log.lines[-1]["actor/kl"],
        stages=medians(measured),
        compilations=sum(line["perf/compilations"] for line in measured),
    )


if __name__ == "__main__":
    main()
