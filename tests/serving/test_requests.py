import copy
import dataclasses

import pytest

from jaxrl_llm.rollout.engine import SamplingParams
from jaxrl_llm.rollout.openai_api.requests import (
    NEUTRAL,
    NOTHING_CHANGES,
    APIError,
    GenerationRequest,
    choice_seeds,
    parse_body,
    parse_chat,
    parse_completion,
)

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def completion(served):
    return lambda **fields: parse_completion({"prompt": "Hi"} | fields, served)


@pytest.fixture
def chat(served):
    return lambda **fields: parse_chat({"messages": HI} | fields, served)


def test_bare_requests_have_openais_defaults(completion, chat, tokenizer, served):
    ask = completion()
    assert [tokenizer.decode(prompt) for prompt in ask.prompts] == ["Hi"]
    assert ask.sampling == SamplingParams(max_new_tokens=16, stop_ids=(257,))
    assert (ask.n, ask.logprobs, ask.token_ids, ask.stream) == (1, False, False, False)
    ask = chat()
    (prompt,) = ask.prompts
    assert tokenizer.decode(prompt) == "<|user|>Hi<|end|><|assistant|>"
    assert ask.sampling.max_new_tokens == served.max_tokens - len(prompt)  # what is left


def test_every_field_arrives(completion, chat):
    same = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5}
    fields = {"max_tokens": 9, "stop": ["a", "b", "a"], "stop_token_ids": [9, 3], "logprobs": 4}
    fields |= same | {"logit_bias": {"7": -100, "5": 1.5}}
    expected = SamplingParams(
        **same,
        **{"max_new_tokens": 9, "stop_ids": (3, 9, 257), "stop": ("a", "b"), "top_logprobs": 4},
        logit_bias=((5, 1.5), (7, -100.0)),
    )
    assert completion(**fields).sampling == expected
    assert set(vars(expected)) == {f.name for f in dataclasses.fields(SamplingParams)}
    assert completion(**fields, ignore_eos=True).sampling.stop_ids == (3, 9)
    assert completion(top_k=-1).sampling.top_k == 0
    assert [completion(prompt_logprobs=n).prompt_logprobs for n in (None, 0)] == [None, 0]
    assert completion(stop="x").sampling.stop == ("x",)
    for given, prompts in [
        *(("AB", [(32, 33)]), (["A", "B"], [(32,), (33,)]), ([32, 33], [(32, 33)])),
        *(([[32], [33, 34]], [(32,), (33, 34)]), (["A", [33]], [(32,), (33,)])),
    ]:
        assert list(completion(prompt=given).prompts) == prompts
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat(**{name: 5}).sampling.max_new_tokens == 5
    ask = chat(logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True})
    assert (ask.logprobs, ask.sampling.top_logprobs, ask.include_usage) == (True, 3, True)
    assert chat(logprobs=True).logprobs and not chat(logprobs=False).logprobs


def test_seeds_depend_on_the_choices_index_alone(completion):
    asks = [completion(prompt=["A", "B"], n=2, seed=5) for _ in range(2)]
    first, second = ([r.seed for r in ask.requests()] for ask in asks)
    assert first == second == choice_seeds(5, 8)[:4]
    assert len(set(first)) == 4
    assert all(0 <= seed < 2**32 for seed in choice_seeds(-1, 4))
    assert completion().requests()[0].seed != completion().requests()[0].seed
    assert [r.prompt for r in asks[0].requests()] == [(32,), (32,), (33,), (33,)]


def test_keywords_reach_the_template(served, tokenizer):
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = "{{ messages[0].content }}{{ deep }}"

    def prompt(**keywords):
        fields = {"messages": HI, "chat_template_kwargs": keywords}
        return parse_chat(fields, served._replace(tokenizer=templated)).prompts[0]

    assert tokenizer.decode(prompt(deep="yes")) == "Hiyes"
    with pytest.raises(APIError, match="shallow"):
        prompt(shallow=1)
    for name in ("messages", "add_generation_prompt", "tools", "tokenize", "chat_template"):
        with pytest.raises(APIError) as caught:
            prompt(**{name: []})
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_what_can_not_fit_is_refused_before_it_is_tokenised(
    completion, chat, tokenizer, monkeypatch
):
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    long = "a" * 7_900_000
    for ask, fields in (
        *((completion, {"prompt": prompt}) for prompt in (long, [1] * 1_000_000)),
        (chat, {"messages": [{"role": "user", "content": long}]}),
    ):
        with pytest.raises(APIError) as caught:
            ask(**fields)
        assert caught.value.code == "context_length_exceeded"


BOTH = {
    **{"n": (0, True, 9), "temperature": (-0.1, float("nan"), "hot"), "top_p": (0, 1.1)},
    **{"top_k": (1.5, -2), "min_p": (2,), "repetition_penalty": (0,), "seed": ("1",)},
    **{"stop": (3, "", ["a"] * 17), "stop_token_ids": ([264],), "max_tokens": (0, 256)},
    "logit_bias": ({"x": 1}, {"264": 1}, {"1": 101}, [1]),
    **{"ignore_eos": (1,), "return_token_ids": ("yes",), "stream": (1,), "best_of": (2,)},
    **{"echo": (True,), "suffix": ("x",), "presence_penalty": (0.5,), "frequency_penalty": (-1,)},
    **{"response_format": ({"type": "json_object"},), "parallel_tool_calls": (False,)},
    **{"functions": ([{"name": "f"}],), "use_beam_search": (True,), "temprature": (1.0,)},
    "stream_options": ({"include_usage": True},),
}
COMPLETIONS = {
    "prompt": (
        *(None, "", [], [[]], {}, [-1], [264], [1, "a"], [1, True], ["a"] * 9, "\ud800"),
        "a" * 250,
    ),
    **{"logprobs": (21, True), "prompt_logprobs": (21, -1), "messages": (HI,)},
}
CHATS = {
    "messages": (
        *(None, [], ["Hi"], [{"content": "Hi"}], [{"role": "user", "content": 3}]),
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [*HI, {"role": "assistant", "tool_calls": [{}]}],
        [*HI, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
        [{"role": "user", "content": "a" * 260}],
    ),
    "tool_choice": ("required", {"type": "function", "function": {"name": "f"}}),
    "tools": ([{"type": "web_search"}], [{"type": "function", "function": {}}]),
    **{"logprobs": (3,), "prompt_logprobs": (3,), "top_logprobs": (3,)},
    **{"continue_final_message": (True,), "prompt": ("Hi",)},
}


def test_wrong_requests_are_refused(completion, chat, subtests):
    for ask, tables in ((completion, BOTH | COMPLETIONS), (chat, BOTH | CHATS)):
        for name, value in ((name, value) for name, values in tables.items() for value in values):
            with subtests.test(f"{name}={ascii(value)[:40]}"):
                with pytest.raises(APIError, match=f"{name}|prompt") as caught:
                    ask(**{name: value})
                assert caught.value.status == 400
    streamed = {"include_usage": True, "continuous_usage_stats": True}
    for ask, fields in [
        (completion, {"stream": True, "stream_options": streamed}),
        (completion, {"prompt_logprobs": 0, "stream": True}),
        (chat, {"max_tokens": 3, "max_completion_tokens": 4}),
    ]:
        with pytest.raises(APIError):
            ask(**fields)


def test_what_changes_nothing_is_accepted(chat, completion):
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values}
    fields = neutral | dict.fromkeys(NOTHING_CHANGES, "x") | {"unheard_of": None, "seed": 1}
    assert isinstance(chat(**fields), GenerationRequest)
    assert completion(**fields) == completion(seed=1)


def test_a_body_that_is_no_object_and_another_model_are_refused(chat):
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 100000, b'{"seed": 1' + b"0" * 9999):
        with pytest.raises(APIError, match="body"):
            parse_body(body)
    assert chat(model="tiny")
    with pytest.raises(APIError, match="tiny") as caught:
        chat(model="gpt")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
