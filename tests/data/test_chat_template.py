import functools
import importlib.util
import itertools
from pathlib import Path

import pytest

from jaxrl_llm.data.chat import ChatTemplate
from jaxrl_llm.data.dataset import tokenize_examples, tokenize_preferences, tokenize_prompts
from jaxrl_llm.data.turns import ToolCall, TurnTemplate
from tests.data.real_templates import WRITTEN, build
from tests.refusals import refuses

SYSTEM, USER, MORE = (
    {"role": "system", "content": "S one"},
    {"role": "user", "content": "Q one"},
    {"role": "user", "content": "Q two"},
)
ANSWER, LAST = ({"role": "assistant", "content": content} for content in ("A one", "A two"))
REASON = {"reasoning_content": "R one"}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
LOOK_UP = {"name": "look_up", "description": "Look a word up.", "parameters": PARAMETERS}
SCHEMA = {"type": "function", "function": LOOK_UP}
SUN = {"name": "look_up", "arguments": {"text": "zsun"}}
CALLING = {"id": "abcdefghi", "type": "function", "function": SUN}
CALL = {"role": "assistant", "content": "", "tool_calls": [CALLING]}
RESULT = {"role": "tool", "content": "C eighteen", "tool_call_id": "abcdefghi"}
CHATS = {
    "plain": [USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "developer": [{**SYSTEM, "role": "developer"}, USER, ANSWER],
    "two turns": [USER, ANSWER, MORE, LAST],
    "reasoning": [USER, ANSWER | REASON],
    "reasoning twice": [USER, ANSWER | REASON, MORE, LAST | {"reasoning_content": "R two"}],
    "a call": [USER, CALL],
    "text, reasoning and a call": [USER, CALL | REASON | {"content": "A one"}],
    "a result": [USER, CALL, RESULT, ANSWER],
    "an agent": [USER, CALL | REASON, RESULT, LAST | {"reasoning_content": "R two"}, MORE, ANSWER],
    "an unknown role": [{"role": "human", "content": "H one"}, USER, ANSWER],
    "a name": [USER | {"name": "Nora"}, ANSWER],
    "an unknown key": [USER, ANSWER | {"weight": 0}],
    "late instructions": [USER, ANSWER, {**SYSTEM, "content": "S two"}, MORE, LAST],
}


@functools.cache
def templates():
    """Return the names of all templates that there are, those of trl's wheel if it is there."""
    package = importlib.util.find_spec("trl")
    folders = [] if package is None else list(package.submodule_search_locations)
    found = [path for folder in folders for path in Path(folder, "chat_templates").glob("*.jinja")]
    return sorted({path.stem for path in found if not path.stem.endswith("_training")} | {*WRITTEN})


@functools.cache
def make(name):
    return ChatTemplate(build(name)[0])


def says(message):
    """Return the texts of a message that are not its role or an id."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [message.get(key) for key in ("content", "reasoning_content", "name")]
    return [t for t in [*texts, *(c["name"] for c in calls), *("zsun" for _ in calls)] if t]


@functools.cache
def outcome(name, title):
    """Return the sequences of a chat as (text, answers), or the error that refuses it."""
    template, chat = make(name), CHATS[title]
    decode = functools.partial(template.tokenizer.decode, skip_special_tokens=False)
    try:
        sequences = template.conversation(chat)
    except ValueError as error:
        return str(error)
    made = []
    for ids, mask in sequences:
        assert len(ids) == len(mask) and mask[-1] and not mask[0]
        runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        answers = [decode([i for i, _ in run]) for sampled, run in runs if sampled]
        made.append((decode(ids), answers))
    return made


def wrongs(name, title):
    """Yield what is wrong with what a template makes of a chat."""
    template, chat, made = make(name), CHATS[title], outcome(name, title)
    if isinstance(made, str):
        named = "messages[" in made and ("role" in made or "answer" in made)
        if not (named or "chat template: it refuses a chat with roles" in made):
            yield f"an error that names no message: {made}"
        return
    answers = [answer for _, of_one in made for answer in of_one]
    wanted = [message for message in chat if message["role"] == "assistant"]
    if len(answers) != len(wanted):
        yield f"{len(wanted)} answers, of which {len(answers)} are trained"
    for message, answer in zip(wanted, answers, strict=False):
        yield from (
            f"{text!r} is not in {answer!r}" for text in says(message) if text not in answer
        )
        close = template.close(message)
        if not answer.endswith(close.text) or answer.count(close.text) != 1:
            yield f"{answer!r} does not end in {close.text!r}"
    for message in chat:
        texts = [t for t in says(message) if message["role"] != "assistant"]
        yield from (f"{text!r} is in no prompt" for text in texts if text not in made[-1][0])
    places = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    for place, answer in zip(places, answers, strict=False):
        prompt = template.render(chat[:place], generation=True)
        if not any(prompt + answer in text for text, _ in made):
            yield f"{answer!r} stands behind another prompt than {prompt!r}"
        whole = template.render(chat[: place + 1], generation=False)
        if whole.startswith(prompt) and not (whole + answer[-40:]).startswith(
            prompt + answer[:-40]
        ):
            yield f"{answer!r} is not what the template writes: {whole!r}"


def test_every_text_is_trained_or_told_or_refused_by_every_template():
    pairs = itertools.product(templates(), CHATS)
    wrong = [f"{name}, {title}: {w}" for name, title in pairs for w in wrongs(name, title)]
    assert not wrong, "\n".join(wrong)


def made_by(*titles):
    return {
        title: {name for name in templates() if not isinstance(outcome(name, title), str)}
        for title in titles
    }


def test_no_template_refuses_what_it_can_show():
    """The property above would hold if all were refused."""
    made = made_by("plain", "two turns", "developer", "reasoning", "a result", "an unknown role")
    assert made["plain"] == made["two turns"] == {*templates()}
    shown = {
        n for n in templates() if n.startswith(("qwen", "glm", "gptoss", "lfm2_2", "nemotron"))
    }
    nothing = {"qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_nothink"}
    assert shown - nothing <= made["reasoning"]
    assert shown - {"qwen2_5_vl", "lfm2"} <= made["a result"]
    no_system = {"gemma", "deepseekv31"}
    assert {*templates()} - made["developer"] == no_system & {*templates()}
    dropping = {"qwen2_5", "qwen3", "phi3", "deepseekv3", "glm4moe", "gptoss"} & {*templates()}
    assert not dropping & made["an unknown role"]


EXPECTED = {
    "gemma3": ["A one<end_of_turn>"],
    "phi3": ["A one<|end|>"],
    "glm4moe": ["\n<think></think>\nA one<|user|>"],
    "gptoss": ["<|channel|>final<|message|>A one<|return|>"],
    "qwen2_5": ["A one<|im_end|>"],
    "qwen3": ["<think>\n\n</think>\n\nA one<|im_end|>"],
    "qwen3_5_think": ["\n</think>\n\nA one<|im_end|>"],
    "nemotron_3_nano": ["</think>A one<|im_end|>"],
    "deepseek_r1_distill": ["\n</think>\n\nA one<｜end▁of▁sentence｜>"],
    "cohere2": ["A one<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
    "idefics3": [" A one<end_of_utterance>"],
    "mistral": [" A one</s>"],
}


def test_what_an_answer_is():
    wrong = {n: outcome(n, "plain") for n, e in EXPECTED.items() if outcome(n, "plain")[0][1] != e}
    assert not wrong


def test_closing_tokens_of_templates_whose_eos_is_another():
    """As published: Gemma's eos is `<eos>`, Phi 3's and GLM's `<|endoftext|>`."""
    ends = {"gemma3": {"<end_of_turn>"}, "phi3": {"<|end|>"}, "qwen2_5": {"<|im_end|>"}}
    ends |= {"glm4moe": {"<|user|>", "<|observation|>"}, "gptoss": {"<|return|>", "<|call|>"}}
    ends |= {"gemma4_v5": {"<turn|>", "<|tool_response>"}}
    for name, texts in ends.items():
        tokenizer, _ = build(name, ("<|endoftext|>",))
        closing = ChatTemplate(tokenizer).closing_ids
        assert {*tokenizer.convert_ids_to_tokens(closing)} == texts, name


def test_a_reasoning_answer_behind_a_prompt_that_opens_a_thought():
    """Where the template drops reasoning, the answer is what the model has to sample."""
    template = make("deepseek_r1_distill")
    as_keys = [USER, ANSWER | REASON]
    as_text = [USER, {"role": "assistant", "content": "<think>\nR one\n</think>\n\nA one"}]
    for chat in (as_keys, as_text):
        prompt, answer = template.answer_text(chat)
        assert prompt.endswith("<think>\n")
        assert answer == "R one\n</think>\n\nA one<｜end▁of▁sentence｜>"
    with pytest.raises(ValueError, match=r"messages\[1\]"):
        make("qwen3_5_nothink").answer(as_keys)
    told = ChatTemplate(build("qwen3_5_nothink")[0], {"enable_thinking": True})
    assert told.answer_text(as_keys)[1] == "R one\n</think>\n\nA one<|im_end|>"


def test_what_a_template_drops_where_an_answer_follows_stays_in_its_prompt():
    """As Mistral's does with the system prompt, gpt-oss's with the text beside a call."""
    for name, chat in [
        ("mistral", [SYSTEM, USER, ANSWER]),
        ("gptoss", [USER, CALL | {"content": "A two"}, RESULT, ANSWER]),
    ]:
        prompt, answer = make(name).answer_text(chat)
        assert prompt == make(name).prompt_text(chat[:-1]), name
        assert all(text in prompt for m in chat[:-1] for text in says(m)), name
        assert answer == EXPECTED[name][0], name


def test_what_is_lost_is_named(subtests):
    human, developer = ({"role": role, "content": "H"} for role in ("human", "developer"))
    twice = {"content": "<think>a</think>b</think>b"}  # it keeps one `b` of two
    opened = {"role": "assistant", "content": "<|channel>R\n<channel|>A"}
    for name, chat, key in [
        ("qwen2_5", [SYSTEM, human], r"messages\[1\]\.content"),
        ("qwen2_5", [USER | {"name": "Nora"}], r"messages\[0\]\.name"),
        ("gptoss", [USER, ANSWER, developer, MORE], r"messages\[2\]"),
        ("llama3_1", [USER, CALL | {"content": "A"}, RESULT], r"messages\[1\]\.content"),
        ("phi3", [USER, CALL, RESULT], r"messages\[1\]\.tool_calls\[0\]\.name"),
    ]:
        with subtests.test(name), pytest.raises(ValueError, match=key):
            make(name).prompt(chat)
    with pytest.raises(ValueError, match="tools"):
        make("phi3").prompt([USER], [SCHEMA])
    assert make("qwen2_5").prompt([USER, ANSWER | REASON, MORE])  # of an earlier answer
    for name, answer, key in [
        ("qwen2_5", ANSWER | REASON, "reasoning_content"),
        *(("qwen3", ANSWER | twice, "content"), ("gemma4_v5", opened, "content")),
    ]:
        with subtests.test(name), pytest.raises(ValueError, match=rf"messages\[1\]\.{key}"):
            make(name).answer([USER, answer])


def test_calls_are_written_as_the_template_wants_them():
    def texts(arguments):
        call = {**CALLING, "function": {"name": "look_up", "arguments": arguments}}
        return [USER, {**CALL, "tool_calls": [call]}, RESULT]

    names = ("qwen2_5", "qwen3", "llama3_1", "gptoss", "qwen3_5_think", "deepseekv3", "glm4moe")
    for template in map(make, names):
        chat = texts('{"text": "zsun"}')
        assert template.prompt(chat) == template.prompt([USER, CALL, RESULT])
        assert r"\"text" not in template.prompt_text(chat)
    with pytest.raises(ValueError, match=r"messages\[1\].tool_calls\[0\]"):
        make("qwen3").prompt(texts("{"))


APPEND_ONLY = ["qwen2_5", "qwen3_instruct_2507", "qwen3_8", "llama3_1", "lfm2_v2", "mistral"]
APPEND_ONLY += ["deepseekv31", "gemma3", "phi3", "cohere", "glm4moe", "gemma4_v5"]


def test_an_episode_and_the_same_conversation_are_the_same_tokens():
    """What RL samples and is told, and what SFT trains on, are one stream with one mask."""
    for name in APPEND_ONLY:
        template = make(name)
        tokenizer, stops = build(name)
        tools = [SCHEMA] if template.style and template.knows_tools else []
        form = "pythonic" if name == "gemma4_v5" else "hermes"
        turns = TurnTemplate(
            tokenizer,
            tuple(sorted({*stops, *template.closing_ids})),
            tools=tools,
            call_format=form if name in ("gemma4_v5", "glm4moe") or not tools else None,
        )
        chat = [USER, CALL, RESULT, ANSWER, MORE, LAST] if tools else [USER, ANSWER, MORE, LAST]
        if name == "mistral":  # which moves the tools before the last question
            chat = chat[:4]
        ((ids, mask),) = template.conversation(chat, tools)
        runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
        answers = iter([[i for i, _ in run] for is_sampled, run in runs if is_sampled])
        stream, marks, told = list[int](), list[bool](), turns.opening([USER])
        for place, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            sampled = next(answers)
            assert sampled[-1] in turns._stops and not {*sampled[:-1]} & {*turns._stops}
            stream += [*told, *sampled]
            marks += [False] * len(told) + [True] * len(sampled)
            calls = [ToolCall("look_up", {"text": "zsun"}, "abcdefghi")] * ("tool_calls" in message)
            if place + 1 < len(chat):
                told = turns.following(chat[place + 1 : place + 2], calls=calls, stop=sampled[-1])
        assert (stream, marks) == (ids, mask), name


def test_examples_of_conversations():
    talk = {"messages": [USER, ANSWER, MORE, LAST]}
    last = {"prompt": [USER, ANSWER, MORE], "response": "A two"}

    def answers(row, name="qwen2_5", **keywords):
        tokenizer, _ = build(name)
        examples, _ = tokenize_examples([row], tokenizer, max_tokens=500, **keywords)
        pairs = (zip(e.tokens, e.mask, strict=True) for e in examples)
        return [tokenizer.decode([t for t, m in pair if m]) for pair in pairs]

    assert answers(talk) == ["A one<|im_end|>A two<|im_end|>"]
    assert answers(talk, train_on="last") == answers(last) == ["A two<|im_end|>"]
    for row in ({"messages": [USER]}, {"messages": [USER, ANSWER, MORE]}):
        with refuses(rows=(0,)):
            answers(row)
    first, second = answers(talk, "qwen3")  # which drops the first answer's empty thought later
    assert "A one" in first and "A two" in second


def test_tools_of_rows_reach_the_template():
    row = {"prompt": [USER], "data_source": "x", "reward_model": {"ground_truth": "1"}}
    row |= {"tools": [SCHEMA]}
    tokenizer, _ = build("qwen2_5")
    (prompt,), _ = tokenize_prompts([row], tokenizer, max_prompt_tokens=999)
    assert list(prompt.tokens) == make("qwen2_5").prompt([USER], [SCHEMA])
    asked = {"prompt": [USER], "tools": [SCHEMA]}
    (example,), _ = tokenize_examples([asked | {"response": "3"}], tokenizer, max_tokens=999)
    pair = asked | {"chosen": CALL, "rejected": "no"}
    (preference,), _ = tokenize_preferences([pair], tokenizer, max_tokens=999)
    assert example.tokens[: len(prompt.tokens)] == preference.prompt == prompt.tokens
    chosen, rejected = map(tokenizer.decode, preference.answers)
    assert chosen.startswith("<tool_call>") and "zsun" in chosen and rejected == "no<|im_end|>"
    with refuses(rows=(0,)):
        tokenize_prompts([row], build("phi3")[0], max_prompt_tokens=999)
