"""A count of what tools and environments raised, of which the first of each kind is logged."""

import logging
import threading
from collections import Counter

log = logging.getLogger(__name__)


class FailureLog:
    """Counts errors by tool and kind, from any thread.

    >>> failures = FailureLog()
    >>> failures.note("search", "KeyError", "Traceback …")
    >>> failures.counts
    Counter({('search', 'KeyError'): 1})
    """

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self._lock = threading.Lock()

    def note(self, name: str, kind: str, trace: str) -> None:
        """Count an error; log where it was raised if it is the first of its kind.

        Args:
            name: of the tool, or what else failed.
            kind: of the error.
            trace: where it was raised.
        """
        with self._lock:
            self.counts[name, kind] += 1
            is_first = self.counts[name, kind] == 1
        if is_first:
            message = "tools: %s failed (%s); others of this kind are counted\n%s"
            log.warning(message, name, kind, trace)

    def log_counts(self) -> None:
        """Log how many there were of each kind."""
        with self._lock:
            counts = sorted(self.counts.items())
        if counts:
            listed = ", ".join(f"{name}: {count} {kind}" for (name, kind), count in counts)
            log.warning("tools: failures in all: %s", listed)
