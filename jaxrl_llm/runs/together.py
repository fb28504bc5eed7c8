"""One run by several processes: they join with the same config, and end together."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config.errors import ConfigError, Preempted, RunError, exit_status
from jaxrl_llm.config.load import as_tree, dotted_items
from jaxrl_llm.runs.user_functions import user_functions
from jaxrl_llm.runs.versions import package_versions
from jaxrl_llm.sharding import distributed

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
    functions = {f"{key}: source": f.digest[:12] for key, f in user_functions(config).items()}
    program = {"program": type(config).__name__}
    ours = {**program, **dict(dotted_items(as_tree(config))), **functions, **package_versions()}
    everyone = distributed.all_gather(ours)
    for number, theirs in enumerate(everyone):
        if differing := _differences(theirs, everyone[0], number):
            shown = "; ".join(differing[:SHOWN])
            more = f"; {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ConfigError(f"{shown}{more}: all processes of a run need the same")
    if lines := [line for rule in rules for line in rule(config, len(everyone))]:
        raise ConfigError(*lines)


def _differences(theirs: Mapping[str, Any], first: Mapping[str, Any], number: int) -> list[str]:
    return [
        f"process {number} has {key}={theirs.get(key)}, process 0 has {first.get(key)}"
        for key in {**first, **theirs}
        if theirs.get(key) != first.get(key)
    ]


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
