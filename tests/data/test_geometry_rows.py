"""Geometry3K from rows of the published form."""

import io
from types import SimpleNamespace

import pytest
from PIL import Image

from jaxrl_llm.configs.tasks import _sources
from jaxrl_llm.configs.tasks.geo3k import BOX_INSTRUCTION, geo3k
from jaxrl_llm.data.rows import read_rows, verl_rows, write_rows

DRAWING = Image.new("RGB", (9, 7), (10, 200, 30))


def file_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PROBLEM = {
    "images": [{"bytes": file_of(DRAWING), "path": None}],
    "problem": "<image>Find $x$.",
    "answer": r"3 \sqrt { 2 }",
}


def saved(folder, train, test):
    home = folder / "data"
    home.mkdir(parents=True)
    write_rows(home / "train-00000-of-00001.parquet", train)
    write_rows(home / "test-00000-of-00001.parquet", test)
    return str(folder)


def test_a_copy_of_the_hub_keeps_its_files(tmp_path):
    source = saved(tmp_path / "copy", [PROBLEM] * 2, [PROBLEM])
    written = geo3k(tmp_path / "out", source=source)
    assert {path.name: rows for path, rows in written.items()} == {
        "train.parquet": 2,
        "validation.parquet": 1,
    }
    _, row = verl_rows([str(tmp_path / "out/train.parquet")])
    assert row == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>Find $x$. {BOX_INSTRUCTION}"}],
        "images": [{"bytes": PROBLEM["images"][0]["bytes"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": PROBLEM["answer"]},
        "extra_info": {
            "split": "train",
            "index": 1,
            "answer": PROBLEM["answer"],
            "question": "<image>Find $x$.",
        },
    }


def test_pictures_that_the_reader_has_opened_become_files(tmp_path, monkeypatch):
    opened = PROBLEM | {"images": [DRAWING]}
    monkeypatch.setattr(_sources, "source_rows", lambda *_: [opened])
    (path, _) = geo3k(tmp_path)
    (image,) = read_rows(path)[0]["images"]
    with Image.open(io.BytesIO(image["bytes"])) as again:
        assert (again.size, again.getpixel((8, 6))) == ((9, 7), (10, 200, 30))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": 3}, "train row 0: expected texts as problem and answer, and images as a list"),
        ({"problem": "Find $x$."}, "train row 0: expected as many images .* <image>, 0, got 1"),
        ({"images": [{"path": "a.png"}]}, "train row 0: expected an image with its bytes, got"),
        ({"images": [SimpleNamespace()]}, "train row 0: expected an image with its bytes, got"),
    ],
)
def test_other_rows_are_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(_sources, "source_rows", lambda *_: [PROBLEM | changes])
    with pytest.raises(ValueError, match=message):
        geo3k(tmp_path)
