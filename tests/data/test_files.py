"""Files that are written whole or not at all, also by writers that are killed."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from jaxrl_llm import files
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.data.prepare import arithmetic
from jaxrl_llm.data.rows import read_rows, write_rows
from jaxrl_llm.files import PARTIAL_SUFFIX, atomic_write, remove_partials
from jaxrl_llm.runs.directory import build_once, prepare_files

SIZES = {"train_rows": 40, "validation_rows": 10, "sft_rows": 20}
NAMES = ("train.parquet", "validation.parquet", "sft.parquet")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="disk full"), atomic_write(path) as file:
        file.write(b"new")
        raise OSError("disk full")
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_what_a_killed_writer_left_is_replaced(tmp_path):
    (tmp_path / f".a{PARTIAL_SUFFIX}").write_bytes(b"half of something long")
    with atomic_write(tmp_path / "a") as file:
        file.write(b"new")
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"new", ["a"])


def test_only_what_nobody_writes_is_removed(tmp_path):
    (tmp_path / f".left{PARTIAL_SUFFIX}").touch()
    (tmp_path / ".other.partial").touch()
    with atomic_write(tmp_path / "a") as file:
        remove_partials(tmp_path)
        file.write(b"new")
    assert names(tmp_path) == [".other.partial", "a"]


def test_a_writer_that_comes_second_waits_then_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "a"
    with atomic_write(path) as file:
        with (
            pytest.raises(TimeoutError, match=r"has been writing it for 0.1 s"),
            atomic_write(path),
        ):
            pass
        file.write(b"first")
    assert (path.read_bytes(), names(tmp_path)) == (b"first", ["a"])


def test_the_file_that_another_has_just_finished_is_not_written_into(tmp_path, monkeypatch):
    """The other one ends between the opening and the locking of what it wrote to."""
    path, lock, done = tmp_path / "a", fcntl.flock, []

    def late(file, operation):
        if not done:
            done.append(True)
            with atomic_write(path) as other:
                other.write(b"theirs")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with atomic_write(path) as file:
        file.write(b"o")
        file.flush()
        assert path.read_bytes() == b"theirs"
    assert (path.read_bytes(), names(tmp_path)) == (b"o", ["a"])


def test_writers_of_one_file_take_turns(tmp_path):
    path = tmp_path / "rows.parquet"
    tables = [[{"n": i} for _ in range(50 * (i + 1))] for i in range(4)]
    threads = [threading.Thread(target=write_rows, args=(path, rows)) for rows in tables * 5]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or read_rows(path) in tables
    assert read_rows(path) in tables
    assert names(tmp_path) == ["rows.parquet"]


def test_two_preparations_at_once(tmp_path):
    seeds = [str(seed) for seed in range(3)]
    words = [sys.executable, "-m", "jaxrl_llm.data.prepare", "arithmetic", f"--out={tmp_path}/d"]
    words += [f"--{key}={value}" for key, value in SIZES.items()]
    running = [subprocess.Popen([*words, f"--seed={seed}"]) for seed in seeds]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    expected = [arithmetic(tmp_path / seed, seed=int(seed), **SIZES) for seed in seeds]
    for name in NAMES:
        of_seeds = [(tmp_path / seed / name).read_bytes() for seed in seeds]
        assert (tmp_path / "d" / name).read_bytes() in of_seeds
    assert names(tmp_path / "d") == sorted(path.name for path in expected[0])


KILLED = """
import os, signal, sys
import pyarrow.parquet
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.runs.directory import prepare_files
write, replace, left = pyarrow.parquet.write_table, os.replace, 0
def passes():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
def write_table(table, file):
    file.write(b"PAR1 half of")
    file.flush()
    passes()
    file.seek(0)
    write(table, file)
def rename(*paths):
    passes()
    replace(*paths)
    passes()
pyarrow.parquet.write_table, os.replace = write_table, rename
keywords = eval(sys.argv[2])
for moment in range(12):
    if not os.fork():
        left, out = moment, f"{sys.argv[1]}/{moment}"
        expected = (f"{out}/train.parquet", f"{out}/validation.parquet")
        prepare_files(FunctionSpec("arithmetic", {"out": out, **keywords}), expected)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/data/")
def test_a_preparation_that_is_killed_at_any_moment_is_made_good(tmp_path):
    """Three files and the stamp: while each is written, before and after it gets its name."""
    words = [sys.executable, "-c", KILLED, str(tmp_path), repr(SIZES)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["-9"] * 11 + ["0"]
    expected = arithmetic(tmp_path / "expected", **SIZES)
    for moment in range(11):
        out = tmp_path / str(moment)
        assert any(PARTIAL_SUFFIX in name for name in names(out)) == (
            moment in (0, 1, 3, 4, 6, 7, 9)
        )
        spec = FunctionSpec("arithmetic", {"out": str(out), **SIZES})
        prepare_files(spec, (f"{out}/train.parquet", f"{out}/validation.parquet"))
        all_of_them = [path.name for path in expected]
        if moment in (5, 6, 7):  # nobody asks for the third
            all_of_them.remove("sft.parquet")
        assert names(out) == sorted(
            [*all_of_them, *[".prepared_by"] * (moment in (0, 1, 2, 3, 4, 10))]
        )
        for name in all_of_them:
            assert (out / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_the_stamp_of_what_is_made_once_leaves_nothing(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / f".base.made_by{PARTIAL_SUFFIX}").touch()
    build_once(tmp_path / "base", {"steps": 1}, lambda: pytest.fail("made again"))
    assert names(tmp_path) == ["base"]
