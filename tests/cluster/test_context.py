"""What a training process tells its launcher."""

import asyncio
import contextlib
import os

import jax
import pytest
import ray
from ray.exceptions import ActorDiedError

from jaxrl_llm.cluster import context
from jaxrl_llm.cluster.actors import ending_on_faults
from jaxrl_llm.cluster.context import Member
from jaxrl_llm.cluster.coordinator import Board
from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.monitoring.display import LauncherDisplay, open_display


class Handle:
    """A board in this process behind a handle's interface."""

    def __init__(self):
        self.board = Board(3, {"reward_retries": 1})

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
    monkeypatch.setattr(context, "_members", [place])
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
    with pytest.raises(type(error)), context.reporting():
        raise error
    assert board.failure.remote() == told


def test_what_is_shown_and_counted_is_on_the_board(board):
    display = open_display("training", 5, 2)
    assert isinstance(display, LauncherDisplay)
    display.advance("step 3")
    assert board.take.remote() == [("open", ("training", 5, 2)), ("advance", ("step 3",))]
    context.count("reward_retries", 0)
    context.count("reward_retries", 4)
    assert context.metrics() == {"cluster/restarts": 2.0, "cluster/reward_retries": 5.0}


def test_what_the_first_process_leaves_is_kept_until_the_others_have_it(board):
    board.leave.remote(0, ["answers"])
    board.leave.remote(1, ["more"])
    assert [board.left.remote(0), board.left.remote(1), board.left.remote(0)] == [
        "answers",
        "more",
        "answers",
    ]
    assert board.board._left == {1: ("more", 1)}


def test_engines_that_come_in_anothers_place_are_counted(board, monkeypatch):
    place = context.current()._replace(hosts=("first", "second"))
    monkeypatch.setattr(context, "_members", [place])
    for number, machine in ((0, "a"), (1, "b"), (0, "c")):
        board.came.remote(number, machine)
    assert context.metrics()["cluster/engine_restarts"] == 1.0
    assert board.engines.remote() == ["c", "b"]


@pytest.mark.parametrize("status", ["RESOURCE_EXHAUSTED", "INTERNAL"])
def test_an_engine_whose_device_fails_ends_for_another_to_come(monkeypatch, status):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with contextlib.suppress(jax.errors.JaxRuntimeError), ending_on_faults():
        raise jax.errors.JaxRuntimeError(f"{status}: of the device")
    assert ended == ([1] if status == "INTERNAL" else [])
