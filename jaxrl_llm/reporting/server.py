"""Serves the page of runs that are training, on this machine alone."""

import contextlib
import gzip
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.reporting.page import DOCS, Page, as_json, fill_page

HOSTS = {"127.0.0.1", "localhost"}
"""Names by which the page may be asked for, also through a forwarded port: no other site's."""

HTML, JSON, PLAIN = "text/html", "application/json", "text/plain"


def open_server(runs: Sequence[str | Path], port: int) -> ThreadingHTTPServer:
    """Return a server of the page of some runs, which listens but does not answer yet.

    Args:
        runs: the runs' folders.
        port: on 127.0.0.1; 0: one that is free.

    Raises:
        ConfigError: there is no run in a folder, or the port is taken or no port.
    """
    page, lock = Page(runs), threading.Lock()

    def answer(path: str, query: dict[str, list[str]]) -> tuple[str, bytes] | None:
        if path.startswith("/docs/"):
            return _documentation(path.removeprefix("/docs/"))
        with lock:  # one reader of files at a time
            if path == "/":
                live = {"live": page.versions()}  # before the files are read
                return HTML, fill_page(live | page.metrics(), page.answers()).encode()
            return (JSON, as_json(_changes(page, query))) if path == "/data" else None

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), _handler(answer))
    except (OSError, OverflowError) as error:  # the latter: no such number
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port}: can't listen there: {reason}; name another") from error


def _changes(page: Page, known: dict[str, list[str]]) -> dict[str, object]:
    """Return those parts of the page that the reader does not have."""
    versions = page.versions()
    read = {"metrics": page.metrics, "answers": page.answers}
    news = {part: read[part]() for part, v in versions.items() if known.get(part) != [v]}
    return {"versions": versions, **news}


def _documentation(name: str) -> tuple[str, bytes] | None:
    """Return a page of the documentation, where this is a checkout."""
    pages = {path.name: path for path in DOCS.glob("*.md")}
    return (PLAIN, pages[name].read_bytes()) if name in pages else None


def _handler(
    answer: Callable[[str, dict[str, list[str]]], tuple[str, bytes] | None],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if (host or self.headers.get("Host")) not in HOSTS:
                self.send_error(403, f"expected one of the hosts {', '.join(sorted(HOSTS))}")
                return
            address = urlsplit(self.path)
            try:
                found = answer(address.path, parse_qs(address.query))
            except (ConfigError, OSError) as error:  # as where a folder is moved meanwhile
                self.send_error(503, explain=str(error))  # a status line takes Latin letters
                return
            if found is None:
                self.send_error(404)
                return
            kind, content = found
            body = gzip.compress(content, 1)
            self.send_response(200)
            headers = {
                "Content-Type": f"{kind}; charset=utf-8",
                "Content-Encoding": "gzip",
                "Content-Length": str(len(body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the reader has gone
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: the page asks every two seconds."""

    return Handler
