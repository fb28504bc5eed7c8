"""Slow tests that guard paths are left out only where nothing of these has changed."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/properties/test_meshes.py"


@pytest.fixture(scope="module")
def guards():
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def item(nodeid, *, slow=True, paths=("models/", "algorithms/losses.py")):
    return SimpleNamespace(
        nodeid=nodeid,
        get_closest_marker=lambda name: (slow and name == "slow") or None,
        iter_markers=lambda name: [SimpleNamespace(args=paths)],
    )


@pytest.mark.parametrize(
    ("changed", "wait"),
    [
        (["README.md", "jaxrl_llm/models.py", "algorithms/kl.py"], True),
        (["README.md", "models/hf/files.py"], False),
        (["algorithms/losses.py"], False),
        ([FILE], False),
    ],
)
def test_a_test_waits_unless_its_paths_have_changed(guards, changed, wait):
    nodes = [f"{FILE}::test[{number}]" for number in range(8)]
    waiting = [sum(guards._may_wait(item(n), changed, turn) for turn in range(4)) for n in nodes]
    assert waiting == [3 * wait] * 8  # of four commits each test runs in one at least


def test_what_is_not_slow_always_runs(guards):
    for turn in range(4):
        assert not guards._may_wait(item(f"{FILE}::test", slow=False), [], turn)


def test_of_many_slow_tests_some_run_at_each_commit_and_in_time_all(guards):
    nodes = [item(f"{FILE}::test[{number}]") for number in range(12)]
    quick = item(f"{FILE}::quick", slow=False)
    changed = [item("tests/other.py::test")]
    ran = set()
    for commits in range(20):
        above = guards._above(4, [*nodes, quick, *changed], nodes[:2], ["tests/other.py"], commits)
        assert len(above) == 7  # of ten, three run beside the one whose file has changed
        assert all(node not in above for node in (*nodes[:2], quick, *changed))
        ran |= {node.nodeid for node in nodes[2:] if node not in above}
    assert len(ran) == 10
    assert guards._above(None, nodes, [], [], 0) == []


def test_more_slow_tests_whose_own_files_have_changed_than_the_limit(guards):
    """Only so many run, at another commit others, and no test of a file that has not changed."""
    changed = [item(f"{FILE}::test[{number}]") for number in range(12)]
    nodes = [item("tests/other.py::test"), *changed]
    ran = []
    for commits in range(20):
        above = guards._above(4, nodes, [], [FILE], commits)
        ran.append({node.nodeid for node in nodes if node not in above})
    assert [len(some) for some in ran] == [4] * 20
    assert set.union(*ran) == {node.nodeid for node in changed}


@pytest.mark.parametrize("paths", [(), ("models/", "nowhere/")])
def test_a_slow_test_names_paths_that_exist(guards, paths):
    config = SimpleNamespace(rootpath=ROOT, getoption=lambda name: None)
    guards.pytest_collection_modifyitems(config, [item(f"{FILE}::test")])
    with pytest.raises(pytest.UsageError, match="is slow; expected paths"):
        guards.pytest_collection_modifyitems(config, [item(f"{FILE}::test", paths=paths)])
