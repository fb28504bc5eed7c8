from pathlib import Path

import pytest
import yaml

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import PACKAGED, find_config, load, read_config
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.train import main as train_main


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


def test_a_config_stands_on_its_base_and_is_printed_whole(tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(
        "run_dir: a\nmodel: {path: m}\ndata: {train: t}\n"
        "algorithm: {loss: {fn: ppo_clip, clip_low: 0.1}, kl_coef: 0.5}\n"
    )
    above = tmp_path / "above.yaml"
    above.write_text("base: base.yaml\nalgorithm: {loss: {fn: gspo}}\nseed: 2\n")
    assert train_main(["--config", str(above), "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert "base" not in printed
    assert printed["algorithm"]["loss"] == {"fn": "gspo"}
    assert (printed["algorithm"]["kl_coef"], printed["run_dir"], printed["seed"]) == (0.5, "a", 2)


def test_keywords_without_a_name_go_to_the_function_of_the_base(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    for below, above, loss in [
        ("ppo_clip", "{clip_high: 0.28}", {"fn": "ppo_clip", "clip_high": 0.28}),
        (
            *("{fn: gspo, clip_low: 1e-3}", "{clip_high: 4e-3}"),
            {"fn": "gspo", "clip_low": 1e-3, "clip_high": 4e-3},
        ),
        (
            *("{clip_low: 0.1}", "{clip_high: 0.28}"),
            {"fn": "ppo_clip", "clip_low": 0.1, "clip_high": 0.28},
        ),
        ("ppo_clip", "{fn: gspo, clip_high: 4e-3}", {"fn": "gspo", "clip_high": 4e-3}),
        ("{fn: ppo_clip, clip_low: 0.1}", "gspo", {"fn": "gspo"}),
        ("null", "{clip_high: 0.28}", {"fn": "ppo_clip", "clip_high": 0.28}),
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
