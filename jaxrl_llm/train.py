"""`python -m jaxrl_llm.train --config FILE.yaml a.b=c …`: parse, build, run."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.cli import config_main
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.monitoring.activity import activity

if TYPE_CHECKING:
    from jaxrl_llm.training.run_files import RunFiles


def train(config: TrainConfig) -> "RunFiles":
    """Run a whole training from its config; continue where a run in its folder left off.

    Returns:
        What the run has written: metrics, answers and checkpoints.

    Raises:
        ConfigError: it can't be run.
        RunError: it failed; `Preempted` if it got SIGTERM and has saved.
    """
    if config.cluster is not None:
        from jaxrl_llm.cluster.launch import launch  # nothing outside of clusters imports ray

        launch(config)
    else:
        with activity("starting"):  # jax is slow, a wrong key should not wait
            from jaxrl_llm.training.run import run_training

        run_training(config)
    from jaxrl_llm.training.run_files import RunFiles

    return RunFiles(config.run_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    about = "Train a language model with reinforcement learning."
    return config_main("jaxrl_llm.train", about, TrainConfig, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
