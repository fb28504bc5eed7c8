"""The keys of a Ray cluster."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Number, Section, Table


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClusterConfig(Section):
    """The nodes of a Ray cluster, and what happens when one is lost."""

    address: str | None = Field(
        default=None,
        description=(
            "host:port, ray://host:port or auto; null: RAY_ADDRESS, else this machine alone"
        ),
    )
    nodes: int = Field(default=1, ge=1, description="nodes that train")
    processes_per_node: int = Field(
        default=1, ge=1, description="training processes on each of them"
    )
    devices: int | None = Field(
        default=None,
        ge=1,
        description="devices of each training process; null: its part of the node's GPUs",
    )
    cpus: int = Field(
        default=1, ge=1, description="CPUs that Ray reserves for each process and engine"
    )
    reward_tasks: int = Field(
        default=0,
        ge=0,
        description=(
            "responses scored at once, in tasks on all nodes; 0: reward.workers of "
            "each process score"
        ),
    )
    env: Table = Field(default={}, description="environment variables for all processes")
    start_timeout_s: Number = Field(
        default=300.0, gt=0, description="seconds for Ray and all nodes to be there"
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="restarts of the job, or of an engine, after a failure",
    )
    backoff_s: Number = Field(
        default=10.0,
        ge=0,
        description="seconds before the first restart; doubled for each further one",
    )
