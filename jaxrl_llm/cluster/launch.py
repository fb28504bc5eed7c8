"""Starts a run on the nodes of a Ray cluster, and starts it again where a process is lost."""

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from jaxrl_llm.cluster.actors import (
    DUMP_STACKS_SIGNAL,
    Coordinator,
    EngineHost,
    ProcessInfo,
    TrainProcess,
)
from jaxrl_llm.config.errors import ConfigError, Preempted, RunError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ClusterConfig, RolloutConfig
from jaxrl_llm.monitoring.display import Display
from jaxrl_llm.monitoring.job_context import JobContext, is_permanent
from jaxrl_llm.runs.preemption import Preemption
from jaxrl_llm.sharding import rendezvous
from jaxrl_llm.sharding.rendezvous import VARIABLES

CONNECT_S = 10.0  # for an address to answer
IMPORT_S = 20.0  # for a process to import Ray

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty frame of settings: HTTP/2 begins with one, and so do Ray's servers, which speak gRPC."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
"""What a client of HTTP/2 says first."""

JOIN = """
import signal, sys
import ray
signal.alarm(int(sys.argv[2]))
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print(" ".join(str(error).split()))
    sys.exit(1)
"""


def check_answers(address: str, seconds: float = CONNECT_S) -> None:
    """Refuse an address at which nothing answers, or something that is not Ray.

    Args:
        address: `host:port` or `ray://host:port`; an IPv6 host may stand in brackets.
        seconds: for all of it, at most `CONNECT_S`; a host's name may take its resolver longer.

    >>> check_answers("nowhere")
    Traceback (most recent call last):
        ...
    jaxrl_llm.config.errors.ConfigError: cluster.address: expected (ray://)host:port, got 'nowhere'
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"cluster.address: expected (ray://)host:port, got {address!r}")
    seconds = min(seconds, CONNECT_S)
    until = time.monotonic() + seconds
    try:
        with _connected(host.strip("[]"), int(port), until) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # only those who have its certificates may talk to it
            answer, closed = _first_frame(connection, until)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at cluster.address={address!r}: {error}"
        ) from error
    if len(answer) < len(SETTINGS) or answer[3:9] != SETTINGS[3:]:
        end = "and then the connection's end" if closed else f"in {seconds:g} s"
        raise ConfigError(
            f"no Ray cluster answers at cluster.address={address!r}: expected a server that speaks "
            f"HTTP/2, as Ray's do, got {answer[:60] if answer else 'nothing'} {end}"
        )


def _connected(host: str, port: int, until: float) -> socket.socket:
    """Return a connection to the first of a host's addresses that takes one."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, address) in zip(
        range(len(addresses), 0, -1), addresses, strict=True
    ):
        try:
            connection = socket.socket(family, kind, protocol)  # fails without IPv6, say
            try:
                connection.settimeout(_left(until) / left)  # each has its share of the time
                connection.connect(address)
                return connection
            except OSError:
                connection.close()
                raise
        except OSError:
            if left == 1:
                raise
    raise OSError(f"{host} has no address")


def _first_frame(connection: socket.socket, until: float) -> tuple[bytes, bool]:
    """Greet a server; return what it answers, and whether it then closed the connection."""
    answer = b""
    try:
        connection.settimeout(_left(until))
        connection.sendall(PREFACE)
        while len(answer) < len(SETTINGS):
            connection.settimeout(_left(until))
            part = connection.recv(256)
            if not part:
                return answer, True
            answer += part
    except TimeoutError:
        return answer, False
    except ConnectionError:
        return answer, True
    return answer, False


def _left(until: float) -> float:
    return max(until - time.monotonic(), 1e-3)  # 0 would be no limit at all


def check_joins(address: str, seconds: float) -> None:
    """Refuse an address at which Ray can't be joined in time.

    Another process tries it, which can be ended: what waits in Ray for a server that is silent
    can't be. For a server that takes connections and answers no request, Ray 2.60 needs 10
    minutes, and as its client (`ray://`) it waits for ever.

    Args:
        address: of a cluster, or `auto`.
        seconds: until it must have succeeded.

    Raises:
        ConfigError: it failed, or took longer.
    """
    words = [sys.executable, "-c", JOIN, address, str(max(1, math.ceil(seconds)))]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=seconds + IMPORT_S, check=False
        )
        late = done.returncode == -signal.SIGALRM
        text = done.stdout.strip() or done.stderr.strip()
    except subprocess.TimeoutExpired:
        done, late, text = None, True, ""
    if late:
        raise ConfigError(
            f"the Ray cluster at cluster.address={address!r} could not be joined in {seconds:.0f} s"
            " (cluster.start_timeout_s): it takes connections, but does not answer"
        )
    if done is not None and done.returncode:
        reason = text.splitlines()[-1] if text else f"exit status {done.returncode}"
        raise ConfigError(f"can't connect to Ray at cluster.address={address!r}: {reason}")


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
    ) -> dict[str, str]:
        """Return environment variables of a training process, or of an engine of a run."""
        env = {name: v for name, v in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
        is_vllm = engine_of is not None and engine_of.engine == "vllm"
        if self.on_cpus or is_vllm:  # whose sidecars have the GPUs
            env["JAX_PLATFORMS"] = "cpu"
        if self.on_cpus:
            env["JAX_NUM_CPU_DEVICES"] = str(self.devices[engine_of is not None])
        if engine_of is not None:  # whatever the variables of the launcher or the node say
            env |= dict(zip(rendezvous.VARIABLES, ("localhost:1", "1", "0"), strict=True))
        return env | {name: str(value) for name, value in cluster.env.items()}


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
        RunError: nodes or processes did not come in time, or no CPU is left for tasks that score.
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
        cpus = ray.cluster_resources().get("CPU", 0)
        reserved = sum(node["CPU"] for node in requirements.nodes)
        if cluster.reward_tasks and cpus - reserved < 1:
            raise RunError(
                f"cluster.reward_tasks={cluster.reward_tasks}, but the job's processes take "
                f"{reserved:g} of the cluster's {cpus:g} CPUs: lower cluster.cpus, or add nodes"
            )
        total, name = cluster.nodes * cluster.processes_per_node, f"jaxrl_llm_{uuid.uuid4().hex}"
        head = next(node["NodeID"] for node in nodes if HEAD_NODE_RESOURCE in node["Resources"])
        coordinator = ray.remote(Coordinator).options(
            name=name,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=True),
        )
        job = RayJob(coordinator.remote(total, state.counters), [], [])
        folder, env = str(Path.cwd()), requirements.process_env(cluster)
        train = [
            schedule(
                TrainProcess, group, index // cluster.processes_per_node, requirements.process
            ).remote(folder, env)
            for index in range(total)
        ]
        env = requirements.process_env(cluster, config.rollout)
        retries = {"max_restarts": cluster.restarts, "max_task_retries": cluster.restarts}
        engines = [
            schedule(
                EngineHost, group, cluster.nodes + index, requirements.engine, **retries
            ).remote(folder, env, config, name, index)
            for index in range(config.rollout.nodes)
        ]
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
        first = job.processes[0]  # where the others meet it
        address = f"{first.address}:{first.free_port}"
        for index, process in enumerate(train):
            membership = dict(zip(VARIABLES, (address, str(total), str(index)), strict=True))
            place = context._replace(process_index=index)
            job.tasks.append(process.run.remote(config, place, membership))
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


REPORT_GRACE_S = 15.0  # for other processes to report, too, when one has failed
STACKS_WAIT_S = 5.0  # for stacks to reach the launcher


def watch(job: RayJob, stall_timeout_s: float | None, preemption: Preemption) -> None:
    """Show what a job shows, until it has ended; pass on to it that it is to end.

    Args:
        job: that runs.
        stall_timeout_s: seconds without a step until it counts as hung; None never.
        preemption: listens here.

    Raises:
        LostError: a process was lost, or there was no step for so long.
        RunError: as the run raises; so ConfigError and others.
    """
    running, progressed, stop_sent = list(job.tasks), time.monotonic(), False
    with contextlib.ExitStack() as stack:
        displays: list[Display] = []
        while running:
            ended, running = ray.wait(running, timeout=POLL_INTERVAL_S)
            if update_displays(job, displays, stack):
                progressed = time.monotonic()
            for task in ended:
                check_exit(job, task, [*running, *ended])
            if preemption.is_told() and not stop_sent:
                call_result(job.coordinator.request_stop.remote())
                stop_sent = True
            if stall_timeout_s and time.monotonic() - progressed > stall_timeout_s:
                send_signal(query_job(job, {})[1], DUMP_STACKS_SIGNAL)
                time.sleep(STACKS_WAIT_S)  # what they print comes through Ray
                raise LostError(f"there was no step for {stall_timeout_s:g} s (stall_timeout_s)")
        update_displays(job, displays, stack)


def update_displays(job: RayJob, displays: list[Display], stack: contextlib.ExitStack) -> bool:
    """Show what the job's first process has shown since the last time; return if it advanced.

    Args:
        job: that runs.
        displays: those that were opened; one that is new is added.
        stack: closes them.
    """
    calls = call_result(job.coordinator.take_display_calls.remote())
    for method, arguments in calls:
        if method == "open":
            displays.append(Display(*arguments))
            stack.callback(displays[-1].close)
        else:
            getattr(displays[-1], method)(*arguments)
    return any(method in ("open", "advance") for method, _ in calls)


def call_result(task: Any) -> Any:
    """Return the result of a call to the coordinator.

    Raises:
        LostError: it is gone, or can't be reached.
    """
    try:
        return ray.get(task, timeout=RPC_TIMEOUT_S)
    except RayError as error:
        raise LostError(f"the job's first node was lost: {error}") from error


def check_exit(job: RayJob, task: Any, others: list[Any]) -> None:
    """Raise why a process ended, if it failed; the others may know better.

    An error of the library's or the user's is the reason. A process that is gone is a loss, and so
    are jax's and Ray's errors in one that talked to it.
    """
    losses: list[str] = []
    until = time.monotonic() + REPORT_GRACE_S
    for each in [task, *(other for other in others if other is not task)]:
        try:
            ray.get(each, timeout=max(0.0, until - time.monotonic()) if losses else None)
            if each is task:
                return
        except GetTimeoutError:
            continue
        except RayTaskError as error:
            cause = error.cause
            is_jax = isinstance(cause, jax.errors.JaxRuntimeError)
            if is_permanent(cause) if is_jax else not isinstance(cause, RayError):
                raise original_error(error) from error  # it would come again
            losses.append(str(cause))
        except RayError as error:
            losses.append(str(error))
    if failure := call_result(job.coordinator.get_failure.remote()):
        kind, text = failure
        raise (ConfigError if kind == "ConfigError" else RunError)(text)
    raise LostError("a training process was lost: " + " ".join(losses[0].split()))


# Ray shows a line of several processes once; of stacks all are expected, of Gloo's greetings none
os.environ.setdefault("RAY_DEDUP_LOGS_ALLOW_REGEX", r"Thread 0x|recent call first|^\s*File \"")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", r"^\[Gloo\] Rank")
try:
    import ray
except ModuleNotFoundError as error:
    raise ConfigError("cluster needs the package ray: pip install 'jaxrl_llm[ray]'") from error


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
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    options |= {"address": address, "logging_level": logging.WARNING, "log_to_driver": True}
    for left in reversed(range(JOINS)):
        try:
            with warnings.catch_warnings():  # Ray forks; nothing here runs on jax's threads
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                ray.init(**options)
            break
        except (ConnectionError, RuntimeError, ValueError) as error:
            # the server process that the head starts for a client has died: Ray 2.60 starts it at
            # a port that was free a moment ago, and does not try again
            if not left or not isinstance(error, ConnectionAbortedError):
                raise ConfigError(
                    f"can't connect to Ray at cluster.address={address!r}: {error}"
                ) from error
            log.warning("Ray at %s could not serve this client; trying again (%s)", address, error)
    try:
        yield
    finally:
        ray.shutdown()
