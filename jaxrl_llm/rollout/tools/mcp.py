"""Tools of servers of the Model Context Protocol.

Worker processes import this: no array library.
"""

import asyncio
import functools
import json
import logging
import os
import time
from base64 import b64decode
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from jaxrl_llm.config.functions import closest
from jaxrl_llm.rollout.observation import BrokenTool, FailedTool
from jaxrl_llm.rollout.tools.tool import LoadedTool, background_loop, marked, toolset_tool
from jaxrl_llm.workers.retries import wait_before_retry

SHARE_OF_TIME = 0.8
"""Of the time limit of a call, for which a server is waited for."""

START_S = 30.0
"""For a server to begin and to list its tools, before a run."""

END_S = 10.0
"""For a server to end: one that does not is killed after about 5 s by the package."""

TRIES = 3
"""To list the tools: a worker may begin while a server is away."""

MOST_SAID = 10
"""Different complaints of the package about what servers print."""

SESSIONS = ("episode", "worker")


ServerAddress = str | tuple[str, ...]
"""The URL of a server that runs, or the words that start one."""


@marked(is_toolset=True)
def mcp_tools(
    *,
    command: Sequence[str] | None = None,
    url: str | None = None,
    only: Sequence[str] | None = None,
    session: str = "episode",
) -> list[LoadedTool]:
    """Give the tools of a server of the Model Context Protocol.

    Args:
        command: program and arguments of a server that speaks on its standard streams. It is
            started with the environment of the process that starts it.
        url: of a server that speaks HTTP (streamable), such as http://localhost:8000/mcp.
        only: names of the tools that the model gets; None gives all.
        session: `episode` begins one for each episode, so that what a server keeps is the
            episode's, and starts a `command` once for each; `worker` shares one among the episodes
            of a process.

    Returns:
        The tools, in the server's order.

    Raises:
        ValueError: the server gives no tools, or a name is none of them.
    """
    if find_spec("mcp") is None:
        raise ValueError("mcp_tools needs the package mcp; pip install 'jaxrl_llm[mcp]'")
    if (command is None) == (url is None) or isinstance(command, str) or command == []:
        raise ValueError(
            "mcp_tools: expected either command, a list such as [python, server.py], or url; got "
            f"command {command!r} and url {url!r}"
        )
    if session not in SESSIONS:
        raise ValueError(f"mcp_tools: got session {session!r}; {closest(session, SESSIONS)}")
    address = url or tuple(command or ())
    server, listed = _shown(address), _listed(address)
    tools = {tool.name: tool for tool in listed}
    if not listed or len(tools) < len(listed):
        names = ", ".join(tool.name for tool in listed) or "none"
        raise ValueError(f"mcp_tools: {server}: got the tools {names}, expected each once")
    for name in only or ():
        if name not in tools:
            raise ValueError(f"mcp_tools: {server} has no tool {name!r}; {closest(name, tools)}")
    return [
        toolset_tool(
            {"name": name, "description": tool.description or "", "parameters": tool.input_schema},
            functools.partial(_opened, address, name, session),
        )
        for name, tool in tools.items()
        if only is None or name in only
    ]


def _listed(address: ServerAddress) -> list[Any]:
    tries, began = 0, time.monotonic()
    while True:
        connection = McpConnection(address)
        try:
            return connection.list_tools(START_S)
        except ConnectionError as error:
            tries += 1
            if tries == TRIES or time.monotonic() - began > START_S:
                raise ValueError(f"mcp_tools: {error}") from error
            time.sleep(wait_before_retry(error, tries) or 0.0)
        finally:
            connection.close()


def _shown(address: ServerAddress) -> str:
    """Return an address as a user wrote it."""
    return address if isinstance(address, str) else " ".join(address)


def _opened(
    address: ServerAddress, name: str, session: str, state: dict[str, Any], seconds: float
) -> Generator[Callable[..., Any], None, None]:
    is_shared = session == "worker"
    if is_shared:
        connection = _shared(address)
    else:  # the tools of a server have one for an episode
        connection = state.setdefault(f"mcp {_shown(address)}", McpConnection(address))
    connection.open(SHARE_OF_TIME * seconds)

    def call(**arguments: Any) -> Any:
        return connection.call(name, arguments, SHARE_OF_TIME * seconds, replay=not is_shared)

    try:
        yield call
    finally:
        if not is_shared:
            connection.close()


@functools.cache
def _shared(address: ServerAddress) -> "McpConnection":
    return McpConnection(address)


class McpConnection:
    """A session with a server, begun when it is needed and again after it was lost.

    Args:
        address: of the server.
    """

    def __init__(self, address: ServerAddress) -> None:
        self._address, self._server = address, _shown(address)
        self._client: Any = None
        self._ending = asyncio.Event()
        self._holder: Any = None
        self._earlier: list[tuple[str, dict[str, Any]]] = []

    def open(self, seconds: float) -> None:
        """Begin a session, if there is none.

        Raises:
            ConnectionError: the server can't be reached, or does not begin in time.
        """
        if self._client is None:
            _wait_for(self._begin(seconds))

    def close(self) -> None:
        """End the session, and a server that was started for it."""
        _wait_for(self._end())

    def list_tools(self, seconds: float) -> list[Any]:
        """Return all tools of the server.

        Raises:
            ConnectionError: there is no answer, or none of a server of this protocol.
        """
        self.open(seconds)
        return _wait_for(self._list(seconds))

    def call(self, name: str, arguments: dict[str, Any], seconds: float, *, replay: bool) -> Any:
        """Call a tool.

        Args:
            name: of the tool.
            arguments: by name.
            seconds: to wait for an answer.
            replay: whether a session that was lost is brought to where it was, by its calls.

        Returns:
            Its text, or its data where it has no text.

        Raises:
            FailedTool: the tool says that it failed, or does not answer in time.
            BrokenTool: the connection is lost.
        """
        if self._client is None:
            self.open(seconds)
            for earlier in self._earlier if replay else ():
                with suppress(FailedTool):
                    _wait_for(self._call(*earlier, seconds))
        value = _wait_for(self._call(name, arguments, seconds))
        if replay:
            self._earlier.append((name, arguments))
        return value

    async def _begin(self, seconds: float) -> None:
        began = asyncio.get_running_loop().create_future()
        self._ending = asyncio.Event()
        self._holder = asyncio.create_task(self._hold(began))
        _HOLDERS.add(self._holder)  # a loop holds its tasks but weakly
        self._holder.add_done_callback(_HOLDERS.discard)
        try:
            async with asyncio.timeout(seconds):
                self._client = await began
        except TimeoutError:
            await self._end()
            raise ConnectionError(f"{self._server}: no session within {seconds:g} s") from None

    async def _hold(self, began: asyncio.Future[Any]) -> None:
        """Keep a session: it has to end in the task in which it began."""
        from mcp import Client, StdioServerParameters

        _COMPLAINTS.addFilter(_say_once)
        server = self._address
        if not isinstance(server, str):
            program, *arguments = server
            server = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        try:
            async with Client(server) as client:
                if not began.done():
                    began.set_result(client)
                await self._ending.wait()
        except (Exception, asyncio.CancelledError) as error:
            if not began.done():
                began.set_exception(ConnectionError(f"{self._server}: {_first_cause(error)}"))

    async def _end(self, *, wait: bool = True) -> None:
        holder, is_open = self._holder, self._client is not None
        self._client = self._holder = None
        if holder is None:
            return
        if is_open:
            self._ending.set()  # a cancellation would disturb how it ends a server
        else:
            holder.cancel()
        if wait:
            await asyncio.wait({holder}, timeout=END_S)

    async def _list(self, seconds: float) -> list[Any]:
        tools, cursor = [], None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except Exception as error:
            raise ConnectionError(f"{self._server}: no tools: {_first_cause(error)}") from error

    async def _call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            async with asyncio.timeout(seconds):
                result = await self._client.call_tool(name, arguments)
        except (TimeoutError, MCPError) as error:
            code = error.code if isinstance(error, MCPError) else REQUEST_TIMEOUT
            if code not in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise FailedTool(f"error: {error}") from error
            await self._end(wait=False)
            if code == REQUEST_TIMEOUT:
                raise FailedTool(
                    f"error: no answer within {seconds:g} s", kind="timeout"
                ) from error
            raise BrokenTool(f"{self._server}: {error}") from error
        except Exception as error:  # it answers what the protocol does not have
            await self._end(wait=False)
            raise BrokenTool(f"{self._server}: {_first_cause(error)}") from error
        told = _content_of(result)
        if result.is_error:
            raise FailedTool(told if isinstance(told, str) and told else "error")
        return told


def _content_of(result: Any) -> Any:
    """Return what is told of a result: a text, or its texts and images in their order."""
    others = sorted({part.type for part in result.content} - {"text", "image"})
    if others:
        raise FailedTool(f"error: the tool returned {', '.join(others)}, expected text or images")
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    if any(part.type == "image" for part in result.content):
        return [p.text if p.type == "text" else b64decode(p.data) for p in result.content]
    return "\n".join(part.text for part in result.content)


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")


_COMPLAINTS = logging.getLogger("mcp.client.stdio")
_SAID = set[str]()


def _say_once(record: logging.LogRecord) -> bool:
    """Let the package say once, in a line, that a server prints what is no message.

    Many print a greeting, which does no harm; it would be a traceback in each episode.
    """
    cause = record.exc_info and record.exc_info[1]
    record.exc_info = record.exc_text = None
    if cause:
        record.msg, record.args = f"{record.getMessage()}: {' '.join(str(cause).split())}", ()
    is_new = str(record.msg) not in _SAID
    _SAID.add(str(record.msg))
    return is_new and len(_SAID) < MOST_SAID


_HOLDERS: set[asyncio.Task[None]] = set()


def _wait_for(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, background_loop("mcp_tools")).result()
