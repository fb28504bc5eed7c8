import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.data import turns
from jaxrl_llm.data.chat import ChatTemplate
from jaxrl_llm.data.turns import FORMATS, ToolCall, choose_format
from tests.data.real_templates import build

TOKENIZERS = {
    **{"hermes": "qwen2_5", "qwen3_coder": "qwen3_5_think", "llama3_json": "llama3_1"},
    **{"pythonic": "lfm2_v2", "mistral": "mistral", "deepseek": "deepseekv31", "harmony": "gptoss"},
}
TEMPLATES = {
    **dict.fromkeys(["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"], "hermes"),
    **dict.fromkeys(["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"], "qwen3_coder"),
    **dict.fromkeys(["nemotron_3_nano", "nemotron_3_ultra"], "qwen3_coder"),
    **dict.fromkeys(["llama3_1", "llama3_2"], "llama3_json"),
    **dict.fromkeys(["lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2"], "pythonic"),
    **dict.fromkeys(["deepseekv3", "deepseekv31"], "deepseek"),
    **{"mistral": "mistral", "gptoss": "harmony"},
}
LOOK_UP = {"text": {"type": "string"}, "options": {"type": ["object", "null"]}}
LOOK_UP = {"name": "look_up", "parameters": {"type": "object", "properties": LOOK_UP}}
SCHEMA = [{"type": "function", "function": LOOK_UP}]
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


def test_formats_read_what_real_templates_write(subtests):
    for (template, name), arguments in itertools.product(
        TEMPLATES.items(),
        [
            {},
            {"text": "Zürich 🙂  ", "options": None},
            {"text": "12", "options": {"a b": [1, 2.5], "c": {"d": "e"}}},
            {"text": "x = 1\nif x:\n    y"},
        ],
    ):
        if name == "pythonic" and ("\n" in arguments.get("text", "") or not arguments):
            continue  # that template does not escape texts
        tokenizer, _ = build(template)
        renders = ChatTemplate(tokenizer)
        assert choose_format(renders) == name
        chat = [{"role": "user", "content": "?"}]
        message = renders.style([ToolCall("look_up", arguments, "a1b2c3d4e")])
        prompts = [renders.render(chat, generation=more) for more in (True, False)]
        whole = renders.render([*chat, message], generation=False)
        opening = next(prompt for prompt in prompts if whole.startswith(prompt))
        written = encode(tokenizer, whole.removeprefix(opening))
        with subtests.test(f"{template} {arguments}"):
            (read,) = FORMATS[name].parse(written, tokenizer, SCHEMA).calls
            assert (read.name, read.arguments, read.error) == ("look_up", arguments, None)


def test_markers_count_where_they_are_tokens_and_nowhere_else():
    for name in ("hermes", "qwen3_coder", "mistral", "deepseek", "harmony"):
        tokenizer, _ = build(TOKENIZERS[name])
        text = FORMATS[name].write([ToolCall("erase", {})])  # spelt in ordinary pieces
        pieces = [token for letter in text for token in encode(tokenizer, letter)]
        answer = FORMATS[name].parse(pieces, tokenizer)
        assert (answer.calls, answer.text) == ((), text), name
    tokenizer, _ = build("phi3")  # whose tokenizer has none of them
    for name in ("hermes", "qwen3_coder", "mistral", "deepseek"):
        assert tokenizer.get_added_vocab().keys().isdisjoint(FORMATS[name].markers)
        text = f"So: {FORMATS[name].write([ToolCall('now', {})])}"
        answer = FORMATS[name].parse(encode(tokenizer, text), tokenizer)
        assert answer[:3] == ("So:", (ToolCall("now", {}, FORMATS[name].call_id(0)),), "")


GOOD = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def hermes(call):
    return f"<tool_call>{call}</tool_call>"


def coder(call):
    return f"<tool_call><function=f>{call}</function></tool_call>"


BAD = {
    "hermes": [
        *((hermes(call), "") for call in ("{'name': 1}", '["f"]', '{"name": "", "arguments": {}}')),
        (hermes('{"name": "f", "arguments": "{}"}'), "f"),
        (hermes('{"name": "f", "name": "g"}'), ""),
        *((hermes(f'{{"name": "f", "arguments": {{"a": {n}}}}}'), "") for n in ("NaN", "1e999")),
        (hermes(r'{"name": "\ud800", "arguments": {}}'), ""),
        *((hermes("[" * 100_000), ""), (hermes("9" * 5000), "")),
        ('<tool_call>{"name": "f", "argu', ""),
    ],
    "qwen3_coder": [
        *(("<tool_call><function=f>", ""), ("<tool_call>f(1)</tool_call>", "")),
        *((coder("x"), "f"), (coder("<parameter=a>1</parameter>" * 2), "f")),
    ],
    "llama3_json": [('{"name": "f", "parameters": {}', ""), ("<|python_tag|>print(1)", "")],
    "pythonic": [
        ("<|tool_call_start|>[f(a=1)", ""),
        ("<|tool_call_start|>[f(1)]<|tool_call_end|>", "f"),
        *((f"[f({a})]", "f") for a in ("a=open('x')", "a=1, a=2", "a=b'x'", "a={1: 2}")),
        *((f"[f(a={rest}", "") for rest in ("1e999)]", "1), 3]", "-" * 50_000 + "1)]")),
    ],
    "mistral": [("[TOOL_CALLS]{}", ""), ("[TOOL_CALLS]f[ARGS][1]", "f")],
    "deepseek": [("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", "")],
}


def test_bad_calls_have_an_error_and_no_arguments(subtests):
    for name, text, tool in ((name, *case) for name, cases in BAD.items() for case in cases):
        with subtests.test(f"{name} {text[:60]}"):
            call = parse(name, text).calls[-1]
            assert (call.name, call.arguments) == (tool, {}) and "expected" in call.error
    answer = parse("hermes", f"One. {GOOD}{hermes('{')}{GOOD} Two.")  # good ones remain
    assert [(c.name, c.error is None, c.id) for c in answer.calls] == [
        *(("now", True, "call_0"), ("", False, "call_1"), ("now", True, "call_2"))
    ]
    assert answer.text == "One.  Two."


def test_plain_answers_stay_as_they_are():
    texts = ["", " 4", '{"answer": 4}', "[1, 2]", "f(a=1)", "naïve\n"]
    for name, text in itertools.product(FORMATS, texts):
        assert parse(name, text)[:3] == (text, (), ""), (name, text)


def test_reasoning_is_set_apart(subtests):
    for prompt, text, expected in [
        ("", "<think>\nHm.\n</think>\n\nYes", ("Yes", 0, "Hm.")),
        ("", "<think>\n\n</think>\n\nYes", ("Yes", 0, "")),
        ("<think>\n", "Hm.</think>Yes", ("Yes", 0, "Hm.")),
        ("", "Hm.</think> Yes", ("Hm.</think> Yes", 0, "")),  # nothing has opened it
        ("<think></think>", "Hm.</think>Yes", ("Hm.</think>Yes", 0, "")),
        ("", f"Hm.</think>{GOOD}", ("Hm.</think>", 1, "")),
        ("", "<think>Hm.", ("", 0, "Hm.")),
        ("", f"<think>{GOOD}</think>{GOOD}", ("", 1, GOOD)),
        ("", f"<think>{GOOD}", ("", 0, GOOD)),
    ]:
        with subtests.test(prompt + text):
            answer = parse("hermes", text + "<|im_end|>", prompt=prompt)
            assert (answer.text, len(answer.calls), answer.reasoning) == expected
    for before in ("<think></think>", ""):
        text = f'{before}<tool_call>{{"name": "f", "arguments": {{"a": "<think>"}}}}</tool_call>'
        assert parse("hermes", text).calls[0].arguments == {"a": "<think>"}


def test_the_last_call_needs_no_end():
    """As in vLLM: `<tool_call>(.*?)</tool_call>|<tool_call>(.*)` and the like."""
    for name in ("hermes", "qwen3_coder", "pythonic", "deepseek"):
        calls = [ToolCall("look_up", {"text": "sun"}, FORMATS[name].call_id(i)) for i in range(2)]
        whole = FORMATS[name].write(calls)
        whole = f"<|tool_call_start|>{whole}<|tool_call_end|>" if name == "pythonic" else whole
        end = whole.rindex("<")
        assert parse(name, f"I look.{whole[:end]}", SCHEMA)[:3] == ("I look.", tuple(calls), "")
        assert parse(name, f"I look.{whole[: end - 2]}", SCHEMA).calls[-1].error is not None


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
    assert (first.name, first.error, second.name) == ("f", None, "g")
    assert second.error is not None


def test_mistral_ids_are_kept_and_may_not_come_twice():
    call = '{"name": "f", "arguments": {}, "id": "abcdefghi"}'
    first, second = parse("mistral", f"[TOOL_CALLS][{call}, {call}]").calls
    assert (first.id, first.error, second.id) == ("abcdefghi", None, "call00001")
    assert second.error is not None
    named = parse("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]g[ARGS]{}").calls
    assert [(c.name, c.id) for c in named] == [("f", "abcdefghi"), ("g", "call00001")]


def test_templates_whose_format_is_to_be_named(monkeypatch):
    for template in ("gemma", "llama3", "phi3", "lfm2"):  # they write no calls
        with pytest.raises(ValueError, match="qwen3_coder"):
            choose_format(ChatTemplate(build(template)[0]))
    with pytest.raises(ValueError, match="get_weather"):  # what it writes is not known
        choose_format(ChatTemplate(build("gemma4_v5")[0]))
    twins = {"hermes": FORMATS["hermes"], "twin": FORMATS["hermes"]}
    monkeypatch.setattr(turns, "FORMATS", twins)
    with pytest.raises(ValueError, match="twin"):
        choose_format(ChatTemplate(build("qwen2_5")[0]))


LOOK = '{"text": "sun"}'
SUN = ToolCall("look_up", {"text": "sun"}, "call_0")
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"


def test_harmony_s_channels_are_told_apart(subtests):
    for drawn, text, calls, reasoning in [
        (f"{THOUGHT}<|channel|>final<|message|>Moon.<|return|>", "Moon.", (), "Hm."),
        (f"{THOUGHT}{CALL}{LOOK}<|call|>", "", (SUN,), "Hm."),
        (f"{THOUGHT}{CALL}{LOOK}", "", (SUN,), "Hm."),  # without its stop token
        # the recipient in the role, as the template writes it; words for the user before a call
        (f" to=functions.look_up<|channel|>commentary json<|message|>{LOOK}", "", (SUN,), ""),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}{LOOK}<|call|>",
            *("I look.", (SUN,), ""),
        ),
        (f"{THOUGHT}<|channel|>analysis<|message|>And", "", (), "Hm.\n\nAnd"),  # cut off
        ("Moon.", "Moon.", (), ""),
    ]:
        with subtests.test(drawn):
            assert parse("harmony", drawn, SCHEMA)[:3] == (text, calls, reasoning)
    for drawn in [
        *(f"{CALL}{arguments}<|call|>" for arguments in (LOOK[:-1], "[1]")),
        "<|channel|>commentary to=functions.look_up json",
        "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
        "<|channel|>analysis to=python<|message|>print(1)<|call|>",
    ]:
        with subtests.test(drawn):
            answer = parse("harmony", drawn, SCHEMA)
            assert answer.text == answer.reasoning == "" and answer.calls[0].error
