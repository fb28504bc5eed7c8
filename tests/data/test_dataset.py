import json
import logging
from pathlib import Path

import hypothesis.strategies as st
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.dataset import Example, batches, tokenize_examples, tokenize_prompts
from jaxrl_llm.data.rows import load_rows, normalize_prompt_row, verl_rows
from tests.refusals import refuses


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


def test_files_give_the_same_rows(tmp_path):
    rows = [row(extra_info={"index": 4}), row("5-1=", "4", extra_info={"index": 5})]
    parquet, jsonl = str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    Path(jsonl).write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert verl_rows([parquet]) == verl_rows([jsonl]) == rows
    assert verl_rows([jsonl, parquet]) == rows + rows
    spec = FunctionSpec("verl_rows")  # a bare name is that of a reader
    assert load_rows(spec, [jsonl], normalize=normalize_prompt_row) == rows
    extra = pyarrow.array([[("index", 4)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    source = pyarrow.array(["arithmetic"]).dictionary_encode()
    columns = {name: pyarrow.array([row()[name]]) for name in ("prompt", "ability", "reward_model")}
    table = pyarrow.table(columns | {"data_source": source, "extra_info": extra})
    pyarrow.parquet.write_table(table, tmp_path / "maps.parquet")
    assert verl_rows([str(tmp_path / "maps.parquet")]) == rows[:1]
    for line in (json.dumps(row()), "\ufeff" + json.dumps(row())):  # and blank lines are no rows
        (tmp_path / "c.jsonl").write_text(f"{line}\r\n\n", encoding="utf-8")
        assert verl_rows([str(tmp_path / "c.jsonl")]) == [row()]


def test_files_that_can_not_be_read_are_named(tmp_path, subtests):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row()] * 50), tmp_path / "w.parquet")
    whole = (tmp_path / "w.parquet").read_bytes()
    line = json.dumps(row()).encode()
    for content, name, named in [
        *((whole[:kept], "a.parquet", "a.parquet") for kept in (0, 3, 200, -1)),
        *((None, f"gone{suffix}", f"gone{suffix}") for suffix in (".parquet", ".jsonl")),
        *((b"[]", "a.json", "jsonl"), (b"\xff\xfe\x00", "a.jsonl", "a.jsonl")),
        *((line + b"\n" + line[:-9], "a.jsonl", "line 2"), (b"[1]\n", "a.jsonl", "line 1")),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with subtests.test(f"{name} {content}"), pytest.raises(ValueError, match=named):
            verl_rows([str(tmp_path / name)])
    for paths in ([], "train.parquet"):
        with pytest.raises(ValueError, match="paths"):
            verl_rows(paths)


CUSTOM = """
def doubled(paths, *, times=2):
    return [dict(ROW, extra_info={"path": path}) for path in paths for _ in range(times)]

class Lazy:
    def __init__(self, paths, *, size):
        self.size = size
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
"""


def test_functions_and_classes_give_rows(tmp_path):
    (tmp_path / "mine.py").write_text(f"ROW = {row()!r}\n{CUSTOM}")

    def custom(name, **keywords):
        spec = FunctionSpec(f"{tmp_path}/mine.py:{name}", keywords)
        return load_rows(spec, ["p", "q"], normalize=normalize_prompt_row)

    assert [r["extra_info"]["path"] for r in custom("doubled")] == ["p", "p", "q", "q"]
    assert [r["extra_info"]["index"] for r in custom("Lazy", size=3)] == [0, 1, 2]
    with refuses(rows=(1,)):
        custom("broken")
    with pytest.raises(ValueError, match="generator"):
        custom("generator")
    for keywords in ({"tims": 3}, {"paths": ["x"]}):
        with pytest.raises(ConfigError, match=next(iter(keywords))):
            custom("doubled", **keywords)


def test_prompts_carry_what_rewards_need(tokenizer):
    rows = [row(), row("40-2=", "38", extra_info={"index": 9})]
    prompts, dropped = tokenize_prompts(rows, tokenizer, max_prompt_tokens=7)
    assert dropped == 0
    assert [p.tokens for p in prompts] == [(16, 1, 10, 2, 13, 17), (16, 4, 0, 11, 2, 13, 17)]
    second = prompts[1]
    assert (second.index, second.data_source, second.ground_truth) == (1, "arithmetic", "38")
    assert (second.extra_info, second.messages) == ({"index": 9}, rows[1]["prompt"])
    assert prompts[0].extra_info == {}
    given = {"max_prompt_tokens": 9, "template_kwargs": {"thinking": True}}
    (thinking,), _ = tokenize_prompts([row()], tokenizer, **given)
    assert thinking.tokens == (*prompts[0].tokens, 13)


def test_overlong_rows_are_refused_or_dropped(tokenizer, caplog):
    rows = [row("40-2=", "38"), row()]
    with refuses(rows=(0,)):
        tokenize_prompts(rows, tokenizer, max_prompt_tokens=6)
    with caplog.at_level(logging.WARNING):
        prompts, dropped = tokenize_prompts(
            rows, tokenizer, max_prompt_tokens=6, filter_overlong=True
        )
    assert ([p.index for p in prompts], dropped) == ([1], 1)
    assert "max_prompt_tokens=6" in caplog.text
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        tokenize_prompts([row()], tokenizer, max_prompt_tokens=2, filter_overlong=True)
    with pytest.raises(ValueError, match="dataset"):
        tokenize_prompts([], tokenizer, max_prompt_tokens=2)
    with refuses(rows=(0,)):  # with its end token, it has 8
        tokenize_examples([example()], tokenizer, max_tokens=7)
    rows = [example(response="123"), example()]
    kept, dropped = tokenize_examples(rows, tokenizer, max_tokens=8, filter_overlong=True)
    assert (len(kept), dropped) == (1, 1)


def test_examples_end_in_eos_and_know_their_response(tokenizer):
    examples, dropped = tokenize_examples([example(response="36")], tokenizer, max_tokens=9)
    mask = (False,) * 6 + (True,) * 3
    assert examples == [Example(tokens=(16, 1, 10, 2, 13, 17, 3, 6, 15), mask=mask)]
    assert dropped == 0
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="eos"):
        tokenize_examples([example()], tokenizer, max_tokens=9)


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


def test_epochs_and_seeds_have_orders_of_their_own_and_without_a_limit_they_go_on():
    def epochs(seed):
        order = batches(list(range(64)), batch_size=64, seed=seed)
        return [tuple(next(order)) for _ in range(2)]

    assert epochs(5) == epochs(5)
    assert len({*epochs(5), *epochs(9), tuple(range(64))}) == 5


def test_resume_is_exact_through_json():
    def fresh():
        return batches(list(range(7)), batch_size=3, seed=4)

    for taken in (0, 1, 4, 11):
        order = fresh()
        for _ in range(taken):
            next(order)
        state = json.loads(json.dumps(order.get_state()))
        expected = [next(order) for _ in range(9)]
        again = fresh()
        next(again)
        again.set_state(state)
        assert [next(again) for _ in range(9)] == expected, taken


def test_batches_refuse():
    kept = list(batches([1, 2, 3], batch_size=2, seed=0, epochs=1, drop_remainder=True))
    assert [len(batch) for batch in kept] == [2]
    never_full = {"batch_size": 5, "epochs": 2, "drop_remainder": True}
    for items, changes, named in [
        *(([], {}, "item"), ([1], {"batch_size": 0}, "batch_size"), ([1], {"epochs": 0}, "epochs")),
        *(([1], {"seed": seed}, "seed") for seed in (-1, 2**32)),
        ([1, 2], never_full, "fill"),
    ]:
        with pytest.raises(ValueError, match=named):
            batches(items, **{"batch_size": 1, "seed": 0, **changes})
