"""Files that are written whole or not at all.

A file is locked (`flock`) under the name by which it is renamed in the end, so no lock file stays
beside it; `filelock` would leave one there.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL_SUFFIX = ".jaxrl_llm_partial"
"""Of the names of files that are not written to their end."""

LOCK_TIMEOUT_S = 300.0  # for another that writes the same file
POLL_INTERVAL_S = 0.05  # between two tries to lock it


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, which appears complete or not at all.

    It is written beside its own place and renamed in the end. What a writer that was killed left
    there, the next one replaces. Two writers of one file take turns, and the last one's stays.

    Args:
        path: to create or to replace; its folder exists.

    Raises:
        TimeoutError: another process has been writing it for `LOCK_TIMEOUT_S`.
        OSError: it can't be written, or its file system knows no locks.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as file:
    ...     _ = file.write(b"all of it")
    >>> [path.name for path in folder.iterdir()]
    ['a.txt']
    """
    partial = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
    try:
        with _locked(partial) as file:
            try:
                file.truncate()  # what was left there
                yield file
                file.flush()
                partial.replace(path)
            except BaseException:
                partial.unlink()
                raise
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a full disk
            error.filename = str(path)
        raise


def remove_partials(folder: Path) -> None:
    """Remove what writers that were killed left in a folder; what is being written stays.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / f".a.txt{PARTIAL_SUFFIX}").touch()
    >>> remove_partials(folder)
    >>> [*folder.iterdir()]
    []
    """
    for partial in folder.glob(f".*{PARTIAL_SUFFIX}"):
        if (file := _try_lock(partial)) is not None:
            with file:
                partial.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file that no other process has open here; create it if there is none."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    while (file := _try_lock(path)) is None:
        if time.monotonic() > until:
            raise TimeoutError(
                f"{path}: another process has been writing it for {LOCK_TIMEOUT_S:g} s"
            )
        time.sleep(POLL_INTERVAL_S)
    with file:
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked may hold it open


def _try_lock(path: Path) -> BinaryIO | None:
    """Open and lock a file; None if another has it, or if it is no longer at this path."""

    def keep(name: str, flags: int) -> int:
        return os.open(name, flags & ~os.O_TRUNC, 0o666)  # it may be another's

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "wb", opener=keep))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return None
        except (BlockingIOError, FileNotFoundError):
            return None
        stack.pop_all()
        return file


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode())
