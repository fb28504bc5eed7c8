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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.train import TrainConfig

if TYPE_CHECKING:  # jax must not be imported before its variables are set
    from jaxrl_llm.rollout.types import Completion, Receipt, Request

DUMP = signal.SIGUSR1
"""Lets a process print the stacks of all its threads."""


class Machine(NamedTuple):
    """Where an actor runs, and by what.

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


class Settings(NamedTuple):
    """What a process takes over from the launcher.

    Attributes:
        folder: its working directory.
        environment: variables that are set.
    """

    folder: str
    environment: Mapping[str, str]


class _Process:
    """A process of a job: its surroundings are the launcher's."""

    def __init__(self, settings: Settings) -> None:
        """Go to the launcher's folder.

        Raises:
            ConfigError: there is no such folder here.
        """
        try:
            os.chdir(settings.folder)
        except OSError as error:
            raise ConfigError(
                f"{socket.gethostname()} has no folder {settings.folder}: start the run from one "
                "that all nodes see"
            ) from error
        if "jax" in sys.modules:
            raise RunError("this process imported jax before its variables were set")
        sys.path.insert(0, settings.folder)
        os.environ.update(settings.environment)
        faulthandler.register(DUMP, all_threads=True)

    def machine(self) -> Machine:
        """Say where this process runs."""
        import platform
        from importlib.metadata import version

        import ray

        from jaxrl_llm.runs.directory import PACKAGES

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return Machine(
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            port,
            {
                "python": platform.python_version(),
                **{name: version(name) for name in ("jaxrl_llm", *PACKAGES)},
            },
        )

    def sees(self, path: str) -> bool:
        """Return whether a file is there."""
        return Path(path).exists()


class TrainProcess(_Process):
    """An actor that runs the training program."""

    def mark(self, folder: str, name: str) -> str:
        """Write a file that all others should see; return its path."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder).resolve() / name
        path.write_text("")
        return str(path)

    def unmark(self, path: str) -> None:
        """Remove that file."""
        Path(path).unlink()

    def run(self, config: TrainConfig, place: context.Member, group: Mapping[str, str]) -> None:
        """Run the whole training, as one of several processes.

        Args:
            config: of the run.
            place: of this process in the job.
            group: variables from which it knows the other processes.
        """
        os.environ.update(group)
        context.join(place)
        from jaxrl_llm.train import run_here

        run_here(config)


@contextlib.contextmanager
def ending_on_faults() -> Iterator[None]:
    """End the process on an error of jax that another one may not have; Ray starts another."""
    from jax.errors import JaxRuntimeError

    try:
        yield
    except JaxRuntimeError as error:
        if context.comes_again(error):
            raise
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class EngineHost(_Process):
    """An asynchronous actor with an engine on devices of its own.

    A new one has no weights; it takes them when it is told of a push that it has not seen.

    Args:
        settings: from the launcher.
        config: of the run.
        board: name of the job's board; a handle could not be given to an actor's next life.
        number: which engine this is.
    """

    def __init__(self, settings: Settings, config: TrainConfig, board: str, number: int) -> None:
        """Make the engine when weights come: there may be no model yet."""
        import ray

        super().__init__(settings)
        self._config, self._number = config, number
        self._board = ray.get_actor(board)
        self._engine: Any = None
        self._push = -1
        self._receipt: Any = None
        self._loading = threading.Lock()
        self._opened = contextlib.ExitStack()  # as long as the process lives
        self._board.came.remote(number, self.machine())

    async def load(self, push: int, version: int) -> "Receipt":
        """Take the weights of a push, unless the engine has them.

        Raises:
            EngineError: they did not come whole.
            ConfigError: there can't be such an engine here.
        """
        with ending_on_faults():
            return await asyncio.to_thread(self._load, push, version)

    async def sample(
        self, requests: "Sequence[Request]", push: int, version: int
    ) -> "list[Completion]":
        """Sample one answer for each request under the weights of a push."""
        await self.load(push, version)
        with ending_on_faults():
            return await asyncio.to_thread(self._engine.sample, requests)

    async def tell(self, method: str) -> None:
        """Pause, resume, sleep or wake."""
        if self._engine is not None:
            await asyncio.to_thread(getattr(self._engine, method))

    def _load(self, push: int, version: int) -> "Receipt":
        import jax

        from jaxrl_llm.cluster.weights import collect, plan
        from jaxrl_llm.models.parameters import declare
        from jaxrl_llm.sharding.checksum import checksum

        with self._loading:
            if self._push == push:
                return self._receipt
            if self._engine is None:
                self._engine = self._open()
            engine, spec = self._engine, self._engine.spec
            is_native = self._config.rollout.engine == "native"
            self._push = -1
            if is_native:
                engine.unload()  # there is no room for both
            params, came = collect(
                self._board,
                plan(spec, self._config.model.dtype),
                engine.weights_layout if is_native else None,
                push=push,
                like=declare(spec),
            )
            found = engine.load(params, version, **({"donate": True} if is_native else {}))
            if found.checksum is None:  # it has compared with what came, not with what was sent
                found = found._replace(checksum=int(jax.jit(checksum)(params)))
            self._receipt = found._replace(moved_bytes=came)
            self._push = push
            return self._receipt

    def _open(self) -> Any:
        from jaxrl_llm.models.hf_config import read_spec
        from jaxrl_llm.models.lora import without_adapter
        from jaxrl_llm.rollout.build import local_engine
        from jaxrl_llm.runs.directory import compiled_into
        from jaxrl_llm.sharding import distributed
        from jaxrl_llm.training.setup import open_layout, quiet_libraries

        quiet_libraries()
        distributed.start()
        config = self._config
        folder = Path(config.run_dir) / f"engine_{self._number}"
        folder.mkdir(parents=True, exist_ok=True)
        if config.compilation_cache:
            self._opened.enter_context(compiled_into(folder.resolve() / "compilation"))
        spec = without_adapter(read_spec(config.model.path))
        layout = open_layout(config.mesh, "rollout", config.mesh.rollout)
        return local_engine(config, spec, layout, folder)
