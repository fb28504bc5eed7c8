"""The questions of Search-R1, from rows of the published form."""

import json
from collections import Counter

import pytest

from jaxrl_llm.configs.tasks.search_r1 import search_r1
from jaxrl_llm.data.rows import read_rows, verl_rows
from jaxrl_llm.rewards.functions import by_source


def write(path, count, **fields):
    """Write rows with the columns that matter, and two that do not."""
    rows = [
        {"id": f"train_{n}", "question": f" who is {n}? ", "golden_answers": [f"No. {n}", f"n{n}"]}
        | {"data_source": ("nq", "hotpotqa")[n % 2], "metadata": None}
        | fields
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_questions_are_read_by_the_trainer_and_scored(tmp_path):
    source = f"{write(tmp_path / 'a.jsonl', 4)},{write(tmp_path / 'b.jsonl', 100)}"
    written = search_r1(tmp_path / "out", source=source, instruction="Find: ", validation_rows=20)
    assert {path.name: rows for path, rows in written.items()} == {
        "train.parquet": 4,
        "validation.parquet": 20,
    }
    train, held_out = (verl_rows([str(path)]) for path in written)
    assert train[3]["prompt"] == [{"role": "user", "content": "Find: who is 3?"}]
    assert Counter(row["data_source"] for row in train) == {
        "searchR1_nq": 2,
        "searchR1_hotpotqa": 2,
    }
    for row in train + held_out:
        number, truth = row["extra_info"]["index"], row["reward_model"]["ground_truth"]
        for said, score in ((f"no {number}", 1.0), (f"N{number}.", 1.0), ("no", 0.0)):
            reply = f"<answer>{said}</answer>"
            assert by_source(row["data_source"], reply, truth, {})["score"] == score
    numbers = [row["extra_info"]["index"] for row in held_out]
    assert numbers == sorted(set(numbers)) and max(numbers) > 20
    again = search_r1(tmp_path / "again", source=source, instruction="Find: ", validation_rows=20)
    assert [read_rows(path) for path in again] == [read_rows(path) for path in written]
    whole = search_r1(tmp_path / "whole", source=source, validation_rows=0)
    assert [*whole.values()] == [4, 100]


@pytest.mark.parametrize(
    "fields",
    [{"question": None}, {"golden_answers": "x"}, {"golden_answers": [1]}, {"data_source": 3}],
)
def test_other_columns_are_refused(tmp_path, fields):
    path = write(tmp_path / "a.jsonl", 1, **fields)
    with pytest.raises(
        ValueError, match=r"train row 0: expected texts as question and data_source"
    ):
        search_r1(tmp_path / "out", source=f"{path},{path}")
