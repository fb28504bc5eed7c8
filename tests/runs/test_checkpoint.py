"""Checkpoints: exact, atomic, kept as asked; damaged and unfinished ones are told."""

import contextlib
import gc
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.runs.checkpoint import CheckpointError, Checkpoints
from jaxrl_llm.sharding.layout import make_mesh, replicated
from jaxrl_llm.training.update import TrainState
from tests.waiting import wait_until

# Where one array can't be read, orbax abandons its reads of the others, which then complain.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.guards("jaxrl_llm/runs/"),
]


EXTRA = {"data": {"index": 3, "rng": [1, 2**60]}, "kl_coef": 0.1, "config": {"a": None, "b": "ß"}}


def make_state(mesh, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "matrix": rng.normal(size=(8, 6)).astype(np.float32),
        "layers": {"scale": jnp.asarray(rng.normal(size=5), jnp.bfloat16)},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState(params, optimizer.init(params), np.int32(seed), np.int32(seed))
    split = NamedSharding(mesh, P("fsdp", "tensor"))

    def place(x):
        return jax.device_put(x, split if np.shape(x) == (8, 6) else replicated(mesh))

    return jax.tree.map(place, state)


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def steps(folder):
    return sorted(int(p.name) for p in Path(folder).iterdir() if p.name.isdigit())


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 4, "tensor": 2})


@pytest.fixture
def opened():
    """`Checkpoints`, closed after the test."""
    made = []

    def make(*args, **options):
        made.append(Checkpoints(*args, **{"keep": None} | options))
        return made[-1]

    yield make
    for checkpoints in made:
        checkpoints._manager.close()
    gc.collect()  # what complains does it here, and not in another module's test


def test_a_state_comes_back_bit_for_bit_in_its_layout_or_on_another_mesh(opened, mesh, tmp_path):
    state = make_state(mesh)
    first = opened(tmp_path / "a" / "b")
    assert first.latest() is None
    first.save(7, state, EXTRA)
    first.wait()
    for checkpoints in (first, opened(tmp_path / "a" / "b")):
        saved = checkpoints.restore(like(state))
        assert (saved.step, saved.extra) == (7, EXTRA)
        assert_same(saved.state, state)
        for restored, expected in zip(
            jax.tree.leaves(saved.state), jax.tree.leaves(state), strict=True
        ):
            assert restored.sharding == expected.sharding

    other = make_mesh({"fsdp": -1}, jax.devices()[2:4])
    split = {(8, 6): NamedSharding(other, P(None, "fsdp"))}
    expected = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=split.get(x.shape, replicated(other))
        ),
        state,
    )
    restored = first.restore(expected).state
    assert_same(restored, state)
    assert restored.params["matrix"].sharding == expected.params["matrix"].sharding


def test_any_known_step_may_be_read_and_none_is_skipped_in_silence(opened, mesh, tmp_path):
    checkpoints, state = opened(tmp_path), like(make_state(mesh))
    with pytest.raises(CheckpointError, match="None"):
        checkpoints.restore(state)
    for step in (2, 4):
        checkpoints.save(step, make_state(mesh, step), {"step": step})
    assert checkpoints.restore(state).step == 4, "what is still being written is known already"
    saved = checkpoints.restore(state, step=2)
    assert (saved.step, saved.extra) == (2, {"step": 2})
    assert_same(saved.state, make_state(mesh, 2))
    for step in (4, 3):
        with pytest.raises(CheckpointError, match="4"):
            checkpoints.save(step, make_state(mesh), {})
    assert_same(checkpoints.restore(state).state, make_state(mesh, 4))
    with pytest.raises(CheckpointError, match=r"5.*\[2, 4\]"):
        checkpoints.restore(state, 5)


def test_saved_arrays_may_be_donated_at_once(opened, mesh, tmp_path):
    """The write goes on in the background while the buffers are overwritten."""
    expected = {"big": np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)}
    layout = {"big": NamedSharding(mesh, P("fsdp"))}
    state = jax.device_put(expected, layout)
    overwrite = jax.jit(
        lambda tree: {"big": tree["big"] * 0 - 1}, donate_argnums=0, out_shardings=layout
    )
    wanted_like = like(state)
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state, {})
    for _ in range(5):
        state = overwrite(state)
    jax.block_until_ready(state)
    checkpoints.wait()
    assert_same(checkpoints.restore(wanted_like).state, expected)


def test_the_newest_and_the_best_are_kept_even_over_a_restart(opened, mesh, tmp_path):
    state = make_state(mesh)
    first = opened(tmp_path, keep=2, best="validation")
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.5)]:
        first.save(step, state, {}, None if score is None else {"validation": score})
    first.close()
    assert steps(tmp_path) == [2, 3, 4]
    second = opened(tmp_path, keep=2, best="validation")
    second.save(5, state, {})
    second.save(6, state, {}, {"validation": 0.7})
    second.wait()
    assert steps(tmp_path) == [2, 5, 6]


def test_read_only_writes_nothing(opened, mesh, tmp_path):
    writer = opened(tmp_path / "run")
    writer.save(1, make_state(mesh), {})
    writer.close()
    leftover = tmp_path / "run" / "2.orbax-checkpoint-tmp"
    leftover.mkdir()
    before = sorted(tmp_path.rglob("*"))
    reader = opened(tmp_path / "run", read_only=True)
    assert_same(reader.restore(like(make_state(mesh))).state, make_state(mesh))
    with pytest.raises(CheckpointError, match="only"):
        reader.save(2, make_state(mesh), {})
    reader.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_parameters_may_be_read_alone(opened, mesh, tmp_path):
    """In their layout, or as numpy arrays on a machine without those devices."""
    state = make_state(mesh)
    writer = opened(tmp_path)
    writer.save(4, {"actor": state}, EXTRA)
    writer.wait()
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    for checkpoints in (writer, opened(tmp_path, read_only=True)):
        saved = checkpoints.restore_params(bare)
        assert (saved.step, saved.extra) == (4, EXTRA)
        assert_same(saved.state, state.params)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(saved.state))
        placed = checkpoints.restore_params(like(state.params), 4).state
        assert_same(placed, state.params)
        assert placed["matrix"].sharding == state.params["matrix"].sharding


def test_another_model_is_refused_with_the_array_that_differs(opened, mesh, tmp_path):
    state = make_state(mesh)
    checkpoints = opened(tmp_path)
    checkpoints.save(4, {"actor": state}, {})
    checkpoints.wait()
    for name, shape, dtype in (
        ("matrix", (8, 8), jnp.float32),
        ("matrix", (8, 6), jnp.bfloat16),
        ("head", (8, 6), jnp.float32),
    ):
        other = jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))
        params = like(state).params | {name: other}
        with pytest.raises(CheckpointError, match=rf"model.*params/{name}"):
            checkpoints.restore({"actor": like(state)._replace(params=params)})
        with pytest.raises(CheckpointError, match=rf"model.*params/{name}"):
            checkpoints.restore_params(params)
    fewer = {"layers": like(state).params["layers"]}
    with pytest.raises(CheckpointError, match=r"model.*params/matrix"):
        checkpoints.restore({"actor": like(state)._replace(params=fewer)})


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


WHOLE = "step {} is whole: remove the folder {} to continue from it"
DAMAGE = {
    "arrays truncated": lambda f: truncate_all(data_files(f)),
    "arrays deleted": lambda f: [p.unlink() for p in data_files(f)],
    "all state deleted": lambda f: shutil.rmtree(f / "state"),
    "tree truncated": lambda f: truncate_all([f / "state" / "_METADATA"]),
    "index deleted": lambda f: [p.unlink() for p in (f / "state").rglob("manifest.ocdbt")],
    "extra truncated": lambda f: truncate_all([f / "extra" / "metadata"]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do(
    opened, mesh, whole, tmp_path, damage
):
    folder = shutil.copytree(whole, tmp_path / "copy")
    damage(folder / "2")
    checkpoints = opened(folder)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(like(make_state(mesh)))
    text = str(error.value)
    assert f"{folder / '2'} is damaged" in text and text.endswith(WHOLE.format(1, 2))
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
        with pytest.raises(CheckpointError, match=r"actor/params/big.*whole"):
            read()


def test_the_newest_whole_one_is_offered_and_following_the_advice_works(
    opened, mesh, whole, tmp_path
):
    folder, state = shutil.copytree(whole, tmp_path / "copy"), like(make_state(mesh))
    writer = opened(folder)
    writer.save(3, make_state(mesh, 3), EXTRA)
    writer.wait()
    for step in (2, 3):
        truncate_all(data_files(folder / str(step)))
    with pytest.raises(CheckpointError) as error:
        opened(folder).restore(state)
    assert str(error.value).endswith(WHOLE.format(1, 3))
    for step in (2, 3):
        shutil.rmtree(folder / str(step))
    checkpoints = opened(folder)
    assert checkpoints.restore(state).step == 1
    checkpoints.save(2, make_state(mesh, 9), {})
    checkpoints.wait()
    assert_same(checkpoints.restore(state).state, make_state(mesh, 9))
    for step in (1, 2):
        truncate_all(data_files(folder / str(step)))
    with pytest.raises(CheckpointError, match="whole"):
        opened(folder).restore(state)


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
    assert "/1 is damaged (extra/metadata" in caplog.text
    second.save(3, state, {}, {"validation": 0.3})
    second.wait()
    assert steps(tmp_path) == [2, 3]


UNFINISHED = """
import os, sys
from pathlib import Path
import jax.numpy as jnp
from jaxrl_llm.runs.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
checkpoints.save(1, {"a": jnp.arange(3.0)}, {"n": 1})
checkpoints.wait()
checkpoints.save(2, {"a": jnp.arange(2_000_000.0)}, {"n": 2})
os._exit(9)
"""


def test_an_unfinished_save_is_not_a_checkpoint(opened, tmp_path):
    """The process dies while it writes step 2."""
    words = [sys.executable, "-c", UNFINISHED, str(tmp_path)]
    done = subprocess.run(words, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    names = {p.name for p in tmp_path.iterdir()}
    assert done.returncode == 9 and "1" in names
    assert "2" not in names, "the test needs a process that died in time"
    assert len(names) == 2, "and that had begun to write"
    checkpoints, small = opened(tmp_path), {"a": jnp.arange(3.0)}
    assert checkpoints.latest() == 1
    saved = checkpoints.restore(like(small))
    assert saved.extra == {"n": 1}
    assert_same(saved.state, small)
    checkpoints.save(2, saved.state, {"n": 2})
    checkpoints.wait()
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2"}


@contextlib.contextmanager
def small_files():
    """Let no file grow beyond 50 kB for the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


BIG = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)


def test_a_full_disk_is_reported_and_spares_what_is_there(opened, tmp_path):
    small, checkpoints = {"a": jnp.arange(3.0)}, opened(tmp_path)
    checkpoints.save(1, small, {"n": 1})
    checkpoints.wait()
    with small_files(), pytest.raises(CheckpointError, match="save"):
        checkpoints.save(2, {"a": jnp.asarray(BIG)}, {})
        checkpoints.wait()
    again = opened(tmp_path)
    assert again.latest() == 1
    assert_same(again.restore(like(small)).state, small)
    again.save(2, small, {"n": 2})
    again.wait()
    assert again.latest() == 2


@pytest.mark.parametrize("by", ["check", "save", "close"])
def test_a_failed_save_is_reported_with_its_own_step(opened, tmp_path, by):
    checkpoints = opened(tmp_path)
    with small_files(), pytest.raises(CheckpointError, match="large") as error:
        checkpoints.save(1, {"a": jnp.asarray(BIG)}, {})
        if by == "save":
            checkpoints.save(2, {"a": jnp.asarray(BIG)}, {})
        if by == "close":
            checkpoints.close()
        wait_until(checkpoints.check, 120)
    assert "step 1" in str(error.value)
    assert checkpoints.latest() is None
