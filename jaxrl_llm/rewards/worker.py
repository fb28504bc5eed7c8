"""The worker side of the reward pool: load one scorer, then answer items until told to stop.

A worker is a fresh interpreter that runs `serve`. It imports neither jax nor the program that
started it, so it is up in a fraction of a second and never touches an accelerator.
"""

import ctypes
import faulthandler
import json
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.functions import FunctionSpec, load_function

HOME = "jaxrl_llm.rewards.scorers"
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


class RewardItem(NamedTuple):
    """One reply to score; the fields are the parameters of verl's reward functions."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None


class Outcome(NamedTuple):
    """What came of one call: `failure` is None, or the kind of failure that `message` explains."""

    failure: str | None
    message: str
    score: float
    extra: dict[str, Any]


def shorten(text: str, limit: int = 300) -> str:
    """Return the text with its middle left out where it is longer than `limit` characters.

    >>> shorten("abcdefgh", 5)
    'ab…gh'
    """
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def failed(failure: str, message: str) -> Outcome:
    """Return the outcome of a call that gave no usable score.

    >>> failed("timeout", "no answer within 5 s").failure
    'timeout'
    """
    return Outcome(failure, shorten(message), 0.0, {})


def load_scorer(spec: FunctionSpec) -> Callable[..., Any]:
    """Return the scorer that a config names, its keywords bound.

    >>> load_scorer(FunctionSpec("arithmetic")).__name__
    'arithmetic'
    """
    return load_function(spec, home=HOME, passed=RewardItem._fields, key="reward")


def evaluate(scorer: Callable[..., Any], item: RewardItem) -> Outcome:
    """Call the scorer on one item and bring what it gives into one form.

    Args:
        scorer: called with the item's fields as keywords. It may return a number, or a dict with
            a number under `score`; the dict's other keys are kept as extra information.
        item: the reply.

    Returns:
        The score, or the failure: `exception` when the scorer raised, `invalid` when it returned
        something else, NaN or infinity.

    >>> evaluate(lambda **item: {"score": True, "pred": "4"}, RewardItem("", "4", "4", None))
    Outcome(failure=None, message='', score=1.0, extra={'pred': '4'})
    """
    try:
        value = scorer(**item._asdict())
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return failed("exception", f"{type(error).__name__}: {error} ({where})")
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    if "score" not in extra:
        return failed("invalid", f"got a dict with keys {list(extra)}, wanted 'score' among them")
    try:
        score = _plain(extra.pop("score"))
        extra = json.loads(json.dumps(extra, default=_plain))
    except (TypeError, ValueError) as error:
        return failed("invalid", f"got {value!r}, wanted numbers, strings and lists: {error}")
    if not isinstance(score, numbers.Real) or not math.isfinite(score):
        return failed("invalid", f"got score {score!r}, wanted a finite number")
    return Outcome(None, "", float(score), extra)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # numpy and torch scalars
        return value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    if value is None or isinstance(value, str | dict | list | tuple):
        return value
    raise TypeError(f"a {type(value).__name__} is not plain data")


def serve(fd: int, parent: int, *, tied: bool) -> None:
    """Answer chunks of `(number, RewardItem)` on a connection until the parent goes away.

    The first message is the scorer's spec and the seconds after which a stuck call may be given
    up. The parent kills a worker that is late; should the parent be dead by then, the worker ends
    itself, by a timer that works even while the scorer holds the interpreter lock.

    Args:
        fd: the file descriptor of our end of the connection.
        parent: the process id of the pool's owner.
        tied: have the kernel kill this process when the thread that started it ends (Linux).
    """
    if tied and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with Connection(fd) as connection:
        try:
            spec, give_up_s = connection.recv()
            scorer, refusal = _load(spec)
            connection.send(refusal)
            while scorer is not None:
                while not connection.poll(1.0):
                    if os.getppid() != parent:
                        return
                for number, item in connection.recv():
                    faulthandler.dump_traceback_later(give_up_s, exit=True)
                    outcome = evaluate(scorer, item)
                    faulthandler.cancel_dump_traceback_later()
                    connection.send((number, outcome))
        except (EOFError, OSError):  # the parent has closed its end
            return


def _load(spec: FunctionSpec) -> tuple[Callable[..., Any] | None, str | None]:
    try:
        return load_scorer(spec), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
