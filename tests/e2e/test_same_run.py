"""The same config and seed give the same run, however often it is killed on the way."""

import contextlib
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from jaxrl_llm.cli import PREEMPTED
from tests.e2e.comparing import EVERY_SECOND, EXACTLY, close, count_lines, same
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


def test_a_run_killed_in_a_process_and_continued_here_is_the_undisturbed_one(
    workshop, finished, until
):
    """Bit for bit: the same seed, in another process, killed by SIGKILL after its second step."""
    run_dir = workshop.folder()
    words = (f"reward.function={workshop.mine('unhurried_digit_sum')}", "steps=4", *EVERY_SECOND)
    process = workshop.start(*words, run_dir=run_dir)
    assert until(lambda: lines(run_dir) >= 3, process), process.communicate()
    process.kill()
    process.communicate()
    again = workshop(*words, run_dir=run_dir).ok()
    assert again.learned == finished.learned
    assert all(line["actor/grad_norm"] > 0 for line in again.metrics[1:])
    same(workshop.params(run_dir), workshop.params(finished.run_dir))


@pytest.mark.slow
def test_two_processes_of_one_seed_are_the_same_bit_for_bit_and_another_seed_is_not(
    workshop, plain
):
    """Each compiles everything for itself."""
    folders = [workshop.folder() for _ in range(2)]
    started = [workshop.start("steps=3", run_dir=folder, cached=False) for folder in folders]
    first, second = (workshop.finish(*pair).ok() for pair in zip(started, folders, strict=True))
    assert first.steps == [0, 1, 2, 3] and first.learned == second.learned
    same(workshop.params(first.run_dir), workshop.params(second.run_dir))
    other = workshop(*EXACTLY, "seed=1", "steps=1").ok()
    assert other.metrics[1]["actor/grad_norm"] != plain.metrics[1]["actor/grad_norm"]


@pytest.fixture(scope="session")
def undisturbed(workshop):
    """The run that the killed ones must repeat, its base model made on the way."""
    run_dir = workshop.folder()
    return workshop(*LONG, *warm(workshop, run_dir), run_dir=run_dir).ok()


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
    return max(map(count_lines, folder.glob(f"{run}/metrics.jsonl")), default=0)


def kill_and_continue(workshop, expected, moments, dice, until, end=subprocess.Popen.kill):
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
        result = workshop.finish(process, run_dir)
        statuses.append(result.status)
        if result.status == PREEMPTED:
            has_begun = (run_dir / "metrics.jsonl").exists()
            result.run_dir = run_dir if has_begun else next(workshop.root.glob(base_run))
            kept = (result.run_dir / "checkpoints").iterdir()
            assert result.steps[-1] == max(int(path.name) for path in kept)
    assert not ended, "a run ended before it could be killed"
    result = workshop.finish(workshop.start(*LONG, *words, run_dir=run_dir), run_dir).ok()
    assert result.steps == list(range(7)) and result.learned == expected.learned
    same(workshop.params(run_dir), workshop.params(expected.run_dir))
    base, other = (
        (d.with_name(f"{d.name}.base") / "model.safetensors").read_bytes()
        for d in (run_dir, expected.run_dir)
    )
    assert base == other
    assert not saves(run_dir, names="*tmp*")
    assert re.search(r"continuing after step \d|nothing to do", result.err + result.out)
    return statuses


@pytest.mark.slow
def test_told_to_end_at_ten_moments(workshop, undisturbed, until):
    """Whatever it does: it saves where it stands, or there is nothing to save yet."""
    dice = random.Random(0)
    moments = [("seconds", dice.uniform(0, 4))]
    moments += [("sft steps", n) for n in sorted(dice.sample(range(1, 36), 3))]
    moments += [("sft save", 1), ("seconds", dice.uniform(1, 5))]
    moments += [("steps", 1), ("save", 1), ("steps", 4), ("seconds", dice.uniform(0.5, 2))]
    terminate = subprocess.Popen.terminate
    statuses = kill_and_continue(workshop, undisturbed, moments, dice, until, terminate)
    assert len(statuses) == 10 and set(statuses) <= {PREEMPTED, -signal.SIGTERM}
    assert statuses.count(PREEMPTED) >= 4


@pytest.mark.slow
def test_killed_in_the_warm_start_in_saves_and_at_random_moments(workshop, undisturbed, until):
    dice = random.Random(1)
    moments = [("seconds", dice.uniform(0, 4)), ("sft save", 1)]
    moments += [("sft steps", n) for n in sorted(dice.sample(range(1, 40), 3))]
    moments += [("seconds", dice.uniform(0, 4)), ("save", 1)]
    moments += [("steps", n) for n in sorted(dice.sample(range(4, 7), 2))]
    kill_and_continue(workshop, undisturbed, moments, dice, until)


@pytest.mark.slow
@pytest.mark.parametrize("left", ["_CHECKPOINT_METADATA", "", "state"])
def test_killed_while_an_old_checkpoint_was_removed_it_goes_on(workshop, finished, copy_of, left):
    """What is left of the older one stands in nobody's way; the steps before stay as they were."""
    folder = copy_of(finished)
    for path in list((folder / "checkpoints/2").iterdir()):
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    result = workshop("steps=6", *EVERY_SECOND, run_dir=folder).ok()
    assert result.steps == list(range(7)) and result.learned[:5] == finished.learned
    assert {"4", "6"} <= {path.name for path in (folder / "checkpoints").iterdir()}


MESHES = (
    "{train: {fsdp: 4, devices: 4}, rollout: {first_device: 4, tensor: 2}}",
    "{train: {fsdp: 8}}",
    "{train: {data: 8, fsdp: 1}, rollout: {fsdp: 8, data: 1}}",
    "{train: {context: 4, fsdp: 2}, rollout: {tensor: 8, data: 1}}",
    "{train: {context: 2, tensor: 2, fsdp: 2}, context_by: keys}",
    "{train: {fsdp: 4, tensor: 2}, rules: {vocab: null, ff: null, norm: tensor}}",
    "{train: {first_device: 2, devices: 4}, rollout: {devices: 2}}",
)
CUTS = ("global_seqlen", "perf")  # the load of each device


@pytest.mark.parametrize(
    "mesh",
    [
        "{train: {data: 2, fsdp: 2, tensor: 2}, rollout: {data: 4, tensor: 2}}",
        *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES),
    ],
)
def test_neither_micro_batches_nor_the_mesh_make_a_difference(workshop, plain, mesh):
    other = workshop(*EXACTLY, f"mesh={mesh}", "batch.max_tokens_per_device=16", devices=8).ok()
    close(workshop, other, plain, apart=CUTS)
