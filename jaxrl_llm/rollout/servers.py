"""What functions that ask a server by HTTP have in common."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Hashable, Mapping
from importlib.util import find_spec
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.workers.values import shorten


class ServerError(Exception):
    """An answer that can't be used; the status of `response` says whether another try may help.

    Args:
        response: of the server.
        expected: what it should have been.
    """

    def __init__(self, response: Any, expected: str = "status 200") -> None:
        super().__init__(
            f"expected {expected}, the server replied with status {response.status_code}: "
            f"{shorten(repr(response.text), 200)}"
        )
        self.response = response


def check_client(name: str, *, key: str = "reward.function") -> None:
    """Refuse a function that asks a server where the package for requests is missing.

    Args:
        name: of the function.
        key: of the config that names it.

    Raises:
        ConfigError: it is.
    """
    if find_spec("httpx2") is None:
        raise ConfigError(f"{key}: {name} needs httpx2; pip install 'jaxrl_llm[client]'")


async def post(
    url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Any:
    """Send JSON to a server, and return its response.

    Nothing is tried again and nothing ends in time here: `reward.retries` and `reward.timeout_s`
    do that for a whole call.

    Args:
        url: of the API.
        path: behind it.
        body: of the request.
        headers: of the request, besides the usual ones.

    Raises:
        ServerError: its status is not 200.
        ConnectionError: it can't be reached, or the connection is lost.
    """
    import httpx2

    client, address = await _client(), url.rstrip("/") + path
    try:
        response = await client.post(address, json=body, headers=headers)
    except httpx2.TransportError as error:  # whose text does not say where
        raise ConnectionError(f"{address}: {type(error).__name__}: {error}") from error
    if response.status_code != 200:
        raise ServerError(response)
    return response


def lock_of(*key: Hashable) -> asyncio.Lock:
    """Return the lock of this event loop that has a key, while anything holds it."""
    return _LOCKS.setdefault((asyncio.get_running_loop(), *key), asyncio.Lock())


_LOCKS: weakref.WeakValueDictionary[Hashable, asyncio.Lock] = weakref.WeakValueDictionary()
_CLIENTS: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


async def _client() -> Any:
    """Return the client of this event loop, which closes it at its end, as all its generators."""
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        generator = _open_client()
        _CLIENTS[loop] = await anext(generator), generator
    return _CLIENTS[loop][0]


async def _open_client() -> AsyncGenerator[Any, None]:
    import httpx2

    limits = httpx2.Limits(max_connections=None)  # the pool limits the calls, and their time
    async with httpx2.AsyncClient(timeout=None, limits=limits) as client:
        yield client
    _CLIENTS.pop(asyncio.get_running_loop(), None)
