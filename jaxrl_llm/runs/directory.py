"""A run's folder: its lock, its config, and the keys that may change when it is continued."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.keys import Section, with_new_names
from jaxrl_llm.config.load import PACKAGED, as_tree, changes, read_yaml, to_yaml
from jaxrl_llm.config.programs import RunConfig, SftConfig, TrainConfig
from jaxrl_llm.data.files import write_text
from jaxrl_llm.runs.compile_cache import compilation_cache_of, use_compilation_cache
from jaxrl_llm.runs.user_functions import UserFunction, user_functions
from jaxrl_llm.runs.versions import collect_versions
from jaxrl_llm.sharding import distributed

log = logging.getLogger(__name__)

LEASE_S = 180.0  # until a file server has missed a client that is gone
READER_S = 0.5  # more than a reader of the folder holds its lock

CHANGEABLE = (
    "run_dir",
    "steps",
    "stall_timeout_s",
    "epochs",
    "log",
    "checkpoint",
    "cluster",
    "compilation_cache",
    "validation",
    "mesh",
    "offload",
    "export_to",
    "algorithm.max_generation_batches",
    "model.attention",
    "batch.max_tokens_per_device",
    "critic.optim.max_skipped",
    "data.prepare",
    "data.validation",
    "model.remat",
    "model.logprob_chunk",
    "model.warm_start",
    "optim.max_skipped",
    "reward.workers",
    "reward.timeout_s",
    "reward.concurrency",
    "reward.retries",
    "reward.max_error_share",
    "reward.memory_gb",
    "reward.max_processes",
    "reward.pass_env",
    "implicit_reward_model.optim.max_skipped",
    "rollout.kv_cache_gb",
    "rollout.devices",
    "rollout.nodes",
    "rollout.dump_every",
    "rollout.max_running_sequences",
)
"""Keys that may change when a run is continued: they move what is written, or only rounding."""

DECIDING = ("steps", "epochs", "data.prepare")
"""Those among them that decide the weights at the end nevertheless."""


class RunFolder(NamedTuple):
    """A run's folder, while it is held.

    Attributes:
        path: of the folder.
        record: writes config, users' functions, versions and commit into it. Called once nothing is
            left that could refuse the run; before, no file of an earlier run is changed.
    """

    path: Path
    record: Callable[[], None]


@contextlib.contextmanager
def run_folder(run_dir: str | Path, config: RunConfig) -> Iterator[RunFolder]:
    """Hold a run's folder, for one run at a time, and keep compiled programs.

    A folder in which no run has begun, as where it is refused, is left as it was before.

    Raises:
        ConfigError: another run is there, the one there was begun otherwise, or nothing can be
            written there.
    """
    folder, functions = Path(run_dir), user_functions(config)

    def record() -> None:
        distributed.run_on_first(lambda: _record(folder, config, functions))

    with contextlib.ExitStack() as stack:
        distributed.run_on_first(lambda: stack.enter_context(_locked(folder)))
        distributed.run_on_first(lambda: _check_unchanged(folder, config, functions))
        if config.compilation_cache:
            stack.enter_context(use_compilation_cache(compilation_cache_of(folder)))
        yield RunFolder(folder, record)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder; one that was made for a run that did not begin is removed again.

    The lock is one of the operating system, which also a killed process lets go of. A file system
    without such locks is refused: filelock would else take a file's existence for a lock, and that
    of a killed process stays.
    """
    # a file server may hold the lock of a node that is lost for a while, and who looks whether a
    # run goes on (`is_held`) has it for a moment
    timeout = LEASE_S if context.is_restarted() else READER_S
    lock = FileLock(folder / ".lock", timeout, poll_interval=0.1, fallback_to_soft=False)
    ours = [folder / ".lock", folder / "checkpoints", folder, *folder.parents]
    ours = [path for path in ours if not path.exists()]
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock)
        except Timeout as error:
            raise ConfigError(
                f"run_dir: another process is running in {str(folder)!r}; wait until it has ended"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"run_dir: nothing can be written to {str(folder)!r}: {error.strerror or error}; "
                "name a folder that can be made, as in run_dir=runs/mine"
            ) from error
        try:
            yield
        finally:
            if not (folder / "config.yaml").exists():
                _remove_empty(ours)


def _remove_empty(paths: Iterable[Path]) -> None:
    """Remove the lock and folders as long as they are empty."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def _check_unchanged(
    folder: Path,
    config: RunConfig,
    functions: Mapping[str, UserFunction],
) -> None:
    """Refuse a config that the run in a folder was not begun with."""
    resolved = folder / "config.yaml"
    if resolved.exists():
        before = _completed(with_new_names(read_yaml(resolved)), config)
        changed = changes(before, as_tree(config))
        check_changed_keys(folder, _changed_functions(folder, functions, changed))


def _completed(tree: Mapping[str, Any], section: Any) -> dict[str, Any]:
    """Return the keys that a run was begun with, and the defaults of those there were none of."""
    complete = dict(tree)
    for name, field in type(section).__pydantic_fields__.items():
        value = getattr(section, name)
        if isinstance(value, Section) and isinstance(complete.get(name), dict):
            complete[name] = _completed(complete[name], value)
        elif name not in complete and not field.is_required():
            complete[name] = as_tree(field.get_default(call_default_factory=True))
    return complete


def _record(
    folder: Path,
    config: RunConfig,
    functions: Mapping[str, UserFunction],
) -> None:
    """Write what a run is made with, and can be repeated by."""
    write_text(folder / "config.yaml", to_yaml(config))
    _write_functions(folder, functions)
    versions = json.dumps(collect_versions(config.seed), indent=1)
    write_text(folder / "versions.json", versions + "\n")


def _write_functions(folder: Path, functions: Mapping[str, UserFunction]) -> None:
    """Keep the users' functions: names and digests in `functions.json`, sources in `functions/`."""
    if not functions and not (folder / "functions.json").exists():
        return
    (folder / "functions").mkdir(exist_ok=True)
    for key, function in functions.items():
        write_text(folder / "functions" / f"{key}.py", function.source)
    kept = {k: {"name": f.name, "sha256": f.digest} for k, f in functions.items()}
    write_text(folder / "functions.json", json.dumps(kept, indent=1) + "\n")


def _changed_functions(
    folder: Path, functions: Mapping[str, UserFunction], changed: Sequence[str]
) -> list[str]:
    """Return what changed in a run's config, with functions compared by their sources.

    One of another name is no other one if its source is the same, as where a notebook's function
    comes from a file now.
    """
    path = folder / "functions.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    both = {key for key in functions if key in before}
    same = {key for key in both if before[key]["sha256"] == functions[key].digest}
    kept = [c for c in changed if c.partition(":")[0].removesuffix(".fn") not in same]
    return kept + [
        f"{key}: the source of {functions[key].name} is no longer that in "
        f"{folder / 'functions' / key}.py"
        for key in sorted(both - same)
    ]


def check_changed_keys(folder: Path, changed: Sequence[str]) -> None:
    """Log what changed in a run's config; refuse what would mix two runs into one.

    Before the first checkpoint there is nothing to mix, and a run starts anew.
    """
    for line in changed:
        name = line.partition(":")[0]
        if not _is_of(name, CHANGEABLE) and any((folder / "checkpoints").glob("[0-9]*")):
            raise ConfigError(
                f"{line}: the run in {str(folder)!r} was begun otherwise and can't be continued "
                "with it; put it back, or name another run_dir"
            )
        log.warning("config changed since this run began: %s", line)


def _is_of(name: str, keys: Iterable[str]) -> bool:
    """Tell whether a key is one of `keys`, or in a group that is."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def recipe_of(config: TrainConfig | SftConfig) -> dict[str, Any]:
    """Return what decides a run's weights: its keys that have no default value, and own functions.

    A key that the library gains, or what only moves what is written, changes nothing in it.

    Returns:
        Values by keys' whole names, as JSON has them; digests of users' sources by `KEY: source`.
    """
    functions = {f"{key}: source": f.digest for key, f in user_functions(config).items()}
    recipe = {**_given_keys(config), **functions}
    model, packaged = Path(config.model.path).resolve(), PACKAGED.resolve()
    if model.is_relative_to(packaged):  # wherever the package lies, and however it is named
        recipe["model.path"] = f"configs/{model.relative_to(packaged).as_posix()}"
    free = set(CHANGEABLE) - set(DECIDING)
    return {name: value for name, value in recipe.items() if not _is_of(name.split(":")[0], free)}


def _given_keys(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the keys of a section whose values are not the defaults; `{}` for a group as such."""
    given: dict[str, Any] = {}
    for name, field in type(section).__pydantic_fields__.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        default = field.get_default(call_default_factory=True)
        if isinstance(value, Section):
            given |= ({key: {}} if default is None else {}) | _given_keys(value, f"{key}.")
        elif value != default:
            given[key] = as_tree(value)
    return given
