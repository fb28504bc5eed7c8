"""Reward functions for competition math: an answer in a box or behind `Answer:`."""

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from math import factorial, isfinite
from numbers import Real
from typing import Any

ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
ANSWER_CHARS = 300
"""The end of a reply, in which `math_dapo` looks for its answer."""
MOST_TURN_BONUS = 0.4
MOST_BITS = 100_000
"""Of a number that is computed exactly; larger ones are left to Math-Verify."""
CLOSE = Fraction(1, 1000)
"""How far a decimal may be from the number that it rounds, relatively."""

GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,!; ]|\{,\}|,\\!|[ ~])\d{3})+(?!\d)")
"""An integer whose thousands are set apart by a space, or by a comma as LaTeX has it."""

IN_BASE = re.compile(r"([0-9][0-9A-Za-z]*)_(?:\{(\d+)\}|(\d))")
"""A numeral with its base."""


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    seconds: int = 5,
) -> dict[str, Any]:
    r"""Score a competition-math reply: its last \boxed{…} must equal the reference.

    Equal means the same text, or mathematically equal by
    https://github.com/huggingface/Math-Verify. An answer that it can't decide in time is wrong.

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: the reference answer in LaTeX, without the box.
        extra_info: not used.
        seconds: time limit for each of parsing and comparing. It works by a signal, so only in a
            process's main thread; 0 sets no limit.

    Returns:
        Score 1.0 for the right answer, else 0.0; `pred` is the text in the box.

    >>> math("MATH", r"so it is \boxed{0.5}", r"\frac{1}{2}", None)
    {'score': 1.0, 'acc': 1.0, 'pred': '0.5'}
    """
    reference, pred = answer_text("math", ground_truth), last_boxed(solution_str)
    right = float(pred is not None and same_answer(pred, reference, seconds))
    return {"score": right, "acc": right, "pred": pred}


def math_dapo(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    turn_bonus: float = 0.0,
    seconds: int = 5,
) -> dict[str, Any]:
    r"""Score a reply whose end has the answer behind `Answer:`, or else in the last \boxed{…}.

    So DAPO-Math-17k's prompts ask for it. Of an episode only the last turn is read. An answer is
    right as in `math`.

    Args:
        data_source: not used.
        solution_str: the reply, or all of the episode.
        ground_truth: the reference answer.
        extra_info: `last_answer`, the text of the last turn, and `num_turns`, the turns of
            everyone, of an episode.
        turn_bonus: added to the score of a wrong episode for each two turns beyond the first two,
            0.4 at most: ReTool's 0.1 keeps a policy from unlearning to call a tool.
        seconds: as in `math`.

    Returns:
        Score 1.0 for the right answer, else -1.0 and the bonus; `pred` is the answer.

    Raises:
        ValueError: there is a bonus, and the reply is no episode.

    >>> math_dapo("math_dapo", "So 17 * 2 is it.\nAnswer: $34$", "34", None)
    {'score': 1.0, 'acc': 1.0, 'pred': '34'}
    >>> math_dapo("math_dapo", "", "34", {"last_answer": "33", "num_turns": 4}, turn_bonus=0.1)
    {'score': -0.9, 'acc': 0.0, 'pred': None}
    """
    reference, about = answer_text("math_dapo", ground_truth), extra_info or {}
    if turn_bonus and "num_turns" not in about:
        raise ValueError("math_dapo: turn_bonus needs an episode of turns; set rollout.tools")
    end = about.get("last_answer", solution_str)[-ANSWER_CHARS:]
    lines = ANSWER_LINE.findall(end)
    pred = _bare(lines[-1]) if lines else last_boxed(end)
    if pred is not None and same_answer(pred, reference, seconds):
        return {"score": 1.0, "acc": 1.0, "pred": pred}
    bonus = turn_bonus * (about.get("num_turns", 2) - 2) / 2
    return {"score": -1.0 + min(bonus, MOST_TURN_BONUS), "acc": 0.0, "pred": pred}


def geo3k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    format_weight: float = 0.1,
    seconds: int = 5,
) -> dict[str, Any]:
    r"""Score a geometry problem's reply by its answer and, a little, by its form.

    The answer is right as in `math`. The form is right if the reply is a <think>…</think> and then,
    somewhere, a \boxed{…}.

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: the reference answer in LaTeX, without the box.
        extra_info: not used.
        format_weight: share of the score that the form has, the answer the rest.
        seconds: as in `math`.

    Returns:
        The score, 1.0 where both are right; `acc` is of the answer; `pred` is the text in the box.

    Raises:
        ValueError: `format_weight` is not from 0 to 1.

    >>> geo3k("geo3k", r"<think>3 + 4</think> It is \boxed{7}", "7", None)["score"]
    1.0
    >>> geo3k("geo3k", r"It is \boxed{7}", "7", None)["score"]
    0.9
    """
    if not 0 <= format_weight <= 1:
        raise ValueError(f"geo3k: expected format_weight from 0 to 1, got {format_weight}")
    reference = answer_text("geo3k", ground_truth)
    result = math(data_source, solution_str, reference, extra_info, seconds=seconds)
    score = (1 - format_weight) * result["acc"] + format_weight * _thinks_first(solution_str)
    return result | {"score": score}


def answer_text(function: str, ground_truth: Any) -> str:
    """Return a reference answer as text, which a column of numbers has as a number.

    Args:
        function: of the reward, for the message.
        ground_truth: of the row.

    Raises:
        ValueError: it is neither a text that is not blank nor a finite number.

    >>> answer_text("math", 155), answer_text("math", 155.0), answer_text("math", 1e-7)
    ('155', '155', '0.0000001')
    """
    if isinstance(ground_truth, str) and ground_truth.strip():
        return ground_truth.strip()
    is_number = isinstance(ground_truth, Real | Decimal) and not isinstance(ground_truth, bool)
    number = Decimal(str(ground_truth) if is_number else "NaN")
    if not number.is_finite():
        raise ValueError(
            f"{function}: expected a text or a number as ground truth, got {ground_truth!r}"
        )
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def same_answer(pred: str, reference: str, seconds: int = 5) -> bool:
    r"""Return whether two answers in LaTeX are the same text, or equal by Math-Verify.

    Numbers that can be computed exactly must be equal exactly, where Math-Verify takes numbers for
    equal that are both below 1e-15. A numeral with a base is equal to the same numeral alone.

    Args:
        pred: an answer.
        reference: another one.
        seconds: time limit for each of parsing and comparing, as in `math`.

    >>> same_answer("0.5", r"\frac{1}{2}"), same_answer("0.5", "5")
    (True, False)
    >>> same_answer("2^{-98}", "2^{-99}"), same_answer("2516", "2516_8")
    (False, False)
    """
    pred, reference = map(_tidy, (pred, reference))
    if _words(pred) == _words(reference):
        return True
    numerals = [IN_BASE.fullmatch(answer) for answer in (pred, reference)]
    if any(numerals):
        first, second = (match and (match[1].upper(), match[2] or match[3]) for match in numerals)
        return first == second
    from math_verify import LatexExtractionConfig, parse, verify

    def read(latex: str) -> list[Any]:
        return parse(rf"\boxed{{{latex}}}", [LatexExtractionConfig()], parsing_timeout=seconds)

    wanted, given = read(reference), read(pred)
    return verify(wanted, given, timeout_seconds=seconds) and not _differ(wanted, given)


def _tidy(answer: str) -> str:
    r"""Return an answer without dollars and a point around it, and without gaps in its integers.

    >>> _tidy("$10{,}000.$"), _tidy(r"3\,000."), _tidy("1000 20")
    ('10000', '3000', '1000 20')
    """
    bare = answer.strip().strip("$").strip()
    bare = bare if bare.endswith("..") else bare.removesuffix(".")
    return GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), bare)


def _words(answer: str) -> list[str]:
    """Return the words of an answer, whatever macro sets them upright."""
    return re.sub(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", answer).split()


def _differ(wanted: list[Any], given: list[Any]) -> bool:
    """Tell whether an answer has a number that is equal to none of the other's numbers."""
    first, second = (
        [(_exact(n), _room(n)) for answer in answers[:1] for n in _numbers(answer)]
        for answers in (wanted, given)
    )

    def is_close(a: tuple[Fraction | None, Fraction], b: tuple[Fraction | None, Fraction]) -> bool:
        if a[0] is None or b[0] is None or a[0] == b[0]:
            return True
        apart, size = abs(a[0] - b[0]), max(abs(a[0]), abs(b[0]))
        return apart < max(a[1], b[1]) and apart < size * CLOSE

    return any(
        not any(is_close(number, other) for other in others)
        for numbers, others in ((first, second), (second, first))
        for number in numbers
    )


def _numbers(answer: Any) -> Iterator[Any]:
    """Yield the members of a parsed set, tuple, interval or matrix, or what is equal to a name."""
    import sympy

    if isinstance(answer, sympy.MatrixBase):
        answer = sympy.Tuple(*answer.flat())
    if isinstance(answer, sympy.Equality):
        yield from _numbers(answer.rhs)
    elif isinstance(answer, sympy.Interval):
        yield from (answer.start, answer.end)
    elif isinstance(answer, sympy.FiniteSet | sympy.Tuple):
        for member in answer.args:
            yield from _numbers(member)
    else:
        yield answer


def _room(number: Any) -> Fraction:
    """Return how far a decimal may be from the number that it rounds: a unit of its last place."""
    import sympy

    if not isinstance(number, sympy.Float):
        return Fraction(0)
    exponent = Decimal(repr(float(number))).as_tuple().exponent
    return Fraction(10) ** exponent if isinstance(exponent, int) else Fraction(0)


def _exact(expression: Any) -> Fraction | None:
    """Return the value of a parsed number; None where it is not rational, or too long."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return Fraction(int(expression.p), int(expression.q))
    if isinstance(expression, sympy.Float):
        return Fraction(repr(float(expression))) if isfinite(expression) else None
    if not isinstance(expression, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial):
        return None
    value, *others = map(_exact, expression.args)
    for other in others:
        if value is None or other is None:
            return None
        value = _combine(expression, value, other)
    if isinstance(expression, sympy.factorial) and value is not None:
        is_small = value.denominator == 1 and 0 <= value <= MOST_BITS / 20
        value = Fraction(factorial(int(value))) if is_small else None
    return value


def _combine(expression: Any, value: Fraction, other: Fraction) -> Fraction | None:
    """Return a sum, a product or a power, None where it is not rational, or too long."""
    import sympy

    bits = [max(n.numerator.bit_length(), n.denominator.bit_length()) for n in (value, other)]
    if sum(bits) > MOST_BITS:
        return None
    if isinstance(expression, sympy.Add):
        return value + other
    if isinstance(expression, sympy.Mul):
        return value * other
    if other.denominator != 1 or abs(other) * bits[0] > MOST_BITS or (value == 0 and other < 0):
        return None
    return value ** int(other)


def _thinks_first(reply: str) -> bool:
    """Tell whether a reply is a <think>…</think>, and has a box behind it."""
    thought = reply.removeprefix("<think>")
    behind = thought.partition("</think>")[2]
    return thought != reply and "}" in behind.partition(r"\boxed{")[2]


def _bare(answer: str) -> str:
    """Return an answer without what often stands around it."""
    answer = answer.strip().rstrip(".").strip("*$ ")
    return last_boxed(answer) or answer


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{…} (or \fbox{…}, or bare `\boxed 5`), else None.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> last_boxed(r"it is $\boxed 5$")
    '5'
    """
    boxes = list(re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if not rest.startswith("{"):
        bare = re.match(r"[^\s$.,]+", rest)
        return bare.group() if bare else None
    depth = 0
    for token in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return rest[1 : token.start()].strip()
    return None  # never closed: the reply was cut off
