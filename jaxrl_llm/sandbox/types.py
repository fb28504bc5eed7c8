"""What runs code of a model, what bounds it, and what comes of it."""

from typing import Literal, NamedTuple, Protocol, runtime_checkable

Level = Literal["expression", "monty", "process", "service"]
"""How code is kept from the machine.

`expression` computes arithmetic and nothing else. `monty` interprets a subset of Python that has
no access to the machine. `process` runs CPython behind limits of Linux's kernel. `service` sends
the code to a SandboxFusion server.
"""

Failure = Literal["error", "timeout", "memory", "killed", "unavailable"]
"""Why code did not come to its end.

`error`: it raised or exited with a code other than 0. `timeout`: it took too long. `memory`: it
asked for more than it may have. `killed`: it broke another limit, or its interpreter was ended.
`unavailable`: the infrastructure failed, for no fault of the code's.
"""


class CodeLimits(NamedTuple):
    """What bounds one run of code, or all runs of one session.

    Attributes:
        cpu_s: seconds of processor time of one run.
        wall_s: seconds of one run, waiting included.
        memory_mb: megabytes that it may hold.
        processes: processes and threads at once, the interpreter included.
        file_mb: megabytes of the files in its folder, and of each.
        output_bytes: of its output and of its errors, each; of more the middle is left out.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_mb: int = 256
    processes: int = 16
    file_mb: int = 16
    output_bytes: int = 65536


class CodeResult(NamedTuple):
    """What came of one run of code.

    Attributes:
        output: what it printed on its standard output, and the value of its last expression where
            the level shows it.
        errors: what it wrote to its standard error, with the traceback of what it raised.
        failure: None where it came to its end.
        reason: of the failure, one line for the model.
        seconds: that it took.
    """

    output: str
    errors: str = ""
    failure: Failure | None = None
    reason: str = ""
    seconds: float = 0.0


@runtime_checkable
class Interpreter(Protocol):
    """Runs code at one level; a context manager. Use it from one thread at a time."""

    def run(self, code: str, *, stdin: str = "") -> CodeResult:
        """Run code.

        Where the interpreter keeps its state, names of earlier runs are there. A run that fails
        for another reason than `error` may lose them, which `reason` says.

        Args:
            code: source.
            stdin: of the code.

        Returns:
            What came of it, also where it failed.
        """
        ...

    def close(self) -> None:
        """End it, with all processes and files that its code has made."""
        ...

    def __enter__(self) -> "Interpreter":
        """Return itself."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        ...
