"""Rule-based reward functions, with the parameters by which verl calls them.

Each returns `{"score": …, "acc": …, "pred": …}`: the reward, whether the answer is right (1.0 or
0.0), and the answer that was read, in a canonical spelling so that votes can be counted, or None.
"""

import functools
import re
import string
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from jaxrl_llm.rewards.code import python_tests as python_tests
from jaxrl_llm.rewards.competition_math import answer_text
from jaxrl_llm.rewards.competition_math import geo3k as geo3k
from jaxrl_llm.rewards.competition_math import last_boxed as last_boxed
from jaxrl_llm.rewards.competition_math import math as math
from jaxrl_llm.rewards.competition_math import math_dapo as math_dapo
from jaxrl_llm.rewards.judge import judge as judge
from jaxrl_llm.rewards.reward_server import classify as classify

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
    if value == 0:
        return "0"
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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
    from jaxrl_llm.data.reasoning import score_item

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
    score = score_item(task, settings, int(item), ground_truth, answer)
    acc = float(score > 1 - 1e-9)
    return {"score": acc if exact else score, "acc": acc, "pred": answer}


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
