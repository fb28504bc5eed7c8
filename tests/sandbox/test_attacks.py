import os
import platform
import shutil
import subprocess
import sys

import pytest

from benchmarks.sandbox.attacks import read_attacks
from benchmarks.sandbox.run_attacks import attack, opens
from benchmarks.sandbox.target import Target
from tests.sandboxes import needs_landlock

pytestmark = [
    needs_landlock,
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the attacks use numbers of system calls"
    ),
]
FAST = [chosen for chosen in read_attacks() if not chosen.slow]
SLOW = [chosen for chosen in read_attacks() if chosen.slow]
GUARDED = ("jaxrl_llm/sandbox/", "benchmarks/sandbox/")


@pytest.fixture(scope="module", params=["process", "process without namespaces"])
def case(request):
    with opens(request.param, keep_state=False) as tried:
        result = tried.run("1")
    if "can't read the standard library" in result.reason:  # Python is in root's home
        pytest.skip(result.reason)
    return request.param


@pytest.fixture(scope="module")
def target(case):
    opened = Target(lambda: opens(case, keep_state=True))
    yield opened
    opened.close()


def test_attacks_end_in_told_errors(target, case, subtests):
    for chosen in FAST:
        with subtests.test(chosen.name):
            result, damage = attack(target, chosen, case)
            assert damage == []
            assert result.failure is None or result.reason


@pytest.mark.slow
@pytest.mark.guards(*GUARDED)
def test_attacks_on_time_end_in_told_errors(target, case, subtests):
    for chosen in SLOW:
        with subtests.test(chosen.name):
            result, damage = attack(target, chosen, case)
            assert damage == []
            assert result.reason


@pytest.mark.slow
@pytest.mark.guards(*GUARDED)
@pytest.mark.skipif(os.geteuid() != 0, reason="all tests are those of an ordinary user")
@pytest.mark.parametrize("case", ["process", "process without namespaces"], indirect=False)
def test_an_ordinary_user_is_as_safe_as_root(case):
    if shutil.which("python3", path="/usr/bin:/bin") is None:
        pytest.skip("needs a Python that every user can run")
    command = [sys.executable, "-m", "benchmarks.sandbox.run_attacks", "--as-nobody", case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "**" not in done.stdout
