import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rewards.code import last_python_block, python_tests, read_tests
from jaxrl_llm.rewards.runner import check_reward_function
from jaxrl_llm.rewards.worker import Unscored
from jaxrl_llm.sandbox import process
from tests.sandboxes import HAS_LANDLOCK

ADD = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = {"inputs": ["1 2\n", "3 4\n", "5 -5"], "outputs": ["3\n", "7", "0"]}


def reply(code):
    return f"I think:\n```python\n{code}\n```\nDone."


def score(code, tests, *, text=None, extra=None, **keywords):
    if not HAS_LANDLOCK:
        pytest.skip("the level process needs Landlock")
    keywords = {"sandbox": "process", **keywords}
    return python_tests("code", text or reply(code), tests, extra, **keywords)


def test_what_is_printed_is_compared_for_each_input():
    for tests in (PAIRS, json.dumps(PAIRS)):
        assert score(ADD, tests) == {
            **{"score": 1.0, "acc": 1.0, "pred": None, "passed": 3.0, "tests": 3.0, "error": ""}
        }
    wrong = ADD.replace("a + b", "abs(a) + abs(b)")
    result = score(wrong, PAIRS)
    assert result["score"] == pytest.approx(2 / 3)
    assert (result["acc"], result["error"]) == (0.0, "test 2: got '10\\n'")
    assert score(wrong, PAIRS, partial=False)["score"] == 0.0
    assert score(ADD, PAIRS, partial=False)["score"] == 1.0
    assert score(wrong, PAIRS, max_tests=2)["score"] == 1.0


def test_what_a_function_returns_is_compared_for_each_call():
    method = "class Solution:\n    def extend(self, xs, x):\n        return (*xs, x)"
    code, apps = "def extend(xs, x):\n    return xs + [x]", [[[1, 2], 3], [[4], 4]]
    for inputs, outputs in [
        (apps, [[1, 2, 3], [4, 4]]),  # APPS: lists of arguments
        (apps, [[[1, 2, 3]], [[4, 4]]]),  # the same, the result in a list
        (["[1, 2]\n3", "[4]\n4"], ["[1, 2, 3]", "[4, 4]"]),  # LiveCodeBench: JSON by line
    ]:
        tests = {"fn_name": "extend", "inputs": inputs, "outputs": outputs}
        assert score(code, tests)["score"] == score(method, tests)["score"] == 1.0
    assert score(code.replace("extend", "other"), tests)["score"] == 0.0
    assert score(code, {**tests, "outputs": [*outputs[:-1], "[4, 5]"]})["score"] == 0.5


def test_assert_statements_must_be_reached_and_hold():
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    for wrapped in (tests, {"assert_case": tests}, json.dumps(tests)):
        assert score("def f(x): return 2", wrapped)["score"] == 0.5
    assert score("def f(x): return", tests)["error"].startswith("test 0: AssertionError")


def test_programs_that_fail_score_nothing_and_take_the_time_of_one_test():
    for code, error in (("x = [0] * 10**9", "MemoryError"), ("x =", "SyntaxError")):
        result = score(code, PAIRS, memory_mb=64)
        assert result["passed"] == 0
        assert result["error"].startswith(f"test 0: {error}")
    assert score("print('3')\n'7'", PAIRS)["passed"] == 1
    code = "if input() == 'a':\n    while True: pass\nprint(1)"  # no further test is run
    tests = {"inputs": ["b", "a", "b"], "outputs": ["1"] * 3}
    result = score(code, tests, cpu_s=1.0)
    assert result["passed"] == 1.0 and result["error"].startswith("test 1: took")


def test_a_program_has_only_its_own_names():
    tests = {"inputs": [""], "outputs": [""]}
    names = "print([n for n in globals() if not n.startswith('__')], __name__)"
    got = score(f"{names}\nprint(Counter, copy)", tests)["error"]
    assert "[] __main__" in got
    assert "<class 'collections.Counter'> <module 'copy'" in got


def test_a_program_can_not_print_what_a_call_should_return():
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
    assert score("def f(x): return 3\nprint(2)", tests)["score"] == 0.0
    assert score("def f(x):\n    print(5)\n    return 2", tests)["score"] == 1.0
    assert score("import sys\nprint(2)\nsys.exit(0)", tests)["passed"] == 0


def test_long_output_is_compared_to_its_end():
    tests = {"inputs": [""], "outputs": ["\n".join(map(str, range(30_000)))]}
    code = "for i in range(30000): print(i)"
    assert score(code, tests)["score"] == 1.0
    assert score(code + "\nprint(1)", tests)["score"] == 0.0
    assert score("for i in range(30000): print(i if i != 15000 else 0)", tests)["score"] == 0.0


BLOCKS = {
    "b": [
        *("```python\na\n```\n```py\nb\n```", "```\na\n```\n```\nb\n```"),
        *("```\na\n```\n```python\nb\n```\n```\nc\n```", "```python\na\n```python\nb\n```"),
        "```python\na = '''\n```\nNo:\n```python\nb\n```",
    ],
    "a": [
        *("```\na\n```", "```Python\na\n```\n```json\nb\n```\n"),
        *("```python\na\n```\n```python\nb", "```python\na\n```\nprints\n```\nb\n```"),
        *('```python title="a.py"\na\n```', "```{.python .numbered}\na\n```"),
        *("```{python}\na\n```", "```python:main.py\na\n```", "~~~python\na\n~~~"),
        *("```python\na\n`````", "```python\na```\nb", "<answer>\n```python\na\n```</answer>"),
        *("```python\na\n``` done\nb\n", "```python\na\n```.\n```\nb\n```"),
        *("It is ```python\na\n```", "It is ```x```.\n```python\na\n```"),
        *("```markdown\nSo:\n```python\na\n```\n```", "10) ~~~~ python\n    a\n    ~~~~"),
        "```python\r\na\r\n```\r\n",
    ],
    "a = '''\n````\n'''": ["```python\na = '''\n````\n'''\n```"],
    None: [
        *("```python\na", "no code", "```bash\nls\n```", "```pythonic\na\n```"),
        "````python\na\n```",
    ],
    "a\n```": ["~~~\na\n```\n~~~"],
    "'''\n```\n'''": ["````python\n'''\n```\n'''\n````"],
    "if a:\n    b": [
        "```python\nif a:\n    b\n    ```",
        "1. So:\n\n   ```python\n   if a:\n       b\n   ```\n2. Done",
        "   ```python\nif a:\n    b\n   ```",
    ],
    "    # so\nif a:\n    b": ["```python\n    # so\nif a:\n    b\n```"],
    'def f():\n    """\n    ```python\n    f()\n    ```\n    """': [
        '```python\ndef f():\n    """\n    ```python\n    f()\n    ```\n    """\n```'
    ],
    "'''\n```\n'''\na": ["```python\n'''\n```\n'''\na\n```\n"],
    "a  # ```\nb": ["```python\na  # ```\nb\n```"],
    "a = '```'\nb": ["```python\na = '```'\nb\n```"],
    "it = \"'''\"": ["```python\nit = \"'''\"\n```\n'''"],
    "a = '\u2028\x0c\x1c\x85'": ["```python\na = '\u2028\x0c\x1c\x85'\n```"],
}
"""Texts, by the program that they hold."""


def test_the_last_whole_block_of_python_is_the_answer():
    pairs = [(text, code) for code, texts in BLOCKS.items() for text in texts]
    assert not [text for text, code in pairs if last_python_block(text) != code]


@given(st.text(st.characters(exclude_characters="`~\"'\r", exclude_categories=["Cs"]), min_size=1))
def test_a_program_without_marks_is_found_as_it_is(program):
    program = f"x\n{program}"
    for text in (f"```python\n{program}\n```", f"~~~py\r\n{program}\r\n~~~\r\n```\n7\n```"):
        assert last_python_block(text) == program


def test_a_block_is_found_in_a_time_that_grows_as_its_answer():
    """With work that grows as the square, each of these took minutes."""
    for part in ("```python\n'''\n", "`", "``` ", "```python\n", "- ", "\\", "'''\n```\n", "~~~\n"):
        last_python_block("```python\n" + part * (30_000 // len(part)) + "x`\n")


def test_an_episode_is_scored_by_its_last_turn():
    told, extra = reply("print('wrong')"), {"last_answer": reply(ADD)}
    assert score("", PAIRS, text=told, extra=extra)["score"] == 1.0
    assert score("", PAIRS, text="nothing")["error"] == "no block of Python"


def test_a_row_without_tests_is_an_error():
    for tests in [
        *("{", "[" * 10**5, "7", 7, None, {}, [], [1], {"inputs": 1, "outputs": 1}),
        *({"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}),
    ]:
        with pytest.raises(ValueError):
            read_tests(tests)


def test_infrastructure_that_fails_leaves_the_answer_unscored(monkeypatch):
    def no_session(*_):
        raise OSError("too many open files")

    score(ADD, PAIRS)
    monkeypatch.setattr(process, "CodeSession", no_session)
    with pytest.raises(Unscored, match="files"):
        score(ADD, PAIRS)
    with pytest.raises(Unscored, match="http://localhost:1/"):
        score(ADD, PAIRS, sandbox="service", url="http://localhost:1", wall_s=0.5)


def test_what_can_not_be_run_is_refused_before_the_run():
    for keywords, named in [
        *(({}, "sandbox"), ({"sandbox": "docker"}, "docker"), ({"sandbox": "service"}, "url")),
        ({"sandbox": "expression"}, "programs"),
        ({"sandbox": "process", "memory": 1}, "memory_mb"),
        ({"sandbox": "process", "max_tests": 0}, "max_tests"),
    ]:
        with pytest.raises(ConfigError, match=named) as raised:
            check_reward_function(FunctionSpec("python_tests", keywords))
        assert raised.value.keys == ("reward.function",)


PROGRAMS = r"""
print(int(input()) * 2)
exit()
print('no')
#: "", "4", "8", ["exit()", "exit(3)"]
import sys

def main():
    n = int(input())
    if n < 0:
        print('neg')
        sys.exit(0)
    print(n)

if __name__ == '__main__':
    main()
#: "", "-3", "neg", ["sys.exit(0)", "sys.exit('neg')"]
exec('y = sqrt(int(input()))')
print(eval('floor(y)'), globals()['y'])
#: "", "16", "4 4.0", ["sqrt", "abs"]
import numpy as np

def f(xs):
    return np.array(xs).sum()
#: "f", "[1, 2]", "3", [".sum()", ""]
from fractions import Fraction

def f(n):
    return [Fraction(n, 2), Fraction(n)]
#: "f", "3", "[1.5, 3]", ["(n, 2)", "(n, 3)"]
from __future__ import annotations

class Solution:
    def f(self, tree: TreeNode | None, ys: list[int]) -> int | None:
        return ys[bisect_right(ys, 2)]
#: "f", "null\n[1, 2, 5]", "5", ["bisect_right", "bisect_left"]
from math import gcd
#: "gcd", "12\n8", "4", ["import gcd", "import lcm"]
def f(n: int) -> List[int]:
    return [i for i in range(2, n) if all(i % d for d in range(2, isqrt(i) + 1))]
#: "assert", null,
#: "def check(candidate):\n    assert candidate(12) == [2, 3, 5, 7, 11]\n\ncheck(f)",
#: ["isqrt(i) + 1", "isqrt(i)"]
print('3')
f = partial(max, 2)
if __name__ == '__main__':
    exit()
#: "assert", null, "assert f(1) == 2", ["max", "min"]
"""
"""Programs as people write them for tests of public data sets.

Behind each stands a list of: the name of the function that is called, or none; what is given; what
is expected; and a slip: a text in the program, and another with which it passes no test.
"""


def programs():
    """Return programs, their tests, and wrong ones."""
    for code, about in re.findall(r"(.*?)\n((?:#: [^\n]*\n)+)", PROGRAMS.lstrip(), re.DOTALL):
        name, given, expected, slip = json.loads(f"[{about.replace('#: ', '')}]")
        tests = {"inputs": [given], "outputs": [expected]} | ({"fn_name": name} if name else {})
        yield code, [expected] if name == "assert" else tests, code.replace(*slip)


def test_right_programs_score_one_and_wrong_ones_nothing(subtests):
    for code, tests, wrong in programs():
        with subtests.test(code):
            assert score(code, tests)["score"] == 1.0
            assert score(wrong, tests)["score"] == 0.0
