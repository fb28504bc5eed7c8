"""The lines that a run begins and ends with."""

import json
import shlex

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config.load import apply_override, from_tree, load
from jaxrl_llm.config.programs import EvaluateConfig, SftConfig, TrainConfig
from jaxrl_llm.training.run_files import (
    closing_lines,
    evaluation_words,
    interruption_line,
    opening_lines,
)


def shapes(*sizes, devices=1):
    mesh = Mesh(np.array(jax.devices()[:devices]), "d")
    layout = NamedSharding(mesh, PartitionSpec())
    return {
        str(i): jax.ShapeDtypeStruct(size, np.float32, sharding=layout)
        for i, size in enumerate(sizes)
    }


def config(*overrides):
    return load(TrainConfig, "configs/quickstart.yaml", overrides)


def test_the_first_lines_say_what_is_trained_on_what():
    trained = {"actor": shapes((1000, 165), devices=2), "critic": shapes((3,))}
    assert opening_lines(config("run_dir=runs/a"), trained, 4096, 150) == [
        "training runs/quickstart/base: 165 K parameters, critic 3 parameters, on 2 cpu devices",
        "4096 prompts, 150 steps of 64 x 8 answers; everything is written to runs/a",
    ]
    lora = opening_lines(config("model.lora.rank=4"), {"actor": shapes((4, 5), (6,))}, 9, 1)
    assert lora[0] == "training an adapter of runs/quickstart/base: 26 parameters, on 1 cpu device"
    sft = load(SftConfig, "configs/quickstart_sft.yaml", [])
    assert opening_lines(sft, {"actor": shapes((2,))}, 3200, 10)[1].startswith(
        "3200 examples, 10 steps of 64 examples; everything"
    )


def evaluated(*overrides):
    """Return the config that the suggested command evaluates with."""
    words = evaluation_words(config(*overrides))
    assert words is not None
    text = shlex.join(words)
    tree = {"data": []}
    words = shlex.split(text)
    while words and words[0].startswith("--"):
        flag, value, *words = words
        tree.__setitem__("model", value) if flag == "--model" else tree["data"].append(value)
    for word in words:
        apply_override(tree, word)
    return from_tree(EvaluateConfig, tree)


def test_the_command_that_evaluates_does_what_validation_does(tmp_path):
    plain = evaluated()
    assert (plain.max_new_tokens, plain.temperature, plain.samples) == (5, 0.0, 1)
    assert plain.reward.function.fn == "arithmetic" and plain.model == "runs/quickstart"
    assert plain.data == ("runs/quickstart/data/validation.parquet",)
    own = evaluated(
        "validation.samples=4",
        "validation.temperature=0.5",
        "validation.rows=7",
        "model.dtype=bfloat16",
        "data.filter_overlong=true",
        "data.chat_template_kwargs={enable_thinking: no way}",
        "reward.function={fn: 'my file.py:score', weight: 0.5}",
        "reward.timeout_s=3",
        "rollout.tools=[calculator, {fn: 'mine.py:look_up', pages: [1, 2]}]",
        "rollout.limits.turns=3",
        "data.validation=[a.parquet, 'b c.jsonl']",
        "model.vision=frozen",
        "data.image_key=pictures",
        "data.max_pixels=4096",
    )
    assert (own.image_key, own.max_pixels, own.min_pixels) == ("pictures", 4096, None)
    assert own.data == ("a.parquet", "b c.jsonl") and own.max_prompt_tokens == 11
    assert (own.samples, own.temperature, own.rows, own.dtype) == (4, 0.5, 7, "bfloat16")
    assert own.chat_template_kwargs == {"enable_thinking": "no way"}
    assert own.reward.function.as_config() == {"fn": "my file.py:score", "weight": 0.5}
    assert own.reward.timeout_s == 3 and own.limits.turns == 3
    assert [tool.fn for tool in own.tools] == ["calculator", "mine.py:look_up"]
    assert own.tools[1].kwargs == {"pages": [1, 2]}


def test_what_no_command_can_evaluate_has_none():
    assert evaluation_words(config("reward.function=__main__:score")) is None
    assert evaluation_words(config("reward.function=null", "reward.classifier=some")) is None


@pytest.fixture
def folder(tmp_path):
    """A run of three steps, of which two are saved."""
    lines = [{"step": 1}, {"step": 2, "val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.8}]
    lines.append({"step": 3, "val-core/a/acc/mean@1": 0.25})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, score in ((2, 0.65), (3, 0.25)):
        path = tmp_path / "checkpoints" / str(step) / "extra"
        path.mkdir(parents=True)
        record = {"record": {"metrics": {"validation": score}}}
        (path / "metadata").write_text(json.dumps(record))
    return tmp_path


def test_the_last_lines_say_where_the_run_is_and_what_to_do(folder):
    standing, look, evaluate, export = closing_lines(config(f"run_dir={folder}"))
    assert standing == f"run: {folder} (3 steps, 2 checkpoints, the best is step 2 with 0.650)"
    assert look == f"look at it: python -m jaxrl_llm.report {folder}"
    assert evaluate.startswith(f"evaluate: python -m jaxrl_llm.evaluate --model {folder} --data ")
    assert export == f"export: python -m jaxrl_llm.export {folder} {folder}/exported"
    overrides = [f"run_dir={folder}", "export_to=runs/mine"]
    lines = closing_lines(load(SftConfig, "configs/quickstart_sft.yaml", overrides))
    assert lines[0] == standing
    assert lines[1] == "model: runs/mine (Hugging Face's format)"
    evaluate = "evaluate: python -m jaxrl_llm.evaluate --model runs/mine --data PROMPTS.parquet"
    assert lines[-1] == evaluate
    overrides += ["model.vision=trained", "data.max_pixels=1024"]
    lines = closing_lines(load(SftConfig, "configs/quickstart_sft.yaml", overrides))
    assert lines[-1] == f"{evaluate} vision=true max_pixels=1024"


def test_who_interrupts_a_run_gets_to_know_where_it_goes_on(folder, tmp_path_factory):
    given = config(f"run_dir={folder}")
    assert interruption_line(given) == (
        f"the same command continues after step 3, the newest checkpoint in {folder} "
        "(3 steps were done)"
    )
    nothing = config(f"run_dir={tmp_path_factory.mktemp('new')}/run")
    assert "there is no checkpoint yet" in interruption_line(nothing)
