"""The programs that XLA has compiled for a run, kept in its folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def compilation_cache_of(folder: Path) -> Path:
    """Return the folder of a run's compiled programs.

    >>> compilation_cache_of(Path("/runs/a"))
    PosixPath('/runs/a/cache/compilation')
    """
    return folder.resolve() / "cache" / "compilation"


@contextlib.contextmanager
def use_compilation_cache(folder: Path) -> Iterator[None]:
    """Keep what XLA compiles in a folder, where a later process with the same programs finds it.

    Small programs are kept, too: a run has dozens of them. All processes read, the first one
    writes. A folder that the user has given to jax is taken as it is, and so is each of its
    settings that the environment makes.
    """
    current: Any = jax.config
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if current.jax_compilation_cache_dir:
        settings = {}
    own = {name: value for name, value in settings.items() if name.upper() not in os.environ}
    before = {name: getattr(current, name) for name in own}
    try:
        for name, value in own.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        if own:
            compilation_cache.reset_cache()  # it stays in the folder that it was first used with
