"""Addresses of Ray clusters, and of what is none: each is recognized in bounded time."""

import contextlib
import socket
import threading
import time

import pytest

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
        check_answers(f"ray://::1:{listen(greeted, host='::1')}")


STRANGERS = {
    "silent": (lambda connection: None, 0.2, "nothing"),
    "dripping": (dripping, 0.2, "b'"),  # how much comes in time depends on the machine
    "closing": (lambda c: (c.recv(100), c.close()), 60, "nothing"),
    "ssh": (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), 60, "SSH-2.0"),
    "goaway": (lambda c: c.sendall(SETTINGS[:3] + b"\7" + SETTINGS[4:]), 60, "x07"),
}


def test_a_server_that_is_not_rays_is_refused(listen):
    for name, (answer, seconds, got) in STRANGERS.items():
        address = f"127.0.0.1:{listen(answer)}"
        with pytest.raises(ConfigError) as caught:
            check_answers(address, seconds)
        message = str(caught.value)
        assert f"cluster.address='{address}'" in message and got in message, name
        assert "\n" not in message


def test_a_wrong_address_is_refused():
    for address in ("nowhere", "ray://127.0.0.1:1", "host:port"):
        with pytest.raises(ConfigError, match=rf"cluster\.address.*'{address}'"):
            check_answers(address)


def test_an_encrypted_server_is_not_greeted(listen, monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_answers(f"127.0.0.1:{listen(lambda connection: None)}", 0.2)


def test_a_server_that_answers_no_request_is_refused(listen):
    address = f"ray://127.0.0.1:{listen(lambda connection: connection.sendall(SETTINGS))}"
    check_answers(address)
    with pytest.raises(ConfigError, match=r"cluster\.start_timeout_s"):
        check_joins(address, 1.0)
    with pytest.raises(ConfigError, match=r"cluster\.address"):  # as Ray says
        check_joins("a://b", 20.0)
