"""Run folders: one run at a time, its config and versions, and when it may be continued."""

import contextlib
import json
import sys
from pathlib import Path

import jax
import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import load, read_yaml, to_yaml
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import DataConfig, OptimConfig, PolicyConfig
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.job_context import JobContext
from jaxrl_llm.runs import directory
from jaxrl_llm.runs.directory import run_folder


def config_of(folder, **more):
    return TrainConfig(
        run_dir=str(folder),
        model=PolicyConfig(path="m"),
        data=DataConfig(train=("t.parquet",)),
        **more,
    )


def refused(folder, config, key):
    """Assert that a run is refused in a line that begins with a key."""
    with pytest.raises(ConfigError) as caught, run_folder(folder, config):
        raise AssertionError("this is not reached")
    assert "\n" not in str(caught.value) and caught.value.keys == (key,), str(caught.value)


@contextlib.contextmanager
def recorded(folder, config):
    """A run that nothing refuses."""
    with run_folder(folder, config) as record:
        record()
        yield Path(folder)


def test_a_run_folder_holds_the_config_and_what_the_run_can_be_repeated_with(tmp_path):
    config = config_of(tmp_path / "a" / "b", seed=7)
    with recorded(config.run_dir, config) as folder:
        assert folder == tmp_path / "a" / "b"
        assert load(TrainConfig, folder / "config.yaml") == config
        assert (folder / "config.yaml").read_text() == to_yaml(config), "as --print-config prints"
        versions = json.loads((folder / "versions.json").read_text())
    python = sys.version.split()[0]
    expected = {"seed": 7, "jax": jax.__version__, "python": python, "devices": ["cpu"] * 8}
    assert versions.items() >= expected.items()
    assert {"git_commit", "git_changed_files", "jaxrl_llm", "optax"} <= set(versions)
    assert not list(folder.glob("*.tmp"))


def test_a_job_that_is_started_again_waits_for_the_lock_of_a_lost_node(tmp_path, monkeypatch):
    """A file server may hold it for a while; the first start refuses at once."""
    again = JobContext(None, (), 1, 0, engine_devices=0, reward_tasks=0, max_retries=1)
    config, waited = config_of(tmp_path), []
    with contextlib.ExitStack() as other:
        other.enter_context(recorded(tmp_path, config))
        monkeypatch.setattr(job_context, "_contexts", [again._replace(restarts=0)])
        refused(tmp_path, config, "run_dir")
        monkeypatch.setattr(job_context, "_contexts", [again])
        monkeypatch.setattr(directory, "LEASE_S", 0.0)
        refused(tmp_path, config, "run_dir")
        monkeypatch.setattr(directory, "LEASE_S", 60.0)
        monkeypatch.setattr("time.sleep", lambda seconds: waited.append(other.close()))
        with recorded(tmp_path, config):
            assert len(waited) == 1


def files(folder):
    """Return the bytes of a folder's files, by path; None for a folder."""
    return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def test_a_refused_run_leaves_no_folder_and_changes_no_file(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(ConfigError, match="no"), run_folder(folder, config_of(folder)):
        (folder / "checkpoints").mkdir()  # as what looks for one does
        raise ConfigError("no")
    assert files(tmp_path) == {}
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("kept")
    for seed in (1, 2):  # before its first checkpoint a run may begin anew
        before = files(tmp_path)
        with pytest.raises(ConfigError, match="no"), run_folder(folder, config_of(folder)):
            raise ConfigError("no")
        assert files(tmp_path) == before
        with recorded(folder, config_of(folder, seed=seed)):
            pass


def test_a_folder_that_can_not_be_made_has_a_hint(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("file", "file/run", "/proc/nowhere/run"):
        refused(name, config_of(name), "run_dir")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_keys_that_changed_are_logged_and_refused_where_they_would_mix_two_runs(tmp_path, caplog):
    for more in ({}, {}, {"seed": 2, "optim": OptimConfig(grad_clip=None)}):
        assert caplog.messages == []
        with recorded(tmp_path, config_of(tmp_path, **more)):
            pass
    changes = [text.partition(": ")[2] for text in caplog.messages]
    assert changes == ["seed: 0 -> 2", "optim.grad_clip: 1.0 -> None"]
    assert read_yaml(tmp_path / "config.yaml")["seed"] == 2
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    caplog.clear()
    same = config_of(tmp_path, seed=2, optim=OptimConfig(grad_clip=None), steps=9)
    with recorded(tmp_path, same):
        assert [text.partition(": ")[2] for text in caplog.messages] == ["steps: None -> 9"]
    refused(tmp_path, config_of(tmp_path, seed=3, optim=OptimConfig(grad_clip=None)), "seed")
    assert read_yaml(tmp_path / "config.yaml")["seed"] == 2, "what ran, not what was refused"


def test_a_run_of_an_earlier_version_goes_on(tmp_path, caplog):
    config = config_of(tmp_path)
    with recorded(tmp_path, config):
        tree = read_yaml(tmp_path / "config.yaml")
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    del tree["algorithm"]["max_generation_batches"], tree["offload"], tree["critic"]["loss"]
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    with recorded(tmp_path, config):
        assert caplog.messages == []
    tree["algorithm"]["group_filter"] = "with_spread"
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    refused(tmp_path, config, "algorithm.group_filter")


MINE = """
CAP = 2.0


def capped(logprobs, advantages):
    return -min(logprobs, CAP) * advantages
"""


def with_loss(folder, loss):
    return load(TrainConfig, "quickstart", {"run_dir": str(folder), "algorithm.loss": loss})


def test_a_run_keeps_the_users_functions_and_is_not_continued_with_edited_ones(tmp_path, caplog):
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    mine.write_text(MINE)
    config = with_loss(tmp_path / "run", f"{mine}:capped")
    with recorded(config.run_dir, config) as folder:
        (folder / "checkpoints/3").mkdir(parents=True)
    kept = folder / "functions/algorithm.loss.py"
    known = json.loads((folder / "functions.json").read_text())
    assert known["algorithm.loss"]["name"] == f"{mine}:capped"
    assert kept.read_text().strip() == MINE.strip()
    mine.write_text(MINE.replace("-min", "min"))
    refused(config.run_dir, config, "algorithm.loss")
    mine.write_text(MINE.replace("CAP = 2.0", "CAP = 2.0  # two\nMORE = 1"))
    other.write_text(MINE)
    moved = with_loss(folder, f"{other}:capped")
    for same in (config, moved):
        with recorded(folder, same):
            pass
    refused(folder, with_loss(folder, {"fn": f"{other}:capped", "cap": 3}), "algorithm.loss.cap")
    other.write_text(MINE.replace("2.0", "2.5"))
    refused(folder, moved, "algorithm.loss")
    (folder / "checkpoints/3").rmdir()  # before its first checkpoint it may be edited
    mine.write_text(MINE.replace("-min", "min"))
    with recorded(folder, config):
        assert "algorithm.loss" in caplog.text
    assert "    return min(" in kept.read_text()
