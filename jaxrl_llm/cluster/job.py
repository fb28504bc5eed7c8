"""The actors of a job on a Ray cluster: they are started together, and end together."""

import contextlib
import dataclasses
import logging
import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxrl_llm.cluster.actors import EngineHost, ProcessInfo, TrainProcess
from jaxrl_llm.cluster.context import JobContext
from jaxrl_llm.cluster.coordinator import Coordinator
from jaxrl_llm.cluster.resources import (
    POLL_INTERVAL_S,
    Requirements,
    check_same_versions,
    check_shared_folder,
    check_spare_cpus,
    compute_requirements,
    max_gpus_per_node,
    reserve,
    schedule,
    startup_results,
    wait_for_nodes,
)
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ClusterConfig
from jaxrl_llm.sharding.rendezvous import VARIABLES

RPC_TIMEOUT_S = 20.0  # for a call to another node
HEAD_NODE_RESOURCE = "node:__internal_head__"
"""What Ray names a resource of one node, which the cluster can't do without."""

log = logging.getLogger(__name__)


@dataclasses.dataclass
class RestartState:
    """What the launcher keeps of a job's earlier starts.

    Attributes:
        restarts: how often it was started again.
        gpus: of the node that had most: the others may be away when it is started again.
        counters: how often something was lost and replaced, by name.
    """

    restarts: int = 0
    gpus: int = 0
    counters: dict[str, int] = dataclasses.field(default_factory=dict)


class RayJob(NamedTuple):
    """The actors of a job.

    Attributes:
        coordinator: handle of the `Coordinator` actor.
        processes: where training processes and engines run.
        tasks: references to the ends of the training processes.
    """

    coordinator: Any
    processes: list[ProcessInfo]
    tasks: list[Any]


@contextlib.contextmanager
def running_job(
    config: TrainConfig, cluster: ClusterConfig, state: RestartState
) -> Iterator[RayJob]:
    """Start all processes of a job; end them when the block is left.

    Raises:
        RunError: nodes or processes did not come in time.
        ConfigError: the nodes have other versions or files than each other.
    """
    until = time.monotonic() + cluster.start_timeout_s
    nodes = wait_for_nodes(cluster.nodes + config.rollout.nodes, until)
    state.gpus = max(state.gpus, max_gpus_per_node(nodes))
    requirements = compute_requirements(config.rollout, cluster, state.gpus)
    if requirements.on_cpus:
        log.warning("no node of the cluster has a GPU: the run's devices are the CPUs'")
    group = reserve(requirements, cluster.start_timeout_s, until)
    job = None
    try:
        check_spare_cpus(requirements, cluster.reward_tasks)
        total, name = cluster.nodes * cluster.processes_per_node, f"jaxrl_llm_{uuid.uuid4().hex}"
        head = next(node["NodeID"] for node in nodes if HEAD_NODE_RESOURCE in node["Resources"])
        coordinator = ray.remote(Coordinator).options(
            name=name,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=True),
        )
        job = RayJob(coordinator.remote(total, state.counters), [], [])
        train, engines = start_actors(config, cluster, requirements, group, name)
        actors = [*train, *engines]
        job.processes.extend(startup_results([a.info.remote() for a in actors], cluster))
        check_same_versions(job.processes)
        check_shared_folder(config.run_dir, actors, cluster)
        context = JobContext(
            job.coordinator,
            tuple(engines),
            state.restarts,
            process_index=0,
            engine_devices=len(engines) * requirements.devices[1],
            reward_tasks=cluster.reward_tasks // total,
            max_retries=cluster.restarts,
        )
        job.tasks.extend(start_training(config, context, train, job.processes[0]))
        yield job
    except BaseException:
        processes: list[ProcessInfo] = []
        if job is not None:
            state.counters, processes = query_job(job, state.counters)
        remove_placement_group(group)
        send_signal(processes, signal.SIGKILL)  # also what hangs, and before a next start
        raise
    else:
        remove_placement_group(group)  # and all that runs in it


def start_actors(
    config: TrainConfig,
    cluster: ClusterConfig,
    requirements: Requirements,
    group: Any,
    coordinator: str,
) -> tuple[list[Any], list[Any]]:
    """Start the actors that train, and those of engines on nodes of their own.

    Args:
        config: of the run.
        cluster: the same's.
        requirements: of the job.
        group: the nodes that are reserved.
        coordinator: name of the `Coordinator`.
    """
    train = [
        schedule(
            TrainProcess, group, index // cluster.processes_per_node, requirements.process
        ).remote(requirements.process_env(cluster))
        for index in range(cluster.nodes * cluster.processes_per_node)
    ]
    retries = {"max_restarts": cluster.restarts, "max_task_retries": cluster.restarts}
    engines = [
        schedule(EngineHost, group, cluster.nodes + index, requirements.engine, **retries).remote(
            requirements.process_env(cluster, config.rollout), config, coordinator, index
        )
        for index in range(config.rollout.nodes)
    ]
    return train, engines


def start_training(
    config: TrainConfig, context: JobContext, train: Sequence[Any], first: ProcessInfo
) -> list[Any]:
    """Begin the training in all of its processes; return references to its ends.

    Args:
        config: of the run.
        context: of the first process.
        train: the actors that train.
        first: where the first one of them runs, at which the others meet.
    """
    address = f"{first.address}:{first.free_port}"
    tasks = []
    for index, process in enumerate(train):
        membership = dict(zip(VARIABLES, (address, str(len(train)), str(index)), strict=True))
        tasks.append(process.run.remote(config, context._replace(process_index=index), membership))
    return tasks


def query_job(job: RayJob, counters: dict[str, int]) -> tuple[dict[str, int], list[ProcessInfo]]:
    """Return what was lost and replaced so far, and where all processes and engines are now.

    Args:
        job: that was started.
        counters: as they were before; they are returned if the coordinator is gone, with its node.
    """
    calls = [job.coordinator.get_counters.remote(), job.coordinator.get_engines.remote()]
    try:
        counters, engines = ray.get(calls, timeout=RPC_TIMEOUT_S)
    except RayError:
        return counters, job.processes
    return counters, [*job.processes, *engines]  # some engines were made anew, on other nodes


def send_signal(processes: Sequence[ProcessInfo], number: signal.Signals) -> None:
    """Send a signal to processes on their nodes; wait for the end of those that it kills."""

    @ray.remote(num_cpus=0, max_retries=0)
    def send(pid: int) -> None:
        title = Path(f"/proc/{pid}/cmdline")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            while b"ray::" in title.read_bytes():  # else it is another's by now
                os.kill(pid, number)
                if number != signal.SIGKILL:
                    return
                time.sleep(POLL_INTERVAL_S)

    tasks = []
    for process in processes:
        on_node = NodeAffinitySchedulingStrategy(process.node, soft=False)
        tasks.append(send.options(scheduling_strategy=on_node).remote(process.pid))
    ray.wait(tasks, num_returns=len(tasks), timeout=RPC_TIMEOUT_S)  # a node may be gone, too
