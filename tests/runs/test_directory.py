"""Run folders: one run at a time, its config and versions, and when it may be continued."""

import contextlib
import fcntl
import inspect
import json
import logging
import subprocess
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
from jaxrl_llm.training.loop import restore_or_start


def config_of(folder, **more):
    return TrainConfig(
        run_dir=str(folder),
        model=PolicyConfig(path="m"),
        data=DataConfig(train=("t.parquet",)),
        **more,
    )


def refusal(function, *args, **more):
    """Return the message of a ConfigError, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def recorded(folder, config):
    """A run that nothing refuses."""
    with run_folder(folder, config) as record:
        record()
        yield Path(folder)


def enter(folder, config):
    with run_folder(folder, config):
        raise AssertionError("this is not reached")


def test_a_run_folder_holds_the_config_and_what_the_run_can_be_repeated_with(tmp_path):
    config = config_of(tmp_path / "a" / "b", seed=7)
    with recorded(config.run_dir, config) as folder:
        assert folder == tmp_path / "a" / "b"
        assert load(TrainConfig, folder / "config.yaml") == config
        versions = json.loads((folder / "versions.json").read_text())
    assert versions["seed"] == 7
    assert versions["jax"] == jax.__version__
    assert versions["python"] == sys.version.split()[0]
    assert versions["devices"] == ["cpu"] * 8
    assert {"git_commit", "git_changed_files", "jaxrl_llm", "optax"} <= set(versions)
    is_checkout = (Path(__file__).resolve().parents[2] / ".git").exists()
    assert (versions["git_commit"] is not None) == is_checkout
    assert not list(folder.glob("*.tmp"))


def test_a_second_process_is_refused_until_the_first_ends(tmp_path):
    program = (
        "import sys\n"
        "from jaxrl_llm.config.sections import DataConfig\n"
        "from jaxrl_llm.config.sections import PolicyConfig\n"
        "from jaxrl_llm.config.programs import TrainConfig\n"
        "from jaxrl_llm.runs.directory import run_folder\n"
        "config = TrainConfig(run_dir=sys.argv[1], model=PolicyConfig(path='m'),"
        " data=DataConfig(train=('t',)))\n"
        "with run_folder(config.run_dir, config) as record:\n"
        "    record()\n"
        "    print('holding', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    config = config_of(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout.readline() == "holding\n"
        before = (tmp_path / "config.yaml").read_text()
        message = refusal(enter, tmp_path, config)
        assert message.startswith(f"run_dir: another process is running in {str(tmp_path)!r}; wait")
        assert (tmp_path / "config.yaml").read_text() == before, "nothing was touched"
        first.kill()
    with recorded(tmp_path, config):  # a killed process holds no lock
        pass


def test_a_reader_that_looks_whether_a_run_goes_on_keeps_none_from_beginning(tmp_path, monkeypatch):
    with (tmp_path / ".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda seconds: file.close())
        with recorded(tmp_path, config_of(tmp_path)):
            assert file.closed


def test_a_job_that_is_started_again_waits_for_the_lock_of_a_lost_node(tmp_path, monkeypatch):
    """A file server may hold it for a while; the first start refuses at once."""
    again = JobContext(None, (), 1, 0, engine_devices=0, reward_tasks=0, max_retries=1)
    config, waited = config_of(tmp_path), []
    with contextlib.ExitStack() as other:
        other.enter_context(recorded(tmp_path, config))
        monkeypatch.setattr(job_context, "_contexts", [again._replace(restarts=0)])
        assert "another process is running" in refusal(enter, tmp_path, config)
        monkeypatch.setattr(job_context, "_contexts", [again])
        monkeypatch.setattr(directory, "LEASE_S", 0.0)
        assert "another process is running" in refusal(enter, tmp_path, config)
        monkeypatch.setattr(directory, "LEASE_S", 60.0)
        monkeypatch.setattr("time.sleep", lambda seconds: waited.append(other.close()))
        with recorded(tmp_path, config):
            assert len(waited) == 1


def test_a_run_folder_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    message = refusal(enter, path, config_of(path))
    assert message.startswith("run_dir: ")
    assert str(path) in message


def files(folder):
    """Return the bytes of a folder's files, by path; None for a folder."""
    return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def test_a_refused_run_leaves_no_folder(tmp_path):
    """It used to leave a folder with the refused config."""
    folder = tmp_path / "a" / "b"
    with pytest.raises(ConfigError, match="no"), run_folder(folder, config_of(folder)):
        (folder / "checkpoints").mkdir()  # as what looks for one does
        raise ConfigError("no")
    assert files(tmp_path) == {}
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("kept")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="no"), run_folder(folder, config_of(folder)):
        raise ConfigError("no")
    assert files(tmp_path) == before


def test_a_refused_run_changes_no_file_of_the_one_before(tmp_path):
    """It used to overwrite `config.yaml`."""
    with recorded(tmp_path, config_of(tmp_path, seed=1)):
        pass
    before = files(tmp_path)
    again = config_of(tmp_path, seed=2)  # before its first checkpoint a run may begin anew
    with pytest.raises(ConfigError, match="no"), run_folder(tmp_path, again):
        raise ConfigError("no")
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", ["file/run", "/proc/nowhere/run"])
def test_a_folder_that_can_not_be_made_has_a_hint(tmp_path, monkeypatch, name):
    """There was only `run_dir: [Errno 2]`."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    message = refusal(enter, name, config_of(name))
    assert message.startswith(f"run_dir: nothing can be written to {name!r}: ")
    assert message.endswith("; name a folder that can be made, as in run_dir=runs/mine")
    assert "Errno" not in message
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_run_that_fails_lets_go_of_its_folder(tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(RuntimeError, match="mine"), recorded(tmp_path, config):
        raise RuntimeError("mine")
    with recorded(tmp_path, config):
        pass


def test_keys_that_changed_since_the_run_began_are_logged(tmp_path, caplog):
    with recorded(tmp_path, config_of(tmp_path, seed=1)):
        pass
    with caplog.at_level(logging.WARNING), recorded(tmp_path, config_of(tmp_path, seed=1)):
        pass
    assert caplog.messages == []
    again = config_of(tmp_path, seed=2, optim=OptimConfig(grad_clip=None))
    with caplog.at_level(logging.WARNING), recorded(tmp_path, again):
        pass
    assert caplog.messages == [
        "config changed since this run began: seed: 1 -> 2",
        "config changed since this run began: optim.grad_clip: 1.0 -> None",
    ]
    assert read_yaml(tmp_path / "config.yaml")["seed"] == 2


def test_a_run_with_a_checkpoint_refuses_keys_that_would_mix_two_runs(tmp_path, caplog):
    with recorded(tmp_path, config_of(tmp_path, seed=1)):
        (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    with caplog.at_level(logging.WARNING), recorded(tmp_path, config_of(tmp_path, seed=1, steps=9)):
        assert caplog.messages == ["config changed since this run began: steps: None -> 9"]
    message = refusal(enter, tmp_path, config_of(tmp_path, seed=2))
    assert message.startswith("seed: 1 -> 2: the run in ")
    assert "name another run_dir" in message
    assert read_yaml(tmp_path / "config.yaml")["seed"] == 1  # what ran, not what was refused


class FakeCheckpoints:
    def __init__(self, directory, step):
        self.directory, self.step = directory, step

    def latest(self):
        return self.step


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
    assert "algorithm.group_filter: with_spread -> None" in refusal(enter, tmp_path, config)


def test_never_resuming_refuses_a_folder_with_a_checkpoint(tmp_path):
    restore = inspect.unwrap(restore_or_start)  # fakes do not pass the type hooks
    checkpoints = FakeCheckpoints(tmp_path, 5)
    message = refusal(restore, checkpoints, {}, resume="never", digests={}, extra_states={})
    assert message.startswith("checkpoint.resume=never, but ")
    assert "holds step 5: set it to auto, or name another run_dir" in message


def test_yaml_of_the_config_in_a_run_folder_is_what_print_config_prints(tmp_path):
    config = config_of(tmp_path)
    with recorded(tmp_path, config):
        assert (tmp_path / "config.yaml").read_text() == to_yaml(config)


# ------------------------------------------------------------------------------ users' functions

MINE = """
CAP = 2.0


def capped(logprobs, advantages):
    return -min(logprobs, CAP) * advantages
"""


def with_loss(folder, loss):
    return load(TrainConfig, "quickstart", {"run_dir": str(folder), "algorithm.loss": loss})


@pytest.fixture
def begun(tmp_path):
    """A run with a checkpoint, whose loss is in a file."""
    (tmp_path / "mine.py").write_text(MINE)
    config = with_loss(tmp_path / "run", f"{tmp_path}/mine.py:capped")
    with recorded(config.run_dir, config) as folder:
        (folder / "checkpoints/3").mkdir(parents=True)
    return tmp_path, config


def test_a_run_keeps_the_users_functions(begun):
    folder, _ = begun
    kept = json.loads((folder / "run/functions.json").read_text())
    assert kept["algorithm.loss"]["name"] == f"{folder}/mine.py:capped"
    assert (folder / "run/functions/algorithm.loss.py").read_text().strip() == MINE.strip()


def test_a_run_is_not_continued_with_an_edited_function(begun):
    folder, config = begun
    (folder / "mine.py").write_text(MINE.replace("-min", "min"))
    message = refusal(enter, config.run_dir, config)
    assert message.startswith(f"algorithm.loss: the source of {folder}/mine.py:capped is no longer")
    assert "was begun otherwise" in message
    (folder / "mine.py").write_text(MINE.replace("CAP = 2.0", "CAP = 2.0  # two\nMORE = 1"))
    with recorded(config.run_dir, config):
        pass


def test_before_the_first_checkpoint_a_function_may_be_edited(begun, caplog):
    folder, config = begun
    (folder / "run/checkpoints/3").rmdir()
    (folder / "mine.py").write_text(MINE.replace("-min", "min"))
    with recorded(config.run_dir, config):
        assert "the source of" in caplog.text
    assert "    return min(" in (folder / "run/functions/algorithm.loss.py").read_text()


def test_a_run_goes_on_with_the_same_function_from_elsewhere(begun):
    folder, config = begun
    (folder / "other.py").write_text(MINE)
    moved = with_loss(config.run_dir, f"{folder}/other.py:capped")
    with recorded(moved.run_dir, moved):
        pass
    (folder / "other.py").write_text(MINE.replace("2.0", "2.5"))
    assert "algorithm.loss" in refusal(enter, moved.run_dir, moved)


def test_a_run_is_not_continued_with_another_keyword(begun):
    folder, config = begun
    loss = {"fn": f"{folder}/mine.py:capped", "cap": 3}
    message = refusal(enter, config.run_dir, with_loss(config.run_dir, loss))
    assert message.startswith("algorithm.loss.cap: None -> 3")
