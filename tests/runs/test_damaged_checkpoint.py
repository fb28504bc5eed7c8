"""Damaged and unfinished checkpoints are told, with what to do."""

import os
import random
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.runs.checkpoint import CheckpointError, Checkpoints
from jaxrl_llm.sharding.layout import replicated
from tests.runs.states import EXTRA, assert_same, like, make_state, steps

# Where one array can't be read, orbax abandons its reads of the others, which then complain.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.guards("jaxrl_llm/runs/"),
]


@pytest.fixture(scope="module")
def whole(mesh, tmp_path_factory):
    """A directory with steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoints = Checkpoints(folder, keep=None)
    for step in (1, 2):
        checkpoints.save(step, make_state(mesh, step), EXTRA)
    checkpoints.close()
    return folder


def data_files(folder):
    """The files that hold the arrays, the largest first."""
    return sorted((p for p in (folder / "state").rglob("d/*")), key=lambda p: -p.stat().st_size)


def truncate_all(files):
    for file in files:
        os.truncate(file, file.stat().st_size // 2)


DAMAGE = {
    "arrays truncated": lambda f: truncate_all(data_files(f)),
    "arrays deleted": lambda f: [p.unlink() for p in data_files(f)],
    "arrays emptied": lambda f: [os.truncate(p, 0) for p in data_files(f)],
    "all state deleted": lambda f: shutil.rmtree(f / "state"),
    "tree truncated": lambda f: truncate_all([f / "state" / "_METADATA"]),
    "tree deleted": lambda f: (f / "state" / "_METADATA").unlink(),
    "index deleted": lambda f: [p.unlink() for p in (f / "state").rglob("manifest.ocdbt")],
    "extra truncated": lambda f: truncate_all([f / "extra" / "metadata"]),
    "extra deleted": lambda f: shutil.rmtree(f / "extra"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do(
    opened, mesh, whole, tmp_path, damage
):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    damage(folder / "2")
    checkpoints = opened(folder)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(like(make_state(mesh)))
    text = str(error.value)
    assert text.startswith(f"the checkpoint {folder / '2'} is damaged (")
    assert text.endswith("; step 1 is whole: remove the folder 2 to continue from it")
    assert len(text) < 180 + 2 * len(str(folder))
    assert_same(checkpoints.restore(like(make_state(mesh)), 1).state, make_state(mesh, 1))


def flip(file, number):
    """Flip a bit of a file, counted from its beginning; return what it held before."""
    whole = file.read_bytes()
    byte, bit = divmod(number, 8)
    file.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1 << bit]) + whole[byte + 1 :])
    return whole


def large_state(mesh):
    """A state whose arrays don't fit into the index, which has checksums."""
    big = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    return {"actor": {"params": jax.device_put({"big": big}, replicated(mesh))}}


def test_a_bit_of_an_array_is_missed_by_name(opened, mesh, tmp_path):
    state = large_state(mesh)
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    file = data_files(tmp_path / "1")[0]
    flip(file, 4 * file.stat().st_size)  # in the middle
    for read in (
        lambda: checkpoints.restore(like(state)),
        lambda: checkpoints.restore_params({"big": jax.ShapeDtypeStruct((64, 64), np.float32)}),
    ):
        with pytest.raises(CheckpointError) as error:
            read()
        assert str(error.value) == (
            f"the checkpoint {tmp_path / '1'} is damaged (actor/params/big: the values are not "
            "those that were saved); there is no earlier one that is whole"
        )


def test_the_newest_whole_one_is_offered(opened, mesh, whole, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    writer = opened(folder)
    writer.save(3, make_state(mesh, 3), EXTRA)
    writer.wait()
    for step in (2, 3):
        truncate_all(data_files(folder / str(step)))
    with pytest.raises(CheckpointError, match=r"/3 is damaged .*; step 1 is whole: rem"):
        opened(folder).restore(like(make_state(mesh)))
    truncate_all(data_files(folder / "1"))
    with pytest.raises(CheckpointError, match=r"/3 is damaged .*; there is no earlier one that is"):
        opened(folder).restore(like(make_state(mesh)))


@pytest.mark.slow
def test_no_bit_anywhere_changes_what_is_read(opened, mesh, tmp_path):
    """300 flips in all files of a checkpoint: each is an error, or changes nothing."""
    state = large_state(mesh) | {"critic": make_state(mesh)}
    writer = opened(tmp_path, best="validation")
    writer.save(1, state, EXTRA, {"validation": 0.9})
    writer.save(2, state, EXTRA, {"validation": 0.5})
    writer.close()
    dice = random.Random(0)
    files = sorted(path for path in (tmp_path / "2").rglob("*") if path.is_file())
    assert len(files) > 10
    refused = harmless = 0
    for number in range(300):
        file = files[number // 2 % len(files)] if number % 2 else data_files(tmp_path / "2")[0]
        before = flip(file, dice.randrange(8 * file.stat().st_size))
        try:
            checkpoints = opened(tmp_path, best="validation")
            saved = checkpoints.restore(like(state))
        except CheckpointError as error:
            assert "step 1 is whole" in str(error) or "can't open" in str(error)
            refused += 1
        else:
            assert (saved.step, saved.extra) == (2, EXTRA)
            assert_same(saved.state, state)
            assert checkpoints._scores == {1: 0.9, 2: 0.5}
            harmless += 1
        file.write_bytes(before)
    assert refused > 150 and harmless > 20, (refused, harmless)


def test_a_damaged_score_is_told_and_the_step_is_not_the_best(opened, mesh, tmp_path, caplog):
    state = make_state(mesh)
    writer = opened(tmp_path, keep=1, best="validation")
    writer.save(1, state, {}, {"validation": 0.9})
    writer.save(2, state, {}, {"validation": 0.5})
    writer.close()
    record = tmp_path / "1" / "extra" / "metadata"
    record.write_text(record.read_text().replace("0.9", "0.1"))
    second = opened(tmp_path, keep=1, best="validation")
    assert "/1 is damaged (extra/metadata is not what was written): it does not c" in caplog.text
    second.save(3, state, {}, {"validation": 0.3})
    second.wait()
    assert steps(tmp_path) == [2, 3]


def test_following_the_advice_works(opened, mesh, whole, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "2")
    checkpoints = opened(folder)
    saved = checkpoints.restore(like(make_state(mesh)))
    assert (saved.step, saved.extra) == (1, EXTRA)
    checkpoints.save(2, make_state(mesh, 9), {})
    checkpoints.wait()
    assert_same(checkpoints.restore(like(make_state(mesh))).state, make_state(mesh, 9))


UNFINISHED = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
from jaxrl_llm.runs.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
state = {"a": jnp.arange(2_000_000.0)}
checkpoints.save(1, state, {"n": 1})
checkpoints.wait()
checkpoints.save(2, state, {"n": 2})
os._exit(9)
"""


def test_an_unfinished_save_is_not_a_checkpoint(opened, tmp_path):
    """The process dies while it writes step 2."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED, str(tmp_path)], env=environment, check=False
    )
    assert done.returncode == 9
    names = {p.name for p in tmp_path.iterdir()}
    assert "1" in names
    assert "2" not in names, "the test needs a process that died in time"
    assert len(names) == 2, "and that had begun to write"
    checkpoints = opened(tmp_path)
    assert checkpoints.latest() == 1
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = {"a": jax.ShapeDtypeStruct((2_000_000,), jnp.float32, sharding=where)}
    saved = checkpoints.restore(expected)
    assert saved.extra == {"n": 1}
    np.testing.assert_array_equal(saved.state["a"], np.arange(2e6, dtype=np.float32))
    checkpoints.save(2, saved.state, {"n": 2})
    checkpoints.wait()
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2"}


def test_a_full_disk_is_reported_and_spares_what_is_there(opened, tmp_path):
    big = jax.device_put(np.random.default_rng(0).normal(size=(256, 256)), jax.devices()[0])
    small = {"a": jnp.arange(3.0)}
    checkpoints = opened(tmp_path)
    checkpoints.save(1, small, {"n": 1})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(CheckpointError, match="can't save"):
            checkpoints.save(2, {"a": big}, {})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = opened(tmp_path)
    assert again.latest() == 1
    assert_same(again.restore(like(small)).state, small)
    again.save(2, small, {"n": 2})
    again.wait()
    assert again.latest() == 2


@pytest.mark.parametrize("by", ["check", "save", "close"])
def test_a_failed_save_is_reported_with_its_own_step(opened, tmp_path, by):
    big = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)}
    checkpoints = opened(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(CheckpointError, match=r"can't save step 1 in .*: File too large"):
            checkpoints.save(1, big, {})
            if by == "save":
                checkpoints.save(2, big, {})
            if by == "close":
                checkpoints.close()
            end = time.monotonic() + 60
            while time.monotonic() < end:
                checkpoints.check()
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.latest() is None
