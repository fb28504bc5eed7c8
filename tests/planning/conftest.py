"""Programs for GPUs are compiled where jax's CUDA plugin is; no GPU is needed."""

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.planning.steps import gpu_devices


@pytest.fixture(scope="module")
def compiler():
    """Skips where there is no compiler for GPUs."""
    try:
        gpu_devices("H200", 1)
    except ConfigError as error:
        pytest.skip(str(error))
