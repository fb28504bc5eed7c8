"""Checkpoints: exact, atomic, and kept as asked."""

import errno
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.monitoring.writer import quiet_libraries
from jaxrl_llm.runs.checkpoint import CheckpointError, Checkpoints
from jaxrl_llm.sharding.layout import make_mesh, replicated
from tests.runs.states import EXTRA, assert_same, like, make_state, steps

# Where one array can't be read, orbax abandons its reads of the others, which then complain.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.guards("jaxrl_llm/runs/"),
]


# ------------------------------------------------------------------------------------ there, back


def test_a_state_comes_back_bit_for_bit_in_its_layout(opened, mesh, tmp_path):
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


def test_another_mesh_may_read_it(opened, mesh, tmp_path):
    state = make_state(mesh)
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    other = make_mesh({"fsdp": -1}, jax.devices()[2:4])
    expected = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(other, P(None, "fsdp") if x.shape == (8, 6) else P()),
        ),
        state,
    )
    restored = checkpoints.restore(expected).state
    assert_same(restored, state)
    assert restored.params["matrix"].sharding == expected.params["matrix"].sharding


def test_any_known_step_may_be_read(opened, mesh, tmp_path):
    checkpoints = opened(tmp_path)
    for step in (2, 4):
        checkpoints.save(step, make_state(mesh, step), {"step": step})
    checkpoints.wait()
    saved = checkpoints.restore(like(make_state(mesh)), step=2)
    assert (saved.step, saved.extra) == (2, {"step": 2})
    assert_same(saved.state, make_state(mesh, 2))
    assert checkpoints.restore(like(make_state(mesh))).step == 4


def test_an_earlier_one_that_can_not_be_removed_is_no_failed_save(
    opened, mesh, tmp_path, monkeypatch
):
    """It was said that the new step could not be saved, with the names of the old one's files."""
    checkpoints = opened(tmp_path)
    wait = checkpoints._manager.wait_until_finished

    def wait_and_fail_to_remove():
        wait()
        raise PermissionError(1, "Operation not permitted", "metadata")

    checkpoints.save(6, make_state(mesh), EXTRA)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "wait_until_finished", wait_and_fail_to_remove)
        expected = "step 6 is saved in .*, but an earlier one can't be removed: Operation not perm"
        with pytest.raises(CheckpointError, match=expected):
            checkpoints.wait()
    assert opened(tmp_path).restore(like(make_state(mesh))).step == 6


def test_every_error_of_a_full_disk_is_of_the_save(opened, mesh, tmp_path, monkeypatch):
    """orbax tells of the two files that it can't write one after the other, the second at last."""

    def write_text(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = opened(tmp_path)
    expected = "can't save step 6 in .*: No space left on device"
    with monkeypatch.context() as patch:
        patch.setattr(epath.Path, "write_text", write_text)
        checkpoints.save(6, make_state(mesh), EXTRA)
        for finish in (checkpoints.wait, checkpoints.close):
            with pytest.raises(CheckpointError, match=expected):
                finish()


def test_saved_arrays_may_be_donated_at_once(opened, mesh, tmp_path):
    """The write goes on in the background while the buffers are overwritten."""
    expected = {
        "big": np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32),
        "count": np.int32(5),
    }
    layout = {"big": NamedSharding(mesh, P("fsdp")), "count": replicated(mesh)}
    state = jax.device_put(expected, layout)
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0, out_shardings=layout
    )
    wanted_like = like(state)
    checkpoints = opened(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state, {})
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        assert_same(checkpoints.restore(wanted_like, step).state, expected)
        state = jax.device_put(expected, layout)


# ---------------------------------------------------------------------------------- what is kept


def test_the_newest_are_kept(opened, mesh, tmp_path):
    checkpoints = opened(tmp_path, keep=2)
    state = make_state(mesh)
    for step in (1, 3, 5, 10):
        checkpoints.save(step, state, {})
    checkpoints.wait()
    assert steps(tmp_path) == [5, 10]
    assert checkpoints.latest() == 10


def test_the_best_is_kept_too_even_over_a_restart(opened, mesh, tmp_path):
    state = make_state(mesh)
    first = opened(tmp_path, keep=1, best="validation")
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, 0.5)]:
        first.save(step, state, {}, None if score is None else {"validation": score})
    first.close()
    assert steps(tmp_path) == [2, 4]
    second = opened(tmp_path, keep=1, best="validation")
    second.save(5, state, {})
    second.save(6, state, {}, {"validation": 0.7})
    second.wait()
    assert steps(tmp_path) == [2, 6]
    second.save(7, state, {}, {"validation": 0.95})
    second.save(8, state, {}, {"validation": 0.1})
    second.wait()
    assert steps(tmp_path) == [7, 8]


def test_without_validation_nothing_more_is_kept(opened, mesh, tmp_path):
    checkpoints = opened(tmp_path, keep=2, best="validation")
    for step in range(1, 5):
        checkpoints.save(step, make_state(mesh), {})
    checkpoints.wait()
    assert steps(tmp_path) == [3, 4]


def test_a_step_is_never_skipped_in_silence(opened, mesh, tmp_path):
    checkpoints = opened(tmp_path)
    checkpoints.save(3, make_state(mesh, 3), {})
    checkpoints.wait()
    for step in (3, 2):
        with pytest.raises(CheckpointError, match=rf"can't save step {step} in .*holds step 3"):
            checkpoints.save(step, make_state(mesh), {})
    assert_same(checkpoints.restore(like(make_state(mesh))).state, make_state(mesh, 3))


def test_read_only_writes_nothing(opened, mesh, tmp_path):
    writer = opened(tmp_path / "run")
    writer.save(1, make_state(mesh), {})
    writer.close()
    leftover = tmp_path / "run" / "2.orbax-checkpoint-tmp"
    leftover.mkdir()
    before = sorted(tmp_path.rglob("*"))
    reader = opened(tmp_path / "run", read_only=True)
    assert_same(reader.restore(like(make_state(mesh))).state, make_state(mesh))
    with pytest.raises(CheckpointError, match="it is read-only"):
        reader.save(2, make_state(mesh), {})
    reader.close()
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------------------- parameters only


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


def test_parameters_of_another_model_are_refused(opened, mesh, tmp_path):
    state = make_state(mesh)
    checkpoints = opened(tmp_path)
    checkpoints.save(4, {"actor": state}, {})
    checkpoints.wait()
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    wide = bare | {"matrix": jax.ShapeDtypeStruct((8, 7), jnp.float32)}
    with pytest.raises(
        CheckpointError, match=r"actor/params/matrix has shape \(8, 6\), expected \(8, 7\)"
    ):
        checkpoints.restore_params(wide)
    with pytest.raises(CheckpointError, match="it holds no actor/params/head"):
        checkpoints.restore_params(bare | {"head": bare["matrix"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", r"params/matrix has shape \(8, 6\), expected \(8, 8\)"),
        ("dtype", "params/matrix is of float32, expected bfloat16"),
        ("more", "it holds no params/head"),
        ("fewer", "it holds params/matrix, which this model has not"),
    ],
)
def test_a_state_of_another_model_is_refused(opened, mesh, tmp_path, change, message):
    checkpoints = opened(tmp_path)
    checkpoints.save(4, make_state(mesh), {})
    checkpoints.wait()
    expected = like(make_state(mesh))
    dtype = jnp.bfloat16 if change == "dtype" else jnp.float32
    shape = (8, 8) if change == "shape" else (8, 6)
    other = jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))
    params = dict(expected.params)
    if change == "fewer":
        del params["matrix"]
    else:
        params["head" if change == "more" else "matrix"] = other
    with pytest.raises(CheckpointError, match=rf"/4 is of another model \({message}\)"):
        checkpoints.restore(expected._replace(params=params))


# ---------------------------------------------------------------------------------------- damage


def test_none_and_unknown_steps_are_named(opened, mesh, tmp_path):
    checkpoints = opened(tmp_path)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(like(make_state(mesh)))
    assert str(error.value) == f"no checkpoint of step None in {tmp_path}; have []"
    for step in (2, 3):
        checkpoints.save(step, make_state(mesh), {})
    checkpoints.wait()
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(like(make_state(mesh)), 5)
    assert str(error.value) == f"no checkpoint of step 5 in {tmp_path}; have [2, 3]"


def test_a_full_disk_is_one_error_and_nothing_beside_it(small_disk, tmp_path, monkeypatch):
    """orbax leaves its other writes alone, which come back to an event loop that is closed."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    quiet_libraries()
    state = {f"w{i}": np.random.default_rng(i).random((64, 64), np.float32) for i in range(40)}
    with small_disk(tmp_path, "900k") as folder:
        checkpoints = Checkpoints(folder / "run", keep=None)
        with pytest.raises(CheckpointError, match=r"can't save step \d in .*: No space left"):
            for step in range(4):
                checkpoints.save(step, state, EXTRA)
        time.sleep(0.2)
        assert complaints == []
