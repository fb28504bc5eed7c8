"""Compiled programs are kept in a run's folder, and found there again."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm.config.sections.data import DataConfig
from jaxrl_llm.config.sections.mesh import MeshConfig, MeshSizes
from jaxrl_llm.config.sections.model import PolicyConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.runs.directory import compiled_into, programs_in, run_folder
from jaxrl_llm.training import precompile

ROOT = Path(__file__).resolve().parents[2]
CACHE = "jax_compilation_cache_dir"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    """As for a user who has told jax nothing of a cache."""
    monkeypatch.delenv(CACHE.upper(), raising=False)
    assert getattr(jax.config, CACHE) is None


def config_of(folder, **more):
    model, data = PolicyConfig(path="m"), DataConfig(train=("t.parquet",))
    return TrainConfig(run_dir=str(folder), model=model, data=data, **more)


def counted(function, *inputs):
    """Return what was compiled and what was found by a first call of a function."""
    counter = CompileCounter()
    jax.block_until_ready(jax.jit(function)(*inputs))
    found = counter.metrics()
    assert counter.metrics() == dict.fromkeys(found, 0)
    counter.close()
    return found


def cubed(x):
    return x * x * x


def test_what_a_run_compiles_is_found_by_the_next_one(tmp_path):
    x = np.ones(17, np.float32)
    with run_folder(tmp_path / "a", config_of(tmp_path / "a")):
        first = counted(cubed, x)
    jax.clear_caches()
    with run_folder(tmp_path / "a", config_of(tmp_path / "a")):
        again = counted(cubed, x)
    jax.clear_caches()
    with run_folder(tmp_path / "b", config_of(tmp_path / "b")):
        other = counted(cubed, x)
    counts = "perf/compilations", "perf/compilation_cache_hits"
    assert [tuple(found[n] for n in counts) for found in (first, again, other)] == [
        (1, 0),
        (0, 1),
        (1, 0),
    ]
    assert all(found["perf/compile_seconds"] > 0 for found in (first, again, other))
    (kept,) = programs_in(tmp_path / "a").glob("*-cache")
    assert kept.name.startswith("jit_cubed-")


def test_after_a_run_jax_is_as_it_was(tmp_path):
    names = CACHE, "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    with pytest.raises(RuntimeError), compiled_into(tmp_path / "a"):
        assert [getattr(jax.config, name) for name in names] == [str(tmp_path / "a"), 0]
        raise RuntimeError
    assert [getattr(jax.config, name) for name in names] == before
    counted(lambda x: x - 7, np.ones(18, np.float32))
    assert not (tmp_path / "a").exists()


def test_it_can_be_turned_off(tmp_path):
    with run_folder(tmp_path, config_of(tmp_path, compilation_cache=False)):
        assert getattr(jax.config, CACHE) is None


def test_a_folder_of_the_users_own_stays(tmp_path):
    with compiled_into(tmp_path / "mine"), run_folder(tmp_path / "run", config_of(tmp_path)):
        assert getattr(jax.config, CACHE) == str(tmp_path / "mine")
        counted(lambda x: x - 5, np.ones(18, np.float32))
    assert list((tmp_path / "mine").glob("*-cache"))
    assert not programs_in(tmp_path / "run").exists()


def test_a_setting_of_the_environment_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    with compiled_into(tmp_path):
        assert jax.config.jax_persistent_cache_min_compile_time_secs == before
        assert getattr(jax.config, CACHE) == str(tmp_path)


@pytest.fixture
def model(tmp_path):
    """A directory of a small model, which has no weights."""
    shutil.copytree(ROOT / "configs/quickstart", tmp_path / "model")
    return PolicyConfig(path=str(tmp_path / "model"))


@pytest.fixture
def asked(monkeypatch):
    """The configs whose steps are compiled ahead."""
    found = []
    monkeypatch.setattr(precompile, "compile_steps", lambda config, stopped: found.append(config))
    return found


def test_steps_of_a_new_run_of_a_large_model_are_compiled_ahead(
    tmp_path, model, asked, monkeypatch
):
    config = dataclasses.replace(config_of(tmp_path), model=model)
    drawn = dataclasses.replace(config, model=dataclasses.replace(model, random_init=True))

    def go(config):
        with precompile.compiling_ahead(config, tmp_path) as wait:
            wait()
        return len(asked)

    with compiled_into(programs_in(tmp_path)):
        assert go(config) == 0, "small"
        monkeypatch.setattr(precompile, "LARGE", 1)
        assert go(drawn) == 0, "nothing is read"
        assert go(config) == 1
        programs_in(tmp_path).mkdir(parents=True)
        assert go(config) == 1, "not new"
    assert go(config) == 1, "nothing is kept"


def test_what_can_not_be_compiled_ahead_is_compiled_when_it_is_needed(
    tmp_path, model, monkeypatch, caplog
):
    monkeypatch.setattr(precompile, "LARGE", 1)
    config = dataclasses.replace(config_of(tmp_path), model=model)
    wrong = dataclasses.replace(config, mesh=MeshConfig(train=MeshSizes(fsdp=3, data=3)))
    with compiled_into(programs_in(tmp_path)), precompile.compiling_ahead(wrong, tmp_path) as wait:
        wait()
    assert "the run's steps were not compiled ahead: mesh.train: " in caplog.text


def test_a_program_that_was_cut_off_is_compiled_again(tmp_path):
    """As when the process that wrote it was killed."""
    x = np.ones(19, np.float32)
    with compiled_into(tmp_path):
        counted(cubed, x)
        (kept,) = tmp_path.glob("*-cache")
        kept.write_bytes(kept.read_bytes()[:99])
        jax.clear_caches()
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert counted(cubed, x)["perf/compilations"] == 1
