"""Of all who call a port, the one that has the key."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

AUTH_TIMEOUT_S = 3.0  # until a caller has shown that it has the key
POLL_INTERVAL_S = 0.05
MAX_CALLERS = 32  # at once; each takes a thread and two file descriptors


class _Caller:
    """A connection whose other end is asked for the key, in a thread.

    Attributes:
        connection: to the caller.
        deadline: for the whole exchange, by the monotonic clock.
        has_key: whether it has shown the key.
        is_authenticated: whether this side has shown the key, too, and the caller has accepted it.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        """Begin to ask."""
        self.connection = connection
        self.deadline = time.monotonic() + AUTH_TIMEOUT_S
        self.has_key = self.is_authenticated = False
        self._thread = threading.Thread(
            target=self._authenticate, args=(key,), daemon=True, name="vllm-caller"
        )
        self._thread.start()

    def is_asked(self) -> bool:
        """Return whether the exchange goes on."""
        return self._thread.is_alive()

    def drop(self) -> None:
        """End the connection, and the thread with it."""
        with contextlib.suppress(OSError):  # the caller has ended it already
            self.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.connection.close()

    def _authenticate(self, key: bytes) -> None:
        # AssertionError: in Python 3.11, of a challenge in another form
        refused = (AuthenticationError, AssertionError, EOFError, OSError)
        with contextlib.suppress(*refused), Connection(os.dup(self.connection.fileno())) as stream:
            deliver_challenge(stream, key)
            self.has_key = True
            answer_challenge(stream, key)
            self.is_authenticated = True


def accept_authenticated(
    listener: socket.socket, key: bytes, is_over: Callable[[], bool]
) -> socket.socket | None:
    """Accept callers until one of them has the key; the connections of all others are closed.

    All are asked at the same time, so those that say nothing, or speak slowly, hold nobody up.
    Where there are more than `MAX_CALLERS`, the oldest without the key is dropped; who has the key
    and is dropped in a crowd calls again.

    Args:
        listener: that is called.
        key: that both sides show each other that they have.
        is_over: whether to give up.

    Returns:
        the connection; None if it was given up.
    """
    listener.settimeout(POLL_INTERVAL_S)
    callers: list[_Caller] = []  # the oldest first
    try:
        while not is_over():
            for caller in callers:
                if caller.is_authenticated:
                    callers.remove(caller)
                    return caller.connection
            callers = _without_dropped(callers)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it has gone already, or this process has too many files open
                time.sleep(POLL_INTERVAL_S)
                continue
            callers.append(_Caller(connection, key))
        return None
    finally:
        for caller in callers:
            caller.drop()


def _without_dropped(callers: list[_Caller]) -> list[_Caller]:
    """Drop callers that were refused or are late, and the oldest if one more would be too many."""
    now = time.monotonic()
    kept = [
        caller
        for caller in callers
        if (caller.is_asked() and now < caller.deadline) or caller.is_authenticated
    ]
    if len(kept) == MAX_CALLERS:
        kept.remove(next((caller for caller in kept if not caller.has_key), kept[0]))
    for caller in callers:
        if caller not in kept:
            caller.drop()
    return kept
