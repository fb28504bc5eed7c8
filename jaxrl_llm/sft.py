"""`python -m jaxrl_llm.sft --config FILE.yaml a.b=c …`: supervised training on responses."""

import sys
from collections.abc import Sequence

from jaxrl_llm.cli import config_main
from jaxrl_llm.functions import Preempted
from jaxrl_llm.keys import SftConfig


def sft(config: SftConfig) -> None:
    """Run a whole supervised training from its config; continue where one left off."""
    from jaxrl_llm.sharding import processes  # jax is slow to import, and errors should not wait

    processes.start()
    from jaxrl_llm.supervised import run_sft

    with processes.together(agreed=(Preempted,)):
        run_sft(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    about = "Train a language model to imitate responses."
    return config_main("jaxrl_llm.sft", about, SftConfig, sft, arguments)


if __name__ == "__main__":
    sys.exit(main())
