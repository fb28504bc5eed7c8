"""One run by several processes: the same metrics and parameters, everything written once."""

import json
import socket

import pytest

from jaxrl_llm.cli import PREEMPTED
from tests.e2e.comparing import EXACTLY, close, count_lines
from tests.guarded import RUN

pytestmark = pytest.mark.guards(*RUN, "jaxrl_llm/train.py")

MESH = ("mesh.train={data: 2, fsdp: 4}",)


@pytest.fixture
def start(workshop, monkeypatch):
    """Starts a program as two processes, each with four devices."""

    def run(*overrides, run_dir, own=((), ())):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        variables |= {"JAX_NUM_CPU_DEVICES": "4"}
        started = []
        for number, words in enumerate(own):
            with monkeypatch.context() as patch:
                for name, value in {**variables, "JAX_PROCESS_ID": str(number)}.items():
                    patch.setenv(name, value)
                started.append(workshop.start(*overrides, *words, run_dir=run_dir))
        return started

    return run


@pytest.fixture
def two(workshop, start):
    """Runs `train` as two processes; returns what both leave."""

    def run(*overrides, run_dir=None, **own):
        run_dir = run_dir or workshop.folder()
        return [workshop.finish(p, run_dir) for p in start(*overrides, run_dir=run_dir, **own)]

    return run


def test_two_processes_do_what_one_does(workshop, two, plain):
    first, second = (result.ok() for result in two(*EXACTLY, *MESH))
    close(workshop, first, plain, apart="global_seqlen")  # the load of each device
    assert "step 2/2" in first.out and "step" not in second.out
    written, other = (
        {p.relative_to(r.run_dir) for p in r.run_dir.rglob("*")} for r in (first, plain)
    )
    assert {p for p in written ^ other if p.parts[0] != "checkpoints"} == set()
    assert json.loads((first.run_dir / "versions.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_mesh_and_another_number_of_processes(workshop, two):
    """Two processes save, one goes on, two go on after it; each with its own mesh."""
    words = (*EXACTLY, "validation.every=1")
    expected = workshop(*words, *MESH, "steps=6", "checkpoint.every=2", devices=8).ok()
    first, _ = (result.ok() for result in two(*words, *MESH, "steps=2"))
    run_dir = first.run_dir
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["2"]
    one = workshop(*words, "mesh.train={tensor: 2}", "steps=4", run_dir=run_dir, devices=2).ok()
    assert one.steps == [0, 1, 2, 3, 4]
    mesh = ("mesh.train={data: 2, fsdp: 2, tensor: 2}", "mesh.rollout={data: 4, tensor: 2}")
    first, second = (result.ok() for result in two(*words, *mesh, "steps=6", run_dir=run_dir))
    assert "continuing after step 4" in first.err and "continuing" not in second.err
    close(workshop, first, expected, apart="global_seqlen")  # the load of each device


FAILING = """
import os
def score(data_source, solution_str, ground_truth, extra_info=None):
    if os.environ["JAX_PROCESS_ID"] == "1":
        raise ValueError("not here")
    return 1.0
"""


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(workshop, two):
    """Where their configs differ all of them say the same, and nothing is begun."""
    differ = ((), ("optim.schedule.value=0.1", "seed=7", "steps=9"))
    for result in two("optim.schedule.value=0.001", "seed=0", "steps=3", own=differ):
        assert result.status == 2 and "seed=7" in result.err, result.err
        assert not result.run_dir.exists()
    for result in two("rollout.tools=[calculator]"):
        result.refused("rollout.tools")
    (workshop.root / "failing.py").write_text(FAILING)
    words = (f"reward.function={workshop.root}/failing.py:score", "reward.on_error=null", "steps=1")
    first, second = two(*words, "reward.pass_env=[JAX_PROCESS_ID]")
    assert first.status == 1 and "process 1 failed: RewardError: " in first.err
    assert second.status == 1 and "\nerror: reward " in f"\n{second.err}"


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_the_run_goes_on(workshop, two, start, until):
    run_dir = workshop.folder()
    words = (*EXACTLY, *MESH, "steps=4", "checkpoint.every=1")
    expected = workshop(*words, devices=8).ok()
    first, second = start(*words, run_dir=run_dir)
    assert until(lambda: count_lines(run_dir / "metrics.jsonl") >= 3, second)
    second.kill()
    result = workshop.finish(first, run_dir)
    assert result.status == 1 and f"PID {second.pid}" in result.err
    second.communicate()
    again, _ = (result.ok() for result in two(*words, run_dir=run_dir))
    close(workshop, again, expected)


@pytest.mark.slow
def test_a_folder_in_use_is_refused_and_a_signal_to_one_process_saves_all(
    workshop, two, start, until
):
    run_dir, words = workshop.folder(), (*MESH, "steps=5000")
    running = start(*words, run_dir=run_dir)
    assert until((run_dir / "versions.json").exists, running[0])
    for result in two(*words, run_dir=run_dir):
        assert result.status == 2 and "error: run_dir: " in result.err
    assert until(lambda: count_lines(run_dir / "metrics.jsonl") > 1, running[0])
    running[1].terminate()
    results = [workshop.finish(process, run_dir) for process in running]
    last = results[0].steps[-1]
    for result in results:
        assert result.status == PREEMPTED, result.err
        assert f"step {last} of 5000" in result.err.splitlines()[-1]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [str(last)]
