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
    reads(
        "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])",
        "abc\nxyz\n",
        "cba\nzyx\n",
        ("[::-1]", "[::1]"),
        ("print(", "print(end=' ', *"),
    ),
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
        "q = deque()\n"
        "for _ in range(int(input())):\n"
        "    op, *x = input().split()\n"
        "    if op == 'push':\n"
        "        q.append(x[0])\n"
        "    else:\n"
        "        print(q.popleft())",
        "4\npush a\npush b\npop\npop",
        "a\nb",
        ("popleft", "pop"),
        ("deque()", "set()"),
    ),
    reads(
        "(c, n), = Counter(input()).most_common(1)\nprint(c, n)",
        "abbb",
        "b 3",
        ("print(c, n)", "print(n, c)"),
    ),
    reads(
        "h = []\n"
        "for x in map(int, input().split()):\n"
        "    heapq.heappush(h, x)\n"
        "print(*[heappop(h) for _ in range(len(h))])",
        "3 1 2",
        "1 2 3",
        ("heappop(h)", "h.pop()"),
        (", x)", ", -x)"),
    ),
    reads(
        "xs = sorted(map(int, input().split()))\nprint(bisect_left(xs, 5), bisect.bisect(xs, 5))",
        "9 5 1 5",
        "1 3",
        ("bisect_left", "bisect_right"),
    ),
    reads(
        "d = defaultdict(list)\n"
        "for w in input().split():\n"
        "    d[len(w)].append(w)\n"
        "for k in sorted(d):\n"
        "    print(k, *d[k])",
        "a bb c",
        "1 a c\n2 bb",
        ("sorted(d)", "[1]"),
        ("*d[k]", "d[k]"),
    ),
    reads(
        "def depth(n):\n    return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(int(input())))",
        "30000",
        "30000",
        ("1 + depth", "2 + depth"),
        ("n == 0", "n == -1"),
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
        "def fib():\n"
        "    a, b = 0, 1\n"
        "    while True:\n"
        "        yield a\n"
        "        a, b = b, a + b\n\n"
        "print(*islice(fib(), int(input())))",
        "7",
        "0 1 1 2 3 5 8",
        ("yield a", "yield b"),
        ("*islice", "islice"),
    ),
    reads(
        "from dataclasses import dataclass, field\n\n\n"
        "@dataclass(order=True)\n"
        "class Item:\n"
        "    key: int\n"
        "    name: str = field(compare=False)\n"
        "    tags: List[str] = field(default_factory=list, compare=False)\n\n\n"
        "items = [Item(int(k), v) for v, k in (w.split(':') for w in input().split())]\n"
        "print(min(items).name)",
        "a:3 b:1",
        "b",
        ("min(", "max("),
        (".name", ""),
    ),
    reads(
        "print(*sorted(map(''.join, permutations(input()))))",
        "aba",
        "aab aab aba aba baa baa",
        ("sorted", "set"),
    ),
    reads(
        "print(list(accumulate(map(int, input().split()))))",
        "1 2 3",
        "[1, 3, 6]",
        ("list", "tuple"),
    ),
    reads(
        "print(len(list(combinations(range(int(input())), 2))))", "5", "10", (", 2)", ", 3 - 2)")
    ),
    reads(
        "print(reduce(operator.mul, map(int, input().split())))", "2 3 4", "24", (".mul", ".add")
    ),
    reads(
        "@lru_cache(None)\n"
        "def ways(n):\n"
        "    return 1 if n < 2 else ways(n - 1) + ways(n - 2)\n"
        "print(ways(int(input())))",
        "80",
        "37889062373143906",
        ("n < 2", "n < 1"),
        ("ways(n - 2)", "1"),
    ),
    reads(
        "a, b = map(int, input().split())\nprint(gcd(a, b), lcm(a, b), isqrt(a), comb(a, 2))",
        "12 8",
        "4 24 3 66",
        ("gcd", "lcm"),
    ),
    reads(
        "print(ascii_lowercase.index(input()) + len(string.digits))", "c", "12", ("lower", "upper")
    ),
    reads(
        "print(re.sub(r'\\d+', '#', input()), *findall('[a-c]', 'abz'))",
        "x12y3",
        "x#y# a b",
        ("\\d+", "\\d"),
    ),
    reads(
        "day = datetime.date(*map(int, input().split('-')))\nprint(day + timedelta(days=1))",
        "2024-02-28",
        "2024-02-29",
        ("days=1", "days=2"),
    ),
    reads(
        "class Job:\n"
        "    def __init__(self, w):\n"
        "        self.w = w\n\n"
        "    def __lt__(self, other):\n"
        "        return self.w > other.w\n\n\n"
        "h = [Job(int(w)) for w in input().split()]\n"
        "heapify(h)\n"
        "print(heappop(h).w)",
        "4 9 2",
        "9",
        ("self.w > other", "self.w < other"),
        ("heappop(h).w", "h[-1].w"),
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
    reads(
        "total = 0\n"
        "while True:\n"
        "    try:\n"
        "        total += int(input())\n"
        "    except EOFError:\n"
        "        break\n"
        "print(total)",
        "1\n2\n3",
        "6",
        ("except EOFError", "except KeyError"),
        ("total +=", "total ="),
    ),
    reads("print(len(open(0).read().split()))", "a b\nc", "3", (".split()", "")),
    reads(
        "with open('/dev/stdin') as f:\n    print(f.readline().strip().upper())",
        "ab\nc",
        "AB",
        (".upper()", ""),
    ),
    reads(
        "import sys\nprint(sys.stdin.buffer.read().count(b'a'))", "banana", "3", ("b'a'", "b'n'")
    ),
    reads(
        "stdout.write('\\n'.join(stdin.readline().split()) + '\\n')",
        "a b",
        "a\nb",
        ("'\\n'.", "' '."),
    ),
    reads(
        "print(*input().split(), sep=', ', end='.')", "a b", "a, b.", ("', '", "' '"), ("'.'", "''")
    ),
    reads("for i in range(3):\n    print(i, end='')\nprint()", "", "012", ("end=''", "end=' '")),
    reads("print(input() == 'ab', int(input()) + 1)", "ab\r\n4\r\n", "True 5", ("'ab'", "'ab\\r'")),
    reads("print('x ')\nprint()\nprint(' y')", "", "x\n\ny  \n\n", ("' y'", "'xy'")),
    reads("print(int(input()) + int(input()))", ["1", "2"], ["3"], ("+", "*")),
    reads(
        "s = 'a\u2028b\x0cc\u001cd'\nprint(len(s))\n\x0c\nprint(2)",
        "",
        "7\n2",
        ("\u001cd", "\u001c"),
    ),
    reads(
        "match input().split():\n"
        "    case ['go', way]:\n"
        "        print(f'{way=}')\n"
        "    case _:\n"
        "        print('what')",
        "go up",
        "way='up'",
        ("'go'", "'run'"),
        ("way=}", "way}"),
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
    reads(
        "def counter():\n"
        "    n = 0\n\n"
        "    def up():\n"
        "        nonlocal n\n"
        "        n += 1\n"
        "        return n\n"
        "    return up\n\n\n"
        "up = counter()\n"
        "up()\n"
        "print(up())",
        "",
        "2",
        ("n += 1", "n += 2"),
        ("nonlocal n", "n = 5"),
    ),
    reads(
        "best = 0\n\n"
        "def take(x):\n"
        "    global best\n"
        "    best = max(best, x)\n\n"
        "for x in map(int, input().split()):\n"
        "    take(x)\n"
        "print(best)",
        "3 9 4",
        "9",
        ("    global best", "    best = 1"),
    ),
    reads("print('''a\n```\nb''')", "", "a\n```\nb", ("b'''", "c'''")),
    reads(
        "xs = input().split()\n"
        "xs.sort(key=cmp_to_key(lambda a, b: (a + b < b + a) - (a + b > b + a)))\n"
        "print(''.join(xs))",
        "3 30 34",
        "34330",
        ("(a + b < b + a)", "2 * (a + b > b + a)"),
    ),
    reads(
        "class Broken(Exception):\n"
        "    pass\n\n\n"
        "try:\n"
        "    raise Broken(input())\n"
        "except Broken as error:\n"
        "    print('caught', error)\n"
        "finally:\n"
        "    print('end')",
        "x",
        "caught x\nend",
        ("except Broken", "except KeyError"),
        ("'end'", "'End'"),
    ),
    reads(
        "out = StringIO()\nprint(input(), file=out)\nprint(out.getvalue().strip() * 2)",
        "ab",
        "abab",
        ("* 2", "* 3"),
    ),
    reads(
        "d = json.loads(input())\nprint(json.dumps(d['b'], sort_keys=True), loads('[1]'))",
        '{"b": {"z": 1, "a": 2}}',
        '{"a": 2, "z": 1} [1]',
        ("sort_keys=True", "indent=2"),
    ),
    reads(
        "random.seed(1)\n"
        "xs = list(range(int(input())))\n"
        "shuffle(xs)\n"
        "print(sorted(xs) == list(range(9)), randint(3, 3))",
        "9",
        "True 3",
        ("(3, 3)", "(4, 4)"),
    ),
    reads(
        "xs = [*map(int, input().split())]\nprint(mean(xs), statistics.median(xs))",
        "1 2 6",
        "3 2",
        ("mean(xs)", "max(xs)"),
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
        "t = int(input())\n"
        "for case in range(1, t + 1):\n"
        "    n = int(input())\n"
        "    print(f'Case #{case}: {n * n}')",
        "2\n3\n4",
        "Case #1: 9\nCase #2: 16",
        ("range(1, t + 1)", "range(t)"),
    ),
    reads(
        "exec('y = sqrt(int(input()))')\nprint(eval('floor(y)'), globals()['y'])",
        "16",
        "4 4.0",
        ("sqrt", "abs"),
    ),
    reads(
        "class P(NamedTuple):\n    x: int\n    y: Optional[int] = None\n\nprint(P(int(input())))",
        "3",
        "P(x=3, y=None)",
        ("= None", "= 0"),
    ),
    reads(
        "input = sys.stdin.readline\nn = int(input())\nprint(n, input().strip())",
        "3\nab\n",
        "3 ab",
        (".strip()", "[1:]"),
    ),
    reads(
        "import numpy as np\nprint(np.cumsum(np.array(input().split(), dtype=int)).tolist())",
        "1 2 3",
        "[1, 3, 6]",
        (".tolist()", ""),
    ),
    reads(
        "count = Counter\n"
        "match = 3\n"
        "sub = lambda x: x - match\n"
        "print(sub(int(input())), count('aa')['a'])",
        "5",
        "2 2",
        ("x - match", "x + match"),
    ),
    reads(
        "print(inf > int(input()), -math.inf, pi > 3, nan != nan)",
        "5",
        "True -inf True True",
        ("inf > int", "inf < int"),
    ),
    reads(
        "n = 10 ** 18 + int(input())\nprint(n)", "1", "1000000000000000001", ("10 ** 18", "1e18")
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
        "class Solution:\n"
        "    def f(self, nums: List[int], target: int) -> List[int]:\n"
        "        seen: Dict[int, int] = {}\n"
        "        for i, x in enumerate(nums):\n"
        "            if target - x in seen:\n"
        "                return [seen[target - x], i]\n"
        "            seen[x] = i\n"
        "        return []",
        "[2, 7, 11]\n9",
        "[0, 1]",
        ("target - x in", "x in"),
        ("[seen[target - x], i]", "{seen[target - x], i}"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, s: str) -> Optional[str]:\n"
        "        return next((c for c, n in Counter(s).items() if n == 1), None)",
        '"aab"',
        '"b"',
        ("n == 1", "n == 2"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, s: str) -> Optional[str]:\n"
        "        return None if s else s",
        '"a"',
        "null",
        ("None if", "0 if"),
        ("None if", "'null' if"),
    ),
    called(
        "class Solution:\n    def f(self, n: int) -> bool:\n        return n & (n - 1) == 0",
        "8",
        "true",
        ("== 0", "!= 0"),
        ("return n & (n - 1) == 0", "return 1"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, xs: List[float]) -> float:\n"
        "        return sum(xs) / len(xs)",
        "[1.0, 2.0, 2.0]",
        "1.6666666667",
        ("len(xs)", "(len(xs) + 1)"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, m: List[List[int]]) -> List[List[int]]:\n"
        "        return [*zip(*m)]",
        "[[1, 2], [3, 4]]",
        "[[1, 3], [2, 4]]",
        ("*zip(*m)", "*m"),
        ("[*zip(*m)]", "zip(*m)"),
    ),
    called(
        "class Solution:\n    def f(self, a, b):\n        return a + b, a * b",
        [2, 3],
        [[5, 6]],
        ("a * b", "a - b"),
    ),
    called(
        "class Solution:\n"
        "    MOD = 10**9 + 7\n\n"
        "    def f(self, n: int) -> int:\n"
        "        return pow(2, n, self.MOD)",
        "100",
        "976371285",
        ("+ 7", "+ 9"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, n: int) -> int:\n"
        "        @cache\n"
        "        def go(i):\n"
        "            return 1 if i <= 1 else go(i - 1) + go(i - 2)\n\n"
        "        return go(n)",
        "50",
        "20365011074",
        ("i <= 1", "i <= 2"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, nums: List[int], k: int) -> List[int]:\n"
        "        return nlargest(k, nums) + heapq.nsmallest(1, nums)",
        "[3, 1, 2]\n2",
        "[3, 2, 1]",
        ("nlargest", "nsmallest"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, nums: List[int]) -> int:\n"
        "        best = -inf\n"
        "        for x in nums:\n"
        "            best = max(best, x)\n"
        "        return best",
        "[-3, -2]",
        "-2",
        ("max(best", "min(best"),
        ("-inf", "0"),
    ),
    called(
        "class Solution:\n"
        "    def f(self, words: List[str]) -> List[List[str]]:\n"
        "        groups = defaultdict(list)\n"
        "        for w in words:\n"
        "            groups[tuple(sorted(w))].append(w)\n"
        "        return sorted(groups.values())",
        '["ab", "ba", "c"]',
        '[["ab", "ba"], ["c"]]',
        ("sorted(w)", "w"),
        ("return sorted(groups.values())", "return groups"),
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
        "class Solution:\n"
        "    @staticmethod\n"
        "    def f(s: str) -> str:\n"
        "        return ''.join(sorted(s, reverse=True))",
        '"abc"',
        '"cba"',
        ("reverse=True", "reverse=False"),
    ),
    called(
        "import numpy as np\n\n\ndef f(xs):\n    return np.array(xs).sum()",
        "[1, 2]",
        "3",
        (".sum()", ".max()"),
        (".sum()", ""),
    ),
    called(
        "import numpy as np\n\n\n"
        "def f(xs):\n"
        "    return [np.int64(x) for x in xs] + [np.bool_(True), np.float32(0.5)]",
        "[1, 2]",
        "[1, 2, true, 0.5]",
        ("True", "False"),
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
        "def f(*xs, start=0):\n    return reduce(lambda a, b: a + b, xs, start)",
        [1, 2, 3],
        6,
        ("a + b", "a * b"),
    ),
    called(
        "def f(n):\n"
        "    def go(n):\n"
        "        return n if n == 0 else 1 + go(n - 1)\n"
        "    return go(n)",
        "50000",
        "50000",
        ("1 + go", "go"),
    ),
    called(
        "def f(text):\n    return [len(text), text.upper()]",
        '"a\u2028b"',
        '[3, "A\u2028B"]',
        (".upper()", ""),
    ),
    called(
        "def f(xs):\n    xs.sort(key=itemgetter(1))\n    return xs",
        [[[1, 3], [2, 2]]],
        [[2, 2], [1, 3]],
        ("itemgetter(1)", "itemgetter(0)"),
    ),
    called(
        "from enum import IntEnum\n\n\n"
        "class Color(IntEnum):\n"
        "    RED = 3\n\n\n"
        "def f(x):\n"
        "    return Color(x)",
        "3",
        "3",
        ("return Color(x)", "return Color(x).name"),
    ),
    called(
        "f = lambda d: {k: v + 1 for k, v in d.items()}",
        '{"a": 1}',
        '{"a": 2}',
        ("v + 1", "v"),
        ("k: v", "k * 2: v"),
    ),
    called(
        "def f(s):\n    return deque(s, maxlen=2).pop()",
        '"abc"',
        '"c"',
        (".pop()", ".popleft()"),
        (".pop()", ""),
    ),
    called(
        "def f(xs):\n    return list(chain.from_iterable(xs))",
        [[[1], [2]]],
        [1, 2],
        ("list(chain.from_iterable(xs))", "chain.from_iterable(xs)"),
        ("list(", "set("),
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
    named(
        "pow",
        "def pow(x: float, n: int) -> float:\n    return x ** n",
        "2.0\n3",
        "8.0",
        ("** n", "* n"),
        ("def pow", "def power"),
    ),
    named(
        "reduce",
        "class Solution:\n    def reduce(self, xs):\n        return reduce(mul, xs)",
        "[2, 3]",
        "6",
        ("mul", "add"),
        ("def reduce", "def fold"),
    ),
    named(
        "add",
        "def add(a, b):\n    return a + b",
        "1\n2",
        "3",
        ("a + b", "a - b"),
        ("def add", "def plus"),
    ),
    named(
        "sorted",
        "def sorted(xs):\n    return xs[::-1]",
        "[1, 2]",
        "[2, 1]",
        ("[::-1]", ""),
        ("def sorted", "def sort"),
    ),
]

ASSERTED = [
    asserted(
        "def f(xs):\n    return sum(x * x for x in xs)", "assert f([1, 2]) == 5", ("x * x", "x")
    ),
    asserted(
        "def f(s):\n    return Counter(s).most_common(1)[0][0]",
        "assert f('abb') == 'b'",
        ("[0][0]", "[0]"),
    ),
    asserted(
        "def f(a, b):\n    return set(a) & set(b)", "assert f([1, 2], [2, 3]) == {2}", ("&", "|")
    ),
    asserted(
        "def f(r):\n    return pi * r ** 2",
        "import math\nassert math.isclose(f(2), 12.566370614359172)",
        ("** 2", "* 2 + 1"),
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
