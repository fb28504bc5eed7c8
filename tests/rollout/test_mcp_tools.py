"""Tools of MCP servers: real ones, written with the protocol's package, and such as fail."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.turns import ToolCall
from jaxrl_llm.rollout.observation import EpisodeRow
from jaxrl_llm.rollout.tools import mcp
from jaxrl_llm.rollout.tools.mcp import McpConnection
from tests.tool_pools import open_tools
from tests.waiting import wait_until

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
        time.sleep(30)
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


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def running(file):
    pids = [int(p.name.removeprefix("pid-")) for p in file.parent.glob("pid-*")]
    return [pid for pid in pids if is_running(pid)]


@pytest.fixture(params=["stdio", "http"])
def server(request, file):
    """Give the keywords by which a server is named; none of its processes may stay."""
    (file.parent / "died").unlink(missing_ok=True)
    if request.param == "stdio":
        yield {"command": [sys.executable, str(file)]}
        wait_until(lambda: not running(file), 30)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(file), str(port)]) as process:

        def is_listening():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(is_listening, 30)
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
        process.kill()


@pytest.fixture
def make():
    pools = []

    def build(workers=0, timeout_s=100.0, retries=2, **keywords):
        spec = FunctionSpec("mcp_tools", keywords)
        pools.append(open_tools([spec], workers=workers, timeout_s=timeout_s, retries=retries))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def run(pool, *calls):
    """Return what is told of the calls of one episode."""

    async def episode():
        session = pool.open(0, EpisodeRow(0), 0, None)
        results = [await session.call(ToolCall(name, given)) for name, given in calls]
        await session.close()
        return [(result.content, result.failure) for result in results]

    return asyncio.run(episode())


def test_the_tools_of_a_server_are_told_and_called(make, server):
    pool = make(**server)
    names = [schema["function"]["name"] for schema in pool.schemas]
    assert names == ["add", "tick", "act", "draw"]
    function = pool.schemas[0]["function"]
    assert function["description"] == "Add numbers."
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    told = run(
        pool,
        *(("add", {"a": 1, "b": [2, 3]}), ("add", {"a": "x"}), ("add", {"c": 1})),
        *(("act", {"word": "raise"}), ("draw", {}), ("act", {"word": "ü\n{}"})),
    )
    assert [failure for _, failure in told] == [None, "failed", "failed", "failed", None, None]
    assert told[0][0] == "6" and told[-1][0] == "ü\n{}"
    assert "expected integer" in told[1][0]
    assert told[3][0] == "Error executing tool act"
    assert told[4][0] == [{"type": "image", "image": b"x"}]


def test_an_episode_has_a_session_of_its_own(make, file):
    pool = make(command=[sys.executable, str(file)])
    assert run(pool, *[("tick", {})] * 2) == [("1", None), ("2", None)]
    assert run(pool, ("tick", {}), ("add", {"a": 1}), ("tick", {}))[2] == ("2", None)
    wait_until(lambda: not running(file), 10)


def test_a_worker_shares_a_session_if_the_config_says_so(make, file):
    pool = make(command=[sys.executable, str(file)], session="worker", only=["tick"], workers=1)
    assert [s["function"]["name"] for s in pool.schemas] == ["tick"]
    assert run(pool, ("tick", {})) == [("1", None)]
    assert run(pool, ("tick", {})) == [("2", None)]
    pool.close()
    wait_until(lambda: not running(file), 10)


def test_a_server_that_dies_is_started_again_with_its_state(make, file):
    (file.parent / "died").unlink(missing_ok=True)
    pool = make(command=[sys.executable, str(file)], retries=1)
    told = run(
        pool,
        *(("tick", {}), ("tick", {}), ("act", {"word": "die once"}), ("tick", {})),
        *(("act", {"word": "rubbish"}), ("act", {"word": "die"})),
    )
    assert told[:5] == [
        *(("1", None), ("2", None), ("die once", None), ("3", None)),
        ("rubbish", None),
    ]
    assert told[5][1] == "broken"
    assert "Connection closed" in told[5][0]


def test_a_server_that_hangs_is_told_and_started_again(make, file, monkeypatch):
    call_in_time = McpConnection.call

    def call(self, name, arguments, seconds, *, replay):  # the start of a server has its own time
        limit = 1.0 if arguments == {"word": "hang"} else seconds
        return call_in_time(self, name, arguments, limit, replay=replay)

    monkeypatch.setattr(McpConnection, "call", call)
    pool = make(command=[sys.executable, str(file)], timeout_s=100.0)
    told = run(pool, ("act", {"word": "hang"}), ("act", {"word": "on"}))
    assert told == [("error: no answer within 1 s", "failed"), ("on", None)]
    assert pool.failures.counts == {("act", "timeout"): 1}
    wait_until(lambda: not running(file), 30)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "expected either command, a list such as"),
        ({"command": "python server.py"}, "expected either command, a list such as"),
        ({"command": ["/nonexistent"]}, "/nonexistent: FileNotFoundError"),
        ({"command": ["true"]}, "true: MCPError: Connection closed"),
        ({"command": ["sleep", "600"]}, "sleep 600: no session within 0.5 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "http://127.0.0.1:9/mcp: "),
        ({"url": "http://x", "session": "run"}, "got session 'run'"),
    ],
)
def test_a_server_that_gives_no_tools_is_refused_at_the_start(make, keywords, message, monkeypatch):
    if "sleep" in str(keywords):
        monkeypatch.setattr("jaxrl_llm.rollout.tools.mcp.START_S", 0.5)
    with pytest.raises(ConfigError, match="mcp_tools: ") as raised:
        make(**keywords)
    assert message in str(raised.value)


NAMELESS = """
import json, sys
print("Hello, I am a server.", flush=True)
print("Hello, I am a server.", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    known = {"tools": {}}, {"name": "x", "version": "1"}
    begun = dict(zip(("capabilities", "serverInfo"), known), protocolVersion="2025-03-26")
    result = {"tools": TOOLS} if asked["method"] == "tools/list" else begun
    print(json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}), flush=True)
"""
ECHO = {"name": "echo", "inputSchema": {"type": "object"}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "got the tools none, expected each once"),
        ([ECHO, ECHO], "got the tools echo, echo, expected each once"),
        ([{**ECHO, "inputSchema": "x"}], "no tools: ValidationError: 1 validation error for"),
    ],
)
def test_tools_that_can_not_be_told_apart_are_refused_in_one_line(make, tools, message, caplog):
    mcp._SAID.clear()
    with pytest.raises(ConfigError, match=message) as raised:
        make(command=[sys.executable, "-c", f"TOOLS = {tools}\n{NAMELESS}"])
    assert "\n" not in str(raised.value).partition("TOOLS")[2].rpartition(NAMELESS)[2]
    (said,) = [record.getMessage() for record in caplog.records if "Hello" in record.getMessage()]
    assert "\n" not in said and "Traceback" not in caplog.text


def test_a_tool_that_the_server_has_not_is_refused(make, file):
    with pytest.raises(ConfigError, match="has no tool 'tack'; did you mean 'tick'"):
        make(command=[sys.executable, str(file)], only=["tack"])
