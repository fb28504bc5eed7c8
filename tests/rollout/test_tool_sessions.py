import asyncio
import contextlib
import math
from collections import Counter

import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.tool import ToolError, ToolResult
from tests.refusals import refuses
from tests.tool_pools import open_tools
from tests.waiting import wait_until

FUNCTIONS = '''
import asyncio, os, signal, stat, subprocess, sys, time
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
    if word == "processes": [subprocess.Popen(["sleep", "9"]) for _ in "1234"]; time.sleep(600)
    if word == "write":
        for fd in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b"garbage\\n")
            except OSError: pass
        return "forged"
    if word == "print": print("{}\\n" * 1000, flush=True); return "printed"
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
    "nan": Observation("a", reward=float("nan")), "wide": Observation("a", reward=np.float64(1e39)),
    "many digits": Observation("a", reward=10**5000), "word": Observation("a", reward="much"),
    "object": Odd(), "nested": {"a": [Odd()]}, "loop": loop, "none": None, "true": True,
    "numpy": np.float32(0.5), "data": {"a": [1, np.int64(2)], "b": "é"},
    "observation": Observation({"a": 1}, reward=np.float64(2.0), end=np.bool_(True)),
    "surrogate": "a\\ud800b",
}

def act(word: str, row) -> str:
    """Act.\\n\\nArgs:\\n    word: how."""
    return fail(word, row)

async def act_async(word: str, row) -> str:
    """Act.\\n\\nArgs:\\n    word: how."""
    if word == "hang": await asyncio.sleep(600)
    if word == "late": raise TimeoutError("of its own")
    if word == "cancel": raise asyncio.CancelledError
    return fail(word, row)

def scale(x: float, by: float, *, plus: float = 0.0) -> float:
    """Scale.\\n\\nArgs:\\n    x: a number."""
    return x * by + plus

def draw(rng, seconds) -> str:
    """Draw a number."""
    return [rng.random(), seconds]

def add(x: int, state, row) -> str:
    """Add to a sum.\\n\\nArgs:\\n    x: a number; some are special."""
    if x == 99: time.sleep(600)
    if x == 98: os._exit(0)
    if x == 97: raise ValueError("no")
    state["sum"] = state.get("sum", 0) + x
    return f"{row.index}: {state['sum']}"

def notes(row, rng, state, *, size=3):
    path = row.extra_info.get("path")
    word = row.extra_info.get("word")
    if word == "set-up raises": raise KeyError("set-up")
    if word == "set-up broken": raise BrokenTool("set-up")
    if word == "set-up hangs": time.sleep(600)
    path and note_line(path, f"open {row.index}")
    book = [str(rng.random())[:6]]
    def note(text: str, rng) -> str:
        """Write a note.\\n\\nArgs:\\n    text: of the note."""
        fail(text, row)
        book.append(f"{text} {str(rng.random())[:6]}")
        return "; ".join(book[:1] + book[1:][-size:])
    yield note
    path and note_line(path, f"close {row.index}")
    if word == "clean-up raises": raise KeyError("clean-up")
    if word == "clean-up hangs": time.sleep(600)
    if word == "yields twice": yield note

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


DEFAULTS = {"workers": 1, "timeout_s": 60.0, "retries": 2}


@pytest.fixture
def make(file, open_pool):
    def build(*tools, environment=None, keywords=None, **process):
        specs = tuple(FunctionSpec(f"{file}:{t}") if isinstance(t, str) else t for t in tools)
        environment = environment and FunctionSpec(f"{file}:{environment}", keywords or {})
        return open_pool(specs, environment, **DEFAULTS | process)

    return build


def row(index=0, **extra):
    return EpisodeRow(index, "test", "42", extra)


def tool(name, **arguments):
    return ToolCall(name, arguments)


@contextlib.asynccontextmanager
async def opened(pool, number=0, *, seed=7, **extra):
    session = pool.open(number, row(number, **extra), seed, None)
    yield session
    await session.close()


def run(pool, *words, name="act", **extra):
    """The results of one session's calls of a tool that takes a word, one after the other."""

    async def episode():
        async with opened(pool, **extra) as session:
            return [await session.call(tool(name, word=word)) for word in words]

    return asyncio.run(episode())


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("workers", [0, 2])
def test_schemas_calls_and_results(make, file, workers):
    bound = FunctionSpec(f"{file}:scale", {"by": 2, "plus": 1})
    tools = ["act", bound, "draw", "notes", "act_async", FunctionSpec("calculator")]
    pool = make(*tools, workers=workers)
    functions = [schema["function"] for schema in pool.schemas]
    shown = {f["name"]: list(f["parameters"]["properties"]) for f in functions}
    expected = {"act": ["word"], "scale": ["x"], "draw": [], "notes": ["text"]}
    assert shown == expected | {"act_async": ["word"], "calculator": ["expression"]}

    async def episode():
        async with opened(pool, 3) as session:
            calls = [tool("scale", x="1.5"), tool("calculator", expression="2**70"), tool("draw")]
            return await asyncio.gather(*(session.call(call) for call in calls * 2))

    results = asyncio.run(episode())
    assert [r.text for r in results[:2]] == ["4.0", str(2**70)]
    assert results[2].text != results[5].text and "60.0" in results[2].text
    assert asyncio.run(episode())[2].text == results[2].text  # by seed and number alone

    words = ["a", "none", "true", "numpy", "data", "observation", "print", "surrogate"]
    texts = ["a", "", "true", "0.5", '{"a": [1, 2], "b": "é"}', '{"a": 1}', "printed", "a?b"]
    for name in ("act", "act_async"):
        results = run(pool, *words, name=name)
        assert [r.text for r in results] == texts
        assert [(r.reward, r.end) for r in results if r.reward] == [(2.0, True)]
        assert all(r.failure is None and type(r.reward) is float for r in results)


PLAIN = {  # what is told of it
    **{"raise": "no such\\nkey", "stop": "StopIteration", "nan": "nan", "word": "much"},
    **{"many digits": "int", "wide": "1e+39", "object": "Odd", "nested": "Odd"},
    **{"loop": "list", "large": "50000000"},
}
BROKEN = {"broken": "BrokenTool: down", "connection": "ConnectionResetError: down"}
FATAL = {"exit": "SystemExit: 3", "memory": "MemoryError"}
DYING = {"die": "code 5", "kill": "code -9", "write": "wrote", "processes": "max_processes"}
FAILURES = dict.fromkeys(BROKEN, "broken") | dict.fromkeys(DYING, "died")


@pytest.mark.parametrize(("workers", "name"), [(0, "act"), (1, "act"), (1, "act_async")])
def test_a_failure_is_told(make, tmp_path, subtests, workers, name):
    pool, texts = make(name, workers=workers, max_processes=1), PLAIN | BROKEN
    if name == "act_async":
        texts = {word: texts[word] for word in ("raise", "nan", "large", *BROKEN)}
        texts |= {"late": "of its own", "cancel": "CancelledError"}
    elif workers:
        texts |= FATAL | DYING
    for word, text in texts.items():
        with subtests.test(word):
            pool.failures.counts.clear()
            path, failure = tmp_path / word, FAILURES.get(word, "failed")
            results = run(pool, "fine", word, "fine", name=name, path=str(path))
            assert [r.failure for r in results] == [None, failure, None]
            told = results[1].text
            assert told.startswith("error: ") and text in told
            assert len(told) < 400 and "\n" not in told
            assert (results[1].reward, results[1].end) == (0.0, False)
            tries = 3 if failure == "broken" else 1
            assert len(lines(path)) == (tries if failure == "broken" else 0)
            assert [(n, c) for (n, _), c in pool.failures.counts.items()] == [(name, tries)]


def test_what_is_broken_may_be_up_again_and_what_hangs_is_given_up(make, tmp_path):
    (result,) = run(make("act"), "once", path=str(tmp_path / "tries"))
    assert (result.text, result.failure) == ("up", None)
    (result,) = run(make("act", retries=1), "once", path=str(tmp_path / "others"))
    assert result.failure == "broken"
    pool = make("act", "act_async")

    async def episode():
        async with opened(pool) as session:
            words = [("act", "fine"), ("act", "hang"), ("act", "fine"), ("act_async", "hang")]
            failures = []
            for name, word in [*words, ("act_async", "fine")]:
                seconds = 0.5 if word == "hang" else 60.0
                session._timeout_s = seconds
                for worker in pool.backend.workers:
                    worker.timeout_s = seconds
                failures.append((await session.call(tool(name, word=word))).failure)
            return failures

    assert asyncio.run(episode()) == [None, "timeout", None, "timeout", None]


def test_a_failing_episode_takes_no_other_along(make):
    pool = make("add", "notes")

    async def episodes(x):
        sessions = [pool.open(n, row(n), n, None) for n in range(4)]
        texts = []
        for step in range(3):
            for call in (tool("notes", text=f"t{step}"), tool("add", x=step + 1)):
                results = await asyncio.gather(*(session.call(call) for session in sessions))
                texts += [r.text for r in results]
            assert (await sessions[0].call(tool("add", x=97))).failure == "failed"
            failure = (await sessions[2].call(tool("add", x=x))).failure
            assert failure == {97: "failed", 98: "died"}[x]
        for session in sessions:
            await session.close()
        return texts

    assert asyncio.run(episodes(98)) == asyncio.run(episodes(97))


def test_a_cancelled_call_leaves_a_sound_state(make):
    pool = make("add")

    async def episode():
        async with opened(pool) as session:
            await session.call(tool("add", x=1))
            pool.backend.workers[0].timeout_s = 0.5  # but not of the worker that replaces it
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.call(tool("add", x=99)), 0.1)
            return (await session.call(tool("add", x=2))).text

    assert asyncio.run(episode()) == "0: 3"


@pytest.mark.parametrize("workers", [0, 1])
def test_set_up_and_clean_up(make, tmp_path, subtests, workers):
    cases = {"": None, "set-up raises": "broken", "set-up broken": "broken"}
    cases |= {"clean-up raises": None, "yields twice": None}
    cases |= {"set-up hangs": "timeout", "clean-up hangs": None} if workers else {}

    async def episode(pool, extra):
        async with opened(pool, **extra) as session:
            results = [await session.call(tool("notes", text="a")) for _ in range(2)]
            for worker in pool.backend.workers if extra["word"] == "clean-up hangs" else ():
                worker.timeout_s = 0.5
        await session.close()
        with pytest.raises(ToolError, match="closed"):
            await session.call(tool("notes", text="a"))
        return results

    pools = [make("notes", workers=workers, timeout_s=seconds) for seconds in (60.0, 1.0)]
    for word, failure in cases.items():
        with subtests.test(word):
            pool, path = pools[word == "set-up hangs"], tmp_path / f"log {word}"
            pool.failures.counts.clear()
            results = asyncio.run(episode(pool, {"path": str(path), "word": word}))
            assert [r.failure for r in results] == [failure] * 2
            assert lines(path) == ([] if failure else ["open 0", "close 0"])
            clean_up = sum(n for (_, kind), n in pool.failures.counts.items() if kind == "clean-up")
            assert clean_up == (word.startswith("clean-up") or word == "yields twice")


def play(pool, *answers, seed=7, **extra):
    async def episode():
        async with opened(pool, seed=seed, **extra) as session:
            return [await session.step(answer) for answer in (None, *answers)]

    return asyncio.run(episode())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_begins_answers_and_ends(make, tmp_path, workers):
    pool = make(environment="guess", workers=workers, keywords={"high": 9})
    results = play(pool, "a", "b", "42", "c")
    assert results[0] == ToolResult("environment", "Guess up to 9.", seconds=results[0].seconds)
    assert [r.reward for r in results] == [0, -0.5, -0.5, 0, 0]
    assert [r.end for r in results] == [False, False, False, True, True]
    assert [r.score for r in results] == [None] * 3 + [1.0] * 2
    again = play(pool, "a", "b")
    assert [r.text for r in again] == [r.text for r in results[:3]]
    assert play(pool, "a", seed=8)[1].text != results[1].text
    for answer, score, text in (("score", 0.5, ""), ("no score", None, ""), ("end", None, "over")):
        result = play(pool, answer, path=str(tmp_path / answer))[1]
        assert result[1:5] == (text, 0.0, True, None) and result.score == score
        assert lines(tmp_path / answer) == ["begin 0", "finish 0"]
    assert play(pool, "a", **{"clean-up": True})[1].failure is None
    assert pool.failures.counts["close", "clean-up"] == 1


def test_what_fails_in_an_environment_is_broken(make, tmp_path, subtests):
    raising = ["raise", "broken", "die"]
    cases = [(0, word) for word in ["exit", "hang", *raising]]  # before the first yield
    cases += [(2, word) for word in [*raising, "nan", "object", "large", "nan score"]]
    pools = [make(environment="guess", timeout_s=s, retries=1) for s in (60.0, 1.0)]
    for step, word in cases:
        with subtests.test(word, step=step):
            path, extra = tmp_path / f"{word}-{step}", {"word": word} if step == 0 else {}
            answers = ["a"] * (step - 1) + [word, "b"] if step else ["b"]
            results = play(pools[word == "hang"], *answers, path=str(path), **extra)
            failures = [r.failure for r in results]
            assert failures == [None] * step + ["broken"] * (len(results) - step)
            kept = Counter(line for line in lines(path) if line != "tried")
            instances = 2 if word == "broken" else 1
            assert kept["begin 0"] == instances
            assert word in ("hang", "die") or kept["finish 0"] == instances


def test_functions_and_settings_are_checked_at_the_start(make, subtests):
    for tools in (*(["act", "act"], ["akt"], ["untyped"], ["stream"], ["yields_text"], ["scale"]),):
        with subtests.test(tools=tools), refuses("rollout.tools"):
            make(*tools, workers=0)
    for name, keywords in (("plain", {}), ("stream", {}), ("guess", {"hihg": 3})):
        with subtests.test(name), refuses("rollout.environment"):
            make(environment=name, keywords=keywords)
    for settings in ({"workers": -1}, {"timeout_s": math.inf}, {"retries": -1}, {"memory_gb": 0}):
        with refuses(f"tool_process.{next(iter(settings))}"):
            open_tools([FunctionSpec("calculator")], **settings)


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
    assert all(isinstance(r, ToolError) and "closed" in str(r) for r in results)
    assert not pool.backend.workers
