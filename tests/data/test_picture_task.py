import io

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from jaxrl_llm.configs.tasks.pictures import GREY, SHAPES, pictures
from jaxrl_llm.data.rows import read_rows, sft_rows, verl_rows
from jaxrl_llm.rewards.functions import by_source

FILES = ("train", "validation", "sft")


SIZES = {"train_rows": 60, "validation_rows": 30, "sft_rows": 60}


def write(out, **changes):
    settings = SIZES | changes
    written = pictures(out, **settings)
    return {path.stem: read_rows(path) for path in written}


def pixels(row):
    (image,) = row["images"]
    with Image.open(io.BytesIO(image["bytes"])) as opened:
        assert (opened.format, opened.mode) == ("PNG", "RGB")
        return np.array(opened).astype(int)


def drawn(row):
    """Return which pixels are light; there are two colours, each for all of its pixels."""
    colours = pixels(row)
    light = colours.sum(-1) > 3 * 110
    assert len(np.unique(colours[light], axis=0)) == len(np.unique(colours[~light], axis=0)) == 1
    return light


def test_answers_are_what_is_drawn(tmp_path):
    write(tmp_path)
    answers = set()
    for split in ("train", "validation"):
        for index, row in enumerate(verl_rows([str(tmp_path / f"{split}.parquet")])):
            kind, answer = row["data_source"], row["reward_model"]["ground_truth"]
            light = drawn(row)
            if kind == "pictures/dots":
                assert answer == str(ndimage.label(light, np.ones((3, 3)))[1])
            assert kind == f"pictures/{('dots', 'digits', 'shapes')[index % 3]}"
            assert row["extra_info"] == {"split": split, "index": index}
            for reply, score in ((answer, 1.0), (f"{answer}1", 0.0)):
                assert by_source(kind, reply, answer, {})["score"] == score
            answers.add(answer)
    assert len(answers) > 25 and set(SHAPES) < answers
    wrong = sft_rows([str(path) for path in pictures(tmp_path, **SIZES, mistakes=1.0)][2:])
    right = sft_rows([str(path) for path in pictures(tmp_path, **SIZES)][2:])
    assert all(a["response"] != b["response"] for a, b in zip(wrong, right, strict=True))


def test_blank_pictures_belong_to_the_same_rows(tmp_path):
    shown, blank = write(tmp_path / "shown"), write(tmp_path / "blank", blank=True)
    assert shown == write(tmp_path / "again")
    assert shown != write(tmp_path / "other", seed=1)
    for split in FILES:
        for row, other in zip(shown[split], blank[split], strict=True):
            assert (pixels(other) == GREY).all() and pixels(other).shape == (32, 32, 3)
            assert other | {"images": None} == row | {"images": None}


def test_other_settings_are_refused(tmp_path, subtests):
    for name, value in {"kinds": ["cats"], "side": 15, "train_rows": 0, "mistakes": 1.5}.items():
        with subtests.test(name), pytest.raises(ValueError, match=name):
            write(tmp_path / "out", **{name: value})
    assert not (tmp_path / "out").exists()
