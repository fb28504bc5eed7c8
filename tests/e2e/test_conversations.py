"""Supervised training on whole conversations: what is trained of them, and that it is learned."""

import contextlib
import json
import shutil

import jax
import pytest

from jaxrl_llm.data.chat import ChatTemplate
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training.policy import load_policy

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools[0].function.name }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GUARDED = ("jaxrl_llm/data/", "jaxrl_llm/training/offline.py")
TOOLS = [{"type": "function", "function": {"name": "next", "parameters": {}}}]


def conversation(digit):
    call = {"id": "a", "type": "function", "function": {"name": "next", "arguments": {"x": digit}}}
    return [
        {"role": "user", "content": str(digit)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str((7 * digit + 3) % 10), "tool_call_id": "a"},
        {"role": "assistant", "content": f"it is {(7 * digit + 3) % 10}"},
    ]


@pytest.fixture(scope="module")
def train(workshop):
    """(overrides) -> a run on conversations with a call of a tool."""
    model = workshop.root / "talking"
    shutil.copytree(workshop.root / "random", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"messages": conversation(digit), "tools": TOOLS} for digit in range(4)] * 8
    path = workshop.root / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*overrides):
        folder = workshop.folder()
        words = (f"model.path={model}", f"data.train={path}", "data.max_tokens=96")
        words += ("batch.max_tokens_per_device=768", f"export_to={folder}.out", "data.prepare=null")
        return workshop(*words, *overrides, main=sft_main, config="sft.yaml", run_dir=folder)

    return run


@pytest.fixture(scope="module")
def answers():
    """(result) -> the likeliest answers of a model to the questions, and to the tools' results."""

    def draw(result):
        policy = load_policy(f"{result.run_dir}.out", Layout(make_mesh({}, jax.devices()[:1])))
        template = ChatTemplate(policy.tokenizer)
        places = [(digit, place) for place in (1, 3) for digit in range(4)]
        prompts = [template.prompt(conversation(digit)[:place], TOOLS) for digit, place in places]
        with contextlib.closing(policy.open_engine(128, max_running_sequences=8)) as engine:
            rollouts = policy.sample(engine, prompts, max_new_tokens=30, temperature=0.0)
        return dict(zip(places, rollouts.texts, strict=True))

    return draw


@pytest.mark.slow
@pytest.mark.guards(*GUARDED)
def test_calls_and_answers_are_learned(train, answers):
    result = train("steps=100").ok()
    expected = {(digit, 1): f'[next {{"x": {digit}}}]' for digit in range(4)}
    expected |= {(digit, 3): conversation(digit)[-1]["content"] for digit in range(4)}
    assert answers(result) == expected
    assert [line["train/loss"] for line in result.metrics][-1] < 0.05


@pytest.mark.slow
@pytest.mark.guards(*GUARDED)
def test_the_last_answer_alone_is_learned(train, answers):
    drawn = answers(train("steps=100", "data.train_on=last").ok())
    for digit in range(4):
        assert drawn[digit, 3] == conversation(digit)[-1]["content"]
        assert "next" not in drawn[digit, 1]


def test_what_the_template_leaves_out_ends_the_run(train, workshop):
    rows = [{"messages": [{**m, "name": "Nora"} for m in conversation(1)]}]
    path = workshop.root / "named.jsonl"
    path.write_text(json.dumps(rows[0]))
    result = train(f"data.train={path}")
    assert result.status and "row 0: messages[0].name" in result.err
