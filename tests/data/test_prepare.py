import io
import re

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from jaxrl_llm.configs.tasks.arithmetic import arithmetic
from jaxrl_llm.configs.tasks.gsm8k import gsm8k
from jaxrl_llm.configs.tasks.pictures import GREY, SHAPES, pictures
from jaxrl_llm.data.prepare import main
from jaxrl_llm.data.rows import read_rows, sft_rows, verl_rows
from jaxrl_llm.rewards.functions import by_source


def drawn(out, **changes):
    """Return the files of rows that a call writes, by name."""
    settings = {"train_rows": 60, "validation_rows": 20, "sft_rows": 30} | changes
    return {path.stem: read_rows(path) for path in arithmetic(out, **settings)}


def question(row):
    return row["prompt"][0]["content"].removesuffix("=")


def test_arithmetic_files_fit_the_schema_and_are_right(tmp_path):
    files = drawn(tmp_path, terms=3)
    assert [*map(len, files.values())] == [60, 20, 30]
    for name in ("train", "validation"):
        for index, row in enumerate(verl_rows([str(tmp_path / f"{name}.parquet")])):
            assert row["reward_model"]["ground_truth"] == str(eval(question(row)))
            assert re.fullmatch(r"\d{1,2}[+-]\d{1,2}[+-]\d{1,2}", question(row))
            assert row["data_source"] == "arithmetic"
            assert row["extra_info"] == {"split": name, "index": index}
    for row in sft_rows([str(tmp_path / "sft.parquet")]):
        assert row["response"] == str(eval(question(row)))


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
    files = drawn(tmp_path, operators="+", mistakes=1.0)
    for row in files["sft"]:
        a, b = map(int, question(row).split("+"))
        assert int(row["response"]) == (a // 10 + b // 10) % 10 * 10 + (a + b) % 10
    assert all(r["reward_model"]["ground_truth"] == str(eval(question(r))) for r in files["train"])


def pixels(row):
    (image,) = row["images"]
    return np.array(Image.open(io.BytesIO(image["bytes"]))).astype(int)


def test_pictures_show_their_answers_or_nothing(tmp_path):
    sizes, answers = {"train_rows": 60, "validation_rows": 30, "sft_rows": 30}, set()
    pictures(tmp_path / "shown", **sizes)
    pictures(tmp_path / "blank", **sizes, blank=True, mistakes=1.0)
    for name in ("train", "validation"):
        rows, blank = (
            verl_rows([str(tmp_path / f"{d}/{name}.parquet")]) for d in ("shown", "blank")
        )
        for row, other in zip(rows, blank, strict=True):
            kind, answer = row["data_source"], row["reward_model"]["ground_truth"]
            if kind == "pictures/dots":
                light = pixels(row).sum(-1) > 3 * 110
                assert answer == str(ndimage.label(light, np.ones((3, 3)))[1])
            for reply, score in ((answer, 1.0), (f"{answer}1", 0.0)):
                assert by_source(kind, reply, answer, {})["score"] == score
            assert (pixels(other) == GREY).all()
            assert other | {"images": None} == row | {"images": None}
            answers.add(answer)
    assert len(answers) > 25 and set(SHAPES) < answers
    right, wrong = (sft_rows([str(tmp_path / f"{d}/sft.parquet")]) for d in ("shown", "blank"))
    assert all(a["response"] != b["response"] for a, b in zip(right, wrong, strict=True))
    for name, value in {"kinds": ["cats"], "side": 15, "train_rows": 0, "mistakes": 1.5}.items():
        with pytest.raises(ValueError, match=name):
            pictures(tmp_path / "out", **sizes | {name: value})


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
