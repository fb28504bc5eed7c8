"""A task that needs a program, not an expression: its rows, and a teacher who writes bugs."""

import math
import random
from typing import NamedTuple

from jaxrl_llm.configs.tasks._rows import Messages, chat_message, task_row
from jaxrl_llm.data.rows import Row

TOLD_OF_A_BROKEN_PROGRAM = "Traceback (most rece ...  invalid syntax"
"""What Python says of a program without its colon, the middle left out, of 40 tokens."""


class TaughtProgram(NamedTuple):
    """A program and what it prints."""

    source: str
    value: str


class Code(NamedTuple):
    """Answer by a program with a loop, which the tool `python` runs.

    `c7372:3|7=` asks how many numbers from 1 to 7371 can be divided by 3 or 7, `d347^52=` for the
    sum of the digits of 347 to the power of 52. The teacher guesses; or it writes a program, which
    may lack a colon, so that it fails, or have a bug, so that it tells another number. Told of a
    failure the teacher writes another program or guesses, by half; told a number it may guess after
    all.

    Attributes:
        guess: the chance to guess without a program.
        broken: the chance that a program fails.
        wrong: the chance that one that does not fail has a bug.
        forget: the chance to guess after a number was told.
    """

    guess: float = 0.4
    broken: float = 0.2
    wrong: float = 0.7
    forget: float = 0.25

    def row(self, number: int, rng: random.Random) -> Row:
        """Draw a problem of one kind or the other."""
        if rng.random() < 0.5:
            below, (first, second) = rng.randint(1000, 9999), rng.sample(range(2, 10), 2)
            prompt, program = f"c{below}:{first}|{second}=", count_program(below, first, second)
        else:
            base, exponent = rng.randint(100, 999), rng.randint(10, 99)
            prompt, program = f"d{base}^{exponent}=", digits_program(base, exponent)
        return task_row("code", prompt, program.value)

    def chat(self, row: Row, rng: random.Random) -> Messages:
        """Answer with what a program tells, or with a guess."""
        prompt, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        chat = list(row["prompt"])
        guessed = str(rng.randrange(10 ** (len(answer) - 1), 10 ** len(answer)))
        if rng.random() < self.guess:
            return [*chat, chat_message("assistant", guessed)]
        while True:
            fails = rng.random() < self.broken
            bug = 0 if fails or rng.random() >= self.wrong else rng.randint(1, 2)
            source, value = taught_program(prompt, bug)
            source = source.replace("):", ")") if fails else source
            chat.append(chat_message("assistant", f"[python(code={source!r})]"))
            chat.append(chat_message("tool", TOLD_OF_A_BROKEN_PROGRAM if fails else value))
            if not fails:
                forgets = rng.random() < self.forget
                return [*chat, chat_message("assistant", guessed if forgets else value)]
            if rng.random() < 0.5:
                return [*chat, chat_message("assistant", guessed)]


def taught_program(prompt: str, bug: int = 0) -> TaughtProgram:
    """Return the program for a problem, as one of `Code`'s rows states it.

    Args:
        prompt: of the row.
        bug: 0 for none; 1 or 2 for one of the two that the teacher knows.
    """
    kind, problem = prompt[0], prompt[1:-1]
    if kind == "c":
        below, _, divisors = problem.partition(":")
        return count_program(int(below), *map(int, divisors.split("|")), bug=bug)
    return digits_program(*map(int, problem.split("^")), bug=bug)


def count_program(below: int, first: int, second: int, *, bug: int = 0) -> TaughtProgram:
    """Count the positive numbers below one that can be divided by one of two others.

    Args:
        below: numbers are smaller than this one.
        first: a divisor.
        second: another one.
        bug: 0 for none; 1 counts 0, too; 2 counts what both divide.

    >>> print(count_program(10, 2, 3).source)
    c=0
    for i in range(1,10):c+=i%2<1 or i%3<1
    print(c)
    >>> count_program(10, 2, 3).value, count_program(10, 2, 3, bug=2).value
    ('6', '1')
    """
    start, word = "" if bug == 1 else "1,", "and" if bug == 2 else "or"
    both = (below - 1) // math.lcm(first, second)
    either = (below - 1) // first + (below - 1) // second - both
    value = both if bug == 2 else either + (bug == 1)
    loop = f"for i in range({start}{below}):c+=i%{first}<1 {word} i%{second}<1"
    return TaughtProgram(f"c=0\n{loop}\nprint(c)", str(value))


def digits_program(base: int, exponent: int, *, bug: int = 0) -> TaughtProgram:
    """Add the digits of a power.

    Args:
        base: of the power.
        exponent: of the power.
        bug: 0 for none; 1 counts the digits; 2 takes the product for the power.

    >>> print(digits_program(347, 2).source)
    s=0
    for d in str(347**2):s+=int(d)
    print(s)
    >>> digits_program(347, 2).value, digits_program(347, 2, bug=1).value  # of 120409
    ('16', '6')
    """
    sign, added = "*" if bug == 2 else "**", "1" if bug == 1 else "int(d)"
    digits = str(base * exponent if bug == 2 else base**exponent)
    value = len(digits) if bug == 1 else sum(map(int, digits))
    return TaughtProgram(
        f"s=0\nfor d in str({base}{sign}{exponent}):s+={added}\nprint(s)", str(value)
    )
