import socket
import subprocess
import sys

import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.tools import mcp
from jaxrl_llm.rollout.tools.mcp import McpConnection
from tests.refusals import refuses
from tests.rollout.conftest import call_tools
from tests.waiting import ended, wait_until

SERVER = '''
import os, pathlib, sys, time
from mcp.server.mcpserver import Image, MCPServer
server = MCPServer("things", log_level="CRITICAL")
folder = pathlib.Path(__file__).parent
count = 0
(folder / f"pid-{os.getpid()}").touch()

@server.tool()
def add(a: int, b: list[int] | None = None) -> int:
    """Add numbers."""
    return a + sum(b or [])

@server.tool()
def tick() -> str:
    """Count calls."""
    global count
    count += 1
    return str(count)

@server.tool()
def act(word: str) -> str:
    """Do something odd."""
    if word == "die":
        os._exit(3)
    if word == "die once" and not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(3)
    if word == "hang":
        time.sleep(600)
    if word == "raise":
        raise ValueError("secret")
    if word == "rubbish":
        print("rubbish", flush=True)
    return word

@server.tool()
def draw() -> Image:
    """Draw."""
    return Image(data=b"x", format="png")
if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    server.run()
'''


@pytest.fixture
def file(tmp_path):
    """The server's file; none of its processes may stay."""
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    yield path
    pids = [int(p.name.removeprefix("pid-")) for p in tmp_path.glob("pid-*")]
    wait_until(lambda: all(map(ended, pids)))


@pytest.fixture
def make(file, open_pool):
    def build(workers=0, timeout_s=100.0, retries=2, **keywords):
        spec = FunctionSpec("mcp_tools", keywords or {"command": [sys.executable, str(file)]})
        return open_pool([spec], workers=workers, timeout_s=timeout_s, retries=retries)

    return build


def run(pool, *calls):
    return [(result.content, result.failure) for result in call_tools(pool, *calls)]


def act(word):
    return "act", {"word": word}


TICK = ("tick", {})


def check_tools(pool):
    names = [schema["function"]["name"] for schema in pool.schemas]
    assert names == ["add", "tick", "act", "draw"]
    function = pool.schemas[0]["function"]
    assert function["description"] == "Add numbers."
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    adds = [("add", given) for given in ({"a": 1, "b": [2, 3]}, {"a": "x"}, {"c": 1})]
    told = run(pool, *adds, act("raise"), ("draw", {}), act("ü\n{}"), TICK, TICK)
    assert [failure for _, failure in told] == [None, *["failed"] * 3, *[None] * 4]
    assert (told[0][0], *(text for text, _ in told[5:])) == ("6", "ü\n{}", "1", "2")
    assert "integer" in told[1][0] and "secret" not in told[3][0]
    assert told[4][0] == [{"type": "image", "image": b"x"}]


def test_the_tools_of_a_server_are_told_and_called_and_episodes_have_their_own(make):
    pool = make()
    check_tools(pool)
    assert run(pool, TICK) == [("1", None)]


def test_a_server_behind_an_address(make, file):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(file), str(port)]) as process:

        def is_listening():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(is_listening, 60)
        check_tools(make(url=f"http://127.0.0.1:{port}/mcp"))
        process.kill()


def test_a_worker_shares_a_session_if_the_config_says_so(make, file):
    command = [sys.executable, str(file)]
    pool = make(command=command, session="worker", only=["tick"], workers=1)
    assert [s["function"]["name"] for s in pool.schemas] == ["tick"]
    assert [run(pool, TICK) for _ in range(2)] == [[("1", None)], [("2", None)]]


def test_a_server_that_dies_or_hangs_is_started_again_with_its_state(make, monkeypatch):
    call_in_time = McpConnection.call

    def call(self, name, arguments, seconds, *, replay):  # the start of a server has its own time
        limit = 1.0 if arguments == {"word": "hang"} else seconds
        return call_in_time(self, name, arguments, limit, replay=replay)

    monkeypatch.setattr(McpConnection, "call", call)
    pool = make(retries=1)
    told = run(pool, TICK, TICK, act("die once"), TICK, act("rubbish"), act("die"))
    assert told[:5] == [(text, None) for text in ("1", "2", "die once", "3", "rubbish")]
    assert told[5][1] == "broken"
    told = run(pool, act("hang"), act("on"))
    assert [failure for _, failure in told] == ["failed", None] and told[1][0] == "on"
    assert pool.failures.counts["act", "timeout"] == 1


def test_what_gives_no_tools_is_refused(make, file, monkeypatch):
    monkeypatch.setattr(mcp, "START_S", 0.5)
    monkeypatch.setattr(mcp, "TRIES", 1)
    for keywords in (
        *({"command": "python server.py"}, {"command": ["/nonexistent"]}, {"command": ["true"]}),
        *({"command": ["sleep", "600"]}, {"url": "http://x", "session": "run"}),
    ):
        with refuses("rollout.tools"):
            make(**keywords)
    monkeypatch.undo()
    with refuses("rollout.tools"):
        make(command=[sys.executable, str(file)], only=["tock"])
