"""Starts a run on the nodes of a Ray cluster, and starts it again where a process is lost."""

import contextlib
import dataclasses
import logging
import os
import signal
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.config.errors import ConfigError, Preempted, RunError

# Ray shows a line of several processes once; of stacks all are wanted, of Gloo's greetings none
os.environ.setdefault("RAY_DEDUP_LOGS_ALLOW_REGEX", r"Thread 0x|recent call first|^\s*File \"")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", r"^\[Gloo\] Rank")
try:
    import ray
except ModuleNotFoundError as error:
    raise ConfigError("cluster needs the package ray: pip install 'jaxrl_llm[ray]'") from error
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxrl_llm.cluster.actors import DUMP, EngineHost, Machine, TrainProcess
from jaxrl_llm.cluster.address import check_answers, check_joins
from jaxrl_llm.cluster.context import Member, comes_again
from jaxrl_llm.cluster.coordinator import Board
from jaxrl_llm.cluster.resources import (
    LostError,
    actor,
    answers,
    as_raised,
    await_nodes,
    check_alike,
    check_shared_folder,
    check_spare_cpus,
    most_gpus,
    requirements,
    reserve,
)
from jaxrl_llm.config.sections.cluster import ClusterConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.runs.preemption import Preemption
from jaxrl_llm.sharding.distributed import VARIABLES

LOOK_S = 0.5  # between two looks at what the processes say
GRACE_S = 15.0  # for other processes to report, too, when one has failed
DUMP_S = 5.0  # for stacks to reach the launcher
REACH_S = 20.0  # for other nodes to be reached
HEAD = "node:__internal_head__"  # a resource of one node, which the cluster can't do without

log = logging.getLogger(__name__)


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
    cluster, past, lost = config.cluster, Past(), None
    assert cluster is not None, "`train` has looked"
    nodes = cluster.nodes + config.rollout.nodes
    with connected(cluster, nodes), Preemption(config.checkpoint.grace_s) as preemption:
        while True:
            try:
                with started(config, cluster, past) as job:
                    watch(job, config.stall_timeout_s, preemption)
                    return
            except Preempted:
                raise
            except LostError as error:
                lost = error
                if preemption.is_told():
                    raise Preempted(f"the job is not started again ({error})") from error
                if past.restarts == cluster.restarts:
                    raise RunError(
                        f"{error} (the job was started {past.restarts + 1} times)"
                    ) from error
                wait = cluster.backoff_s * 2**past.restarts
                past.restarts += 1
                log.warning("%s; it is started again in %g s", error, wait)
                time.sleep(wait)
            except (ConfigError, RunError) as error:
                if lost is None:
                    raise
                kind = ConfigError if isinstance(error, ConfigError) else RunError
                raise kind(f"{error} (before that: {lost})") from error


@dataclasses.dataclass
class Past:
    """What the launcher knows of a job's earlier starts.

    Attributes:
        restarts: how often it was started again.
        gpus: of the node that had most: the others may be away when it is started again.
        counts: of what was lost and replaced, by name.
    """

    restarts: int = 0
    gpus: int = 0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def connected(cluster: ClusterConfig, nodes: int) -> Iterator[None]:
    """Be connected to Ray; end what runs there when the block is left.

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
    how: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        with warnings.catch_warnings():  # Ray forks; nothing here runs on jax's threads
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True, **how)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"can't connect to Ray at cluster.address={address!r}: {error}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


class Job(NamedTuple):
    """What was started.

    Attributes:
        board: handle of the `Board` actor.
        machines: where processes and engines run.
        tasks: references to the ends of the training processes.
    """

    board: Any
    machines: list[Machine]
    tasks: list[Any]


@contextlib.contextmanager
def started(config: TrainConfig, cluster: ClusterConfig, past: Past) -> Iterator[Job]:
    """Start all processes of a job; end them when the block is left.

    Raises:
        RunError: nodes or processes did not come in time.
        ConfigError: the nodes have other versions or files than each other.
    """
    until = time.monotonic() + cluster.start_timeout_s
    nodes = await_nodes(cluster.nodes + config.rollout.nodes, until)
    past.gpus = max(past.gpus, most_gpus(nodes))
    needs = requirements(config, cluster, past.gpus)
    if needs.on_cpus:
        log.warning("no node of the cluster has a GPU: the run's devices are the CPUs'")
    group = reserve(needs, cluster.start_timeout_s, until)
    job = None
    try:
        check_spare_cpus(needs, cluster.reward_tasks)
        total, name = cluster.nodes * cluster.processes_per_node, f"jaxrl_llm_{uuid.uuid4().hex}"
        head = next(node["NodeID"] for node in nodes if HEAD in node["Resources"])
        board = ray.remote(Board).options(
            name=name,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=True),
        )
        job = Job(board.remote(total, past.counts), [], [])
        train = [
            actor(TrainProcess, group, number // cluster.processes_per_node, needs.process).remote(
                needs.settings(cluster)
            )
            for number in range(total)
        ]
        again = {"max_restarts": cluster.restarts, "max_task_retries": cluster.restarts}
        hosts = [
            actor(EngineHost, group, cluster.nodes + number, needs.engine, **again).remote(
                needs.settings(cluster, config), config, name, number
            )
            for number in range(config.rollout.nodes)
        ]
        job.machines.extend(answers([a.machine.remote() for a in [*train, *hosts]], cluster))
        check_alike(job.machines)
        check_shared_folder(config.run_dir, [*train, *hosts], cluster)
        place = Member(
            job.board,
            tuple(hosts),
            past.restarts,
            number=0,
            engine_devices=len(hosts) * needs.devices[1],
            reward_tasks=cluster.reward_tasks // total,
            retries=cluster.restarts,
        )
        first = job.machines[0]
        for number, process in enumerate(train):
            address = f"{first.address}:{first.free_port}"
            group_of = dict(zip(VARIABLES, (address, str(total), str(number)), strict=True))
            job.tasks.append(process.run.remote(config, place._replace(number=number), group_of))
        yield job
    except BaseException:
        machines: list[Machine] = []
        if job is not None:
            past.counts, machines = known(job, past.counts)
        remove_placement_group(group)
        on_each(machines, signal.SIGKILL)  # also what hangs, and before a next start
        raise
    else:
        remove_placement_group(group)  # and all that runs in it


def known(job: Job, counts: dict[str, int]) -> tuple[dict[str, int], list[Machine]]:
    """Return what was lost and replaced so far, and where all processes and engines are now.

    Args:
        job: that was started.
        counts: as they were before; they are returned if the board is gone, with its node.
    """
    try:
        counts, engines = ray.get(
            [job.board.counts.remote(), job.board.engines.remote()], timeout=REACH_S
        )
    except RayError:
        return counts, job.machines
    return counts, [*job.machines, *engines]  # some engines were made anew, on other nodes


def watch(job: Job, stall_timeout_s: float | None, preemption: Preemption) -> None:
    """Show what a job shows, until it has ended; pass on to it that it is to end.

    Args:
        job: that runs.
        stall_timeout_s: seconds without a step until it counts as hung; None never.
        preemption: listens here.

    Raises:
        LostError: a process was lost, or there was no step for so long.
        RunError: as the run raises; so ConfigError and others.
    """
    left, progressed, told_job = list(job.tasks), time.monotonic(), False
    with contextlib.ExitStack() as stack:
        shown: list[Display] = []
        while left:
            ended, left = ray.wait(left, timeout=LOOK_S)
            if show(job, shown, stack):
                progressed = time.monotonic()
            for task in ended:
                check_end(job, task, [*left, *ended])
            if preemption.is_told() and not told_job:
                told(job.board.end.remote())
                told_job = True
            if stall_timeout_s and time.monotonic() - progressed > stall_timeout_s:
                dump_stacks(known(job, {})[1])
                raise LostError(f"there was no step for {stall_timeout_s:g} s (stall_timeout_s)")
        show(job, shown, stack)


def show(job: Job, shown: list[Display], stack: contextlib.ExitStack) -> bool:
    """Show what the job's first process has shown since the last time; return if it advanced.

    Args:
        job: that runs.
        shown: displays that were opened; one that is new is added.
        stack: closes them.
    """
    messages = told(job.board.take.remote())
    for method, arguments in messages:
        if method == "open":
            shown.append(Display(*arguments))
            stack.callback(shown[-1].close)
        else:
            getattr(shown[-1], method)(*arguments)
    return any(method in ("open", "advance") for method, _ in messages)


def told(task: Any) -> Any:
    """Return what the board answers.

    Raises:
        LostError: it is gone, or can't be reached.
    """
    try:
        return ray.get(task, timeout=REACH_S)
    except RayError as error:
        raise LostError(f"the job's first node was lost: {error}") from error


def check_end(job: Job, task: Any, others: list[Any]) -> None:
    """Raise why a process ended, if it failed; the others may know better.

    An error of the library's or the user's is the reason. A process that is gone is a loss, and so
    are jax's and Ray's errors in one that talked to it.
    """
    losses: list[str] = []
    until = time.monotonic() + GRACE_S
    for each in [task, *(other for other in others if other is not task)]:
        try:
            ray.get(each, timeout=max(0.0, until - time.monotonic()) if losses else None)
            if each is task:
                return
        except GetTimeoutError:
            continue
        except RayTaskError as error:
            if is_final(error.cause):
                raise as_raised(error) from error
            losses.append(str(error.cause))
        except RayError as error:
            losses.append(str(error))
    if failure := told(job.board.failure.remote()):
        kind, text = failure
        raise (ConfigError if kind == "ConfigError" else RunError)(text)
    raise LostError("a training process was lost: " + " ".join(losses[0].split()))


def is_final(cause: Any) -> bool:
    """Return whether a process's error would come again.

    >>> is_final(ValueError("a bug"))
    True
    >>> is_final(jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset"))
    False
    """
    if isinstance(cause, jax.errors.JaxRuntimeError):
        return comes_again(cause)
    return not isinstance(cause, RayError)


def dump_stacks(machines: Sequence[Machine]) -> None:
    """Let all processes print the stacks of their threads, as far as they still can."""
    on_each(machines, DUMP)
    time.sleep(DUMP_S)  # what they print comes through Ray


def on_each(machines: Sequence[Machine], what: signal.Signals) -> None:
    """Send a signal to processes on their nodes; wait for the end of those that it kills."""

    @ray.remote(num_cpus=0, max_retries=0)
    def send(pid: int) -> None:
        title = Path(f"/proc/{pid}/cmdline")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            while b"ray::" in title.read_bytes():  # else it is another's by now
                os.kill(pid, what)
                if what != signal.SIGKILL:
                    return
                time.sleep(LOOK_S)

    tasks = []
    for machine in machines:
        there = NodeAffinitySchedulingStrategy(machine.node, soft=False)
        tasks.append(send.options(scheduling_strategy=there).remote(machine.pid))
    ray.wait(tasks, num_returns=len(tasks), timeout=REACH_S)  # a node may be gone, too
