"""`python -m jaxrl_llm.prefer --config FILE.yaml a.b=c …`: training on preferences."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.cli import config_main
from jaxrl_llm.config.programs import PreferConfig

if TYPE_CHECKING:
    from jaxrl_llm.training.run_files import RunFiles


def prefer(config: PreferConfig) -> "RunFiles":
    """Train a policy or a reward model on preferences; continue where a run left off.

    Returns:
        What the run has written: metrics and checkpoints.
    """
    from jaxrl_llm.training.offline import run_prefer  # jax is slow, a wrong key can't wait

    run_prefer(config)
    from jaxrl_llm.training.run_files import RunFiles

    return RunFiles(config.run_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    about = "Train a language model or a reward model on preferences."
    return config_main("jaxrl_llm.prefer", about, PreferConfig, prefer, arguments)


if __name__ == "__main__":
    sys.exit(main())
