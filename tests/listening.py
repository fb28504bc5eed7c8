"""Applications that are served on a free port of this machine while a test runs."""

import contextlib
import socket
import threading

import uvicorn

from tests.waiting import wait_until


@contextlib.contextmanager
def listening(app):
    """Serve an app on a free port of the loopback in a thread, and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started, 10)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
