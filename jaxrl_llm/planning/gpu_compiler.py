"""XLA's compiler for GPUs that are not there: jax's CUDA plugin and the description of a device.

The plugin compiles without a GPU and without a driver for the devices of a topology, which stand in
a mesh as real ones do. `targets/` describes the GPUs that can be named.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.planning.estimate import PER_NODE

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
UNTUNED: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Options of the compiler that cannot try kernels out.

On a GPU XLA times Triton's and cuBLAS's matrix products and takes the faster one. Without one it
would take Triton's in sizes that nobody has timed; so the calls of cuBLAS are taken.
"""
UNMERGED: Mapping[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 0}
"""More of them, for decoding: products of one operand, as of q, k and v, are not merged.

Triton's merged product reads the weights where they are. For cuBLAS XLA concatenates them for each
token, those of all layers before the first one is used.
"""
NOTE = b"Could not find cuda drivers on your machine"
NOTE_HEAD = b"All log messages before absl::InitializeLog"


def describe_topology(gpu: str, devices: int) -> tuple[str, str]:
    """Return a GPU's description as text, and the topology of so many of them.

    These are nodes of eight, or one node of fewer.

    Args:
        gpu: one of those in `targets/`.
        devices: how many.

    Raises:
        ConfigError: the devices do not fill nodes.

    >>> describe_topology("H200", 32)[1]
    '1x4x8'
    """
    nodes, rest = divmod(devices, PER_NODE)
    if devices < 1 or (nodes and rest):
        raise ConfigError(
            f"--devices: got {devices}, expected 1 to {PER_NODE}, or a multiple of {PER_NODE}"
        )
    target = resources.files("jaxrl_llm.planning").joinpath("targets", f"{gpu}.txtpb")
    return target.read_text(), f"1x{nodes}x{PER_NODE}" if nodes else f"1x1x{devices}"


def gpu_devices(gpu: str, devices: int) -> Sequence[Any]:
    """Return the devices of a topology, which are compiled for and hold nothing.

    Args:
        gpu: one of those in `targets/`.
        devices: how many.

    Raises:
        ConfigError: the plugin is not installed, or the devices do not fill nodes.
    """
    target, topology = describe_topology(gpu, devices)
    if not any(_is_installed(plugin) for plugin in PLUGINS):
        raise ConfigError(
            "--compile-for needs XLA's compiler for GPUs, which is in jax's CUDA plugin: "
            "pip install 'jaxrl_llm[gpu-compiler]' (300 MB; no GPU and no driver needed)"
        )
    with _without_driver_notes():
        import jax
        from jax.experimental import topologies

        jax.config.update("jax_platforms", "cpu")  # there is no GPU for constants
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target, topology=topology
        ).devices


def _is_installed(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:  # no plugin at all
        return False


@contextlib.contextmanager
def _without_driver_notes() -> Iterator[None]:
    """Leave out of stderr the plugin's lines that there is no driver, which is known."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            caught.seek(0)
            lines = [line for line in caught if NOTE not in line and NOTE_HEAD not in line]
            os.write(kept, b"".join(lines))
            os.close(kept)
