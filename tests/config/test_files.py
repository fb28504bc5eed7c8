"""Config files: by path, by the name of a packaged one, and on top of a base."""

import pytest
import yaml

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import PACKAGED, load, read_config
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.train import main as train_main


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_a_packaged_config_is_found_by_its_name_from_any_folder(name, tmp_path, monkeypatch):
    expected = load(TrainConfig, PACKAGED / "quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    config = load(TrainConfig, name)
    assert config.algorithm == expected.algorithm
    assert config.model.warm_start == str(PACKAGED / "quickstart_sft.yaml")
    assert read_config(config.model.warm_start)["model"]["path"] == str(PACKAGED / "quickstart")


def test_a_file_of_ones_own_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("seed: 3")
    assert read_config("quickstart") == {"seed": 3}


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'recipes/dapo'") as caught:
        read_config("recipes/dappo")
    assert str(caught.value).startswith("can't read 'recipes/dappo': No such file")


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


@pytest.mark.parametrize(
    ("below", "above", "loss"),
    [
        ("ppo_clip", "{clip_high: 0.28}", {"fn": "ppo_clip", "clip_high": 0.28}),
        (
            "{fn: gspo, clip_low: 1e-3}",
            "{clip_high: 4e-3}",
            {"fn": "gspo", "clip_low": 1e-3, "clip_high": 4e-3},
        ),
        (
            "{clip_low: 0.1}",
            "{clip_high: 0.28}",
            {"fn": "ppo_clip", "clip_low": 0.1, "clip_high": 0.28},
        ),
        ("ppo_clip", "{fn: gspo, clip_high: 4e-3}", {"fn": "gspo", "clip_high": 4e-3}),
        ("{fn: ppo_clip, clip_low: 0.1}", "gspo", {"fn": "gspo"}),
        ("null", "{clip_high: 0.28}", {"fn": "ppo_clip", "clip_high": 0.28}),
    ],
)
def test_keywords_without_a_name_go_to_the_function_of_the_base(tmp_path, below, above, loss):
    (tmp_path / "base.yaml").write_text(
        f"run_dir: a\nmodel: {{path: m}}\ndata: {{train: t}}\nalgorithm: {{loss: {below}}}\n"
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: base.yaml\nalgorithm: {{loss: {above}}}\n")
    config = load(TrainConfig, recipe)
    assert config.algorithm.loss.as_config() == loss


def test_a_base_has_no_base(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: c.yaml")
    with pytest.raises(ConfigError, match="has a base of its own: expected one level"):
        read_config(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").unlink()
    with pytest.raises(ConfigError, match="can't read"):
        read_config(tmp_path / "a.yaml")
