"""The lines that a run begins and ends with."""

import json
import shlex

from jaxrl_llm.config.load import apply_override, from_tree, load
from jaxrl_llm.config.programs import EvaluateConfig, SftConfig, TrainConfig
from jaxrl_llm.training.run_files import closing_lines, evaluation_words, interruption_line


def config(*overrides):
    return load(TrainConfig, "quickstart", overrides)


def evaluated(*overrides):
    """Return the config that the suggested command evaluates with."""
    words = shlex.split(shlex.join(evaluation_words(config(*overrides))))
    tree = {"data": []}
    while words and words[0].startswith("--"):
        flag, value, *words = words
        tree.__setitem__("model", value) if flag == "--model" else tree["data"].append(value)
    for word in words:
        apply_override(tree, word)
    return from_tree(EvaluateConfig, tree)


def test_the_command_that_evaluates_does_what_validation_does():
    plain = evaluated()
    assert (plain.max_new_tokens, plain.temperature, plain.samples) == (5, 0.0, 1)
    assert plain.reward.function.fn == "arithmetic" and plain.model == "runs/quickstart"
    own = evaluated(
        *("validation={samples: 4, temperature: 0.5, rows: 7}", "model.dtype=bfloat16"),
        *("data.filter_overlong=true", "data.chat_template_kwargs={enable_thinking: no way}"),
        *("reward.function={fn: 'my file.py:score', weight: 0.5}", "reward.timeout_s=3"),
        "rollout.tools=[calculator, {fn: 'mine.py:look_up', pages: [1, 2]}]",
        *("rollout.limits.turns=3", "data.validation=[a.parquet, 'b c.jsonl']"),
        *("model.vision=frozen", "data.image_key=pictures", "data.max_pixels=4096"),
    )
    assert (own.image_key, own.max_pixels, own.min_pixels) == ("pictures", 4096, None)
    assert own.data == ("a.parquet", "b c.jsonl") and own.max_prompt_tokens == 11
    assert (own.samples, own.temperature, own.rows, own.dtype) == (4, 0.5, 7, "bfloat16")
    assert own.chat_template_kwargs == {"enable_thinking": "no way"}
    assert own.reward.function.as_config() == {"fn": "my file.py:score", "weight": 0.5}
    assert own.reward.timeout_s == 3 and own.limits.turns == 3
    assert own.tools[1].kwargs == {"pages": [1, 2]}
    assert evaluation_words(config("reward.function=__main__:score")) is None, "no command can"


def test_the_last_lines_say_where_the_run_is_and_what_to_do(tmp_path):
    lines = [{"step": 1}, {"step": 2, "val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.8}]
    lines.append({"step": 3, "val-core/a/acc/mean@1": 0.25})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, score in ((2, 0.65), (3, 0.25)):
        path = tmp_path / "checkpoints" / str(step) / "extra"
        path.mkdir(parents=True)
        record = {"record": {"metrics": {"validation": score}}}
        (path / "metadata").write_text(json.dumps(record))
    standing, *_ = closing_lines(config(f"run_dir={tmp_path}"))
    assert f"{tmp_path} (3 steps, 2 checkpoints, the best is step 2 with 0.650)" in standing
    keys = {"run_dir": str(tmp_path), "export_to": "runs/mine", "model.vision": "trained"}
    sft = load(SftConfig, "quickstart_sft", keys | {"data.max_pixels": 9})
    first, second, *_, last = closing_lines(sft)
    assert first == standing and "runs/mine" in second
    assert last.endswith("--model runs/mine --data PROMPTS.parquet vision=true max_pixels=9")
    assert "step 3" in interruption_line(config(f"run_dir={tmp_path}"))
    assert "no checkpoint" in interruption_line(config(f"run_dir={tmp_path}/new"))
