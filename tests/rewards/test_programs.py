from itertools import cycle

import pytest

from jaxrl_llm.rewards.code import python_tests
from jaxrl_llm.sandbox.interpreter import CodeLimits, open_interpreter
from tests.rewards.programs import PROGRAMS, READ
from tests.sandboxes import needs_landlock

pytestmark = needs_landlock
DOCSTRING = '"""Solve it.\n\n```\n>>> f(1)\n```\n    ```python\n    f(2)\n    ```\n"""\n'
IMPORTS = "from __future__ import annotations\nfrom typing import *\nimport math, sys\n"


def listed(code):
    indented = "\n".join(f"   {line}" for line in code.split("\n"))
    return f'1. So:\n\n   ```Python title="a.py"\n{indented}\n   ```\n2. Done.'


FORMS = (
    lambda code: f"First, think.\n\n```python\n{code}\n```\n\nDone.",
    listed,
    lambda code: f"```py\n{code}\n```\nIt prints:\n```\n7\n```\nand\n```json\n{{}}\n```",
    lambda code: f"~~~ {{.python}}\n{code}\n~~~",
    lambda code: f"So:\n```python3\n{code}\n```\n".replace("\n", "\r\n"),
    lambda code: f"```python\n{code}```",
    lambda code: f"```python\nx = '''\n```\nNo. Better:\n````{{python}}\n{code}\n````",
    lambda code: f"```\nprint('a draft')\n```\nIt is this: ```python\n{code}\n```",
    lambda code: f"```python\n{DOCSTRING}{code}\n```",
    lambda code: f"- ```PYTHON\n{IMPORTS}{code}\n  ```",
)
"""How answers hold a program."""


CHILD = """
import os, sys, threading, traceback

def run_in_child(code):
    failed = 0
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        failed = error.code not in (None, 0)
    except BaseException:
        traceback.print_exc()
        failed = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    sys.stdout.flush()
    os._exit(failed)

child = os.fork()
if not child:
    run_in_child(CODE)
assert os.waitpid(child, 0)[1] == 0
"""


class Forking:
    """Runs each program in a child of one interpreter, as if in one of its own, but at once."""

    def __init__(self, interpreter):
        self.interpreter = interpreter

    def run(self, code, *, stdin=""):
        return self.interpreter.run(CHILD.replace("CODE", repr(code)), stdin=stdin)

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def one_interpreter(monkeypatch):
    with open_interpreter("process", CodeLimits(wall_s=20.0), keep_state=True) as interpreter:
        interpreter.run("import asyncio, dataclasses, decimal, numpy, random, statistics")
        one = Forking(interpreter)
        monkeypatch.setattr("jaxrl_llm.rewards.code.open_interpreter", lambda *_, **__: one)
        yield


def right_answers(forms):
    """Return an answer and its tests for each program and so many forms, in turn."""
    form = cycle(FORMS)
    return [(next(form)(p.code), p.tests) for _ in range(forms) for p in PROGRAMS]


def wrong_answers():
    """Return answers that pass no test: slips, one that raises, and one that prints more."""
    form, wrong = cycle(FORMS), []
    for p in PROGRAMS:
        codes = [p.code.replace(*slip) for slip in p.slips] + [f"1 / 0\n{p.code}"]
        codes += [f"print('Answer:')\n{p.code}"] if p in READ else []
        wrong += [(next(form)(code), p.tests) for code in codes]
    return wrong


def others_than(score, answers):
    """Return the answers that have another score, and why."""
    results = [
        (text, python_tests("", text, tests, None, sandbox="process")) for text, tests in answers
    ]
    return [(text, result["error"]) for text, result in results if result["score"] != score]


def test_right_programs_score_one_and_wrong_ones_nothing(one_interpreter):
    assert not others_than(1.0, right_answers(2))
    assert not others_than(0.0, wrong_answers())


def test_a_new_interpreter_for_each_program_gives_the_same_scores():
    assert not others_than(1.0, right_answers(1)[::9])
    assert not others_than(0.0, wrong_answers()[::30])


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rewards/code.py", "jaxrl_llm/sandbox")
def test_each_program_in_an_interpreter_of_its_own():
    assert not others_than(1.0, right_answers(1))
    assert not others_than(0.0, wrong_answers())
