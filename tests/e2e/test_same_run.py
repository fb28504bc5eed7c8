"""The same config and seed give the same run, however often it is killed on the way."""

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from jaxrl_llm.cli import PREEMPTED
from tests.guarded import MODEL, NATIVE, RUN

pytestmark = pytest.mark.guards(*MODEL, *RUN, *NATIVE, "algorithms/")

LONG = (
    "steps=6",
    "validation.every=3",
    "checkpoint.every=2",
    "rollout.dump_every=2",
    "algorithm.kl_reward=k1",
    "algorithm.kl_controller={fn: adaptive, target: 0.01, horizon: 100}",
)


def test_two_runs_of_one_seed_are_the_same_bit_for_bit(workshop, same):
    """As two processes, each of which compiles everything for itself."""
    folders = [workshop.folder(), workshop.folder()]
    processes = [workshop.start("steps=3", run_dir=f, cached=False) for f in folders]
    first, second = (workshop.finish(*pair).ok() for pair in zip(processes, folders, strict=True))
    assert [line["step"] for line in first.metrics] == [0, 1, 2, 3]
    assert first.learned == second.learned
    assert all(line["actor/grad_norm"] > 0 for line in first.metrics[1:])
    same(workshop.params(first.run_dir), workshop.params(second.run_dir))


def test_another_seed_gives_another_run(run, finished):
    other = run("steps=1", "seed=1").ok()
    assert other.metrics[1]["actor/grad_norm"] != finished.metrics[1]["actor/grad_norm"]


@pytest.fixture(scope="session")
def undisturbed(workshop):
    """The run that the killed ones must repeat, its base model made on the way."""
    run_dir = workshop.folder()
    words = warm(workshop, run_dir)
    return workshop.finish(workshop.start(*LONG, *words, run_dir=run_dir), run_dir).ok()


def warm(workshop, run_dir):
    return f"model.path={run_dir}.base", f"model.warm_start={workshop.root}/sft.yaml"


def saves(folder, run=".", since=0.0, names="*"):
    """Tell whether a checkpoint is being written, or has just become whole, after `since`."""
    for path in folder.glob(f"{run}/checkpoints/{names}"):
        with contextlib.suppress(FileNotFoundError):  # it has just become whole
            if path.stat().st_mtime > since:
                return True
    return False


def lines(folder, run="."):
    """Count the lines of metrics that a run has written."""
    counts = [path.read_bytes().count(b"\n") for path in folder.glob(f"{run}/metrics.jsonl")]
    return max(counts, default=0)


def kill_and_continue(workshop, expected, moments, dice, same, until, end=subprocess.Popen.kill):
    """End a run at one moment after the other, then let it end by itself; compare.

    Returns the status with which it ended at each moment.
    """
    run_dir = workshop.folder()
    words = [*warm(workshop, run_dir), f"reward.function={workshop.mine('unhurried_digit_sum')}"]
    base_run = f"{run_dir.name}.base.sft*"
    ended, statuses = [], []
    for kind, number in moments:
        process = workshop.start(*LONG, *words, run_dir=run_dir)
        begin, few = time.time(), lines(run_dir) + 2  # where a fast machine is ended in time, too
        reached = {
            "seconds": lambda end=begin + number, few=few: (
                time.time() > end or lines(run_dir) >= few
            ),
            "sft steps": lambda number=number: lines(workshop.root, base_run) >= number,
            "sft save": lambda begin=begin: saves(workshop.root, base_run, begin),
            "steps": lambda number=number: lines(run_dir) >= number,
            "save": lambda begin=begin: saves(run_dir, since=begin),
        }[kind]
        if not until(reached, process):
            ended.append((kind, number))
        if kind.endswith("steps"):
            time.sleep(dice.uniform(0, 0.1))
        end(process)
        process.communicate()
        statuses.append(process.returncode)
        if process.returncode == PREEMPTED:
            has_begun = (run_dir / "metrics.jsonl").exists()
            assert_saved(run_dir if has_begun else next(workshop.root.glob(base_run)))
    assert not ended, "a run ended before it could be killed"
    result = workshop.finish(workshop.start(*LONG, *words, run_dir=run_dir), run_dir).ok()
    assert [line["step"] for line in result.metrics] == list(range(7))
    assert result.learned == expected.learned
    same(workshop.params(run_dir), workshop.params(expected.run_dir))
    base = [
        p.with_name(f"{p.name}.base") / "model.safetensors" for p in (run_dir, expected.run_dir)
    ]
    assert base[0].read_bytes() == base[1].read_bytes()
    dumps = [
        sorted(p.name for p in (d / "rollouts").iterdir()) for d in (run_dir, expected.run_dir)
    ]
    assert dumps[0] == dumps[1]
    assert not saves(run_dir, names="*tmp*")
    assert re.search(r"continuing after step \d|nothing to do", result.err + result.out)
    return statuses


def assert_saved(run_dir):
    """Assert that a run's newest checkpoint is of its last step."""
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert last == max(int(path.name) for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.slow
def test_told_to_end_at_ten_moments(workshop, undisturbed, same, until):
    """Whatever it does: it saves where it stands, or there is nothing to save yet."""
    dice = random.Random(0)
    moments = [("seconds", dice.uniform(0, 4))]
    moments += [("sft steps", n) for n in sorted(dice.sample(range(1, 36), 3))]
    moments += [("sft save", 1), ("seconds", dice.uniform(1, 5))]
    moments += [("steps", 1), ("save", 1), ("steps", 4), ("seconds", dice.uniform(0.5, 2))]
    terminate = subprocess.Popen.terminate
    statuses = kill_and_continue(workshop, undisturbed, moments, dice, same, until, terminate)
    assert len(statuses) == 10
    assert set(statuses) <= {PREEMPTED, -signal.SIGTERM}
    assert statuses.count(PREEMPTED) >= 4


@pytest.mark.slow
def test_killed_in_the_warm_start_in_a_save_and_at_a_step(workshop, undisturbed, same, until):
    moments = [("sft save", 1), ("save", 1), ("steps", 4)]
    kill_and_continue(workshop, undisturbed, moments, random.Random(0), same, until)


@pytest.mark.slow
def test_killed_at_random_moments(workshop, undisturbed, same, until):
    dice = random.Random(1)
    moments = [("seconds", dice.uniform(0, 4))]
    moments += [("sft steps", n) for n in sorted(dice.sample(range(1, 40), 3))]
    moments += [("seconds", dice.uniform(0, 4)), ("save", 1)]
    moments += [("steps", n) for n in sorted(dice.sample(range(4, 7), 2))]
    kill_and_continue(workshop, undisturbed, moments, dice, same, until)


# ---------------------------------------------------------- what must not make a difference

EXACTLY = ("optim.optimizer=sgd", "optim.schedule.value=0.1")  # Adam's first steps amplify rounding


@pytest.fixture(scope="session")
def plain(workshop):
    return workshop(*EXACTLY).ok()


def close(workshop, actual, expected):
    before = workshop.params(expected.run_dir)
    for name, value in workshop.params(actual.run_dir).items():
        np.testing.assert_allclose(value, before[name], atol=2e-6, err_msg=name)
    for a, b in zip(actual.metrics[1:], expected.metrics[1:], strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("tokens", [16, 512])
def test_the_micro_batch_makes_no_difference(workshop, plain, tokens):
    other = workshop(*EXACTLY, f"batch.max_tokens_per_device={tokens}").ok()
    close(workshop, other, plain)


@pytest.mark.parametrize(
    "mesh",
    [
        "{train: {data: 2, fsdp: 2, tensor: 2}, rollout: {data: 4, tensor: 2}}",
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in (
                "{train: {fsdp: 4, devices: 4}, rollout: {first_device: 4, tensor: 2}}",
                "{train: {fsdp: 8}}",
                "{train: {data: 8, fsdp: 1}, rollout: {fsdp: 8, data: 1}}",
                "{train: {context: 4, fsdp: 2}, rollout: {tensor: 8, data: 1}}",
                "{train: {context: 2, tensor: 2, fsdp: 2}, context_by: keys}",
                "{train: {fsdp: 4, tensor: 2}, rules: {vocab: null, ff: null, norm: tensor}}",
                "{train: {first_device: 2, devices: 4}, rollout: {devices: 2}}",
            )
        ),
    ],
)
def test_the_mesh_makes_no_difference(workshop, plain, mesh):
    other = workshop(*EXACTLY, f"mesh={mesh}", devices=8).ok()
    close(workshop, other, plain)


@pytest.mark.slow
def test_every_model_s_own_mesh_makes_no_difference(workshop):
    """A critic and a reference, each on other devices than the actor."""
    words = [
        *EXACTLY,
        "algorithm.advantage=gae_whitened",
        "algorithm.kl_loss=k3",
        "critic.optim={optimizer: sgd, schedule: {fn: constant_schedule, value: 0.1}}",
    ]
    mesh = "{train: {fsdp: 4, devices: 4}, critic: {fsdp: 2, tensor: 2, first_device: 4}, "
    mesh += "reference: {data: 2, fsdp: 1, first_device: 6}}"
    expected = workshop(*words).ok()
    actual = workshop(*words, f"mesh={mesh}", devices=8).ok()
    close(workshop, actual, expected)
    assert expected.metrics[2]["actor/kl_loss"] > 0
    for a, b in zip(actual.metrics[1:], expected.metrics[1:], strict=True):
        for name in ("critic/vf_loss", "critic/values/mean", "critic/grad_norm", "actor/kl_loss"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("left", ["nothing", "metadata", "no mark"])
def test_killed_while_an_old_checkpoint_was_removed(workshop, finished, copy_of, left):
    """What is left of the older one stands in nobody's way."""
    folder = copy_of(finished)
    old = folder / "checkpoints/2"
    keep = {"nothing": (), "metadata": ("_CHECKPOINT_METADATA",)}.get(left)
    for path in list(old.iterdir()):
        if path.name == "commit_success.txt" if keep is None else path.name not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    words = ["steps=6", "rollout.dump_every=2", "validation.every=2", "checkpoint.every=2"]
    result = workshop(*words, run_dir=folder).ok()
    assert [line["step"] for line in result.metrics] == list(range(7))
    assert {"4", "6"} <= {path.name for path in (folder / "checkpoints").iterdir()}
