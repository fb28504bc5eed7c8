"""What all ways to run a reward function share: checks, scores in order, and failures."""

import functools
import inspect
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Literal, NamedTuple

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rewards.code import check_python_tests, python_tests
from jaxrl_llm.rewards.judge import check_judge, judge
from jaxrl_llm.rewards.reward_server import classify
from jaxrl_llm.rewards.worker import (
    DEFAULT_CALLS,
    AsyncCalls,
    Outcome,
    RewardItem,
    RewardJob,
    is_async,
    load_reward_function,
)
from jaxrl_llm.rollout.servers import check_client
from jaxrl_llm.workers.protocol import UNSCORED, finite_number, shorten

log = logging.getLogger(__name__)

MAX_CHUNK_ITEMS = 16
FAILED = "reward %r failed on %d of %d answers (%s); the first: %s"
GAVE_NO_SCORE = "reward %r gave no score to %d of %d answers (%s); the first: %s"
FUNCTION_COMPONENT = "function"
"""Name of a reward function's own score among what it reports, where a reward model scores."""
ASKING = (judge, classify)
"""The reward functions that ask a server."""

Outcomes = Generator[tuple[int, Outcome], None, None]
OnError = int | float | None | Literal["unscored"]


class RewardError(RunError):
    """A reward function failed, and the config says to stop; the message names the row."""


class Score(NamedTuple):
    """The reward of one reply, what else was reported of it, and what went wrong, if anything.

    Attributes:
        score: of the reply; NaN where nobody knows it: such a reply is left out of its group.
        extra: what else was reported.
        error: what went wrong.
        step_rewards: index of a token among those that the policy drew, and its reward, in place
            of the score on the last one.
    """

    score: float
    extra: dict[str, Any]
    error: str | None
    step_rewards: tuple[tuple[int, float], ...] = ()

    @property
    def is_unscored(self) -> bool:
        """Whether nobody knows the reward.

        >>> Score(math.nan, {}, "unscored: no verdict").is_unscored
        True
        """
        return math.isnan(self.score)

    @property
    def has_failed(self) -> bool:
        """Whether its reward function failed, rather than to say itself that it is unscored.

        >>> Score(math.nan, {}, "unscored: no verdict").has_failed
        False
        """
        return self.error is not None and not self.error.startswith(f"{UNSCORED}:")


class RewardRunner(ABC):
    """Score replies; a subclass says where the reward function's calls run, by `_outcomes`.

    Args:
        spec: the reward function: a name in `jaxrl_llm.rewards.functions`, or `my_file.py:name`.
        timeout_s: seconds that one call may take.
        on_error: the reward of a reply whose reward function failed; None stops with `RewardError`,
            "unscored" leaves it without a reward.
        calls: how an `async def` is called.

    Raises:
        ValueError: a number out of range; `ConfigError` (a ValueError) when the reward function
            can't be found, or can't be called with the four parameters and its keywords.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        *,
        timeout_s: int | float,
        on_error: OnError,
        calls: AsyncCalls = DEFAULT_CALLS,
    ) -> None:
        if finite_number(on_error) is None and on_error not in (None, UNSCORED):
            raise ValueError(
                f"reward: expected on_error to be a finite number or nothing, got {on_error!r}; "
                f"{UNSCORED!r} leaves replies without a score"
            )
        if calls.concurrency < 1 or calls.retries < 0:
            raise ValueError(f"reward: expected concurrency >= 1 and retries >= 0, got {calls}")
        self._function = check_reward_function(spec)
        asynchronous = is_async(self._function)
        self._job = RewardJob(spec, float(timeout_s), calls if asynchronous else None)
        self.counts: dict[str, int] = dict.fromkeys(("exception", "timeout", "died", "invalid"), 0)
        self._spec = spec
        self._on_error = math.nan if on_error == UNSCORED else on_error
        self._rows: Sequence[int] = ()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what runs; `score` can't be called any more, and ends if another thread runs it."""

    @abstractmethod
    def _outcomes(self, items: Sequence[RewardItem]) -> Outcomes:
        """Yield each item's number and outcome, as they come in; if closed, end what still runs."""

    def score(
        self, items: Sequence[RewardItem], *, rows: Sequence[int] | None = None
    ) -> list[Score]:
        """Return the score of every item, in order.

        Args:
            items: the replies; the strings, and whatever else they hold, must be picklable.
            rows: of the dataset that they answer, for messages; None: they are counted from 0.

        Failures are logged on one line, with the first of them and one that is another; so are
        replies that the reward function leaves unscored.

        Raises:
            RewardError: a call failed and `on_error` is None; a worker can't start; the pool is
                closed.
        """
        failures: dict[int, Outcome] = {}
        with (
            self._lock,
            activity("scoring", len(items)) as progress,
            closing(self._outcomes(items)) as outcomes,
        ):
            self._rows = range(len(items)) if rows is None else rows
            check_open(self._closed)
            scores = {}
            for number, outcome in outcomes:
                progress.advance()
                scores[number] = self._to_score(number, items[number], outcome)
                if outcome.failure is not None:
                    failures[number] = outcome
            unscored = {n: f for n, f in failures.items() if f.failure == UNSCORED}
            failed = {n: f for n, f in failures.items() if n not in unscored}
            self._warn(items, failed, FAILED)
            self._warn(items, unscored, GAVE_NO_SCORE)
        return [scores[number] for number in range(len(items))]

    def _warn(
        self, items: Sequence[RewardItem], failures: dict[int, Outcome], message: str
    ) -> None:
        """Log on one line how many calls failed, and the first two ways in which they did."""
        if not failures:
            return
        kinds = Counter(outcome.failure for outcome in failures.values())
        ways: dict[str | None, int] = {}
        for number in sorted(failures):
            ways.setdefault(failures[number].message, number)
        described = [self._described(n, items[n], failures[n]) for n in [*ways.values()][:2]]
        log.warning(
            message,
            *(self._spec.fn, len(failures), len(items)),
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
            "; another: ".join(described),
        )

    def _to_score(self, number: int, item: RewardItem, outcome: Outcome) -> Score:
        if outcome.failure is None:
            return Score(outcome.score, outcome.extra, None)
        if outcome.failure == UNSCORED:
            return Score(math.nan, {}, f"{UNSCORED}: {outcome.message}")
        self.counts[outcome.failure] += 1
        if self._on_error is None:
            described = self._described(number, item, outcome)
            raise RewardError(f"reward {self._spec.fn!r} failed on {described}")
        return Score(float(self._on_error), {}, f"{outcome.failure}: {outcome.message}")

    def _described(self, number: int, item: RewardItem, outcome: Outcome) -> str:
        """Return which reply a failed call was of, and how it failed."""
        reply, truth = (shorten(repr(part), 120) for part in (item.solution_str, item.ground_truth))
        return (
            f"row {self._rows[number]} (data_source {item.data_source!r}, reply {reply},"
            f" ground truth {truth}): {outcome.failure}: {outcome.message}"
        )


def check_reward_function(spec: FunctionSpec) -> Callable[..., Any]:
    """Import a reward function, and return it if it takes what it is called with.

    Raises:
        ConfigError: it can't be imported, or can't be called with the four parameters and its
            keywords.

    >>> check_reward_function(FunctionSpec("arithmetic")).__name__
    'arithmetic'
    """
    function = load_reward_function(spec)
    try:
        inspect.signature(function).bind(**dict.fromkeys(RewardItem._fields))
    except TypeError as error:
        raise ConfigError(
            f"reward.function: {spec.fn!r} can't be called with {', '.join(RewardItem._fields)}: "
            f"{error}"
        ) from error
    except ValueError:
        pass  # a builtin without a signature: the call itself will check
    if isinstance(function, functools.partial) and function.func in ASKING:
        check_client(spec.fn)
        if function.func is judge:
            check_judge(function.keywords)
    if isinstance(function, functools.partial) and function.func is python_tests:
        check_python_tests(function.keywords)
    return function


def check_open(closed: threading.Event) -> None:
    """Raise `RewardError` once the pool is closed."""
    if closed.is_set():
        raise RewardError("reward: the pool is closed")


def chunk_size(waiting: int, workers: int) -> int:
    """Return how many of the waiting items a free worker is given at once.

    Chunks save messages; they get smaller towards the end, so that no worker waits long.

    >>> [chunk_size(waiting, workers=4) for waiting in (1000, 100, 10)]
    [16, 7, 1]
    """
    return min(MAX_CHUNK_ITEMS, 1 + waiting // (4 * workers))
