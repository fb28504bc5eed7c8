import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from jaxrl_llm.configs.tasks.pictures import GREY, SHAPES, digit_of, pictures
from jaxrl_llm.data.rows import read_rows, sft_rows, verl_rows
from jaxrl_llm.rewards.functions import by_source

FILES = ("train", "validation", "sft")


def write(out, **changes):
    settings = {"train_rows": 60, "validation_rows": 30, "sft_rows": 60} | changes
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


def cropped(ink):
    rows, columns = (np.flatnonzero(ink.any(axis)) for axis in (1, 0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def read_dots(ink):
    return str(ndimage.label(ink, np.ones((3, 3)))[1])


def read_digits(ink):
    scale, half = ink.shape[0] // 10, ink.shape[1] // 2
    text = ""
    for part in (ink[:, :half], ink[:, half:]):
        seen = cropped(part)[::scale, ::scale]
        (digit,) = [d for d in range(10) if np.array_equal(cropped(digit_of(d)), seen)]
        text += str(digit)
    return text


def read_shapes(ink):
    """Name the left shape by its corners and its middle."""
    seen = cropped(ink[:, : ink.shape[1] // 2])
    top, bottom = seen[0, 0], seen[-1, 0]
    names = {(True, True): "square", (False, True): "wedge"}
    round_or_not = "disc" if seen[len(seen) // 4, len(seen) // 4] else "cross"
    return names.get((bool(top), bool(bottom)), round_or_not)


READERS = {"dots": read_dots, "digits": read_digits, "shapes": read_shapes}


def test_answers_are_what_is_drawn(tmp_path):
    write(tmp_path)
    answers = Counter()
    for split in ("train", "validation"):
        for index, row in enumerate(verl_rows([str(tmp_path / f"{split}.parquet")])):
            kind = tuple(READERS)[index % 3]
            answer = READERS[kind](drawn(row))
            assert row["data_source"] == f"pictures/{kind}"
            assert row["reward_model"]["ground_truth"] == answer
            assert row["extra_info"] == {"split": split, "index": index}
            for reply, score in ((answer, 1.0), (f"{answer}1", 0.0)):
                assert by_source(row["data_source"], reply, answer, {})["score"] == score
            answers[answer] += 1
    assert len(answers) > 25 and set(SHAPES) < set(answers)
    for index, row in enumerate(sft_rows([str(tmp_path / "sft.parquet")])):
        assert row["response"] == tuple(READERS.values())[index % 3](drawn(row))
    for index, row in enumerate(write(tmp_path, mistakes=1.0)["sft"]):
        assert row["response"] != tuple(READERS.values())[index % 3](drawn(row))


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
