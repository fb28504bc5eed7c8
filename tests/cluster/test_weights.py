"""Weights from one layout to another, through pieces that processes publish."""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import ray
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.cluster.actors import Coordinator
from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.rollout import remote
from jaxrl_llm.rollout.engine import EngineError
from jaxrl_llm.rollout.remote import assemble, own_pieces, own_shards, plan_transfer
from jaxrl_llm.sharding.layout import make_mesh
from tests.cluster.test_context import Handle
from tests.specs import DENSE, draw

PARTS = [(), ("data",), ("fsdp",), ("data", "fsdp"), (("data", "fsdp"),), (None, "tensor")]
FLOAT = np.dtype(np.float32)


def test_pieces_of_any_layout_make_boxes_of_any_other():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    whole = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    for source, turn in itertools.product(PARTS, (0, 5)):
        sent = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*source)))
        pieces = own_pieces(sent, FLOAT, turn)
        assert sum(values.size for _, values in pieces) == whole.size  # each number once
        for target in PARTS:
            split = NamedSharding(mesh, PartitionSpec(*target))
            for index in split.addressable_devices_indices_map((8, 12)).values():
                box = assemble(pieces, remote.bounds_of(index, whole.shape), FLOAT, "w")
                np.testing.assert_array_equal(box, whole[index], err_msg=f"{source} {target}")


def test_copies_are_published_by_all_devices_in_turns():
    """Each of them a part: else the node of the first copies would send the whole model."""
    mesh, sent = make_mesh({"data": 4, "fsdp": 2}), dict.fromkeys(jax.devices(), 0)
    array = jax.device_put(np.zeros((8, 12)), NamedSharding(mesh, PartitionSpec("fsdp")))
    for turn in range(8):
        for shard in own_shards(array, turn):
            sent[shard.device] += shard.data.size
    assert set(sent.values()) == {8 * 12}


def test_what_does_not_come_is_an_error():
    for pieces in ([], [(((0, 2),), np.ones(2, FLOAT))], [(((0, 4),), np.ones(4, np.float16))]):
        with pytest.raises(EngineError, match="w"):
            assemble(pieces, ((0, 4),), FLOAT, "w")


def test_a_plan_has_every_array_in_the_engines_dtype_and_bounded_buckets(monkeypatch):
    monkeypatch.setattr(remote, "BUCKET_BYTES", 1_000)
    plan = plan_transfer(DENSE, "bfloat16")
    assert [i for bucket in plan.buckets for i in bucket] == list(range(len(plan.shapes)))
    assert plan.dtypes == jax.tree.leaves(compute_dtypes(DENSE, "bfloat16"))
    assert plan.shapes == [a.shape for a in jax.tree.leaves(declare(DENSE))]
    sizes = [np.prod(s) * d.itemsize for s, d in zip(plan.shapes, plan.dtypes, strict=True)]
    assert len(plan.buckets) > 2
    assert all(sum(sizes[i] for i in bucket[:-1]) < 1_000 for bucket in plan.buckets)


class Reference(SimpleNamespace):
    """What `ray.put` and remote calls return."""

    def future(self):
        return SimpleNamespace(result=lambda: self.value)


def test_weights_arrive_in_the_engines_layout_bit_for_bit(monkeypatch):
    monkeypatch.setattr(remote, "BUCKET_BYTES", 1_000)
    monkeypatch.setattr(ray, "put", lambda value: Reference(value=value))
    monkeypatch.setattr(ray, "get", lambda reference: reference.value)
    coordinator = Handle(Coordinator(1, {}), lambda value: Reference(value=value))
    plan, mesh = plan_transfer(DENSE, "bfloat16"), make_mesh({"data": 2, "fsdp": 4})
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = jax.tree.map(
        lambda a: jax.device_put(a, split if a.ndim and a.shape[0] % 4 == 0 else None), draw(DENSE)
    )
    held = remote.publish(coordinator, params, plan, sync=0, process=0)
    assert len(held) == len(plan.buckets)
    like, home = declare(DENSE), NamedSharding(mesh, PartitionSpec())
    kinds = compute_dtypes(DENSE, "bfloat16")
    for shardings in (None, jax.tree.map(lambda _: home, like)):
        collected, total = remote.collect(coordinator, plan, shardings, sync=0, like=like)
        jax.tree.map(
            lambda a, b, kind: np.testing.assert_array_equal(
                np.asarray(a), np.asarray(b).astype(kind)
            ),
            *(collected, params, kinds),
        )
        assert total == sum(np.asarray(a).nbytes for a in jax.tree.leaves(collected))
