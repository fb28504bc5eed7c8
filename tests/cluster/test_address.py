"""Addresses of Ray clusters, and of what is none: each is recognized in bounded time."""

import contextlib
import socket
import struct
import threading
import time

import pytest

from jaxrl_llm.cluster import launch as module
from jaxrl_llm.cluster.launch import PREFACE, SETTINGS, check_answers, check_joins
from jaxrl_llm.config.errors import ConfigError


@pytest.fixture
def listen():
    """(answer, host) -> the port of a server that calls `answer` with each connection."""
    with contextlib.ExitStack() as stack:

        def run(answer, host="127.0.0.1"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = stack.enter_context(socket.create_server((host, 0), family=family))

            def take():
                with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
                    while True:
                        answer(taken.enter_context(server.accept()[0]))

            threading.Thread(target=take, daemon=True).start()
            stack.callback(server.shutdown, socket.SHUT_RDWR)  # which ends accept
            return server.getsockname()[1]

        yield run


def closing(connection):
    connection.recv(100)
    connection.close()


def resetting(connection):
    connection.recv(100)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def dripping(connection):
    for byte in SETTINGS:
        time.sleep(0.1)
        connection.sendall(bytes([byte]))


def test_a_server_of_http_2_is_taken(listen):
    heard = []

    def greeted(connection):
        heard.append(connection.recv(100))
        connection.sendall(SETTINGS[:4])
        time.sleep(0.05)
        connection.sendall(SETTINGS[4:] + b"more")

    for prefix in ("", "ray://"):
        check_answers(f"{prefix}127.0.0.1:{listen(greeted)}")
    assert heard == [PREFACE] * 2
    with contextlib.suppress(OSError):  # not every machine has IPv6
        port = listen(greeted, host="::1")
        check_answers(f"[::1]:{port}")
        check_answers(f"ray://::1:{port}")


STRANGERS = {
    "silent": (lambda connection: None, 0.2, "nothing"),
    "dripping": (dripping, 0.2, "b'"),  # how much comes in time depends on the machine
    "closing": (closing, 20, "nothing"),
    "resetting": (resetting, 20, "nothing"),
    "ssh": (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), 20, "SSH-2.0"),
    "http": (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), 20, "HTTP/1.1"),
    "goaway": (lambda c: c.sendall(SETTINGS[:3] + b"\7" + SETTINGS[4:]), 20, "x07"),
}


def test_a_server_that_is_not_rays_is_refused(listen, monkeypatch):
    """Also one that says nothing, or takes no connection, as behind a firewall."""
    for name, (answer, seconds, got) in STRANGERS.items():
        address = f"127.0.0.1:{listen(answer)}"
        with pytest.raises(ConfigError) as caught:
            check_answers(address, seconds)
        message = str(caught.value)
        assert f"cluster.address='{address}'" in message and got in message, name
        assert "\n" not in message
    monkeypatch.setattr(module, "CONNECT_S", 0.2)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # a full backlog takes no more either
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(server.getsockname())
        with pytest.raises(ConfigError, match="timed out"):
            check_answers(f"127.0.0.1:{server.getsockname()[1]}", 60.0)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "ray://127.0.0.1:1", "host:port"])
def test_a_wrong_address_is_refused(address):
    with pytest.raises(ConfigError, match=r"cluster\.address") as caught:
        check_answers(address)
    assert f"'{address}'" in str(caught.value)


def test_the_next_address_of_a_host_is_tried_where_there_is_no_ipv6(listen, monkeypatch):
    port = listen(lambda connection: connection.sendall(SETTINGS))
    found = [
        (family, socket.SOCK_STREAM, 6, "", (host, port))
        for family, host in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
    ]

    class WithoutIPv6(socket.socket):
        def __init__(self, family=socket.AF_INET, *given, **keywords):
            if family == socket.AF_INET6:
                raise OSError(97, "Address family not supported by protocol")
            super().__init__(family, *given, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **keywords: found)
    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    check_answers(f"somewhere:{port}")


def test_an_encrypted_server_is_not_greeted(listen, monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_answers(f"127.0.0.1:{listen(lambda connection: None)}", 0.2)
    with pytest.raises(ConfigError, match=r"cluster\.address"):
        check_answers("127.0.0.1:1", 0.2)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_a_server_that_answers_no_request_is_refused(listen, prefix):
    port = listen(lambda connection: connection.sendall(SETTINGS), host="0.0.0.0")
    address = f"{prefix}127.0.0.1:{port}"
    check_answers(address)
    with pytest.raises(ConfigError, match=r"cluster\.start_timeout_s"):
        check_joins(address, 1.0)


def test_what_ray_says_of_an_address_is_the_reason():
    with pytest.raises(ConfigError, match=r"cluster\.address"):
        check_joins("a://b", 20.0)


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/cluster/")
def test_a_ray_head_is_taken(ray_nodes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client_port = free.getsockname()[1]
    with ray_nodes(count=1, cpus=1, client_port=client_port) as node:
        for address in (node, f"ray://127.0.0.1:{client_port}"):
            check_answers(address)
        check_joins(node, 60.0)
