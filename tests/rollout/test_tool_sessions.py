"""Sessions of tools and environments: every way in which one can fail, and what others see."""

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.tool import MAX_RESULT_CHARS, ToolError, ToolResult
from tests.tool_pools import open_tools
from tests.waiting import wait_until

FUNCTIONS = '''
import asyncio, os, signal, stat, sys, time
from fractions import Fraction
import numpy as np
from jaxrl_llm.rollout.observation import BrokenTool, Observation

def note_line(path, text):
    with open(path, "a") as file: file.write(text + "\\n")

def fail(word, row):
    if word == "raise": raise KeyError("no such\\nkey " + "x" * 9000)
    if word == "exit": sys.exit(3)
    if word == "hang": time.sleep(600)
    if word == "die": os._exit(5)
    if word == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if word == "stop": raise StopIteration
    if word == "memory": bytearray(10**12)
    if word == "write":
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b"garbage\\n")
            except OSError: pass
        return "forged"
    if word == "print": print("{}\\n" * 1000, flush=True); sys.stderr.write("x"); return "printed"
    if word in ("broken", "connection"):
        note_line(row.extra_info["path"], "tried")
        raise BrokenTool("down") if word == "broken" else ConnectionResetError("down")
    if word == "once":
        note_line(row.extra_info["path"], "tried")
        if len(open(row.extra_info["path"]).readlines()) < 3: raise BrokenTool("down")
        return "up"
    if word == "large": return "x" * 50_000_000
    return RESULTS.get(word, word)

class Odd: pass
loop = []; loop.append(loop)
RESULTS = {
    "nan": Observation("a", reward=float("nan")), "inf": Observation("a", reward=np.inf),
    "digits": Observation("a", reward=10**400), "many digits": Observation("a", reward=10**5000),
    "wide": Observation("a", reward=np.float64(1e39)), "fraction": Fraction(10**400),
    "word": Observation("a", reward="much"), "object": Odd(), "nested": {"a": [Odd()]},
    "set": {1}, "bytes": bytearray(b"a"), "loop": loop, "none": None, "number": 3, "true": True,
    "numpy": np.float32(0.5), "data": {"a": [1, np.int64(2)], "b": "é"}, "array": np.ones(3),
    "observation": Observation({"a": 1}, reward=np.float64(2.0), end=np.bool_(True)),
    "surrogate": "a\\ud800b",
}

def act(word: str, row) -> str:
    """Act.

    Args:
        word: how.
    """
    return fail(word, row)

async def act_async(word: str, row, state, rng, seconds) -> str:
    """Act in the event loop.

    Args:
        word: how.
    """
    if word == "hang": await asyncio.sleep(600)
    if word == "late": raise TimeoutError("of its own")
    if word == "cancel": raise asyncio.CancelledError
    if word == "count": state["n"] = state.get("n", 0) + 1; return state["n"]
    if word == "draw": return rng.random()
    await asyncio.sleep(0)
    return fail(word, row)

def scale(x: float, by: float, *, plus: float = 0.0) -> float:
    """Scale.

    Args:
        x: a number.
    """
    return x * by + plus

def draw(rng, seconds) -> str:
    """Draw a number."""
    return [rng.random(), seconds]

def add(x: int, state, row) -> str:
    """Add to a sum.

    Args:
        x: a number; some are special.
    """
    if x == 99: time.sleep(600)
    if x == 98: os._exit(0)
    if x == 97: raise ValueError("no")
    state["sum"] = state.get("sum", 0) + x
    return f"{row.index}: {state['sum']}"

def where() -> int:
    """Tell the process."""
    return os.getpid()

def notes(row, rng, state, *, size=3):
    path = row.extra_info.get("path")
    word = row.extra_info.get("word")
    if word == "set-up raises": raise KeyError("set-up")
    if word == "set-up broken": raise BrokenTool("set-up")
    if word == "set-up hangs": time.sleep(600)
    path and note_line(path, f"open {row.index}")
    book = [str(rng.random())[:6]]
    def note(text: str, rng) -> str:
        """Write a note.

        Args:
            text: of the note.
        """
        fail(text, row)
        book.append(f"{text} {str(rng.random())[:6]}")
        return "; ".join(book[:1] + book[1:][-size:])
    yield note
    path and note_line(path, f"close {row.index}")
    if word == "clean-up raises": raise KeyError("clean-up")
    if word == "clean-up hangs": time.sleep(600)
    if word == "yields twice": yield note

def no_yield(row):
    if row is None: yield

def yields_text():
    yield "text"

def guess(ground_truth, rng, row, *, high=63):
    path = row.extra_info.get("path")
    try:
        path and note_line(path, f"begin {row.index}")
        if row.extra_info.get("word"): fail(row.extra_info["word"], row)
        answer = yield Observation(f"Guess up to {high}.") if high else None
        turns = 0
        while answer != ground_truth:
            turns += 1
            if answer == "score": return RESULTS["numpy"]
            if answer == "no score": return
            if answer == "bad score": return "much"
            if answer == "nan score": return float("nan")
            if answer == "end": answer = yield Observation("over", end=True)
            value = fail(answer, row)
            told = Observation(f"{turns} {rng.random():.3f}", -0.5)
            answer = yield told if value == answer else value
        return 1.0
    finally:
        path and note_line(path, f"finish {row.index}")
        if row.extra_info.get("clean-up"): raise KeyError("clean-up")

def plain(answer): return answer
async def stream(): yield 1
def untyped(x):
    """Do."""
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def make(file):
    pools = []

    def build(*tools, environment=None, workers=1, timeout_s=20.0, retries=2, **keywords):
        specs = tuple(FunctionSpec(f"{file}:{t}") if isinstance(t, str) else t for t in tools)
        environment = environment and FunctionSpec(f"{file}:{environment}", keywords)
        process = {"workers": workers, "timeout_s": timeout_s, "retries": retries}
        pools.append(open_tools(specs, environment, **process))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def row(index=0, truth="42", **extra):
    return EpisodeRow(index, "test", truth, extra)


def tool(name, **arguments):
    return ToolCall(name, arguments)


def run(pool, *words, name="act", number=0, **extra):
    """The results of one session's calls of a tool that takes a word, one after the other."""

    async def episode():
        session = pool.open(number, row(number, **extra), seed=7, journal=None)
        results = [await session.call(tool(name, word=word)) for word in words]
        await session.close()
        return results

    return asyncio.run(episode())


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


# ------------------------------------------------------------------------------------ what it gives


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_schemas_calls_and_results(make, file, workers):
    bound = FunctionSpec(f"{file}:scale", {"by": 2, "plus": 1})
    pool = make(
        "act", bound, "draw", "notes", "act_async", FunctionSpec("calculator"), workers=workers
    )
    names = [schema["function"]["name"] for schema in pool.schemas]
    assert names == ["act", "scale", "draw", "notes", "act_async", "calculator"]
    shown = [list(s["function"]["parameters"]["properties"]) for s in pool.schemas]
    assert shown == [["word"], ["x"], [], ["text"], ["word"], ["expression"]]

    async def episode():
        session = pool.open(3, row(), seed=7, journal=None)
        calls = [tool("scale", x="1.5"), tool("calculator", expression="2**70"), tool("draw")]
        results = await asyncio.gather(*(session.call(call) for call in calls * 2))
        await session.close()
        return results

    results = asyncio.run(episode())
    assert [r.name for r in results] == ["scale", "calculator", "draw"] * 2
    assert [r.text for r in results[:2]] == ["4.0", str(2**70)]
    assert all(r.failure is None and r.seconds >= 0 for r in results)
    assert results[2].text != results[5].text and "20.0" in results[2].text
    assert asyncio.run(episode())[2].text == results[2].text  # by seed and number alone


@pytest.mark.parametrize(("workers", "name"), [(0, "act"), (1, "act"), (1, "act_async")])
def test_results_are_told_as_text(make, workers, name):
    words = ["a", "none", "number", "true", "numpy", "data", "observation", "print", "surrogate"]
    results = run(make(name, workers=workers), *words, name=name)
    texts = ["a", "", "3", "true", "0.5", '{"a": [1, 2], "b": "é"}', '{"a": 1}', "printed", "a?b"]
    assert [r.text for r in results] == texts
    assert [(r.reward, r.end) for r in results if r.reward] == [(2.0, True)]
    assert all(r.failure is None and type(r.reward) is float for r in results)


def test_functions_given_from_python_run_in_workers(make):
    cell = {"__name__": "__main__", "offset": 3, "os": os}
    exec(
        "def shifted(x: int) -> list[int]:\n"
        '    """Shift.\n\n    Args:\n        x: a number.\n    """\n'
        "    return [x + offset, os.getpid()]\n"
        "def talk(rng):\n    said = yield 'hi'\n    return float(said)\n",
        cell,
    )
    tools, environment = (FunctionSpec.of(cell["shifted"]),), FunctionSpec.of(cell["talk"])

    async def episode(pool):
        session = pool.open(0, row(), seed=7, journal=None)
        assert (await session.step(None)).text == "hi"
        text = (await session.call(tool("shifted", x=1))).text
        assert (await session.step("0.5")).score == 0.5
        return text

    with open_tools(tools, environment, workers=1) as pool:
        text = asyncio.run(episode(pool))
    assert text.startswith("[4, ") and str(os.getpid()) not in text


def test_workers_import_no_array_library():
    program = (
        "import sys, jaxrl_llm.rollout.tools.tool, jaxrl_llm.rollout.tools.builtin,"
        " jaxrl_llm.rollout.agents.environments, jaxrl_llm.rewards.functions\n"
        "print(*{'jax', 'numpy', 'pydantic', 'torch', 'transformers'} & set(sys.modules))"
    )
    given = [sys.executable, "-c", program]
    run = subprocess.run(given, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


# -------------------------------------------------------------------------------- what tools can do


TOLD = [
    ("raise", "failed", "error: KeyError: 'no such\\nkey xxx"),
    ("stop", "failed", "error: StopIteration"),
    ("nan", "failed", "error: expected a finite number (float32) as reward, got nan"),
    ("inf", "failed", "error: expected a finite number (float32) as reward, got inf"),
    ("word", "failed", "error: expected a finite number (float32) as reward, got 'much'"),
    ("digits", "failed", "error: expected a finite number (float32) as reward, got 1000"),
    ("many digits", "failed", "error: expected a finite number (float32) as reward, got an int"),
    (
        "wide",
        "failed",
        "error: expected a finite number (float32) as reward, got np.float64(1e+39)",
    ),
    ("fraction", "failed", "error: expected text or plain data as result, got a Fraction: "),
    ("object", "failed", "error: expected text or plain data as result, got a Odd"),
    ("nested", "failed", "a Odd is not plain data"),
    ("set", "failed", "got a set"),
    ("bytes", "failed", "got a bytearray"),
    ("loop", "failed", "got a list: Circular reference detected"),
    ("array", "failed", "got a ndarray"),
    (
        "large",
        "failed",
        f"error: the result has 50000000 characters, of {MAX_RESULT_CHARS} allowed",
    ),
    ("broken", "broken", "error: BrokenTool: down"),
    ("connection", "broken", "error: ConnectionResetError: down"),
]
FATAL = [
    ("exit", "failed", "error: SystemExit: 3"),
    ("memory", "failed", "error: MemoryError"),
    ("hang", "timeout", "error: no answer within 1 s"),
    ("die", "died", "error: its process ended with exit code 5"),
    ("kill", "died", "error: its process ended with exit code -9"),
    ("write", "died", "error: its process wrote something else than its answer"),
]
ASYNC = [
    ("hang", "timeout", "error: no answer within 1 s"),
    ("late", "failed", "error: TimeoutError: of its own"),
    ("cancel", "failed", "error: CancelledError"),
]
CASES = [(0, "act", *case) for case in TOLD] + [(1, "act", *case) for case in TOLD + FATAL]
CASES += [(1, "act_async", *case) for case in TOLD[:3] + TOLD[-3:] + ASYNC if case[0] != "stop"]


@pytest.mark.parametrize(("workers", "name", "word", "failure", "text"), CASES)
def test_a_failure_is_told(make, tmp_path, caplog, workers, name, word, failure, text):
    pool = make(name, workers=workers, timeout_s=1.0)
    words = ("fine", word, "fine")
    with caplog.at_level(logging.WARNING):
        results = run(pool, *words, name=name, path=str(tmp_path / "tries"))
    assert [r.failure for r in results] == [None, failure, None]
    assert text in results[1].text and len(results[1].text) < 400 and "\n" not in results[1].text
    assert (results[1].reward, results[1].end) == (0.0, False)
    assert len(lines(tmp_path / "tries")) == (3 if failure == "broken" else 0)
    ((counted, _), count) = next(iter(pool.failures.counts.items()))
    assert (counted, count) == (name, 3 if failure == "broken" else 1)
    assert f"tools: {name} failed" in caplog.text


def test_what_is_broken_may_be_up_again(make, tmp_path):
    (result,) = run(make("act"), "once", path=str(tmp_path / "tries"))
    assert (result.text, result.failure) == ("up", None)
    (result,) = run(make("act", retries=1), "once", path=str(tmp_path / "others"))
    assert result.failure == "broken"


def test_the_first_traceback_of_a_kind_is_logged_and_the_others_counted(make, caplog):
    pool = make("act", workers=2)
    with caplog.at_level(logging.WARNING):
        run(pool, "raise", "raise", "raise", "stop")
        pool.close()
    assert caplog.text.count("in fail\n") == 2  # a KeyError's, a StopIteration's
    assert pool.failures.counts == {("act", "KeyError"): 3, ("act", "StopIteration"): 1}
    assert "act: 3 KeyError, act: 1 StopIteration" in caplog.text


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall("", {}, error="no JSON"), "error: no JSON"),
        (tool("akt", word="die"), "error: there is no tool 'akt'; did you mean 'act'?"),
        (tool("act"), "error: act needs a value for word"),
        (tool("act", word="die", more=1), "error: act takes no 'more'"),
        (tool("act", word=5), "error: act: 'word': expected string, got 5"),
        (tool("act", word="die", row=1), "error: act takes no 'row'"),
    ],
)
def test_a_wrong_call_runs_nothing(make, call, text):
    pool = make("act")
    result = asyncio.run(pool.open(0, row(), 7, None).call(call))
    assert result.failure == "failed" and result.text.startswith(text)
    assert not pool.failures.counts and not pool.backend.workers


def test_answers_of_one_turn_come_in_the_order_of_the_calls(make):
    pool = make("act", "act_async", "add", workers=2, timeout_s=1.0)

    async def episode():
        session = pool.open(0, row(5), 7, None)
        calls = [tool("add", x=1), tool("act", word="raise"), tool("act_async", word="a")]
        calls += [tool("none"), tool("add", x=2), tool("act", word="hang"), tool("add", x=3)]
        return await asyncio.gather(*(session.call(call) for call in calls))

    results = asyncio.run(episode())
    assert [r.failure for r in results] == [None, "failed", None, "failed", None, "timeout", None]
    assert [r.text for r in results if r.name == "add"] == ["5: 1", "5: 3", "5: 6"]


# --------------------------------------------------------------------------- state and its rebirth


@pytest.mark.parametrize("x", [99, 98])
def test_a_failing_episode_takes_no_other_along(make, x):
    pool = make("add", "notes", workers=1, timeout_s=1.0)

    async def episodes(bad):
        sessions = [pool.open(n, row(n), n, None) for n in range(4)]
        texts = []
        for step in range(3):
            calls = [session.call(tool("notes", text=f"t{step}")) for session in sessions]
            texts += [r.text for r in await asyncio.gather(*calls)]
            calls = [session.call(tool("add", x=step + 1)) for session in sessions]
            texts += [r.text for r in await asyncio.gather(*calls)]
            assert (await sessions[0].call(tool("add", x=97))).failure == "failed"
            result = await sessions[2].call(tool("add", x=x if bad else 97))
            texts += [result.failure] if not bad else []
            if bad:
                assert result.failure == ("timeout" if x == 99 else "died")
                texts.append("failed")
        for session in sessions:
            await session.close()
        return texts

    assert asyncio.run(episodes(bad=True)) == asyncio.run(episodes(bad=False))


def test_workers_that_die_while_idle_are_replaced_and_state_built_up_again(make, tmp_path):
    pool, path = make("notes", "where"), tmp_path / "log"

    async def episode(kill):
        session = pool.open(0, row(path=str(path)), 7, None)
        texts = []
        for word in ("a", "b", "c"):
            texts.append((await session.call(tool("notes", text=word))).text)
            if kill:
                pid = int((await session.call(tool("where"))).text)
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(wait_until, pool.backend.workers[0].has_activity)
            else:
                session._next_number()
        await session.close()
        return texts

    assert asyncio.run(episode(kill=True)) == asyncio.run(episode(kill=False))
    # three instances of the first episode; the first two of them died with their process
    assert Counter(lines(path)) == {"open 0": 4, "close 0": 1}


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_state_is_an_episodes_own(make, workers):
    pool = make("add", "notes", "act_async", workers=workers)

    async def episode(n):
        session = pool.open(n, row(n), 1, None)
        results = [await session.call(tool("add", x=n)) for _ in range(3)]
        results += [await session.call(tool("act_async", word="count")) for _ in range(2)]
        await session.close()
        return [r.text for r in results]

    async def episodes():
        return await asyncio.gather(*(episode(n) for n in range(12)))

    assert asyncio.run(episodes()) == [
        [f"{n}: {n * i}" for i in (1, 2, 3)] + ["1", "2"] for n in range(12)
    ]


def test_a_cancelled_call_leaves_a_sound_state(make):
    pool = make("add", timeout_s=1.0)

    async def episode():
        session = pool.open(0, row(), 7, None)
        await session.call(tool("add", x=1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.call(tool("add", x=99)), 0.1)
        result = await session.call(tool("add", x=2))
        await session.close()
        return result.text

    assert asyncio.run(episode()) == "0: 3"


SET_UP = [
    ("", None, 1),
    ("set-up raises", "broken", 0),
    ("set-up broken", "broken", 0),
    ("clean-up raises", None, 1),
    ("yields twice", None, 1),
]
SET_UP_HANGS = [("set-up hangs", "timeout", 0), ("clean-up hangs", None, 1)]


@pytest.mark.parametrize(
    ("workers", "word", "failure", "closed"),
    [(0, *case) for case in SET_UP] + [(1, *case) for case in SET_UP + SET_UP_HANGS],
)
def test_set_up_and_clean_up(make, tmp_path, workers, word, failure, closed):
    pool, path = make("notes", workers=workers, timeout_s=0.5), tmp_path / "log"

    async def episode():
        session = pool.open(0, row(path=str(path), word=word), 7, None)
        results = [await session.call(tool("notes", text="a")) for _ in range(2)]
        await session.close()
        await session.close()
        with pytest.raises(ToolError, match="the session of episode 0 is closed"):
            await session.call(tool("notes", text="a"))
        return results

    results = asyncio.run(episode())
    assert [r.failure for r in results] == [failure] * 2
    assert lines(path) == ["open 0", "close 0"] * closed
    clean_up = sum(n for (_, kind), n in pool.failures.counts.items() if kind == "clean-up")
    assert clean_up == (word.startswith("clean-up") or word == "yields twice")


@pytest.mark.parametrize("word", ["raise", "broken", "die"])
def test_clean_up_runs_after_failed_calls(make, tmp_path, word):
    pool, path = make("notes", retries=0), tmp_path / "log"

    async def episode():
        session = pool.open(0, row(path=str(path)), 7, None)
        results = [await session.call(tool("notes", text=text)) for text in ("a", word, "b")]
        await session.close()
        return [r.failure for r in results]

    assert asyncio.run(episode())[::2] == [None, None]
    kept = [line for line in lines(path) if line != "tried"]
    assert kept == ["open 0"] * (1 + (word == "die")) + ["close 0"]


# ------------------------------------------------------------------------------------ environments


def play(pool, *answers, seed=7, **extra):
    async def episode():
        session = pool.open(0, row(**extra), seed, None)
        results = [await session.step(answer) for answer in (None, *answers)]
        await session.close()
        return results

    return asyncio.run(episode())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_begins_answers_and_ends(make, workers):
    pool = make(environment="guess", workers=workers, high=9)
    results = play(pool, "a", "b", "42", "c")
    assert results[0] == ToolResult("environment", "Guess up to 9.", seconds=results[0].seconds)
    assert [r.reward for r in results] == [0, -0.5, -0.5, 0, 0]
    assert [r.end for r in results] == [False, False, False, True, True]
    assert [r.score for r in results] == [None] * 3 + [1.0] * 2
    again = play(pool, "a", "b")
    assert [r.text for r in again] == [r.text for r in results[:3]]
    assert play(pool, "a", seed=8)[1].text != results[1].text


@pytest.mark.parametrize(
    ("answer", "score", "text"), [("score", 0.5, ""), ("no score", None, ""), ("end", None, "over")]
)
def test_ways_to_end(make, tmp_path, answer, score, text):
    path = tmp_path / "log"
    pool = make(environment="guess", high=0)
    results = play(pool, answer, path=str(path))
    assert results[0].text == ""
    assert (results[1].score, results[1].text, results[1].end) == (score, text, True)
    assert results[1].failure is None and lines(path) == ["begin 0", "finish 0"]


BY_ANSWER = ["nan", "object", "large", "bad score", "nan score"]
BY_RAISING = ["raise", "exit", "broken", "hang", "die"]
BROKEN = [(0, word) for word in BY_RAISING]  # before the first yield
BROKEN += [(step, word) for step in (1, 2) for word in BY_RAISING + BY_ANSWER]


@pytest.mark.parametrize(("step", "word"), BROKEN)
def test_what_fails_in_an_environment_is_broken(make, tmp_path, word, step):
    pool, path = make(environment="guess", timeout_s=0.4, retries=1), tmp_path / "log"
    extra = {"word": word} if step == 0 else {}
    answers = ["a"] * (step - 1) + [word, "b"] if step else ["b"]
    results = play(pool, *answers, path=str(path), **extra)
    failures = [r.failure for r in results]
    assert failures == [None] * step + ["broken"] * (len(results) - step)
    kept = Counter(line for line in lines(path) if line != "tried")
    instances = 2 if word == "broken" else 1
    assert kept["begin 0"] == instances
    if word not in ("hang", "die"):
        assert kept["finish 0"] == instances


def test_an_environment_that_was_down_goes_on(make, tmp_path):
    pool = make("add", environment="guess", retries=3)

    async def episode(word):
        session = pool.open(0, row(path=str(tmp_path / "log")), 7, None)
        await session.step(None)
        await session.step("a")
        await session.call(tool("add", x=2))
        texts = [(await session.step(word)).text, (await session.step("b")).text]
        await session.close()
        return [*texts, (lines(tmp_path / "log")[-1])]

    texts = asyncio.run(episode("once"))
    assert texts[0] == "up" and texts[1].startswith("3 ") and texts[2] == "finish 0"


@pytest.mark.parametrize("workers", [0, 1])
def test_clean_up_of_an_environment_that_raises(make, workers):
    pool = make(environment="guess", workers=workers)
    assert play(pool, "a", **{"clean-up": True})[1].failure is None
    assert pool.failures.counts["close", "clean-up"] == 1


def test_steps_out_of_turn_are_refused(make):
    async def steps(pool, *answers):
        session = pool.open(0, row(), 7, None)
        for answer in answers:
            await session.step(answer)

    pool = make("act", environment="guess")
    for answers in (("a",), (None, None)):
        with pytest.raises(ValueError, match=r"expected step\(None\) first"):
            asyncio.run(steps(pool, *answers))
    with pytest.raises(ValueError, match="expected none"):
        asyncio.run(steps(make("act"), None))


# ------------------------------------------------------------------------------ starting and ending


@pytest.mark.parametrize(
    ("tools", "environment", "message"),
    [
        (["act", "act"], None, "got two tools 'act'"),
        (["akt"], None, "no function 'akt'"),
        (["untyped"], None, "'x' of tool 'untyped' has no type"),
        (["stream"], None, "async generator"),
        (["no_yield"], None, "tool 'no_yield' can't be opened: .*expected it to yield a def"),
        (["yields_text"], None, "expected it to yield a def, got 'text'"),
        (["scale"], None, "describe its parameter 'by'"),
        ([], "plain", "needs a value for answer"),
        ([], "stream", "is no generator function"),
        ([], "guess", "takes no 'hihg'; did you mean 'high'?"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_functions_are_checked_at_the_start(make, tools, environment, message, workers):
    keywords = {"hihg": 3} if environment == "guess" else {}
    with pytest.raises(ConfigError, match=message):
        make(*tools, environment=environment, workers=workers, **keywords)


@pytest.mark.parametrize(
    "settings", [{"workers": -1}, {"timeout_s": math.inf}, {"retries": -1}, {"memory_gb": 0}]
)
def test_settings_are_checked(settings):
    (key,) = settings
    with pytest.raises(ConfigError, match=rf"^tool_process\.{key}: expected"):
        open_tools([FunctionSpec("calculator")], **settings)


def test_tools_that_only_load_here(tmp_path):
    path = tmp_path / "once.py"
    path.write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise OSError('not here')\n"
        'def act() -> str:\n    """Act."""\n    return "a"\n'
    )
    tools = [FunctionSpec(f"{path}:act")]
    with open_tools(tools, workers=1) as pool, pytest.raises(ToolError, match="OSError: not here"):
        asyncio.run(pool.open(0, row(), 7, None).call(tool("act")))


@pytest.mark.parametrize("limits", [{"memory_gb": 0.5}, {"max_processes": 1}])
def test_limits_hold_and_name_their_keys(tmp_path, limits):
    path = tmp_path / "mine.py"
    path.write_text(
        "import subprocess, time\n"
        'def act() -> str:\n    """Act."""\n'
        "    bytearray(10**9) if MEMORY else [subprocess.Popen(['sleep', '9']) for _ in '1234']\n"
        "    time.sleep(600)\n".replace("MEMORY", str("memory_gb" in limits))
    )
    with open_tools([FunctionSpec(f"{path}:act")], workers=1, **limits) as pool:
        result = asyncio.run(pool.open(0, row(), 7, None).call(tool("act")))
    if "memory_gb" in limits:
        assert (result.failure, result.text) == ("failed", "error: MemoryError")
    else:
        assert result.failure == "died" and "(rollout.tool_process.max_processes)" in result.text


def test_closing_ends_everything_at_once(make):
    pool = make("act", "add", workers=2, timeout_s=600.0)

    async def episodes():
        sessions = [pool.open(n, row(), 7, None) for n in range(6)]
        calls = [asyncio.ensure_future(s.call(tool("act", word="hang"))) for s in sessions[:5]]
        calls.append(asyncio.ensure_future(sessions[5].call(tool("add", x=1))))
        await asyncio.to_thread(wait_until, lambda: len(pool.backend._running) == 2)
        await asyncio.to_thread(pool.close)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for session in sessions:
            await session.close()
        return results

    results = asyncio.run(episodes())
    assert all(isinstance(r, ToolError) and "the pool is closed" in str(r) for r in results)
    assert not pool.backend.workers
    assert not any(thread.name == "tools" for thread in threading.enumerate())
    with pytest.raises(ToolError, match="the pool is closed"):
        run(pool, "a")


def test_closing_without_workers_cleans_up(make, tmp_path):
    pool, path = make("notes", workers=0), tmp_path / "log"
    session = pool.open(0, row(path=str(path)), 7, None)
    asyncio.run(session.call(tool("notes", text="a")))
    pool.close()
    assert lines(path) == ["open 0", "close 0"]
