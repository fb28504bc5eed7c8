"""One run by several processes: the same metrics and parameters, everything written once."""

import json
import re
import socket
import time

import numpy as np
import pytest
import yaml

from jaxrl_llm.cli import PREEMPTED
from tests.guarded import RUN
from tests.listening import serving_model

pytestmark = pytest.mark.guards(*RUN, "jaxrl_llm/train.py")

EXACTLY = ("optim.optimizer=sgd", "optim.schedule.value=0.1")  # Adam's first steps amplify rounding
MESH = ("mesh.train={data: 2, fsdp: 4}",)


@pytest.fixture
def start(workshop, monkeypatch):
    """Starts a program as several processes, each with four devices."""

    def run(*overrides, run_dir, count=2, own=((), ()), **options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        started = []
        for number in range(count):
            with monkeypatch.context() as patch:
                patch.setenv("JAX_COORDINATOR_ADDRESS", address)
                patch.setenv("JAX_NUM_PROCESSES", str(count))
                patch.setenv("JAX_PROCESS_ID", str(number))
                patch.setenv("JAX_NUM_CPU_DEVICES", "4")
                words = (*overrides, *own[number]) if number < len(own) else overrides
                started.append(workshop.start(*words, run_dir=run_dir, **options))
        return started

    return run


@pytest.fixture
def two(workshop, start):
    """Runs `train` as two processes; returns what both leave."""

    def run(*overrides, run_dir=None, **options):
        run_dir = run_dir or workshop.folder()
        started = start(*overrides, run_dir=run_dir, **options)
        return [workshop.finish(process, run_dir) for process in started]

    return run


def close(workshop, actual, expected, *, apart=()):
    """Assert that two runs learned the same; metrics whose names begin with `apart` may differ."""
    before = workshop.params(expected.run_dir)
    for name, value in workshop.params(actual.run_dir).items():
        np.testing.assert_allclose(value, before[name], atol=2e-6, err_msg=name)
    assert [line["step"] for line in actual.learned] == [line["step"] for line in expected.learned]
    for a, b in zip(actual.learned, expected.learned, strict=True):
        assert a.keys() == b.keys()
        for name in (name for name in b if not name.startswith(apart)):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_two_processes_do_what_one_does(workshop, two):
    words = (*EXACTLY, *MESH, "rollout.dump_every=2", "checkpoint.every=2")
    first, second = (result.ok() for result in two(*words))
    expected = workshop(*words, devices=8).ok()
    close(workshop, first, expected)
    assert "step 2/2" in first.out
    assert "step" not in second.out
    paths = [
        {path.relative_to(r.run_dir) for path in r.run_dir.rglob("*")} for r in (first, expected)
    ]
    outside = [{p for p in files if p.parts[0] != "checkpoints"} for files in paths]
    assert outside[0] == outside[1]
    assert json.loads((first.run_dir / "versions.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_mesh_and_another_number_of_processes(workshop, two):
    """Two processes save, one goes on, two go on after it; each with its own mesh."""
    words = (*EXACTLY, "validation.every=1")
    expected = workshop(*words, *MESH, "steps=6", "checkpoint.every=2", devices=8).ok()
    first, second = two(*words, *MESH, "steps=2")
    first.ok(), second.ok()
    run_dir = first.run_dir
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["2"]
    one = workshop(*words, "mesh.train={tensor: 2}", "steps=4", run_dir=run_dir, devices=2).ok()
    assert [line["step"] for line in one.metrics] == [0, 1, 2, 3, 4]
    mesh = "mesh.train={data: 2, fsdp: 2, tensor: 2}"
    first, second = two(
        *words, mesh, "mesh.rollout={data: 4, tensor: 2}", "steps=6", run_dir=run_dir
    )
    first.ok(), second.ok()
    assert "continuing after step 4" in first.err
    assert "continuing" not in second.err
    close(workshop, first, expected, apart="global_seqlen")  # the load of each device


@pytest.mark.slow
def test_a_teacher_on_a_server_is_asked_by_one_process_for_all(workshop, two):
    words = (*EXACTLY, *MESH, "algorithm.advantage=[grpo, reverse_kl]", "steps=1")
    expected = workshop(*words, f"teacher.path={workshop.base}", devices=8).ok()
    with serving_model(workshop.base) as (url, gate):
        before = gate.left
        first, second = two(*words, f"teacher.url={url}")
        first.ok(), second.ok()
        assert before - gate.left == 2 + 32  # two of the check
        gate.left = 2 + 16
        lost = two(*words, f"teacher.url={url}", "teacher.retries=0")
    close(workshop, first, expected)
    for result in lost:
        assert result.status != 0
        assert "the last: status 503: lost" in result.err


COUNTED = """
from pathlib import Path
async def tool(word: str) -> str:
    \'\'\'Count a call.\'\'\'
    with Path("calls.log").open("a") as file:
        file.write("called\\n")
    return word
"""


TURNED = """
import os
from jaxrl_llm.data.rows import verl_rows
def rows(paths):
    return verl_rows(paths)[:: -1 if os.environ["JAX_PROCESS_ID"] == "1" else 1]
"""


@pytest.mark.slow
def test_processes_with_other_configs_or_with_tools_are_refused(workshop, two):
    """All of them say the same, and end with status 2; nothing is begun."""
    differ = ((), ("optim.schedule.value=0.1", "seed=7", "steps=9"))
    for result in two("optim.schedule.value=0.001", "seed=0", "steps=3", own=differ):
        assert result.status == 2, result.err
        assert "process 1 has seed=7, process 0 has 0" in result.err
        assert "process 1 has steps=9, process 0 has 3" in result.err
        assert not result.run_dir.exists()
    (workshop.root / "counted.py").write_text(COUNTED)
    tools = f"[{workshop.root}/counted.py:tool]"
    for result in two(f"rollout.tools={tools}"):
        assert result.status == 2, result.err
        assert "error: rollout.tools needs one process, got 2" in result.err
    assert not (workshop.root / "calls.log").exists()
    (workshop.root / "turned.py").write_text(TURNED)
    for result in two(f"data.dataset={workshop.root}/turned.py:rows"):
        assert result.status == 2, result.err
        assert "error: data.train: process 1 reads other rows than process 0" in result.err


FAILING = """
import os
def score(data_source, solution_str, ground_truth, extra_info=None):
    if os.environ["JAX_PROCESS_ID"] == "1":
        raise ValueError("not here")
    return 1.0
"""


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(workshop, two):
    (workshop.root / "failing.py").write_text(FAILING)
    began = time.monotonic()
    words = (f"reward.function={workshop.root}/failing.py:score", "reward.on_error=null", "steps=1")
    first, second = two(*words, "reward.pass_env=[JAX_PROCESS_ID]")
    seconds = time.monotonic() - began
    print(f"ended after {seconds:.0f} s")
    assert first.status == 1 and second.status == 1
    assert re.search(r"process 0 ends, as process 1 failed: RewardError: .* not here", first.err)
    assert re.search(r"^error: reward .* failed on row \d+ ", second.err, re.MULTILINE)
    assert seconds < 120


@pytest.mark.slow
def test_an_error_of_the_first_reaches_all(workshop, two):
    run_dir = workshop.folder()
    run_dir.write_text("in the way")
    for result in two(run_dir=run_dir):
        assert result.status == 2
        assert "run_dir" in result.err


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_the_run_goes_on(workshop, two, start, until):
    run_dir = workshop.folder()
    words = (*EXACTLY, *MESH, "steps=4", "checkpoint.every=1")
    expected = workshop(*words, devices=8).ok()
    first, second = start(*words, run_dir=run_dir)
    metrics = run_dir / "metrics.jsonl"
    assert until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3, second)
    second.kill()
    began = time.monotonic()
    result = workshop.finish(first, run_dir)
    assert time.monotonic() - began < 20
    assert result.status == 1
    assert f"process 0 ends, as process 1 failed: PID {second.pid} on" in result.err
    second.communicate()
    again, _ = (result.ok() for result in two(*words, run_dir=run_dir))
    close(workshop, again, expected)


@pytest.mark.slow
def test_a_warm_start_is_made_by_all_and_written_once(workshop, two):
    config = yaml.safe_load((workshop.root / "sft.yaml").read_text())
    workshop.write("short.yaml", config | {"steps": 3, "optim": {"optimizer": "sgd"}})
    words = (*EXACTLY, *MESH, f"model.warm_start={workshop.root}/short.yaml")
    first, _ = (result.ok() for result in two(*words, f"model.path={workshop.root}/two.base"))
    expected = workshop(*words, f"model.path={workshop.root}/one.base", devices=8).ok()
    close(workshop, first, expected)
    names = [{p.name for p in (workshop.root / f"{n}.base").iterdir()} for n in ("one", "two")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_folder_in_use_is_refused_and_a_signal_to_one_process_saves_all(
    workshop, two, start, until
):
    run_dir = workshop.folder()
    words = (*MESH, "steps=5000")
    running = start(*words, run_dir=run_dir)
    assert until((run_dir / "versions.json").exists, running[0])
    for result in two(*words, run_dir=run_dir):
        assert result.status == 2
        assert "another process is running in" in result.err
    metrics = run_dir / "metrics.jsonl"
    assert until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 1, running[0])
    running[1].terminate()
    results = [workshop.finish(process, run_dir) for process in running]
    last = results[0].metrics[-1]["step"]
    for result in results:
        assert result.status == PREEMPTED, result.err
        assert result.err.splitlines()[-1].startswith(f"preempted: saved after step {last} of 5000")
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [str(last)]
