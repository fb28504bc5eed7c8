"""Programs as people write them for the forms of tests that public data sets have, and wrong ones.

Behind each stands a comment, a list of: the name of the function that is called, or none; what is
given; what is expected; and slips: each a text in the program, and another in its place with which
it passes no test. Most use names that graders import (`jaxrl_llm.rewards.code.MODULES`).
"""

import json
import re
from typing import Any, NamedTuple


class Program(NamedTuple):
    """A program that passes its tests, and what to replace so that it passes none."""

    code: str
    tests: Any
    slips: list[tuple[str, str]]


def read(text: str) -> list[Program]:
    """Return the programs of a text."""
    programs = []
    for code, about in re.findall(
        r"(.*?)\n((?:#: [^\n]*\n)+)\n*", text.strip("\n") + "\n", re.DOTALL
    ):
        name, given, expected, *slips = json.loads(f"[{about.replace('#: ', '')}]")
        tests = {"inputs": [given], "outputs": [expected]} | ({"fn_name": name} if name else {})
        programs.append(Program(code, [expected] if name == "assert" else tests, slips))
    return programs


READ = read(
    r"""
a, b = map(int, input().split())
print(a + b)
#: "", "3 4\n", "7\n", ["a + b", "a - b"]
print(sum(map(int, sys.stdin.read().split())))
#: "", "1 2\n3", "6", ["sum", "max"]
print(int(input()) * 2)
exit()
print('no')
#: "", "4", "8", ["exit()", "exit(3)"]
if input() == 'q':
    print('bye')
    quit()
print(1)
#: "", "q", "bye", ["quit()", "0"]
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
print('x' * int(input()))
raise SystemExit
#: "", "3", "xxx", ["SystemExit", "KeyError"]
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
print(reduce(operator.mul, map(int, input().split())))
#: "", "2 3 4", "24", [".mul", ".add"]
print(re.sub(r'\d+', '#', input()), *findall('[a-c]', 'abz'))
#: "", "x12y3", "x#y# a b", ["\\d+", "\\d"]
print(len(open(0).read().split()))
#: "", "a b\nc", "3", [".split()", ""]
with open('/dev/stdin') as f:
    print(f.readline().strip().upper())
#: "", "ab\nc", "AB", [".upper()", ""]
print(*input().split(), sep=', ', end='.')
#: "", "a b", "a, b.", ["', '", "' '"], ["'.'", "''"]
for i in range(3):
    print(i, end='')
print()
#: "", "", "012", ["end=''", "end=' '"]
print(input() == 'ab', int(input()) + 1)
#: "", "ab\r\n4\r\n", "True 5", ["'ab'", "'ab\\r'"]
print(int(input()) + int(input()))
#: "", ["1", "2"], ["3"], ["+", "*"]
print('''a
```
b''')
#: "", "", "a\n```\nb", ["b'''", "c'''"]
out = StringIO()
print(input(), file=out)
print(out.getvalue().strip() * 2)
#: "", "ab", "abab", ["* 2", "* 3"]
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
input = sys.stdin.readline
n = int(input())
print(n, input().strip())
#: "", "3\nab\n", "3 ab", [".strip()", "[1:]"]
"""
)
CALLED = read(
    r"""
class Solution:
    def f(self, nums: List[int]) -> int:
        return sum(nums)
#: "f", "[1, 2]", "3", ["sum(nums)", "nums"], ["sum(nums)", "str(sum(nums))"]
class Solution:
    def f(self, n: int) -> bool:
        return n & (n - 1) == 0
#: "f", "8", "true", ["== 0", "!= 0"], ["return n & (n - 1) == 0", "return 1"]
class Solution:
    def f(self, a, b):
        return a + b, a * b
#: "f", [2, 3], [[5, 6]], ["a * b", "a - b"]
import numpy as np

def f(xs):
    return np.array(xs).sum()
#: "f", "[1, 2]", "3", [".sum()", ".max()"], [".sum()", ""]
from fractions import Fraction

def f(n):
    return [Fraction(n, 2), Fraction(n)]
#: "f", "3", "[1.5, 3]", ["(n, 2)", "(n, 3)"]
def f(n):
    return n

if __name__ == '__main__':
    print(f(int(input())))
#: "f", "3", "3", ["return n", "return -n"]
f = lambda d: {k: v + 1 for k, v in d.items()}
#: "f", "{\"a\": 1}", "{\"a\": 2}", ["v + 1", "v"], ["k: v", "k * 2: v"]
from __future__ import annotations

class Solution:
    def f(self, tree: TreeNode | None, ys: list[int]) -> int | None:
        return ys[bisect_right(ys, 2)]
#: "f", "null\n[1, 2, 5]", "5", ["bisect_right", "bisect_left"]
from math import gcd
#: "gcd", "12\n8", "4", ["import gcd", "import lcm"]
"""
)
ASSERTED = read(
    r"""
def f(xs):
    return sum(x * x for x in xs)
#: "assert", null, "assert f([1, 2]) == 5", ["x * x", "x"]
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
def f(x):
    if x < 0:
        raise ValueError(x)
    return x ** 0.5
#: "assert", null,
#: "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(4) == 2",
#: ["ValueError", "KeyError"]
print('3')
f = partial(max, 2)
if __name__ == '__main__':
    exit()
#: "assert", null, "assert f(1) == 2", ["max", "min"]
"""
)
PROGRAMS = READ + CALLED + ASSERTED
