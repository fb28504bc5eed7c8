"""Jobs on a Ray cluster of several nodes, each with CPU devices, all on this machine."""

import functools

import pytest

from tests.e2e.cluster.launching import Launched, Processes

QUICKLY = ("cluster.backoff_s=0.1", "cluster.start_timeout_s=180")


@pytest.fixture(scope="module")
def processes(cluster):
    """The processes of that cluster."""
    return Processes(cluster)


@pytest.fixture
def launchers(client_port):
    """Overrides for a launcher on a node of the cluster, and for one that is elsewhere."""
    return {"a node": (), "a client": (f"cluster.address=ray://127.0.0.1:{client_port}",)}


@pytest.fixture
def launch(workshop, cluster, processes):
    """Starts `train` on the cluster; ends what is left of it."""
    started = []

    def run(*overrides):
        run_dir = workshop.folder()
        words = (f"cluster.address={cluster}", *QUICKLY, *overrides)
        started.append(Launched(workshop.start(*words, run_dir=run_dir), run_dir))
        return started[-1]

    yield run
    for launched in started:
        launched.process.kill()
        launched.end()
    processes.await_end()


@pytest.fixture(scope="module")
def undisturbed(workshop, cluster):
    """Returns the run of some overrides on the cluster, made once."""

    @functools.cache
    def run(*overrides):
        run_dir = workshop.folder()
        words = (f"cluster.address={cluster}", *QUICKLY, *overrides)
        return Launched(workshop.start(*words, run_dir=run_dir), run_dir).ok()

    return run
