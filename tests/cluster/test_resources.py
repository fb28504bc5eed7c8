"""What a job asks a cluster for, and what it refuses."""

import math
from unittest.mock import Mock

import pytest
import ray

from jaxrl_llm.cluster import launch
from jaxrl_llm.cluster.actors import ProcessInfo
from jaxrl_llm.cluster.launch import (
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
from tests.refusals import refuses

HEAD = {"Alive": True, "Resources": {"CPU": 4.0}}
NODE = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}}


def config(cluster, **rollout):
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    tree |= {"reward": {"function": "arithmetic"}, "cluster": cluster, "rollout": rollout}
    return from_tree(TrainConfig, tree)


def test_requirements():
    for cluster, rollout, gpus, expected, devices in (
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
    ):
        run = config(cluster, **rollout)
        requirements = compute_requirements(run.rollout, run.cluster, gpus)
        assert (requirements.nodes, requirements.devices) == (expected, devices)


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


def test_nodes_with_other_versions_and_several_nodes_without_a_cluster_are_refused(monkeypatch):
    one = ProcessInfo("a" * 56, "10.0.0.1", 1, 1, {"python": "3.11.7", "jax": "0.10.2"})
    other = one._replace(node="b" * 56, address="10.0.0.2", versions=one.versions | {"jax": "0.11"})
    check_same_versions([one, one])
    with pytest.raises(ConfigError, match="jax"):
        check_same_versions([one, one, other])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        ray_connection(config({"nodes": 2}).cluster, 2).__enter__()


@pytest.mark.parametrize("refusals", [2, 3])
def test_a_client_that_ray_could_not_serve_asks_again(monkeypatch, refusals):
    """As where the server that Ray's head starts for it at a free port finds the port taken."""
    refused, shutdown = ConnectionAbortedError("psutil.ZombieProcess"), Mock()
    init = Mock(side_effect=[refused] * refusals + [None])
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", shutdown)
    monkeypatch.setattr(launch, "check_answers", Mock())
    connection = ray_connection(config({"address": "ray://head:10001"}).cluster, 1)
    if refusals == 3:
        with pytest.raises(ConfigError, match="psutil"):
            connection.__enter__()
    else:
        with connection:
            assert not shutdown.called
        assert shutdown.called
    assert init.call_count == 3


def test_keys_that_contradict_each_other_are_refused():
    few = {"devices": 2, "vllm": {"sidecars": 3}, "max_running_sequences": 6}
    for cluster, rollout, key in (
        (None, {"nodes": 1}, "rollout.nodes"),
        ({}, {"devices": 1}, "rollout.devices"),
        ({"nodes": 0}, {}, "cluster.nodes"),
        ({"restarts": -1}, {}, "cluster.restarts"),
        ({"start_timeout_s": 0}, {}, "cluster.start_timeout_s"),
        ({"nodes": 4, "reward_tasks": 2}, {}, "cluster.reward_tasks"),
        ({"nodes": 2}, {"engine": "vllm"}, "rollout.engine"),
        ({"nodes": 1}, {"engine": "vllm", "nodes": 1, **few}, "rollout.devices"),
    ):
        with refuses(key):
            config(cluster, **rollout)
