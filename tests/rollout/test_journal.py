import asyncio
import json

import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools.session import Journal
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
    return str(random.SystemRandom().random())

def add(x: int, state, row) -> str:
    """Add to a sum.\\n\\nArgs:\\n    x: a number."""
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
    with open_tools(tools, FunctionSpec(f"{path}:count"), workers=request.param) as made:
        yield made


def draw(pool, path, *, adds=(1, 2, 3, 4, 5, 6), number=4):
    """The results of an episode's calls, several of each kind, with a journal in a folder."""

    async def episode(journal):
        row = EpisodeRow(0, extra_info={"path": str(path / "log")})
        session = pool.open(number, row, 7, journal)
        results = [await session.step(None)]
        for turn, x in enumerate(adds):
            calls = [("chance", {}), ("add", {"x": x}), ("chance_async", {})]
            turns = [session.call(ToolCall(name, arguments)) for name, arguments in calls]
            results += await asyncio.gather(*turns)
            results.append(await session.step(f"turn {turn}"))
        results.append(await session.step("stop"))
        await session.close()
        return results

    with Journal(path / "journal", config="a") as journal:
        return asyncio.run(episode(journal))


def logged(path, word=""):
    lines = (path / "log").read_text().splitlines() if (path / "log").exists() else []
    return [line for line in lines if line.startswith(word)]


def test_a_journal_cut_anywhere_is_gone_on_with(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, config="a") as journal:
        for n, digest in enumerate("xy"):
            journal.record(3, n, digest, RESULTS[n])
        whole = path.read_bytes()  # on disk before it is closed
    assert path.read_bytes() == whole and whole.count(b"\n") == 3
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with Journal(path, config="a") as journal:
            kept = max(whole[:length].count(b"\n") - 1, 0)
            assert len(journal) == kept
            found = [journal.find(3, n, digest) for n, digest in enumerate("xyz")]
            assert found == [*RESULTS[:kept], *[None] * (3 - kept)]
            assert journal.find(2, 0, "x") is None
            for n in range(kept, 2):
                journal.record(3, n, "xy"[n], RESULTS[n])
        assert path.read_bytes() == whole


ENTRY = {"key": [0, 1], "digest": "x", "result": RESULTS[0]._asdict()}
DAMAGED = [
    *({**ENTRY, "key": [0]}, {**ENTRY, "more": 1}, {"drop": [1]}, [1]),
    *({**ENTRY, "digest": None}, {**ENTRY, "result": {"name": "a"}}),
    {**ENTRY, "result": {**ENTRY["result"], "reward": float("nan")}},
]


def test_damage_and_other_journals_are_refused(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, config="a") as journal:
        journal.record(0, 0, "x", RESULTS[0])
    begun, entry = path.read_bytes(), json.dumps(ENTRY).encode()
    lines = [b"garbage", b"", b"\xff\xfe", b"[" * 10**5, *(json.dumps(d).encode() for d in DAMAGED)]
    contents = [begun + line + b"\n" + entry + b"\n" for line in lines]
    contents += [b'{"journal": 1, "config": "b"}\n', b'{"journal": 0, "config": "a"}\n']
    for content in (*contents, b'{"rows": 3}\n', b"PK\x03\x04\n"):
        path.write_bytes(content)
        with pytest.raises(ToolError, match="journal"):
            Journal(path, config="a")
        assert path.read_bytes() == content


def test_an_episode_drawn_again_is_told_the_same_and_in_another_way_runs_anew(pool, tmp_path):
    first = draw(pool, tmp_path)
    ran = logged(tmp_path)
    assert draw(pool, tmp_path) == first
    assert logged(tmp_path) == ran  # nothing ran again
    assert draw(pool, tmp_path, number=5) != first
    others = (1, 2, 30, 4, 5, 6)
    again = draw(pool, tmp_path, adds=others)
    assert again[:9] == first[:9] and again[10].text.split(" ")[0] == "33"
    assert again[10:-1] != first[10:-1]
    assert draw(pool, tmp_path, adds=others) == again


def test_state_is_built_up_again_where_the_journal_ends(pool, tmp_path):
    first = draw(pool, tmp_path)
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)

    def parts(results):
        made = [r for r in results if "chance" not in r.name]
        return [(r.name, r.text.split(" ")[0], r.score) for r in made]

    for kept in (0, 1, 2, 3, 11):
        (tmp_path / "journal").write_bytes(b"".join(lines[: 1 + kept]))
        known = {json.loads(line)["key"][1] for line in lines[1 : 1 + kept]}
        (tmp_path / "log").unlink()
        again = draw(pool, tmp_path)
        assert [again[n] for n in sorted(known)] == [first[n] for n in sorted(known)]
        # sums and the environment's turns are those of the whole episode; all were made once
        assert parts(again) == parts(first)
        assert logged(tmp_path, "add") == [f"add {x}" for x in range(1, 7)]
        turns = [f"count turn {n}" for n in range(6)]
        assert logged(tmp_path, "count") == [*turns, "count stop"]
        assert len(logged(tmp_path, "chance")) == 6 - sum(n % 4 == 1 for n in known)
