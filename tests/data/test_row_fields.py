import json
import re

import jinja2
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.config.errors import ConfigError, RowError, RunError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.dataset import (
    as_prompts,
    tokenize_examples,
    tokenize_preferences,
    tokenize_prompts,
)
from jaxrl_llm.data.rows import (
    LISTED,
    load_rows,
    map_rows,
    normalize_example_row,
    normalize_message,
    normalize_preference_row,
    normalize_prompt_row,
    preference_rows,
    sft_rows,
    verl_rows,
)
from tests.refusals import refuses

USER = {"role": "user", "content": "1+2="}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
VERL = {"prompt": [USER], "data_source": "sums", "reward_model": {"ground_truth": "3"}}


WHOLE = {"a": 1, "s": "x", "opts": {"deep": [1], "flag": True}}
CALL_OF_ALL = {**CALL, "id": "i", "function": {"name": "add", "arguments": WHOLE}}
CHATS = [
    [USER],
    [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}],
    [USER, CALLS, {"role": "tool", "content": "7", "name": "add", "tool_call_id": "call00000"}],
    [USER, CALLS | {"reasoning_content": "b", "tool_calls": [CALL, CALL_OF_ALL]}],
]
"""Messages with other keys each."""


def both(folder, rows, read):
    """Return the rows that a parquet and a jsonl file of the same rows give."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read([str(folder / "a.parquet")]), read([str(folder / "a.jsonl")])


def test_parquet_adds_nothing_to_rows(tmp_path):
    """Arrow gives each struct the keys of all others; a template would tell a model of them."""
    rows = [{**VERL, "prompt": chat, "tools": [TOOL]} for chat in CHATS]
    prompts, again = both(tmp_path, rows, verl_rows)
    assert [row["prompt"] for row in prompts] == CHATS and prompts == again
    answers = [CHATS[1][1], CALLS, CHATS[3][1], CALLS]
    rows = [{"prompt": c, "response": said} for c, said in zip(CHATS, answers, strict=True)]
    examples, again = both(tmp_path, rows, sft_rows)
    assert examples == again == rows
    other = {"role": "assistant", "content": "other", "name": "b"}
    pairs = [
        {"chosen": [*c, said], "rejected": [*c, other]}
        for c, said in zip(CHATS, answers, strict=True)
    ]
    made, again = both(tmp_path, pairs, preference_rows)
    assert [(r["prompt"], r["chosen"]) for r in made] == [*zip(CHATS, answers, strict=True)]
    assert made == again


BARE = {"name": "add", "arguments": {"a": 1}}


def calling(*calls, **more):
    return {**CALLS, "tool_calls": [*calls], **more}


def called(arguments):
    return {**CALL, "function": {"name": "add", "arguments": arguments}}


MESSAGES = {
    "OpenAI's text of arguments": (calling(called('{"a": 1}')), CALLS),
    "null beside calls": (CALLS | {"content": None}, CALLS),
    "nothing beside calls": ({k: v for k, v in CALLS.items() if k != "content"}, CALLS),
    "a bare call": (calling(BARE), CALLS),
    "a client's dump": (CALLS | {"refusal": None, "annotations": []}, CALLS),
    "no arguments": (calling({**BARE, "arguments": None}), calling(called({}))),
    "no calls": ({**USER, "tool_calls": [], "name": None, "thinking": ""}, USER),
    "gpt-oss": (CALLS | {"thinking": "Add."}, CALLS | {"reasoning_content": "Add."}),
    "vLLM": (calling(BARE, content=None, reasoning="Add."), {**CALLS, "reasoning_content": "Add."}),
    "a null of jsonl": (calling({**BARE, "arguments": {"a": None}}), calling(called({"a": None}))),
}


def test_messages_of_data_sets_have_one_form():
    wrong = {n: m for n, (given, m) in MESSAGES.items() if normalize_message(given, "m") != m}
    assert not wrong


def test_tools_have_one_form():
    for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]]):
        assert normalize_prompt_row({**VERL, "tools": tools})["tools"] == [TOOL]
    for nothing in (None, [], "", "[]"):
        assert normalize_prompt_row({**VERL, "tools": nothing}) == VERL


REFUSED = [
    *(({**USER, key: value}, f"m.{key}") for key, value in {"weight": 0, "train": False}.items()),
    *(({**USER, key: value}, f"m.{key}") for key, value in {"timestamp": "now", "name": 3}.items()),
    *(({**USER, "content": text}, "m.content") for text in (None, "a\ud83d")),
    ({**CALLS, "tool_calls": "add(1)"}, "m.tool_calls"),
    (calling("add(1)"), "m.tool_calls[0]"),
    *((calling({**BARE, "arguments": a}), "m.tool_calls[0].arguments") for a in ("1, 2", "[1]")),
    (calling({**BARE, "arguments": {"a": "\udc00"}}), "arguments.a"),
    (calling({**BARE, "name": ""}), "m.tool_calls[0].name"),
    (calling({**BARE, "output": "3"}), "m.tool_calls[0]"),
    (calling({**CALL, "type": "custom"}), "m.tool_calls[0].type"),
    ({"role": "assistant", "content": "", "thinking": "a", "reasoning": "b"}, "m"),
]
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
SAYS = {"role": "assistant", "content": "b"}
ROWS = {
    normalize_prompt_row: [
        *(({**VERL, "prompt": prompt}, "prompt") for prompt in (None, [], "1+2=")),
        ({**VERL, "prompt": ["hi"]}, "prompt[0]"),
        *(({**VERL, "prompt": [{**USER, k: 3}]}, f"prompt[0].{k}") for k in ("role", "content")),
        *(({**VERL, "data_source": source}, "data_source") for source in ("", 7, None)),
        ({k: v for k, v in VERL.items() if k != "data_source"}, "data_source"),
        *(({**VERL, "reward_model": model}, "reward_model") for model in (None, "3")),
        ({**VERL, "reward_model": {"ground_truth": None}}, "ground_truth"),
        ({**VERL, "reward_model": {"ground_truth": float("nan")}}, "ground_truth"),
        ({**VERL, "extra_info": "x" * 99}, "extra_info"),
        ({**VERL, "tools": "{"}, "tools"),
        ({**VERL, "tools": [{"type": "function"}]}, "tools[0]"),
        ({**VERL, "tools": [{"name": "a", "parameters": "x"}]}, "parameters"),
    ],
    normalize_example_row: [
        *(({"prompt": [USER], "response": said}, "response") for said in (None, "", 3)),
        ({"prompt": [USER], "response": [USER]}, "response[0].role"),
        ({"prompt": [USER], "completion": ""}, "completion"),
        ({"prompt": [USER], "response": "3", "weight": 0.0}, "weight"),
        ({"messages": [USER]}, "messages"),
        ({"messages": [USER, CALLS], "response": "3"}, "response"),
        ({"messages": [USER, CALLS], "prompt": [USER]}, "prompt"),
    ],
    normalize_preference_row: [
        ({**PAIR, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({**PAIR, "rejected": [{**USER, "role": "tool"}]}, "rejected[0].role"),
        ({"chosen": [USER, CALLS], "rejected": "b"}, "rejected"),
        ({"prompt": [SAYS], "chosen": [USER, CALLS], "rejected": [USER, SAYS]}, "prompt"),
    ],
}


def test_what_nothing_reads_is_refused(subtests):
    cases = [(lambda message: normalize_message(message, "m"), *case) for case in REFUSED]
    cases += [(normalize, *case) for normalize, some in ROWS.items() for case in some]
    for normalize, row, field in cases:
        with (
            subtests.test(str(row)),
            pytest.raises(ValueError, match=f"^field .*{re.escape(field)}'"),
        ):
            normalize(row)
    with pytest.raises(ValueError, match="dict"):
        normalize_prompt_row("x")


def test_what_is_null_is_not_there():
    assert normalize_preference_row({**PAIR, "completions": None, "images": None, "margin": None})
    unpaired = {"prompt": "a", "chosen": None, "rejected": None, "completion": "b", "label": True}
    assert normalize_preference_row(unpaired)
    row = {"prompt": [USER], "response": "3"}
    assert normalize_example_row({**row, "messages": None, "tools": None}) == row


def test_answers_that_differ_in_a_call_alone_are_a_pair():
    other = calling({**BARE, "arguments": '{"a": 2}'})
    given = {"prompt": "1+2=", "chosen": [CALLS], "rejected": other, "tools": [TOOL]}
    row = normalize_preference_row(given)
    assert row["chosen"] == CALLS and row["tools"] == [TOOL]
    with pytest.raises(ValueError, match="same"):
        normalize_preference_row({"prompt": "1+2=", "chosen": CALLS, "rejected": [CALLS]})


class Letters:
    """A tokenizer with a token `<zz>` that its model lacks, told what to raise for `!`."""

    def __init__(self, error=None):
        self.error, self._tokenizer = error, load_tokenizer("configs/quickstart")
        self._tokenizer.add_tokens(["<zz>"])
        self.beyond = self._tokenizer.convert_tokens_to_ids("<zz>")

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **keywords):
        if "!" in text:
            raise self.error
        return self._tokenizer(text, **keywords)


def prompt_row(text):
    return {**VERL, "prompt": [{**USER, "content": text}]}


def of_each(function, row_of, **size):
    """Return a function that tokenizes texts, each in a row of this form."""
    return lambda texts, tokenizer, **more: function(
        [*map(row_of, texts)], tokenizer, **size, **more
    )


PATHS = {
    "prompts": of_each(tokenize_prompts, prompt_row, max_prompt_tokens=99),
    "responses": of_each(
        tokenize_examples, lambda text: {"prompt": [USER], "response": text}, max_tokens=99
    ),
    "rejected answers": of_each(
        tokenize_preferences,
        lambda text: normalize_preference_row({**PAIR, "rejected": text + "?"}),
        max_tokens=99,
    ),
    "texts given in Python": as_prompts,
}
THROWN = [KeyError("content"), AttributeError(), jinja2.TemplateError("no tools here")]
THROWN += [AssertionError("several\nlines \ud83d")]


@pytest.mark.parametrize("path", PATHS)
def test_whatever_a_row_raises_names_it(path):
    name = "prompt" if path == "texts given in Python" else "dataset row"
    for error in THROWN:
        with pytest.raises(RowError) as caught:
            PATHS[path](["1", "2!", "3", "4!"], Letters(error))
        assert (caught.value.row, caught.value.rows) == (1, (1, 3))
        first, second = caught.value.args
        assert first.startswith(f"{name} 1: ") and second.startswith(f"{name} 3: ")
        assert len(first) > len(f"{name} 1: ") and "\n" not in first
        first.encode()  # it can be printed
    tokenizer = Letters()
    size = tokenizer.beyond
    assert PATHS[path](["1", "<zz>"], tokenizer, vocab_size=size + 1)
    with refuses(rows=(1,)):  # the model does not have this id
        PATHS[path](["1", "<zz>"], tokenizer, vocab_size=size)
    with refuses(rows=(1,)):
        as_prompts([[1], [3, 4]], tokenizer, vocab_size=4)


def test_ten_bad_rows_are_listed_and_the_others_counted():
    def use(number, row):
        if row >= 5:
            raise ValueError("no")

    with pytest.raises(RowError) as caught:
        map_rows(use, range(40))
    *listed, rest = caught.value.args
    assert caught.value.rows == tuple(range(5, 40)) and len(listed) == LISTED
    assert rest == f"and {35 - LISTED} more rows"


def test_what_is_about_no_row_stays_what_it_is():
    for error in (ConfigError("a key"), RunError("a run"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            PATHS["prompts"](["1!"], Letters(error))
        assert caught.value is error


def test_rows_are_known_by_their_file(tmp_path):
    tokenizer = Letters()
    for name, texts in (("a", "11"), ("b", ["1", "<zz>"])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(prompt_row(t)) for t in texts))
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    rows = load_rows(FunctionSpec("verl_rows"), files, normalize=normalize_prompt_row)
    with pytest.raises(RowError, match=f"^{files[1]}, row 1") as caught:
        tokenize_prompts(rows, tokenizer, max_prompt_tokens=9, vocab_size=tokenizer.beyond)
    assert caught.value.row == 3
