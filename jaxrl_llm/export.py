"""`python -m jaxrl_llm.export RUN_DIR OUT_DIR`: a checkpoint as a Hugging Face directory.

`--push-to ORG/NAME` takes it to the Hugging Face hub.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.help import complete_words
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.export",
        description="Write a run's checkpoint as a Hugging Face directory, with a model card.",
    )
    parser.add_argument("run_dir", help="folder of a run of train or sft")
    parser.add_argument(
        "out",
        nargs="?",
        help="directory to write; it must not exist; with --push-to it may be left out",
    )
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
    parser.add_argument(
        "--license", help="of the weights, for the model card, by the hub's name: apache-2.0"
    )
    parser.add_argument(
        "--push-to", metavar="ORG/NAME", help="push it to this repository of the Hugging Face hub"
    )
    parser.add_argument(
        "--private", action="store_true", help="make the repository private; with --push-to"
    )
    complete_words(parser)
    options = parser.parse_args(arguments)
    if options.private and not options.push_to:
        parser.error("--private: expected --push-to ORG/NAME, too")
    if options.out is None and not options.push_to:
        parser.error("expected a directory to write, or --push-to ORG/NAME")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = vars(parse_arguments(arguments))
    repo_id, private = options.pop("push_to"), options.pop("private")
    try:
        with ACTIVITIES.reported():
            if repo_id is None:
                _export(options)
            else:
                _export_and_push(options, repo_id, private=private)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except RunError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _export(options: dict) -> None:
    with activity("starting"):  # jax is slow to import, --help should not wait
        from jaxrl_llm.training.export import export_model
    step = export_model(**options)
    sys.stdout.write(f"wrote step {step} to {options['out']}\n")


def _export_and_push(options: dict, repo_id: str, *, private: bool) -> None:
    """Export, and push; what was not pushed stays on the disk, also where no directory is named."""
    from jaxrl_llm.training.export import check_push, push_model

    check_push(repo_id)
    own = None if options["out"] else tempfile.mkdtemp(prefix="jaxrl_llm-")
    out = Path(options["out"] if own is None else f"{own}/{repo_id.partition('/')[2]}")
    try:
        _export(options | {"out": str(out)})
    except BaseException:
        if own is not None:
            shutil.rmtree(own)
        raise
    sys.stdout.flush()
    with activity("pushing"):
        address = push_model(out, repo_id, private=private)
    if own is not None:
        shutil.rmtree(own)
    sys.stdout.write(f"pushed it to {address}\n")


if __name__ == "__main__":
    sys.exit(main())
