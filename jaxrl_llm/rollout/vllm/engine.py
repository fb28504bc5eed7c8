"""vLLM as the engine: it samples in processes of its own, the sidecars."""

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.models.hf.fp8 import quantization_config
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.engine import (
    EngineError,
    EngineSettings,
    Listener,
    Stop,
    check_needed,
    listened,
    results_of,
    streamed,
)
from jaxrl_llm.rollout.router import Router
from jaxrl_llm.rollout.types import Completion, Receipt, Request
from jaxrl_llm.rollout.vllm.environment import (
    check_fp8_vllm,
    engine_arguments,
    environment,
    find_python,
    is_cpu_build,
    language_model,
    prefixes,
)
from jaxrl_llm.rollout.vllm.pending import PendingRequest, first_answers
from jaxrl_llm.rollout.vllm.process import Sidecar, SidecarLost
from jaxrl_llm.rollout.vllm.replica import Replica, VllmStats
from jaxrl_llm.rollout.vllm.requests import SidecarImages, check_vllm_request
from jaxrl_llm.rollout.vllm.sync import SidecarGroup, send_weights
from jaxrl_llm.rollout.vllm.weights import WeightBuffer

log = logging.getLogger(__name__)


class VllmEngine:
    """An `Engine` of one or more vLLM sidecars, each with the whole model.

    A sidecar that dies or hangs is started again, gets the weights that the engine had last, and
    then the requests that it had not answered.

    Args:
        spec: the model, without an adapter.
        settings: room and precision; `max_running_sequences` of all sidecars together.
        source: Hugging Face directory that the model came from; None for a model without ancestor.
        config: of the sidecars.
        folder: for logs and the model's config.

    Raises:
        EngineError: there is no environment with vLLM, or not enough memory for the weights.
        ValueError: a number of sequences that the sidecars can't share evenly, or float8 that this
            vLLM has no kernels for.
    """

    _config: VllmConfig

    def __init__(
        self,
        spec: ModelSpec,
        settings: EngineSettings,
        *,
        source: str | None,
        config: VllmConfig,
        folder: Path,
    ) -> None:
        """Begin to start the sidecars; the first `load` waits for them."""
        if settings.max_running_sequences % config.sidecars:
            raise ValueError(
                f"rollout.max_running_sequences={settings.max_running_sequences} can't be shared "
                f"evenly by {config.sidecars} sidecars"
            )
        self.spec, self.settings = spec, settings
        self._config, self._folder = config, folder
        python = find_python(config.python)
        self._on_cpu = is_cpu_build(python)
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        alone, config_json = language_model(spec, source, settings.dtype)
        quantized = settings.quantization == "fp8"
        if quantized:
            check_fp8_vllm(spec, config, cpu=self._on_cpu)
            config_json["quantization_config"] = quantization_config(alone)
        (model / "config.json").write_text(json.dumps(config_json))
        self._images = None
        if spec.vision is not None:
            if source is None:
                raise ValueError("rollout.engine=vllm: images need the files of a model.path")
            self._images = SidecarImages(spec, source)
            self._images.write_files(model, settings.max_tokens)
        self._buffer = WeightBuffer(alone, settings.dtype, quantized=quantized)
        self._commands = [[*prefix, python] for prefix in prefixes(config)]
        self._arguments = engine_arguments(
            spec,
            config,
            dataclasses.replace(
                settings, max_running_sequences=settings.max_running_sequences // config.sidecars
            ),
            model=str(model.resolve()),
            cpu=self._on_cpu,
        )
        self._router = Router(config.sidecars)
        self._replicas = [Replica(number) for number in range(config.sidecars)]
        self._state = threading.Condition()  # of what is below, and of the replicas
        self._loading = threading.RLock()  # weights are on their way, or sidecars pause or go on
        self._failure: EngineError | None = None
        self._paused = self._asleep = self._closed = False
        self._has_weights = False  # or will have, when the weight sync under way has ended
        self._restarts = 0
        self._keepers = [
            threading.Thread(target=self._keep, args=(replica,), daemon=True, name="vllm-keeper")
            for replica in self._replicas
        ]
        for keeper in self._keepers:
            keeper.start()

    async def generate(self, request: Request) -> Completion:
        """Sample one answer; cancelling the coroutine gives the request up."""
        return await asyncio.wrap_future(self._submit(request).future)

    async def stream(self, request: Request) -> AsyncIterator[Completion]:
        """Sample one answer and yield its pieces; the last has a `finish`."""
        async for piece in streamed(lambda tell: self._submit(request, tell).future):
            yield piece

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order."""
        for request in requests:
            self._check(request)
        return results_of([self._submit(request).future for request in requests])

    def sample_until(
        self,
        requests: Sequence[Request],
        needed: int,
        stop: Stop | None = None,
        listener: Listener | None = None,
    ) -> list[Completion]:
        """Sample until the first requests have their answers, or `stop` is set, which counts none.

        How far the other answers have come then is left to chance.
        """
        check_needed(needed, len(requests))
        for request in requests:
            self._check(request)
        pending = [self._submit(request, lambda _: None) for request in requests]
        listened([one.future for one in pending], listener)
        return first_answers(pending, needed, stop, self._state)

    def load(self, params: Any, version: int) -> Receipt:
        """Send weights to all sidecars, with checksums; what runs is paused meanwhile.

        What is in flight is read again, by the new weights, and goes on with them.

        Args:
            params: the weights, nested as `declare(spec)`.
            version: of the weights.

        Raises:
            EngineError: vLLM does not take them, or holds others than were sent. The engine has no
                weights then; the next sync that works repairs it.
        """
        with activity("starting vLLM"):
            self._await(lambda: all(replica.sidecar for replica in self._replicas))
        with self._loading:
            with self._state:
                self._has_weights = True
                group = self._running()
                for replica in self._replicas:
                    replica.version = None
            try:
                self._sync_weights(group, self._buffer.write(params, version), version)
            except BaseException:
                self._buffer.version, self._has_weights = None, False
                raise
        self._await(lambda: all(replica.version == version for replica in self._replicas))
        return Receipt(version, None, self._buffer.size * len(self._replicas))

    def pause(self) -> None:
        """Freeze what runs until `resume`; it keeps its cache."""
        with self._loading:
            self._paused = True
            self._running().ask("pause")

    def resume(self) -> None:
        """Go on after `pause` or `sleep`; after a failed weight sync, when the next one works."""
        with self._loading:
            self._paused = self._asleep = False
            self._running(lambda replica: replica.version is not None).ask("resume")

    def sleep(self) -> None:
        """Pause; with `sleep` in the config, free the devices' memory, too."""
        with self._loading:
            self.pause()
            if self._config.sleep and not self._asleep:
                self._asleep = True
                self._running().ask("sleep")

    def wake(self) -> None:
        """Take the memory again, and resume."""
        self.resume()

    def close(self) -> None:
        """End the sidecars; requests without an answer fail with EngineError."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for replica in self._replicas:
            if replica.process:
                replica.process.close()
        for keeper in self._keepers:
            keeper.join()
        self._fail(EngineError("the engine was closed"))
        with self._loading:
            self._buffer.close()

    def stats(self) -> VllmStats:
        """Return what the engine does and has done."""
        with self._state:
            outstanding = sum(len(replica.pending) for replica in self._replicas)
            return VllmStats(outstanding, self._restarts)

    def _check(self, request: Request) -> None:
        check_vllm_request(request, self.spec, self.settings, self._images)

    def _submit(
        self, request: Request, listener: Callable[[Completion], None] | None = None
    ) -> PendingRequest:
        self._check(request)
        pending = PendingRequest(request, listener, self._images if request.visuals else None)
        with self._state:
            if self._failure or self._closed:
                raise self._failure or EngineError("the engine is closed")
            if not self._has_weights:
                raise EngineError("the engine has no weights: call load first")
            replica = self._replicas[self._router.choose(request.prompt, pending.max_tokens)]
            replica.add(pending)
        pending.future.add_done_callback(lambda _: self._give_up(replica, pending))
        return pending

    def _receive(self, replica: Replica, number: int, message: dict[str, Any]) -> None:
        """Take a piece of an answer from a sidecar."""
        failure, piece = None, None
        with self._state:
            pending = replica.sent.get(number)
            if pending is None:
                return  # given up
            if "error" in message or message["finish"] not in ("", "stop", "length"):
                why = message.get("error") or f"it ended with {message['finish']!r}"
                failure = EngineError(f"vLLM could not answer: {why}")
            else:
                piece = pending.add_piece(message)
            if piece is None or piece.finish:
                self._forget(replica, pending)
        if piece is not None and pending.listener is not None:
            pending.listener(piece)
        if piece is None or piece.finish:
            pending.resolve(failure)

    def _forget(self, replica: Replica, pending: PendingRequest) -> bool:
        """Forget a request, and return whether the sidecar is at it; the state is locked."""
        if pending in replica.pending:
            self._router.done(replica.number, pending.max_tokens, pending.tokens)
        return replica.remove(pending)

    def _give_up(self, replica: Replica, pending: PendingRequest) -> None:
        """Let the sidecar stop a request that its caller has cancelled, or that has failed."""
        with self._state:
            number, sidecar = pending.number, replica.sidecar
            at_it = self._forget(replica, pending)
        if at_it and sidecar is not None and number is not None:
            sidecar.cancel(number)

    def _keep(self, replica: Replica) -> None:
        """Keep a sidecar running, until the engine is closed or it fails too often."""
        starts, has_run = 0, False
        while not self._closed:
            sidecar, starts = None, starts + 1
            try:
                sidecar = replica.process = self._start(replica)
                if self._closed:  # before `close` could see it
                    break
                sidecar.wait_ready(self._config.start_timeout_s)
                has_run = True
                self._begin(replica, sidecar)
                sidecar.watch(
                    lambda: bool(replica.sent) and replica.version is not None and not self._paused
                )
            except EngineError as error:
                with self._state:
                    replica.lose_sidecar()
                    self._state.notify_all()
                if self._closed:
                    break
                # one that never ran would not run the next time
                if not has_run or starts > self._config.restarts:
                    self._fail(EngineError(f"{error}\nIt was started {starts} times."))
                    break
                log.warning("%s\nIt is started again.", error)
                with self._state:
                    self._restarts += 1
            except Exception as error:  # else whoever waits would wait for ever
                self._fail(EngineError(f"the keeper of a vLLM sidecar failed: {error!r}"))
                raise
            finally:
                if sidecar is not None:
                    sidecar.close()

    def _start(self, replica: Replica) -> Sidecar:
        settings = {
            "number": replica.number,
            "env": environment(self._config, replica.number, cpu=self._on_cpu),
            "engine": self._arguments,
            "map": self._buffer.path,
            "map_bytes": self._buffer.size,
            "never_sampled": self._images.never_sampled if self._images else [],
        }
        return Sidecar(
            self._commands[replica.number],
            settings,
            self._folder / f"sidecar_{replica.number}.log",
            host=self._config.host,
            timeout_s=self._config.timeout_s,
            receive=lambda number, message: self._receive(replica, number, message),
        )

    def _begin(self, replica: Replica, sidecar: Sidecar) -> None:
        """Give a new sidecar the weights and the requests that another left."""
        with self._loading:
            with self._state:
                replica.sidecar, replica.version = sidecar, None
                self._state.notify_all()
            group, version = SidecarGroup({replica.number: sidecar}), self._buffer.version
            if version is not None:
                self._sync_weights(group, self._buffer.buckets, version)
            if self._asleep:
                group.ask("sleep")
            if not group.members:
                raise SidecarLost("the vLLM sidecar was lost while it got its weights")

    def _sync_weights(self, group: SidecarGroup, buckets: Any, version: int) -> None:
        """Send weights to sidecars, and let them go on; one that is lost is left to its keeper."""
        group.ask("pause")
        send_weights(group, self._buffer, buckets, version)
        if not self._paused:
            group.ask("resume")
        with self._state:
            for number, sidecar in group.members.items():
                replica = self._replicas[number]
                if replica.sidecar is not sidecar:  # lost meanwhile
                    continue
                replica.version = version
                replica.send_pending()
            self._state.notify_all()

    def _running(self, chosen: Callable[[Replica], bool] = lambda _: True) -> SidecarGroup:
        """Return the sidecars that run, of chosen replicas; its keeper tells who takes over."""
        return SidecarGroup(
            {p.number: p.sidecar for p in self._replicas if p.sidecar and chosen(p)}
        )

    def _await(self, ready: Callable[[], bool]) -> None:
        """Wait until something holds, or the engine has failed."""
        with self._state:
            self._state.wait_for(lambda: ready() or self._failure or self._closed)
            if self._failure:
                raise self._failure
            if self._closed:
                raise EngineError("the engine is closed")

    def _fail(self, error: EngineError) -> None:
        """Give up: all requests fail, and all that come."""
        with self._state:
            self._failure = self._failure or error
            left = [pending for replica in self._replicas for pending in replica.clear()]
            self._state.notify_all()
        for pending in left:
            pending.resolve(error)
