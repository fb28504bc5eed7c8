"""Groups of answers from their beginning to their scores."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.sampling import EpisodeState, Rollouts

StartScoring = Callable[[Rollouts, Clock], Future[list[Score]]]


@dataclass(eq=False)
class Group:
    """The answers to one prompt, from their beginning to the step that trains on them.

    Attributes:
        ordinal: of the group, from 0, in the order of the prompts.
        states: of the answers [G].
        scores: of the answers; None until all are whole.
        kept: whether the group filter has kept it.
    """

    ordinal: int
    states: list[EpisodeState]
    scores: Future[list[Score]] | None = None
    kept: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether all its answers have ended."""
        return all(state.episode is not None for state in self.states)

    def result(self) -> list[Score]:
        """Wait for its scores."""
        assert self.scores is not None  # of a group that is whole
        return self.scores.result()


def episodes_of(groups: Sequence[Group]) -> list[Episode]:
    """Return the episodes of groups that are whole."""
    episodes = [state.episode for group in groups for state in group.states]
    return [episode for episode in episodes if episode is not None]


def scores_of(groups: Sequence[Group]) -> list[Score]:
    """Wait for the scores of groups."""
    return [score for group in groups for score in group.result()]


class GroupScores:
    """Scores groups that are whole: those that come while others are scored, together after them.

    Args:
        start: (rollouts, clock) -> their scores, as soon as they are known.
        gather: states that are whole -> answers.
    """

    def __init__(
        self, start: StartScoring, gather: Callable[[Sequence[EpisodeState]], Rollouts]
    ) -> None:
        """Score nothing yet."""
        self._start, self._gather = start, gather
        self._waiting: list[Group] = []
        self._is_busy, self._lock = False, threading.Lock()

    def add(self, groups: Sequence[Group], clock: Clock) -> None:
        """Score those of some groups that are whole, and have no scores yet; from any thread."""
        with self._lock:
            new = [group for group in groups if group.scores is None and group.is_whole]
            for group in new:
                group.scores = Future()
            self._waiting += new
        self._begin(clock)

    def _begin(self, clock: Clock) -> None:
        with self._lock:
            if self._is_busy or not self._waiting:
                return
            groups, self._waiting, self._is_busy = self._waiting, [], True
        states = [state for group in groups for state in group.states]
        try:
            scores = self._start(self._gather(states), clock)
        except BaseException as error:
            scores = Future[list[Score]]()
            scores.set_exception(error)
        scores.add_done_callback(lambda done: self._give(groups, done, clock))

    def _give(self, groups: Sequence[Group], done: Future[list[Score]], clock: Clock) -> None:
        """Give groups their scores, and go on with those that came meanwhile."""
        first = 0
        for group in groups:
            assert group.scores is not None  # `add` makes it
            if done.cancelled():
                group.scores.cancel()
            elif error := done.exception():
                group.scores.set_exception(error)
            else:
                group.scores.set_result(done.result()[first : first + len(group.states)])
            first += len(group.states)
        with self._lock:
            self._is_busy = False
        self._begin(clock)
