"""What a job asks a cluster for, and what it refuses."""

import math

import pytest
import ray

from jaxrl_llm.cluster import launch
from jaxrl_llm.cluster.actors import ProcessInfo
from jaxrl_llm.cluster.launch import (
    check_answers,
    check_same_versions,
    compute_requirements,
    max_gpus_per_node,
    ray_connection,
    wait_for_nodes,
)
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.sharding.rendezvous import find_membership

HEAD = {"Alive": True, "Resources": {"CPU": 4.0}}
NODE = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}}


def config(cluster, **rollout):
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    tree |= {"reward": {"function": "arithmetic"}, "cluster": cluster, "rollout": rollout}
    return from_tree(TrainConfig, tree)


@pytest.mark.parametrize(
    ("cluster", "rollout", "gpus", "expected", "devices"),
    [
        ({"nodes": 2}, {}, 8, [{"CPU": 1, "GPU": 8}] * 2, (8, 8)),
        ({"nodes": 1, "devices": 4}, {}, 8, [{"CPU": 1, "GPU": 4}], (4, 8)),
        (
            {"nodes": 1, "processes_per_node": 8, "cpus": 4},
            {"nodes": 2, "devices": 2},
            8,
            [{"CPU": 32, "GPU": 8}] + [{"CPU": 4, "GPU": 2}] * 2,
            (1, 2),
        ),
        ({"nodes": 2, "devices": 4}, {"nodes": 1}, 0, [{"CPU": 1}] * 3, (4, 1)),
    ],
)
def test_requirements(cluster, rollout, gpus, expected, devices):
    run = config(cluster, **rollout)
    requirements = compute_requirements(run.rollout, run.cluster, gpus)
    assert requirements.nodes == expected
    assert requirements.devices == devices


def test_nodes_that_join_late_are_waited_for(monkeypatch):
    """Else a head without GPUs, which is there first, would have the job train on its CPUs."""
    joined = iter([[HEAD], [HEAD, NODE | {"Alive": False}], [HEAD, NODE]])
    monkeypatch.setattr(ray, "nodes", lambda: next(joined))
    monkeypatch.setattr(launch, "POLL_INTERVAL_S", 0.0)
    assert max_gpus_per_node(wait_for_nodes(2, math.inf)) == 8
    monkeypatch.setattr(ray, "nodes", lambda: [HEAD])
    assert wait_for_nodes(2, until=0.0) == [HEAD]


def test_processes_take_over_what_the_libraries_read(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET", "x")
    run = config({"nodes": 1, "devices": 4, "env": {"A": 1}}, nodes=1, devices=2)
    on_cpus = compute_requirements(run.rollout, run.cluster, 0)
    variables = on_cpus.process_env(run.cluster)
    assert {"NCCL_DEBUG": "INFO", "A": "1", "JAX_NUM_CPU_DEVICES": "4"}.items() <= variables.items()
    assert "SECRET" not in variables
    engines = on_cpus.process_env(run.cluster, run.rollout)
    assert engines["JAX_NUM_CPU_DEVICES"] == "2"
    assert find_membership({"SLURM_STEP_NUM_TASKS": "4", **engines}).total == 1
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    on_gpus = compute_requirements(run.rollout, run.cluster, 8)
    assert "JAX_PLATFORMS" not in on_gpus.process_env(run.cluster, run.rollout)
    vllm = config({"nodes": 1}, nodes=1, engine="vllm")  # the sidecars have the GPUs
    assert on_gpus.process_env(vllm.cluster, vllm.rollout)["JAX_PLATFORMS"] == "cpu"


def test_nodes_with_other_versions_are_refused():
    one = ProcessInfo("a" * 56, "10.0.0.1", 1, 1, {"python": "3.11.7", "jax": "0.10.2"})
    other = one._replace(node="b" * 56, address="10.0.0.2", versions=one.versions | {"jax": "0.11"})
    check_same_versions([one, one])
    with pytest.raises(ConfigError, match=r"jax is 0.10.2 on 10.0.0.1 .* but 0.11 on 10.0.0.2"):
        check_same_versions([one, one, other])


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "ray://127.0.0.1:1", "host:port"])
def test_a_wrong_address_is_refused(address):
    with pytest.raises(ConfigError, match=f"cluster.address.*'{address}'"):
        check_answers(address)


def test_several_nodes_need_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = config({"nodes": 2})
    with (
        pytest.raises(ConfigError, match="this machine is one node"),
        ray_connection(run.cluster, 2),
    ):
        pass


@pytest.mark.parametrize("refusals", [0, 2, 3])
def test_a_client_that_ray_could_not_serve_asks_again(monkeypatch, refusals):
    """As where the server that Ray's head starts for it at a free port finds the port taken."""
    left, ended = [ConnectionAbortedError("psutil.ZombieProcess")] * refusals, []

    def init(**options):
        if left:
            raise left.pop()

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append(True))
    monkeypatch.setattr("jaxrl_llm.cluster.launch.check_answers", lambda *_: None)
    run = config({"address": "ray://head:10001"})
    connection = ray_connection(run.cluster, 1)
    if refusals < 3:
        with connection:
            assert not ended
        assert ended
    else:
        with pytest.raises(ConfigError, match=r"can't connect .*//head:10001': psutil"), connection:
            pass
    assert not left


@pytest.mark.parametrize(
    ("cluster", "rollout", "message"),
    [
        (None, {"nodes": 1}, "rollout.nodes=1 needs a cluster"),
        ({}, {"devices": 1}, "rollout.devices=1 is of engines"),
        ({"nodes": 0}, {}, "cluster.nodes: expected 1 or more, got 0"),
        ({"restarts": -1}, {}, "cluster.restarts: expected 0 or more, got -1"),
        ({"start_timeout_s": 0}, {}, "start_timeout_s: expected a number above 0, got 0"),
        ({"nodes": 4, "reward_tasks": 2}, {}, "reward_tasks: expected a multiple of the 4"),
        ({"nodes": 2}, {"engine": "vllm"}, "there are 2 training processes"),
        (
            {"nodes": 1},
            {
                "engine": "vllm",
                "nodes": 1,
                "devices": 2,
                "vllm": {"sidecars": 3},
                "max_running_sequences": 6,
            },
            "the sidecars of rollout.vllm take 3",
        ),
    ],
)
def test_keys_that_contradict_each_other(cluster, rollout, message):
    with pytest.raises(ConfigError, match=message):
        config(cluster, **rollout)
