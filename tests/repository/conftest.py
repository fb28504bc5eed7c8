"""Checks of docs, API, style, releases and benchmarks: `pytest -m repository`.

Those that are slow, or need more than `dev` installs, are in the rings of their markers alone.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        others = any(item.get_closest_marker(n) for n in ("slow", "gpu", "vllm", "gpu_compiler"))
        if HERE in item.path.parents and not others:
            item.add_marker(pytest.mark.repository)
