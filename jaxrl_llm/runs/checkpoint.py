"""Checkpoints: atomic, written in the background, the newest few and the best kept.

Each process writes its parts of the arrays, the first one the rest; all of them together make one
checkpoint, which is read in any layout, by any number of processes on the same file system.

A checkpoint's record is a JSON file. It has a digest of every array, which the devices compute
before the array is written and again when it has been read, and it is sealed by a SHA-256 of its
own. So a bit that changes on the disk is an error, and not another model. The digests are by hand,
as orbax, which writes the arrays, compares none when it reads.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from jaxrl_llm.config.errors import RunError
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.checksum import digests

log = logging.getLogger(__name__)
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax reports each step; errors it raises

LONGEST = 160  # characters of a library's error
NO_TIMEOUT_S = 10**8  # orbax reads the clock that can be set; `stall_timeout_s` bounds a save


class CheckpointError(RunError):
    """A checkpoint that can't be read, or written."""


class _Unlike(Exception):
    """What a checkpoint holds is whole, but not what was asked for."""


class _Damaged(Exception):
    """What was read is not what was written."""


class Saved(NamedTuple):
    """What a checkpoint holds: arrays, and the rest as JSON."""

    step: int
    state: Any
    extra: dict[str, Any]


class _KeepBest(preservation_policy.PreservationPolicy):
    """Keeps the step with the highest score; of equal ones the newest."""

    def __init__(self, scores: Mapping[int, float]) -> None:
        self._scores = scores

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        scored = [(self._scores[step], step) for step in steps if step in self._scores]
        return [bool(scored) and step == max(scored)[1] for step in steps]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: holds one folder for each step.
        keep: newest checkpoints to keep; None keeps all.
        best: name of the metric by which one more is kept, the highest.
        read_only: never write or remove anything.

    Raises:
        CheckpointError: the directory can't be read.
    """

    def __init__(
        self, directory: Path, *, keep: int | None, best: str | None = None, read_only: bool = False
    ) -> None:
        """Open or make the directory; remains of unfinished saves are removed."""
        self.directory = directory.resolve()
        self._best = best
        self._scores: dict[int, float] = {}
        self._saving: int | None = None
        policies = [preservation_policy.LatestN(keep), _KeepBest(self._scores)]
        try:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
                    cleanup_tmp_directories=not read_only,
                    read_only=read_only,
                    create=not read_only,
                    async_options=ocp.options.AsyncOptions(
                        timeout_secs=NO_TIMEOUT_S, create_directories_asynchronously=False
                    ),
                ),
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(),
                    "extra": ocp.JsonCheckpointHandler(),
                },
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"can't open {self.directory}: {_reason(error)}") from error
        for step in self._manager.all_steps() if best else ():
            self._take_score(step)

    def latest(self) -> int | None:
        """Return the newest checkpoint's step; what was not written to its end is none."""
        return distributed.run_on_first(self._manager.latest_step)

    def save(
        self, step: int, state: Any, extra: dict[str, Any], metrics: dict[str, float] | None = None
    ) -> None:
        """Start to save; the arrays may be donated as soon as this returns.

        Raises:
            CheckpointError: this save, or the one before it, failed; the step is not a new one.
        """
        self.wait()
        sums = digests(state)  # begins now; the arrays are copied meanwhile
        if jax.default_backend() == "cpu":
            state = jax.tree.map(_copy, state)  # a host "transfer" there is only a view
        record = {"extra": extra, "metrics": metrics or {}, "arrays": _described(state, sums)}
        record = json.loads(json.dumps(record))  # as it is read again
        if self._best and metrics:
            self._scores[step] = metrics[self._best]
        try:
            started = self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state),
                    extra=ocp.args.JsonSave({"record": record, "sha256": _sha256(record)}),
                ),
            )
        except (OSError, ValueError) as error:
            raise self._save_error(step, error) from error
        if not started:
            raise CheckpointError(
                f"can't save step {step} in {self.directory}: it is read-only or holds "
                f"step {self.latest()}; expected a later one"
            )
        self._saving = step

    def check(self) -> None:
        """Look whether the save in the background has failed, without waiting for it.

        Raises:
            CheckpointError: it has.
        """
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Block until what is being saved is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self._finish(self._manager.wait_until_finished)

    def close(self) -> None:
        """Do as `wait`, then release the directory; a run that has failed waits for no process."""
        if not distributed.is_aborting():
            self._finish(self._manager.close)

    def _finish(self, waiting: Callable[[], None]) -> None:
        try:
            waiting()
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            raise self._save_error(self._saving, error) from error
        self._saving = None

    def restore(self, like: Any, step: int | None = None, *, partial: bool = False) -> Saved:
        """Read a checkpoint into the layout of `like`, and compare all digests.

        Args:
            like: shapes, dtypes and shardings; numpy arrays where the sharding is None.
            step: default the newest.
            partial: the checkpoint may hold arrays that `like` has not, which stay on disk.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model.
        """
        step = self._known(step)
        saved = self._attempt(step, like, partial=partial)
        if isinstance(saved, str):
            whole = self._whole_before(step, like, partial=partial)
            raise CheckpointError(self._refusal(step, saved, whole))
        return saved

    def extra(self, step: int | None = None) -> dict[str, Any]:
        """Read what a checkpoint holds besides arrays.

        Raises:
            CheckpointError: there is none, or its record is damaged.
        """
        step = self._known(step)
        try:
            return self._record(step)["extra"]
        except (_Damaged, OSError) as error:
            raise CheckpointError(self._refusal(step, f"is damaged ({_reason(error)})")) from error

    def restore_params(
        self, params_like: Any, step: int | None = None, *, role: str = "actor"
    ) -> Saved:
        """Read only the parameters of one role's TrainState; the optimizer's stay on disk."""
        saved = self.restore({role: {"params": params_like}}, step, partial=True)
        return saved._replace(state=saved.state[role]["params"])

    # ------------------------------------------------------------------------------ reading

    def _known(self, step: int | None) -> int:
        self.wait()  # what is still being written is known already
        known = sorted(self._manager.all_steps())
        step = self.latest() if step is None else step
        if step is None or step not in known:
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; have {known}")
        return step

    def _record(self, step: int) -> dict[str, Any]:
        return _unsealed(self.directory / str(step) / "extra" / "metadata")

    def _take_score(self, step: int) -> None:
        """Remember a step's score; a damaged record only keeps the step from being the best."""
        try:
            metrics = self._record(step)["metrics"]
        except (_Damaged, OSError) as error:
            log.warning(
                "the checkpoint %s is damaged (%s): it does not count as the best",
                self.directory / str(step),
                _reason(error),
            )
            return
        if metrics:
            self._scores[step] = metrics[self._best]

    def _attempt(self, step: int, like: Any, *, partial: bool) -> Saved | str:
        """Return a checkpoint, or why it can't be read; then nothing holds its arrays any more."""
        try:
            record = self._record(step)
            _check_like(record["arrays"], like, partial=partial)
            expected = ocp.args.PyTreeRestore(
                like, restore_args=jax.tree.map(_restore_as, like), partial_restore=partial
            )
            state = self._manager.restore(step, args=ocp.args.Composite(state=expected))["state"]
            _check_digests(record["arrays"], state)
        except jax.errors.JaxRuntimeError:  # of the devices, or another process's end
            raise
        except _Unlike as error:
            return f"is of another model ({error})"
        except Exception as error:
            log.debug("%s", self.directory / str(step), exc_info=error)
            if isinstance(error, _Damaged | OSError):
                return f"is damaged ({_reason(error)})"
            status = re.match(r"[A-Z_]{4,}(?=: )", str(error))  # of tensorstore, whose text is long
            what = status[0] if status else type(error).__name__
            return f"is damaged (its arrays can't be read: {what})"
        return Saved(step, state, record["extra"])

    def _whole_before(self, step: int, like: Any, *, partial: bool) -> int | None:
        """Return the newest earlier step that can be read; several processes would not agree."""
        for earlier in sorted(self._manager.all_steps(), reverse=True):
            if earlier < step and distributed.process_count() == 1:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    if not isinstance(self._attempt(earlier, like, partial=partial), str):
                        return earlier
        return None

    def _refusal(self, step: int, reason: str, whole: int | None = None) -> str:
        text = f"the checkpoint {self.directory / str(step)} {reason}"
        if whole is not None:
            return f"{text}; step {whole} is whole: remove the folder {step} to continue from it"
        earlier = [known for known in sorted(self._manager.all_steps()) if known < step]
        if distributed.process_count() > 1 and earlier:
            return f"{text}; remove that folder to continue from an earlier one: {earlier}"
        return f"{text}; there is no earlier one that is whole"

    def _save_error(self, step: int | None, error: Exception) -> CheckpointError:
        if step is not None and (self.directory / str(step)).is_dir():  # it is renamed in the end
            return CheckpointError(
                f"step {step} is saved in {self.directory}, but an earlier one can't be removed: "
                f"{_reason(error)}"
            )
        return CheckpointError(f"can't save step {step} in {self.directory}: {_reason(error)}")


# ---------------------------------------------------------------------------------- records


def _unsealed(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        _Damaged: it is not what was written.
        OSError: it can't be read.
    """
    try:
        tree = json.loads(path.read_bytes())
        if tree["sha256"] == _sha256(tree["record"]):
            return tree["record"]
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # a bit of its syntax or of a name has changed
    raise _Damaged(f"{path.parent.name}/{path.name} is not what was written")


def _sha256(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _described(state: Any, sums: Any) -> dict[str, Any]:
    """Return shape, dtype and digest of each array, by name."""
    values = jax.tree.leaves(jax.device_get(sums))
    return {
        name: {"shape": leaf.shape, "dtype": leaf.dtype.name, "digest": int(value)}
        for (name, leaf), value in zip(_named(state), values, strict=True)
    }


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _check_like(arrays: Mapping[str, Any], like: Any, *, partial: bool) -> None:
    """Refuse a checkpoint without what is expected, or with arrays that nobody asked for.

    Raises:
        _Unlike: naming the first such array.
    """
    expected = dict(_named(like))
    for name, leaf in expected.items():
        if name not in arrays:
            raise _Unlike(f"it holds no {name}")
        shape, dtype = tuple(arrays[name]["shape"]), arrays[name]["dtype"]
        if shape != leaf.shape:
            raise _Unlike(f"{name} has shape {shape}, expected {leaf.shape}")
        if dtype != leaf.dtype.name:
            raise _Unlike(f"{name} is of {dtype}, expected {leaf.dtype.name}")
    more = [name for name in arrays if name not in expected]
    if more and not partial:
        raise _Unlike(f"it holds {more[0]}, which this model has not")


def _check_digests(arrays: Mapping[str, Any], state: Any) -> None:
    """Compare what was read with what was written.

    Raises:
        _Damaged: naming the arrays that differ.
    """
    described = _described(state, digests(state))
    bad = [name for name, array in described.items() if array["digest"] != arrays[name]["digest"]]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise _Damaged(f"{bad[0]}{more}: the values are not those that were saved")


def _reason(error: Exception) -> str:
    """Return an error in a few words."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if full := re.search(r"No space left on device|File too large|Disk quota exceeded", text):
        return full[0]
    return text if isinstance(error, _Damaged) else f"{type(error).__name__}: {text[:LONGEST]}"


def _copy(array: Any) -> Any:
    """Copy an array that may be donated; where other processes hold parts, copy those held here."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.array(array)
    parts = [jax.device_put(np.array(part.data), part.device) for part in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _restore_as(like: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
    """Ask for our dtype and sharding: left to itself, orbax takes those that were saved."""
    if like.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=like.dtype)
    return ocp.ArrayRestoreArgs(sharding=like.sharding, global_shape=like.shape, dtype=like.dtype)
