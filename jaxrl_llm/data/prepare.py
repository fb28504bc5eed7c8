"""Write ready-made datasets: `python -m jaxrl_llm.data.prepare NAME --out DIR [--key value …]`.

Each NAME is a file of `configs/tasks`, whose function of that name is called with `out`; its
keyword arguments are the keys. Files are written whole or not at all.
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

NAMES = ("arithmetic", "gsm8k", "math", "reasoning_gym", "agent_task", "dapo_math", "retool_sft")
NAMES += ("search_r1", "verifiers", "pictures", "geo3k")

__all__ = [*NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function of a file of `configs/tasks`."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxrl_llm.configs.tasks.{name}"), name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.data.prepare", description="Write a ready-made dataset."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name in NAMES:
        function = __getattr__(name)
        summary = inspect.getdoc(function) or ""
        command = names.add_parser(
            name,
            help=summary.splitlines()[0],
            description=summary.partition("\nReturns:")[0],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("--out", required=True, help="directory to write to")
        for key, parameter in list(inspect.signature(function).parameters.items())[1:]:
            command.add_argument(
                *dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}")),
                dest=key,
                type=yaml.safe_load if parameter.default is None else type(parameter.default),
                default=parameter.default,
                help="default: %(default)s",
            )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; print one line per file written, or one line of error.

    Args:
        arguments: without the program's name; None takes the process's own.

    Raises:
        SystemExit: the arguments are wrong, or the dataset can't be prepared.
    """
    options = vars(_parser().parse_args(arguments))
    prepare, out = __getattr__(options.pop("name")), options.pop("out")
    try:
        written = prepare(out, **options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for path, rows in written.items():
        sys.stdout.write(f"{path}: {rows} rows\n")


if __name__ == "__main__":
    main()
