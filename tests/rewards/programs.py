"""Programs as people write them for the forms of tests that public data sets have, and wrong ones.

Most use names that graders import before a program (`jaxrl_llm.rewards.code.MODULES`).
"""

from typing import Any, NamedTuple


class Program(NamedTuple):
    """A program that passes its tests.

    Attributes:
        code: of the program.
        tests: as a row has them.
        slips: each a text in it, and another in its place with which it passes no test.
    """

    code: str
    tests: Any
    slips: tuple[tuple[str, str], ...]


def reads(code: str, given: Any, expected: Any, *slips: tuple[str, str]) -> Program:
    """Return a program that reads its input and prints."""
    return Program(code, {"inputs": [given], "outputs": [expected]}, slips)


def called(code: str, given: Any, expected: Any, *slips: tuple[str, str]) -> Program:
    """Return a program whose function `f`, or that of its class `Solution`, is called."""
    return Program(code, {"fn_name": "f", "inputs": [given], "outputs": [expected]}, slips)


def named(name: str, code: str, given: str, expected: str, *slips: tuple[str, str]) -> Program:
    """Return a program whose function has the name of another function."""
    return Program(code, {"fn_name": name, "inputs": [given], "outputs": [expected]}, slips)


def asserted(code: str, statement: str, *slips: tuple[str, str]) -> Program:
    """Return a program for which a statement holds."""
    return Program(code, [statement], slips)


READ = [
    reads("a, b = map(int, input().split())\nprint(a + b)", "3 4\n", "7\n", ("a + b", "a - b")),
    reads("print(sum(map(int, sys.stdin.read().split())))", "1 2\n3", "6", ("sum", "max")),
    reads("print(int(input()) * 2)\nexit()\nprint('no')", "4", "8", ("exit()", "exit(3)")),
    reads(
        "if input() == 'q':\n    print('bye')\n    quit()\nprint(1)", "q", "bye", ("quit()", "0")
    ),
    reads(
        "import sys\n\n\n"
        "def main():\n"
        "    n = int(input())\n"
        "    if n < 0:\n"
        "        print('neg')\n"
        "        sys.exit(0)\n"
        "    print(n)\n\n\n"
        "if __name__ == '__main__':\n"
        "    main()",
        "-3",
        "neg",
        ("n < 0", "n > 0"),
        ("sys.exit(0)", "pass"),
        ("sys.exit(0)", "sys.exit('neg')"),
    ),
    reads("print('x' * int(input()))\nraise SystemExit", "3", "xxx", ("SystemExit", "KeyError")),
    reads(
        "print(10 ** int(input()))", "6000", "1" + "0" * 6000, ("10 **", "10 *"), ("))", ") - 1)")
    ),
    reads("print(factorial(int(input())) % 1_000_007)", "20", "794133", ("factorial", "int")),
    reads("n = int(input())\nprint(n / 3)", "1", "0.33333333", ("/ 3", "/ 3.001"), ("/ 3", "// 3")),
    reads("x = float(input())\nprint(f'{x:.2f} {x=}')", "2.5", "2.50 x=2.5", (".2f", ".0f")),
    reads(
        "(c, n), = Counter(input()).most_common(1)\nprint(c, n)",
        "abbb",
        "b 3",
        ("print(c, n)", "print(n, c)"),
    ),
    reads(
        "import sys, threading\n"
        "sys.setrecursionlimit(10**6)\n"
        "threading.stack_size(64 * 2**20)\n\n"
        "def main():\n"
        "    def go(n):\n"
        "        return n and 1 + go(n - 1)\n"
        "    print(go(int(input())))\n\n"
        "t = threading.Thread(target=main)\n"
        "t.start()\n"
        "t.join()",
        "20000",
        "20000",
        ("n and 1", "n and 0"),
    ),
    reads(
        "print(reduce(operator.mul, map(int, input().split())))", "2 3 4", "24", (".mul", ".add")
    ),
    reads(
        "print(re.sub(r'\\d+', '#', input()), *findall('[a-c]', 'abz'))",
        "x12y3",
        "x#y# a b",
        ("\\d+", "\\d"),
    ),
    reads(
        "n, m = map(int, input().split())\n"
        "g = [input() for _ in range(n)]\n"
        "seen, todo = {(0, 0)}, deque([(0, 0, 0)])\n"
        "while todo:\n"
        "    r, c, d = todo.popleft()\n"
        "    if (r, c) == (n - 1, m - 1):\n"
        "        print(d)\n"
        "        break\n"
        "    for y, x in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):\n"
        "        if 0 <= y < n and 0 <= x < m and g[y][x] == '.' and (y, x) not in seen:\n"
        "            seen.add((y, x))\n"
        "            todo.append((y, x, d + 1))\n"
        "else:\n"
        "    print(-1)",
        "3 3\n.#.\n.#.\n...\n",
        "4",
        ("d + 1", "d + 2"),
        ("== '.'", "== '#'"),
        ("print(d)", "print(d, d)"),
    ),
    reads("print(len(open(0).read().split()))", "a b\nc", "3", (".split()", "")),
    reads(
        "with open('/dev/stdin') as f:\n    print(f.readline().strip().upper())",
        "ab\nc",
        "AB",
        (".upper()", ""),
    ),
    reads(
        "print(*input().split(), sep=', ', end='.')", "a b", "a, b.", ("', '", "' '"), ("'.'", "''")
    ),
    reads("for i in range(3):\n    print(i, end='')\nprint()", "", "012", ("end=''", "end=' '")),
    reads("print(input() == 'ab', int(input()) + 1)", "ab\r\n4\r\n", "True 5", ("'ab'", "'ab\\r'")),
    reads("print(int(input()) + int(input()))", ["1", "2"], ["3"], ("+", "*")),
    reads(
        "s = 'a\u2028b\x0cc\u001cd'\nprint(len(s))\n\x0c\nprint(2)",
        "",
        "7\n2",
        ("\u001cd", "\u001c"),
    ),
    reads(
        "from fractions import Fraction\nprint(sum(Fraction(x) for x in input().split()))",
        "1/2 1/3",
        "5/6",
        ("sum", "max"),
    ),
    reads(
        "from decimal import Decimal\nprint(Decimal(input()) + Decimal('0.1'))",
        "0.2",
        "0.3",
        ("'0.1'", "'0.2'"),
    ),
    reads(
        "n = int(input(), 2)\nprint(n, bin(n & -n), n.bit_length(), f'{n ^ 1:b}')",
        "1010",
        "10 0b10 4 1011",
        ("n & -n", "n"),
    ),
    reads("print('''a\n```\nb''')", "", "a\n```\nb", ("b'''", "c'''")),
    reads(
        "out = StringIO()\nprint(input(), file=out)\nprint(out.getvalue().strip() * 2)",
        "ab",
        "abab",
        ("* 2", "* 3"),
    ),
    reads(
        "a = [[1]]\nb = deepcopy(a)\nc = copy.copy(a)\na[0].append(2)\nprint(b, c)",
        "",
        "[[1]] [[1, 2]]",
        ("deepcopy", "list"),
    ),
    reads(
        "import os\n"
        "import sys\n"
        "from io import BytesIO, IOBase\n\n\n"
        "class FastIO(IOBase):\n"
        "    def __init__(self, file):\n"
        "        self.fd = file.fileno()\n"
        "        self.buffer = BytesIO()\n"
        "        self.buffer.write(os.read(self.fd, 8192))\n"
        "        self.buffer.seek(0)\n"
        "        self.readline = lambda: self.buffer.readline().decode()\n\n\n"
        "sys.stdin = FastIO(sys.stdin)\n"
        "input = lambda: sys.stdin.readline().rstrip('\\r\\n')\n"
        "print(int(input()) + int(input()))",
        "20\n22\n",
        "42",
        ("+ int", "- int"),
        (".rstrip('\\r\\n')", "[:1]"),
    ),
    reads(
        "import asyncio\n\n\n"
        "async def one():\n"
        "    await asyncio.sleep(0)\n"
        "    return 1\n\n\n"
        "async def main():\n"
        "    print(sum(await asyncio.gather(one(), one())))\n\n\n"
        "asyncio.run(main())",
        "",
        "2",
        ("return 1", "return 2"),
    ),
    reads(
        "exec('y = sqrt(int(input()))')\nprint(eval('floor(y)'), globals()['y'])",
        "16",
        "4 4.0",
        ("sqrt", "abs"),
    ),
    reads(
        "input = sys.stdin.readline\nn = int(input())\nprint(n, input().strip())",
        "3\nab\n",
        "3 ab",
        (".strip()", "[1:]"),
    ),
    reads(
        "import builtins\nprint = builtins.print\nprint(sorted({*input()}), max('ab', key=ord))",
        "cab",
        "['a', 'b', 'c'] b",
        ("sorted", "len"),
    ),
]

CALLED = [
    called(
        "class Solution:\n    def f(self, nums: List[int]) -> int:\n        return sum(nums)",
        "[1, 2]",
        "3",
        ("sum(nums)", "nums"),
        ("sum(nums)", "str(sum(nums))"),
    ),
    called(
        "class Solution:\n    def f(self, n: int) -> bool:\n        return n & (n - 1) == 0",
        "8",
        "true",
        ("== 0", "!= 0"),
        ("return n & (n - 1) == 0", "return 1"),
    ),
    called(
        "class Solution:\n    def f(self, a, b):\n        return a + b, a * b",
        [2, 3],
        [[5, 6]],
        ("a * b", "a - b"),
    ),
    called(
        "class Solution:\n"
        "    def helper(self, x: int) -> int:\n"
        "        return x * x\n\n"
        "    def f(self, x: int) -> int:\n"
        "        print('debug', x)\n"
        "        return self.helper(x)",
        "4",
        "16",
        ("x * x", "x + x"),
        ("return self.helper(x)", "print(self.helper(x))"),
    ),
    called(
        "class Node:\n"
        "    def __init__(self, val=0, next=None):\n"
        "        self.val, self.next = val, next\n\n\n"
        "class Solution:\n"
        "    def f(self, xs: List[int]) -> List[int]:\n"
        "        head = None\n"
        "        for x in xs:\n"
        "            head = Node(x, head)\n"
        "        out = []\n"
        "        while head:\n"
        "            out.append(head.val)\n"
        "            head = head.next\n"
        "        return out",
        "[1, 2, 3]",
        "[3, 2, 1]",
        ("Node(x, head)", "Node(x)"),
        ("out.append(head.val)", "out.insert(0, head.val)"),
    ),
    called(
        "import numpy as np\n\n\ndef f(xs):\n    return np.array(xs).sum()",
        "[1, 2]",
        "3",
        (".sum()", ".max()"),
        (".sum()", ""),
    ),
    called(
        "from fractions import Fraction\n\n\ndef f(n):\n    return [Fraction(n, 2), Fraction(n)]",
        "3",
        "[1.5, 3]",
        ("(n, 2)", "(n, 3)"),
    ),
    called(
        "def f(n):\n    return 10 ** n",
        "5000",
        "1" + "0" * 5000,
        ("10 ** n", "10 ** n + 1"),
        ("10 ** n", "str(10 ** n)"),
    ),
    called(
        "def f(n):\n    return n\n\n\nif __name__ == '__main__':\n    print(f(int(input())))",
        "3",
        "3",
        ("return n", "return -n"),
    ),
    called(
        "def f(text):\n    return [len(text), text.upper()]",
        '"a\u2028b"',
        '[3, "A\u2028B"]',
        (".upper()", ""),
    ),
    called(
        "f = lambda d: {k: v + 1 for k, v in d.items()}",
        '{"a": 1}',
        '{"a": 2}',
        ("v + 1", "v"),
        ("k: v", "k * 2: v"),
    ),
    called(
        "from __future__ import annotations\n\n\n"
        "class Solution:\n"
        "    def f(self, tree: TreeNode | None, ys: list[int]) -> int | None:\n"
        "        return ys[bisect_right(ys, 2)]",
        "null\n[1, 2, 5]",
        "5",
        ("bisect_right", "bisect_left"),
    ),
    named("gcd", "from math import gcd", "12\n8", "4", ("import gcd", "import lcm")),
]

ASSERTED = [
    asserted(
        "def f(xs):\n    return sum(x * x for x in xs)", "assert f([1, 2]) == 5", ("x * x", "x")
    ),
    asserted(
        "def f(a, b):\n    return set(a) & set(b)", "assert f([1, 2], [2, 3]) == {2}", ("&", "|")
    ),
    asserted(
        "class Stack:\n"
        "    def __init__(self):\n"
        "        self.xs = []\n\n"
        "    def push(self, x):\n"
        "        self.xs.append(x)\n\n"
        "    def pop(self):\n"
        "        return self.xs.pop()",
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2",
        (".append(x)", ".insert(0, x)"),
    ),
    asserted(
        "def f(n: int) -> List[int]:\n"
        "    return [i for i in range(2, n) if all(i % d for d in range(2, isqrt(i) + 1))]",
        "def check(candidate):\n    assert candidate(12) == [2, 3, 5, 7, 11]\n\ncheck(f)",
        ("isqrt(i) + 1", "isqrt(i)"),
    ),
    asserted(
        "def f(x):\n    if x < 0:\n        raise ValueError(x)\n    return x ** 0.5",
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(4) == 2",
        ("ValueError", "KeyError"),
    ),
    asserted(
        "def f(t):\n    return tuple(map(sum, zip(*t)))",
        "assert f([(1, 2), (3, 4)]) == (4, 6)",
        ("tuple(", "list("),
    ),
    asserted(
        "print('3')\nf = partial(max, 2)\nif __name__ == '__main__':\n    exit()",
        "assert f(1) == 2",
        ("max", "min"),
    ),
]

PROGRAMS = READ + CALLED + ASSERTED
