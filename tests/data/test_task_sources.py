import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from jaxrl_llm.config.errors import RowError
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.configs.tasks import _sources
from jaxrl_llm.configs.tasks.dapo_math import dapo_math
from jaxrl_llm.configs.tasks.geo3k import BOX_INSTRUCTION, geo3k
from jaxrl_llm.configs.tasks.gsm8k import gsm8k
from jaxrl_llm.configs.tasks.math import math
from jaxrl_llm.configs.tasks.retool_sft import retool_sft
from jaxrl_llm.configs.tasks.search_r1 import search_r1
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.rows import sft_rows, verl_rows, write_rows
from jaxrl_llm.data.turns import TurnTemplate
from jaxrl_llm.rewards.functions import by_source
from jaxrl_llm.rollout.tools.builtin import python
from jaxrl_llm.rollout.tools.tool import tool_schema
from tests.data.real_templates import build

CONFIGS = Path(__file__).parents[2] / "configs/agents"


def saved(path, rows):
    """Write rows in the form of the path's ending; return the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        write_rows(path, rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def scored(row, reply):
    truth = row["reward_model"]["ground_truth"]
    return by_source(row["data_source"], reply, truth, {})["score"]


GSM8K = {
    "question": "Ann has 1,000 apples and buys 200. How many has she? ",
    "answer": "1000 + 200 = <<1000+200=1200>>1200\n#### 1,200",
}
MATH = {
    "problem": "Halve one.",
    "solution": r"It is $1/2$, so \boxed{\frac{1}{2}}.",
    "level": "Level 1",
    "type": "Prealgebra",
}


def test_gsm8k_from_a_hub_snapshot(tmp_path):
    snapshot = tmp_path / "snapshot"
    saved(snapshot / "main/train-00000-of-00001.parquet", [GSM8K, GSM8K])
    saved(snapshot / "main/test-00000-of-00001.parquet", [GSM8K])
    saved(snapshot / "socratic/train-00000-of-00001.parquet", [GSM8K] * 7)
    written = gsm8k(tmp_path / "out", source=str(snapshot))
    assert list(written.values()) == [2, 1]
    row = verl_rows([str(tmp_path / "out" / "validation.parquet")])[0]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert row["prompt"][0]["content"].startswith(GSM8K["question"].strip())
    assert row["extra_info"] == {"split": "validation", "index": 0, "solution": GSM8K["answer"]}
    assert scored(row, GSM8K["answer"]) == 1.0


def test_math_from_two_files(tmp_path):
    bare = {**MATH, "solution": r"Thus $\boxed 5$."}
    train = saved(tmp_path / "a.jsonl", [MATH, bare])
    test = saved(tmp_path / "b.parquet", [MATH])
    math(tmp_path / "out", source=f"{train},{test}")
    rows = verl_rows([str(tmp_path / "out" / "train.parquet")])
    assert [row["reward_model"]["ground_truth"] for row in rows] == [r"\frac{1}{2}", "5"]
    assert rows[0]["prompt"][0]["content"].startswith("Halve one.\n")
    assert r"\boxed{}" in rows[0]["prompt"][0]["content"]
    assert rows[0]["extra_info"].items() >= {"level": "Level 1", "type": "Prealgebra"}.items()
    assert scored(rows[0], r"\boxed{0.5}") == 1.0


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
print("n =", 9)
```
</code>
<interpreter>
n = 9
</interpreter>
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


def test_each_problem_of_dapo_is_there_once(tmp_path):
    other = PROBLEM | {"prompt": [{"role": "user", "content": "Another."}]}
    train = saved(tmp_path / "many.parquet", [PROBLEM, other, PROBLEM] * 3)
    validation = saved(tmp_path / "few.parquet", [other] * 4)
    written = dapo_math(tmp_path / "out", source=train, validation_source=validation)
    assert [*written.values()] == [2, 1]
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


def test_the_cold_start_shows_the_prompts_of_rl(tmp_path):
    """With the template of Qwen3: the same tokens, and the same tool."""
    retool_sft(tmp_path / "out", source=saved(tmp_path / "source.parquet", [TAUGHT]))
    first, *_ = sft_rows([str(tmp_path / "out/sft.parquet")])
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


DRAWING, FILE = Image.new("RGB", (9, 7), (10, 200, 30)), io.BytesIO()
DRAWING.save(FILE, "PNG")
FIGURE = {
    "images": [{"bytes": FILE.getvalue(), "path": None}],
    "problem": "<image>Find $x$.",
    "answer": r"3 \sqrt { 2 }",
}


def test_a_copy_of_geometry3k_keeps_its_files(tmp_path):
    for split, rows in (("train", [FIGURE] * 2), ("test", [FIGURE])):
        saved(tmp_path / f"copy/data/{split}-00000-of-00001.parquet", rows)
    written = geo3k(tmp_path / "out", source=str(tmp_path / "copy"))
    assert {path.stem: rows for path, rows in written.items()} == {"train": 2, "validation": 1}
    _, row = verl_rows([str(tmp_path / "out/train.parquet")])
    known = {"answer": FIGURE["answer"], "question": "<image>Find $x$."}
    assert row == {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>Find $x$. {BOX_INSTRUCTION}"}],
        "images": [{"bytes": FILE.getvalue()}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": FIGURE["answer"]},
        "extra_info": {"split": "train", "index": 1, **known},
    }


def asked(count):
    """Return questions as Search-R1 has them, with the columns that matter and two that do not."""
    return [
        {"id": f"train_{n}", "question": f" who is {n}? ", "golden_answers": [f"No. {n}", f"n{n}"]}
        | {"data_source": ("nq", "hotpotqa")[n % 2], "metadata": None}
        for n in range(count)
    ]


def test_questions_of_search_are_read_by_the_trainer_and_scored(tmp_path):
    files = [saved(tmp_path / f"{count}.jsonl", asked(count)) for count in (4, 100)]
    given = {"source": ",".join(files), "instruction": "Find: ", "validation_rows": 20}
    written = search_r1(tmp_path / "out", **given)
    assert {path.stem: rows for path, rows in written.items()} == {"train": 4, "validation": 20}
    train, held_out = (verl_rows([str(path)]) for path in written)
    assert train[3]["prompt"] == [{"role": "user", "content": "Find: who is 3?"}]
    assert [row["data_source"] for row in train] == ["searchR1_nq", "searchR1_hotpotqa"] * 2
    for row in train + held_out:
        number = row["extra_info"]["index"]
        for said, score in ((f"no {number}", 1.0), (f"N{number}.", 1.0), ("no", 0.0)):
            assert scored(row, f"<answer>{said}</answer>") == score
    numbers = [row["extra_info"]["index"] for row in held_out]
    assert numbers == sorted(set(numbers)) and max(numbers) > 20


QUESTION = {"role": "user", "content": "Square 9."}


def test_a_row_of_another_form_is_named(tmp_path, subtests):
    for number, (prepare, good, wrong, named) in enumerate(
        [
            (gsm8k, GSM8K, {"answer": "42"}, "answer"),
            (gsm8k, GSM8K, {"answer": "#### x"}, "answer"),
            *((math, MATH, {"level": 3}, "level"), (math, MATH, {"solution": "5"}, "solution")),
            (dapo_math, PROBLEM, {"reward_model": None}, "reward_model"),
            (retool_sft, TAUGHT, {"messages": TAUGHT["messages"][:1]}, "messages"),
            (retool_sft, TAUGHT, {"messages": [QUESTION, TAUGHT["messages"][1]]}, "question"),
            *((geo3k, FIGURE, {"answer": 3}, "answer"), (geo3k, FIGURE, {"problem": "x"}, "image")),
            (geo3k, FIGURE, {"images": [{"path": "a.png"}]}, "image"),
            (search_r1, asked(1)[0], {"question": 3}, "question"),
            (search_r1, asked(1)[0], {"golden_answers": [1]}, "golden"),
        ]
    ):
        with subtests.test(f"{prepare.__name__} {wrong}"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(_sources, "hub_rows", lambda *_, rows=(good, good | wrong): [*rows])
            with pytest.raises(RowError, match=named) as caught:
                prepare(tmp_path / str(number))
            assert caught.value.rows == (1,)
    assert not list(tmp_path.iterdir())
