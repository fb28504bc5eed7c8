"""One form for rows, whatever wrote them; what would be left out is refused; bad rows are named."""

import copy
import json

import hypothesis.strategies as st
import jinja2
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given

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

USER = {"role": "user", "content": "1+2="}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
VERL = {"prompt": [USER], "data_source": "sums", "reward_model": {"ground_truth": "3"}}


# ------------------------------------------------------------------------- whatever wrote the rows

WHOLE = {"a": 1, "s": "x", "opts": {"deep": [1], "flag": True}}
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"a": st.integers(0, 9), "s": st.text("xyz"), "opts": st.just(WHOLE["opts"])}
)
CALLED = st.builds(
    lambda name, arguments, identity: {
        **({"id": identity} if identity else {}),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.sampled_from(["add", "search"]),
    ARGUMENTS,
    st.sampled_from(["", "call00000"]),
)
ANSWER = st.builds(
    lambda content, calls, more: {
        "role": "assistant",
        "content": content,
        **({"tool_calls": calls} if calls else {}),
        **more,
    },
    st.text("ab", min_size=1),
    st.lists(CALLED, max_size=2),
    st.fixed_dictionaries({}, optional={"reasoning_content": st.text("cd", min_size=1)}),
)
RESULT = {"role": "tool", "content": "7", "name": "add", "tool_call_id": "call00000"}
CHAT = st.lists(ANSWER, max_size=2).map(lambda said: [USER, *said, *([RESULT] if said else [])])
FULL = {"role": "assistant", "content": "", "reasoning_content": "b"} | {
    "tool_calls": [{**CALL, "id": "i", "function": {"name": "add", "arguments": WHOLE}}]
}


def both(folder, rows, read):
    """Return the rows that a parquet and a jsonl file of the same rows give."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read([str(folder / "a.parquet")]), read([str(folder / "a.jsonl")])


@given(chats=st.lists(CHAT, min_size=1, max_size=4), answer=ANSWER)
def test_parquet_adds_nothing_to_rows(chats, answer, tmp_path_factory):
    """Arrow gives each struct the keys of all others; a template would tell a model of them."""
    folder = tmp_path_factory.mktemp("rows")
    chats = [*chats, [USER, FULL, RESULT]]
    prompts, again = both(
        folder, [{**VERL, "prompt": chat, "tools": [TOOL]} for chat in chats], verl_rows
    )
    assert [row["prompt"] for row in prompts] == chats and prompts == again
    answers = [*[answer] * (len(chats) - 1), FULL]
    rows = [{"prompt": c, "response": said} for c, said in zip(chats, answers, strict=True)]
    examples, again = both(folder, rows, sft_rows)
    assert examples == again == rows
    other = {"role": "assistant", "content": "other", "name": "b"}
    pairs = [
        {"chosen": [*c, said], "rejected": [*c, other]}
        for c, said in zip(chats, answers, strict=True)
    ]
    made, again = both(folder, pairs, preference_rows)
    assert [(r["prompt"], r["chosen"]) for r in made] == [*zip(chats, answers, strict=True)]
    assert made == again


@given(chat=CHAT, answer=ANSWER)
def test_a_row_in_form_stays_as_it_is(chat, answer):
    other = {"role": "assistant", "content": "other"}
    for normalize, row in (
        (normalize_prompt_row, {**VERL, "prompt": chat, "tools": [TOOL]}),
        (normalize_example_row, {"prompt": chat, "response": answer}),
        (normalize_example_row, {"prompt": chat, "response": "text"}),
        (normalize_example_row, {"messages": [*chat, answer], "tools": [TOOL]}),
        (normalize_preference_row, {"prompt": chat, "chosen": answer, "rejected": other}),
        (normalize_preference_row, {"prompt": chat, "response": answer, "label": True}),
        (normalize_preference_row, {"prompt": chat, "completions": ["a"], "labels": [0.5]}),
    ):
        before = copy.deepcopy(row)
        assert normalize(row) == row == before


BARE = {"name": "add", "arguments": {"a": 1}}
MESSAGES = {
    "OpenAI's text of arguments": (
        {**CALLS, "tool_calls": [{**CALL, "function": {**BARE, "arguments": '{"a": 1}'}}]},
        CALLS,
    ),
    "null beside calls": (CALLS | {"content": None}, CALLS),
    "nothing beside calls": ({k: v for k, v in CALLS.items() if k != "content"}, CALLS),
    "a bare call": ({**CALLS, "tool_calls": [BARE]}, CALLS),
    "keys of a client's dump": (
        {**CALLS, "refusal": None, "annotations": [], "audio": None, "function_call": None},
        CALLS,
    ),
    "no arguments": (
        {**CALLS, "tool_calls": [{**BARE, "arguments": None}]},
        {**CALLS, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {}}}]},
    ),
    "no calls": ({**USER, "tool_calls": [], "name": None, "thinking": ""}, USER),
    "gpt-oss": (
        {"role": "assistant", "content": "3", "thinking": "Add."},
        {"role": "assistant", "content": "3", "reasoning_content": "Add."},
    ),
    "vLLM": (
        {"role": "assistant", "content": None, "reasoning": "Add.", "tool_calls": [BARE]},
        {**CALLS, "reasoning_content": "Add."},
    ),
    "an explicit null of jsonl": (
        {**CALLS, "tool_calls": [{"name": "add", "arguments": {"a": None}}]},
        {**CALLS, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": None}}}]},
    ),
}


def test_messages_of_data_sets_have_one_form():
    wrong = {n: m for n, (given, m) in MESSAGES.items() if normalize_message(given, "m") != m}
    assert not wrong


REFUSED = [
    ({**USER, "weight": 0}, "m.weight"),
    ({**USER, "train": False}, "m.train"),
    ({**USER, "timestamp": "now"}, "m.timestamp"),
    ({**USER, "name": 3}, "m.name"),
    ({**USER, "content": None}, "m.content"),
    ({**USER, "content": "a\ud83d"}, "m.content"),
    ({**CALLS, "tool_calls": "add(1)"}, "m.tool_calls"),
    ({**CALLS, "tool_calls": ["add(1)"]}, "m.tool_calls[0]"),
    ({**CALLS, "tool_calls": [{**BARE, "arguments": "1, 2"}]}, "m.tool_calls[0].arguments"),
    ({**CALLS, "tool_calls": [{**BARE, "arguments": "[1]"}]}, "m.tool_calls[0].arguments"),
    ({**CALLS, "tool_calls": [{**BARE, "arguments": {"a": "\udc00"}}]}, "arguments.a"),
    ({**CALLS, "tool_calls": [{**BARE, "name": ""}]}, "m.tool_calls[0].name"),
    ({**CALLS, "tool_calls": [{**BARE, "output": "3"}]}, "m.tool_calls[0]"),
    ({**CALLS, "tool_calls": [{**CALL, "index": 0}]}, "m.tool_calls[0]"),
    ({**CALLS, "tool_calls": [{**CALL, "type": "custom"}]}, "m.tool_calls[0].type"),
    ({**CALLS, "tool_calls": [{**CALL, "id": 7}]}, "m.tool_calls[0].id"),
    ({"role": "assistant", "content": "", "thinking": "a", "reasoning": "b"}, "m"),
]


def test_what_a_message_says_and_nothing_reads_is_refused():
    for message, field in REFUSED:
        with pytest.raises(ValueError, match=r"^field ") as caught:
            normalize_message(message, "m")
        assert f"{field}'" in str(caught.value), (message, str(caught.value))


TOOLS = [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]]]


def test_tools_have_one_form():
    for tools in TOOLS:
        assert normalize_prompt_row({**VERL, "tools": tools})["tools"] == [TOOL]
    for nothing in (None, [], "", "[]"):
        assert normalize_prompt_row({**VERL, "tools": nothing}) == VERL


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
ROWS = [
    (normalize_prompt_row, {**VERL, "tools": "{"}, "tools"),
    (normalize_prompt_row, {**VERL, "tools": [{"type": "function"}]}, "tools[0]"),
    (normalize_prompt_row, {**VERL, "tools": [{"name": "a", "parameters": "x"}]}, "parameters"),
    (
        normalize_prompt_row,
        {**VERL, "reward_model": {"ground_truth": float("nan")}},
        "ground_truth",
    ),
    (normalize_example_row, {"prompt": [USER], "response": [USER]}, "response[0].role"),
    (normalize_example_row, {"prompt": [USER], "completion": ""}, "completion"),
    (normalize_example_row, {"prompt": [USER], "response": "3", "weight": 0.0}, "weight"),
    (normalize_example_row, {"messages": [USER]}, "messages"),
    (normalize_example_row, {"messages": [USER, CALLS], "response": "3"}, "response"),
    (normalize_example_row, {"messages": [USER, CALLS], "prompt": [USER]}, "prompt"),
    (normalize_preference_row, {**PAIR, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (
        normalize_preference_row,
        {**PAIR, "rejected": [{**USER, "role": "tool"}]},
        "rejected[0].role",
    ),
    (normalize_preference_row, {"chosen": [USER, CALLS], "rejected": "b"}, "rejected"),
    (
        normalize_preference_row,
        {
            "prompt": [{**USER, "content": "other"}],
            "chosen": [USER, CALLS],
            "rejected": [USER, {"role": "assistant", "content": "b"}],
        },
        "prompt",
    ),
]


def test_rows_that_say_what_nothing_reads_are_refused():
    for normalize, row, field in ROWS:
        with pytest.raises(ValueError, match=r"^field ") as caught:
            normalize(row)
        assert f"{field}'" in str(caught.value), (row, str(caught.value))


def test_what_is_null_is_not_there():
    assert normalize_preference_row({**PAIR, "completions": None, "images": None, "margin": None})
    assert normalize_preference_row(
        {**PAIR, "chosen": None, "rejected": None, "completion": "b"} | {"label": True}
    )
    row = normalize_example_row(
        {"prompt": [USER], "response": "3", "messages": None, "tools": None}
    )
    assert row == {"prompt": [USER], "response": "3"}


def test_answers_that_differ_in_a_call_alone_are_a_pair():
    other = {**CALLS, "tool_calls": [{**BARE, "arguments": '{"a": 2}'}]}
    row = normalize_preference_row(
        {"prompt": "1+2=", "chosen": [CALLS], "rejected": other, "tools": [TOOL]}
    )
    assert row["chosen"] == CALLS and row["tools"] == [TOOL]
    assert row["rejected"]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    with pytest.raises(ValueError, match="chosen and rejected are the same"):
        normalize_preference_row({"prompt": "1+2=", "chosen": CALLS, "rejected": [CALLS]})


def test_ground_truths_stay_what_they_are():
    for truth in (155, 1.5, ["3"], {"inputs": [1]}, True, "", 0):
        row = normalize_prompt_row({**VERL, "reward_model": {"ground_truth": truth}})
        assert row["reward_model"]["ground_truth"] is truth


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(VERL), encoding="utf-8-sig")
    assert verl_rows([str(path)]) == [VERL]


def test_maps_and_dictionaries_of_arrow_are_read(tmp_path):
    extra = pyarrow.array([[("index", 4)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    source = pyarrow.array(["sums"]).dictionary_encode()
    columns = {name: pyarrow.array([VERL[name]]) for name in ("prompt", "reward_model")}
    table = pyarrow.table(columns | {"data_source": source, "extra_info": extra})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert verl_rows([str(tmp_path / "a.parquet")]) == [{**VERL, "extra_info": {"index": 4}}]


def test_tools_of_a_row_reach_the_template():
    tokenizer = load_tokenizer("configs/quickstart")
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}<|user|>{{ tool | tojson }}<|end|>{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = [normalize_prompt_row({**VERL, "tools": [TOOL]}), VERL]
    prompts, _ = tokenize_prompts(rows, tokenizer, max_prompt_tokens=999)
    for prompt, tools in zip(prompts, ([TOOL], []), strict=True):
        ids = tokenizer.apply_chat_template(
            VERL["prompt"], tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert (list(prompt.tokens), prompt.tools) == (ids, tools)
    row = {"prompt": VERL["prompt"], "tools": [TOOL]}
    (example,), _ = tokenize_examples([row | {"response": "3"}], tokenizer, max_tokens=999)
    pair = normalize_preference_row(row | {"chosen": "2", "rejected": "3"})
    (preference,), _ = tokenize_preferences([pair], tokenizer, max_tokens=999)
    shown = prompts[0].tokens
    assert example.tokens[: len(shown)] == preference.prompt == shown


# ------------------------------------------------------------------------------- bad rows are named


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


def steps_row(text):
    return {"prompt": [USER], "completions": [text], "labels": [1.0]}


PATHS = {
    "prompts": lambda texts, tokenizer, **size: tokenize_prompts(
        [*map(prompt_row, texts)], tokenizer, max_prompt_tokens=99, **size
    ),
    "prompts of examples": lambda texts, tokenizer, **size: tokenize_examples(
        [{**prompt_row(text), "response": "3"} for text in texts], tokenizer, max_tokens=99, **size
    ),
    "responses": lambda texts, tokenizer, **size: tokenize_examples(
        [{"prompt": [USER], "response": text} for text in texts], tokenizer, max_tokens=99, **size
    ),
    "rejected answers": lambda texts, tokenizer, **size: tokenize_preferences(
        [normalize_preference_row({**PAIR, "rejected": t + "?"}) for t in texts],
        tokenizer,
        max_tokens=99,
        **size,
    ),
    "labelled answers": lambda texts, tokenizer, **size: tokenize_preferences(
        [normalize_preference_row({"prompt": "1", "response": t, "label": True}) for t in texts],
        tokenizer,
        max_tokens=99,
        **size,
    ),
    "steps": lambda texts, tokenizer, **size: tokenize_preferences(
        [*map(steps_row, texts)], tokenizer, max_tokens=99, **size
    ),
    "texts given in Python": as_prompts,
}
THROWN = [
    ValueError("no"),
    TypeError("TextEncodeInput must be Union[TextInputSequence, ...]"),
    KeyError("content"),
    UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed"),
    jinja2.TemplateError("no tools here"),
    AttributeError(),
    AssertionError("several\nlines \ud83d"),
    OSError(2, "no such file"),
    RecursionError("too deep"),
    ZeroDivisionError("x"),
]


@pytest.mark.parametrize("path", PATHS)
def test_whatever_a_row_raises_names_it(path):
    for error in THROWN:
        with pytest.raises(RowError) as caught:
            PATHS[path](["1", "2!", "3", "4!"], Letters(error))
        assert (caught.value.row, caught.value.rows) == (1, (1, 3))
        first, second = caught.value.args
        name = "prompt" if path == "texts given in Python" else "dataset row"
        assert first.startswith(f"{name} 1: ") and second.startswith(f"{name} 3: ")
        assert len(first) > len(f"{name} 1: ") and "\n" not in first
        first.encode()  # it can be printed


@pytest.mark.parametrize("path", PATHS)
def test_ids_that_the_model_does_not_have_name_their_row(path):
    tokenizer = Letters()
    size = tokenizer.beyond
    assert PATHS[path](["1", "<zz>"], tokenizer, vocab_size=size + 1)
    with pytest.raises(RowError, match=rf" 1: token id {size} .*vocabulary of {size}") as caught:
        PATHS[path](["1", "<zz>"], tokenizer, vocab_size=size)
    assert caught.value.rows == (1,)


def test_token_ids_given_in_python_are_compared_too():
    assert [p.tokens for p in as_prompts([[3, 1]], Letters(), vocab_size=4)] == [(3, 1)]
    for ids in ([3, 4], [-1]):
        with pytest.raises(RowError, match=r"^prompt 1: "):
            as_prompts([[1], ids], Letters(), vocab_size=4)


@given(
    count=st.integers(1, 40),
    bad=st.sets(st.integers(0, 39), min_size=1),
    error=st.sampled_from(THROWN),
)
def test_ten_bad_rows_are_listed_and_the_others_counted(count, bad, error):
    bad = sorted(number for number in bad if number < count) or [0]

    def use(number, row):
        if row in bad:
            raise error

    with pytest.raises(RowError) as caught:
        map_rows(use, range(count))
    assert caught.value.rows == tuple(bad)
    listed = [line for line in caught.value.args if line.startswith("dataset row ")]
    assert len(listed) == min(len(bad), LISTED)
    rest = caught.value.args[len(listed) :]
    assert rest == ((f"and {len(bad) - LISTED} more rows",) if len(bad) > LISTED else ())


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
    with pytest.raises(RowError, match=f"^{files[1]}, row 1: token id ") as caught:
        tokenize_prompts(rows, tokenizer, max_prompt_tokens=9, vocab_size=tokenizer.beyond)
    assert caught.value.row == 3
    (tmp_path / "mine.py").write_text(
        "class Rows(list):\n"
        "    def __init__(self, paths): super().__init__([1, 2])\n"
        "    def __getitem__(self, number): return {}['prompt']\n"
    )
    spec = FunctionSpec(f"{tmp_path / 'mine.py'}:Rows")
    with pytest.raises(RowError, match="Rows, row 0: KeyError: 'prompt'"):
        load_rows(spec, files, normalize=normalize_prompt_row)
