"""Reward functions for competition math: an answer in a box or behind `Answer:`."""

import re
from typing import Any

ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
ANSWER_CHARS = 300
"""The end of a reply, in which `math_dapo` looks for its answer."""
MOST_TURN_BONUS = 0.4


def math(
    data_source: str,
    solution_str: str,
    ground_truth: str,
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
    pred = last_boxed(solution_str)
    right = float(pred is not None and same_answer(pred, ground_truth, seconds))
    return {"score": right, "acc": right, "pred": pred}


def math_dapo(
    data_source: str,
    solution_str: str,
    ground_truth: str,
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
    about = extra_info or {}
    if turn_bonus and "num_turns" not in about:
        raise ValueError("math_dapo: turn_bonus needs an episode of turns; set rollout.tools")
    end = about.get("last_answer", solution_str)[-ANSWER_CHARS:]
    lines = ANSWER_LINE.findall(end)
    pred = _bare(lines[-1]) if lines else last_boxed(end)
    if pred is not None and same_answer(pred, ground_truth, seconds):
        return {"score": 1.0, "acc": 1.0, "pred": pred}
    bonus = turn_bonus * (about.get("num_turns", 2) - 2) / 2
    return {"score": -1.0 + min(bonus, MOST_TURN_BONUS), "acc": 0.0, "pred": pred}


def geo3k(
    data_source: str,
    solution_str: str,
    ground_truth: str,
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
    result = math(data_source, solution_str, ground_truth, extra_info, seconds=seconds)
    score = (1 - format_weight) * result["acc"] + format_weight * _thinks_first(solution_str)
    return result | {"score": score}


def same_answer(pred: str, reference: str, seconds: int = 5) -> bool:
    r"""Return whether two answers in LaTeX are the same text, or equal by Math-Verify.

    Args:
        pred: an answer.
        reference: another one.
        seconds: time limit for each of parsing and comparing, as in `math`.

    >>> same_answer("0.5", r"\frac{1}{2}"), same_answer("0.5", "5")
    (True, False)
    """
    if pred == reference.strip():
        return True
    from math_verify import LatexExtractionConfig, parse, verify

    def read(latex: str) -> list[Any]:
        return parse(rf"\boxed{{{latex}}}", [LatexExtractionConfig()], parsing_timeout=seconds)

    return verify(read(reference), read(pred), timeout_seconds=seconds)


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
