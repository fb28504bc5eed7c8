"""Rows, tokenizing and batches."""

import copy
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data import dataset
from jaxrl_llm.data.dataset import Example, batches, tokenize_examples, tokenize_prompts
from jaxrl_llm.data.rows import (
    load_rows,
    normalize_example_row,
    normalize_prompt_row,
    sft_rows,
    verl_rows,
)


def row(question="1+2=", answer="3", **more):
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        **more,
    }


def example(question="1+2=", response="3"):
    return {"prompt": [{"role": "user", "content": question}], "response": response}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    return str(path)


# ---------------------------------------------------------------------------------------- reading


def test_parquet_and_jsonl_give_the_same_rows(tmp_path):
    rows = [row(extra_info={"index": 4}), row("5-1=", "4", extra_info={"index": 5})]
    parquet = write_parquet(tmp_path / "a.parquet", rows)
    jsonl = write_jsonl(tmp_path / "b.jsonl", rows)
    assert verl_rows([parquet]) == verl_rows([jsonl]) == rows
    assert verl_rows([jsonl, parquet]) == rows + rows


def test_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(row()) + "\r\n\n")
    assert verl_rows([str(path)]) == [row()]


@pytest.mark.parametrize("paths", [[], "train.parquet"])
def test_paths_must_be_a_list(paths):
    with pytest.raises(ValueError, match="expected a list of one file or more"):
        verl_rows(paths)


def test_missing_file(tmp_path):
    for suffix in (".parquet", ".jsonl"):
        with pytest.raises(ValueError, match=f"a{suffix}: no such file"):
            verl_rows([str(tmp_path / f"a{suffix}")])


def test_unknown_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"a.json: expected a .parquet or .jsonl file"):
        verl_rows([str(tmp_path / "a.json")])


@pytest.mark.parametrize("kept", [0, 3, 200, -1])
def test_truncated_parquet(tmp_path, kept):
    path = tmp_path / "a.parquet"
    whole = path.with_name("whole.parquet")
    write_parquet(whole, [row()] * 50)
    path.write_bytes(whole.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"a.parquet: not a whole parquet file: "):
        verl_rows([str(path)])


def test_truncated_jsonl_names_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps(row())[:-9])
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: not JSON: "):
        verl_rows([str(path)])


def test_jsonl_line_that_is_no_object(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: expected a JSON object, got a list"):
        verl_rows([str(path)])


def test_jsonl_that_is_not_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a.jsonl: can't be read: "):
        verl_rows([str(path)])


# --------------------------------------------------------------------------------------- checking

WRONG = [
    (("prompt",), None, "field 'prompt': expected a list of messages, got nothing"),
    (("prompt",), [], "field 'prompt': expected a list of messages, got []"),
    (("prompt",), "1+2=", "field 'prompt': expected a list of messages, got '1+2='"),
    (("prompt", 0), "hi", "field 'prompt[0]': expected an object with 'role' and"),
    (("prompt", 0, "role"), None, "field 'prompt[0].role': expected a string, got nothing"),
    (("prompt", 0, "content"), 3, "field 'prompt[0].content': expected a string, got 3"),
    (("data_source",), "", "field 'data_source': expected a non-empty string, got ''"),
    (("data_source",), 7, "field 'data_source': expected a non-empty string, got 7"),
    (("reward_model",), None, "field 'reward_model': expected an object with a"),
    (
        ("reward_model", "ground_truth"),
        None,
        "field 'reward_model.ground_truth': expected the reference answer, got nothing",
    ),
    (
        ("extra_info",),
        "x" * 99,
        "field 'extra_info': expected an object or nothing, got '" + "x" * 38 + "…",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_wrong_field_is_named(path, value, message, tmp_path):
    wrong = copy.deepcopy(row())
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = write_jsonl(tmp_path / "a.jsonl", [row(), wrong])
    with pytest.raises(ValueError, match=re.escape(f"a.jsonl, row 1: {message}")):
        verl_rows([file])


def test_missing_field_is_named():
    missing = row()
    del missing["data_source"]
    with pytest.raises(
        ValueError, match="field 'data_source': expected a non-empty string, got nothing"
    ):
        normalize_prompt_row(missing)


def test_row_that_is_no_dict():
    with pytest.raises(ValueError, match="expected a row as a dict, got 'x'"):
        normalize_prompt_row("x")


@pytest.mark.parametrize("response", [None, "", 3])
def test_wrong_response_is_named(response):
    with pytest.raises(ValueError, match=r"field 'response': expected a non-empty string or .*"):
        normalize_example_row(example(response=response))


def test_sft_rows_are_checked(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", [example()])
    assert sft_rows([good]) == [example()]
    bad = write_jsonl(tmp_path / "bad.jsonl", [row()])
    with pytest.raises(
        ValueError, match=r"bad.jsonl, row 0: field 'response': expected a non-empty string or one"
    ):
        sft_rows([bad])


# --------------------------------------------------------------------------------- custom datasets

CUSTOM = """
def doubled(paths, *, times=2):
    return [dict(ROW, extra_info={"path": path}) for path in paths for _ in range(times)]

class Lazy:
    def __init__(self, paths, *, size):
        self.paths, self.size = paths, size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError(index)
        return dict(ROW, extra_info={"index": index})

def broken(paths):
    return [ROW, {"prompt": "no list"}]

def generator(paths):
    yield ROW

def mapping(paths):
    return {"train": ROW}
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"ROW = {row()!r}\n{CUSTOM}")

    def load(name, **keywords):
        spec = FunctionSpec(f"{path}:{name}", keywords)
        return load_rows(spec, ["p", "q"], normalize=normalize_prompt_row)

    return load


def test_custom_function(custom):
    assert [r["extra_info"]["path"] for r in custom("doubled")] == ["p", "p", "q", "q"]
    assert len(custom("doubled", times=1)) == 2


def test_custom_class(custom):
    assert [r["extra_info"]["index"] for r in custom("Lazy", size=3)] == [0, 1, 2]


def test_custom_rows_are_checked(custom):
    with pytest.raises(
        ValueError,
        match=r"mine.py:broken, row 1: field 'prompt': expected a list of messages, got 'no list'",
    ):
        custom("broken")


@pytest.mark.parametrize(("name", "got"), [("generator", "generator"), ("mapping", "dict")])
def test_custom_result_must_be_a_sequence(custom, name, got):
    with pytest.raises(ValueError, match=f"expected a sequence of rows from .*, got a {got}"):
        custom(name)


def test_custom_keywords_are_checked(custom):
    with pytest.raises(ConfigError, match="takes no 'tims'; did you mean 'times'"):
        custom("doubled", tims=3)
    with pytest.raises(ConfigError, match="is given 'paths' by the trainer"):
        custom("doubled", paths=["x"])


def test_bare_names_are_the_readers(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row()])
    assert load_rows(FunctionSpec("verl_rows"), [file], normalize=normalize_prompt_row) == [row()]


# ------------------------------------------------------------------------------------- tokenizing


def test_prompts_carry_what_rewards_need(tokenizer):
    rows = [row(), row("40-2=", "38", extra_info={"index": 9})]
    prompts, dropped = tokenize_prompts(rows, tokenizer, max_prompt_tokens=7)
    assert dropped == 0
    assert [p.tokens for p in prompts] == [(16, 1, 10, 2, 13, 17), (16, 4, 0, 11, 2, 13, 17)]
    second = prompts[1]
    assert (second.index, second.data_source, second.ground_truth) == (1, "arithmetic", "38")
    assert (second.extra_info, second.messages) == ({"index": 9}, rows[1]["prompt"])
    assert prompts[0].extra_info == {}


def test_overlong_prompt_is_refused_or_dropped(tokenizer, caplog):
    rows = [row("40-2=", "38"), row()]
    message = "dataset row 0: expected at most max_prompt_tokens=6 tokens, got 7; raise it, or set"
    with pytest.raises(ValueError, match=message):
        tokenize_prompts(rows, tokenizer, max_prompt_tokens=6)
    with caplog.at_level(logging.WARNING):
        prompts, dropped = tokenize_prompts(
            rows, tokenizer, max_prompt_tokens=6, filter_overlong=True
        )
    assert ([p.index for p in prompts], dropped) == ([1], 1)
    assert "dropped 1 of 2 rows longer than max_prompt_tokens=6" in caplog.text


def test_nothing_left_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="none of 1 rows is left under max_prompt_tokens=2"):
        tokenize_prompts([row()], tokenizer, max_prompt_tokens=2, filter_overlong=True)
    with pytest.raises(ValueError, match="expected rows, got a file without any"):
        tokenize_prompts([], tokenizer, max_prompt_tokens=2)


def test_template_keywords_reach_the_template(tokenizer):
    prompts, _ = tokenize_prompts(
        [row()], tokenizer, max_prompt_tokens=9, template_kwargs={"thinking": True}
    )
    assert prompts[0].tokens == (16, 1, 10, 2, 13, 17, 13)


def test_examples_end_in_eos_and_know_their_response(tokenizer):
    examples, dropped = tokenize_examples([example(response="36")], tokenizer, max_tokens=9)
    mask = (False,) * 6 + (True,) * 3
    assert examples == [Example(tokens=(16, 1, 10, 2, 13, 17, 3, 6, 15), mask=mask)]
    assert dropped == 0


def test_overlong_example_counts_the_eos(tokenizer):
    with pytest.raises(ValueError, match="row 0: expected at most max_tokens=7 tokens, got 8"):
        tokenize_examples([example()], tokenizer, max_tokens=7)
    rows = [example(response="123"), example()]
    kept, dropped = tokenize_examples(rows, tokenizer, max_tokens=8, filter_overlong=True)
    assert (len(kept), dropped) == (1, 1)


def test_examples_need_a_token_that_ends_an_answer(tokenizer):
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="no token ends an answer, and there is no eos token"):
        tokenize_examples([example()], tokenizer, max_tokens=9)


# --------------------------------------------------------------------------------------- batching


@given(
    items=st.sampled_from([1, 2, 5, 12]),
    batch_size=st.sampled_from([1, 3, 4, 7]),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
)
def test_every_item_comes_once_per_epoch(items, batch_size, seed, shuffle, epochs):
    order = batches(
        list(range(items)), batch_size=batch_size, seed=seed, shuffle=shuffle, epochs=epochs
    )
    got = list(order)
    assert all(len(batch) == batch_size for batch in got[:-1])
    flat = [item for batch in got for item in batch]
    assert len(flat) == items * epochs
    for epoch in range(epochs):
        one = flat[epoch * items : (epoch + 1) * items]
        assert sorted(one) == list(range(items))
        assert shuffle or one == list(range(items))


@pytest.mark.parametrize("size", [1, 3])
def test_endless_batches_have_one_size_and_go_on(size):
    order = batches(list(range(5)), batch_size=size, seed=1)
    flat = [item for _ in range(150 // size) for item in next(order)]
    assert all(sorted(flat[i : i + 5]) == list(range(5)) for i in range(0, 150, 5))


def test_epochs_and_seeds_have_orders_of_their_own():
    def epochs(seed):
        order = batches(list(range(64)), batch_size=64, seed=seed, epochs=2)
        return [tuple(batch) for batch in order]

    assert epochs(5) == epochs(5)
    assert len({*epochs(5), *epochs(9), tuple(range(64))}) == 5


@pytest.mark.parametrize("taken", [0, 1, 4, 11])
def test_resume_is_exact_through_json(taken):
    def fresh():
        return batches(list(range(7)), batch_size=3, seed=4)

    order = fresh()
    for _ in range(taken):
        next(order)
    state = json.loads(json.dumps(order.get_state()))
    expected = [next(order) for _ in range(9)]
    again = fresh()
    next(again)
    again.set_state(state)
    assert [next(again) for _ in range(9)] == expected


def test_remainder_can_be_dropped():
    kept = list(batches([1, 2, 3], batch_size=2, seed=0, epochs=1, drop_remainder=True))
    assert [len(batch) for batch in kept] == [2]


@pytest.mark.parametrize(
    ("items", "changes", "message"),
    [
        ([], {}, "expected one item or more, got none"),
        ([1], {"batch_size": 0}, "expected at least 1 each, got batch_size=0, epochs=None"),
        ([1], {"epochs": 0}, "expected at least 1 each, got batch_size=1, epochs=0"),
        ([1], {"seed": -1}, r"expected 0 <= seed < 2\*\*32, got -1"),
        ([1], {"seed": 2**32}, r"expected 0 <= seed < 2\*\*32, got 4294967296"),
        (
            [1, 2],
            {"batch_size": 5, "epochs": 2, "drop_remainder": True},
            "2 items for 2 epochs never fill a batch of 5",
        ),
    ],
)
def test_batches_refuse(items, changes, message):
    with pytest.raises(ValueError, match=message):
        batches(items, **{"batch_size": 1, "seed": 0, **changes})


@pytest.mark.parametrize(
    ("module", "needed"), [("prepare", ("numpy",)), ("dataset", ("jax", "numpy"))]
)
def test_importing_the_data_modules_imports_nothing_heavy(module, needed):
    heavy = "jax grain transformers datasets pyarrow numpy torch math_verify"
    code = (
        f"import sys; import jaxrl_llm.data.{module}\n"
        f"print([m for m in '{heavy}'.split() if m in {{*sys.modules}} - {{*{needed}}}])"
    )
    search = [*sys.path, str(Path(dataset.__file__).parents[2])]
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {search!r}; {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
