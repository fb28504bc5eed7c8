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

REACHED_S = 10.0
"""Seconds that a service has to answer."""


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
