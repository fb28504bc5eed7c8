"""Compiled programs are kept in a run's folder, and read there again."""

import jax
import numpy as np
import pytest

from jaxrl_llm.config.sections.data import DataConfig
from jaxrl_llm.config.sections.model import PolicyConfig
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.runs.compile_cache import compilation_cache_of, use_compilation_cache
from jaxrl_llm.runs.directory import run_folder

CACHE = "jax_compilation_cache_dir"


@pytest.fixture(autouse=True)
def nothing_set(compiles_alone):
    """As for a user who has told jax nothing of a cache."""
    assert getattr(jax.config, CACHE) is None


def config_of(folder, **more):
    model, data = PolicyConfig(path="m"), DataConfig(train=("t.parquet",))
    return TrainConfig(run_dir=str(folder), model=model, data=data, **more)


def counted(function, *inputs):
    """Return what was compiled and what was found by a first call of a function."""
    counter = CompileCounter()
    jax.block_until_ready(jax.jit(function)(*inputs))
    metrics = counter.metrics()
    assert counter.metrics() == dict.fromkeys(metrics, 0)
    counter.close()
    return metrics


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
    assert [tuple(metrics[n] for n in counts) for metrics in (first, again, other)] == [
        (1, 0),
        (0, 1),
        (1, 0),
    ]
    assert all(metrics["perf/compile_seconds"] > 0 for metrics in (first, again, other))
    (kept,) = compilation_cache_of(tmp_path / "a").glob("*-cache")
    assert kept.name.startswith("jit_cubed-")


def test_after_a_run_jax_is_as_it_was(tmp_path):
    names = CACHE, "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    with pytest.raises(RuntimeError), use_compilation_cache(tmp_path / "a"):
        assert [getattr(jax.config, name) for name in names] == [str(tmp_path / "a"), 0]
        raise RuntimeError
    assert [getattr(jax.config, name) for name in names] == before
    counted(lambda x: x - 7, np.ones(18, np.float32))
    assert not (tmp_path / "a").exists()


def test_it_can_be_turned_off(tmp_path):
    with run_folder(tmp_path, config_of(tmp_path, compilation_cache=False)):
        assert getattr(jax.config, CACHE) is None


def test_a_folder_of_the_users_own_stays(tmp_path):
    with (
        use_compilation_cache(tmp_path / "mine"),
        run_folder(tmp_path / "run", config_of(tmp_path)),
    ):
        assert getattr(jax.config, CACHE) == str(tmp_path / "mine")
        counted(lambda x: x - 5, np.ones(18, np.float32))
    assert list((tmp_path / "mine").glob("*-cache"))
    assert not compilation_cache_of(tmp_path / "run").exists()


def test_a_setting_of_the_environment_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    with use_compilation_cache(tmp_path):
        assert jax.config.jax_persistent_cache_min_compile_time_secs == before
        assert getattr(jax.config, CACHE) == str(tmp_path)


def test_a_program_that_was_cut_off_is_compiled_again(tmp_path):
    """As when the process that wrote it was killed."""
    x = np.ones(19, np.float32)
    with use_compilation_cache(tmp_path):
        counted(cubed, x)
        (kept,) = tmp_path.glob("*-cache")
        kept.write_bytes(kept.read_bytes()[:99])
        jax.clear_caches()
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert counted(cubed, x)["perf/compilations"] == 1
