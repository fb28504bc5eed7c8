"""The programs that XLA has compiled, kept for later processes with the same ones."""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.sharding.distributed import process_count, process_index

MOST_BYTES = 8 * 2**30
"""Of a user's compiled programs; the least recently used ones go first."""
LOCK_TIMEOUT_S = 10  # as jax's own

log = logging.getLogger(__name__)


def compilation_cache_of(folder: Path) -> Path:
    """Return the folder of compiled programs that is a run's own.

    >>> compilation_cache_of(Path("/runs/a"))
    PosixPath('/runs/a/cache/compilation')
    """
    return folder.resolve() / "cache" / "compilation"


def user_cache() -> Path:
    """Return the folder of a user's compiled programs for this version of XLA and this processor.

    Programs for CPUs hold instructions that another processor may not have.

    >>> user_cache().parents[1].name
    'jaxrl_llm'
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = importlib.metadata.version("jaxlib")
    return home / "jaxrl_llm" / "compiled" / f"{version}-{_processor()[:12]}"


def _processor() -> str:
    """Return a digest of the processor's kind and of what it can do."""
    known = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known += sorted(
            {line for line in lines if line.startswith(("flags", "Features", "model name"))}
        )
    return hashlib.sha256("\n".join(known).encode()).hexdigest()


@contextlib.contextmanager
def use_compilation_cache(own: Path | None = None) -> Iterator[None]:
    """Keep what XLA compiles, where a later process with the same programs finds it.

    It is the user's folder, or the run's own where several processes share a run, and where nothing
    can be kept at home. Small programs are kept, too: a
    run has dozens of them. A folder that the user has given to jax is taken as it is, and so is
    each of its settings that the environment makes.

    Args:
        own: of the run; None: without a user's folder nothing is kept.
    """
    current: Any = jax.config
    settings: dict[str, Any] = {}
    if not current.jax_compilation_cache_dir:
        settings = _user_settings() if process_count() == 1 else {}
        if not settings and own is not None:
            settings = {"jax_compilation_cache_dir": str(own)}
    if settings:
        settings["jax_persistent_cache_min_compile_time_secs"] = 0.0
        settings["jax_persistent_cache_min_entry_size_bytes"] = -1
    changed = {name: value for name, value in settings.items() if name.upper() not in os.environ}
    before = {name: getattr(current, name) for name in changed}
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        with _keeping_own_programs():
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        if changed:
            compilation_cache.reset_cache()  # it stays in the folder that it was first used with


@contextlib.contextmanager
def _keeping_own_programs() -> Iterator[None]:
    """Let a process that is not the first keep what it compiles for CPUs.

    jax lets the first one write alone, for all. But what a program for CPUs is found by has the
    place of its process in it, so that nothing of the first one's is ever found by another.
    """
    if process_index() == 0 or jax.default_backend() != "cpu":
        yield
        return
    from jax._src import compiler  # the public API has no way to let another process write

    if not hasattr(compiler, "_cache_write"):
        log.info(
            "this process compiles its programs at each start: jax %s keeps none", jax.__version__
        )
        yield
        return
    jax_writes, compiler._cache_write = compiler._cache_write, _keep
    try:
        yield
    finally:
        compiler._cache_write = jax_writes


def _keep(
    key: str, seconds: float, name: str, backend: Any, program: Any, callbacks: Sequence[Any] = ()
) -> None:
    """Do as `jax._src.compiler._cache_write` does in the first process.

    Args:
        key: of the program in the cache.
        seconds: that it took to compile.
        name: of its module.
        backend: that compiled it.
        program: compiled.
        callbacks: into Python, with which it can't be kept; jax 0.12 asks before, and has no such
            argument.
    """
    from jax._src.compilation_cache import put_executable_and_time

    settings: Any = jax.config
    if callbacks or seconds < settings.jax_persistent_cache_min_compile_time_secs:
        return
    try:
        put_executable_and_time(key, name, program, backend, int(seconds))
    except Exception as error:  # as jax: it only takes time
        log.warning("the compiled program %s is not kept: %s", name, error)


def _user_settings() -> dict[str, Any]:
    """Return jax's settings for the user's folder; none where it can't be used."""
    folder = user_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid():  # programs are run as they are
            raise PermissionError(f"{folder} belongs to another user")
        with filelock.FileLock(folder / ".lockfile", LOCK_TIMEOUT_S, fallback_to_soft=False):
            _remove_incomplete(folder)
    except (OSError, NotImplementedError) as error:
        log.info("compiled programs are not kept for other runs: %s", error)
        return {}
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": MOST_BYTES,  # with it, jax locks the folder
    }


def _remove_incomplete(folder: Path) -> None:
    """Remove what a process has written that was killed meanwhile: jax would never replace it.

    The time of the last use is written after a program, both under the lock.
    """
    for program in folder.glob("*-cache"):
        if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
            program.unlink()
