"""A new run's programs are compiled while its model is read."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import DataConfig, MeshConfig, MeshSizes, PolicyConfig
from jaxrl_llm.runs.compile_cache import use_compilation_cache
from jaxrl_llm.training import compile

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart"


@pytest.fixture
def config(tmp_path, monkeypatch, compiles_alone):
    """Of a large model, on devices that compile nothing ahead of its use, as GPUs."""
    shutil.copytree(QUICKSTART, tmp_path / "model")  # it has no weights
    monkeypatch.setattr(compile, "compiles_ahead", lambda devices: False)
    monkeypatch.setattr(compile, "LARGE", 1)
    model, data = PolicyConfig(path=str(tmp_path / "model")), DataConfig(train=("t.parquet",))
    return TrainConfig(run_dir=str(tmp_path), model=model, data=data)


def test_steps_of_a_new_run_of_a_large_model_are_compiled_ahead(config, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(compile, "compile_steps", lambda config, stopped: asked.append(config))

    def go(config=config):
        before = len(asked)
        with compile.compiling_ahead(config, tmp_path) as wait:
            wait()
        return len(asked) > before

    with use_compilation_cache():
        drawn = dataclasses.replace(config.model, random_init=True)
        assert not go(dataclasses.replace(config, model=drawn)), "nothing is read"
        assert go()
        (tmp_path / "checkpoints").mkdir()
        assert not go(), "not new"
        (tmp_path / "checkpoints").rmdir()
        with monkeypatch.context() as patch:
            patch.setattr(compile, "compiles_ahead", lambda devices: True)
            assert not go(), "compiled while others run"
        monkeypatch.setattr(compile, "LARGE", 1e12)
        assert not go(), "small"
        monkeypatch.setattr(compile, "LARGE", 1)
    assert not go(), "nothing is kept"


def test_what_can_not_be_compiled_ahead_is_compiled_when_it_is_needed(config, tmp_path, caplog):
    wrong = dataclasses.replace(config, mesh=MeshConfig(train=MeshSizes(fsdp=3, data=3)))
    with use_compilation_cache(), compile.compiling_ahead(wrong, tmp_path) as wait:
        wait()
    assert "mesh.train" in caplog.text
