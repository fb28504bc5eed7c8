import re

import pytest

from jaxrl_llm.configs.tasks.arithmetic import arithmetic
from jaxrl_llm.configs.tasks.gsm8k import gsm8k
from jaxrl_llm.data.prepare import main
from jaxrl_llm.data.rows import read_rows, sft_rows, verl_rows


def drawn(out, **changes):
    """Return the files of rows that a call writes, by name."""
    settings = {"train_rows": 60, "validation_rows": 20, "sft_rows": 30} | changes
    return {path.stem: read_rows(path) for path in arithmetic(out, **settings)}


def question(row):
    return row["prompt"][0]["content"].removesuffix("=")


def test_arithmetic_files_fit_the_schema_and_are_right(tmp_path):
    *_, shown = drawn(tmp_path, operators="+", zero_pad=True, mistakes=1.0, shown=True)["sft"]
    first, second, answer = map(int, re.findall(r"\d+", question(shown)))
    assert answer == first + second and shown["response"] == f"{answer:03}"
    files = drawn(tmp_path, terms=3)
    assert {name: len(rows) for name, rows in files.items()} == {
        **{"train": 60, "validation": 20, "sft": 30}
    }
    for name in ("train", "validation"):
        for index, row in enumerate(verl_rows([str(tmp_path / f"{name}.parquet")])):
            assert row["reward_model"]["ground_truth"] == str(eval(question(row)))
            assert re.fullmatch(r"\d{1,2}[+-]\d{1,2}[+-]\d{1,2}", question(row))
            assert row["data_source"] == "arithmetic"
            assert row["extra_info"] == {"split": name, "index": index}
    for row in sft_rows([str(tmp_path / "sft.parquet")]):
        assert row["response"] == str(eval(question(row)))
    for row in drawn(tmp_path / "products", terms=4, operators="-*+", digits=1)["train"]:
        assert row["reward_model"]["ground_truth"] == str(eval(question(row)))


def test_validation_problems_occur_nowhere_else_and_the_seed_decides(tmp_path):
    """All 200 problems are used, so that chance alone would let some meet."""
    made = []
    for name, seed in (("a", 0), ("b", 1), ("again", 1)):
        sizes = {"train_rows": 120, "validation_rows": 80, "sft_rows": 120}
        files = drawn(tmp_path / name, digits=1, seed=seed, **sizes)
        train, validation, sft = ([*map(question, rows)] for rows in files.values())
        every = {f"{a}{op}{b}" for a in range(10) for b in range(10) for op in "+-"}
        assert {*train, *validation} == {*sft, *validation} == every
        assert [len(set(part)) for part in (train, validation, sft)] == [120, 80, 120]
        made.append((train, validation, sft))
    assert made[0] != made[1] == made[2]


def test_arithmetic_refuses(tmp_path, subtests):
    for changes, named in [
        *(({"digits": 1}, "problems"), ({"digits": 9, "terms": 9}, "terms")),
        *(({"operators": text}, "operators") for text in ("/", "++", "")),
        *(({"train_rows": 0}, "train_rows"), ({"sft_rows": -1}, "sft_rows")),
        *(({"operators": "+-", "mistakes": 0.5}, "mistakes"), ({"mistakes": 1.5}, "mistakes")),
    ]:
        settings = {"train_rows": 200, "validation_rows": 1, "sft_rows": 0, **changes}
        with subtests.test(str(changes)), pytest.raises(ValueError, match=named):
            arithmetic(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_mistakes_forget_every_carry_in_the_supervised_file_only(tmp_path):
    files = drawn(tmp_path, sft_rows=400, operators="+", mistakes=0.5)
    wrong = carrying = 0
    for row in files["sft"]:
        a, b = map(int, re.findall("[0-9]+", question(row)))
        carried, forgotten = a + b, (a // 10 + b // 10) % 10 * 10 + (a + b) % 10
        assert int(row["response"]) in (carried, forgotten)
        carrying += carried != forgotten
        wrong += int(row["response"]) != carried
    assert 0.35 < wrong / carrying < 0.65
    assert all(r["reward_model"]["ground_truth"] == str(eval(question(r))) for r in files["train"])


def test_command_line_prints_what_it_wrote(tmp_path, capsys):
    sizes = ["--train-rows", "9", "--validation_rows", "3", "--sft_rows", "4"]
    main(["arithmetic", "--out", str(tmp_path), *sizes, "--operators=-"])
    expected = [("train", 9), ("validation", 3), ("sft", 4)]
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / name}.parquet: {rows} rows" for name, rows in expected
    ]
    assert all("-" in question(row) for row in read_rows(tmp_path / "train.parquet"))


def test_command_line_errors_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^error: [^\n]*$"):
        main(["arithmetic", "--out", str(tmp_path), "--digits", "1"])
    for arguments in (["nonsense"], ["arithmetic"], ["arithmetic", "--out", "x", "--train", "3"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "--train" in capsys.readouterr().err


def test_a_hub_that_can_not_be_reached_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^[^\n]*hub[^\n]*$"):  # offline, as tests are
        gsm8k(tmp_path / "out")
