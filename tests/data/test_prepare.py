"""Dataset preparation: generated arithmetic; GSM8K and MATH from files with the real columns."""

import json
import re
import time
from pathlib import Path

import datasets.config
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from jaxrl_llm.configs.tasks.arithmetic import arithmetic
from jaxrl_llm.configs.tasks.gsm8k import gsm8k
from jaxrl_llm.configs.tasks.math import math
from jaxrl_llm.data.prepare import main
from jaxrl_llm.data.rows import read_rows, sft_rows, verl_rows, write_rows
from jaxrl_llm.rewards.functions import by_source


def texts(path):
    return [row["prompt"][0]["content"] for row in read_rows(path)]


# ------------------------------------------------------------------------------------- arithmetic


def test_arithmetic_files_fit_the_schema_and_are_right(tmp_path):
    written = arithmetic(tmp_path, train_rows=60, validation_rows=20, sft_rows=30, terms=3)
    assert {path.name: rows for path, rows in written.items()} == {
        "train.parquet": 60,
        "validation.parquet": 20,
        "sft.parquet": 30,
    }
    for name in ("train.parquet", "validation.parquet"):
        rows = verl_rows([str(tmp_path / name)])
        for index, row in enumerate(rows):
            question = row["prompt"][0]["content"]
            assert row["reward_model"]["ground_truth"] == str(eval(question.removesuffix("=")))
            assert re.fullmatch(r"\d{1,2}[+-]\d{1,2}[+-]\d{1,2}=", question)
            assert row["data_source"] == "arithmetic"
            assert row["extra_info"] == {"split": name.removesuffix(".parquet"), "index": index}
    for row in sft_rows([str(tmp_path / "sft.parquet")]):
        assert row["response"] == str(eval(row["prompt"][0]["content"].removesuffix("=")))


def test_problems_with_their_answers_shown_follow_those_without(tmp_path):
    settings = {"train_rows": 9, "validation_rows": 9, "operators": "+", "zero_pad": True}
    arithmetic(tmp_path, **settings, sft_rows=30, mistakes=1.0, shown=True)
    rows = sft_rows([str(tmp_path / "sft.parquet")])
    assert len(rows) == 60
    for plain, shown in zip(rows[:30], rows[30:], strict=True):
        question = plain["prompt"][0]["content"]
        first, second = re.findall(r"\d+", question)
        right = f"{int(first) + int(second):03}"
        assert shown["prompt"][0]["content"] == f"{question}{right};"
        assert shown["response"] == right
    assert any(a["response"] != b["response"] for a, b in zip(rows[:30], rows[30:], strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_validation_problems_occur_nowhere_else(tmp_path, seed):
    # 200 problems in all, so that chance alone would surely let some meet
    arithmetic(
        tmp_path, train_rows=120, validation_rows=80, sft_rows=120, digits=1, terms=2, seed=seed
    )
    train, validation, sft = (
        texts(tmp_path / f"{name}.parquet") for name in ("train", "validation", "sft")
    )
    assert not set(validation) & (set(train) | set(sft))
    assert [len(set(part)) for part in (train, validation, sft)] == [120, 80, 120]


def test_all_problems_can_be_used_and_differ(tmp_path):
    arithmetic(tmp_path, train_rows=250, validation_rows=50, sft_rows=0, digits=1, operators="+-*")
    both = texts(tmp_path / "train.parquet") + texts(tmp_path / "validation.parquet")
    expected = {f"{a}{op}{b}=" for a in range(10) for b in range(10) for op in "+-*"}
    assert set(both) == expected
    assert not (tmp_path / "sft.parquet").exists()


def test_products_bind_tighter(tmp_path):
    arithmetic(
        tmp_path, train_rows=200, validation_rows=1, sft_rows=0, terms=4, operators="-*+", digits=1
    )
    for row in verl_rows([str(tmp_path / "train.parquet")]):
        problem = row["prompt"][0]["content"].removesuffix("=")
        assert row["reward_model"]["ground_truth"] == str(eval(problem))


def test_seed_decides(tmp_path):
    def files(name, seed):
        written = arithmetic(
            tmp_path / name, train_rows=20, validation_rows=5, sft_rows=9, seed=seed
        )
        return [texts(path) for path in written]

    assert files("a", 1) == files("b", 1)
    assert files("a", 1) != files("c", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digits": 1}, "200 problems have 1 digits, 2 terms and operators '+-'; expected 201"),
        ({"operators": "/"}, "expected as operators some of '+-*', each once, got '/'"),
        ({"operators": "++"}, "expected as operators some of '+-*', each once, got '++'"),
        ({"operators": ""}, "expected as operators some of '+-*', each once, got ''"),
        ({"train_rows": 0}, "got train_rows=0, validation_rows=1"),
        ({"sft_rows": -1}, "sft_rows=-1"),
        ({"digits": 9, "terms": 9}, "9 digits and 9 terms are too many to sample"),
    ],
)
def test_arithmetic_refuses(tmp_path, changes, message):
    settings = {"train_rows": 200, "validation_rows": 1, "sft_rows": 0, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        arithmetic(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------- gsm8k and math

GSM8K = {
    "question": "Ann has 1,000 apples and buys 200. How many has she? ",
    "answer": "1000 + 200 = <<1000+200=1200>>1200\n#### 1,200",
}
MATH = {
    "problem": "Halve one.",
    "solution": r"It is $1/2$, so \boxed{\frac{1}{2}}.",
    "level": "Level 1",
    "type": "Prealgebra",
}


def save(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gsm8k_from_a_hub_snapshot(tmp_path):
    snapshot = tmp_path / "snapshot"
    save(snapshot / "main" / "train-00000-of-00001.parquet", [GSM8K, GSM8K])
    save(snapshot / "main" / "test-00000-of-00001.parquet", [GSM8K])
    save(snapshot / "socratic" / "train-00000-of-00001.parquet", [GSM8K] * 7)
    written = gsm8k(tmp_path / "out", source=str(snapshot))
    assert list(written.values()) == [2, 1]
    row = verl_rows([str(tmp_path / "out" / "validation.parquet")])[0]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    content = row["prompt"][0]["content"]
    assert content.startswith("Ann has 1,000 apples and buys 200. How many has she?\n")
    assert "####" in content
    assert row["extra_info"] == {"split": "validation", "index": 0, "solution": GSM8K["answer"]}
    right = by_source(row["data_source"], GSM8K["answer"], row["reward_model"]["ground_truth"], {})
    assert right["score"] == 1.0


def test_math_from_two_files(tmp_path):
    bare = {**MATH, "solution": r"Thus $\boxed 5$."}
    train = save(tmp_path / "a.jsonl", [MATH, bare])
    test = save(tmp_path / "b.parquet", [MATH])
    math(tmp_path / "out", source=f"{train},{test}")
    rows = verl_rows([str(tmp_path / "out" / "train.parquet")])
    assert [row["reward_model"]["ground_truth"] for row in rows] == [r"\frac{1}{2}", "5"]
    assert rows[0]["prompt"][0]["content"].startswith("Halve one.\n")
    assert r"\boxed{}" in rows[0]["prompt"][0]["content"]
    assert rows[0]["extra_info"]["level"] == "Level 1"
    assert rows[0]["extra_info"]["type"] == "Prealgebra"
    answer = rows[0]["reward_model"]["ground_truth"]
    assert by_source(rows[0]["data_source"], r"\boxed{0.5}", answer, {})["score"] == 1.0


@pytest.mark.parametrize(
    ("prepare", "row", "message"),
    [
        (
            gsm8k,
            {"question": "q"},
            "train row 1: expected text in column 'answer', got columns quest",
        ),
        (gsm8k, {**GSM8K, "answer": "42"}, "train row 1: column 'answer' does not end in '#### N"),
        (gsm8k, {**GSM8K, "answer": "#### x"}, "column 'answer' does not end in '#### NUMBER'"),
        (math, {**MATH, "level": 3}, "train row 1: expected text in column 'level', got columns"),
        (math, {**MATH, "solution": "5"}, r"train row 1: column 'solution' has no answer in a \b"),
        (math, {**MATH, "solution": r"\boxed{"}, "column 'solution' has no answer"),
    ],
)
def test_wrong_source_row_is_named(tmp_path, prepare, row, message):
    good = GSM8K if prepare is gsm8k else MATH
    save(tmp_path / "source" / "train.jsonl", [good, row])
    save(tmp_path / "source" / "test.jsonl", [good])
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(tmp_path / "out", source=str(tmp_path / "source"))
    assert not (tmp_path / "out").exists()


def test_source_errors(tmp_path):
    save(tmp_path / "source" / "train.jsonl", [GSM8K])
    with pytest.raises(ValueError, match=r"no file named test\*.parquet or test\*.jsonl"):
        gsm8k(tmp_path / "out", source=str(tmp_path / "source"))
    with pytest.raises(ValueError, match=r"expected two files as 'TRAIN,TEST', got 1"):
        gsm8k(tmp_path / "out", source=str(tmp_path / "source" / "train.jsonl"))


def test_hub_out_of_reach_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="and the hub did not give split 'train': ") as caught:
        gsm8k(tmp_path / "out")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------- writing and the command line


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "rows.parquet"
    write_rows(path, [{"a": 1}])
    with pytest.raises(pyarrow.ArrowException):
        write_rows(path, [{"a": 1}, {"a": "text"}])
    assert read_rows(path) == [{"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    write_rows(path, [{"a": 1}])

    def full_disk(table, where):
        where.write(b"PAR1 half a")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_rows(path, [{"a": 2}])
    assert read_rows(path) == [{"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_command_line_prints_what_it_wrote(tmp_path, capsys):
    sizes = ["--train-rows", "9", "--validation_rows", "3", "--sft_rows", "4"]
    main(["arithmetic", "--out", str(tmp_path), *sizes, "--operators=-"])
    expected = [("train", 9), ("validation", 3), ("sft", 4)]
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / name}.parquet: {rows} rows" for name, rows in expected
    ]
    assert all("-" in text for text in texts(tmp_path / "train.parquet"))


def test_command_line_errors_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^error: arithmetic: only 200 problems have [^\n]*$"):
        main(["arithmetic", "--out", str(tmp_path), "--digits", "1"])
    with pytest.raises(SystemExit, match=r"^error: [^\n]*file[^\n]*$"):
        (tmp_path / "file").write_text("")
        sizes = ["--train_rows=2", "--validation_rows=2"]
        main(["arithmetic", "--out", str(tmp_path / "file"), *sizes])
    for arguments in (["nonsense"], ["arithmetic"], ["arithmetic", "--out", "x", "--train", "3"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "unrecognized arguments: --train" in capsys.readouterr().err


def test_zero_padded_sums_have_aligned_digits(tmp_path: Path) -> None:
    arithmetic(
        tmp_path, train_rows=50, validation_rows=5, sft_rows=50, zero_pad=True, operators="+"
    )
    for row in read_rows(tmp_path / "sft.parquet"):
        assert re.fullmatch("[0-9]{2}[+][0-9]{2}=", row["prompt"][0]["content"])
        assert re.fullmatch("[0-9]{3}", row["response"])
    truth = read_rows(tmp_path / "train.parquet")[0]["reward_model"]["ground_truth"]
    assert truth == str(int(truth))  # the reference is a plain integer


def test_mistakes_forget_every_carry_in_the_supervised_file_only(tmp_path: Path) -> None:
    arithmetic(
        tmp_path, train_rows=60, validation_rows=5, sft_rows=400, operators="+", mistakes=0.5
    )
    wrong = carrying = 0
    for row in read_rows(tmp_path / "sft.parquet"):
        a, b = map(int, re.findall("[0-9]+", row["prompt"][0]["content"]))
        carried, forgotten = a + b, (a // 10 + b // 10) % 10 * 10 + (a + b) % 10
        assert int(row["response"]) in (carried, forgotten)
        carrying += carried != forgotten
        wrong += int(row["response"]) != carried
    assert 0.35 < wrong / carrying < 0.65
    for row in read_rows(tmp_path / "train.parquet"):
        a, b = map(int, re.findall("[0-9]+", row["prompt"][0]["content"]))
        assert row["reward_model"]["ground_truth"] == str(a + b)


@pytest.mark.parametrize(("operators", "mistakes"), [("+-", 0.5), ("+", 1.5)])
def test_mistakes_are_for_sums_and_a_share(tmp_path: Path, operators: str, mistakes: float) -> None:
    with pytest.raises(ValueError, match="got mistakes="):
        arithmetic(tmp_path, operators=operators, mistakes=mistakes)


def test_a_hub_that_can_not_be_reached_is_tried_once(tmp_path, monkeypatch, caplog):
    """Six attempts took half a minute, and each was logged twice."""
    for switch in (constants, datasets.config):
        monkeypatch.setattr(switch, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(ValueError, match=r":9 can't be reached .*refused.*nothing of it is kept"):
        gsm8k(tmp_path / "out", source="openai/no-such-data")
    assert time.monotonic() - started < 5
    assert "Retrying" not in caplog.text
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
