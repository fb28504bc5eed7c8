"""What the tests of code behind Linux's kernel need of a machine."""

import platform
import sys

import pytest

from jaxrl_llm.sandbox.jail import AUDIT_ARCHS, landlock_version

HAS_LANDLOCK = (
    sys.platform == "linux" and platform.machine() in AUDIT_ARCHS and landlock_version() > 0
)
needs_landlock = pytest.mark.skipif(
    not HAS_LANDLOCK, reason="the level process needs Landlock, on x86-64 or arm64"
)
