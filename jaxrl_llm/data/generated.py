"""What a run makes before it begins, once: prepared data files, and the base model."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import FunctionSpec, load_function
from jaxrl_llm.files import remove_partials, write_text
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity
from jaxrl_llm.sharding import distributed


def prepare_files(spec: FunctionSpec | None, files: tuple[str, ...]) -> None:
    """Run a preparation if any of the files it should write is missing; in the first process.

    Raises:
        ConfigError: it failed, or left a file unwritten.
    """
    if spec is not None:
        distributed.run_on_first(functools.partial(_prepare_files, spec, files))


def _prepare_files(spec: FunctionSpec, files: tuple[str, ...]) -> None:
    stamp = Path(files[0]).parent / ".prepared_by"
    recipe = digest(json.dumps(spec.as_config(), sort_keys=True, default=str))
    if all(Path(path).exists() for path in files):
        remove_partials(stamp.parent)
        if stamp.exists() and stamp.read_text() != recipe:
            raise ConfigError(
                f"data.prepare: the files in {str(stamp.parent)!r} were prepared with other "
                "keywords; remove that folder, or name another one"
            )
        return
    print(f"preparing data: {spec.fn}", flush=True)  # noqa: T201
    ACTIVITIES.say()
    with config_errors_at("data.prepare"), activity("preparing data"):
        load_function(spec, functions.PREPARATIONS, key="data.prepare")()
    missing = [path for path in files if not Path(path).exists()]
    if missing:
        raise ConfigError(
            f"data.prepare: {spec.fn!r} did not write {', '.join(missing)}; "
            "make its `out` the folder of these files"
        )
    write_text(stamp, recipe)


def digest(text: str) -> str:
    """Return a text's SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def build_once(directory: Path, recipe: Mapping[str, Any], make: Callable[[], None]) -> None:
    """Make a directory if it does not exist; refuse one that was made by another recipe.

    The recipe is kept beside it, in `<directory>.made_by`.

    Args:
        directory: what `make` writes.
        recipe: everything that decides the result, by keys of a config; JSON can hold it.
        make: writes the directory, whole or not at all; all processes call it.

    Raises:
        ConfigError: it was made by another recipe.
    """
    stamp = directory.with_name(directory.name + ".made_by")
    text = json.dumps(recipe, indent=1, sort_keys=True)

    def is_made() -> bool:
        if directory.exists() and stamp.exists():
            _check_made_by(directory, stamp.read_text(encoding="utf-8"), json.loads(text))
        if directory.exists():
            remove_partials(directory.parent)
        return directory.exists()

    if not distributed.run_on_first(is_made):
        make()
        distributed.run_on_first(lambda: write_text(stamp, text + "\n"))


def _check_made_by(directory: Path, kept: str, recipe: Mapping[str, Any]) -> None:
    """Refuse a directory whose kept recipe is another one, with the keys that differ."""
    try:
        before: dict[str, Any] = dict(json.loads(kept).items())
    except (ValueError, AttributeError):
        what = "by a version that did not write down how"
    else:
        names = sorted({*before, *recipe})
        changed = [n for n in names if (n in before, before.get(n)) != (n in recipe, recipe.get(n))]
        if not changed:
            return
        what = "otherwise: " + "; ".join(
            f"{name}: {before.get(name, 'its default')} -> {recipe.get(name, 'its default')}"
            for name in changed
        )
    raise ConfigError(
        f"{str(directory)!r} was made {what}. Remove that directory to make it "
        "anew, or name another one in model.path"
    )
