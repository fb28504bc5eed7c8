"""Applications that are served on a free port of this machine while a test runs."""

import contextlib
import socket
import threading

import uvicorn
from starlette.responses import JSONResponse

from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import ServeConfig
from jaxrl_llm.serve import open_served_model
from jaxrl_llm.serving.app import make_app
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
            wait_until(lambda: server.started, 60)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextlib.contextmanager
def serving_model(folder):
    """Serve a model by this library's own engine; yield the URL, and what counts its answers."""
    config = from_tree(
        ServeConfig,
        {"model": str(folder), "name": "teacher", "mesh": {"rollout": {"devices": 1}}}
        | {"max_running_sequences": 8, "max_tokens": 64},
    )
    served, engine = open_served_model(config)
    app = make_app(engine, served, config.limits, None)

    async def gate(scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/v1/completions":
            gate.left -= 1
        if gate.left < 0:
            await JSONResponse({"error": {"message": "lost"}}, 503)(scope, receive, send)
        else:
            await app(scope, receive, send)

    gate.left = 10**6
    try:
        with listening(gate) as address:
            yield f"{address}/v1", gate
    finally:
        engine.close()
