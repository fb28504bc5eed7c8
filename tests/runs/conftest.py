"""What the tests of checkpoints share."""

import gc

import pytest

from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.sharding.layout import make_mesh


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"fsdp": 4, "tensor": 2})


@pytest.fixture
def opened():
    """`Checkpoints`, closed after the test."""
    made = []

    def make(*args, **options):
        made.append(Checkpoints(*args, **{"keep": None} | options))
        return made[-1]

    yield make
    for checkpoints in made:
        checkpoints._manager.close()
    gc.collect()  # what complains does it here, and not in another module's test
