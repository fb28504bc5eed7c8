"""List what the pages show that was measured, and how old it is; make it again.

    python -m benchmarks.figures                     every figure, its date, and that of its code
    python -m benchmarks.figures --check             those that are older than the code they measure
    python -m benchmarks.figures --remake balance    runs the commands of these, one after the other
    python -m benchmarks.figures --remake            of all that are older and need nothing else

`figures.yaml` beside this file says which figure stands where, which command makes it and which
code it measures. A figure is older if a commit that its own does not contain has changed that code.
What is changed and not committed counts as new. Several files of one figure are made together, so
that the newest of them counts.

Exit status 1: with `--check` a figure is older; with `--remake` a command failed.
"""

import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tables import markdown_table, parser_of
from jaxrl_llm.reporting.health import anchor

ROOT = Path(__file__).resolve().parents[1]
UNCOMMITTED = "0" * 40
FENCE = "```"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One entry of figures.yaml.

    Attributes:
        name: of the entry.
        figures: files, or `PAGE#heading` for the tables and listings below a heading.
        commands: that make them again, one after the other.
        code: the paths of what is measured.
        takes: how long the commands run, in words.
        needs: what has to be there first, in words; empty if nothing.
        by_hand: whether the commands only print what a person puts into the page.
    """

    name: str
    figures: tuple[str, ...]
    commands: tuple[str, ...]
    code: tuple[str, ...]
    takes: str
    needs: str = ""
    by_hand: bool = False


def read_figures(path: Path) -> list[Figure]:
    """Read the entries of a file such as figures.yaml."""
    return [_figure(name, entry) for name, entry in yaml.safe_load(path.read_text()).items()]


def _figure(name: str, entry: dict[str, Any]) -> Figure:
    command = entry.pop("command")
    commands = (command,) if isinstance(command, str) else tuple(command)
    paths = {key: tuple(_flat(entry.pop(key))) for key in ("figures", "code")}
    return Figure(name=name, commands=commands, **paths, **entry)


def _flat(paths: Sequence[Any]) -> Iterator[str]:
    """Yield paths; a list that stands for one is an anchor's of the file."""
    for path in paths:
        yield from [path] if isinstance(path, str) else path


def measured_lines(text: str, heading: str) -> list[int]:
    """Return the numbers, from 1 on, of the lines of tables and listings below a heading.

    Args:
        text: of a Markdown page.
        heading: what a link to it ends with. What is below it ends at the next heading of its level
            or above.

    Raises:
        KeyError: there is no such heading.
    """
    level, is_listing, found = 0, False, []
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.startswith(FENCE)
        head = None if is_listing else re.match(r"(#+) (.+)", line)
        if head and anchor(head[2]) == heading:
            level = len(head[1])
        elif head and level and len(head[1]) <= level:
            return found
        elif level and (is_listing or is_fence or line.startswith("|")):
            found.append(number)
        is_listing ^= is_fence
    if not level:
        raise KeyError(f"no heading with the anchor {heading!r}")
    return found


def git(root: Path, *words: str) -> str:
    """Return what a git command prints in a repository.

    Raises:
        SystemExit: it failed; with what it said.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def commit_of(root: Path, figure: str) -> str:
    """Return the newest commit that has changed a file, or the tables below a heading of a page.

    It is `UNCOMMITTED` if they are changed and not committed.

    Raises:
        SystemExit: there is no such file.
    """
    path, _, heading = figure.partition("#")
    if not (root / path).exists():
        raise SystemExit(f"figures.yaml names {path}: no such file")
    if not heading:
        changed = git(root, "status", "--porcelain", "--", path)
        return UNCOMMITTED if changed else git(root, "log", "-1", "--format=%H", "--", path).strip()
    lines = measured_lines((root / path).read_text(encoding="utf-8"), heading)
    blamed = git(root, "blame", "--line-porcelain", "--", path)
    commits = re.findall(r"^([0-9a-f]{40}) \d+ (\d+)", blamed, re.MULTILINE)
    return newest(root, {commit for commit, line in commits if int(line) in lines})


def newest(root: Path, commits: set[str]) -> str:
    """Return the newest of some commits; `UNCOMMITTED` is newer than any."""
    if UNCOMMITTED in commits:
        return UNCOMMITTED
    return git(root, "rev-list", "--no-walk", "--max-count=1", *commits).strip()


@dataclasses.dataclass(frozen=True)
class Age:
    """How old a figure is.

    Attributes:
        made: the day of its newest commit; "not committed" if it is newer.
        changed: the day of the newest commit to what it measures.
        since: the commits to what it measures that its own does not contain, the newest first.
    """

    made: str
    changed: str
    since: tuple[str, ...]


def age_of(root: Path, figure: Figure) -> Age:
    """Return how old a figure is, by the repository's commits."""
    commit = newest(root, {commit_of(root, one) for one in figure.figures})
    changed = git(root, "log", "-1", "--format=%cs", "--", *figure.code).strip()
    if commit == UNCOMMITTED:
        return Age("not committed", changed, ())
    made = git(root, "log", "-1", "--format=%cs", commit).strip()
    log = git(root, "log", "--format=%h %s", f"{commit}..HEAD", "--", *figure.code)
    return Age(made, changed, tuple(log.splitlines()))


def listing(figures: Sequence[Figure], ages: Sequence[Age]) -> str:
    """Return figures and their ages as a Markdown table."""
    rows = [
        (f.name, age.made, age.changed, len(age.since) or "", f.takes, f.needs)
        for f, age in zip(figures, ages, strict=True)
    ]
    return markdown_table(("figure", "made", "code", "commits since", "takes", "needs"), rows)


def remake(figures: Sequence[Figure], root: Path) -> list[str]:
    """Run the commands of some figures; return the names of those of which one failed."""
    failed = []
    for figure in figures:
        print(f"\n{figure.name}: {', '.join(figure.figures)} ({figure.takes})", flush=True)
        for command in figure.commands:
            print(f"$ {command}", flush=True)
            words = [sys.executable if w == "python" else w for w in shlex.split(command)]
            if subprocess.run(words, cwd=root, check=False).returncode:
                failed.append(figure.name)
                break
        else:
            if figure.by_hand:
                print("put what is printed above into the page", flush=True)
    return failed


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """List, check or make again."""
    figures = {f.name: f for f in read_figures(root / "benchmarks/figures.yaml")}
    parser = parser_of(__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only those that are older")
    action.add_argument("--remake", action="store_true", help="run their commands")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of figures.yaml; else all")
    args = parser.parse_args(words)
    unknown = [name for name in args.names if name not in figures]
    if unknown:
        parser.error(f"no figures {', '.join(unknown)}; expected some of {', '.join(figures)}")
    chosen = [figures[name] for name in args.names or figures]
    if args.remake and args.names:
        return int(bool(remake(chosen, root)))
    ages = [age_of(root, figure) for figure in chosen]
    older = [figure for figure, age in zip(chosen, ages, strict=True) if age.since]
    if args.remake:
        return int(bool(remake([figure for figure in older if not figure.needs], root)))
    shown = older if args.check else chosen
    print(listing(shown, [age for f, age in zip(chosen, ages, strict=True) if f in shown]))
    return int(args.check and bool(older))


if __name__ == "__main__":
    sys.exit(main())
