"""The keys of a Ray cluster."""

from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The nodes of a Ray cluster, and what happens when one is lost."""

    address: str | None = key(
        None, "host:port, ray://host:port or auto; null: RAY_ADDRESS, else this machine alone"
    )
    nodes: int = key(1, "nodes that train")
    processes_per_node: int = key(1, "training processes on each of them")
    devices: int | None = key(
        None, "devices of each training process; null: its part of the node's GPUs"
    )
    cpus: int = key(1, "CPUs that Ray sets aside for each process and engine")
    reward_tasks: int = key(
        0, "answers scored at once, in tasks on all nodes; 0: reward.workers of each process do it"
    )
    env: dict[str, Any] = key({}, "environment variables for all processes")
    start_timeout_s: float = key(300.0, "seconds for Ray and all nodes to be there")
    restarts: int = key(3, "times that the job, or an engine, is started again when one is lost")
    backoff_s: float = key(10.0, "seconds before the first new start; each further one waits twice")
