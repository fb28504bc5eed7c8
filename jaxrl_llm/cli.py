"""The command line that `train` and `sft` share: `--config FILE a.b=c …`."""

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxrl_llm.config import describe, load, to_yaml
from jaxrl_llm.functions import ConfigError, RunError

Config = TypeVar("Config")

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def config_main(
    program: str,
    about: str,
    cls: type[Config],
    run: Callable[[Config], Any],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the command line, build the config and run; return the exit status.

    Errors are one line on stderr: with status 2 for a config that can't be run, with status 1 for a
    run that fails (`RunError`, or a full disk). Ctrl-C is status 130. Bugs keep their traceback.
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
        return _report(error, 2)
    except RunError as error:
        return _report(error, 1)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return _report(error, 1)
    except KeyboardInterrupt:
        sys.stderr.write(
            "interrupted: the same command continues from the newest checkpoint, if there is one\n"
        )
        return 130
    return 0


def _report(error: Exception, status: int) -> int:
    sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    return status


def _help_lines(cls: type) -> list[str]:
    lines = []
    for key, default, meaning in describe(cls):
        shown = default if default == "(required)" else f"(default {default})"
        lines.append(f"  {key}  {shown}\n      {meaning}")
    return lines
