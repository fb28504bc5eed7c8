"""Rule-based reward functions, with the parameters by which verl calls them.

Each returns `{"score": …, "acc": …, "pred": …}`: the reward, whether the answer is right (1.0 or
0.0), and the answer that was read, in a canonical spelling so that votes can be counted, or None.
"""

import dataclasses
import difflib
import functools
import json
import re
import string
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from math import factorial, isfinite
from numbers import Real
from typing import Any

from jaxrl_llm.rewards.code import python_tests
from jaxrl_llm.rewards.remote import classify, judge

__all__ = [
    "arithmetic",
    "by_source",
    "classify",
    "environment_score",
    "geo3k",
    "gsm8k",
    "judge",
    "last_answer",
    "math",
    "math_dapo",
    "python_tests",
    "reasoning_gym",
    "search_em",
]

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
    return _result(pred is not None and same_answer(pred, reference, seconds), pred)


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
    return _decimal_text(number)


def _decimal_text(number: Decimal) -> str:
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


Result = dict[str, Any]

_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")
_NUMBER = r"[+-]?\$?[0-9][0-9,]*(?:\.[0-9]+)?|[+-]?\$?\.[0-9]+"
_MARKED = re.compile(rf"####[ \t]*\$?[ \t]*({_NUMBER})")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANY_NUMBER = re.compile(rf"(?<![0-9.,])(?:{_NUMBER})")


def _result(right: bool, pred: str | None) -> Result:
    return {"score": float(right), "acc": float(right), "pred": pred}


def arithmetic(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None
) -> Result:
    """Score a reply that must be one integer, alone or behind the reply's last "=".

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: the integer.
        extra_info: not used.

    Returns:
        Score 1.0 for the right integer, else 0.0; `pred` is the integer read.

    Raises:
        ValueError: `ground_truth` is not an integer.

    >>> arithmetic("arithmetic", "12+34=46", "46", None)
    {'score': 1.0, 'acc': 1.0, 'pred': '46'}
    >>> arithmetic("arithmetic", "46 or 47", "46", None)
    {'score': 0.0, 'acc': 0.0, 'pred': None}
    """
    reference = answer_text("arithmetic", ground_truth)
    if not _INTEGER.fullmatch(reference):
        raise ValueError(f"arithmetic: expected an integer as ground truth, got {ground_truth!r}")
    match = _INTEGER.fullmatch(solution_str.rpartition("=")[2].strip())
    if match is None:
        return _result(False, None)
    value = int(match.group())
    return _result(value == int(reference), str(value))


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    flexible: bool = False,
    tail_chars: int = 300,
) -> Result:
    """Score a GSM8K reply: the last `#### NUMBER` near its end must equal the reference.

    Thousands separators, a dollar sign and trailing zeros make no difference.

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: the reference number.
        extra_info: not used.
        flexible: take the last number in the whole reply, with or without a "####" before it.
        tail_chars: how much of the reply's end the strict rule looks at.

    Returns:
        Score 1.0 for the right number, else 0.0; `pred` is the number read.

    Raises:
        ValueError: `ground_truth` is not a number.

    >>> gsm8k("openai/gsm8k", "6 * 200 = 1200. #### $1,200.00", "1200", None)
    {'score': 1.0, 'acc': 1.0, 'pred': '1200'}
    >>> gsm8k("openai/gsm8k", "So she has 1,200 left.", "1200", None)
    {'score': 0.0, 'acc': 0.0, 'pred': None}
    >>> gsm8k("openai/gsm8k", "So she has 1,200 left.", "1200", None, flexible=True)["pred"]
    '1200'
    """
    reference = answer_text("gsm8k", ground_truth)
    if not re.fullmatch(_NUMBER, reference):
        raise ValueError(f"gsm8k: expected a number as ground truth, got {ground_truth!r}")
    if flexible:
        numbers = _ANY_NUMBER.findall(solution_str)
    else:
        numbers = _MARKED.findall(solution_str[-tail_chars:] if tail_chars else "")
    pred = _canonical(numbers[-1]) if numbers else None
    return _result(pred == _canonical(reference), pred)


def _canonical(number: str) -> str:
    value = Decimal(number.replace(",", "").replace("$", ""))
    return _decimal_text(value) if value else "0"


def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None,
    *,
    pattern: str | None = None,
    exact: bool = False,
) -> Result:
    """Score a reply to a row of `data.prepare: {fn: reasoning_gym}` by its task's own rule.

    Args:
        data_source: not used.
        solution_str: the reply.
        ground_truth: the answer of the row.
        extra_info: of the row: what its item is made again from.
        pattern: a regular expression; the answer is the first group of its last match, as of
            `<answer>(.*?)</answer>`. None takes the whole reply.
        exact: score 1.0 or 0.0; else some tasks score a part for answers that are nearly right, or
            that at least look like one.

    Returns:
        The task's score; `acc` is 1.0 for a score of 1. 0.0 where nothing matches the pattern.

    Raises:
        ValueError: the row is of another origin, or the package makes other items now.
    """
    try:
        task, settings, item = ((extra_info or {})[key] for key in ("task", "settings", "item"))
    except KeyError as error:
        raise ValueError(
            "reasoning_gym: expected a row that data.prepare has written, got one without "
            f"extra_info.{error.args[0]}"
        ) from error
    replies = [solution_str]
    if pattern is not None:
        replies = [match.group(1) for match in re.finditer(pattern, solution_str, re.DOTALL)]
    if not replies:
        return _result(False, None)
    answer = replies[-1].strip()
    dataset = task_dataset(task, settings)
    made = dataset[int(item)]
    if (made["answer"] or "") != ground_truth:
        raise ValueError(
            f"{task}: this version of reasoning-gym makes another item {item} than the one that "
            "wrote the file: prepare the data again"
        )
    score = float(dataset.score_answer(answer, made))
    acc = float(score > 1 - 1e-9)
    return {"score": acc if exact else score, "acc": acc, "pred": answer}


@functools.lru_cache(maxsize=256)
def task_dataset(task: str, settings: str) -> Any:
    """Return the data set of a task: `dataset[i]` makes an item, `score_answer` scores an answer.

    Args:
        task: its name in reasoning-gym.
        settings: keywords of its config as JSON, with `seed` and `size`.

    Raises:
        ValueError: the package is not installed, there is no such task or setting, or a setting's
            value is not possible.
    """
    try:
        from reasoning_gym.factory import (  # pyright: ignore[reportMissingImports]
            DATASETS,
            create_dataset,
        )
    except ImportError as error:
        raise ValueError(
            f"the task {task!r} needs the package reasoning-gym: pip install 'jaxrl_llm[tasks]'"
        ) from error
    _check_name(task, DATASETS, "task")
    given = json.loads(settings)
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in given:
        _check_name(name, known, f"setting of {task}")
    try:
        return create_dataset(task, **given)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task}: {error}") from error


def _check_name(name: str, known: Any, kind: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {kind} {name!r}{hint} (known: {', '.join(sorted(known))})")


def last_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None
) -> Result:
    """Score an episode whose last turn must be the reference, but for spaces around it.

    Args:
        data_source: not used.
        solution_str: the reply, or all of the episode.
        ground_truth: the reference answer.
        extra_info: `last_answer`, the text of the last turn; without it, the reply is the turn.

    Returns:
        Score 1.0 for the reference, else 0.0.

    >>> told = "[look_up(letter='q')]k"
    >>> last_answer("look_up", f"{told}k", "k", {"last_answer": "k"})["score"]
    1.0
    >>> last_answer("look_up", told, "k", None)["score"]
    0.0
    """
    reference = answer_text("last_answer", ground_truth)
    pred = (extra_info or {}).get("last_answer", solution_str).strip()
    return _result(pred == reference, pred)


def search_em(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None,
    *,
    format_score: float = 0.0,
) -> Result:
    """Score a question's answer in the last <answer>…</answer>, by exact match as SQuAD has it.

    Case, punctuation, articles and spaces make no difference. Of an agent's episode only the last
    turn counts, so that no passage which was found can answer.

    Args:
        data_source: not used.
        solution_str: the reply, or all of the episode.
        ground_truth: the reference answer, a list of them, or Search-R1's `{"target": […]}`.
        extra_info: `last_answer`, the text of the last turn; without it, the reply is the turn.
        format_score: for a wrong answer that is written as it should be.

    Returns:
        Score 1.0 for one of the references; `pred` is the answer without what makes no difference.

    Raises:
        ValueError: the ground truth is none of these.

    >>> search_em("nq", "<answer>The Beatles!</answer>", {"target": ["Beatles"]}, None)
    {'score': 1.0, 'acc': 1.0, 'pred': 'beatles'}
    >>> search_em("nq", "The Beatles", "Beatles", None)["pred"] is None
    True
    """
    targets = ground_truth.get("target") if isinstance(ground_truth, dict) else ground_truth
    targets = targets if isinstance(targets, list | tuple) else [targets]
    if not targets:
        raise ValueError(
            f"search_em: expected a text or more as ground truth, got {ground_truth!r}"
        )
    targets = [t if isinstance(t, str) else answer_text("search_em", t) for t in targets]
    said = (extra_info or {}).get("last_answer", solution_str)
    answers = _ANSWER.findall(said)
    if not answers:
        return _result(False, None)
    pred = _squad_text(answers[-1])
    result = _result(pred in map(_squad_text, targets), pred)
    return result if result["acc"] else result | {"score": format_score}


def _squad_text(text: str) -> str:
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def environment_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None
) -> Result:
    """Score an episode by what its environment returned, and by 0 where a limit ended it before.

    The rewards of single turns are added to it elsewhere.

    Args:
        data_source: not used.
        solution_str: the episode.
        ground_truth: not used.
        extra_info: `environment_score`, None where the environment has not returned.

    Returns:
        The score; `acc` is 1.0 for a score of 1 or more.

    Raises:
        ValueError: the episode had no environment.

    >>> environment_score("grid", "U", "k", {"environment_score": 0.5})
    {'score': 0.5, 'acc': 0.0, 'pred': None}
    """
    if extra_info is None or "environment_score" not in extra_info:
        raise ValueError("environment_score: the episode had none; set rollout.environment")
    score = float(extra_info["environment_score"] or 0.0)
    return {"score": score, "acc": float(score >= 1), "pred": None}


GENERATED = "reasoning_gym/"
"""How the data sources of generated tasks begin."""

SEARCH_R1 = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""Data sets of Search-R1, as verl names them behind `searchR1_`."""

PICTURES = ("dots", "digits", "shapes")
"""Kinds of `data.prepare: {fn: pictures}`."""

SOURCES = {
    "arithmetic": arithmetic,
    "look_up": last_answer,
    "calculator": last_answer,
    "code": last_answer,
    "guess_number": environment_score,
    "grid": environment_score,
    "verifiers": environment_score,
    "search": search_em,
    **dict.fromkeys(map("searchR1_{}".format, SEARCH_R1), search_em),
    **dict.fromkeys(map("pictures/{}".format, PICTURES), last_answer),
    "hiyouga/geometry3k": geo3k,
    "openai/gsm8k": gsm8k,
    "MATH": math,
    "lighteval/MATH": math,
    "DigitalLearningGmbH/MATH-lighteval": math,
    "EleutherAI/hendrycks_math": math,
    "HuggingFaceH4/MATH-500": math,
    "math_dapo": math_dapo,
}


def by_source(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None
) -> Result:
    """Score with the reward function that belongs to the row's `data_source` (see `SOURCES`).

    Args:
        data_source: one of `SOURCES`, or that of a generated task.
        solution_str: the reply.
        ground_truth: the reference answer.
        extra_info: handed on.

    Returns:
        What the reward function returns.

    Raises:
        ValueError: an unknown `data_source`; the message lists the known ones.

    >>> by_source("arithmetic", "7", "7", None)["score"]
    1.0
    """
    function = function_of_source(data_source)
    return function(data_source, solution_str, ground_truth, extra_info)


def function_of_source(data_source: str) -> Callable[..., Result]:
    """Return the reward function that belongs to a `data_source`.

    Raises:
        ValueError: there is none; the message lists the known sources.

    >>> function_of_source("openai/gsm8k").__name__
    'gsm8k'
    """
    if data_source.startswith(GENERATED):
        return reasoning_gym
    if data_source not in SOURCES:
        raise ValueError(
            f"no reward function for data_source {data_source!r}; known: "
            f"{', '.join(sorted(SOURCES))}, {GENERATED}…. "
            "Name your own function in the reward's `fn`"
        )
    return SOURCES[data_source]


READ_FIRST = (arithmetic, gsm8k, math, math_dapo, geo3k, last_answer, search_em, python_tests)
"""The functions that read the ground truth, and refuse one, before they look at the reply."""


def check_ground_truth(function: Callable[..., Any], data_source: str, ground_truth: Any) -> None:
    """Refuse a ground truth that a reward function of this module can't use.

    Args:
        function: the reward function, with its keywords bound; others than those of this module
            take anything.
        data_source: of the row.
        ground_truth: of the row.

    Raises:
        ValueError: it can't use it, or `by_source` knows no function for the row.

    >>> check_ground_truth(by_source, "openai/gsm8k", [3])
    Traceback (most recent call last):
    ValueError: gsm8k: expected a text or a number as ground truth, got [3]
    """
    if function is by_source:
        function = function_of_source(data_source)
    if (function.func if isinstance(function, functools.partial) else function) in READ_FIRST:
        function(data_source, "", ground_truth, {"num_turns": 2})
