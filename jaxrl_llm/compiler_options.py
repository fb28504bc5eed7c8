"""The flags of XLA's GPU compiler that a run sets, for each task, and why.

They are options of the compiled programs, so that training and decoding in one process can differ.
Few are set: docs/performance.md says what the compiled programs show of these and of others.
"""

import enum
import functools
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

log = logging.getLogger(__name__)


class Task(enum.StrEnum):
    """What a program is for."""

    TRAIN = enum.auto()
    DECODE = enum.auto()


class Flag(NamedTuple):
    """A flag of XLA's GPU compiler.

    Attributes:
        name: without dashes.
        value: that a task sets; a number as text.
        reason: what it does for the task.
    """

    name: str
    value: bool | str
    reason: str


FLAGS: dict[Task, tuple[Flag, ...]] = {
    Task.TRAIN: (
        Flag(
            "xla_gpu_enable_latency_hiding_scheduler",
            True,
            "starts collectives before the products that do not wait for them; XLA does so by "
            "itself on Hopper and later only",
        ),
    ),
    Task.DECODE: (),
}
"""None for decoding: XLA's own choice launches all layers of a token as one CUDA graph."""


def compiler_options(task: Task, devices: Iterable[Any]) -> dict[str, bool | str] | None:
    """Return `compiler_options` for the programs of a task; None without a GPU.

    A flag that the environment's `XLA_FLAGS` name is left to them, and one that this XLA does not
    know is left out: they differ from version to version.

    Args:
        task: what the programs are for.
        devices: that they run on, which may be those of a topology.

    >>> compiler_options(Task.TRAIN, jax.devices("cpu"))
    """
    device = min(devices, key=lambda d: (d.process_index != jax.process_index(), d.id))
    if not is_gpu(device):
        return None
    given = flags_of_environment(os.environ.get("XLA_FLAGS", ""))
    flags = [flag for flag in FLAGS[task] if flag.name not in given]
    return {flag.name: flag.value for flag in flags if is_known(flag, device)} or None


def is_gpu(device: Any) -> bool:
    """Tell whether XLA's GPU compiler makes a device's programs.

    >>> is_gpu(jax.devices("cpu")[0])
    False
    """
    return device.platform in ("gpu", "cuda", "rocm")


def flags_of_environment(text: str) -> set[str]:
    """Return the names of the flags in `XLA_FLAGS`, which may name a file of them instead.

    >>> sorted(flags_of_environment("--xla_a=true --xla_b"))
    ['xla_a', 'xla_b']
    """
    text = text.strip()
    if text and not text.startswith("-") and Path(text).is_file():
        text = Path(text).read_text()
    return set(re.findall(r"(?:^|\s)--(\w+)", text))


@functools.cache
def is_known(flag: Flag, device: Any) -> bool:
    """Tell whether a device's compiler knows a flag, by a program of one number."""
    place = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    same = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), np.float32, sharding=place))
    try:
        same.compile(compiler_options={flag.name: flag.value})
    except jax.errors.JaxRuntimeError as error:
        log.warning("XLA's flag %s is not set: %s", flag.name, str(error).splitlines()[0])
        return False
    return True
