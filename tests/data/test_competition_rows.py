"""Competition math as DAPO and ReTool have it, from rows of the published form."""

import re
from pathlib import Path

import pytest

from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.configs.tasks.dapo_math import dapo_math
from jaxrl_llm.configs.tasks.retool_sft import retool_sft
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.rows import sft_rows, verl_rows, write_rows
from jaxrl_llm.data.turns import FORMATS, TurnTemplate
from jaxrl_llm.rollout.tools.builtin import python
from jaxrl_llm.rollout.tools.tool import tool_schema
from tests.data.real_templates import build

CONFIGS = Path(__file__).parents[2] / "configs/agents"

PROBLEM = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "How much is 17 * 2? End with Answer: $Answer."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
SOLUTION = """First, count.
<code>
```python
n = sum(1 for i in range(9))
print("n =", n)
```
</code>
<interpreter>
n = 9
</interpreter>
Now square it.
<code>
```python
print(n ** 2)
```
</code>
<interpreter>
NameError: name 'n' is not defined
</interpreter>
It is 81.
<answer>
\\boxed{81}
</answer>"""
TAUGHT = {
    "messages": [
        {"role": "user", "content": "You can run code.\n\n*user question:*\nSquare <answer>9."},
        {"role": "assistant", "content": SOLUTION},
    ]
}


def saved(path, rows):
    write_rows(path, rows)
    return str(path)


def test_each_problem_of_dapo_is_there_once(tmp_path):
    other = PROBLEM | {"prompt": [{"role": "user", "content": "Another."}]}
    train = saved(tmp_path / "many.parquet", [PROBLEM, other, PROBLEM] * 3)
    validation = saved(tmp_path / "few.parquet", [other] * 4)
    written = dapo_math(tmp_path / "out", source=train, validation_source=validation)
    assert {path.name: n for path, n in written.items()} == {
        "train.parquet": 2,
        "validation.parquet": 1,
    }
    first, second = verl_rows([str(tmp_path / "out/train.parquet")])
    assert first["prompt"] == PROBLEM["prompt"]
    assert first["reward_model"]["ground_truth"] == "34"
    assert second["extra_info"] == {"split": "train", "index": 1}


def test_code_and_what_it_says_become_turns(tmp_path):
    source = saved(tmp_path / "source.parquet", [TAUGHT])
    retool_sft(tmp_path / "out", source=source)
    turns = sft_rows([str(tmp_path / "out/sft.parquet")])
    roles = ["user", "assistant", "tool", "assistant", "tool"]
    assert [[m["role"] for m in turn["prompt"]] for turn in turns] == [roles[:1], roles[:3], roles]
    assert turns[0]["prompt"][0]["content"] == "Square 9."
    assert [m["content"] for m in turns[2]["prompt"] if m["role"] == "tool"] == [
        "n = 9",
        "NameError: name 'n' is not defined",
    ]
    said, code = turns[0]["response"].split("<tool_call>")
    assert said == "First, count.\n"
    call = f"<tool_call>{code}"
    assert re.fullmatch(r'<tool_call>\n\{"name": "python", .*\}\n</tool_call>', call)
    assert turns[2]["response"] == "It is 81.\n\n\\boxed{81}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TAUGHT["messages"][:1]}, "row 1: expected two messages, got columns mess"),
        (
            {"messages": [{"role": "user", "content": "Square 9."}, TAUGHT["messages"][1]]},
            "row 1: expected a question with '*user question:*', got 'Square 9.'",
        ),
    ],
)
def test_a_row_of_another_form_is_named(tmp_path, row, message):
    source = saved(tmp_path / "source.parquet", [TAUGHT, row])
    with pytest.raises(ValueError, match=re.escape(message)):
        retool_sft(tmp_path / "out", source=source)
    bad = saved(tmp_path / "bad.parquet", [{"prompt": PROBLEM["prompt"], "answer": "34"}])
    with pytest.raises(ValueError, match=r"bad.parquet, row 0: expected a prompt and reward_model"):
        dapo_math(tmp_path / "out", source=bad, validation_source=bad)
    assert not (tmp_path / "out").exists()


def test_the_cold_start_shows_the_prompts_of_rl(tmp_path):
    """With the template of Qwen3: the same tokens, calls that are read, results in their place."""
    retool_sft(tmp_path / "out", source=saved(tmp_path / "source.parquet", [TAUGHT]))
    first, second, _ = sft_rows([str(tmp_path / "out/sft.parquet")])
    sft = load(SftConfig, CONFIGS / "retool_qwen3_4b_sft.yaml").data.chat_template_kwargs
    rl = load(TrainConfig, CONFIGS / "retool_qwen3_4b.yaml").data.chat_template_kwargs
    tokenizer, stops = build("qwen3")
    (schema,) = sft["tools"]
    run = next(python(10.0, sandbox="expression"))
    for_call = tool_schema(run, "python", key="rollout.tools")["function"]["parameters"]
    assert schema["function"]["parameters"] == for_call, "not the tool's"
    turns = TurnTemplate(tokenizer, stops, tools=[schema], template_kwargs=rl)
    opening = turns.opening(first["prompt"])
    assert encode_prompt(tokenizer, first["prompt"], **sft) == opening
    response = tokenizer(first["response"], add_special_tokens=False)["input_ids"]
    (call,) = FORMATS["hermes"].parse(response, tokenizer, [schema]).calls
    assert call.name == "python" and call.arguments["code"].startswith("n = sum(1")
    text = tokenizer.decode(encode_prompt(tokenizer, second["prompt"], **sft))
    assert "<tool_response>\nn = 9\n</tool_response>" in text
