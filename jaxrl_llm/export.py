"""`python -m jaxrl_llm.export RUN_DIR OUT_DIR`: a checkpoint as a Hugging Face directory."""

import argparse
import sys
from collections.abc import Sequence

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.export",
        description="Write a run's checkpoint as a Hugging Face directory.",
    )
    parser.add_argument("run_dir", help="folder of a run of train or sft")
    parser.add_argument("out", help="directory to write; it must not exist")
    parser.add_argument("--step", type=int, help="which checkpoint; default the newest")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the saved arrays"
    )
    parser.add_argument(
        "--role",
        default="actor",
        choices=("actor", "critic", "implicit_reward_model"),
        help="which model of the run",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapter alone, in PEFT's format, and not the model with it merged in",
    )
    parser.add_argument(
        "--function-from",
        metavar="MODULE",
        help="my_file.py or pkg.mod, that has the model's function which a notebook gave the run",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse_arguments(arguments)
    try:
        with ACTIVITIES.reported():
            with activity("starting"):  # jax is slow to import, --help should not wait
                from jaxrl_llm.runs.export import export_model
            step = export_model(**vars(options))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"wrote step {step} to {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
