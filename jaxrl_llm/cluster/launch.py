"""Starts a run on the nodes of a Ray cluster, and starts it again where a process is lost."""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.config.errors import ConfigError, Preempted, RunError

# Ray shows a line of several processes once; of stacks all are expected, of Gloo's greetings none
os.environ.setdefault("RAY_DEDUP_LOGS_ALLOW_REGEX", r"Thread 0x|recent call first|^\s*File \"")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", r"^\[Gloo\] Rank")
try:
    import ray
except ModuleNotFoundError as error:
    raise ConfigError("cluster needs the package ray: pip install 'jaxrl_llm[ray]'") from error

from jaxrl_llm.cluster.address import check_answers, check_joins
from jaxrl_llm.cluster.job import RestartState, running_job
from jaxrl_llm.cluster.resources import LostError
from jaxrl_llm.cluster.watch import watch
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ClusterConfig
from jaxrl_llm.runs.preemption import Preemption

log = logging.getLogger(__name__)

JOINS = 3
"""How often Ray is asked for a connection, where it could not serve this client."""


def launch(config: TrainConfig) -> None:
    """Run a training on a Ray cluster, and show here what it shows.

    A job that loses a training process begins again from its newest checkpoint. One that is told to
    end by SIGTERM, here, saves at the next step's border.

    Args:
        config: of the run, with a cluster.

    Raises:
        ConfigError: Ray or the cluster is not there, the nodes are unlike, or as the run raises.
        RunError: the nodes did not come in time, the job was lost too often, or as the run raises.
        Preempted: it was told to end.
    """
    cluster, state, lost = config.cluster, RestartState(), None
    assert cluster is not None, "`train` has looked"
    nodes = cluster.nodes + config.rollout.nodes
    with ray_connection(cluster, nodes), Preemption(config.checkpoint.grace_s) as preemption:
        while True:
            try:
                with running_job(config, cluster, state) as job:
                    watch(job, config.stall_timeout_s, preemption)
                    return
            except Preempted:
                raise
            except LostError as error:
                lost = error
                if preemption.is_told():
                    raise Preempted(f"the job is not started again ({error})") from error
                if state.restarts == cluster.restarts:
                    raise RunError(
                        f"{error} (the job was started {state.restarts + 1} times)"
                    ) from error
                wait = cluster.backoff_s * 2**state.restarts
                state.restarts += 1
                log.warning("%s; it is started again in %g s", error, wait)
                time.sleep(wait)
            except (ConfigError, RunError) as error:
                if lost is None:
                    raise
                kind = ConfigError if isinstance(error, ConfigError) else RunError
                raise kind(f"{error} (before that: {lost})") from error


@contextlib.contextmanager
def ray_connection(cluster: ClusterConfig, nodes: int) -> Iterator[None]:
    """Connect to Ray; end what runs there when the block is left.

    Raises:
        ConfigError: the run wants several nodes and no address is named, or no Ray cluster is at
            the address, or it can't be joined within `cluster.start_timeout_s`, which bounds no
            client's (`ray://`) join.
    """
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local" and nodes > 1:
        raise ConfigError(
            f"the run wants {nodes} nodes, but neither cluster.address nor RAY_ADDRESS names a "
            "cluster, and this machine is one node"
        )
    until = time.monotonic() + cluster.start_timeout_s
    if address not in ("auto", "local"):
        check_answers(address, cluster.start_timeout_s)
    if address != "local" and not address.startswith("ray://"):
        # for a client Ray starts a server on the head: a second one for the trial may be too much
        check_joins(address, until - time.monotonic())
    try:
        _join(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"can't connect to Ray at cluster.address={address!r}: {error}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    """Join Ray; where the server process that the head starts for a client dies, ask for another.

    Ray 2.60 starts it at a port that was free a moment ago, and does not try again.
    """
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    for left in reversed(range(JOINS)):
        try:
            with warnings.catch_warnings():  # Ray forks; nothing here runs on jax's threads
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                ray.init(
                    address=address, logging_level=logging.WARNING, log_to_driver=True, **options
                )
            return
        except ConnectionAbortedError as error:
            if not left:
                raise
            log.warning("Ray at %s could not serve this client; trying again (%s)", address, error)
