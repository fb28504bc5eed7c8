"""What is being compiled, for a reader who waits: one line, or the text beside a bar."""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.compilation import ADDED, BEGUN, ENDED

log = logging.getLogger(__name__)

PATIENCE_S = 1.5
"""After which a reader is told."""


class CompileProgress:
    """Follows the programs that this process compiles while it is open.

    Args:
        tell: called with a text whenever that changes, by the thread that compiles, one at a time;
            empty when nothing is compiled.

    Attributes:
        total: programs so far, ready ones included.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Begin to follow."""
        self._tell, self._lock = tell, threading.Lock()
        self._labels: list[str] = []
        self.total = self._ready = 0
        jax.monitoring.register_event_listener(self._listen)

    def close(self) -> None:
        """Follow no more."""
        jax.monitoring.unregister_event_listener(self._listen)

    def _listen(self, event: str, **given: str | int) -> None:
        if event not in (ADDED, BEGUN, ENDED):
            return
        with self._lock:
            if event == ADDED:
                self.total += 1
            elif event == BEGUN:
                self._labels.append(str(given["label"]))
                self.total = max(self.total, self._ready + len(self._labels))
            elif given["label"] in self._labels:
                self._labels.remove(str(given["label"]))
                self._ready += 1
            text = ""
            if self._labels:
                text = f"compiling {self._labels[0]} ({self._ready + 1} of {self.total})"
            self._tell(text)


@contextlib.contextmanager
def reporting_compilation() -> Iterator[None]:
    """Log once that programs are compiled, where that takes a while; not where they are kept."""
    lock, timers = threading.Lock(), list[threading.Timer]()
    current_text, lookups = [""], collections.Counter[str]()

    def listen(event: str, **_: str | int) -> None:
        lookups[event.removeprefix("/jax/compilation_cache/")] += 1

    def tell(text: str) -> None:
        with lock:
            current_text[0] = text
            if text and not timers:
                start_timer()

    def start_timer() -> None:
        timers[:] = [threading.Timer(PATIENCE_S, report)]
        timers[0].daemon = True
        timers[0].start()

    def report() -> None:
        with lock:
            requests = lookups["compile_requests_use_cache"]
            if not timers:
                return
            if not current_text[0]:
                timers.clear()  # the next program starts another
            elif requests and requests == lookups["cache_hits"]:
                start_timer()
            else:
                log.info("compiling %d programs%s", progress.total, _kept())

    progress = CompileProgress(tell)
    jax.monitoring.register_event_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_listener(listen)
        progress.close()
        with lock:
            for timer in timers:
                timer.cancel()
            timers.clear()


def _kept() -> str:
    """Return where programs are kept, as text; empty where they are not."""
    settings: Any = jax.config
    if not settings.jax_compilation_cache_dir:
        return ""
    folder = Path(settings.jax_compilation_cache_dir)
    with contextlib.suppress(ValueError, RuntimeError):  # elsewhere than at home
        folder = Path("~") / folder.relative_to(Path.home())
    return f"; they are kept in {folder} for the next run"
