"""The level `process`: CPython, kept from the machine by Linux's kernel (docs/sandbox.md)."""

import functools
import logging
import os
import sys
import time

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.sandbox.jail import Layers
from jaxrl_llm.sandbox.landlock import landlock_version
from jaxrl_llm.sandbox.output import BoundedOutput
from jaxrl_llm.sandbox.seccomp import AUDIT_ARCHS
from jaxrl_llm.sandbox.session import CodeSession, SessionEnded
from jaxrl_llm.sandbox.types import CodeLimits, CodeResult

log = logging.getLogger(__name__)

STATE_LOST = "; the names of earlier runs are lost"


class ProcessInterpreter:
    """Runs code in a process of its own, behind the layers that this machine has.

    Args:
        limits: of each run.
        layers: to use.
        keep_state: whether a run finds the names that earlier runs have bound.
    """

    def __init__(self, limits: CodeLimits, layers: Layers, *, keep_state: bool) -> None:
        self._limits = limits
        self._layers = layers
        self._keep_state = keep_state
        self._session: CodeSession | None = None

    def run(self, code: str, *, stdin: str = "") -> CodeResult:
        """Run code, and show the value of its last expression as a notebook does."""
        began = time.monotonic()
        outputs = BoundedOutput(self._limits.output_bytes), BoundedOutput(self._limits.output_bytes)
        failure, reason = None, ""
        try:
            if self._session is None:
                self._session = CodeSession(self._limits, self._layers, self._keep_state)
            failure, reason = self._session.run(code, stdin, outputs)
            if not self._keep_state:
                self.close()
        except SessionEnded as error:
            self.close()
            failure, reason = error.failure, error.reason
            reason += STATE_LOST if self._keep_state else ""
        except OSError as error:  # as where a worker has too many open files
            self.close()
            failure, reason = "unavailable", f"can't run code: {error}"
        except BaseException:
            self.close()
            raise
        output, errors = (kept.text() for kept in outputs)
        return CodeResult(output, errors, failure, reason, time.monotonic() - began)

    def close(self) -> None:
        """Kill everything that the code has started, and remove its files."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> "ProcessInterpreter":
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()


@functools.cache
def find_layers() -> Layers:
    """Return what this machine has to keep code from it, by trying; once per process.

    Raises:
        ConfigError: it lacks what is always needed, which is named.
    """
    if sys.platform != "linux":
        raise ConfigError(f"sandbox process: expected Linux, got {sys.platform}")
    if os.uname().machine not in AUDIT_ARCHS:
        wanted = " or ".join(AUDIT_ARCHS)
        raise ConfigError(f"sandbox process: expected {wanted}, got {os.uname().machine}")
    version = landlock_version()
    if version == 0:
        raise ConfigError(
            "sandbox process: expected Landlock (Linux 5.13 or later with `landlock` in"
            " /sys/kernel/security/lsm, and a container that allows it), got none in Linux"
            f" {os.uname().release}"
        )
    reasons = []
    for namespaces in (True, False):
        layers = Layers(version, namespaces, own_user=os.geteuid() == 0)
        with ProcessInterpreter(CodeLimits(), layers, keep_state=False) as interpreter:
            result = interpreter.run("6 * 7")
        if result.output == "42\n" and result.failure is None:
            log.info("sandbox process: %s", describe_layers(layers, reasons))
            return layers
        reasons.append(result.reason or result.errors)
    raise ConfigError(f"sandbox process: {reasons[-1]}; with namespaces: {reasons[0]}")


def describe_layers(layers: Layers, reasons: list[str]) -> str:
    """Return what keeps code from the machine, in a line.

    >>> describe_layers(Layers(7, True, False), [])
    'Landlock 7, seccomp, namespaces'
    """
    parts = [f"Landlock {layers.landlock}", "seccomp"]
    parts += ["namespaces"] if layers.namespaces else []
    parts += ["a user of its own"] if layers.own_user else []
    why = f" (no namespaces: {reasons[0]})" if reasons else ""
    return ", ".join(parts) + why


def open_level(limits: CodeLimits, *, keep_state: bool, url: str | None) -> ProcessInterpreter:
    """Return an interpreter.

    Raises:
        ConfigError: this machine lacks what it needs.
    """
    return ProcessInterpreter(limits, find_layers(), keep_state=keep_state)
