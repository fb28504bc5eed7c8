"""From the names in `log.trackers` to trackers."""

from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, described_failure, load_function
from jaxrl_llm.config.load import as_tree, without_secrets
from jaxrl_llm.config.programs import RunConfig
from jaxrl_llm.monitoring.trackers.records import TrackedRun, Tracker
from jaxrl_llm.monitoring.writer import Sink
from jaxrl_llm.sharding.distributed import run_on_first

KEY = "log.trackers"

ALWAYS_ON = {
    "console": "the terminal has a line for each step in any case",
    "file": "metrics.jsonl in run_dir has every step in any case",
}
"""Names of verl's that no run here can do without."""


def load_trackers(specs: Sequence[FunctionSpec], run: TrackedRun) -> list[Tracker]:
    """Return a run's trackers, none of which is open.

    It is called before anything is loaded, to see that it works, and when the run begins.

    Args:
        specs: tracker functions, each called with the run.
        run: to be tracked.

    Raises:
        ConfigError: a function can't be found, called or used, or a package is not installed.
    """
    return [_load(spec, run) for spec in specs]


def check_trackers(config: RunConfig) -> None:
    """See that a run's trackers can be used, in the process that will have them.

    Raises:
        ConfigError: a function can't be found, called or used, or a package is not installed.
    """
    run = TrackedRun(Path(config.run_dir), without_secrets(as_tree(config)), first_step=0)
    run_on_first(lambda: load_trackers(config.log.trackers, run) and None)


def _load(spec: FunctionSpec, run: TrackedRun) -> Tracker:
    if spec.given is None and spec.fn in ALWAYS_ON:
        raise ConfigError(f"{KEY}: remove {spec.fn!r}, {ALWAYS_ON[spec.fn]}")
    make = load_function(spec, functions.TRACKERS, passed=None, key=KEY)
    try:
        tracker = make(run)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{KEY}: {spec.fn!r}: {described_failure(error, make)}") from error
    if not isinstance(tracker, Sink):
        raise ConfigError(
            f"{KEY}: expected from {spec.fn!r} an object with name, open, write and close, got a "
            f"{type(tracker).__name__}"
        )
    return tracker
