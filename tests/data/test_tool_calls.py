"""Calls of tools: each format reads what it and real templates write, and mends nothing."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data import turns
from jaxrl_llm.data.chat import ChatTemplate
from jaxrl_llm.data.turns import FORMATS, ToolCall, choose_format
from tests.data.real_templates import build

TOKENIZERS = {
    "hermes": "qwen2_5",
    "qwen3_coder": "qwen3_5_think",
    "llama3_json": "llama3_1",
    "pythonic": "lfm2_v2",
    "mistral": "mistral",
    "deepseek": "deepseekv31",
    "harmony": "gptoss",
}
TEMPLATES = {
    **dict.fromkeys(["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"], "hermes"),
    **dict.fromkeys(["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"], "qwen3_coder"),
    **dict.fromkeys(["nemotron_3_nano", "nemotron_3_ultra"], "qwen3_coder"),
    **dict.fromkeys(["llama3_1", "llama3_2"], "llama3_json"),
    **dict.fromkeys(["lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2"], "pythonic"),
    **dict.fromkeys(["mistral", "mistral_named"], "mistral"),
    **dict.fromkeys(["deepseekv3", "deepseekv31"], "deepseek"),
    "gptoss": "harmony",
}
SCHEMA = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "options": {"type": ["object", "null"]}},
            },
        },
    }
]
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="<")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a b'\"\\"), inner),
    max_leaves=4,
)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def parse(name, text, tools=(), prompt=""):
    tokenizer, _ = build(TOKENIZERS[name])
    given = {"prompt": encode(tokenizer, prompt)}
    return FORMATS[name].parse(encode(tokenizer, text), tokenizer, tools, **given)


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(CHARACTERS), options=VALUES)
def test_what_a_format_writes_it_reads(name, text, options):
    calls = [ToolCall("look_up", {"text": text, "options": options}), ToolCall("now", {})]
    answer = parse(name, FORMATS[name].write(calls), SCHEMA)
    assert [(c.name, c.arguments, c.error) for c in answer.calls] == [
        (c.name, c.arguments, None) for c in calls
    ]
    assert answer.text == answer.reasoning == ""


@pytest.mark.parametrize("name", FORMATS)
def test_ids_are_those_that_the_family_takes(name):
    ids = [call.id for call in parse(name, FORMATS[name].write([ToolCall("now", {})] * 2)).calls]
    expected = ["call00000", "call00001"] if name == "mistral" else ["call_0", "call_1"]
    assert ids == expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"text": "Zürich 🙂  ", "options": None},
        {"text": "12", "options": {"a b": [1, 2.5], "c": {"d": "e"}}},
        {"text": "x = 1\nif x:\n    y"},
    ],
)
def test_formats_read_what_real_templates_write(template, arguments):
    name = TEMPLATES[template]
    if name == "pythonic" and ("\n" in arguments.get("text", "") or not arguments):
        arguments = {"text": "that template does not escape texts"}
    tokenizer, _ = build(template)
    renders = ChatTemplate(tokenizer)
    assert choose_format(renders) == name
    chat = [{"role": "user", "content": "?"}]
    message = renders.style([ToolCall("look_up", arguments, "a1b2c3d4e")])
    prompts = [renders.render(chat, generation=more) for more in (True, False)]
    whole = renders.render([*chat, message], generation=False)
    opening = next(prompt for prompt in prompts if whole.startswith(prompt))
    written = encode(tokenizer, whole.removeprefix(opening))
    (read,) = FORMATS[name].parse(written, tokenizer, SCHEMA).calls
    assert (read.name, read.arguments, read.error) == ("look_up", arguments, None)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "deepseek", "harmony"])
def test_markers_spelt_in_ordinary_pieces_forge_no_call(name):
    tokenizer, _ = build(TOKENIZERS[name])
    text = FORMATS[name].write([ToolCall("erase", {})])
    pieces = [token for letter in text for token in encode(tokenizer, letter)]
    answer = FORMATS[name].parse(pieces, tokenizer)
    assert answer.calls == ()
    assert answer.text == text


def test_the_added_tokens_are_listed_once_for_all_answers(monkeypatch):
    """Gemma has 6,400 of them: to list them took 50 ms, twice for each answer."""
    tokenizer, listed = copy.deepcopy(build("qwen2_5")[0]), []
    listing = tokenizer.get_added_vocab
    monkeypatch.setattr(tokenizer, "get_added_vocab", lambda: listed.append(0) or listing())
    tokens = encode(tokenizer, FORMATS["hermes"].write([ToolCall("now", {})]))
    for _ in range(3):
        assert turns.opens_reasoning(tokens, tokenizer) is False
        assert len(FORMATS["hermes"].parse(tokens, tokenizer).calls) == 1
    assert len(listed) <= 2


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "deepseek"])
def test_markers_are_read_as_text_where_they_are_no_tokens(name):
    tokenizer, _ = build("phi3")
    assert tokenizer.get_added_vocab().keys().isdisjoint(FORMATS[name].markers)
    text = f"So: {FORMATS[name].write([ToolCall('now', {})])}"
    answer = FORMATS[name].parse(encode(tokenizer, text), tokenizer)
    assert answer[:3] == ("So:", (ToolCall("now", {}, FORMATS[name].call_id(0)),), "")


GOOD = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
BAD = [
    ("hermes", "<tool_call>{'name': 1}</tool_call>", "", "no JSON: Expecting .*; expected"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "f", r"the keys \['name'\], expected"),
    ("hermes", '<tool_call>["f"]</tool_call>', "", r"expected \{\"name\""),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        "f",
        "expected an object",
    ),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>', "", "'name' is there twice"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "", "expected"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", "not finite"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "", "not finite"),
    ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', "", "surrogate"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "", "expected"),
    ("hermes", "<tool_call>" + "9" * 5000 + "</tool_call>", "", "no JSON"),
    ("hermes", '<tool_call>{"name": "f", "argu', "", "not closed: expected </tool_call>"),
    ("pythonic", "<|tool_call_start|>[f(a=1)", "", "not closed: expected the end marker"),
    ("qwen3_coder", "<tool_call><function=f>", "", "not closed: expected </tool_call>"),
    ("qwen3_coder", "<tool_call>f(1)</tool_call>", "", "expected <function="),
    ("qwen3_coder", "<tool_call><function=f>x</function></tool_call>", "f", "got 'x', expected"),
    (
        "qwen3_coder",
        f"<tool_call><function=f>{'<parameter=a>1</parameter>' * 2}</function></tool_call>",
        "f",
        "'a' is there twice",
    ),
    ("llama3_json", '{"name": "f", "parameters": {}', "", "no JSON"),
    ("llama3_json", '{"type": "code", "name": "f", "parameters": {}}', "", "expected 'function'"),
    ("llama3_json", "<|python_tag|>print(1)", "", "no JSON"),
    ("pythonic", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "f", "expected every argument as"),
    ("pythonic", "[f(a=open('x'))]", "f", "expected a text, a number"),
    ("pythonic", "[f(a=1, a=2)]", "f", "expected every parameter once"),
    ("pythonic", "[f(a=b'x')]", "f", "expected a text"),
    ("pythonic", "[f(a={1: 2})]", "f", "keys are different texts"),
    ("pythonic", "[f(a=1e999)]", "", "not finite"),
    ("pythonic", "[f(a=1), 3]", "", "expected name"),
    ("pythonic", "[f(a=" + "-" * 50_000 + "1)]", "", "expected"),
    ("mistral", "[TOOL_CALLS]{}", "", "expected"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "1"}]', "f", "nine letters"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", "f", "expected an object"),
    ("deepseek", "<｜tool▁calls▁begin｜>", "", "break off; expected at least one"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", "", "not closed or not parted"),
]


@pytest.mark.parametrize(("name", "text", "tool", "error"), BAD)
def test_bad_calls_say_why(name, text, tool, error):
    call = parse(name, text).calls[-1]
    assert call.name == tool
    assert call.arguments == {}
    with pytest.raises(ValueError, match=error):
        raise ValueError(call.error)


def test_good_calls_remain_beside_bad_ones():
    answer = parse("hermes", f"One. {GOOD}<tool_call>{{</tool_call>{GOOD} Two.")
    assert [(c.name, c.error is None, c.id) for c in answer.calls] == [
        ("now", True, "call_0"),
        ("", False, "call_1"),
        ("now", True, "call_2"),
    ]
    assert answer.text == "One.  Two."


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["", " 4", '{"answer": 4}', "[1, 2]", "f(a=1)", "a [f] {x}", "naïve\n"]
)
def test_plain_answers_stay_as_they_are(name, text):
    assert parse(name, text)[:3] == (text, (), "")


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think>\nHm.\n</think>\n\nYes", ("Yes", 0, "Hm.")),
        ("", "<think>\n\n</think>\n\nYes", ("Yes", 0, "")),
        ("<think>\n", "Hm.</think>Yes", ("Yes", 0, "Hm.")),
        ("", "Hm.</think> Yes", ("Hm.</think> Yes", 0, "")),  # nothing has opened it
        ("<think></think>", "Hm.</think>Yes", ("Hm.</think>Yes", 0, "")),
        ("", f"Hm.</think>{GOOD}", ("Hm.</think>", 1, "")),
        ("", "<think>Hm.", ("", 0, "Hm.")),
        ("", f"<think>{GOOD}</think>{GOOD}", ("", 1, GOOD)),
        ("", f"<think>{GOOD}", ("", 0, GOOD)),
    ],
)
def test_reasoning_is_set_apart(prompt, text, expected):
    answer = parse("hermes", text + "<|im_end|>", prompt=prompt)
    assert (answer.text, len(answer.calls), answer.reasoning) == expected


@pytest.mark.parametrize("before", ["<think></think>", ""])
def test_think_tags_in_arguments_are_text(before):
    text = f'{before}<tool_call>{{"name": "f", "arguments": {{"a": "<think>"}}}}</tool_call>'
    assert parse("hermes", text).calls[0].arguments == {"a": "<think>"}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "deepseek"])
def test_the_last_call_needs_no_end(name):
    """As in vLLM: `<tool_call>(.*?)</tool_call>|<tool_call>(.*)` and the like."""
    calls = [ToolCall("look_up", {"text": "sun"}, FORMATS[name].call_id(i)) for i in range(2)]
    if name == "pythonic":
        whole = f"<|tool_call_start|>{FORMATS[name].write(calls)}<|tool_call_end|>"
    else:
        whole = FORMATS[name].write(calls)
    end = whole.rindex("<")
    assert parse(name, f"I look.{whole[:end]}", SCHEMA)[:3] == ("I look.", tuple(calls), "")
    cut = parse(name, f"I look.{whole[: end - 2]}", SCHEMA).calls[-1]
    assert cut.error is not None


def test_values_without_quotes_are_read_by_their_types():
    def read(value, kind):
        schema = {"properties": {"a": {"type": kind} if kind else {}}}
        tools = [{"function": {"name": "f", "parameters": schema}}]
        text = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
        return parse("qwen3_coder", text, tools).calls[0].arguments["a"]

    assert read("12", "string") == "12"
    assert read("12", "integer") == read("12", None) == 12
    assert read("True", "boolean") is read("true", "boolean") is True
    assert read("twelve", "integer") == "twelve"  # the check against the schema refuses it


def test_several_llama_calls_and_the_form_with_a_type():
    text = '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g"}'
    first, second = parse("llama3_json", text).calls
    assert (first.name, first.error) == ("f", None)
    assert second.name == "g"
    assert "expected" in str(second.error)


def test_mistral_ids_are_kept_and_may_not_come_twice():
    call = '{"name": "f", "arguments": {}, "id": "abcdefghi"}'
    first, second = parse("mistral", f"[TOOL_CALLS][{call}, {call}]").calls
    assert (first.id, first.error) == ("abcdefghi", None)
    assert "is there twice" in str(second.error)
    assert second.id == "call00001"
    named = parse("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]g[ARGS]{}").calls
    assert [(c.name, c.id) for c in named] == [("f", "abcdefghi"), ("g", "call00001")]


@pytest.mark.parametrize("template", ["gemma", "llama3", "phi3", "lfm2"])
def test_templates_without_calls_need_a_named_format(template):
    with pytest.raises(ValueError, match=r"writes no calls .*known: hermes, qwen3_coder"):
        choose_format(ChatTemplate(build(template)[0]))


def test_format_that_is_not_known():
    with pytest.raises(ValueError, match=r"'<\|tool_call>call:get_weather.*got none of the known"):
        choose_format(ChatTemplate(build("gemma4_v5")[0]))


def test_two_formats_that_read_the_same(monkeypatch):
    twins = {"hermes": FORMATS["hermes"], "twin": FORMATS["hermes"]}
    monkeypatch.setattr(turns, "FORMATS", twins)
    with pytest.raises(ValueError, match=r"got hermes, twin of the known formats .* name it"):
        choose_format(ChatTemplate(build("qwen2_5")[0]))


LOOK = '{"text": "sun"}'
SUN = ToolCall("look_up", {"text": "sun"}, "call_0")
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("drawn", "text", "calls", "reasoning"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Moon.<|return|>", "Moon.", (), "Hm."),
        (f"{THOUGHT}{CALL}{LOOK}<|call|>", "", (SUN,), "Hm."),
        (f"{THOUGHT}{CALL}{LOOK}", "", (SUN,), "Hm."),  # without its stop token
        # the recipient in the role, as the template writes it; words for the user before a call
        (f" to=functions.look_up<|channel|>commentary json<|message|>{LOOK}", "", (SUN,), ""),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}{LOOK}<|call|>",
            "I look.",
            (SUN,),
            "",
        ),
        (f"{THOUGHT}<|channel|>analysis<|message|>And", "", (), "Hm.\n\nAnd"),  # cut off
        ("Moon.", "Moon.", (), ""),
    ],
)
def test_harmony_s_channels_are_told_apart(drawn, text, calls, reasoning):
    assert parse("harmony", drawn, SCHEMA)[:3] == (text, calls, reasoning)


@pytest.mark.parametrize(
    ("drawn", "reason"),
    [
        (f"{CALL}{LOOK[:-1]}<|call|>", "no JSON"),
        (f"{CALL}[1]<|call|>", "expected an object"),
        ("<|channel|>commentary to=functions.look_up json", "breaks off"),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", "'browser.search'"),
        ("<|channel|>analysis to=python<|message|>print(1)<|call|>", "got a call to 'python'"),
    ],
)
def test_harmony_mends_no_call(drawn, reason):
    answer = parse("harmony", drawn, SCHEMA)
    assert answer.text == answer.reasoning == ""
    assert reason in answer.calls[0].error
