"""The routes of the server."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.config.sections import LimitsConfig
from jaxrl_llm.data.token_bytes import Vocabulary, text_decoder
from jaxrl_llm.rollout.engine import Completion, Engine, EngineError, Request
from jaxrl_llm.rollout.openai_api.requests import (
    APIError,
    GenerationRequest,
    ServedModel,
    parse_body,
    parse_chat,
    parse_completion,
    read_body,
    wait_until_gone,
)
from jaxrl_llm.rollout.openai_api.responses import Envelope, ResponseChoice, event, prompt_logprobs
from jaxrl_llm.rollout.openai_api.responses_api import ResponseEnvelope, chat_request

T = TypeVar("T")


class Disconnected(Exception):
    """The client has gone: nobody reads the answer."""


class AdmissionLimiter:
    """Lets so many requests in at once, makes some others wait, and refuses the rest.

    Args:
        running: requests at once.
        waiting: requests that wait.

    >>> async def two():
    ...     limiter = AdmissionLimiter(1, 0)
    ...     async with limiter:
    ...         limiter.check()
    >>> asyncio.run(two())
    Traceback (most recent call last):
    jaxrl_llm.rollout.openai_api.requests.APIError: 1 requests run and 0 wait: try again later
    """

    def __init__(self, running: int, waiting: int) -> None:
        """Begin empty."""
        self._most, self._free = waiting, asyncio.Semaphore(running)
        self.running = self.waiting = 0

    def check(self) -> None:
        """Refuse a request where there is no room for it.

        Raises:
            APIError: with status 429.
        """
        if self._free.locked() and self.waiting >= self._most:
            raise APIError(
                f"{self.running} requests run and {self.waiting} wait: try again later",
                status=429,
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

    async def __aenter__(self) -> None:
        """Wait until there is room."""
        self.check()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1

    async def __aexit__(self, *_: object) -> None:
        """Make room."""
        self.running -= 1
        self._free.release()


async def while_connected(
    work: Coroutine[Any, Any, T], receive: Callable[[], Awaitable[Any]], deadline: float
) -> T:
    """Do work as long as its client is there; cancel it when its time is over.

    Args:
        work: what is done.
        receive: of ASGI, with the request's body read to its end.
        deadline: on the event loop's clock.

    Raises:
        Disconnected: the client has gone.
        APIError: with status 504, out of time.
    """
    tasks = [asyncio.create_task(work), asyncio.create_task(wait_until_gone(receive))]
    try:
        left = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait(
            tasks, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
        )
        if tasks[0] in done:
            return tasks[0].result()
        if done:
            raise Disconnected
        raise APIError("the request took too long and was given up", status=504, code="timeout")
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_answers(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return the answers to several requests; when one fails, all are given up."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def all_pieces(
    engine: Engine, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, Completion], None]:
    """Yield the pieces of several answers as they come, each with its request's index.

    When one fails, or when this iterator is closed, all are given up.
    """
    pieces: asyncio.Queue[tuple[int, Completion | None]] = asyncio.Queue()

    async def pump(index: int, request: Request) -> None:
        try:
            async for piece in engine.stream(request):
                pieces.put_nowait((index, piece))
        finally:
            pieces.put_nowait((index, None))

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            index, piece = await pieces.get()
            if piece is not None:
                yield index, piece
                continue
            await tasks[index]  # raises what it failed with
            left -= 1
    finally:
        await cancel_all(tasks)


NAMESPACE = "jaxrl_llm"
GAUGES = {
    "running": "answers that are decoded",
    "waiting": "answers that wait to be decoded",
    "cached_tokens": "tokens in the cache",
    "cache_tokens": "tokens that the cache can hold",
    "cached_states": "states of linear attention in use",
    "cache_states": "states of linear attention that the cache can hold",
}
COUNTERS = {
    "prompt_tokens": "tokens of prompts",
    "generated_tokens": "tokens sampled",
    "reused_tokens": "tokens of prompts that the cache held already",
    "preemptions": "answers put back to make room in the cache",
}
LATENCY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

prometheus_client.disable_created_metrics()  # a time for each sample, which nobody reads


class ServerMetrics(Collector):
    """Counts and latencies of responses, beside the state of the engine.

    Args:
        engine: that samples.
        limiter: of the requests at once.
    """

    def __init__(self, engine: Engine, limiter: AdmissionLimiter) -> None:
        """Count from zero, in a registry of its own."""
        self._engine, self._limiter = engine, limiter
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._responses = prometheus_client.Counter(
            "responses",
            "responses, by path and status",
            ("path", "status"),
            namespace=NAMESPACE,
            registry=self._registry,
        )
        self._seconds = prometheus_client.Histogram(
            "response_seconds",
            "time until responses ended",
            ("path",),
            namespace=NAMESPACE,
            registry=self._registry,
            buckets=LATENCY_BUCKETS_S,
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the state of the engine and of the queue before it, when metrics are asked for."""
        stats = self._engine.stats()._asdict()
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(f"{NAMESPACE}_engine_{name}", meaning, stats[name])
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"{NAMESPACE}_engine_{name}", meaning, stats[name])
        limiter = self._limiter
        yield GaugeMetricFamily(
            f"{NAMESPACE}_requests_running", "requests at work", limiter.running
        )
        yield GaugeMetricFamily(f"{NAMESPACE}_requests_waiting", "requests queued", limiter.waiting)

    def record(self, path: str, status: int, seconds: float) -> None:
        """Count a response that has ended."""
        self._responses.labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)


AnyEnvelope = Envelope | ResponseEnvelope
CLIENT_GONE = 499
ERROR_SEND_TIMEOUT_S = 1.0  # for the error that ends a stream whose client does not read


class Server:
    """What answers requests.

    Args:
        engine: samples.
        served: the model.
        limits: of requests.
    """

    _limits: LimitsConfig

    def __init__(self, engine: Engine, served: ServedModel, limits: LimitsConfig) -> None:
        """Begin without a request."""
        self._engine, self._served, self._limits = engine, served, limits
        self._created = int(time.time())
        self._vocabulary = Vocabulary(served.tokenizer)
        self._decode = text_decoder(served.tokenizer)
        self.limiter = AdmissionLimiter(limits.max_running, limits.max_waiting)
        self.recorder = ServerMetrics(engine, self.limiter)

    async def generate(self, request: HttpRequest) -> Any:
        """Answer `/v1/completions`, `/v1/chat/completions` or `/v1/responses`."""
        deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
        self.limiter.check()
        replies = self._replies(await self._body(request), request.url.path)

        async def reply() -> Any:
            return await anext(replies)

        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(contextlib.aclosing(replies))
            first = await while_connected(reply(), request.receive, deadline)
            if isinstance(first, dict):
                return JSONResponse(first)
            stack.pop_all()
        return EventStream(first, replies, deadline)

    async def _body(self, request: HttpRequest) -> bytes:
        """Read a request's body.

        Raises:
            APIError: it is no JSON, too large, or takes too long.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which no foreign web page may send
            raise APIError(f"got content-type {kind!r}, expected application/json", status=415)
        most = int(self._limits.max_body_mb * 1e6)
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > most:
            raise APIError(f"the body has more than {most} bytes", status=413)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await read_body(request, most)
        except TimeoutError as error:
            raise APIError("the body took too long", status=408) from error
        except ClientDisconnect as error:
            raise Disconnected from error

    def _read(self, body: bytes, path: str) -> tuple[GenerationRequest, AnyEnvelope]:
        """Return what a body asks for, and what stands around the answer."""
        tree, model = parse_body(body), self._served.name
        if path == "/v1/responses":
            generation = parse_chat(chat_request(tree), self._served)
            return generation, ResponseEnvelope(tree, model, generation.prompt_tokens)
        read = parse_chat if path == "/v1/chat/completions" else parse_completion
        generation = read(tree, self._served)
        return generation, Envelope(generation, model)

    async def _replies(self, body: bytes, path: str) -> AsyncGenerator[Any, None]:
        """Yield the answer to a body, or the events of its stream.

        All is done inside the gate. What takes the processor's time is not done on the event loop.
        """
        async with self.limiter:
            generation, envelope = await asyncio.to_thread(self._read, body, path)
            del body
            if not generation.stream:
                yield await self._answer(generation, envelope)
                return
            async with contextlib.aclosing(self._events(generation, envelope)) as events:
                async for text in events:
                    yield text

    async def _answer(self, generation: GenerationRequest, envelope: AnyEnvelope) -> dict[str, Any]:
        with engine_errors_as_api_errors():
            scored, top = [], generation.prompt_logprobs
            if top is not None:
                scored = await asyncio.to_thread(self._score_prompts, generation.prompts, top)
            answers = await all_answers(self._engine, generation.requests())
        choices = []
        for index, answer in enumerate(answers):
            response = ResponseChoice(generation, index, self._vocabulary, self._decode)
            choice = response.take(answer, first=True, whole=True)
            if scored and choice:
                choice["prompt_logprobs"] = scored[index // generation.n]
            choices.append(choice)
        return envelope.answer(choices, sum(len(answer.tokens) for answer in answers))

    def _score_prompts(self, prompts: Sequence[Any], top: int) -> list[Any]:
        """Return the log-probs of prompts, and of the likeliest tokens in each place."""
        if not self._engine.scores_tokens:
            raise APIError("prompt_logprobs: this engine gives none", param="prompt_logprobs")
        told = []
        for prompt in prompts:
            scored = self._engine.score_tokens(prompt)
            told.append(prompt_logprobs(scored, prompt, top, self._vocabulary))
        return told

    async def _events(
        self, generation: GenerationRequest, envelope: AnyEnvelope
    ) -> AsyncGenerator[str, None]:
        requests = generation.requests()
        common = self._vocabulary, self._decode
        choices = [ResponseChoice(generation, index, *common) for index in range(len(requests))]
        begun = [False] * len(requests)
        pieces = all_pieces(self._engine, requests)
        with engine_errors_as_api_errors():
            async with contextlib.aclosing(pieces):
                async for index, piece in pieces:
                    if choices[index].ended:
                        continue
                    first = not any(begun)
                    shown = choices[index].take(piece, first=not begun[index], whole=False)
                    begun[index] = True
                    if shown:
                        yield envelope.chunk(shown, first=first)
        yield envelope.end(sum(choice.tokens for choice in choices))

    async def models(self, request: HttpRequest) -> Response:
        """Answer `/v1/models`, and `/v1/models/NAME`."""
        model = {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxrl_llm",
            "max_model_len": self._served.max_tokens,
        }
        name = request.path_params.get("name")
        if name not in (None, self._served.name):
            raise APIError(
                f"got model {name!r}, expected {self._served.name!r}",
                status=404,
                code="model_not_found",
            )
        return JSONResponse(model if name else {"object": "list", "data": [model]})

    async def health(self, request: HttpRequest) -> Response:
        """Answer `/health`: the server runs."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: HttpRequest) -> Response:
        """Answer `/metrics` in Prometheus' text format."""
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.recorder.text(), media_type=media_type)


@contextlib.contextmanager
def engine_errors_as_api_errors() -> Iterator[None]:
    """Turn an engine's error into a refusal."""
    try:
        yield
    except EngineError as error:
        raise APIError(str(error)) from error


class EventStream(StreamingResponse):
    """A response of server-sent events.

    Args:
        first: a text; had it failed, the response would have an error's status.
        events: the texts after it.
        deadline: on the event loop's clock.
    """

    def __init__(self, first: str, events: AsyncGenerator[str, None], deadline: float) -> None:
        """Send nothing yet."""

        async def all_events() -> AsyncGenerator[str, None]:
            yield first
            async for text in events:
                yield text

        super().__init__(all_events(), 200, {"cache-control": "no-cache"}, "text/event-stream")
        self._events, self._deadline = events, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; what goes wrong is told in the last of them."""
        begun = False

        async def send_all() -> None:
            nonlocal begun
            begun = True
            await self.stream_response(send)

        try:
            async with contextlib.aclosing(self._events):
                await while_connected(send_all(), receive, self._deadline)
        except Disconnected:
            pass
        except APIError as refusal:
            if not begun:
                raise
            body = event(refusal.body).encode()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ERROR_SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": body, "more_body": False})


UNAUTHORIZED = APIError(
    "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
    status=401,
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def error_response(refusal: APIError) -> JSONResponse:
    """Return the response that says no."""
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


def make_app(
    engine: Engine, served: ServedModel, limits: LimitsConfig, api_key: str | None
) -> ASGIApp:
    """Return the ASGI application. It asks for the API key below `/v1`, and counts responses.

    Args:
        engine: samples; it has weights.
        served: the model.
        limits: of requests.
        api_key: that clients must send; None asks for none.
    """
    server = Server(engine, served, limits)
    routes = [
        Route("/v1/completions", server.generate, methods=["POST"]),
        Route("/v1/chat/completions", server.generate, methods=["POST"]),
        Route("/v1/responses", server.generate, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.models),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
    ]

    async def refuse(request: HttpRequest, error: Exception) -> Response:
        if isinstance(error, APIError):
            return error_response(error)
        if isinstance(error, HTTPException):
            where = f"{request.method} {request.url.path}"
            return error_response(APIError(f"{where}: {error.detail}", status=error.status_code))
        if isinstance(error, Disconnected):
            return Response(status_code=CLIENT_GONE)
        return error_response(APIError("the server failed; its log says why", status=500))

    kinds = (APIError, HTTPException, Disconnected, Exception)
    paths = frozenset(route.path for route in routes)  # that are counted by name
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, refuse))

    def is_authorized(scope: Scope) -> bool:
        if api_key is None or not scope["path"].startswith("/v1"):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        is_key = hmac.compare_digest(key.strip(b" "), api_key.encode())
        return is_key and scheme.lower() == b"bearer"  # RFC 9110, 11.1: in any case

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in paths else "other"
        started, status = time.monotonic(), CLIENT_GONE

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            answers = app if is_authorized(scope) else error_response(UNAUTHORIZED)
            await answers(scope, receive, note)
        except Exception:
            status = 500
            raise
        finally:
            server.recorder.record(path, status, time.monotonic() - started)

    return guarded
