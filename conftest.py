"""Test set-up: eight CPU devices, so that every test can build real meshes; no network."""

import contextlib
import os
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PJRT_NPROC"] = "128"  # threads for eight devices that wait for each other
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import jax
import pytest

if not os.environ.get("JAX_PLATFORMS", "").startswith("cuda"):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

collect_ignore = ["jaxrl_llm/rollout/vllm/sidecar"]  # it runs where vLLM is, and we are not

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("fixed")


NODES = """
import sys
from ray.cluster_utils import Cluster
count, cpus, port = map(int, sys.argv[1:])
head = {"num_cpus": cpus, "include_dashboard": False, "ray_client_server_port": port or None}
made = Cluster(initialize_head=True, head_node_args=head)
for _ in range(count - 1):
    made.add_node(num_cpus=cpus)
print("address", made.address, flush=True)
sys.stdin.read()
made.shutdown()
"""


@contextlib.contextmanager
def _ray_nodes(count, cpus, client_port=0):
    words = [sys.executable, "-c", NODES, str(count), str(cpus), str(client_port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdout is not None
        lines = iter(nodes.stdout.readline, "")
        yield next(line.split()[1] for line in lines if line.startswith("address "))


@pytest.fixture(scope="session")
def ray_nodes():
    """Starts a Ray cluster of so many nodes, from a process that has no threads of jax to fork.

    It listens at `client_port`, if given, for `ray://`.
    """
    return _ray_nodes
