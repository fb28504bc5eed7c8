"""Whether a Ray cluster is at an address, in bounded time: Ray itself may try for ever."""

import math
import os
import signal
import socket
import subprocess
import sys
import time

from jaxrl_llm.config.errors import ConfigError

CONNECT_S = 10.0  # for an address to answer
IMPORT_S = 20.0  # for a process to import Ray

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""An empty frame of settings: HTTP/2 begins with one, and so do Ray's servers, which speak gRPC."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
"""What a client of HTTP/2 says first."""

JOIN = """
import signal, sys
import ray
signal.alarm(int(sys.argv[2]))
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print(" ".join(str(error).split()))
    sys.exit(1)
"""


def check_answers(address: str, seconds: float = CONNECT_S) -> None:
    """Refuse an address at which nothing answers, or something that is not Ray.

    Args:
        address: `host:port` or `ray://host:port`; an IPv6 host may stand in brackets.
        seconds: for all of it, at most `CONNECT_S`; a host's name may take its resolver longer.

    >>> check_answers("nowhere")
    Traceback (most recent call last):
        ...
    jaxrl_llm.config.errors.ConfigError: cluster.address: expected (ray://)host:port, got 'nowhere'
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"cluster.address: expected (ray://)host:port, got {address!r}")
    seconds = min(seconds, CONNECT_S)
    until = time.monotonic() + seconds
    try:
        with _connected(host.strip("[]"), int(port), until) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # only those who have its certificates may talk to it
            answer, closed = _first_frame(connection, until)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at cluster.address={address!r}: {error}"
        ) from error
    if len(answer) < len(SETTINGS) or answer[3:9] != SETTINGS[3:]:
        end = "and then the connection's end" if closed else f"in {seconds:g} s"
        raise ConfigError(
            f"no Ray cluster answers at cluster.address={address!r}: expected a server that speaks "
            f"HTTP/2, as Ray's do, got {answer[:60] if answer else 'nothing'} {end}"
        )


def _connected(host: str, port: int, until: float) -> socket.socket:
    """Return a connection to the first of a host's addresses that takes one."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for remaining, (family, kind, protocol, _, address) in zip(
        range(len(addresses), 0, -1), addresses, strict=True
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left(until) / remaining)
            connection.connect(address)
            return connection
        except OSError:
            connection.close()
            if remaining == 1:
                raise
    raise OSError(f"{host} has no address")


def _first_frame(connection: socket.socket, until: float) -> tuple[bytes, bool]:
    """Greet a server; return what it answers, and whether it then closed the connection."""
    answer = b""
    try:
        connection.settimeout(_left(until))
        connection.sendall(PREFACE)
        while len(answer) < len(SETTINGS):
            connection.settimeout(_left(until))
            part = connection.recv(256)
            if not part:
                return answer, True
            answer += part
    except TimeoutError:
        return answer, False
    except ConnectionError:
        return answer, True
    return answer, False


def _left(until: float) -> float:
    return max(until - time.monotonic(), 1e-3)  # 0 would be no limit at all


def check_joins(address: str, seconds: float) -> None:
    """Refuse an address at which Ray can't be joined in time.

    Another process tries it, which can be ended: what waits in Ray for a server that is silent
    can't be. For a server that takes connections and answers no request, Ray 2.60 needs 10
    minutes, and as its client (`ray://`) it waits for ever.

    Args:
        address: of a cluster, or `auto`.
        seconds: until it must have succeeded.

    Raises:
        ConfigError: it failed, or took longer.
    """
    words = [sys.executable, "-c", JOIN, address, str(max(1, math.ceil(seconds)))]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=seconds + IMPORT_S, check=False
        )
        late = done.returncode == -signal.SIGALRM
        text = done.stdout.strip() or done.stderr.strip()
    except subprocess.TimeoutExpired:
        done, late, text = None, True, ""
    if late:
        raise ConfigError(
            f"the Ray cluster at cluster.address={address!r} could not be joined in {seconds:.0f} s"
            " (cluster.start_timeout_s): it takes connections, but does not answer"
        )
    if done is not None and done.returncode:
        reason = text.splitlines()[-1] if text else f"exit status {done.returncode}"
        raise ConfigError(f"can't connect to Ray at cluster.address={address!r}: {reason}")
