"""What waits in the host's memory changes where arrays are, and no number."""

import jax
import pytest

from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.training.buffer import Buffer

CRITIC = (
    "algorithm.advantage=gae",
    "algorithm.kl_loss=k3",
    "algorithm.kl_coef=0.01",
    "validation.every=1",
)
ALL = ("offload={params: true, optimizer: true, reference: true}",)


@pytest.mark.slow
@pytest.mark.guards("sharding/reshard.py", "jaxrl_llm/training")
def test_an_offloaded_run_is_the_same_bit_for_bit(run, workshop, same, monkeypatch):
    """Actor, critic and reference; while the engine samples, one copy is on the device: its own."""
    held = []
    take = Buffer.take

    def watched(*args):
        arrays = [a for a in jax.live_arrays() if id(a) not in before and a.shape == table]
        kinds = [array.sharding.memory_kind for array in arrays]
        held.append((kinds.count("pinned_host"), len(kinds) - kinds.count("pinned_host")))
        return take(*args)

    expected = run(*CRITIC, "steps=3").ok()
    before = {id(array) for array in jax.live_arrays()}
    spec = read_spec(workshop.base)
    table = (spec.vocab_size, spec.hidden_size)
    monkeypatch.setattr(Buffer, "take", watched)
    actual = run(*CRITIC, *ALL, "steps=2").ok()
    actual = run(*CRITIC, *ALL, "steps=3", run_dir=actual.run_dir).ok()
    assert actual.learned == expected.learned
    same(workshop.params(actual.run_dir), workshop.params(expected.run_dir))
    assert held == [(7, 1)] * 3  # weights and two moments of actor and critic, and the reference


def test_a_reference_beside_an_adapter_can_not_be_offloaded(run):
    result = run("model.lora={rank: 2}", *CRITIC[1:], "offload.reference=true")
    assert result.status == 2
    assert "offload.reference is set, but beside an adapter" in result.err
