import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import PACKAGED, as_tree, find_config, load, read_config
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.parameters import parameter_count


def test_a_packaged_config_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch):
    expected = load(TrainConfig, PACKAGED / "quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # such as a run's: it hides no config
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml"):
        config = load(TrainConfig, name)
        assert config.algorithm == expected.algorithm
        assert config.model.warm_start == str(PACKAGED / "quickstart_sft.yaml")
    assert read_config(config.model.warm_start)["model"]["path"] == str(PACKAGED / "quickstart")
    (tmp_path / "other").mkdir()
    assert find_config("quickstart").is_file() and find_config("other") == Path("other")
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("seed: 3")
    assert read_config("quickstart") == {"seed": 3}, "one's own file wins"
    with pytest.raises(ConfigError, match="'recipes/dapo'"):  # the nearest name
        read_config("recipes/dappo")


def test_a_config_stands_on_its_base_and_is_printed_whole(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "run_dir: a\nmodel: {path: m}\ndata: {train: t}\nalgorithm: {kl_coef: 0.5}\n"
    )
    (tmp_path / "above.yaml").write_text("base: base.yaml\nalgorithm: {loss: gspo}\nseed: 2\n")
    printed = as_tree(load(TrainConfig, tmp_path / "above.yaml"))
    assert "base" not in printed
    assert printed["algorithm"]["loss"] == {"fn": "gspo"}
    assert (printed["algorithm"]["kl_coef"], printed["run_dir"], printed["seed"]) == (0.5, "a", 2)


def test_keywords_without_a_name_go_to_the_function_of_the_base(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for below, above, loss in [
        ("ppo_clip", "{cap: 0.2}", {"fn": "ppo_clip", "cap": 0.2}),
        ("{fn: gspo, low: 1}", "{cap: 4}", {"fn": "gspo", "low": 1, "cap": 4}),
        ("{low: 0.1}", "{cap: 0.2}", {"fn": "ppo_clip", "low": 0.1, "cap": 0.2}),
        ("ppo_clip", "{fn: gspo, cap: 4}", {"fn": "gspo", "cap": 4}),
        ("{fn: ppo_clip, low: 0.1}", "gspo", {"fn": "gspo"}),
        ("null", "{cap: 0.2}", {"fn": "ppo_clip", "cap": 0.2}),
    ]:
        (tmp_path / "base.yaml").write_text(
            f"run_dir: a\nmodel: {{path: m}}\ndata: {{train: t}}\nalgorithm: {{loss: {below}}}\n"
        )
        recipe.write_text(f"base: base.yaml\nalgorithm: {{loss: {above}}}\n")
        assert load(TrainConfig, recipe).algorithm.loss.as_config() == loss, (below, above)


def test_a_base_has_no_base(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: c.yaml")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"b.yaml"):
            read_config(tmp_path / "a.yaml")
        (tmp_path / "b.yaml").unlink(missing_ok=True)


def test_the_small_model_is_one_of_transformers():
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED / "vision/model")
    parts = [{"type": "image"}, {"type": "text", "text": "How many dots?"}, {"type": "video"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "3"}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert written == (
        "<|user|><|vision_start|><|image_pad|><|vision_end|>How many dots?"
        "<|vision_start|><|video_pad|><|vision_end|><|end|><|assistant|>3<|end|><|assistant|>"
    )
    config = json.loads((PACKAGED / "vision/model/config.json").read_text())
    for name in ("image", "video"):
        pad = tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>")
        assert config[f"{name}_token_id"] == pad
    processor = AutoImageProcessor.from_pretrained(PACKAGED / "vision/model", backend="pil")
    image = Image.fromarray(np.zeros((32, 32, 3), np.uint8))
    assert processor(image, return_tensors="np")["image_grid_thw"].tolist() == [[1, 4, 4]]
    spec = read_spec(PACKAGED / "vision/model", vision=True)
    assert parameter_count(spec) == 423_040  # as transformers counts them


def test_the_large_model_has_its_published_size():
    plan = read_spec(PACKAGED / "plan/Qwen3-VL-8B", vision=True)
    assert parameter_count(plan) == 8_767_123_696  # of transformers' model
