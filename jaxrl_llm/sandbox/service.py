"""The level `service`: code is sent to a server of SandboxFusion, whose isolation is its own.

https://github.com/bytedance/SandboxFusion, `POST /run_code`. Nothing that the server says is taken
on trust: what is no answer of its format is a failure of the infrastructure, and not of the code.
"""

import functools
import json
import time
from importlib.util import find_spec
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.sandbox.interpreter import (
    CodeLimits,
    CodeResult,
    Failure,
    Interpreter,
    shorten_output,
)
from jaxrl_llm.workers.retries import wait_before_retry
from jaxrl_llm.workers.values import shorten

PATH = "/run_code"
MAX_ANSWER_BYTES = 16_000_000
"""Of an answer; SandboxFusion reads 1 MiB of each of a program's outputs."""

KILLED = (137, -9)
"""Exit codes of what was killed, by the kernel for its memory or by the server."""


class _NoAnswer(Exception):
    """An answer that can't be used."""


class ServiceInterpreter(Interpreter):
    """Sends code to a server; a request that fails for now is sent again, within the time limit.

    Args:
        url: of the server, with or without its path `/run_code`.
        limits: of each run. The server is told `cpu_s` as its `run_timeout`, and `memory_mb`;
            `wall_s` bounds all of a run here, with the time that the server lets it wait.
            `processes` and `file_mb` are the server's business.
    """

    def __init__(self, url: str, limits: CodeLimits) -> None:
        """Ask for nothing yet."""
        import httpx2

        self._url, self._limits = url.rstrip("/").removesuffix(PATH) + PATH, limits
        self._client = httpx2.Client()

    def run(self, code: str, *, stdin: str = "") -> CodeResult:
        """Have the server run code."""
        began = time.monotonic()
        body = {
            "code": _clean(code),
            "language": "python",
            "stdin": _clean(stdin),
            "run_timeout": min(self._limits.cpu_s, self._limits.wall_s),
            "memory_limit_MB": self._limits.memory_mb,
        }
        try:
            result = self._result(self._ask(body, began + self._limits.wall_s))
        except _NoAnswer as error:
            reason = f"{self._url}: {' '.join(str(error).split())}"
            result = CodeResult("", "", "unavailable", shorten(reason))
        return result._replace(seconds=time.monotonic() - began)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _ask(self, body: dict[str, Any], deadline: float) -> bytes:
        """Ask until there is an answer, or the time is over."""
        import httpx2

        tries = 0
        while True:
            try:
                return self._ask_once(body, deadline)
            except (TimeoutError, httpx2.HTTPError, httpx2.InvalidURL) as error:
                tries += 1
                wait, told = wait_before_retry(error, tries), f"{type(error).__name__}: {error}"
            if wait is None or time.monotonic() + wait >= deadline:
                raise _NoAnswer(f"{told} (try {tries}, within {self._limits.wall_s:g} s)")
            time.sleep(wait)

    def _ask_once(self, body: dict[str, Any], deadline: float) -> bytes:
        left, content = max(deadline - time.monotonic(), 0.01), bytearray()
        with self._client.stream("POST", self._url, json=body, timeout=left) as response:
            response.raise_for_status()
            for part in response.iter_bytes():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise _NoAnswer(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer did not end in time")
        return bytes(content)

    def _result(self, content: bytes) -> CodeResult:
        """Read an answer, which must agree with itself.

        Raises:
            _NoAnswer: it is none, or the server has failed.
        """
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _NoAnswer(f"an answer that is no JSON: {error}") from None
        status, run = (answer.get(key) if isinstance(answer, dict) else None for key in READ)
        if status not in ("Success", "Failed") or not isinstance(run, dict):
            raise _NoAnswer(f"got {content[:200]!r}, expected status and run_result")
        output, errors = run.get("stdout") or "", run.get("stderr") or ""
        if not isinstance(output, str) or not isinstance(errors, str):
            raise _NoAnswer("expected text as stdout and stderr")
        failure, reason = self._failure(status, run, errors)
        limit = self._limits.output_bytes
        return CodeResult(
            shorten_output(output, limit), shorten_output(errors, limit), failure, reason
        )

    def _failure(self, status: str, run: dict[str, Any], errors: str) -> tuple[Failure | None, str]:
        code, ended = run.get("return_code"), run.get("status")
        if status == "Failed" and ended == "TimeLimitExceeded":
            return "timeout", f"it took more than {self._limits.cpu_s:g} s"
        if ended != "Finished" or type(code) is not int or (status == "Success") != (code == 0):
            raise _NoAnswer(f"status {status}, of the run {ended!r}, with return_code {code!r}")
        if code == 0:
            return None, ""
        last = shorten(errors.strip().rpartition("\n")[2] or f"exit code {code}")
        if last.startswith("MemoryError"):
            return "memory", f"it needs more than {self._limits.memory_mb} MB"
        return ("killed", f"exit code {code}") if code in KILLED else ("error", last)


READ = ("status", "run_result")
TRIAL_S = 10.0
"""For a server to answer when it is tried, at most: within the time limit of whoever opens it."""


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@functools.cache  # once in a process: each episode opens the level
def _try(url: str, wall_s: float) -> None:
    """Run something on a server, within so many seconds.

    Raises:
        ConnectionError: there is no answer of a SandboxFusion.
    """
    with ServiceInterpreter(url, CodeLimits(wall_s=wall_s)) as interpreter:
        tried = interpreter.run("print(6 * 7)")
    if tried.output.strip() != "42":
        reason = tried.reason or f"print(6 * 7) gave {shorten(tried.output)!r}"
        raise ConnectionError(f"sandbox service: {reason}")


def open_level(limits: CodeLimits, *, keep_state: bool, url: str | None) -> ServiceInterpreter:
    """Return what sends code to a server, after that has computed something.

    Raises:
        ConfigError: state should be kept, which the server does not; or a package is missing.
        ConnectionError: the server gives no answer.
    """
    if keep_state:
        raise ConfigError(
            "sandbox service: SandboxFusion keeps no names from run to run; set keep_state: false"
        )
    if find_spec("httpx2") is None:
        raise ConfigError("sandbox service needs httpx2; pip install 'jaxrl_llm[client]'")
    assert url is not None, "open_interpreter asks for it"
    _try(url, min(limits.wall_s, TRIAL_S))
    return ServiceInterpreter(url, limits)
