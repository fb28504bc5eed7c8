"""A run's folder: its lock, its config, its users' functions, and how processes join it."""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import platform
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from filelock import FileLock, Timeout

from jaxrl_llm.compilation import Task, compiler_options
from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError, Preempted, RunError, config_errors_at, exit_status
from jaxrl_llm.config.functions import FunctionSpec, load_function, split_name
from jaxrl_llm.config.load import PACKAGED, as_tree, changes, dotted_items, read_yaml, to_yaml
from jaxrl_llm.config.programs import RunConfig, SftConfig, TrainConfig
from jaxrl_llm.config.sections import Section, group_of
from jaxrl_llm.files import remove_partials, write_text
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.activity import ACTIVITIES, activity
from jaxrl_llm.runs.compile_cache import compilation_cache_of, use_compilation_cache
from jaxrl_llm.sharding import distributed
from jaxrl_llm.version import __version__

PLAIN = (bool, int, float, complex, str, bytes, type(None))
INSTALLED = ("site-packages", "dist-packages")


# The source of users' functions, by which a continued run is known to have the same ones.
#
# A function's source is its own text and that of what it uses by name of its module: functions,
# classes and plain values. Comments and line breaks do not count. Of other packages
# `versions.json` has the versions.


def user_functions(config: Any, prefix: str = "") -> dict[str, tuple[str, str]]:
    """Return the users' functions that a config names or holds, by their keys.

    Each is its name in the config, and its source; none is of an installed package.
    """
    functions: dict[str, tuple[str, str]] = {}
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if group_of(type(value)) is not None and not isinstance(value, FunctionSpec):
            functions |= user_functions(value, f"{key}.")
        items = enumerate(value) if isinstance(value, tuple) else [("", value)]
        for number, item in items:
            source = source_of(item) if isinstance(item, FunctionSpec) else None
            if source is not None:
                functions[f"{key}.{number}".rstrip(".")] = item.fn, source
    return functions


def _source_digests(config: Any) -> dict[str, str]:
    return {f"{key}: source": digest(text) for key, (_, text) in user_functions(config).items()}


def source_of(spec: FunctionSpec) -> str | None:
    """Return the source of a user's function, without importing it; None for a package's function.

    >>> source_of(FunctionSpec("grpo")) is None
    True
    >>> print(source_of(FunctionSpec.of(lambda scores: scores)).splitlines()[0])
    # no source; compiled:
    """
    if spec.given is not None:
        return _of_object(spec.given)
    where, attribute = split_name(spec.fn)
    if not where:
        return None
    path = Path(where) if where.endswith(".py") else _file_of(where)
    if path is None or not path.is_file() or not set(INSTALLED).isdisjoint(path.parts):
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # of an extension module, or in another encoding
        return f"# no source; compiled:\n# {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
    try:
        top = _top_level(ast.parse(text))
    except SyntaxError:
        return text
    return _reachable(attribute, top.get) or text  # the name may be an import or computed


def _file_of(module: str) -> Path | None:
    """Return the file of a module that is no part of this library."""
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def _of_object(function: Any) -> str:
    """Return the source of a function, class or callable object that this process has defined."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, type) and not inspect.isroutine(function):
        function = type(function)
    module = inspect.getmodule(function)
    known = {**vars(module)} if module else {}
    for method in _functions_of(function):
        known |= method.__globals__
        known |= {k: v for k, v in inspect.getclosurevars(method).nonlocals.items()}
    known[function.__name__] = function

    def text(name: str) -> str | None:
        value = known.get(name)
        if isinstance(value, PLAIN) or (
            isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value)
        ):
            return f"{name} = {value!r}" if name in known else None
        is_own = getattr(value, "__module__", None) == function.__module__
        if not is_own or not (inspect.isfunction(value) or inspect.isclass(value)):
            return None
        try:
            return _normalized(_text(value))
        except (OSError, SyntaxError, TypeError):
            return None

    return _reachable(function.__name__, text) or _compiled(function)


def _functions_of(value: Any) -> list[Any]:
    """Return a function, or the methods that a class defines."""
    values = vars(value).values() if inspect.isclass(value) else [value]
    return [v for v in values if inspect.isfunction(v)]


def _text(value: Any) -> str:
    """Return the text of a function or class.

    Raises:
        OSError, SyntaxError, TypeError: there is none.
    """
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # of a notebook's class, before Python 3.13
        cell = ast.parse("".join(inspect.findsource([*_functions_of(value), value][0])[0]))
    classes = [n for n in cell.body if isinstance(n, ast.ClassDef) and n.name == value.__name__]
    if not classes:
        raise OSError(f"no source of {value}")
    return ast.unparse(classes[-1])


def _compiled(function: Callable[..., Any]) -> str:
    """Return what there is of a function whose source is not known, as that of a lambda."""
    codes = [code] if (code := getattr(function, "__code__", None)) else []
    parts = [function.__qualname__]
    while codes:
        code = codes.pop()
        inner = [c for c in code.co_consts if inspect.iscode(c)]
        values = [c for c in code.co_consts if not inspect.iscode(c)]
        parts += [code.co_code.hex(), repr((code.co_names, values))]
        codes += inner
    return "\n".join(["# no source; compiled:", *(f"# {part}" for part in parts)]) + "\n"


def _top_level(module: ast.Module) -> Mapping[str, str]:
    """Return the functions, classes and plain values of a module, normalized, by name."""
    texts = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            texts[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = repr(ast.literal_eval(node.value))
            except ValueError:
                value = ast.unparse(node.value)
            texts[node.targets[0].id] = f"{node.targets[0].id} = {value}"
    return texts


def _normalized(text: str) -> str:
    (node,) = ast.parse(text).body
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise SyntaxError("a lambda, which stands somewhere in a line")
    return ast.unparse(node)


def _reachable(name: str, text_of: Callable[[str], str | None]) -> str:
    """Return the text of a name, and of all names that it uses; empty where it has none."""
    texts: dict[str, str] = {}
    names = [name]
    while names:
        text = text_of(one) if (one := names.pop()) not in texts else None
        if text is not None:
            texts[one] = text
            names += {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
        elif one == name:
            return ""
    others = sorted(n for n in texts if n != name)
    return "\n\n\n".join(texts[n] for n in (*others, name)) + "\n"


PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "transformers", "grain", "numpy")
"""Packages whose versions change a run's results."""


def package_versions() -> dict[str, str]:
    """Return the versions of this library, of Python and of `PACKAGES`."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"jaxrl_llm": __version__, "python": platform.python_version(), **versions}


def collect_versions(seed: int) -> dict[str, Any]:
    """Return what a run can be repeated by.

    Versions of packages, devices, git commit, seed, and the flags of XLA: those of the environment,
    and for each task those that the run adds (`compiler_options`).
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        if not (root / ".git").exists() or not shutil.which("git"):
            return None
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        **package_versions(),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changed_files": git("status", "--porcelain"),
        "devices": [d.device_kind for d in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compiler_options": {task: compiler_options(task, jax.devices()) or {} for task in Task},
        "processes": distributed.process_count(),
        "seed": seed,
    }


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


@contextlib.contextmanager
def run_folder(run_dir: str | Path, config: RunConfig) -> Iterator[Callable[[], None]]:
    """Hold a run's folder, for one run at a time, and keep compiled programs.

    A folder in which no run has begun, as where it is refused, is left as it was before.

    Yields:
        What writes config, users' functions, versions and commit into it. Called once nothing is
        left that could refuse the run; before, no file of an earlier run is changed.

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
        yield record


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder; one that was made for a run that did not begin is removed again.

    The lock is one of the operating system, which also a killed process lets go of. A file system
    without such locks is refused: filelock would else take a file's existence for a lock, and that
    of a killed process stays.
    """
    # a file server may hold the lock of a node that is lost for a while, and who looks whether a
    # run goes on (`is_held`) has it for a moment
    timeout = LEASE_S if job_context.is_restarted() else READER_S
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
                for path in ours:
                    with contextlib.suppress(OSError):
                        path.rmdir() if path.is_dir() else path.unlink()


def _check_unchanged(
    folder: Path, config: RunConfig, functions: Mapping[str, tuple[str, str]]
) -> None:
    """Refuse a config that the run in a folder was not begun with."""
    resolved = folder / "config.yaml"
    if resolved.exists():
        before = _completed(read_yaml(resolved), config)
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


def _record(folder: Path, config: RunConfig, functions: Mapping[str, tuple[str, str]]) -> None:
    """Write what a run is made with, and can be repeated by."""
    write_text(folder / "config.yaml", to_yaml(config))
    _write_functions(folder, functions)
    versions = json.dumps(collect_versions(config.seed), indent=1)
    write_text(folder / "versions.json", versions + "\n")


def _write_functions(folder: Path, functions: Mapping[str, tuple[str, str]]) -> None:
    """Keep the users' functions: names and digests in `functions.json`, sources in `functions/`."""
    if not functions and not (folder / "functions.json").exists():
        return
    (folder / "functions").mkdir(exist_ok=True)
    for key, (_, source) in functions.items():
        write_text(folder / "functions" / f"{key}.py", source)
    kept = {k: {"name": name, "sha256": digest(text)} for k, (name, text) in functions.items()}
    write_text(folder / "functions.json", json.dumps(kept, indent=1) + "\n")


def _changed_functions(
    folder: Path, functions: Mapping[str, tuple[str, str]], changed: Sequence[str]
) -> list[str]:
    """Return what changed in a run's config, with functions compared by their sources.

    One of another name is no other one if its source is the same, as where a notebook's function
    comes from a file now.
    """
    path = folder / "functions.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    both = {key for key in functions if key in before}
    same = {key for key in both if before[key]["sha256"] == digest(functions[key][1])}
    kept = [c for c in changed if c.partition(":")[0].removesuffix(".fn") not in same]
    return kept + [
        f"{key}: the source of {functions[key][0]} is no longer that in "
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
    recipe = {**_given_keys(config), **_source_digests(config)}
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


SHOWN = 3  # keys that differ


def join(config: Any, *rules: Callable[[Any, int], Iterator[str]]) -> None:
    """Join the other processes of a run, if there are any, and compare what they run.

    Each process compiles its own config: where a key differs, they train one model in two ways.

    Args:
        config: of the run.
        rules: yield a line for each key that this number of processes can't have.

    Raises:
        ConfigError: a config, a user's function or a version differs, or the processes can't
            make up a run; in all of them.
        RunError: they did not all come.
    """
    try:
        distributed.initialize()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except TimeoutError as error:
        raise RunError(str(error)) from error
    ours = {
        "program": type(config).__name__,
        **dict(dotted_items(as_tree(config))),
        **{key: text[:12] for key, text in _source_digests(config).items()},
        **package_versions(),
    }
    everyone = distributed.all_gather(ours)
    for number, theirs in enumerate(everyone):
        first = everyone[0]
        differing = [
            f"process {number} has {key}={theirs.get(key)}, process 0 has {first.get(key)}"
            for key in {**first, **theirs}
            if theirs.get(key) != first.get(key)
        ]
        if differing:
            shown = "; ".join(differing[:SHOWN])
            more = f"; {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ConfigError(f"{shown}{more}: all processes of a run need the same")
    if lines := [line for rule in rules for line in rule(config, len(everyone))]:
        raise ConfigError(*lines)


def check_same_data(key: str, sequences: Iterable[Sequence[int]]) -> None:
    """Compare the tokens of the data that each process has read.

    Raises:
        ConfigError: they differ; in all processes.
    """
    if distributed.process_count() == 1:
        return
    digest = hashlib.sha256()
    for tokens in sequences:
        digest.update(np.array([len(tokens), *tokens], np.int64).tobytes())
    everyone = distributed.all_gather(digest.hexdigest())
    for number, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ConfigError(
                f"{key}: process {number} reads other rows than process 0; give all processes the "
                "same files"
            )


def ending_together() -> contextlib.AbstractContextManager[None]:
    """End all processes of a run when this one fails, with the status that it has."""
    return distributed.abort_together((Preempted,), exit_status)


# What a run makes before it begins, once: prepared data files, and the base model.


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
