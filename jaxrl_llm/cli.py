"""The command line that `train` and `sft` share: `--config FILE a.b=c …`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxrl_llm.config import describe, load, to_yaml
from jaxrl_llm.functions import ConfigError

Config = TypeVar("Config")


def config_main(
    program: str,
    about: str,
    cls: type[Config],
    run: Callable[[Config], Any],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the command line, build the config and run; return the exit status.

    Errors that are the user's to fix are one line on stderr and status 2; Ctrl-C is status 130.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=about,
        epilog="keys:\n" + "\n".join(_help_lines(cls)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE.yaml", help="the run's config")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config and stop"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="keys to change")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load(cls, options.config, options.overrides)
        if options.print_config:
            sys.stdout.write(to_yaml(config))
            return 0
        run(config)
    except ConfigError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command continues from the newest checkpoint\n")
        return 130
    return 0


def _help_lines(cls: type) -> list[str]:
    lines = []
    for key, default, meaning in describe(cls):
        shown = default if default == "(required)" else f"(default {default})"
        lines.append(f"  {key}  {shown}\n      {meaning}")
    return lines
