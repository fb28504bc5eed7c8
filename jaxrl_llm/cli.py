"""The command line that the programs with a config share: `--config FILE a.b=c …`."""

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.config.errors import PREEMPTED, ConfigError, Preempted, RunError, exit_status
from jaxrl_llm.config.functions import renamed_functions
from jaxrl_llm.config.help import complete_words
from jaxrl_llm.config.load import apply_override, describe, from_tree, read_config, to_yaml
from jaxrl_llm.config.programs import RunConfig
from jaxrl_llm.config.sections import Section
from jaxrl_llm.monitoring.activity import ACTIVITIES

Config = TypeVar("Config", bound=Section)

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def config_main(
    program: str,
    about: str,
    cls: type[Config],
    run: Callable[[Config], Any],
    arguments: Sequence[str] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
) -> int:
    """Parse the command line, build the config and run; return the exit status.

    Without `arguments` it is the process's own command line, which begins again with huge pages.
    `flags` are keys with options of their own, such as `--model`, by argparse's action ("store" or
    "append"); a program that has some needs no `--config`.

    Errors are lines on stderr: with status 2 for a config that can't be run, with status 1 for a
    run that fails (`RunError`, or a full disk). Status 75 is a run that was told to end and has
    saved (`Preempted`), Ctrl-C is 130. Bugs keep their traceback.
    """
    if arguments is None:
        take_huge_pages()
    parser = _parser(program, about, cls, flags)
    complete_words(parser)
    options = parser.parse_intermixed_args(arguments)
    config = None
    try:
        config = _config(cls, options, flags or {})
        if options.print_config:
            sys.stdout.write(to_yaml(config))
            return 0
        with ACTIVITIES.reported():
            run(config)
    except Preempted as error:
        sys.stderr.write(f"preempted: {error}\n")
        return PREEMPTED
    except (ConfigError, RunError) as error:
        return _report(error, exit_status(error))
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        where = f"can't write {error.filename}: " if error.filename else ""
        return _report(OSError(f"{where}{error.strerror}"), 1)
    except KeyboardInterrupt:
        from jaxrl_llm.training.run_files import interruption_line

        rest = f": {interruption_line(config)}" if isinstance(config, RunConfig) else ""
        sys.stderr.write(f"interrupted{rest}\n")
        return 130
    return 0


def _parser(
    program: str, about: str, cls: type[Section], flags: Mapping[str, str] | None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=about,
        epilog="keys:\n" + "\n".join(_help_lines(cls)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    needed = not flags
    parser.add_argument(
        "--config",
        required=needed,
        metavar="FILE.yaml",
        help="the run's config, or a packaged one's name: quickstart, recipes/dapo",
    )
    for flag, action in (flags or {}).items():
        key = flag.replace("-", "_")
        parser.add_argument(f"--{flag}", action=action, help=f"the key {key}")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config and stop"
    )
    parser.add_argument(
        "--json-schema",
        action=_print_schema(cls),
        help="print the JSON Schema of the config's file and stop",
    )
    parser.add_argument(
        "--function-from",
        metavar="MODULE",
        help="my_file.py or pkg.mod, that has the functions which a notebook gave the run",
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="keys to change")
    return parser


def _print_schema(cls: type[Section]) -> type[argparse.Action]:
    class PrintSchema(argparse.Action):
        """Prints when it is parsed, like --help, so that it needs no --config."""

        def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
            super().__init__(option_strings, dest, nargs=0, help=help)

        def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
            from jaxrl_llm.config.help import json_schema

            sys.stdout.write(json.dumps(json_schema(cls), indent=1, allow_nan=False) + "\n")
            parser.exit()

    return PrintSchema


def _config(cls: type[Config], options: argparse.Namespace, flags: Iterable[str]) -> Config:
    tree = read_config(options.config) if options.config else {}
    given = {flag: getattr(options, flag) for flag in (f.replace("-", "_") for f in flags)}
    tree |= {flag: value for flag, value in given.items() if value is not None}
    for override in options.overrides:
        apply_override(tree, override)
    if options.function_from is not None:
        tree = renamed_functions(tree, options.function_from)
        if "function_from" in cls.__pydantic_fields__:  # of the run that is read
            tree["function_from"] = options.function_from
    return from_tree(cls, tree)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def take_huge_pages() -> None:
    """Start this program again with huge pages for what malloc gives it, where it has to ask.

    XLA's CPU backend frees a program's scratch when it ends and takes it anew for the next one. In
    pages of 4 KiB the kernel's part of that is a third of a small model's update. glibc decides
    when a process starts, by GLIBC_TUNABLES; a process that has this variable is left alone.
    """
    known = "CS_GNU_LIBC_VERSION" in os.confstr_names
    name, _, version = ((known and os.confstr("CS_GNU_LIBC_VERSION")) or "").partition(" ")
    knows = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    if not knows or "GLIBC_TUNABLES" in os.environ or not HUGE_PAGES.exists():
        return
    if "[madvise]" in HUGE_PAGES.read_text():  # else all have them, or none
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _report(error: Exception, status: int) -> int:
    lines = error.args if isinstance(error, ConfigError) else [error]
    for line in lines:
        sys.stderr.write(f"error: {' '.join(str(line).split())}\n")
    return status


def _help_lines(cls: type[Section]) -> list[str]:
    lines = []
    for key, default, meaning in describe(cls, optional=True):
        shown = default if default == "(required)" else f"(default {default})"
        lines.append(f"  {key}  {shown}\n      {meaning}")
    return lines
