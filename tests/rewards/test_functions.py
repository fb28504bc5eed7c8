import itertools
import string
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxrl_llm.rewards.functions import (
    arithmetic,
    by_source,
    geo3k,
    gsm8k,
    last_answer,
    last_boxed,
    math,
    math_dapo,
    same_answer,
    search_em,
)


def wrongs(cases, made):
    """Return the cases of which something else is made, and what."""
    return [(*case, got) for *case, expected in cases if (got := made(*case)) != expected]


def test_arithmetic():
    right = ["46", " 46\n", "046", "+46", "12+34=46", "12+34=45=46"]
    others = ["-46", "46=", "46.", "4 6", "45 46", "--46", "٤٦", "", "9" * 5000]
    cases = [(reply, (1.0, 1.0, "46")) for reply in right]
    cases += [(reply, (0.0, 0.0, "-46" if reply == "-46" else None)) for reply in others]
    made = lambda reply: tuple(arithmetic("arithmetic", reply, "46", None).values())  # noqa: E731
    assert not wrongs(cases, made)
    assert arithmetic("", "-7", "-7", None)["score"] == 1.0
    with pytest.raises(ValueError, match="'x'"):
        arithmetic("arithmetic", "4", "x", None)


GSM8K = [
    # reply, truth, what is read of `#### N`, and where any last number counts
    *(("so\n#### 42", "42", "42", "42"), ("####42", "42", "42", "42")),
    *(("#### $1,234", "1234", "1234", "1234"), ("#### -5", "-5", "-5", "-5")),
    *(("#### -$5", "-5", "-5", "-5"), ("#### 3.50", "3.5", "3.5", "3.5")),
    *(("#### 42.", "42", "42", "42"), ("#### 42,", "42", "42", "42")),
    *(("#### 1 then #### 2", "2", "2", "2"), ("#### 7 dollars for 2", "7", "7", "2")),
    *(("#### x", "7", None, None), ("####\n7", "7", None, "7"), ("### 7", "7", None, "7")),
    *(("the answer is 1,200.", "1200", None, "1200"), ("costs $3.25.", "3.25", None, "3.25")),
    *(("no number", "7", None, None), ("", "7", None, None)),
    *(("#### 42" + "y" * 293, "42", "42", "42"), ("#### 42" + "y" * 294, "42", None, "42")),
]


def test_gsm8k():
    for reply, truth, strict, flexible in GSM8K:
        for loose, expected in ((False, strict), (True, flexible)):
            got = gsm8k("openai/gsm8k", reply, truth, None, flexible=loose)
            right = float(expected is not None and float(expected) == float(truth))
            assert got == {"score": right, "acc": right, "pred": expected}, reply
    assert gsm8k("", "#### 10000000000000001", "10000000000000000", None)["score"] == 0.0
    with pytest.raises(ValueError, match="gsm8k"):
        gsm8k("openai/gsm8k", "#### 42", "#### 42", None)


def test_last_boxed():
    cases = [
        *((r"\boxed{7}", "7"), (r"\boxed{\frac{a}{b^{2}}} done", r"\frac{a}{b^{2}}")),
        *((r"\boxed{1} \boxed{2}", "2"), (r"\boxed{ 3 }", "3"), (r"\fbox{3}", "3")),
        *((r"$\boxed 9$.", "9"), (r"\boxed {4}", "4"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}")),
        *((r"\boxed{a \\}", r"a \\"), (r"\boxed{1} \boxed{2", None), (r"\boxed", None)),
        *((r"\boxedness{3}", None), ("boxed{3}", None), ("", None)),
    ]
    assert not wrongs(cases, last_boxed)


def test_math():
    cases = [
        *((r"\frac{1}{2}", r"\frac{1}{2}", 1.0), (r"\dfrac12", r"\frac{1}{2}", 1.0)),
        *(("0.5", r"\frac{1}{2}", 1.0), (r"-\frac{1}{2}", r"\frac{1}{2}", 0.0)),
        *(("1,000", "1000", 1.0), ("x^2+2x+1", "(x+1)^2", 1.0), ("x^2+2x+2", "(x+1)^2", 0.0)),
        *(("(1,2)", "(1, 2)", 1.0), ("(2,1)", "(1, 2)", 0.0), (r"\{2, 1\}", r"\{1,2\}", 1.0)),
        *((r"\sqrt{8}", r"2\sqrt{2}", 1.0), ("Evelyn", r"\text{Evelyn}", 1.0), ("", "1", 0.0)),
        *(("Eve", r"\text{Evelyn}", 0.0), (r"\frac{1}{", r"\frac{1}{2}", 0.0)),
    ]

    def made(answer, truth):
        got = math("MATH", rf"Thus \boxed{{1}}, no: $\boxed{{{answer}}}$", truth, None)
        return got["score"] if got["score"] == got["acc"] else got

    assert not wrongs(cases, made)
    # the box alone is read, and for no longer than may be
    assert math("MATH", "the answer is 7", "7", None) == {"score": 0.0, "acc": 0.0, "pred": None}
    assert math("MATH", r"\boxed{ 7 }", "7", None)["pred"] == "7"
    assert math("MATH", r"\boxed{9^{9^{9^{9}}}}", "3", None, seconds=0.3)["score"] == 0.0


TINY = [
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
    (r"\binom{100}{50}^{-1}", r"\binom{100}{49}^{-1}"),
    (r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", r"\frac{1}{3\cdot2^{2006}}"),
    (r"x=2^{-99}", r"2^{-98}"),
    (r"[2^{-99}, 1)", r"[2^{-98}, 1)"),
    (r"\{2^{-99}, 1\}", r"\{2^{-98}, 1\}"),
    (r"\pm 2^{-99}", r"\pm 2^{-98}"),
    (r"\begin{pmatrix} 2^{-99} \\ 1 \end{pmatrix}", r"\begin{pmatrix} 2^{-98} \\ 1 \end{pmatrix}"),
    *((r"1.5 \cdot 10^{-20}", r"2.5 \cdot 10^{-20}"), ("0.0000001", "10^{-8}"), (r"2^{-99}", "0")),
]
"""Numbers that Math-Verify, which rounds, takes for equal."""


OTHERS = [
    *[("2516", "2516_8"), ("1358", "2516_8"), ("101_2", "101_3"), ("2516_8", "2516")],
    *[(r"3\,000", r"5\,000"), ("1 000", "2 000"), ("0.33", r"\frac13"), (r"50\%", r"51\%")],
]
SAME = [
    *[("3.", "3"), ("3", "3."), ("June 20", r"\text{June 20}"), (r"\text{June }20", "June 20")],
    *[("2516_{8}", "2516_8"), ("1a_{16}", "1A_{16}"), (r"3\,000", "3000"), ("1 000 000", "10^6")],
    *[("3{,}000", "3,000"), (r"10,\!000", "10000"), ("0.333333", r"\frac13"), ("0.6666667", "2/3")],
    *[("0.5^{99}", "2^{-99}"), ("5 cm", r"5\text{ cm}"), (r"50\%", "0.5"), ("50", r"50\%")],
    *[(r"\frac{2^{2005}}{3\cdot 2^{2006}}", r"\frac16"), (r"\frac{2004!}{2003!}", "2004")],
    *[(r"2.998\cdot10^8", "299800000"), ("x=3", "3"), (r"(\frac12, 3]", "(0.5, 3]")],
    *[(r"\pm 3", "3, -3"), ("3.14159265", r"\pi"), (r"\{2, 1\}", r"\{1, 2\}"), ("12.50", "12.5")],
]


def test_numbers_are_the_same_if_they_are_equal_and_not_if_they_only_round_alike():
    wrong = []
    for pairs, right in ((TINY + [pair[::-1] for pair in TINY] + OTHERS, False), (SAME, True)):
        wrong += [pair for pair in pairs if same_answer(*pair) != right]
    assert not wrong


def test_math_dapo():
    for end, pred, score in [
        *(("Answer: 34", "34", 1.0), ("answer:34.", "34", 1.0), ("**Answer:** $34$", "34", 1.0)),
        *((r"Answer: $\boxed{34}$", "34", 1.0), ("Answer: 34\nno,\nAnswer: 35", "35", -1.0)),
        *((r"it is \boxed{34}", "34", 1.0), (r"\boxed{34}" + "\nAnswer: 35", "35", -1.0)),
        *(("34", None, -1.0), ("", None, -1.0)),
        ("Answer: 34" + " " * 300, None, -1.0),  # only the end is read
    ]:
        got = math_dapo("math_dapo", f"17 * 2\n{end}", "34", None)
        assert got == {"score": score, "acc": float(score > 0), "pred": pred}, end


def test_math_dapo_adds_to_wrong_episodes_what_retool_adds():
    for turns, last, score in [
        *((2, "no", -1.0), (4, "no", -0.9), (8, "no", -0.7), (30, "no", -0.6)),
        (8, "Answer: 3", 1.0),
    ]:
        about = {"num_turns": turns, "last_answer": last}
        got = math_dapo("math_dapo", "Answer: 3", "3", about, turn_bonus=0.1)
        assert got["score"] == pytest.approx(score)
    with pytest.raises(ValueError, match="turn_bonus"):
        math_dapo("math_dapo", "Answer: 3", "3", None, turn_bonus=0.1)


def as_squad(text):
    """Return the words of a text that count, letter by letter; spaces part its words."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


WORDS = st.sampled_from(["the", "A", "an", "Theatre", "u.s.", "it's", "1,000", " ", "\n", "–", "é"])


@given(st.lists(WORDS, max_size=5), st.lists(st.lists(WORDS, max_size=5), min_size=1, max_size=3))
@example(["the", "Theatre"], [["u.s."], ["theatre", " "]])
def test_search_em_is_the_exact_match_of_squad(said, references):
    said = " ".join(said)
    references = [" ".join(reference) for reference in references]
    right = any(as_squad(said) == as_squad(reference) for reference in references)
    reply = f"<answer>no</answer> and <answer>\n{said} </answer>, so."
    for truth in (references, {"target": references}):
        assert search_em("nq", reply, truth, None)["score"] == right
        assert search_em("nq", reply, truth, {}, format_score=0.1)["score"] == (right or 0.1)
    assert search_em("nq", reply, references[0], None)["acc"] == (
        as_squad(said) == as_squad(references[0])
    )


def test_search_em_takes_the_last_turn_of_an_episode():
    told = "<answer>Rome</answer>"
    assert search_em("nq", told, "Rome", {"last_answer": "I can't tell."})["score"] == 0.0
    assert search_em("nq", "<answer>Rome", "Rome", None, format_score=0.1)["score"] == 0.0
    assert search_em("nq", told + "<answer></answer>", "Rome", None)["pred"] == ""
    assert by_source("searchR1_2wikimultihopqa", told, {"target": ["rome"]}, {})["acc"] == 1.0
    for truth in (None, True, {"answer": "x"}, {"target": None}, [], ["x", [1]]):
        with pytest.raises(ValueError, match="search_em"):
            search_em("nq", "<answer>x</answer>", truth, None)


NUMBERS = [
    *((7, "7"), (-7, "-7"), (7.0, "7"), (3.5, "3.5"), (1e-7, "0.0000001"), (1e22, "1" + "0" * 22)),
    *((np.int64(7), "7"), (np.float64(3.5), "3.5"), (np.float32(0.1), "0.1"), (0, "0"), (0.0, "0")),
    *((Decimal("7.50"), "7.5"), (10**40 + 1, "1" + "0" * 39 + "1")),
]


def test_a_column_of_numbers_is_as_good_as_one_of_texts():
    replies = {gsm8k: "#### {}", math: r"\boxed{{{}}}", math_dapo: "Answer: {}", last_answer: "{}"}
    replies |= {geo3k: r"<think></think>\boxed{{{}}}", search_em: "<answer>{}</answer>"}
    wrong = []
    for (truth, text), (function, form) in itertools.product(NUMBERS, replies.items()):
        right, other = (function("", form.format(t), truth, None)["acc"] for t in (text, "8.25"))
        if (right, other) != (1.0, 0.0):
            wrong.append((function.__name__, truth, right, other))
    assert not wrong
    assert arithmetic("", "7", 7, None)["acc"] == arithmetic("", "7", 7.0, None)["acc"] == 1.0


def test_what_is_no_answer_is_refused_whatever_the_reply_is():
    others = (None, True, float("nan"), float("inf"), Decimal("NaN"), [], [7], {"a": 7}, " ")
    functions = (arithmetic, gsm8k, math, math_dapo, geo3k, last_answer)
    for function, truth in itertools.product(functions, others):
        with pytest.raises(ValueError, match=rf"^{function.__name__}:"):
            function("", "7", truth, None)


def test_by_source_dispatches():
    assert by_source("openai/gsm8k", "#### 5", "5", {})["score"] == 1.0
    assert by_source("arithmetic", "#### 5", "5", {})["score"] == 0.0
    with pytest.raises(ValueError, match="gsm9k"):
        by_source("gsm9k", "", "", None)


GEO3K = [
    (r"<think>3 + 4</think> So \boxed{7}.", "7", 1.0, "7"),
    ("<think>a\nb</think>\n\n" + r"$\boxed{3\sqrt{2}}$", r"3 \sqrt { 2 }", 1.0, r"3\sqrt{2}"),
    (r"<think></think>\boxed{0.5}", r"\frac { 1 } { 2 }", 1.0, "0.5"),
    *((r"So \boxed{7}.", "7", 0.9, "7"), (r"3 + 4</think> \boxed{7}", "7", 0.9, "7")),
    (r"So <think>3 + 4</think> \boxed{7}", "7", 0.9, "7"),
    (r"<think>3 + 4</think> \boxed{8}", "7", 0.1, "8"),
    (r"<think>3 + 4</think> \boxed{7} or \boxed{8}", "7", 0.1, "8"),
    (r"<think>a</think> b</think> \boxed{}", "7", 0.1, ""),
    (r"<think>3 + 4 \boxed{8}", "7", 0.0, "8"),
    *(("<think>3 + 4</think> 7", "7", 0.0, None), ("7", "7", 0.0, None), ("", "7", 0.0, None)),
]


def test_geo3k():
    assert geo3k("", "<think></think>" + r"</think>\boxed{" * 20000, "x", None)["score"] == 0.0
    for reply, truth, score, pred in GEO3K:
        result = geo3k("hiyouga/geometry3k", reply, truth, None)
        expected = {"score": pytest.approx(score), "acc": float(score >= 0.9), "pred": pred}
        assert result == expected, reply
        assert by_source("hiyouga/geometry3k", reply, truth, None) == result
        plain = geo3k("hiyouga/geometry3k", reply, truth, None, format_weight=0.0)
        assert plain["score"] == plain["acc"]
    with pytest.raises(ValueError, match="format_weight"):
        geo3k("", "7", "7", None, format_weight=1.5)
