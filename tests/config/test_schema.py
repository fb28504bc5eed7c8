"""The JSON Schemas that editors read: current, and at one with the configs."""

import json

import jsonschema
import pytest
import yaml

from jaxrl_llm.config.help import json_schema
from jaxrl_llm.config.load import PACKAGED, as_tree, from_tree
from jaxrl_llm.config.programs import (
    EvaluateConfig,
    PreferConfig,
    ServeConfig,
    SftConfig,
    TrainConfig,
)
from jaxrl_llm.train import main as train_main

CLASSES = {
    "train": TrainConfig,
    "sft": SftConfig,
    "prefer": PreferConfig,
    "serve": ServeConfig,
    "evaluate": EvaluateConfig,
}
FILES = sorted(PACKAGED.rglob("*.yaml"))


def checker(name):
    schema = json.loads((PACKAGED / f"schema/{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def of_training():
    return checker("train")


@pytest.mark.parametrize("name", CLASSES)
def test_the_shipped_schema_is_current(name):
    """Else: `python -m jaxrl_llm.NAME --json-schema > configs/schema/NAME.json`."""
    assert json.loads((PACKAGED / f"schema/{name}.json").read_text()) == json_schema(CLASSES[name])


def test_the_program_prints_it(capsys):
    with pytest.raises(SystemExit) as caught:
        train_main(["--json-schema"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == (PACKAGED / "schema/train.json").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_ready_config_names_its_schema_and_fits(path):
    first = path.read_text().splitlines()[0]
    name = "sft" if path.stem.endswith("_sft") else "train"
    schema = (path.parent / first.removeprefix("# yaml-language-server: $schema=")).resolve()
    assert schema == (PACKAGED / f"schema/{name}.json").resolve()
    checker(name).validate(yaml.safe_load(path.read_text()))


def test_a_resolved_config_fits(of_training):
    config = {"run_dir": "a", "model": {"path": "m"}, "data": {"train": "t"}}
    of_training.validate(as_tree(from_tree(TrainConfig, config)))


@pytest.mark.parametrize(
    ("tree", "fits"),
    [
        ({"algorithm": {"loss": "gspo"}}, True),
        ({"algorithm": {"loss": "mine.py:loss", "advantage": "pkg.mod.f"}}, True),
        ({"algorithm": {"loss": {"fn": "ppo_clip", "clip_high": 0.3}}}, True),
        ({"algorithm": {"loss": {"clip_high": 0.3}, "correction": ["truncated_token"]}}, True),
        ({"algorithm": {"correction": "truncated_token"}, "model": None}, True),
        ({"data": {"train": "one"}, "optim": {"schedule": "constant_schedule"}}, True),
        ({"algorithm": {"los": "gspo"}}, False),
        ({"algorithm": {"loss": "gpso"}}, False),
        ({"algorithm": {"loss": {"fn": "ppo_clip", "clip_hihg": 0.3}}}, False),
        ({"sed": 1}, False),
        ({"seed": -1}, False),
        ({"model": {"dtype": "float16"}}, False),
        ({"rollout": {"top_p": 1.5}}, False),
    ],
)
def test_what_fits_and_what_does_not(tree, fits, of_training):
    assert of_training.is_valid(tree) == fits
