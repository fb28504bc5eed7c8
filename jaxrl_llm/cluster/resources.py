"""What a job needs of a Ray cluster, where its processes go, and whether these fit together."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxrl_llm.cluster.actors import ProcessEnv, ProcessInfo
from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.sections import ClusterConfig, RolloutConfig
from jaxrl_llm.sharding import rendezvous

FORWARDED_PREFIXES = ("JAX_", "XLA_", "NCCL_", "HF_", "JAXRL_LLM_", "WANDB_")
"""Of the environment variables that all processes take over from the launcher."""
POLL_INTERVAL_S = 0.5  # between two looks at the nodes
MIN_RESERVE_S = 1.0  # for a reservation


class LostError(RunError):
    """A process or node was lost, or the job hung: it can be started again."""


class Requirements(NamedTuple):
    """What the processes of a job need.

    Attributes:
        process: Ray's resources of a training process.
        engine: of an engine.
        nodes: of all together on each node.
        devices: of a training process and of an engine.
        on_cpus: whether devices are the CPU's, as no node of the cluster has a GPU.
    """

    process: dict[str, float]
    engine: dict[str, float]
    nodes: list[dict[str, float]]
    devices: tuple[int, int]
    on_cpus: bool

    def process_env(
        self, cluster: ClusterConfig, engine_of: RolloutConfig | None = None
    ) -> ProcessEnv:
        """Return the environment of a training process, or of an engine of a run."""
        env = {name: v for name, v in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
        is_vllm = engine_of is not None and engine_of.engine == "vllm"
        if self.on_cpus or is_vllm:  # whose sidecars have the GPUs
            env["JAX_PLATFORMS"] = "cpu"
        if self.on_cpus:
            env["JAX_NUM_CPU_DEVICES"] = str(self.devices[engine_of is not None])
        if engine_of is not None:  # whatever the variables of the launcher or the node say
            env |= dict(zip(rendezvous.VARIABLES, ("localhost:1", "1", "0"), strict=True))
        env |= {name: str(value) for name, value in cluster.env.items()}
        return ProcessEnv(str(Path.cwd()), env)


def wait_for_nodes(count: int, until: float) -> list[Any]:
    """Return what Ray knows of its nodes when so many are there, or the time has come.

    Args:
        count: of nodes that a job requires.
        until: by `time.monotonic`.
    """
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) >= count or time.monotonic() > until:
            return nodes
        time.sleep(POLL_INTERVAL_S)


def max_gpus_per_node(nodes: Sequence[Any]) -> int:
    """Return how many GPUs the node has that has most.

    >>> max_gpus_per_node([{"Resources": {"CPU": 8.0}}, {"Resources": {"CPU": 8.0, "GPU": 4.0}}])
    4
    """
    return max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)


def compute_requirements(rollout: RolloutConfig, cluster: ClusterConfig, gpus: int) -> Requirements:
    """Return what a job requires of a cluster's nodes.

    Args:
        rollout: of the run.
        cluster: of the run.
        gpus: of a node.
    """
    train_devices = cluster.devices or max(gpus // cluster.processes_per_node, 1)
    engine_devices = rollout.devices or max(gpus, 1)

    def resources(count: int, devices: int) -> dict[str, float]:
        cpus = {"CPU": float(count * cluster.cpus)}
        return cpus | ({"GPU": float(count * devices)} if gpus else {})

    process, engine = resources(1, train_devices), resources(1, engine_devices)
    training = [resources(cluster.processes_per_node, train_devices)] * cluster.nodes
    return Requirements(
        process,
        engine,
        training + [engine] * rollout.nodes,
        (train_devices, engine_devices),
        on_cpus=not gpus,
    )


def reserve(requirements: Requirements, seconds: float, until: float) -> Any:
    """Reserve a part of a node for each of the job's nodes, each on another one.

    Args:
        requirements: of the job.
        seconds: that it was given to start.
        until: when these end, by `time.monotonic`.

    Raises:
        RunError: they did not come in time.
    """
    group = placement_group(requirements.nodes, strategy="STRICT_SPREAD")
    if not group.wait(max(until - time.monotonic(), MIN_RESERVE_S)):
        remove_placement_group(group)
        has = [_format(n["Resources"], requirements.nodes[0]) for n in ray.nodes() if n["Alive"]]
        wants = " or ".join(dict.fromkeys(_format(node, node) for node in requirements.nodes))
        raise RunError(
            f"the cluster did not give {len(requirements.nodes)} nodes with {wants} each in "
            f"{seconds:g} s (cluster.start_timeout_s): it has {len(has)} ({'; '.join(has)}), "
            "some of which may be in use"
        )
    return group


def _format(resources: Mapping[str, float], kinds: Iterable[str]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in kinds)


def check_spare_cpus(requirements: Requirements, tasks: int) -> None:
    """Refuse a cluster in which no CPU is left for tasks that score.

    Raises:
        RunError: all are reserved for the job's processes.
    """
    total = ray.cluster_resources().get("CPU", 0)
    reserved = sum(node["CPU"] for node in requirements.nodes)
    if tasks and total - reserved < 1:
        raise RunError(
            f"cluster.reward_tasks={tasks}, but the job's processes take {reserved:g} of the "
            f"cluster's {total:g} CPUs: lower cluster.cpus, or add nodes"
        )


def schedule(
    cls: type, group: Any, bundle: int, resources: dict[str, float], **options: Any
) -> Any:
    """Return an actor class that goes to one of the reserved nodes."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle
    )
    return ray.remote(cls).options(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        scheduling_strategy=strategy,
        **options,
    )


def startup_results(tasks: list[Any], cluster: ClusterConfig) -> list[Any]:
    """Return the results of calls to processes while the job starts.

    Raises:
        RunError: they don't in time.
        LostError: one died.
    """
    try:
        return ray.get(tasks, timeout=cluster.start_timeout_s)
    except GetTimeoutError as error:
        raise RunError(
            f"the job's processes did not start in {cluster.start_timeout_s:g} s "
            "(cluster.start_timeout_s)"
        ) from error
    except RayTaskError as error:
        raise original_error(error) from error
    except RayError as error:
        if error.args and isinstance(error.args[0], RayTaskError):  # an actor's that was not made
            raise original_error(error.args[0]) from error
        raise LostError(f"a process was lost while it started: {error}") from error


def original_error(error: Any) -> Exception:
    """Return the error that a process raised; one of a bug keeps the process's traceback."""
    ours = isinstance(error.cause, ConfigError | RunError | OSError)
    return error.cause if ours else error


def check_same_versions(processes: Sequence[ProcessInfo]) -> None:
    """Refuse nodes on which other versions are installed.

    Raises:
        ConfigError: naming the first difference.
    """
    first = processes[0]
    for other in processes[1:]:
        for name, version in first.versions.items():
            if other.versions[name] != version:
                raise ConfigError(
                    f"the nodes differ: {name} is {version} on {first.address} (node "
                    f"{first.node[:8]}), but {other.versions[name]} on {other.address} (node "
                    f"{other.node[:8]}): install the same on all"
                )


def check_shared_folder(run_dir: str, actors: Sequence[Any], cluster: ClusterConfig) -> None:
    """Refuse a run's folder that is another one on each node.

    Raises:
        ConfigError: a process does not see what the first one writes there.
    """
    name = f".seen_by_all_{os.getpid()}"
    [path] = startup_results([actors[0].write_marker.remote(run_dir, name)], cluster)
    try:
        seen = startup_results([other.path_exists.remote(path) for other in actors], cluster)
    finally:
        startup_results([actors[0].remove_marker.remote(path)], cluster)
    if not all(seen):
        raise ConfigError(
            f"run_dir={run_dir!r} is not one folder: process {seen.index(False)} does not see what "
            f"process 0 writes to {path}; it must be on a file system that all nodes share"
        )
