"""The Ray actors of a job: processes that train, and engines on nodes of their own."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.job_context import JobContext
from jaxrl_llm.version import __version__

if TYPE_CHECKING:
    from jaxrl_llm.rollout.engine import Completion, Receipt, Request, Stop


DUMP_STACKS_SIGNAL = signal.SIGUSR1
"""Lets a process print the stacks of all its threads."""


class ProcessInfo(NamedTuple):
    """Where an actor runs, and on which software.

    Attributes:
        node: Ray's id of the node.
        address: of the node.
        pid: of the process.
        free_port: one that nobody listened on.
        versions: of Python and the packages that compute, by name.
    """

    node: str
    address: str
    pid: int
    free_port: int
    versions: dict[str, str]


class _Process:
    """A process of a job, in the launcher's folder and with its environment variables."""

    def __init__(self, folder: str, env: Mapping[str, str]) -> None:
        """Go to the launcher's folder.

        Raises:
            ConfigError: there is no such folder here.
        """
        try:
            os.chdir(folder)
        except OSError as error:
            raise ConfigError(
                f"{socket.gethostname()} has no folder {folder}: start the run from one that all "
                "nodes see"
            ) from error
        if "jax" in sys.modules:
            raise RunError("this process imported jax before its variables were set")
        sys.path.insert(0, folder)
        os.environ.update(env)
        faulthandler.register(DUMP_STACKS_SIGNAL, all_threads=True)

    def info(self) -> ProcessInfo:
        """Return where this process runs."""
        import platform
        from importlib.metadata import version

        import ray

        from jaxrl_llm.runs.directory import PACKAGES

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return ProcessInfo(
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            port,
            {
                "python": platform.python_version(),
                "jaxrl_llm": __version__,
                **{name: version(name) for name in PACKAGES},
            },
        )

    def path_exists(self, path: str) -> bool:
        """Return whether this node sees a file."""
        return Path(path).exists()


class TrainProcess(_Process):
    """An actor that runs the training program."""

    def write_marker(self, folder: str, name: str) -> str:
        """Write a file that all others should see; return its path."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder).resolve() / name
        path.write_text("")
        return str(path)

    def remove_marker(self, path: str) -> None:
        """Remove that file."""
        Path(path).unlink()

    def run(self, config: TrainConfig, job: JobContext, membership: Mapping[str, str]) -> None:
        """Run the whole training, as one of several processes.

        Args:
            config: of the run.
            job: this process's place in it.
            membership: environment variables from which jax knows the other processes.
        """
        os.environ.update(membership)
        job_context.enter_job(job)
        from jaxrl_llm.training.run import run_training

        run_training(config)


@contextlib.contextmanager
def exiting_on_device_error() -> Iterator[None]:
    """End the process on an error of jax that another one may not have; Ray starts another."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        if job_context.is_permanent(error):
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class EngineHost(_Process):
    """An asynchronous actor with an engine on devices of its own.

    A new one has no weights; it takes them when it is told of a weight sync that it has not seen.

    Args:
        folder: the launcher's.
        env: environment variables that are set.
        config: of the run.
        coordinator: name of the `Coordinator`; a handle could not be given to an actor's next life.
        index: of this engine.
    """

    def __init__(
        self, folder: str, env: Mapping[str, str], config: TrainConfig, coordinator: str, index: int
    ) -> None:
        """Make the engine when weights come: there may be no model yet."""
        import ray

        super().__init__(folder, env)
        self._config, self._index = config, index
        self._coordinator = ray.get_actor(coordinator)
        self._engine: Any = None
        self._spec: Any = None
        self._sync = -1
        self._receipt: Any = None
        self._loading = threading.Lock()
        self._newest: Any = (-1, None, None)  # sampling that can be left: see `_sampling`
        self._resources = contextlib.ExitStack()  # as long as the process lives
        self._coordinator.register_engine.remote(index, self.info())

    async def load(self, sync: int, version: int) -> "Receipt":
        """Take the weights of a sync, unless the engine has them.

        Raises:
            EngineError: they did not come whole.
            ConfigError: there can't be such an engine here.
        """
        with exiting_on_device_error():
            return await asyncio.to_thread(self._load, sync, version)

    async def sample(
        self, requests: "Sequence[Request]", sync: int, version: int
    ) -> "list[Completion]":
        """Sample one answer for each request under the weights of a sync."""
        await self.load(sync, version)
        with exiting_on_device_error():
            return await asyncio.to_thread(self._engine.sample, requests)

    async def sample_until(
        self, number: int, requests: "Sequence[Request]", needed: int, sync: int, version: int
    ) -> "list[Completion]":
        """Sample until `stop` is called with the same number; return all answers as they stand.

        Args:
            number: of the call, higher than those before.
            requests: to answer.
            needed: the first so many are those that `first_whole` waits for.
            sync: of the weights.
            version: of the weights.
        """
        stop, first_whole = self._sampling(number)
        await self.load(sync, version)
        left, loop = set(range(needed)), asyncio.get_running_loop()

        def tell(number: int, _: "Completion") -> None:
            left.discard(number)
            if not left:
                loop.call_soon_threadsafe(first_whole.set)

        if not left:
            first_whole.set()
        try:
            with exiting_on_device_error():
                sample_until = self._engine.sample_until
                return await asyncio.to_thread(sample_until, requests, len(requests), stop, tell)
        finally:
            first_whole.set()

    async def first_whole(self, number: int) -> None:
        """Wait until the answers are whole that `sample_until` needs."""
        await self._sampling(number)[1].wait()

    async def stop(self, number: int) -> None:
        """Let `sample_until` return."""
        self._sampling(number)[0].set()

    def _sampling(self, number: int) -> "tuple[Stop, asyncio.Event]":
        """Return what ends a sampling, and what is set once the answers it needs are whole."""
        from jaxrl_llm.rollout.engine import Stop

        if number > self._newest[0]:
            self._newest = number, Stop(), asyncio.Event()
        return self._newest[1:]

    async def generate(self, request: "Request", sync: int, version: int) -> "Completion":
        """Sample one answer, beside others, under the weights of a sync."""
        if self._sync != sync:
            await self.load(sync, version)
        with exiting_on_device_error():
            return await self._engine.generate(request)

    async def call(self, method: str) -> None:
        """Call a method of the engine, if there is one yet: pause, resume, sleep or wake."""
        if self._engine is not None:
            await asyncio.to_thread(getattr(self._engine, method))

    def _load(self, sync: int, version: int) -> "Receipt":
        import jax

        from jaxrl_llm.models.parameters import declare
        from jaxrl_llm.rollout.remote import collect, plan_transfer
        from jaxrl_llm.sharding.checksum import checksum

        with self._loading:
            if self._sync == sync:
                return self._receipt
            if self._engine is None:
                self._engine, self._spec = self._open()
            engine, spec = self._engine, self._spec
            is_native = self._config.rollout.engine == "native"
            self._sync = -1
            if is_native:
                engine.unload()  # there is no room for both
            params, received_bytes = collect(
                self._coordinator,
                plan_transfer(spec, self._config.model.dtype),
                engine.weights_layout if is_native else None,
                sync=sync,
                like=declare(spec),
            )
            receipt = engine.load(params, version, **({"donate": True} if is_native else {}))
            if receipt.checksum is None:  # it has compared with what came, not with what was sent
                receipt = receipt._replace(checksum=int(jax.jit(checksum)(params)))
            self._receipt = receipt._replace(moved_bytes=received_bytes)
            self._sync = sync
            return self._receipt

    def _open(self) -> tuple[Any, Any]:
        """Return the engine and the spec of its model."""
        from jaxrl_llm.models.decoder import Decoder
        from jaxrl_llm.models.model import base_model, decoder_spec, for_length
        from jaxrl_llm.monitoring.writer import quiet_libraries
        from jaxrl_llm.rollout.build import local_engine
        from jaxrl_llm.runs.compile_cache import use_compilation_cache
        from jaxrl_llm.sharding import distributed
        from jaxrl_llm.training.load_model import model_spec, open_layout

        quiet_libraries()
        distributed.initialize()
        config = self._config
        folder = Path(config.run_dir) / f"engine_{self._index}"
        folder.mkdir(parents=True, exist_ok=True)
        if config.compilation_cache:
            self._resources.enter_context(use_compilation_cache(folder.resolve() / "compilation"))
        longest = config.longest_sequence
        model = for_length(base_model(Decoder(model_spec(config.model))), longest)
        layout = open_layout(config.mesh, "rollout", config.mesh.rollout)
        return local_engine(config, model, layout, folder), decoder_spec(model)


class Coordinator:
    """An asynchronous Ray actor with what the processes of a job and their launcher share.

    It holds references to weights and answers; these themselves stay in the nodes' object stores.

    Args:
        processes: how many train; each of them publishes its parts of the weights.
        counters: of the job's earlier starts, as `get_counters` returned them.
    """

    def __init__(self, processes: int, counters: Mapping[str, int]) -> None:
        self._processes = processes
        self._display_calls: list[tuple[str, tuple[Any, ...]]] = []
        self._failure: tuple[str, str] | None = None
        self._counters = defaultdict(int, counters)
        self._engines: dict[int, Any] = {}
        self._objects: dict[int, tuple[Any, int]] = {}
        self._stop_requested = False
        self._sync = -1
        self._parts: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by bucket and process
        self._changed = asyncio.Condition()

    async def put_display_call(self, method: str, *arguments: Any) -> None:
        """Keep a call of a display's method until the launcher takes it."""
        self._display_calls.append((method, arguments))

    async def take_display_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the calls since the last time."""
        calls, self._display_calls = self._display_calls, []
        return calls

    async def report_failure(self, error: tuple[str, str]) -> None:
        """Note the error for which a process ends: its class and its text. The first one counts."""
        self._failure = self._failure or error

    async def get_failure(self) -> tuple[str, str] | None:
        """Return that error."""
        return self._failure

    async def request_stop(self) -> None:
        """Have the job save, and end."""
        self._stop_requested = True

    async def is_stop_requested(self) -> bool:
        """Return whether the job is to save and to end."""
        return self._stop_requested

    async def increment(self, counter: str, amount: int) -> None:
        """Add to a counter."""
        self._counters[counter] += amount

    async def get_counters(self) -> dict[str, int]:
        """Return all counters."""
        return dict(self._counters)

    async def register_engine(self, index: int, process: Any) -> None:
        """Note the process in which an engine runs; count those that replace another."""
        self._counters["engine_restarts"] += index in self._engines
        self._engines[index] = process

    async def get_engines(self) -> list[Any]:
        """Return the processes in which the engines run."""
        return list(self._engines.values())

    async def put(self, key: int, reference: list[Any]) -> None:
        """Store the first process's reference, until each of the others has got it."""
        self._objects[key] = (reference[0], self._processes - 1)

    async def get(self, key: int) -> Any:
        """Return the reference under a key."""
        reference, waiting = self._objects.pop(key)
        if waiting > 1:
            self._objects[key] = (reference, waiting - 1)
        return reference

    async def publish(self, sync: int, bucket: int, process: int, reference: list[Any]) -> None:
        """Store the reference to a process's parts of a bucket; those of earlier syncs are dropped.

        Args:
            sync: number of the weight sync, from 0 on.
            bucket: which part of the arrays.
            process: index of the process.
            reference: of the object store, in a list, else Ray would send the object itself.
        """
        async with self._changed:
            if sync > self._sync:
                self._sync, self._parts = sync, defaultdict(dict)
            self._parts[bucket][process] = reference[0]
            self._changed.notify_all()

    async def get_parts(self, sync: int, bucket: int) -> list[Any]:
        """Return the references to a bucket's parts, as soon as all processes have published.

        Raises:
            LookupError: a later sync has begun.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._sync > sync
                    or (self._sync == sync and len(self._parts[bucket]) == self._processes)
                )
            )
            if self._sync > sync:
                raise LookupError(f"weight sync {sync} is over, as sync {self._sync} has begun")
            parts = self._parts[bucket]
            return [parts[process] for process in sorted(parts)]
