"""The errors that a user sees as one line, without a traceback."""


class ConfigError(ValueError):
    """A config that can't be run; the message is one line that names the key and the fix."""


class RunError(RuntimeError):
    """A run that can't go on; the message says why. The base of the library's own errors."""


class Preempted(RunError):
    """A run that was told to end, and has saved where it stands: the same command continues."""
