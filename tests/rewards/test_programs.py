import json
import re

from jaxrl_llm.rewards.code import python_tests
from tests.sandboxes import needs_landlock

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
exec('y = sqrt(int(input()))')
print(eval('floor(y)'), globals()['y'])
#: "", "16", "4 4.0", ["sqrt", "abs"]
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
    """Return the programs that have another score, and why."""
    results = [
        (code, python_tests("", f"```python\n{code}\n```", tests, None, sandbox="process"))
        for code, tests in answers
    ]
    return [(code, result["error"]) for code, result in results if result["score"] != score]


@needs_landlock
def test_right_programs_score_one_and_wrong_ones_nothing():
    assert not others_than(1.0, [(code, tests) for code, tests, _ in programs()])
    wrong = [(code.replace(*slips[-1]), tests) for code, tests, slips in programs()]
    wrong += [(f"print('Answer:')\n{code}", tests) for code, tests, _ in [*programs()][:3]]
    assert not others_than(0.0, wrong)
