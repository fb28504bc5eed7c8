import contextlib
import functools
import json

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxrl_llm.config.sections import LimitsConfig
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.rollout.openai_api.requests import APIError, ServedModel, parse_chat
from jaxrl_llm.rollout.openai_api.responses import AnswerStream, read_answer
from jaxrl_llm.rollout.openai_api.responses_api import chat_request
from jaxrl_llm.serve import find_call_format
from jaxrl_llm.serving.app import make_app
from tests.data.real_templates import build
from tests.listening import listening
from tests.refusals import refuses
from tests.serving.conftest import Scripted

CLIENT = {"api_key": "none", "max_retries": 0, "timeout": 120}
QUESTION = {"role": "user", "content": "How warm is it?"}
PROPERTIES = {"place": {"type": "string"}, "days": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["place", "days"]}
NAMED = {"name": "weather", "description": "Say how warm it is."}
TOOL = {"type": "function", "function": NAMED | {"parameters": PARAMETERS}}
FLAT = {"type": "function", **NAMED, "parameters": PARAMETERS, "strict": True}
ARGUMENTS = {"place": "Zürich", "days": 3}
TEMPLATES = ["qwen3_8", "qwen2_5", "llama3_1", "lfm2_v2", "mistral", "deepseekv31", "gptoss"]


@functools.cache
def model_of(name):
    """Return what is served under a real model's template."""
    tokenizer, stops = build(name)
    form = find_call_format(tokenizer, None)
    return ServedModel("tiny", tokenizer, stops, len(tokenizer), 8192, 8, None, form)


def render(name, chat, *, more=True, tools=(TOOL,)):
    """Return a chat as `transformers` renders it."""
    return build(name)[0].apply_chat_template(
        chat, tools=list(tools), tokenize=False, add_generation_prompt=more
    )


def called(name, count=1, identity="abcdefgh{}"):
    """Return the assistant's message with calls, as the template wants it."""
    as_text = name.startswith("deepseek")
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False) if as_text else ARGUMENTS
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    calls = [{"id": identity.format(number)} | call for number in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def written(name, count=1):
    """Return how the template itself writes calls, without the turn's end."""
    before = render(name, [QUESTION])
    whole = render(name, [QUESTION, called(name, count)], more=False)
    assert whole.startswith(before), "take a template that is append-only"
    text = whole[len(before) :]
    stops = build(name)[0].convert_ids_to_tokens(list(build(name)[1]))
    return text[: min(place for stop in stops if (place := text.find(stop)) >= 0)]


@pytest.fixture
def connect():
    """(template, script) -> an openai client of a server whose model says the script."""
    with contextlib.ExitStack() as stack:

        def run(name, script):
            served = model_of(name)
            engine = Scripted(served.tokenizer, stop=served.stop_ids[0], traps="")
            engine.script = script
            address = stack.enter_context(listening(make_app(engine, served, LimitsConfig(), None)))
            made = openai.OpenAI(base_url=f"{address}/v1", **CLIENT)
            made.engine, made.address = engine, address
            return stack.enter_context(made)

        yield run


def prompt_of(client):
    """Return the text of the newest prompt."""
    return client.engine.tokenizer.decode(client.engine.requests[-1].prompt)


def test_the_developers_message_reaches_the_model_and_an_unknown_role_is_refused(connect):
    """Qwen's template knows no developer, and skips each role that it does not know."""
    client = connect("qwen2_5", "yes")
    rule, user = {"role": "developer", "content": "RULE"}, {"role": "user", "content": "hi"}
    told = render("qwen2_5", [rule | {"role": "system"}, user], tools=())
    client.responses.create(model="tiny", input=[rule, user])
    assert prompt_of(client) == told
    named = user | {"name": "Nora", "cache_control": {"type": "ephemeral"}}
    client.chat.completions.create(model="tiny", messages=[rule, named])  # as OpenAI's server
    assert prompt_of(client) == told
    for place, lost in enumerate(({"role": "usr", "content": "a"}, {**user, "weight": 0})):
        with pytest.raises(openai.BadRequestError, match=rf"messages\[{place}\]\.(content|weight)"):
            client.chat.completions.create(model="tiny", messages=[user] * place + [lost])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_a_template_writes_is_read_and_told_again(connect, name):
    """The oracle is `transformers`: what it renders is what the model says and is asked."""
    client = connect(name, written(name))
    ask = {"model": "tiny", "tools": [TOOL], "seed": 0}
    choice = client.chat.completions.create(messages=[QUESTION], **ask).choices[0]
    assert prompt_of(client) == render(name, [QUESTION])
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    with client.chat.completions.stream(messages=[QUESTION], **ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    (again,) = streamed.message.tool_calls
    assert (again.id, again.function.arguments) == (call.id, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    chat = [QUESTION, choice.message.model_dump(), result]
    client.chat.completions.create(messages=chat, **ask)
    expected = [QUESTION, called(name, identity=call.id), result | {"name": "weather"}]
    assert prompt_of(client) == render(name, expected)


def test_text_comes_before_a_call_and_what_is_none_stays_in_the_text(connect):
    client = connect("qwen2_5", "Let me see.\n" + written("qwen2_5"))
    ask = {"model": "tiny", "tools": [TOOL], "messages": [QUESTION]}
    message = client.chat.completions.create(**ask).choices[0].message
    assert (message.content, len(message.tool_calls)) == ("Let me see.", 1)
    client.engine.script = script = written("qwen2_5")  # without tools it is no call
    answer = client.chat.completions.create(**ask, tool_choice="none")
    assert answer.choices[0].message.content == script
    assert prompt_of(client) == render("qwen2_5", [QUESTION], tools=())
    choice = client.chat.completions.create(**ask, max_tokens=12).choices[0]  # it is cut in a call
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content.startswith("<tool_call>")
    for wrong in ("<tool_call>\n{no JSON}\n</tool_call>", '<tool_call>\n{"name": "weather"'):
        client.engine.script = f"So: {script}\n{wrong}"
        choice = client.chat.completions.create(**ask).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (client.engine.script, None)
        assert choice.finish_reason == "stop"


def test_reasoning_is_apart_in_both_apis(connect):
    client = connect("qwen3_8", "I guess.\n</think>\n\n18 degrees")  # the prompt has <think>
    choice = client.chat.completions.create(model="tiny", messages=[QUESTION]).choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == ("18 degrees", "I guess.")
    response = client.responses.create(model="tiny", input="How warm is it?")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "I guess."
    assert response.output_text == "18 degrees"
    # kept with the turn that it led to, as transformers renders it
    turns = [*response.output, {"role": "user", "content": "And now?"}]
    client.responses.create(model="tiny", input=[QUESTION, *turns])
    answer = {"role": "assistant", "content": "18 degrees", "reasoning_content": "I guess."}
    chat = [QUESTION, answer, {"role": "user", "content": "And now?"}]
    assert prompt_of(client) == render("qwen3_8", chat, tools=())


GOOD = '{"name": "f", "arguments": {"x": "<think>"}}'
CALLED = f"a<tool_call>{GOOD}</tool_call>"
WORDS = [CALLED, f"<tool_call>{GOOD}", GOOD, "<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS += ['{"name": "f", "parameters": {}}', "[f(x=1)]", "[", "{", " \n", "  ", "é🙂", "a b", "<to"]
WORDS += ["<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>", "STOP", "ST"]
WORDS += ['[TOOL_CALLS]f[ARGS]{"a":1}', "so\n</think>\n\n4.", "<|end|><|start|>assistant"]
WORDS += ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"]
WORDS += ["<｜tool▁calls▁end｜>", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"]
WORDS += ["<|channel|>commentary to=functions.f<|message|>{}", " to=f"]
ALL = [*range(1, 60)]
SCRIPTS = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)


@functools.cache
def template_of(name, *, with_tools):
    tokenizer, stops = build(name)
    form = "hermes" if with_tools and name == "phi3" else None  # whose template writes no calls
    return TurnTemplate(tokenizer, stops, tools=[TOOL] * with_tools, call_format=form)


def until_stopped(tokenizer, tokens, stops):
    """Return the tokens up to the one with which an engine stops."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return tokens[:count]
    return tokens


@settings(max_examples=60)
@given(
    st.sampled_from([*TEMPLATES, "phi3"]),
    st.booleans(),
    SCRIPTS,
    st.lists(st.integers(1, 60), max_size=6),
    st.booleans(),
    st.sampled_from([(), ("STOP",), ("a<tool_call>", "think>"), ("</tool_call>", "a b")]),
)
@example("phi3", True, CALLED, ALL, False, ())
@example("qwen3_8", False, "</think>\nhm\n</think>\n\nThe answer is 4.", ALL, False, ())
@example("qwen2_5", False, "<think>\n\n</think>\n\nhi", ALL, False, ())
@example("qwen2_5", True, "  Let me see. <tool_call>", ALL, False, ())
@example("phi3", True, f"so\n</think>{CALLED}STOP", ALL, True, ("STOP",))
@example("qwen2_5", True, f"so\n</think>\n {CALLED} \n", ALL, True, ())
def test_deltas_make_up_what_the_whole_answer_is_read_as(
    name, with_tools, script, ends, opens, stops
):
    """Whatever is said, and however it is cut; and a call is read as an agent's is."""
    template = template_of(name, with_tools=with_tools)
    tokenizer = template.tokenizer
    prompt = tokenizer("Hi<think>\n" if opens else "Hi", add_special_tokens=False)["input_ids"]
    drawn = tokenizer(script, add_special_tokens=False)["input_ids"]
    tokens = until_stopped(tokenizer, drawn, stops)
    whole = read_answer(template, tokens, prompt=prompt, stops=stops)
    stream = AnswerStream(template, prompt=prompt, index=0, stops=stops)
    got = {"reasoning_content": "", "content": "", "tool_calls": []}
    cuts = sorted({0, *(end for end in ends if end < len(tokens))})
    for start, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
        if not stream.stopped:
            for key, value in stream.push(tokens[start:end], last=end == len(tokens)).items():
                got[key] += value
    assert got["reasoning_content"] == whole.reasoning
    assert got["content"] == whole.text
    assert [c["id"] for c in got["tool_calls"]] == [call.id for call in whole.calls]
    assert stream.has_calls == bool(whole.calls)
    assert not any(stop in whole.text for stop in stops)
    agents = template.parse(tokens, prompt=prompt)
    if not stops and not any(call.error for call in agents.calls):
        assert (agents.text.strip(), agents.reasoning) == (whole.text.strip(), whole.reasoning)
        assert [call[:2] for call in agents.calls] == [call[:2] for call in whole.calls]


def events_of(client, **fields):
    """Return the events of a stream as they were sent, each checked by OpenAI's own types."""
    ask = {"model": "tiny", "input": "How warm is it?"} | fields
    with client.responses.with_streaming_response.create(stream=True, **ask) as answer:
        blocks = answer.text().strip().split("\n\n")
    events, kinds = [], TypeAdapter(ResponseStreamEvent)
    for number, block in enumerate(blocks):
        head, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        kinds.validate_python(events[-1])
        assert head == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def test_a_response_has_openais_form(connect):
    client = connect("qwen2_5", "Let me see.\n" + written("qwen2_5", 2))
    ask = {"model": "tiny", "input": "Hi", "tools": [FLAT], "instructions": "Be brief."}
    raw = client.responses.with_raw_response.create(**ask)
    Response.model_validate(raw.http_response.json(), strict=True)
    response = raw.parse()
    system = {"role": "system", "content": "Be brief."}
    assert prompt_of(client) == render("qwen2_5", [system, {"role": "user", "content": "Hi"}])
    text, *calls = response.output
    assert (text.type, response.output_text) == ("message", "Let me see.")
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("weather", ARGUMENTS)] * 2
    assert calls[0].call_id != calls[1].call_id
    assert response.status == "completed"
    assert response.usage.input_tokens == len(client.engine.requests[-1].prompt)
    # the next turn, as the Agents SDK sends it, is the chat's
    output = {"type": "function_call_output", "output": "18 degrees"}
    outputs = [output | {"call_id": call.call_id} for call in calls]
    client.responses.create(**ask | {"input": [QUESTION, *response.output, *outputs]})
    told = [{"role": "tool", "content": "18 degrees"}] * 2
    turn = called("qwen2_5", 2) | {"content": "Let me see."}
    assert prompt_of(client) == render("qwen2_5", [system, QUESTION, turn, *told])


def test_events_make_up_the_response(connect):
    call = written("qwen3_8").rpartition("</think>")[2]
    client = connect("qwen3_8", f"One place.\n</think>\n\nLet me see.\n\n{call}")
    events = events_of(client, tools=[FLAT])
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1]["response"]
    Response.model_validate(final, strict=True)
    names = [item["type"] for item in final["output"]]
    assert names == ["reasoning", "message", "function_call"]
    for place, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == place]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
        pieces = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert pieces == (item.get("arguments") or item["content"][0]["text"])
        (done,) = (e for e in own if e["type"].endswith(("text.done", "arguments.done")))
        assert pieces == done.get("arguments", done.get("text"))


def test_a_response_that_is_cut_or_empty(connect):
    client = connect("qwen2_5", "It is rather warm today")
    last = events_of(client, max_output_tokens=5)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"]["reason"] == "max_output_tokens"
    assert last["response"]["output"][0]["status"] == "incomplete"
    client.engine.script = ""
    assert events_of(client)[-1]["response"]["output"][0]["type"] == "message"


def test_a_wrong_response_is_refused(subtests):
    for key, values in {
        **{"previous_response_id": ["resp_1"], "conversation": ["conv_1"], "background": [True]},
        **{"truncation": ["auto"], "reasoning": [{"effort": "high"}], "top_logprobs": [2]},
        **{"text": [{"format": {"type": "json_object"}}], "messages": [[QUESTION]], "n": [2]},
        **{"max_tokens": [3], "max_output_tokens": [0], "tools": [[{"type": "web_search"}]]},
        "input": [
            *([], None, [3], [{"type": "item_reference", "id": "msg_1"}]),
            [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}],
            [{"type": "function_call_output", "call_id": "a", "output": 3}],
        ],
    }.items():
        for value in values:
            with subtests.test(f"{key}={value}"):
                with pytest.raises(APIError, match=key) as caught:
                    chat_request({"input": "Hi", key: value})
                assert caught.value.status == 400

    fields = {"store": True, "include": [], "truncation": "disabled", "user": "me", "seed": 3}
    fields |= {"text": {"format": {"type": "text"}}, "stream": True, "background": False}
    chat = chat_request({"input": "Hi", "frequency_penalty": 0} | fields)  # asks for nothing else
    assert (chat["seed"], chat["stream"]) == (3, True)


def test_tools_that_a_template_can_not_write_are_refused(served):
    with pytest.raises(APIError, match="call_format"):
        parse_chat({"messages": [QUESTION], "tools": [TOOL]}, served)
    with refuses("call_format"):
        find_call_format(build("qwen2_5")[0], "xml")
