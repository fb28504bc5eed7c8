"""The page of one or more runs: one file of HTML that needs no network."""

import base64
import contextlib
import functools
import gzip
import hashlib
import importlib.resources
import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.files import write_text
from jaxrl_llm.reporting.data import KeptAnswers, describe_metric, metric_table, read_for_page
from jaxrl_llm.reporting.health import is_held
from jaxrl_llm.training.run_files import RunFiles, read_run

MAX_BYTES = 10_000_000
"""Of a page."""

ANSWER_BYTES = 10_000_000
"""Of all answers as JSON, which is compressed; halved until the page is small enough."""

CURVE_POINTS = 1000
"""Of a curve of one run; several runs share three times as many."""

SCRIPTS = (
    *("text.js", "dom.js", "state.js", "overview.js", "plots.js", "curves.js", "config.js"),
    *("answers.js", "answer.js", "prompts.js", "times.js", "main.js"),
)
"""In the order in which they are run."""

DOCS = Path(__file__).resolve().parents[2] / "docs"
"""Of a checkout; an installed package has none."""


class Page:
    """The page of some runs, which may be asked for again while they train.

    Args:
        runs: the runs' folders.

    Raises:
        ConfigError: there is no run in a folder.
    """

    def __init__(self, runs: Sequence[str | Path | RunFiles]) -> None:
        """Read nothing yet."""
        self._runs = [run if isinstance(run, RunFiles) else read_run(run) for run in runs]
        self._answers = [KeptAnswers(run) for run in self._runs]

    def versions(self) -> dict[str, str]:
        """Return texts that differ whenever the metrics, or the answers, are other ones."""
        paths = [run.folder / "metrics.jsonl" for run in self._runs]
        seen = [(p.stat().st_mtime_ns, p.stat().st_size) if p.exists() else None for p in paths]
        seen += [is_held(run.folder) for run in self._runs]
        kept = [answers.version() for answers in self._answers]
        return {"metrics": _digest(seen), "answers": _digest(kept)}

    def metrics(self) -> dict[str, Any]:
        """Return all that the page shows but the answers."""
        points = min(CURVE_POINTS, 3 * CURVE_POINTS // len(self._runs))
        runs = [read_for_page(run, points=points) for run in self._runs]
        for run, name in zip(runs, _names([run.folder for run in self._runs]), strict=True):
            run["name"] = name
        metrics = dict.fromkeys(name for run in runs for name in run["curves"])
        return {
            "made": datetime.now().astimezone().isoformat(timespec="seconds"),
            "docs": DOCS.as_uri() if DOCS.is_dir() else None,
            "runs": runs,
            "groups": list(metric_table()),
            "metrics": {name: describe_metric(name) for name in metrics},
        }

    def answers(self, budget: int = ANSWER_BYTES) -> list[dict[str, Any]]:
        """Return each run's answers.

        Args:
            budget: bytes of JSON of all of them at most, about.
        """
        return [answers.read(budget // len(self._answers)) for answers in self._answers]

    def html(self) -> str:
        """Return the page as one file of less than 10 MB, whatever the runs have kept."""
        metrics, budget = self.metrics(), ANSWER_BYTES
        while True:
            html = fill_page(metrics, self.answers(budget))
            if len(html.encode()) < MAX_BYTES or budget < 1000:
                return html
            budget //= 2


def write_report(
    runs: str | Path | RunFiles | Sequence[str | Path | RunFiles],
    out: str | Path | None = None,
) -> Path:
    """Write one or more runs as a page of HTML, which a browser opens without a network.

    Args:
        runs: a run's folder, or several, whose curves are laid over each other. They may be
            training.
        out: the file to write; None: `report.html` in the first run's folder.

    Returns:
        The file.

    Raises:
        ConfigError: there is no run in a folder, or the file can't be written.
    """
    several = [runs] if isinstance(runs, str | Path | RunFiles) else list(runs)
    if not several:
        raise ConfigError("a page needs a run: expected one folder or more, got none")
    first = several[0].folder if isinstance(several[0], RunFiles) else Path(several[0])
    path = first / "report.html" if out is None else Path(out)
    html = Page(several).html()
    if not path.name:
        raise ConfigError(f"can't write {str(out)!r}: expected the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, html)
    except OSError as error:
        raise ConfigError(
            f"can't write {str(path)!r}: {error.strerror or error}; name another file (--out)"
        ) from error
    return path


def fill_page(metrics: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of a page with its data, styles and scripts in it.

    Scripts run only with the page's nonce, and data is packed, so that no text in it can be one.

    Args:
        metrics: as `Page.metrics` returns them; with `live`, the versions, a server is asked for
            newer ones.
        answers: of each run.
    """
    parts = {
        "nonce": secrets.token_urlsafe(16),
        "style": _static("page.css"),
        "metrics": packed(as_json({"live": None, **metrics})),
        "answers": packed(as_json(answers)),
        "plotly": _plotly(),
        "script": "\n".join(map(_static, SCRIPTS)),
    }
    html = _static("page.html")
    for name, text in parts.items():
        html = html.replace(f"{{{{{name}}}}}", text)
    return html


def as_json(value: Any) -> bytes:
    """Return a value as JSON that every browser reads."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def packed(content: bytes) -> str:
    """Return bytes compressed and as letters and digits, which no text can break out of."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


@functools.cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs().encode())


def _static(name: str) -> str:
    return (importlib.resources.files("jaxrl_llm.reporting") / "static" / name).read_text("utf-8")


def _names(folders: Sequence[Path]) -> list[str]:
    """Return short names of folders that tell them apart.

    >>> _names([Path("runs/a"), Path("other/a")]), _names([Path("runs/a"), Path("runs/b")])
    (['runs/a', 'other/a'], ['a', 'b'])
    """
    paths = [folder.resolve() for folder in folders]
    deepest = max(len(path.parts) for path in paths)
    named = [["/".join(path.parts[-d:]) for path in paths] for d in range(1, deepest + 1)]
    return next(names for names in named if len(set(names)) == len(set(paths)))


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


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
            name = path.removeprefix("/docs/")
            pages = {page.name: page for page in DOCS.glob("*.md")}
            return (PLAIN, pages[name].read_bytes()) if name in pages else None
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
