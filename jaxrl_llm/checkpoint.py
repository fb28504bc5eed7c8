"""Checkpoints: atomic, written in the background, the newest few and the best kept.

Each process writes its parts of the arrays, the first one the rest; all of them together make one
checkpoint, which is read in any layout, by any number of processes on the same file system.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from jaxrl_llm.functions import RunError
from jaxrl_llm.sharding import processes

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax reports each step; errors it raises


class CheckpointError(RunError):
    """A checkpoint that can't be read, or written."""


class Saved(NamedTuple):
    """What a checkpoint holds: arrays, and the rest as JSON."""

    step: int
    state: Any
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: holds one folder for each step.
        keep: newest checkpoints to keep; None keeps all.
        best: name of the metric by which one more is kept, the highest.
        read_only: never write or remove anything.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int | None,
        best: str | None = None,
        read_only: bool = False,
    ) -> None:
        """Open or make the directory; remains of unfinished saves are removed."""
        self.directory = directory.resolve()

        def metric(metrics: Any) -> float:
            return metrics[best]

        policies: list[preservation_policy.PreservationPolicy] = [preservation_policy.LatestN(keep)]
        if best:
            policies.append(
                preservation_policy.BestN(
                    get_metric_fn=metric, n=1, keep_checkpoints_without_metrics=False
                )
            )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=not read_only,
                best_fn=metric if best else None,  # or the metrics are not written
                read_only=read_only,
                create=not read_only,
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
            },
        )

    def latest(self) -> int | None:
        """Return the newest whole checkpoint's step."""
        return processes.once(self._manager.latest_step)

    def save(
        self, step: int, state: Any, extra: dict[str, Any], metrics: dict[str, float] | None = None
    ) -> None:
        """Start to save; the arrays may be donated as soon as this returns.

        Raises:
            CheckpointError: this save, or the one before it, failed; the step is not a new one.
        """
        if jax.default_backend() == "cpu":
            state = jax.tree.map(_copy, state)  # a host "transfer" there is only a view
        try:
            started = self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), extra=ocp.args.JsonSave(extra)
                ),
                metrics=metrics,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"can't save step {step} in {self.directory}: {error}") from error
        if not started:
            raise CheckpointError(
                f"can't save step {step} in {self.directory}: it is read-only or holds "
                f"step {self.latest()}; wanted a later one"
            )

    def restore(self, state_like: Any, step: int | None = None) -> Saved:
        """Read a checkpoint into the layout of `state_like`.

        Args:
            state_like: shapes, dtypes and shardings; numpy arrays where the sharding is None.
            step: default the newest.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return self._read(step, state_like)

    def extra(self, step: int | None = None) -> dict[str, Any]:
        """Read what a checkpoint holds besides arrays."""
        step = self._known(step)
        found = self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))
        return found["extra"]

    def restore_params(
        self, params_like: Any, step: int | None = None, *, role: str = "actor"
    ) -> Saved:
        """Read only the parameters of one role's TrainState; the optimizer's stay on disk."""
        saved = self._read(step, {role: {"params": params_like}}, partial_restore=True)
        return saved._replace(state=saved.state[role]["params"])

    def _known(self, step: int | None) -> int:
        known = sorted(self._manager.all_steps())
        step = self.latest() if step is None else step
        if step is None or step not in known:
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; have {known}")
        return step

    def _read(self, step: int | None, like: Any, *, partial_restore: bool = False) -> Saved:
        step, known = self._known(step), sorted(self._manager.all_steps())
        wanted = ocp.args.PyTreeRestore(
            like, restore_args=jax.tree.map(_restore_as, like), partial_restore=partial_restore
        )
        try:
            found = self._manager.restore(
                step, args=ocp.args.Composite(state=wanted, extra=ocp.args.JsonRestore())
            )
            jax.tree_util.tree_map_with_path(_check_shape, like, found["state"])
        except jax.errors.JaxRuntimeError:  # of the devices, or another process's end
            raise
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint {self.directory / str(step)} is damaged or of another model "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}); "
                f"remove that folder to continue from an earlier one: {known}"
            ) from error
        return Saved(step, found["state"], found["extra"])

    def wait(self) -> None:
        """Block until what is being saved is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            raise CheckpointError(f"can't save in {self.directory}: {error}") from error

    def close(self) -> None:
        """Wait, then release the directory; a run that has failed waits for no other process."""
        if not processes.is_ending():
            self.wait()
            self._manager.close()


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


def _check_shape(path: Any, like: jax.ShapeDtypeStruct, found: Any) -> None:
    """Refuse what a partial restore leaves out, and numpy arrays of another shape."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if isinstance(found, jax.ShapeDtypeStruct):
        raise ValueError(f"it holds no {name}")
    if found.shape != like.shape:
        raise ValueError(f"{name} has shape {found.shape}, wanted {like.shape}")
