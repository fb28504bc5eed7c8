"""vLLM as the engine: it samples in processes of its own, the sidecars."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import mmap
import os
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.visuals.processor import VisualProcessor
from jaxrl_llm.models.hf.files import read_json
from jaxrl_llm.models.hf.fp8 import BLOCK, blocked_host_arrays, is_blocked, quantization_config
from jaxrl_llm.models.hf.hub import resolve
from jaxrl_llm.models.hf.quantized import SCALE_SUFFIX
from jaxrl_llm.models.hf.save import host_arrays, joined
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.quantization import FP8
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.engine import (
    Completion,
    Engine,
    EngineError,
    EngineSettings,
    Listener,
    Receipt,
    Request,
    Router,
    Stop,
    check_needed,
    check_request,
    images_refused,
    listened,
    results_of,
    streamed,
    wait_for_first,
)
from jaxrl_llm.rollout.vllm.process import RefusedError, Sidecar, SidecarLost
from jaxrl_llm.rollout.vllm.setup import (
    check_fp8_vllm,
    engine_arguments,
    environment,
    find_python,
    is_cpu_build,
    language_model,
    prefixes,
)
from jaxrl_llm.sharding.reshard import group_by_bytes

# A model's weights as vLLM takes them: Hugging Face's arrays, in memory that sidecars can map.

ALIGNMENT = 64
BUCKET_BYTES = 2**28


class Entry(NamedTuple):
    """One array in the map, under its name in a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class WeightBuffer:
    """One copy of the weights in the host's memory, which all sidecars read.

    The memory has no name in the file system, so that nothing is left of it when the process ends,
    however it ends, and no mount limits its size. It is kept from one weight sync to the next: a
    sidecar that is started again gets its weights from here.

    Args:
        spec: the model, without an adapter.
        dtype: of the weights.
        quantized: write layers' matrices in float8, with a scale for each block of them.

    Attributes:
        entries: what lies where.
        buckets: the same, cut where about 256 MB are together.
        checksums: CRC-32 of the bytes of each array, by name.
        version: of the weights; None while they are not whole.

    Raises:
        EngineError: the host has not enough memory.
    """

    def __init__(self, spec: ModelSpec, dtype: str, *, quantized: bool = False) -> None:
        """Allocate the memory."""
        self._host_arrays = blocked_host_arrays if quantized else host_arrays
        declarations = declare(spec)
        kinds = jax.tree.leaves(compute_dtypes(spec, dtype))
        self._leaves = list(zip(jax.tree.leaves(declarations), kinds, strict=True))
        self.entries = list(_lay_out(self._leaves, quantized=quantized))
        groups = group_by_bytes([entry.bytes for entry in self.entries], BUCKET_BYTES)
        self.buckets = [[self.entries[i] for i in group] for group in groups]
        self.size = self.entries[-1].offset + self.entries[-1].bytes
        self.checksums: dict[str, int] = {}
        self.version: int | None = None
        self._file = os.memfd_create("jaxrl-weights")
        try:
            os.posix_fallocate(self._file, 0, self.size)
        except OSError as error:
            os.close(self._file)
            raise EngineError(
                f"the host has no {self.size / 1e9:.3g} GB for the weights on their way to vLLM: "
                f"{error}"
            ) from error
        self._map = mmap.mmap(self._file, self.size)

    @property
    def path(self) -> str:
        """Where other processes of this user find the memory."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, params: Any, version: int) -> Iterator[list[Entry]]:
        """Write new weights, one layer of one array after the other.

        Args:
            params: nested as `declare(spec)`.
            version: that they have when all is written.

        Yields:
            Each of the `buckets`, when it is written.
        """
        self.version = None
        leaves = jax.tree.leaves(params)
        parts = (
            (decl, leaf, kind) for (decl, kind), leaf in zip(self._leaves, leaves, strict=True)
        )
        arrays = self._host_arrays(parts)
        for bucket in self.buckets:
            for entry, (name, values) in zip(bucket, arrays, strict=False):
                assert (entry.name, entry.shape) == (name, values.shape)
                self._array(entry)[...] = values
                self.checksums[name] = zlib.crc32(self.data(entry.offset, entry.bytes))
            yield bucket
        assert next(arrays, None) is None
        self.version = version

    def data(self, offset: int, size: int) -> memoryview:
        """Return some of the bytes."""
        return memoryview(self._map)[offset : offset + size]

    def verify(self, echoed: Mapping[str, int]) -> None:
        """Compare checksums that a worker found with those of what was written.

        Raises:
            EngineError: one differs.
        """
        for name, checksum in echoed.items():
            if checksum != self.checksums[name]:
                raise EngineError(
                    f"expected checksum {self.checksums[name]:08x} of {name}, got {checksum:08x}: "
                    "vLLM does not hold the weights that were sent"
                )

    def close(self) -> None:
        """Free the memory, as soon as nobody maps it or has a view of it."""
        with contextlib.suppress(BufferError):  # a view goes with whoever has it
            self._map.close()
        os.close(self._file)

    def _array(self, entry: Entry) -> np.ndarray:
        kind = np.dtype(entry.dtype)
        flat = np.frombuffer(self._map, kind, entry.bytes // kind.itemsize, entry.offset)
        return flat.reshape(entry.shape)


def _lay_out(leaves: list[tuple[Any, Any]], *, quantized: bool) -> Iterator[Entry]:
    """Lay arrays out one after the other, in the order in which they are written."""
    end = 0
    for (declaration, _, dtype), *_ in joined((decl, None, dtype) for decl, dtype in leaves):
        for name, _ in declaration.hf_indices():
            shape = tuple(declaration.hf_shape)
            forms = [(name, shape, np.dtype(dtype))]
            if quantized and is_blocked(declaration):
                blocks = tuple(-(-side // BLOCK) for side in shape)
                scales = (name + SCALE_SUFFIX, blocks, np.dtype(np.float32))
                forms = [(name, shape, FP8), scales]
            for label, sides, kind in forms:
                size = int(np.prod(sides)) * kind.itemsize
                start = -(-end // ALIGNMENT) * ALIGNMENT
                yield Entry(label, kind.name, sides, start, size)
                end = start + size


class SidecarGroup:
    """Sidecars that are asked for the same; one that is lost on the way is left out from then on.

    Args:
        members: by number.
    """

    def __init__(self, members: Mapping[int, Sidecar]) -> None:
        """Take all of them."""
        self.members = dict(members)

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """Ask all at once, wait for all, and return their answers.

        Raises:
            RefusedError: one could not do it.
        """
        return self.begin(op, **fields)()

    def begin(
        self, op: str, data: memoryview | None = None, **fields: Any
    ) -> Callable[[], list[Any]]:
        """Ask all at once; return what waits for their answers, and raises as `ask`."""
        waits = {}
        for number, sidecar in list(self.members.items()):
            try:
                waits[number] = sidecar.ask(op, data, **fields)
            except SidecarLost:
                del self.members[number]

        def finish() -> list[Any]:
            answers, refusals = [], []
            for number, wait in waits.items():
                try:
                    answers.append(wait())
                except SidecarLost:
                    self.members.pop(number, None)
                except RefusedError as error:  # raised when all have answered
                    refusals.append(error)
            if refusals:
                raise refusals[0]
            return answers

        return finish


def send_weights(
    group: SidecarGroup, buffer: WeightBuffer, buckets: Iterable[list[Entry]], version: int
) -> None:
    """Let paused sidecars take new weights, and compare their checksums with those sent.

    Args:
        group: of sidecars.
        buffer: the weights.
        buckets: those of its buckets that are written, as they come.
        version: of the weights.

    Raises:
        EngineError: a sidecar does not take the weights, or got others.
    """
    through = "memory"
    if not all(sidecar.shared for sidecar in group.members.values()):
        through = "connection"
    _check(buffer, group.ask("start", through=through))
    before: Callable[[], list[Any]] = list
    for bucket in buckets:  # each is written while the one before is taken
        _check(buffer, before())
        first, last = bucket[0], bucket[-1]
        data = None
        if through == "connection":
            data = buffer.data(first.offset, last.offset + last.bytes - first.offset)
        before = group.begin("take", data, entries=_as_messages(bucket), offset=first.offset)
    _check(buffer, before())
    entries = _as_messages(buffer.entries)
    _check(buffer, group.ask("finish", entries=entries, version=str(version)))


def _as_messages(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [entry._asdict() for entry in entries]


def _check(buffer: WeightBuffer, answers: Iterable[list[dict[str, Any]]]) -> None:
    for ranks in answers:
        for rank in ranks:
            if "error" in rank:
                raise RefusedError(f"vLLM: {rank['error']}")
            buffer.verify(rank["checksums"])


MOST_TOP_LOGPROBS = 20
MOST_BIAS = 100.0  # vLLM cuts what is larger
PREPROCESSOR = "preprocessor_config.json"


# Requests to vLLM: which it can serve, and what its processor is shown of their images.
#
# vLLM resizes images and writes placeholder tokens itself. It is shown images as they were
# resized here, which its own resizing leaves as they are, and one placeholder for each. What it
# makes of them is compared with the tokens of the request, in the sidecar.


class SidecarImages:
    """Makes of requests with images what a sidecar is asked.

    Args:
        spec: of a model with a vision tower.
        source: directory of its files.

    Raises:
        ValueError: a model whose images vLLM would turn into tokens otherwise.
    """

    def __init__(self, spec: ModelSpec, source: str) -> None:
        """Read how the model's images are made."""
        self._source, self._processor = source, VisualProcessor.from_directory(source)
        if self._processor.resizing.kind == "siglip":
            raise ValueError(
                "vLLM is shown no images of Gemma 3 yet: expected rollout.engine: native, or "
                "model.vision: none"
            )
        assert spec.vision is not None, "the caller has looked"
        self.never_sampled = list(spec.vision.never_sampled)

    def write_files(self, folder: Path, max_tokens: int) -> None:
        """Write the tokenizer, and a config of vLLM's processor that resizes nothing.

        Args:
            folder: beside the model's config.json.
            max_tokens: of the longest sequence, which bounds an image.
        """
        source = resolve(self._source)
        given = read_json(source / PREPROCESSOR)
        config = {k: v for k, v in given.items() if k not in ("min_pixels", "max_pixels")}
        unit = self._processor.resizing.unit**2
        config["size"] = {"shortest_edge": unit, "longest_edge": unit * max_tokens}
        load_tokenizer(self._source).save_pretrained(folder)
        (folder / PREPROCESSOR).write_text(json.dumps(config))
        videos = source / "video_preprocessor_config.json"
        if videos.is_file():
            (folder / videos.name).write_bytes(videos.read_bytes())

    def check(self, request: Request) -> None:
        """Refuse images that are not those of the prompt's placeholders, and videos.

        Raises:
            EngineError: there are some.
        """
        if any(visual.is_video for visual in request.visuals):
            raise EngineError("got a video, but vLLM is shown images only: use the native engine")
        expected = [visual.tokens for visual in request.visuals]
        given = [len(run) for is_image, run in self._runs(request) if is_image]
        if given != expected:
            raise EngineError(
                f"the prompt holds placeholder tokens of images in runs of {given}, expected "
                f"{expected}, as many as each of its {len(expected)} images has"
            )

    def fields(self, request: Request) -> dict[str, Any]:
        """Return what a message says of a prompt with images.

        Returns:
            As `prompt` the tokens with one placeholder for each image, and as `images` width and
            height of each.
        """
        sizes = []
        for visual in request.visuals:
            patch = self._processor.resizing.patch
            sizes.append([visual.grid[2] * patch, visual.grid[1] * patch])
        runs = (run[:1] if is_image else run for is_image, run in self._runs(request))
        prompt = tuple(itertools.chain.from_iterable(runs))
        return {"prompt": prompt, "images": sizes}

    def pixels(self, request: Request) -> memoryview:
        """Return the images as RGB, one behind the other, as they were resized."""
        frames = (self._processor.pixels(visual)[0] for visual in request.visuals)
        return memoryview(b"".join(frame.tobytes() for frame in frames))

    def _runs(self, request: Request) -> Iterator[tuple[bool, list[int]]]:
        """Yield the prompt in runs, of placeholders and of other tokens."""
        image = self._processor.placeholders.image_id
        for is_image, run in itertools.groupby(request.prompt, lambda token: token == image):
            yield is_image, list(run)


def check_vllm_request(
    request: Request, spec: ModelSpec, settings: EngineSettings, images: SidecarImages | None
) -> None:
    """Refuse a request that vLLM can't serve.

    Args:
        request: to look at.
        spec: of the model.
        settings: of the engine.
        images: None: the model reads text alone.

    Raises:
        EngineError: it can't.
    """
    check_request(
        request,
        max_tokens=settings.max_tokens,
        vocab_size=spec.vocab_size,
        limits={"top_logprobs": MOST_TOP_LOGPROBS},
    )
    if request.sampling.stop:
        raise EngineError("got texts that stop the answer, but this engine has no tokenizer")
    for token, bias in request.sampling.logit_bias:
        if abs(bias) > MOST_BIAS:
            raise EngineError(
                f"got logit_bias {bias} for token {token}, expected at most {MOST_BIAS:g}"
            )
    if images is not None:
        images.check(request)
    elif request.visuals:
        raise images_refused(request)


GOLDEN = 0x9E3779B1  # a stream that goes on elsewhere draws other numbers than before


@dataclasses.dataclass(eq=False)
class PendingRequest:
    """One request without its whole answer.

    Attributes:
        request: as it was asked.
        listener: called with each piece of the answer; None if all at once will do.
        images: says what the sidecar is shown; None: the prompt is text.
        future: the answer.
        pieces: of it that have come; the first is what the request goes on with, if it does.
        number: of the message that asked a sidecar for it; None while none has it.
    """

    request: Request
    listener: Callable[[Completion], None] | None
    images: SidecarImages | None = None
    future: Future[Completion] = dataclasses.field(default_factory=Future)
    pieces: list[Completion] = dataclasses.field(default_factory=list)
    number: int | None = None

    def __post_init__(self) -> None:
        """Begin with what was drawn before."""
        if self.request.drawn is not None:
            self.pieces.append(self.request.drawn)

    @property
    def max_tokens(self) -> int:
        """How many tokens prompt and answer can have."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer, as far as it has come."""
        answer = (int(token) for piece in self.pieces for token in piece.tokens)
        return (*self.request.prompt, *answer)

    def message(self) -> dict[str, Any]:
        """Return the fields of a message that asks a sidecar to answer, or to go on answering."""
        sampling, tokens = self.request.sampling, self.tokens
        generated = len(tokens) - len(self.request.prompt)
        settings = {
            "max_tokens": sampling.max_new_tokens - generated,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": sampling.logit_bias,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # only the request says what ends it
            "logprobs": sampling.top_logprobs,
            "seed": (self.request.seed + GOLDEN * generated) % 2**32,
        }
        asked = {"prompt": tokens, "sampling": settings, "stream": self.listener is not None}
        if self.images is not None:
            shown, drawn = self.images.fields(self.request), tokens[len(self.request.prompt) :]
            asked |= shown | {"prompt": (*shown["prompt"], *drawn), "expanded": tokens}
        return asked

    def add_piece(self, message: Mapping[str, Any]) -> Completion:
        """Keep a piece of the answer, and return it."""
        top, count = None, self.request.sampling.top_logprobs
        if count:
            pairs = np.array([step[:count] for step in message["top"]], np.float64)
            pairs = pairs.reshape(-1, count, 2)
            top = pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32)
        piece = Completion(
            np.array(message["tokens"], np.int32),
            np.array(message["logprobs"], np.float32),
            np.array([int(version) for version in message["versions"]], np.int32),
            message["finish"],
            message["stopped_by"],
            top,
        )
        self.pieces.append(piece)
        return piece

    def resolve(self, error: Exception | None = None) -> None:
        """Give the caller the answer, or the error, unless it gave up."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(self.drawn())
        else:
            self.future.set_exception(error)

    def drawn(self) -> Completion:
        """Return what has come of the answer."""
        if not self.pieces:
            tokens = np.zeros(0, np.int32)
            return Completion(tokens, np.zeros(0, np.float32), tokens, "")
        last, tops = self.pieces[-1], [piece.top for piece in self.pieces if piece.top is not None]
        return last._replace(
            tokens=np.concatenate([piece.tokens for piece in self.pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in self.pieces]),
            versions=np.concatenate([piece.versions for piece in self.pieces]),
            top=tuple(np.concatenate(parts) for parts in zip(*tops, strict=True)) if tops else None,
        )


class VllmStats(NamedTuple):
    """What the engine does now, and has done since it was made.

    Attributes:
        in_flight: requests without an answer.
        restarts: how often a sidecar was started again.
    """

    in_flight: int
    restarts: int


@dataclasses.dataclass(eq=False)
class Replica:
    """A copy of the model: a sidecar, and after it the next. Its engine locks what it does here.

    Attributes:
        number: among the replicas of an engine.
        process: the sidecar that runs or begins to.
        sidecar: the same, once it is ready.
        version: of its weights; None while it has none that are whole.
        pending: requests that are to be answered here.
        sent: those of them that the sidecar has, by number.
    """

    number: int
    process: Sidecar | None = None
    sidecar: Sidecar | None = None
    version: int | None = None
    pending: dict[PendingRequest, None] = dataclasses.field(default_factory=dict)
    sent: dict[int, PendingRequest] = dataclasses.field(default_factory=dict)

    def add(self, request: PendingRequest) -> None:
        """Take a request, and send it if the sidecar can answer now."""
        self.pending[request] = None
        self._send(request)

    def send_pending(self) -> None:
        """Send the requests that wait for a sidecar with weights."""
        for request in self.pending:
            if request.number is None:
                self._send(request)

    def lose_sidecar(self) -> None:
        """Forget the sidecar; what it had not answered waits for the next."""
        self.sidecar = self.version = None
        for request in self.sent.values():
            request.number = None
        self.sent = {}

    def _send(self, request: PendingRequest) -> None:
        if self.sidecar is None or self.version is None:
            return
        with contextlib.suppress(SidecarLost):  # it is sent again to the next
            images, message = request.images, request.message()
            pixels = None if images is None else images.pixels(request.request)
            number = self.sidecar.send("generate", pixels, **message)
            self.sent[number], request.number = request, number


log = logging.getLogger(__name__)


class VllmEngine(Engine):
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
        futures = [one.future for one in pending]
        listened(futures, listener)
        try:
            wait_for_first(futures[:needed], stop)
            with self._state:  # which is held while pieces come
                drawn = [one.drawn() for one in pending]
            answers = zip(futures, drawn, strict=True)
            return [future.result() if future.done() else left for future, left in answers]
        finally:
            for future in futures:
                future.cancel()

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
            in_flight = sum(len(replica.pending) for replica in self._replicas)
            return VllmStats(in_flight, self._restarts)

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
            del replica.pending[pending]
        return pending.number is not None and replica.sent.pop(pending.number, None) is not None

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
            left = [pending for replica in self._replicas for pending in replica.pending]
            for replica in self._replicas:
                replica.pending, replica.sent = {}, {}
            self._state.notify_all()
        for pending in left:
            pending.resolve(error)
