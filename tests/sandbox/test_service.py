import contextlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.rewards.code import python_tests
from jaxrl_llm.sandbox.interpreter import CodeLimits, open_interpreter
from jaxrl_llm.workers import retries

LIMITS = CodeLimits(cpu_s=2.0, wall_s=600.0, output_bytes=1000)


def executed(body):
    """Answer as SandboxFusion does, with its names and values."""
    run = {"status": "Finished", "execution_time": 0.01, "return_code": 0}
    if "sleep" in body["code"]:
        run |= {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
    else:
        command = [sys.executable, "-I", "-c", body["code"]]
        done = subprocess.run(
            command, input=body["stdin"], capture_output=True, check=False, text=True
        )
        run |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    status = "Success" if run["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": run, "files": {}}


LIES = {
    **{"no json": b"<html>", "nested": b"[" * 100_000, "list": b"[]", "empty": b"{}"},
    "numbers": b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0,'
    b' "stdout": 1, "stderr": {}}}',
    "success that failed": b'{"status": "Success", "run_result": {"return_code": 1}}',
    "failure without a code": b'{"status": "Failed", "run_result": {"return_code": null}}',
    "error": b'{"status": "SandboxError", "message": "no room", "run_result": null}',
    "not utf-8": b"\xff\xfe",
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, body))
        word = body["code"].removeprefix("# ")
        if server.failing:
            server.failing -= 1
            self.reply(b"busy", 503)
        elif word == "refused":
            self.reply(b"no", 403)
        elif word == "hang":
            server.ending.wait(20)
        elif word == "drip":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not server.ending.wait(0.05):
                    self.wfile.write(b" ")
        elif word == "gigabyte":
            self.send_response(200)
            self.send_header("Content-Length", str(10**9))
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b" " * 10**6)
                    server.sent += 1
        else:
            self.reply(LIES.get(word) or json.dumps(executed(body)).encode())

    def reply(self, content, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            pass  # the other side has hung up

    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked, server.failing, server.sent = [], 0, 0
        server.ending = threading.Event()
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.ending.set()
        server.shutdown()
        thread.join()


def open_service(server, limits=LIMITS, path=""):
    return open_interpreter("service", limits, url=server.url + path)


def test_what_is_asked_is_what_the_server_takes(server):
    for path in ("", "/", "/run_code"):
        server.asked.clear()
        with open_service(server, path=path) as interpreter:
            result = interpreter.run("print(input())", stdin="7\n")
        assert result[:4] == ("7\n", "", None, "")
        tried, (asked_path, body) = server.asked
        assert tried[0] == asked_path == "/run_code"
    assert body == {"code": "print(input())", "language": "python", "stdin": "7\n"} | {
        **{"run_timeout": 2.0, "memory_limit_MB": 256}
    }


def test_code_that_fails_is_told(server):
    with open_service(server) as interpreter:
        for code, failure, reason in [
            *(("1 / 0", "error", "ZeroDivisionError"), ("exit(3)", "error", "exit code 3")),
            *(("time.sleep(99)", "timeout", "2 s"), ("raise MemoryError", "memory", "256 MB")),
            ("import os; os.kill(os.getpid(), 9)", "killed", "exit code -9"),
        ]:
            result = interpreter.run(code)
            assert result.failure == failure and reason in result.reason, code
        output = interpreter.run("print('a' * 10**5)").output
    assert len(output) < 1100  # it loses its middle


def test_an_answer_that_is_none_is_no_fault_of_the_code(server):
    with open_service(server) as interpreter:
        for word in LIES:
            result = interpreter.run(f"# {word}")
            assert (result.failure, result.output) == ("unavailable", ""), word
            assert server.url in result.reason
        assert interpreter.run("print(1)").output == "1\n"


def test_a_server_that_does_not_come_to_an_end_is_left(server):
    with open_service(server, LIMITS._replace(wall_s=0.5)) as interpreter:
        for word in ("hang", "drip", "gigabyte"):
            assert interpreter.run(f"# {word}").failure == "unavailable", word
    assert server.sent < 200


def test_what_may_pass_is_asked_again_and_what_may_not_is_not(server, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    with open_service(server) as interpreter:
        server.failing = 2
        assert interpreter.run("print(1)").output == "1\n"
        assert len(server.asked) == 4
        result = interpreter.run("# refused")
        assert len(server.asked) == 5
    assert result.failure == "unavailable" and "403" in result.reason


def test_what_can_not_be_is_refused_at_the_start(server):
    with pytest.raises(ConfigError, match="keep_state"):
        open_interpreter("service", url=server.url, keep_state=True)
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9/run_code"):
        open_interpreter("service", LIMITS._replace(wall_s=0.1), url="http://127.0.0.1:9")


def test_programs_of_a_reward_find_there_what_graders_import(server):
    code = "class Solution:\n    def f(self, xs: List[int]):\n        return Counter(xs)[1]"
    calls = {"fn_name": "f", "inputs": ["[1, 1]"], "outputs": ["2"]}
    reads = {"inputs": ["3"], "outputs": ["3"]}
    programs = [(code, calls), ("print(open('/dev/stdin').read())\nexit()", reads)]
    for code, tests in programs:
        reply, given = f"```python\n{code}\n```", {"url": server.url, "wall_s": 600.0}
        assert python_tests("", reply, tests, None, sandbox="service", **given)["error"] == ""
