"""Weights from one layout to another, through pieces that processes publish."""

import asyncio

import jax
import numpy as np
import pytest
import ray
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.cluster.actors import Coordinator
from jaxrl_llm.models.parameters import compute_dtypes, declare, init_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout import remote
from jaxrl_llm.rollout.engine import EngineError
from jaxrl_llm.rollout.remote import assemble, own_pieces, own_shards, plan_transfer
from jaxrl_llm.sharding.layout import make_mesh

SPEC = ModelSpec(
    vocab_size=96,
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ff_width=96,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=512,
)
PARTS = [(), ("data",), ("fsdp",), ("data", "fsdp"), (("data", "fsdp"),), (None, "tensor")]


@pytest.mark.parametrize("source", PARTS, ids=str)
@pytest.mark.parametrize("target", PARTS, ids=str)
@pytest.mark.parametrize("turn", [0, 5])
def test_pieces_of_any_layout_make_boxes_of_any_other(source, target, turn):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    whole = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    sent = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*source)))
    pieces = own_pieces(sent, np.dtype(np.float32), turn)
    assert sum(values.size for _, values in pieces) == whole.size  # each number once
    expected = NamedSharding(mesh, PartitionSpec(*target)).addressable_devices_indices_map((8, 12))
    for index in expected.values():
        bounds = remote.bounds_of(index, whole.shape)
        box = assemble(pieces, bounds, np.dtype(np.float32), "w")
        np.testing.assert_array_equal(box, whole[index])


def test_copies_are_published_by_all_devices_in_turns():
    """Each of them a part: else the node of the first copies would send the whole model."""
    mesh, sent = make_mesh({"data": 4, "fsdp": 2}), dict.fromkeys(jax.devices(), 0)
    for turn in range(8):
        array = jax.device_put(np.zeros((8, 12)), NamedSharding(mesh, PartitionSpec("fsdp")))
        for shard in own_shards(array, turn):
            sent[shard.device] += shard.data.size
    assert set(sent.values()) == {8 * 12}


@pytest.mark.parametrize(
    "pieces", [[], [(((0, 2),), np.ones(2, np.float32))], [(((0, 4),), np.ones(4, np.float16))]]
)
def test_what_does_not_come_is_an_error(pieces):
    with pytest.raises(
        EngineError, match=r"weights w, \[\(0, 4\)\]: expected 4 numbers of dtype float32, got [02]"
    ):
        assemble(pieces, ((0, 4),), np.dtype(np.float32), "w")


def test_a_plan_has_every_array_in_the_engines_dtype_and_bounded_buckets(monkeypatch):
    monkeypatch.setattr(remote, "BUCKET_BYTES", 10_000)
    plan = plan_transfer(SPEC, "bfloat16")
    assert [i for bucket in plan.buckets for i in bucket] == list(range(len(plan.shapes)))
    assert plan.dtypes == jax.tree.leaves(compute_dtypes(SPEC, "bfloat16"))
    assert plan.shapes == [a.shape for a in jax.tree.leaves(declare(SPEC))]
    sizes = [np.prod(s) * d.itemsize for s, d in zip(plan.shapes, plan.dtypes, strict=True)]
    assert len(plan.buckets) > 2
    assert all(sum(sizes[i] for i in bucket[:-1]) < 10_000 for bucket in plan.buckets)


class Reference:
    """What `ray.put` and remote calls return."""

    def __init__(self, value):
        self.value = value

    def future(self):
        return self

    def result(self):
        return self.value


class Remote:
    """A coordinator in this process behind a handle's interface."""

    def __init__(self, coordinator):
        self.coordinator = coordinator

    def __getattr__(self, name):
        method = getattr(self.coordinator, name)

        class Method:
            @staticmethod
            def remote(*arguments):
                return Reference(asyncio.run(method(*arguments)))

        return Method


def test_weights_arrive_in_the_engines_layout_bit_for_bit(monkeypatch):
    monkeypatch.setattr(ray, "put", Reference)
    monkeypatch.setattr(ray, "get", lambda reference: reference.value)
    monkeypatch.setattr(remote, "BUCKET_BYTES", 10_000)
    coordinator, plan = Remote(Coordinator(1, {})), plan_transfer(SPEC, "bfloat16")
    mesh = make_mesh({"data": 2, "fsdp": 4})
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = jax.tree.map(
        lambda a: jax.device_put(a, split if a.ndim and a.shape[0] % 4 == 0 else None),
        init_params(SPEC, key=jax.random.key(0)),
    )
    held = remote.publish(coordinator, params, plan, sync=0, process=0)
    assert len(held) == len(plan.buckets)
    like = declare(SPEC)
    home = NamedSharding(mesh, PartitionSpec())
    for shardings in (None, jax.tree.map(lambda _: home, like)):
        collected, total = remote.collect(coordinator, plan, shardings, sync=0, like=like)
        kinds = compute_dtypes(SPEC, "bfloat16")
        jax.tree.map(
            lambda a, b, kind: np.testing.assert_array_equal(np.asarray(a), b.astype(kind)),
            collected,
            params,
            kinds,
        )
        assert total == sum(np.asarray(a).nbytes for a in jax.tree.leaves(collected))


def test_a_coordinator_waits_for_all_processes_and_forgets_old_syncs():
    async def run():
        coordinator = Coordinator(2, {})
        await coordinator.publish(0, 0, 1, ["b"])
        waiting = asyncio.create_task(coordinator.get_parts(0, 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await coordinator.publish(0, 0, 0, ["a"])
        assert await waiting == ["a", "b"]
        late = asyncio.create_task(coordinator.get_parts(0, 1))
        await coordinator.publish(1, 0, 0, ["c"])
        with pytest.raises(LookupError, match="sync 0 is over"):
            await late
        await coordinator.increment("engines", 1)
        await coordinator.put_display_call("line", "x")
        assert await coordinator.get_counters() == {"engines": 1}
        assert await coordinator.take_display_calls() == [("line", ("x",))]
        assert await coordinator.take_display_calls() == []

    asyncio.run(run())
