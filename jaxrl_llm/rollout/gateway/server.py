"""The server of programs: one address for each episode, on the loopback by default."""

import asyncio
import contextlib
import functools
import hmac
import itertools
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.rollout.agents.chat import Chat, Generate
from jaxrl_llm.rollout.gateway.programs import ProgramPool, ProgramSpec
from jaxrl_llm.rollout.gateway.session import MODEL, GatewaySession, GatewayTally, Ticket
from jaxrl_llm.rollout.openai_api.requests import APIError, parse_body, read_body
from jaxrl_llm.rollout.openai_api.responses_api import chat_request
from jaxrl_llm.workers.pool import Limits
from jaxrl_llm.workers.supervisor import raise_descriptor_limit

log = logging.getLogger(__name__)

MakeTemplate = Callable[[Sequence[Mapping[str, Any]]], TurnTemplate]
"""From the tools of a request to the chat template that tells the model of them."""

GATEWAY_METRICS = ("gateway/requests", "gateway/unmatched", "gateway/retries")
MAX_BODY_BYTES = 64_000_000
MAX_TEMPLATES = 64  # that are kept: programs may ask with other tools each time
CLIENT_GONE = 499
KEEP_ALIVE_S = 600  # longer than a round: programs keep their connections


def check_server_packages() -> None:
    """Refuse to go on without what serves programs.

    Raises:
        ConfigError: a package of the extra `serve` is not installed.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rollout.agent: openai_program needs a server: {error}: install the extra, as in "
            "pip install -e '.[serve]'"
        ) from error


class Gateway:
    """Serves the policy to programs, by an address of its own for each episode.

    The server has a thread and an event loop of its own; what it is asked is done in the loop of
    the episodes.

    Args:
        template: from the tools of a request to the chat template.
        limits: of each program.
        one_at_a_time: whether an episode's turns are drawn one after the other.

    Raises:
        ConfigError: a package of the extra `serve` is not installed.
    """

    def __init__(
        self,
        template: MakeTemplate,
        limits: Limits,
        *,
        one_at_a_time: bool,
    ) -> None:
        """Serve nothing yet."""
        check_server_packages()
        raise_descriptor_limit()  # for a connection of each episode
        self.limits, self._one_at_a_time = limits, one_at_a_time

        @functools.lru_cache(MAX_TEMPLATES)
        def make_template(tools: str) -> TurnTemplate:
            return template(json.loads(tools))

        self._make_template = make_template
        self._key, self._numbers = secrets.token_bytes(32), itertools.count()
        self._sessions: dict[int, GatewaySession] = {}
        self._pools: dict[ProgramSpec, ProgramPool] = {}
        self._servers: dict[str, _Listener] = {}
        self._lock = threading.Lock()
        self.tally = GatewayTally()

    def close(self) -> None:
        """End the programs and the server."""
        for pool in self._pools.values():
            pool.close()
        for server in self._servers.values():
            server.close()
        self._pools.clear()
        self._servers.clear()

    def metrics(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        counts, self.tally.counts = self.tally.counts, type(self.tally.counts)()
        return {name: float(counts[name]) for name in GATEWAY_METRICS}

    def programs(self, spec: ProgramSpec) -> ProgramPool:
        """Return what runs a program; its process is started by the first call.

        Raises:
            RunError: the program can't be imported.
        """
        with self._lock:
            pool = self._pools.get(spec)
            if pool is None:
                pool = self._pools[spec] = ProgramPool(spec)
        pool.ready.result()
        return pool

    def episode(self, chat: Chat, generate: Generate) -> "EpisodeGateway":
        """Return the gateway of an episode.

        Args:
            chat: of the episode.
            generate: samples a turn.
        """
        session = GatewaySession(
            chat, generate, self._template, self.tally, one_at_a_time=self._one_at_a_time
        )
        return EpisodeGateway(self, session)

    @contextlib.contextmanager
    def serving(self, session: GatewaySession, host: str) -> Iterator[tuple[str, str]]:
        """Serve a session; yield its address and its secret.

        Args:
            session: of an episode.
            host: address to listen on.

        Raises:
            ConfigError: it is no address of this machine.
        """
        with self._lock:
            if host not in self._servers:
                self._servers[host] = _Listener(self._app(), host)
            number = next(self._numbers)
            self._sessions[number] = session
        secret = f"{number}-{self._sign(number)}"
        try:
            yield f"{self._servers[host].address}/episodes/{secret}/v1", secret
        finally:
            with self._lock:
                del self._sessions[number]

    def _sign(self, number: int) -> str:
        return hmac.new(self._key, str(number).encode(), "sha256").hexdigest()[:40]

    def _template(self, tools: Sequence[Mapping[str, Any]]) -> TurnTemplate:
        return self._make_template(json.dumps(list(tools)))

    def _find(self, secret: str) -> GatewaySession:
        """Return the session of a secret.

        Raises:
            APIError: there is none, or its episode is over.
        """
        number, _, signature = secret.partition("-")
        known = number.isdecimal() and len(number) < 18
        if not known or not hmac.compare_digest(
            signature.encode(), self._sign(int(number)).encode()
        ):
            raise APIError("there is no such episode", status=404)
        with self._lock:
            session = self._sessions.get(int(number))
        if session is None:
            raise APIError("the episode is over", status=410, code="episode_over")
        return session

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def answer(request: Request) -> Response:
            session = self._find(request.path_params["secret"])
            tree = parse_body(await read_body(request, MAX_BODY_BYTES))
            is_chat = request.url.path.endswith("/chat/completions")
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            ticket = Ticket(tree if is_chat else chat_request(tree), is_retry)
            replied = await self._ask(session, ticket, request.receive)
            if replied is None:
                return Response(status_code=CLIENT_GONE)
            asked, reply = replied
            told = reply.chat(asked) if is_chat else reply.response(tree)
            if isinstance(told, str):
                return Response(told, media_type="text/event-stream")
            return JSONResponse(told)

        async def models(request: Request) -> Response:
            self._find(request.path_params["secret"])
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "jaxrl_llm"}
            return JSONResponse({"object": "list", "data": [model]})

        async def leave(request: Request, error: Exception) -> Response:
            return Response(status_code=CLIENT_GONE)

        async def refuse(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                error = APIError(f"{request.method}: {error.detail}", status=error.status_code)
            if not isinstance(error, APIError):
                log.error("the gateway failed", exc_info=error)
                error = APIError("the gateway failed; its log says why", status=410)
            return JSONResponse(error.body, error.status, error.headers)

        base = "/episodes/{secret}/v1"
        return Starlette(
            routes=[
                Route(f"{base}/chat/completions", answer, methods=["POST"]),
                Route(f"{base}/responses", answer, methods=["POST"]),
                Route(f"{base}/models", models),
            ],
            exception_handlers={
                **dict.fromkeys((APIError, HTTPException, Exception), refuse),
                ClientDisconnect: leave,
            },
        )

    async def _ask(self, session: GatewaySession, ticket: Ticket, receive: Any) -> Any:
        """Have a session answer a request; return None where its client has gone."""
        work = session.answer(ticket)
        try:
            asked = asyncio.run_coroutine_threadsafe(work, session.loop)
        except RuntimeError as error:  # the loop was closed just now
            work.close()
            raise APIError("the episode is over", status=410, code="episode_over") from error

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answered, left = asyncio.wrap_future(asked), asyncio.create_task(gone())
        try:
            await asyncio.wait([answered, left], return_when=asyncio.FIRST_COMPLETED)
            is_left = left.done()
        finally:
            left.cancel()
        with contextlib.suppress(RuntimeError):
            session.loop.call_soon_threadsafe(
                functools.partial(session.settle, ticket, is_left=is_left)
            )
        if is_left:
            answered.add_done_callback(lambda future: future.cancelled() or future.exception())
            return None
        try:
            return await answered
        except asyncio.CancelledError as error:
            raise APIError("the episode is over", status=410, code="episode_over") from error


class EpisodeGateway(NamedTuple):
    """The gateway as the agent of one episode has it.

    Attributes:
        server: of all episodes.
        session: answers the requests of this one.
    """

    server: Gateway
    session: GatewaySession


class _Listener:
    """A server in a thread of its own.

    Args:
        app: what it serves.
        host: address to listen on, by a port that the kernel chooses.
    """

    def __init__(self, app: Any, host: str) -> None:
        import uvicorn

        try:
            self._socket = socket.create_server((host, 0), backlog=2048)
        except OSError as error:
            raise ConfigError(f"rollout.agent: can't listen on host {host!r}: {error}") from error
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._socket]},
            name="gateway",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """End the server and its connections."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
