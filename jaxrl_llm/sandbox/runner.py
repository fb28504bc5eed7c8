"""Runs code inside the jail, and answers over a pipe that the code may write to as well.

Whatever happens here, the code may have done: whoever reads the answers believes none of them.
"""

import ast
import atexit
import builtins
import io
import json
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, NoReturn

STDIN_FILE = ".stdin"
MAX_REASON_CHARS = 300
Outcome = tuple[str | None, str]  # the failure, and its reason


def serve_code(requests: int, answers: int, *, keep_state: bool) -> NoReturn:
    """Run code as it is asked for, until nobody asks any more.

    Args:
        requests: descriptor of the pipe on which lines of JSON come.
        answers: descriptor of the pipe for the answers.
        keep_state: whether the code finds the names that earlier code has bound.
    """
    own, runs = os.getpid(), 0
    builtins.exit = builtins.quit = sys.exit  # which the module `site` would define
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            request, runs = json.loads(line), runs + 1
            name = f"<run {runs}>" if keep_state else "<code>"
            failure, reason = _run(request, name, names, finish=not keep_state)
            if os.getpid() != own:  # a child that the code has forked
                os._exit(0)
            answer = {"nonce": request["nonce"], "failure": failure, "reason": reason}
            os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _open_streams() -> None:
    """Let the code write text of any kind to descriptors 1 and 2."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115
            fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open_stdin(text: str) -> None:
    """Let the code read its input from descriptor 0, which may be a file without a name."""
    opened = os.open(STDIN_FILE, os.O_RDWR | os.O_CREAT, 0o600) if text else os.open("/dev/null", 0)
    if text:
        os.unlink(STDIN_FILE)  # noqa: PTH108
    os.dup2(opened, 0)
    os.close(opened)
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(0, data) :]
    if text:
        os.lseek(0, 0, os.SEEK_SET)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _run(request: dict[str, str], name: str, names: dict[str, Any], *, finish: bool) -> Outcome:
    """Run code, show the value of its last expression, and tell what came of it."""
    _open_streams()
    outcome = _outcome(lambda: _open_stdin(request["stdin"]))  # its folder may be full
    outcome = outcome if outcome[0] else _outcome(lambda: _execute(request["code"], name, names))
    if finish:
        ended = _outcome(_finish)
        outcome = outcome if outcome[0] else ended
    flushed = _outcome(lambda: (sys.stdout.flush(), sys.stderr.flush()))
    return outcome if outcome[0] else flushed


def _outcome(act: Callable[[], object]) -> Outcome:
    try:
        act()
    except SystemExit as error:
        return _exit_outcome(error.code)
    except BaseException as error:  # Ctrl-C of the code's own included
        return _failure(error)
    return None, ""


def _exit_outcome(code: object) -> Outcome:
    if code is None or code == 0:
        return None, ""
    if not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
    return "error", f"SystemExit: {code}"[:MAX_REASON_CHARS]


def _failure(error: BaseException) -> Outcome:
    kind = "memory" if isinstance(error, MemoryError) else "error"
    try:
        frames = _frames_of_code(error.__traceback__)
        traceback.print_exception(type(error), error, frames)
        reason = traceback.format_exception_only(type(error), error)[-1].strip()
    except BaseException:  # an exception of the code's own that can't be shown; or no memory
        return kind, type(error).__name__
    return kind, reason.encode("utf-8", "replace").decode()[:MAX_REASON_CHARS]


def _frames_of_code(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without our own frames."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _execute(code: str, name: str, names: dict[str, Any]) -> None:
    linecache.cache[name] = (len(code), None, io.StringIO(code, newline=None).readlines(), name)
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(_compile(tree, name), names)
        return
    tree.body.pop()
    exec(_compile(tree, name), names)
    value = eval(_compile(ast.Expression(last.value), name), names)
    if value is not None:
        print(repr(value))  # noqa: T201


def _compile(tree: ast.Module | ast.Expression, name: str) -> CodeType:
    kind = "eval" if isinstance(tree, ast.Expression) else "exec"
    return compile(tree, name, kind, dont_inherit=True)


def _finish() -> None:
    """Do what an interpreter does at its end, which code may count on."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
