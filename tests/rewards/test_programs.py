import json
import re
from itertools import cycle

from jaxrl_llm.rewards.code import python_tests
from tests.sandboxes import needs_landlock

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


PROGRAMS = r"""
a, b = map(int, input().split())
print(a + b)
#: "", "3 4\n", "7\n", ["a + b", "a - b"]
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
#: "", "-3", "neg", ["n < 0", "n > 0"], ["sys.exit(0)", "pass"],
#: ["sys.exit(0)", "sys.exit('neg')"]
n = int(input())
print(n / 3)
#: "", "1", "0.33333333", ["/ 3", "/ 3.001"], ["/ 3", "// 3"]
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(64 * 2**20)

def main():
    def go(n):
        return n and 1 + go(n - 1)
    print(go(int(input())))

t = threading.Thread(target=main)
t.start()
t.join()
#: "", "20000", "20000", ["n and 1", "n and 0"]
print(len(open(0).read().split()))
#: "", "a b\nc", "3", [".split()", ""]
import os
import sys
from io import BytesIO, IOBase

class FastIO(IOBase):
    def __init__(self, file):
        self.fd = file.fileno()
        self.buffer = BytesIO()
        self.buffer.write(os.read(self.fd, 8192))
        self.buffer.seek(0)
        self.readline = lambda: self.buffer.readline().decode()

sys.stdin = FastIO(sys.stdin)
input = lambda: sys.stdin.readline().rstrip('\r\n')
print(int(input()) + int(input()))
#: "", "20\n22\n", "42", ["+ int", "- int"], [".rstrip('\\r\\n')", "[:1]"]
import asyncio

async def one():
    await asyncio.sleep(0)
    return 1

async def main():
    print(sum(await asyncio.gather(one(), one())))

asyncio.run(main())
#: "", "", "2", ["return 1", "return 2"]
exec('y = sqrt(int(input()))')
print(eval('floor(y)'), globals()['y'])
#: "", "16", "4 4.0", ["sqrt", "abs"]
class Solution:
    def f(self, nums: List[int]) -> int:
        return sum(nums)
#: "f", "[1, 2]", "3", ["sum(nums)", "nums"], ["sum(nums)", "str(sum(nums))"]
import numpy as np

def f(xs):
    return np.array(xs).sum()
#: "f", "[1, 2]", "3", [".sum()", ".max()"], [".sum()", ""]
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
class Stack:
    def __init__(self):
        self.xs = []

    def push(self, x):
        self.xs.append(x)

    def pop(self):
        return self.xs.pop()
#: "assert", null, "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2",
#: [".append(x)", ".insert(0, x)"]
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
is expected; and slips: each a text in the program, and another with which it passes no test.
"""


def programs():
    """Return programs, their tests, and slips."""
    for code, about in re.findall(r"(.*?)\n((?:#: [^\n]*\n)+)", PROGRAMS.lstrip(), re.DOTALL):
        name, given, expected, *slips = json.loads(f"[{about.replace('#: ', '')}]")
        tests = {"inputs": [given], "outputs": [expected]} | ({"fn_name": name} if name else {})
        yield code, [expected] if name == "assert" else tests, slips


def others_than(score, answers):
    """Return the answers that have another score, and why."""
    results = [
        (text, python_tests("", text, tests, None, sandbox="process")) for text, tests in answers
    ]
    return [(text, result["error"]) for text, result in results if result["score"] != score]


@needs_landlock
def test_right_programs_score_one_and_wrong_ones_nothing():
    form = cycle(FORMS)
    assert not others_than(1.0, [(next(form)(code), tests) for code, tests, _ in programs()])
    wrong = [(code.replace(*slips[-1]), tests) for code, tests, slips in programs()]
    wrong += [(f"1 / 0\n{code}", tests) for code, tests, _ in [*programs()][::6]]
    wrong += [(f"print('Answer:')\n{code}", tests) for code, tests, _ in [*programs()][:3]]
    assert not others_than(0.0, [(next(form)(code), tests) for code, tests in wrong])
