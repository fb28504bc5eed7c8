"""A new run's programs are compiled while its model is read."""

import dataclasses
import shutil
from pathlib import Path

import jax
import pytest

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import DataConfig, MeshConfig, MeshSizes, PolicyConfig
from jaxrl_llm.runs.compile_cache import use_compilation_cache
from jaxrl_llm.training import compile

ROOT = Path(__file__).resolve().parents[2]
CACHE = "jax_compilation_cache_dir"


@pytest.fixture(autouse=True)
def nothing_set(compiles_alone):
    """As for a user who has told jax nothing of a cache."""
    assert getattr(jax.config, CACHE) is None


def config_of(folder, **more):
    model, data = PolicyConfig(path="m"), DataConfig(train=("t.parquet",))
    return TrainConfig(run_dir=str(folder), model=model, data=data, **more)


@pytest.fixture
def model(tmp_path):
    """A directory of a small model, which has no weights."""
    shutil.copytree(ROOT / "configs/quickstart", tmp_path / "model")
    return PolicyConfig(path=str(tmp_path / "model"))


@pytest.fixture
def asked(monkeypatch):
    """The configs whose steps are compiled ahead."""
    configs = []
    monkeypatch.setattr(compile, "compiles_ahead", lambda devices: False)  # as on GPUs
    monkeypatch.setattr(compile, "compile_steps", lambda config, stopped: configs.append(config))
    return configs


def test_steps_of_a_new_run_of_a_large_model_are_compiled_ahead(
    tmp_path, model, asked, monkeypatch
):
    config = dataclasses.replace(config_of(tmp_path), model=model)
    drawn = dataclasses.replace(config, model=dataclasses.replace(model, random_init=True))

    def go(config):
        with compile.compiling_ahead(config, tmp_path) as wait:
            wait()
        return len(asked)

    with use_compilation_cache():
        assert go(config) == 0, "small"
        monkeypatch.setattr(compile, "LARGE", 1)
        assert go(drawn) == 0, "nothing is read"
        assert go(config) == 1
        (tmp_path / "checkpoints").mkdir()
        assert go(config) == 1, "not new"
        (tmp_path / "checkpoints").rmdir()
        monkeypatch.setattr(compile, "compiles_ahead", lambda devices: True)
        assert go(config) == 1, "compiled while others run"
        (tmp_path / "checkpoints").mkdir()
    assert go(config) == 1, "nothing is kept"


def test_what_can_not_be_compiled_ahead_is_compiled_when_it_is_needed(
    tmp_path, model, monkeypatch, caplog
):
    monkeypatch.setattr(compile, "LARGE", 1)
    monkeypatch.setattr(compile, "compiles_ahead", lambda devices: False)  # as on GPUs
    config = dataclasses.replace(config_of(tmp_path), model=model)
    wrong = dataclasses.replace(config, mesh=MeshConfig(train=MeshSizes(fsdp=3, data=3)))
    with use_compilation_cache(), compile.compiling_ahead(wrong, tmp_path) as wait:
        wait()
    assert "the run's steps were not compiled ahead: mesh.train: " in caplog.text
