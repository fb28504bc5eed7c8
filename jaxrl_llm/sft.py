"""`python -m jaxrl_llm.sft --config FILE.yaml a.b=c …`: supervised training on responses."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.cli import config_main
from jaxrl_llm.config.programs import SftConfig
from jaxrl_llm.monitoring.activity import activity

if TYPE_CHECKING:
    from jaxrl_llm.training.run_files import RunFiles


def sft(config: SftConfig) -> "RunFiles":
    """Run a whole supervised training from its config; continue where one left off.

    Returns:
        What the run has written: metrics and checkpoints.
    """
    with activity("starting"):  # jax is slow, a wrong key should not wait
        from jaxrl_llm.training.offline import run_sft

    run_sft(config)
    from jaxrl_llm.training.run_files import RunFiles

    return RunFiles(config.run_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    about = "Train a language model to imitate responses."
    return config_main("jaxrl_llm.sft", about, SftConfig, sft, arguments)


if __name__ == "__main__":
    sys.exit(main())
