import functools
import json

import jsonschema
import pytest
import yaml

from jaxrl_llm.config.help import json_schema
from jaxrl_llm.config.load import PACKAGED, as_tree, from_tree, load, to_yaml
from jaxrl_llm.config.programs import (
    EvaluateConfig,
    PreferConfig,
    ServeConfig,
    SftConfig,
    TrainConfig,
)
from jaxrl_llm.rewards.worker import load_reward_function
from jaxrl_llm.train import main as train_main
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.optimizer import make_optimizer

CLASSES = {
    "train": TrainConfig,
    "sft": SftConfig,
    "prefer": PreferConfig,
    "serve": ServeConfig,
    "evaluate": EvaluateConfig,
}
FILES = sorted(PACKAGED.rglob("*.yaml"))


@functools.cache
def checker(name):
    schema = json.loads((PACKAGED / f"schema/{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_shipped_schemas_are_current(capsys):
    """Else: `python -m jaxrl_llm.NAME --json-schema > configs/schema/NAME.json`."""
    for name, cls in CLASSES.items():
        assert json.loads((PACKAGED / f"schema/{name}.json").read_text()) == json_schema(cls), name
    with pytest.raises(SystemExit) as caught:
        train_main(["--json-schema"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == (PACKAGED / "schema/train.json").read_text()


def test_every_ready_config_fits_its_schema_and_its_functions_are_found(tmp_path, subtests):
    assert {"quickstart.yaml", "quickstart_sft.yaml"} <= {path.name for path in FILES}
    for path in FILES:
        first, *_ = path.read_text().splitlines()
        name = "sft" if path.stem.endswith("_sft") else "train"
        schema = (path.parent / first.removeprefix("# yaml-language-server: $schema=")).resolve()
        with subtests.test(path.stem):
            assert schema == (PACKAGED / f"schema/{name}.json").resolve()
            checker(name).validate(yaml.safe_load(path.read_text()))
            config = load(CLASSES[name], path)
            if path in FILES[::8]:  # they survive printing
                (tmp_path / "printed.yaml").write_text(to_yaml(config))
                assert load(CLASSES[name], tmp_path / "printed.yaml") == config
            if isinstance(config, SftConfig):
                make_optimizer(config.optim)
                continue
            resolve_functions(config)
            load_reward_function(config.reward.function)
            if config.model.warm_start:
                sft = load(SftConfig, PACKAGED.parent / config.model.warm_start)
                assert sft.export_to == config.model.path


def test_what_fits_and_what_does_not():
    config = {"run_dir": "a", "model": {"path": "m"}, "data": {"train": "t"}}
    fitting = [
        {"algorithm": {"loss": "gspo"}},
        {"algorithm": {"loss": "mine.py:loss", "advantage": "pkg.mod.f"}},
        {"algorithm": {"loss": {"fn": "ppo_clip", "clip_high": 0.3}}},
        {"algorithm": {"loss": {"clip_high": 0.3}, "correction": ["truncated_token"]}},
        {"algorithm": {"correction": "truncated_token"}, "model": None},
        {"data": {"train": "one"}, "optim": {"schedule": "constant_schedule"}},
        as_tree(from_tree(TrainConfig, config)),
    ]
    others = [
        *({"algorithm": {"los": "gspo"}}, {"algorithm": {"loss": "gpso"}}),
        {"algorithm": {"loss": {"fn": "ppo_clip", "clip_hihg": 0.3}}},
        *({"sed": 1}, {"seed": -1}, {"model": {"dtype": "float16"}}, {"rollout": {"top_p": 1.5}}),
    ]
    assert [tree for tree in fitting if not checker("train").is_valid(tree)] == []
    assert [tree for tree in others if checker("train").is_valid(tree)] == []
