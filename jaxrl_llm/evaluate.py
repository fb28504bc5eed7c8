"""`python -m jaxrl_llm.evaluate --model DIR --data FILE a.b=c …`: sample, score, and say how sure.

docs/evaluate.md has the estimators and what is written.
"""

import sys
from collections.abc import Sequence

from jaxrl_llm.cli import config_main
from jaxrl_llm.config.programs import EvaluateConfig
from jaxrl_llm.monitoring.activity import activity

FLAGS = {"model": "store", "data": "append"}


def evaluate(config: EvaluateConfig) -> None:
    """Run a whole evaluation from its config."""
    with activity("starting"):  # jax is slow, a wrong key should not wait
        from jaxrl_llm.evaluation.evaluation import run_evaluation

    run_evaluation(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    about = "Sample answers of a model to the prompts of data files, and score them."
    return config_main(
        "jaxrl_llm.evaluate", about, EvaluateConfig, evaluate, arguments, flags=FLAGS
    )


if __name__ == "__main__":
    sys.exit(main())
