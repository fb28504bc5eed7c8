"""The limits of docs/architecture.md on the length of functions and files, and on names."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.code.structure import (
    LIBRARY,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MAX_PARAMETERS,
    count_lines,
    find_duplicates,
    list_files,
    list_functions,
)

ROOT = Path(__file__).resolve().parents[2]
MANY_PARAMETERS = {
    ("configs/tasks/arithmetic.py", "arithmetic"): "each is a key of a config",
    ("configs/tasks/pictures.py", "pictures"): "each is a key of a config",
    ("configs/tasks/reasoning_gym.py", "reasoning_gym"): "each is a key of a config",
    ("jaxrl_llm/rewards/remote.py", "judge"): "each is a key of a config",
}
LONG_FILES: dict[str, str] = {}
"""Tables of data, and why they stand in one file."""

LEVELS = ("expression", "process", "service")
NAMED_IN_CONFIGS = {f"jaxrl_llm/sandbox/{level}.py" for level in LEVELS}
"""Files whose functions a config names by kind: a level of isolation."""


@pytest.fixture(scope="module")
def sources():
    return list_files(ROOT, (*LIBRARY, "benchmarks", "configs"))


def test_functions_are_short(sources):
    long = {
        (f.path, f.name, f.lines) for f in list_functions(sources) if f.lines > MAX_FUNCTION_LINES
    }
    assert long == set()


def test_functions_have_few_parameters(sources):
    many = {(f.path, f.name) for f in list_functions(sources) if f.parameters > MAX_PARAMETERS}
    assert many == MANY_PARAMETERS.keys()


def test_files_are_short(sources):
    long = {path for path, lines in count_lines(sources).items() if lines > MAX_FILE_LINES}
    assert long == LONG_FILES.keys()


def test_no_public_name_is_defined_twice():
    defined = find_duplicates(list_files(ROOT))
    duplicates = {
        n: paths for n, paths in defined.items() if not NAMED_IN_CONFIGS.issuperset(paths)
    }
    assert duplicates == {}


def test_errors_are_matched_by_a_name_and_not_by_their_words():
    """So that a sentence can be mended: `tests/messages.txt` has those that are kept."""
    spoken = [
        f"{path}:{node.value.lineno}"
        for path, source in list_files(ROOT, ("tests",)).items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.keyword) and node.arg == "match"
        for text in ast.walk(node.value)
        if isinstance(text, ast.Constant) and re.search(r"[a-z],? [a-z]", str(text.value))
    ]
    assert spoken == []
