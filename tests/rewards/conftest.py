"""What tests of reward functions share."""

import time

import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.sections import ScoringConfig
from jaxrl_llm.rewards.runner import RewardPool
from jaxrl_llm.workers.pool import WorkerProcess


@pytest.fixture(scope="module")
def functions_file(request, tmp_path_factory):
    """A file with the test module's own functions, its `FUNCTIONS`."""
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(request.module.FUNCTIONS)
    return path


@pytest.fixture
def make(functions_file):
    """Opens pools for a function of the file, with keywords."""
    pools = []

    def build(workers=2, name="act", calls=(8, 0), timeout_s=600.0, on_error=-1.0, **keywords):
        options = {"workers": workers, "timeout_s": timeout_s, "on_error": on_error}
        config = ScoringConfig(**options, concurrency=calls[0], retries=calls[1])
        pools.append(RewardPool(FunctionSpec(f"{functions_file}:{name}", keywords), config))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


@pytest.fixture
def impatient(monkeypatch):
    """Makes the time limit short while `strikes(pending numbers)` holds, else eleven days.

    So a machine that is slow for a second fails no call but the one that hangs.
    """

    def set_limit(strikes, seconds=0.5):
        def begin(worker, *_):
            worker.begun = time.monotonic()

        def deadline(worker):
            is_short = worker.pending and strikes(worker.pending)
            return worker.__dict__.setdefault("begun", 0.0) + (seconds if is_short else 10**6)

        monkeypatch.setattr(WorkerProcess, "restart_deadline", begin)
        monkeypatch.setattr(WorkerProcess, "deadline", property(deadline, begin), raising=False)

    return set_limit
