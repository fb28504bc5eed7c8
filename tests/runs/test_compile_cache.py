"""Compiled programs are kept at the user's home or in a run's folder, and found there again."""

import jax
import numpy as np
import pytest

from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import DataConfig, PolicyConfig
from jaxrl_llm.monitoring.clock import CompileCounter
from jaxrl_llm.runs import compile_cache
from jaxrl_llm.runs.compile_cache import compilation_cache_of, use_compilation_cache, user_cache
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


def test_what_a_run_compiles_is_found_by_every_later_one(tmp_path):
    x, runs = np.ones(17, np.float32), []
    for name in ("a", "a", "b"):
        jax.clear_caches()
        with run_folder(tmp_path / name, config_of(tmp_path / name)):
            runs.append(counted(cubed, x))
    counts = "perf/compilations", "perf/compilation_cache_hits"
    assert [tuple(metrics[n] for n in counts) for metrics in runs] == [(1, 0), (0, 1), (0, 1)]
    assert all(metrics["perf/compile_seconds"] > 0 for metrics in runs)
    (kept,) = user_cache().glob("*-cache")
    assert kept.name.startswith("jit_cubed-")
    assert user_cache().stat().st_mode & 0o077 == 0, "programs are run as they are"
    assert not compilation_cache_of(tmp_path / "a").exists()


@pytest.mark.parametrize("trouble", ["a file", "another user", "several processes"])
def test_where_the_users_folder_can_not_be_used_the_runs_own_is(tmp_path, monkeypatch, trouble):
    if trouble == "a file":
        user_cache().parents[1].write_text("")
    elif trouble == "another user":
        monkeypatch.setattr(compile_cache.os, "getuid", lambda: 12345)
    else:
        monkeypatch.setattr(compile_cache, "process_count", lambda: 2)
    for folder in (str(tmp_path / "own"), None):
        with use_compilation_cache(*([folder] if folder else [])):
            assert getattr(jax.config, CACHE) == folder


def test_it_can_be_turned_off_and_settings_of_the_users_own_stay(tmp_path, monkeypatch):
    with run_folder(tmp_path / "off", config_of(tmp_path, compilation_cache=False)):
        assert getattr(jax.config, CACHE) is None
    least = "jax_persistent_cache_min_compile_time_secs"
    monkeypatch.setenv(least.upper(), "1")
    before = getattr(jax.config, least)
    with use_compilation_cache():
        assert getattr(jax.config, least) == before
        assert getattr(jax.config, CACHE) == str(user_cache())
        assert jax.config.jax_compilation_cache_max_size == compile_cache.MOST_BYTES
    assert getattr(jax.config, CACHE) is None, "after a run jax is as it was"
    jax.config.update(CACHE, str(tmp_path / "mine"))
    with run_folder(tmp_path / "run", config_of(tmp_path)):
        assert getattr(jax.config, CACHE) == str(tmp_path / "mine")


def test_a_program_that_was_cut_off_is_compiled_again_and_kept():
    """As when the process that wrote it was killed."""
    x, runs = np.ones(19, np.float32), []
    for _ in range(3):
        jax.clear_caches()
        with use_compilation_cache():
            runs.append(counted(cubed, x)["perf/compilations"])
        (kept,) = user_cache().glob("*-cache")
        if len(runs) == 1:
            kept.write_bytes(kept.read_bytes()[:99])
            kept.with_name(kept.name.replace("-cache", "-atime")).unlink()
    assert runs == [1, 1, 0]
