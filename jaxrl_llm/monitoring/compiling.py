"""What is being compiled, for a reader who waits."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.compilation import ADDED, BEGUN, ENDED
from jaxrl_llm.monitoring.activity import ACTIVITIES, Activity

LOOKUPS = "/jax/compilation_cache/"
"""What jax's events begin with that tell of programs which were compiled before."""

_following: list["CompileProgress"] = []


class CompileProgress:
    """Follows the programs that this process compiles while it is open, as an activity.

    Attributes:
        total: programs so far, ready ones included.
    """

    def __init__(self) -> None:
        """Begin to follow."""
        self._lock, self._labels = threading.Lock(), list[str]()
        self._has_note = False
        self._activity = Activity("compiling", count=lambda: self._ready)
        self._activity.thread = 0  # they are compiled in several
        self.total = self._ready = self._lookups = self._hits = 0
        jax.monitoring.register_event_listener(self._listen)

    def close(self) -> None:
        """Follow no more."""
        jax.monitoring.unregister_event_listener(self._listen)
        ACTIVITIES.end(self._activity)

    def _listen(self, event: str, **given: str | int) -> None:
        if event.startswith(LOOKUPS):
            self._lookups += event.endswith("/compile_requests_use_cache")
            self._hits += event.endswith("/cache_hits")
        elif event in (ADDED, BEGUN, ENDED):
            with self._lock:
                self._follow(event, str(given["label"]))

    def _follow(self, event: str, label: str) -> None:
        was_busy = bool(self._labels)
        if event == ADDED:
            self.total += 1
        elif event == BEGUN:
            self._labels.append(label)
            self.total = max(self.total, self._ready + len(self._labels))
        elif label in self._labels:
            self._labels.remove(label)
            self._ready += 1
        has_all = self._lookups and self._lookups == self._hits
        self._activity.label = "loading programs" if has_all else "compiling"
        if not self._has_note and self._lookups > self._hits:
            self._activity.note, self._has_note = _kept(), True
        self._activity.total = self.total
        self._activity.detail = self._labels[0] if self._labels else ""
        if self._labels and not was_busy:
            ACTIVITIES.begin(self._activity)
        elif was_busy and not self._labels:
            ACTIVITIES.end(self._activity)


@contextlib.contextmanager
def reporting_compilation() -> Iterator[None]:
    """Let a reader know within a `with` what goes on, programs that are compiled included."""
    with ACTIVITIES.reported(), contextlib.ExitStack() as stack:
        if not _following:
            _following.append(stack.enter_context(contextlib.closing(CompileProgress())))
            stack.callback(_following.clear)
        yield


def _kept() -> str:
    """Return where compiled programs are kept, as text; empty where they are not."""
    settings: Any = jax.config
    if not settings.jax_compilation_cache_dir:
        return ""
    folder = Path(settings.jax_compilation_cache_dir)
    with contextlib.suppress(ValueError, RuntimeError):  # elsewhere than at home
        folder = Path("~") / folder.relative_to(Path.home())
    return f"; programs are kept in {folder} for the next run"
