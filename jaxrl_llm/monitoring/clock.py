"""What a step costs: seconds of its stages, compilations, and memory."""

import contextlib
import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.compilation import ADDED, BEGUN, ENDED, WAITED, is_accounted
from jaxrl_llm.monitoring.activity import ACTIVITIES, LONGEST_S, PATIENCE_S, Activity, activity

PHASE = "phase"
"""Name of the statistic that marks the stages of a step among a trace's other events."""


LABELS = {
    "gen": "sampling",
    "gen_max": "sampling greedily",
    "reward": "scoring",
    "vision": "reading the images",
    "old_log_prob": "log-probs",
    "ref": "the reference's log-probs",
    "teacher": "the teachers' log-probs",
    "adv": "advantages",
    "update_actor": "updating",
    "update_weights": "syncing weights",
    "testing": "validating",
}
"""What stages are called where somebody watches the run, besides those that `stage_label` makes."""


def stage_label(stage: str) -> str:
    """Return what a stage is called where somebody watches the run.

    >>> stage_label("gen"), stage_label("update_critic")
    ('sampling', 'updating critic')
    """
    words = stage.replace("update_", "updating ").replace("_", " ")
    return LABELS.get(stage, words)


class Clock:
    """Wall-clock seconds of the named stages of a step, as `timing_s/<stage>`."""

    def __init__(self) -> None:
        """Start."""
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time one stage, and mark it in a trace if one is being written."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(stage, **{PHASE: 1}), activity(stage_label(stage)):
            yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return the seconds of every stage, and of the step so far."""
        total = time.perf_counter() - self._start
        return {f"timing_s/{stage}": s for stage, s in {**self.seconds, "step": total}.items()}


class CompileCounter:
    """Counts the functions that XLA compiles while it is open, or reads from its cache.

    It also adds up how long threads have waited for that. What is compiled while others run is
    counted where it ends, and nobody waits for it.
    """

    def __init__(self) -> None:
        """Start to count."""
        self.count, self._hits, self._seconds, self._waited = 0, 0, 0.0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_to_cache)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == "/jax/core/compile/backend_compile_duration":  # of a hit, too
            self.count += 1
            self._seconds += duration_secs
            self._waited += 0.0 if is_accounted() else duration_secs
        elif event == WAITED:
            self._waited += duration_secs

    def _listen_to_cache(self, event: str, **kwargs: str | int) -> None:
        del kwargs
        self._hits += event == "/jax/compilation_cache/cache_hits"

    def take(self) -> int:
        """Return the count since the last call."""
        count, self.count = self.count, 0
        return count

    def metrics(self) -> dict[str, float]:
        """Return the compilations, cache hits and seconds since the last call."""
        counted = {
            "perf/compilations": float(self.count - self._hits),
            "perf/compilation_cache_hits": float(self._hits),
            "perf/compile_seconds": self._seconds,
            "perf/compile_wait_s": self._waited,
        }
        self.count, self._hits, self._seconds, self._waited = 0, 0, 0.0, 0.0
        return counted

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_to_cache)


def is_due(step: int, every: int, last: int) -> bool:
    """Tell whether something is done at this step: every n steps, and at the last one."""
    return step == last or (every > 0 and step % every == 0)


class Pace:
    """Tells which steps have a line: the first, ten more, and others where steps are slow.

    Args:
        total: steps in all.
        now: seconds of a clock that only goes on.
    """

    def __init__(self, total: int, now: Callable[[], float] = time.monotonic) -> None:
        """Nothing has a line yet."""
        self._total, self._now = total, now
        self._said, self._wait = -math.inf, PATIENCE_S

    def __call__(self, step: int) -> bool:
        """Return whether a step that is done has a line."""
        now = self._now()
        is_late = now - self._said >= self._wait
        if not (is_late or is_due(step, max(1, self._total // 10), self._total)):
            return False
        if is_late and self._said > -math.inf:
            self._wait = min(2 * self._wait, LONGEST_S)
        self._said = now
        return True


def summary(name: str, values: Any) -> dict[str, float]:
    """Return `name/mean`, `name/max` and `name/min` of an array.

    >>> import numpy as np
    >>> summary("response_length", np.array([1, 3]))
    {'response_length/mean': 2.0, 'response_length/max': 3.0, 'response_length/min': 1.0}
    """
    if not values.size:
        return {f"{name}/{statistic}": 0.0 for statistic in ("mean", "max", "min")}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def memory_metrics() -> dict[str, float]:
    """Return the peak memory so far, in GiB: of this process, and of its first device if known."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scale = 2**30 if sys.platform == "darwin" else 2**20
    metrics = {"perf/cpu_memory_used_gb": peak / scale}
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        metrics["perf/max_memory_allocated_gb"] = stats["peak_bytes_in_use"] / 2**30
    return metrics


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
