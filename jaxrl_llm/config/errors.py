"""The errors that a user sees as one line, without a traceback."""

import contextlib
from collections.abc import Iterator


class ConfigError(ValueError):
    """A config that can't be run; each argument is a line that names the key and the fix."""

    def __str__(self) -> str:
        """Return the lines."""
        return "\n".join(map(str, self.args))


class RunError(RuntimeError):
    """A run that can't go on; the message says why. The base of the library's own errors."""


class Preempted(RunError):
    """A run that was told to end, and has saved where it stands: the same command continues."""


@contextlib.contextmanager
def config_errors_at(key: str) -> Iterator[None]:
    """Turn a TypeError, ValueError or OSError into a one-line ConfigError that begins with `key`.

    For what runs functions with keywords of the config, which are the likely cause.
    """
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, OSError) as error:
        text = str(error).strip() or type(error).__name__
        raise ConfigError(f"{key}: {text.splitlines()[0]}") from error
