"""Slow tests that guard paths are left out only where nothing of these has changed."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE = "tests/properties/test_meshes.py"


@pytest.fixture(scope="module")
def guards():
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_path_in_the_table_exists(guards):
    for test, paths in guards.GUARDED.items():
        for pattern in (test, *paths):
            assert list(ROOT.glob(pattern)), pattern


def item(nodeid, *, slow=True):
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: slow or None)


@pytest.mark.parametrize(
    ("changed", "wait"),
    [
        (["README.md", "models/hf.py"], True),
        (["models/moe/mixture.py"], False),
        (["algorithms/losses.py"], False),
        ([FILE], False),
        (["pyproject.toml"], False),
    ],
)
def test_a_test_waits_unless_its_paths_have_changed(guards, changed, wait):
    nodes = [f"{FILE}::test[{number}]" for number in range(8)]
    waiting = [sum(guards._may_wait(item(n), changed, turn) for turn in range(4)) for n in nodes]
    assert waiting == [3 * wait] * 8  # of four commits each test runs in one at least


def test_what_is_not_slow_or_guards_nothing_always_runs(guards):
    for turn in range(4):
        assert not guards._may_wait(item(f"{FILE}::test", slow=False), [], turn)
        assert not guards._may_wait(item("tests/e2e/test_cluster.py::test"), [], turn)
