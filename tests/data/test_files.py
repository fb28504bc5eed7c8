import fcntl
import threading

import pytest

from jaxrl_llm import files
from jaxrl_llm.data.rows import read_rows, write_rows
from jaxrl_llm.files import PARTIAL_SUFFIX, atomic_write, remove_partials
from jaxrl_llm.runs.directory import build_once


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="disk"), atomic_write(path) as file:
        file.write(b"new")
        raise OSError("disk full")
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_what_a_killed_writer_left_is_replaced_or_removed(tmp_path):
    for name in (f".a{PARTIAL_SUFFIX}", f".left{PARTIAL_SUFFIX}", ".other.partial"):
        (tmp_path / name).write_bytes(b"half of something long")
    with atomic_write(tmp_path / "a") as file:
        remove_partials(tmp_path)  # what nobody writes
        file.write(b"new")
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"new", [".other.partial", "a"])
    (tmp_path / "base").mkdir()
    (tmp_path / f".base.made_by{PARTIAL_SUFFIX}").touch()
    build_once(tmp_path / "base", {"steps": 1}, lambda: pytest.fail("made again"))
    assert names(tmp_path) == [".other.partial", "a", "base"]


def test_a_writer_that_comes_second_waits_then_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "a"
    with atomic_write(path) as file:
        with pytest.raises(TimeoutError, match="writing"), atomic_write(path):
            pass
        file.write(b"first")
    assert path.read_bytes() == b"first"


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
    threads = [threading.Thread(target=write_rows, args=(path, rows)) for rows in tables * 2]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or read_rows(path) in tables
    assert read_rows(path) in tables
    assert names(tmp_path) == ["rows.parquet"]
