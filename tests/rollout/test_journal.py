"""The journal: what is read back, cut lines, damage, and runs that are killed and drawn again."""

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys

import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.session import Journal, call_digest
from jaxrl_llm.rollout.tools.tool import ToolError, ToolResult
from tests.tool_pools import open_tools

FUNCTIONS = '''
import random

def log(path, text):
    with open(path, "a") as file: file.write(text + "\\n")

def chance(row) -> str:
    """Tell what no seed decides."""
    log(row.extra_info["path"], "chance")
    return str(random.SystemRandom().random())

async def chance_async(row) -> str:
    """Tell what no seed decides."""
    log(row.extra_info["path"], "chance_async")
    return str(random.SystemRandom().random())

def add(x: int, state, row) -> str:
    """Add to a sum.

    Args:
        x: a number.
    """
    log(row.extra_info["path"], f"add {x}")
    state["sum"] = state.get("sum", 0) + x
    return f"{state['sum']} {random.SystemRandom().random()}"

def count(row):
    answer = yield "begin"
    for turn in range(9):
        log(row.extra_info["path"], f"count {answer}")
        if answer == "stop": return float(turn)
        answer = yield f"{turn} {random.SystemRandom().random()}"
'''

RESULTS = [
    ToolResult("add", 'é "\n\u2028 \x00', 0.1 + 0.2, True, None, -1e-300, 0.5),
    ToolResult("environment", "", 0.0, False, "broken", None, 1e9),
]


@pytest.fixture(params=[0, 1], ids=["no workers", "a worker"])
def pool(request, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    tools = tuple(FunctionSpec(f"{path}:{name}") for name in ("chance", "chance_async", "add"))
    environment = FunctionSpec(f"{path}:count")
    with open_tools(tools, environment, workers=request.param) as made:
        yield made


def draw(pool, journal, log_path, count=6, adds=(1, 2, 3, 4, 5, 6), number=4):
    """The results of an episode's calls, several of each kind."""

    async def episode():
        row = EpisodeRow(0, extra_info={"path": str(log_path)})
        session = pool.open(number, row, 7, journal)
        results = [await session.step(None)]
        for turn in range(count):
            calls = [("chance", {}), ("add", {"x": adds[turn]}), ("chance_async", {})]
            turns = [session.call(ToolCall(name, arguments)) for name, arguments in calls]
            results += await asyncio.gather(*turns)
            results.append(await session.step(f"turn {turn}"))
        results.append(await session.step("stop"))
        await session.close()
        return results

    return asyncio.run(episode())


def logged(path):
    return path.read_text().splitlines() if path.exists() else []


# --------------------------------------------------------------------------------------------- file


def test_what_is_recorded_is_read_back(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, config="a") as journal:
        for n, result in enumerate(RESULTS):
            journal.record(3, n, f"digest {n}", result)
        before = path.read_bytes()  # on disk before it is closed
    assert before == path.read_bytes() and before.count(b"\n") == 3
    with Journal(path, config="a") as journal:
        assert len(journal) == 2
        assert [journal.find(3, n, f"digest {n}") for n in (0, 1, 2)] == [*RESULTS, None]
        assert journal.find(2, 0, "digest 0") is None
    assert path.read_bytes() == before


def test_a_journal_cut_anywhere_is_gone_on_with(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, config="a") as journal:
        journal.record(0, 0, "x", RESULTS[0])
        journal.record(0, 1, "y", RESULTS[1])
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with Journal(path, config="a") as journal:
            kept = max(whole[:length].count(b"\n") - 1, 0)
            assert len(journal) == kept
            for n in range(kept, 2):
                journal.record(0, n, "xy"[n], RESULTS[n])
        assert path.read_bytes() == whole


def test_a_cut_line_is_told(tmp_path, caplog):
    path = tmp_path / "journal"
    with Journal(path, config="a") as journal:
        journal.record(0, 0, "x", RESULTS[0])
    with path.open("ab") as file:
        file.write(b'{"key": [0')
    with caplog.at_level(logging.WARNING), Journal(path, config="a"):
        pass
    assert "its last line is cut and dropped" in caplog.text


ENTRY = {"key": [0, 1], "digest": "x", "result": RESULTS[0]._asdict()}


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"[1]",
        b"",
        b"\xff\xfe",
        b"[" * 10**5,
        json.dumps({**ENTRY, "key": [0]}).encode(),
        json.dumps({**ENTRY, "key": [0, "1"]}).encode(),
        json.dumps({**ENTRY, "more": 1}).encode(),
        json.dumps({**ENTRY, "digest": None}).encode(),
        json.dumps({**ENTRY, "result": {"name": "a"}}).encode(),
        json.dumps({**ENTRY, "result": {**ENTRY["result"], "text": 1}}).encode(),
        json.dumps({**ENTRY, "result": {**ENTRY["result"], "reward": float("nan")}}).encode(),
        json.dumps({"drop": [1]}).encode(),
    ],
)
def test_damage_is_refused(tmp_path, line):
    path = tmp_path / "journal"
    with Journal(path, config="a") as journal:
        journal.record(0, 0, "x", RESULTS[0])
    with path.open("ab") as file:
        file.write(line + b"\n" + json.dumps(ENTRY).encode() + b"\n")
    before = path.read_bytes()
    with pytest.raises(ToolError, match=r"journal: line 3 is damaged; remove the file"):
        Journal(path, config="a")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"journal": 1, "config": "b"}\n', "a journal of another config"),
        (b'{"journal": 0, "config": "a"}\n', "or of another version"),
        (b'{"rows": 3}\n', "got another file"),
        (b"PK\x03\x04\n", "line 1 is damaged"),
    ],
)
def test_another_journal_is_refused(tmp_path, content, message):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ToolError, match=message):
        Journal(path, config="a")
    assert path.read_bytes() == content


def test_another_draw_drops_what_follows_and_that_holds(tmp_path, caplog):
    path = tmp_path / "journal"
    with Journal(path, config="a") as journal:
        for episode in (0, 1):
            for n in range(4):
                journal.record(episode, n, f"{n}", RESULTS[0])
    with caplog.at_level(logging.WARNING), Journal(path, config="a") as journal:
        assert journal.find(0, 0, "0") == RESULTS[0]
        assert journal.find(0, 1, "other") is None
        journal.record(0, 1, "other", RESULTS[1])
        assert journal.find(0, 2, "2") is None
    assert "call 1 of episode 0 is another one than before" in caplog.text
    with Journal(path, config="a") as journal:
        recorded = [journal.find(0, n, d) for n, d in enumerate(["0", "other", "2", "3"])]
        assert recorded == [RESULTS[0], RESULTS[1], None, None]
        assert [journal.find(1, n, f"{n}") for n in range(4)] == [RESULTS[0]] * 4


def test_digests_know_values_and_not_the_order_of_names():
    digests = [
        call_digest(*call)
        for call in [("f", {"x": 1}), ("g", {"x": 1}), ("f", {"x": "1"}), ("f", {"x": 1.0})]
    ]
    assert len({*digests}) == 4
    assert call_digest("f", {"x": {"b": 1, "a": 2}}) == call_digest("f", {"x": {"a": 2, "b": 1}})


# ---------------------------------------------------------------------------------------- sessions


def test_an_episode_drawn_again_is_told_the_same(pool, tmp_path):
    path, log = tmp_path / "journal", tmp_path / "log"
    with Journal(path, config="a") as journal:
        first = draw(pool, journal, log)
    ran = logged(log)
    with Journal(path, config="a") as journal:
        assert draw(pool, journal, log) == first
    assert logged(log) == ran  # nothing ran again
    with Journal(path, config="a") as journal:
        assert draw(pool, journal, log, number=5) != first


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4, 6, 11])
def test_state_is_built_up_again_where_the_journal_ends(pool, tmp_path, kept):
    path, log = tmp_path / "journal", tmp_path / "log"
    with Journal(path, config="a") as journal:
        first = draw(pool, journal, log)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 1 + kept]))
    known = {tuple(json.loads(line)["key"])[1] for line in lines[1 : 1 + kept]}
    log.unlink()
    with Journal(path, config="a") as journal:
        again = draw(pool, journal, log)
    assert [again[n] for n in sorted(known)] == [first[n] for n in sorted(known)]
    # the sums and the environment's turns are those of the whole episode, and all were made once
    parts = [(r.name, r.text.split(" ")[0], r.score) for r in first if "chance" not in r.name]
    assert [
        (r.name, r.text.split(" ")[0], r.score) for r in again if r.name in ("add", "environment")
    ] == parts
    assert [line for line in logged(log) if line.startswith("add")] == [
        f"add {x}" for x in range(1, 7)
    ]
    turns = [f"count turn {n}" for n in range(6)]
    assert [line for line in logged(log) if line.startswith("count")] == [*turns, "count stop"]
    assert sum(line == "chance" for line in logged(log)) == 6 - sum(n % 4 == 1 for n in known)


def test_an_episode_drawn_in_another_way_runs_anew(pool, tmp_path, caplog):
    path, log = tmp_path / "journal", tmp_path / "log"
    with Journal(path, config="a") as journal:
        first = draw(pool, journal, log)
    with caplog.at_level(logging.WARNING), Journal(path, config="a") as journal:
        again = draw(pool, journal, log, adds=(1, 2, 30, 4, 5, 6))
    assert again[:9] == first[:9] and again[10].text.split(" ")[0] == "33"
    assert again[10:-1] != first[10:-1] and "is another one than before" in caplog.text
    with Journal(path, config="a") as journal:
        assert draw(pool, journal, log, adds=(1, 2, 30, 4, 5, 6)) == again


PROGRAM = """
import asyncio, sys
sys.path[:] = {search!r}
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.session import Journal
from tests.tool_pools import open_tools

async def episode(pool, journal):
    session = pool.open(0, EpisodeRow(0, extra_info={{"path": {log!r}}}), 7, journal)
    for turn in range(10**6):
        result = await session.call(ToolCall("add", {{"x": turn}}))
        print(turn, result.text, flush=True)

tools = [FunctionSpec({function!r})]
with open_tools(tools, workers=1) as pool, Journal({journal!r}, config="a") as journal:
    asyncio.run(episode(pool, journal))
"""


def test_a_killed_process_loses_nothing_that_was_used(tmp_path):
    file, path = tmp_path / "mine.py", tmp_path / "journal"
    file.write_text(FUNCTIONS)
    names = {"function": f"{file}:add", "journal": str(path), "log": str(tmp_path / "log")}
    text = PROGRAM.format(search=sys.path, **names)
    used = []
    for turns in (5, random.Random(3).randrange(20, 60)):  # the second goes on with the first's
        with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = [process.stdout.readline().decode() for _ in range(turns)]
            os.kill(process.pid, signal.SIGKILL)
        assert told[: len(used)] == used
        used = told
    with Journal(path, config="a") as journal:
        recorded = [journal.find(0, n, call_digest("add", {"x": n})) for n in range(len(used))]
    assert [f"{n} {result and result.text}\n" for n, result in enumerate(recorded)] == used
