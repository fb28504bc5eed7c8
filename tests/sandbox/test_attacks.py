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

IS_X86 = platform.machine() == "x86_64"
pytestmark = [
    needs_landlock,
    pytest.mark.skipif(not IS_X86, reason="the attacks use numbers of system calls"),
]
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


@pytest.mark.parametrize(
    "is_slow", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.guards(*GUARDED)])]
)
def test_attacks_end_in_told_errors(target, case, subtests, is_slow):
    for chosen in (each for each in read_attacks() if bool(each.slow) == is_slow):
        with subtests.test(chosen.name):
            result, damage = attack(target, chosen, case)
            assert damage == []
            assert result.reason or (result.failure is None and not is_slow)


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
