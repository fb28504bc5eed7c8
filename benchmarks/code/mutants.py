"""Show what the tests catch: small faults in the core, and the test that finds each.

    pip install pytest-cov
    python -m benchmarks.code.mutants cover coverage.db
    python -m benchmarks.code.mutants run coverage.db before.json
    python -m benchmarks.code.mutants run coverage.db after.json --missed-by before.json
    python -m benchmarks.code.mutants compare before.json after.json

A mutant is the library with one fault: a comparison that is off by one, a sum that is a
difference, a branch taken the wrong way, a statement left out. They are drawn from `CORE` by a hash
of what they change, so that the same ones are drawn wherever that code is the same.

`cover` runs the default tests once, and records which lines each test runs, line and branch
coverage by folder, and how long each test takes; what pytest says is beside it. `run` gives each
mutant of the last commit to the tests that run its line, the quickest first, until one fails; if
none does, to all of the files that these tests are in. (A program that jax has traced in a process
runs no line again, hence the second try.) With `--missed-by`, only mutants that another record
misses are tried. `compare` names the mutants that only one of two records catches.

`cover` takes about twice the tests' own time, `run` about 20 seconds for each mutant and core.
Exit status 1: `compare` found a mutant that only the first record catches.
"""

import ast
import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from benchmarks.tables import parser_of

ROOT = Path(__file__).resolve().parents[2]
CORE = {
    "algorithms/losses.py": 14,
    "algorithms/advantages.py": 16,
    "algorithms/preferences.py": 8,
    "algorithms/reduce.py": 5,
    "algorithms/kl.py": 5,
    "algorithms/logprobs.py": 6,
    "jaxrl_llm/data/packing.py": 12,
    "jaxrl_llm/data/turns.py": 8,
    "jaxrl_llm/data/chat.py": 10,
    "jaxrl_llm/training/forward.py": 8,
    "jaxrl_llm/training/update.py": 8,
    "jaxrl_llm/training/experience.py": 8,
    "jaxrl_llm/training/buffer.py": 8,
    "jaxrl_llm/rollout/native/scheduler.py": 12,
    "jaxrl_llm/rollout/native/page_pool.py": 12,
    "jaxrl_llm/rollout/native/sampler.py": 8,
    "jaxrl_llm/runs/checkpoint.py": 8,
    "jaxrl_llm/config/load.py": 6,
    "jaxrl_llm/config/programs.py": 6,
}
"""How many mutants are drawn from each file."""

SWAPS = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"},
    **{ast.And: "or", ast.Or: "and"},
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
CALLS |= {"minimum": "maximum", "maximum": "minimum", "argmax": "argmin", "zeros": "ones"}
FIRST_S, SECOND_S = 60, 420  # of tests by their durations, and at most, for a mutant
RESULT = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Mutant(NamedTuple):
    """One fault.

    Attributes:
        path: of the file.
        place: function and change, which tell it apart from all others.
        line: of the change, from 1.
        start, end: bytes of the file that are replaced.
        text: what replaces them.
    """

    path: str
    place: str
    line: int
    start: int
    end: int
    text: str


class Faults(ast.NodeVisitor):
    """Find all faults that can be put into a file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self.bytes = source.encode()
        lines = self.bytes.splitlines(keepends=True)
        self.offsets = [sum(map(len, lines[:n])) for n in range(len(lines))]
        self.names: list[str] = []
        self.seen: dict[str, int] = defaultdict(int)
        self.found: list[Mutant] = []

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the bytes where a node begins and ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.offsets[node.lineno - 1] + node.col_offset
        return start, self.offsets[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Return the source of a node."""
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def add(self, node: ast.expr | ast.stmt, start: int, end: int, text: str) -> None:
        """Keep a fault, which replaces some bytes near a node."""
        old = self.bytes[start:end].decode()
        place = f"{'.'.join(self.names)}: {' '.join(self.text(node).split())[:80]}: {old} -> {text}"
        self.seen[place] += 1
        place += f" #{self.seen[place]}"
        self.found.append(Mutant(self.path, place, node.lineno, start, end, text))

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Keep a fault that replaces a whole node."""
        self.add(node, *self.span(node), text)

    def between(self, node: ast.expr, left: ast.expr, op: ast.AST, right: ast.expr) -> None:
        """Keep a fault in the operator between two expressions."""
        new = SWAPS.get(type(op))
        start, end = self.span(left)[1], self.span(right)[0]
        words = self.bytes[start:end].decode()
        old = re.search(r"not in|is not|//|\*\*|[<>=!]=|[<>]|\b(?:in|is|and|or)\b|[-+*/]", words)
        if new and old:
            self.add(node, start + old.start(), start + old.end(), new)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Go into a body, but into no annotation, default or docstring."""
        self.names.append(node.name)
        has_docstring = ast.get_docstring(node, clean=False) is not None
        for statement in node.body[has_docstring:]:
            self.visit(statement)
        self.names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Go into the methods."""
        self.names.append(node.name)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.visit(statement)
        self.names.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave an error out; its text holds no fault."""
        self.replace(node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave asserts as they are."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts as they are."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Go past the annotation."""
        if node.value:
            self.visit(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        """Keep the faults of a node, and go into it."""
        if self.names:
            self.faults(node)
        super().generic_visit(node)

    def faults(self, node: ast.AST) -> None:
        """Keep the faults that a node has itself."""
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for a, op, b in zip([left, *others], ops, others, strict=False):
                    self.between(node, a, op, b)
            case ast.BinOp(left=left, op=op, right=right):
                self.between(node, left, op, right)
            case ast.BoolOp(values=[first, second, *_], op=op):
                self.between(node, first, op, second)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                self.replace(node, self.text(operand))
            case ast.Constant(value=bool() as value):
                self.replace(node, str(not value))
            case ast.Constant(value=int() as value):
                self.replace(node, str(value + 1))
            case ast.Constant(value=float() as value):
                self.replace(node, str(value + 0.5))
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                self.replace(test, f"not ({self.text(test)})")
            case ast.comprehension(ifs=[condition, *_]):
                self.replace(condition, "True")
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                self.replace(node, "pass")
            case ast.Call(func=ast.Name(id=name) as function) if name in CALLS:
                self.replace(function, CALLS[name])
            case ast.Call(func=ast.Attribute(attr=name) as function) if name in CALLS:
                self.add(
                    function,
                    self.span(function)[1] - len(name),
                    self.span(function)[1],
                    CALLS[name],
                )
            case ast.Call(func=ast.Attribute(attr="where"), args=[_, a, b]):
                self.add(node, self.span(a)[0], self.span(b)[1], f"{self.text(b)}, {self.text(a)}")
            case _:
                pass


def drawn(root: Path) -> list[Mutant]:
    """Return the mutants of a checkout, in the order of files and lines."""
    chosen = []
    for path, count in CORE.items():
        faults = Faults(path, (root / path).read_text())
        faults.visit(ast.parse(faults.source))
        ranked = sorted(faults.found, key=lambda m: hashlib.sha256(m.place.encode()).digest())
        chosen += sorted(ranked[:count], key=lambda mutant: mutant.line)
    return chosen


def cover(root: Path, database: Path, tests: Sequence[str]) -> None:
    """Run the default tests, or some; record lines by test, coverage by folder and durations."""
    words = [sys.executable, "-m", "pytest", "--cov-branch", "--durations=0"]
    words += [f"--cov={folder}" for folder in ("jaxrl_llm", "algorithms", "models", "sharding")]
    report, output = database.with_suffix(".json"), database.with_suffix(".txt")
    words += ["--cov-context=test", f"--cov-report=json:{report}", "-vv", *tests]
    database.unlink(missing_ok=True)
    with output.open("w") as file:
        environ = os.environ | {"COVERAGE_FILE": str(database)}
        subprocess.run(words, cwd=root, env=environ, stdout=file, check=False)
    took = durations(output)
    with sqlite3.connect(database) as connection:
        connection.execute("create table duration (test text primary key, seconds real)")
        connection.executemany("insert into duration values (?, ?)", took.items())
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path, file in json.loads(report.read_text())["files"].items():
        sums, one = folders[Path(path).parent.as_posix()], file["summary"]
        for i, key in enumerate(("covered_lines", "num_statements")):
            sums[i] += one[key]
        for i, key in enumerate(("covered_branches", "num_branches"), 2):
            sums[i] += one[key]
    print("| folder | lines | branches |\n|---|---|---|")
    for folder, (lines, all_lines, branches, all_branches) in sorted(folders.items()):
        shares = [
            f"{100 * a / b:.1f} %" if b else ""
            for a, b in ((lines, all_lines), (branches, all_branches))
        ]
        print(f"| {folder} | {shares[0]} | {shares[1]} |")


def durations(output: Path) -> dict[str, float]:
    """Return the seconds of each test, set-up included, from what pytest wrote."""
    seconds: dict[str, float] = defaultdict(float)
    for match in re.finditer(
        r"^([\d.]+)s (?:setup|call|teardown) +(.+)$", output.read_text(), re.M
    ):
        seconds[match[2]] += float(match[1])
    return seconds


def tests_of(database: Path) -> dict[tuple[str, int], list[str]]:
    """Return the tests that run each line of the core, the quickest first."""
    tests: dict[tuple[str, int], set[str]] = defaultdict(set)
    with sqlite3.connect(database) as connection:
        seconds = dict(connection.execute("select test, seconds from duration"))
        files = dict(connection.execute("select id, path from file"))
        contexts = dict(connection.execute("select id, context from context"))
        paths = {key: Path(path).as_posix() for key, path in files.items()}
        core = {key: p for key, path in paths.items() for p in CORE if path.endswith(f"/{p}")}
        arcs = "select file_id, context_id, abs(fromno), abs(tono) from arc"
        for file, context, first, last in connection.execute(arcs):
            if file in core and "|" in contexts[context]:
                test = contexts[context].partition("|")[0]
                tests[core[file], first].add(test)
                tests[core[file], last].add(test)
    return {at: sorted(found, key=lambda t: seconds.get(t, 0.0)) for at, found in tests.items()}


def run(
    root: Path, database: Path, record: Path, workers: int, missed_by: Path | None = None
) -> None:
    """Give each mutant to its tests, and write which test caught it, or none."""
    others = json.loads(missed_by.read_text()) if missed_by else {}
    tests = tests_of(database)
    with sqlite3.connect(database) as connection:
        seconds = dict(connection.execute("select test, seconds from duration"))
    results: dict[str, str | None] = json.loads(record.read_text()) if record.exists() else {}
    clones: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as temporary:
        for worker in range(workers):
            clones.put(Path(temporary) / str(worker))
            words = ["git", "clone", "-q", str(root), f"{temporary}/{worker}"]
            subprocess.run(words, check=True)
        mutants = drawn(Path(temporary) / "0")

        def one(mutant: Mutant) -> tuple[Mutant, str | None]:
            clone = clones.get()
            try:
                return mutant, caught(
                    mutant, tests.get((mutant.path, mutant.line), []), seconds, clone
                )
            finally:
                clones.put(clone)

        with ThreadPoolExecutor(workers) as executor:
            done = {*results, *(place for place, test in others.items() if test)}
            left = [m for m in mutants if f"{m.path} {m.place}" not in done]
            for mutant, test in executor.map(one, left):
                results[f"{mutant.path} {mutant.place}"] = test
                record.write_text(json.dumps(results, indent=1))
                print(f"{mutant.path}:{mutant.line} {mutant.place}: {test}", flush=True)
    missed = sum(test is None for test in results.values())
    print(f"{len(results) - missed} of {len(results)} caught")


def caught(
    mutant: Mutant, tests: Sequence[str], seconds: dict[str, float], clone: Path
) -> str | None:
    """Return the first test that fails with a mutant; None: none does."""
    path = clone / mutant.path
    original = path.read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.text.encode() + original[mutant.end :])
    try:
        for chosen, limit in tries(tests, seconds):
            words = [sys.executable, "-m", "pytest", "-x", "-q", "--numprocesses=0", "--tb=no"]
            words += [
                "-p",
                "no:randomly",
                "-o",
                f"cache_dir={clone.parent / 'cache'}",
                "--timeout=120",
            ]
            try:
                done = subprocess.run(
                    [*words, *chosen],
                    cwd=clone,
                    capture_output=True,
                    text=True,
                    timeout=limit + 300,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "a time limit"
            if done.returncode not in (0, 5):
                failed = RESULT.search(done.stdout)
                return failed[1] if failed else f"pytest, status {done.returncode}"
        return None
    finally:
        path.write_bytes(original)


def tries(tests: Sequence[str], seconds: dict[str, float]) -> Iterator[tuple[list[str], float]]:
    """Yield what is run for a mutant: the quickest tests of its line, then the files of all."""
    first, left = list[str](), float(FIRST_S)
    for test in tests:
        if (left := left - seconds.get(test, 0.0)) < 0 or len(first) == 200:
            break
        first.append(test)
    if first or tests:
        yield first or [tests[0]], FIRST_S
    by_file: dict[str, float] = defaultdict(float)
    for test, took in seconds.items():
        by_file[test.partition("::")[0]] += took
    files, left = list[str](), float(SECOND_S)
    for file in sorted({test.partition("::")[0] for test in tests}, key=lambda f: by_file[f]):
        if (left := left - by_file[file]) >= 0:
            files.append(file)
    if files:
        yield files, SECOND_S


def compare(before: Path, after: Path) -> int:
    """Print which mutants one record alone catches; return how many only the first does."""
    first, second = (json.loads(path.read_text()) for path in (before, after))
    both = first.keys() & second.keys()
    lost = [place for place in both if first[place] and not second[place]]
    won = [place for place in both if second[place] and not first[place]]
    for title, places in (("caught before alone", lost), ("caught now alone", won)):
        print(f"{title}: {len(places)}")
        for place in sorted(places):
            print(f"  {place}: {first[place] or second[place]}")
    print(
        f"{len(both)} in both records; caught {sum(map(bool, first.values()))} and "
        f"{sum(map(bool, second.values()))} of {len(first)} and {len(second)}"
    )
    return len(lost)


def main(words: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the mutants")
    one = commands.add_parser("cover", help="record which test runs which line")
    one.add_argument("database", type=Path)
    one.add_argument("tests", nargs="*", help="files or folders; all, if none is given")
    one = commands.add_parser("run", help="give each mutant to its tests; goes on with a record")
    one.add_argument("database", type=Path)
    one.add_argument("record", type=Path)
    one.add_argument("--workers", type=int, default=2)
    one.add_argument("--missed-by", type=Path, help="a record: leave out the mutants it catches")
    one = commands.add_parser("compare", help="compare two records")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    args = parser.parse_args(words)
    match args.command:
        case "list":
            for mutant in drawn(ROOT):
                print(f"{mutant.path}:{mutant.line} {mutant.place}")
        case "cover":
            cover(ROOT, args.database.resolve(), args.tests)
        case "run":
            run(ROOT, args.database, args.record, args.workers, args.missed_by)
        case _:
            return int(compare(args.before, args.after) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
