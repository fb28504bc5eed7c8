"""What a training process tells its launcher."""

import asyncio

import jax
import pytest
import ray
from ray.exceptions import ActorDiedError

from jaxrl_llm.cluster import member
from jaxrl_llm.cluster.board import Board
from jaxrl_llm.cluster.member import Member
from jaxrl_llm.functions import ConfigError, RunError
from jaxrl_llm.metrics import LauncherDisplay, open_display


class Handle:
    """A board in this process behind a handle's interface."""

    def __init__(self):
        self.board = Board(1)

    def __getattr__(self, name):
        method = getattr(self.board, name)

        class Method:
            @staticmethod
            def remote(*arguments):
                return asyncio.run(method(*arguments))

        return Method


@pytest.fixture
def board(monkeypatch):
    """The board of a job whose only process this is."""
    handle = Handle()
    place = Member(handle, (), 2, 0, engine_devices=0, reward_tasks=3, retries=1)
    monkeypatch.setattr(member, "_members", [place])
    monkeypatch.setattr(ray, "get", lambda found: found)
    return handle


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("a key"), ("ConfigError", "a key")),
        (RunError("a reward"), ("RunError", "a reward")),
        (ZeroDivisionError("a bug"), ("RunError", "ZeroDivisionError('a bug')")),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: reset"), None),
        (ActorDiedError(), None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_launcher_learns_of_errors_that_are_no_other_processs(board, error, told):
    with pytest.raises(type(error)), member.reporting():
        raise error
    assert board.failure.remote() == told


def test_what_is_shown_and_counted_is_on_the_board(board):
    display = open_display("training", 5, 2)
    assert isinstance(display, LauncherDisplay)
    display.advance("step 3")
    assert board.take.remote() == [("open", ("training", 5, 2)), ("advance", ("step 3",))]
    member.count("reward_retries", 0)
    member.count("reward_retries", 4)
    assert member.metrics() == {"cluster/restarts": 2.0, "cluster/reward_retries": 4.0}
