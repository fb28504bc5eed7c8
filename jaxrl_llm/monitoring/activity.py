"""What this process does now, for a reader who waits: beside a bar, or as a line now and then.

Whatever may take seconds is an `activity`. Where a bar is shown it has the text of all that go on.
Elsewhere there is a line after two seconds without any other, and then at growing intervals. One
that comes again, as the stages of a step do, has a line only where it takes longer than it did.
"""

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

log = logging.getLogger("jaxrl_llm")

PATIENCE_S = 2.0
"""Seconds without a line after which there is one that says what goes on."""
LONGEST_S = 60.0
"""Seconds between two such lines of what goes on for long."""
STALLED_S = 120.0
"""Seconds after which it is told in detail what is waited for, and then again."""
POLL_S = 0.25
PAUSE_S = 1.0
"""Seconds without any activity after which the next one begins anew to be patient."""


class Activity:
    """One thing that goes on.

    Args:
        label: what it is: "validating".
        total: how many parts it has, if that is known.
        count: returns how many of them are done; None: `advance` counts them.
        describe: returns in detail what is waited for, where it takes very long.

    Attributes:
        detail: of the part that goes on.
        note: is added to its first line, where it has one.
        thread: whose it is; 0 where it is of several.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        *,
        count: Callable[[], int] | None = None,
        describe: Callable[[], str] | None = None,
    ) -> None:
        """Nothing is done yet."""
        self.label, self.total, self.detail, self.note = label, total, "", ""
        self.describe = describe
        self.thread = threading.get_ident()
        self.began = self.told = 0.0
        self._count, self._done, self._lock = count, 0, threading.Lock()

    def advance(self, parts: int = 1) -> None:
        """Count parts that are done; from any thread."""
        with self._lock:
            self._done += parts

    def take_note(self) -> str:
        """Return what is to be said of it once, in its first line."""
        note, self.note = self.note, ""
        return note

    @property
    def text(self) -> str:
        """What it is and how far it has come: "validating 128/512"."""
        done = self._done
        if self._count is not None:
            with contextlib.suppress(Exception):  # of what is counted while it changes
                done = self._count()
        counts = "" if self.total is None else f" {max(0, min(done, self.total))}/{self.total}"
        return f"{self.label}{counts}{f' ({self.detail})' if self.detail else ''}"


class Activities:
    """All that goes on in a process, and the thread that tells of it where no bar does.

    Args:
        now: seconds of a clock that only goes on.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Nothing goes on."""
        self._now, self._lock = now, threading.Lock()
        self._open: list[Activity] = []
        self._waits: dict[str, float] = {}
        self._said = self._ended = now()
        self._is_busy, self._ending = threading.Event(), threading.Event()
        self._reporters = self._bars = 0

    def begin(self, activity: Activity) -> None:
        """Note that something goes on."""
        with self._lock:
            activity.began = activity.told = self._now()
            if not self._open and activity.began - self._ended > PAUSE_S:
                self._said = activity.began
            self._open.append(activity)
            self._is_busy.set()

    def end(self, activity: Activity) -> None:
        """Note that it has ended."""
        with self._lock:
            if activity in self._open:
                self._open.remove(activity)
            if not self._open:
                self._ended = self._now()
                self._is_busy.clear()

    def say(self) -> None:
        """Note that a line was printed, whatever it says."""
        self._said = self._now()

    @property
    def text(self) -> str:
        """What goes on: "validating: sampling 128/512, compiling 3/12"; empty where nothing does.

        What a thread does within something else follows that after a colon.
        """
        with self._lock:
            going_on = list(self._open)
        counted = {a.label for a in going_on if a.total is not None}
        threads: dict[int, dict[str, str]] = {}
        for activity in going_on:
            if activity.total is not None or activity.label not in counted:
                parts = threads.setdefault(activity.thread, {})
                parts[activity.label] = activity.text
        in_order = sorted(threads.items(), key=lambda thread: thread[0] == 0)
        texts = (": ".join(parts.values()) for _, parts in in_order)
        return ", ".join(dict.fromkeys(texts))

    def lines(self) -> list[tuple[int, str]]:
        """Return the log lines that are due now, each with its level."""
        now, due = self._now(), list[tuple[int, str]]()
        with self._lock:
            going_on, is_shown = list(self._open), self._bars > 0
        for activity in going_on:
            if activity.describe is not None and now - activity.told >= STALLED_S:
                activity.told = now
                text = f"waiting for {now - activity.began:.0f} s: {activity.describe()}"
                due.append((logging.WARNING, text))
        key = ", ".join(dict.fromkeys(activity.label for activity in going_on))
        wait = self._waits.get(key, PATIENCE_S)
        if key and not is_shown and now - self._said >= wait:
            self._waits[key], self._said = min(2 * wait, LONGEST_S), now
            notes = "".join(activity.take_note() for activity in going_on)
            due.append((logging.INFO, self.text + notes))
        return due

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Tell nothing within a `with`: a bar does."""
        with self._lock:
            self._bars += 1
        try:
            yield
        finally:
            with self._lock:
                self._bars -= 1
            self.say()

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Log within a `with` what goes on, in a thread of its own; also where one lies in one."""
        with self._lock:
            self._reporters += 1
            is_first = self._reporters == 1
            if is_first:
                self._ending = threading.Event()
        if is_first:
            self.say()
            report = functools.partial(self._report, self._ending)
            threading.Thread(target=report, daemon=True, name="activity").start()
        try:
            yield
        finally:
            with self._lock:
                self._reporters -= 1
                if not self._reporters:
                    self._ending.set()
                    self._is_busy.set()

    def _report(self, ended: threading.Event) -> None:
        while self._is_busy.wait() and not ended.wait(POLL_S):
            with contextlib.suppress(Exception):  # the run goes on, whatever is wrong with a line
                for level, text in self.lines():
                    self._tell(level, text)

    def _tell(self, level: int, text: str) -> None:
        if logging.getLogger().handlers or level >= logging.WARNING:
            log.log(level, "%s", text)
        elif sys.stderr is not None:  # nothing is set up to log, as while libraries are imported
            sys.stderr.write(f"jaxrl_llm: {text}\n")


ACTIVITIES = Activities()
"""Of this process."""


@contextlib.contextmanager
def activity(
    label: str,
    total: int | None = None,
    *,
    count: Callable[[], int] | None = None,
    describe: Callable[[], str] | None = None,
) -> Iterator[Activity]:
    """Let a reader know within a `with` what this thread does; see `Activity`.

    >>> with activity("validating", total=512) as progress:
    ...     progress.advance(128)
    ...     print(ACTIVITIES.text)
    validating 128/512
    """
    current = Activity(label, total, count=count, describe=describe)
    ACTIVITIES.begin(current)
    try:
        yield current
    finally:
        ACTIVITIES.end(current)
