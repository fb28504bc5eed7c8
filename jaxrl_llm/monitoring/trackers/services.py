"""What trackers of services share: their packages, and whether the service can be reached."""

import contextlib
import importlib
import netrc
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import ConfigError, described_error
from jaxrl_llm.monitoring.trackers.records import Distribution, Plain, TrackedStep, as_table

REACHED_S = 10.0
"""Seconds that a service has to answer."""


class ServiceRun:
    """A run of a service whose package has the interface of Weights & Biases.

    Args:
        client: the package.
        settings: arguments of its `init`.

    Attributes:
        name: of the service, for messages.
    """

    name: str

    def __init__(self, client: Any, settings: dict[str, Any]) -> None:
        """Begin nothing yet."""
        self._client, self._settings = client, settings
        self._run: Any = None

    def open(self) -> None:
        """Begin the run, or continue it."""
        self._run = self._client.init(**{**self._settings, **self._found_settings()})

    def write(self, record: TrackedStep, /) -> None:
        """Write a step."""
        values: dict[str, Any] = dict(record.metrics)
        for name, seen in record.histograms.items():
            values[f"histograms/{name}"] = self._histogram(seen)
        if record.answers:
            values["answers"] = self._table(*as_table(record.answers))
        self._run.log(values, step=record.step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()

    def _found_settings(self) -> dict[str, Any]:
        """Return settings that are found out when the run begins, which may take a while."""
        return {}

    def _histogram(self, seen: Distribution) -> Any:
        return self._client.Histogram(np_histogram=(seen.counts, seen.edges))

    def _table(self, columns: list[str], rows: list[list[Plain]]) -> Any:
        return self._client.Table(columns=columns, data=rows)


def import_client(tracker: str, *packages: str) -> Any:
    """Return the first of a tracker's packages.

    Raises:
        ConfigError: one of them is not installed, or broken.
    """
    modules = []
    for name in packages:
        try:
            modules.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"log.trackers: {tracker!r} needs the package {error.name or name}: "
                f"pip install 'jaxrl_llm[{tracker}]'"
            ) from error
        except Exception as error:
            raise ConfigError(
                f"log.trackers: {tracker!r} can't import {name}: {described_error(error)}"
            ) from error
    return modules[0]


def is_reachable(url: str) -> bool:
    """Tell whether a web server answers at all, by the proxy if there is one."""
    try:
        with urllib.request.urlopen(url, timeout=REACHED_S):
            return True
    except urllib.error.HTTPError as error:  # an answer
        error.close()
        return True
    except (OSError, ValueError):
        return False


def has_login(url: str) -> bool:
    """Tell whether the user's netrc has a login for a server, as `wandb login` writes it."""
    host = urllib.parse.urlsplit(url).hostname or ""
    for name in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(Path(name).expanduser())).authenticators(host):
                return True
    return False
