"""Print the structure of the code in one or more checkouts as a Markdown table.

    git worktree add ../before c5337bd
    python -m benchmarks.code.structure ../before .

One column for each directory. `tests/repository/test_style.py` holds the limits by the same
functions. A file's lines of code are those that are neither blank nor comment nor docstring; a
function's lines are all from its `def` to its end, and nested functions count for themselves too.
Imports inside functions and under `if TYPE_CHECKING:` count as any other.
"""

import ast
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.tables import parser_of

PACKAGE = "jaxrl_llm"
LINKED = ("algorithms", "models", "sharding", "configs")
"""Folders at the top of the repository that are imported through links in the package."""

LIBRARY = (PACKAGE, "algorithms", "models", "sharding")
SIDECAR = "jaxrl_llm/rollout/vllm/sidecar/"
"""Files that run in vLLM's environment, without the package."""

MAX_FUNCTION_LINES = 100
MAX_PARAMETERS = 8
MAX_FILE_LINES = 900  # of code

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """A function or method of a file."""

    path: str
    name: str
    lines: int
    parameters: int  # without self and cls


class Import(NamedTuple):
    """One imported name, absolute: `from a import b` is `a.b`."""

    name: str
    lazy: bool  # inside a function


def list_files(root: Path, folders: Iterable[str] = LIBRARY) -> dict[str, str]:
    """Return the source of each Python file by its path from the root, without linked folders."""
    paths = [path.relative_to(root) for folder in folders for path in (root / folder).rglob("*.py")]
    linked = {(PACKAGE, name) for name in LINKED}
    unlinked = sorted(path.as_posix() for path in paths if path.parts[:2] not in linked)
    return {path: (root / path).read_text(encoding="utf-8") for path in unlinked}


def count_lines(sources: dict[str, str]) -> dict[str, int]:
    """Return each file's number of lines of code.

    >>> count_lines({"a.py": "'A docstring.'\\n\\nx = 1  # one\\n# a comment\\n"})
    {'a.py': 1}
    """
    return {path: len(_code_lines(source)) for path, source in sources.items()}


def _code_lines(source: str) -> set[int]:
    """Return the numbers of the lines with a token that is no comment and no docstring."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    quiet |= {tokenize.ENDMARKER}
    lines, begins = set(), True  # a string where a statement begins is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in quiet:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        if not (begins and token.type == tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return lines


def list_functions(sources: dict[str, str]) -> list[Function]:
    """List all functions and methods, also those inside others."""
    return [
        Function(path, node.name, (node.end_lineno or 0) - node.lineno + 1, _count_parameters(node))
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, FunctionNode)
    ]


def _count_parameters(node: FunctionNode) -> int:
    positional = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    is_bound = positional[:1] in (["self"], ["cls"])
    return len(positional) - is_bound + len(node.args.kwonlyargs)


def find_duplicates(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the public functions and classes that several files define, with these files.

    Programs have a `main` each, and the files of `SIDECAR` are not part of the package.
    """
    defined = defaultdict(list)
    for path, source in sources.items():
        for node in [] if path.startswith(SIDECAR) else ast.parse(source).body:
            if not isinstance(node, FunctionNode | ast.ClassDef):
                continue
            if not node.name.startswith("_") and node.name != "main":
                defined[node.name].append(path)
    return {name: paths for name, paths in sorted(defined.items()) if len(paths) > 1}


def read_imports(path: str, source: str) -> list[Import]:
    """List what a file imports, with relative names made absolute."""
    return list(_walk_imports(path, ast.parse(source), lazy=False))


def _walk_imports(path: str, node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = module_name(path).split(".")
        if not path.endswith("__init__.py"):
            package = package[:-1]
        above = package[: len(package) + 1 - node.level] if node.level else []
        prefix = ".".join([*above, node.module] if node.module else above)
        yield from (Import(f"{prefix}.{alias.name}", lazy) for alias in node.names)
    lazy = lazy or isinstance(node, FunctionNode)
    for child in ast.iter_child_nodes(node):
        yield from _walk_imports(path, child, lazy=lazy)


def module_name(path: str) -> str:
    """Return the name by which a file is imported.

    >>> module_name("models/hf/config.py"), module_name("jaxrl_llm/__init__.py")
    ('jaxrl_llm.models.hf.config', 'jaxrl_llm')
    """
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join([PACKAGE, *parts] if parts[0] in LINKED else parts)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return which of the files' modules each module imports."""
    known = {module_name(path) for path in sources}
    graph = {}
    for path, source in sources.items():
        module = module_name(path)
        modules = {_module_of(name, known) for name, _ in read_imports(path, source)}
        graph[module] = {name for name in modules if name is not None} - {module}
    return graph


def _module_of(name: str, known: set[str]) -> str | None:
    """Return the module that an import loads: itself, or the one that defines its last part."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else None


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return which folders of the library each folder imports from.

    >>> folder_graph({"jaxrl_llm.data.rows": {"jaxrl_llm.config.load"}, "jaxrl_llm.types": set()})
    {'data': {'config'}}
    """
    folders: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if folder := _folder_of(module, graph):
            others = {_folder_of(name, graph) for name in imported} - {folder, None}
            folders.setdefault(folder, set()).update(name for name in others if name)
    return folders


def _folder_of(module: str, graph: dict[str, set[str]]) -> str | None:
    """Return the folder of a module, None where it stands beside the folders."""
    package, _, rest = module.partition(".")
    folder, _, inside = rest.partition(".")
    is_folder = inside or any(name.startswith(f"{module}.") for name in graph)
    return folder if package == PACKAGE and folder and is_folder else None


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """List the groups of modules that import each other, directly or through others."""
    reachable = {module: _reach(module, graph) for module in graph}
    circles = {
        tuple(sorted(o for o in reachable[module] if module in reachable[o]))
        for module in graph
        if module in reachable[module]
    }
    return [list(circle) for circle in sorted(circles)]


def _reach(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        for module in graph[waiting.pop()] - seen:
            seen.add(module)
            waiting.append(module)
    return seen


def _mutual(folders: dict[str, set[str]]) -> list[tuple[str, str]]:
    return [(a, b) for a in sorted(folders) for b in folders[a] if a < b and a in folders[b]]


def _show_limit(name: str, over: list[str]) -> tuple[str, str]:
    return name, f"{len(over)}" + (f": {', '.join(over[:3])}" if over else "")


def describe_structure(root: Path) -> dict[str, str]:
    """Return what the table says of a checkout, by row."""
    sources = list_files(root)
    files = sorted(count_lines(sources).items(), key=lambda item: -item[1])
    functions = sorted(list_functions(sources), key=lambda f: -f.lines)
    lengths = [function.lines for function in functions]
    graph = import_graph(sources)
    counts = sorted(len(modules) for modules in graph.values())
    widest = max(graph, key=lambda module: len(graph[module]))
    at_root = {path for path in sources if Path(path).parent == Path(PACKAGE)}
    at_root -= {f"{PACKAGE}/__init__.py"}
    circles = find_circles(graph)
    rows = [
        ("modules, lines of code", f"{len(files)}, {sum(lines for _, lines in files):,}"),
        ("modules at the package's root", f"{len(at_root)}"),
        (
            "function length: median / p90 / max",
            f"{statistics.median(lengths):.0f} / {statistics.quantiles(lengths, n=10)[-1]:.0f} / "
            f"{lengths[0]}",
        ),
        _show_limit(
            f"functions over {MAX_FUNCTION_LINES} lines",
            [f"`{f.name}` {f.lines}" for f in functions if f.lines > MAX_FUNCTION_LINES],
        ),
        _show_limit(
            f"functions over {MAX_PARAMETERS} parameters",
            [f"`{f.name}` {f.parameters}" for f in functions if f.parameters > MAX_PARAMETERS],
        ),
        ("longest files", ", ".join(f"`{path}` {lines}" for path, lines in files[:3])),
        (
            f"files over {MAX_FILE_LINES} lines of code",
            f"{sum(n > MAX_FILE_LINES for _, n in files)}",
        ),
        (
            "own modules imported by a module: median / max",
            f"{statistics.median(counts):.0f} / {counts[-1]} "
            f"(`{widest.removeprefix(f'{PACKAGE}.')}`)",
        ),
        (
            "circles of imports: modules in each",
            " and ".join(str(len(circle)) for circle in circles) or "none",
        ),
        ("pairs of folders that import each other", f"{len(_mutual(folder_graph(graph)))}"),
        ("public names defined more than once", f"{len(find_duplicates(sources))}"),
    ]
    return dict(rows)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("directory", nargs="+", type=Path)
    directories = parser.parse_args(words).directory
    columns = [describe_structure(directory) for directory in directories]
    print("| |", *(f"{directory} |" for directory in directories))
    print("|---|" + "---|" * len(directories))
    for row in columns[0]:
        print(f"| {row} |", *(f"{column[row]} |" for column in columns))


if __name__ == "__main__":
    main()
