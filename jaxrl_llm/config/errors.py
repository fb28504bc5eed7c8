"""The errors that a user sees as one line, without a traceback."""

import contextlib
import re
import traceback
from collections.abc import Iterator

RELATIVE = "a run's paths hold in the folder in which it was begun: call this there"
"""What is said where there is no file of a relative path that a run's config has."""

KEY = re.compile(
    r"unknown key '([\w.]+)'|(--[a-z][\w-]*)|([a-z_]\w*)(?=[:=]| is (?:missing|set|not set)\b)"
    r"|([a-z_]\w*(?:\.\w+)+)"
)


class ConfigError(ValueError):
    """A config that can't be run; each argument is a line that names the key and the fix."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys with which the lines begin, for code that reacts to some.

        >>> ConfigError("steps: expected 1 or more, got 0", "unknown key 'evry'").keys
        ('steps', 'evry')
        """
        matches = [KEY.match(str(line)) for line in self.args]
        return tuple(next(filter(None, match.groups())) for match in matches if match)

    def __str__(self) -> str:
        """Return the lines."""
        return "\n".join(map(str, self.args))


class RowError(ConfigError):
    """Rows of data that can't be used; each line names one of them and what is wrong with it.

    Attributes:
        rows: the numbers of all of them, counted from 0.
    """

    def __init__(self, *lines: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(*lines)
        self.rows = rows

    @property
    def row(self) -> int:
        """Return the number of the first."""
        return self.rows[0]


class RunError(RuntimeError):
    """A run that can't go on; the message says why. The base of the library's own errors."""


class Preempted(RunError):
    """A run that was told to end, and has saved where it stands: the same command continues."""


PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"


def exit_status(error: BaseException) -> int:
    """Return the status with which a program ends that an error has ended.

    >>> exit_status(ConfigError("seed: expected a number"))
    2
    """
    statuses = {ConfigError: 2, Preempted: PREEMPTED, KeyboardInterrupt: 130}
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), 1)


@contextlib.contextmanager
def config_errors_at(key: str) -> Iterator[None]:
    """Turn a TypeError, ValueError or OSError into a one-line ConfigError that begins with `key`.

    For what runs functions with keywords of the config, which are the likely cause. The error of
    rows stays one, and all of its lines begin with `key`.
    """
    try:
        yield
    except RowError as error:
        raise RowError(*(f"{key}: {line}" for line in error.args), rows=error.rows) from error
    except ConfigError:
        raise
    except (TypeError, ValueError, OSError) as error:
        text = str(error).strip() or type(error).__name__
        raise ConfigError(f"{key}: {text.splitlines()[0]}") from error


def described_error(error: BaseException, file: str | None = None) -> str:
    """Return `file:line: Type: message` of an error in a user's code, on one line.

    Args:
        error: that was raised.
        file: of the code, whose innermost line in the traceback is named; None takes the innermost
            line of all.

    >>> described_error(SyntaxError("invalid syntax", ("mine.py", 3, 1, "def")))
    'mine.py:3: SyntaxError: invalid syntax'
    """
    if isinstance(error, SyntaxError):
        message, places = error.msg, [(error.filename, error.lineno)]
    else:
        frames = traceback.walk_tb(error.__traceback__)
        message = str(error).strip()
        places = [(f.f_code.co_filename, line) for f, line in frames]
        places = [(name, line) for name, line in places if name == file or file is None]
    text = type(error).__name__ + (f": {message.splitlines()[0]}" if message else "")
    return f"{places[-1][0]}:{places[-1][1]}: {text}" if places else text
