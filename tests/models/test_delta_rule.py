"""The gated delta rule and its convolution: transformers' functions on one sequence after another.

Theirs know no packed rows; so each sequence of a row is given to them alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from jaxrl_llm.models import delta
from jaxrl_llm.models.delta import causal_conv, gated_delta_rule

KEY_HEADS, VALUE_HEADS, KEYS, VALUES = 2, 6, 8, 5
LENGTH = 150
KINDS = ("plain", "repeated", "forgetting", "edges")
NAMES = ("q", "k", "v", "log_decay", "beta", "memory")
CHANNELS = (2, 3)

rule = jax.jit(gated_delta_rule)
convolve = jax.jit(causal_conv)


def draw(kind, rows, length, rng):
    """Draw q, k, v, log_decay, beta and memory."""
    q, k = rng.normal(size=(2, rows, length, KEY_HEADS, KEYS))
    v = rng.normal(size=(rows, length, VALUE_HEADS, VALUES))
    log_decay = -rng.exponential(size=v.shape[:3])
    beta = rng.uniform(size=v.shape[:3])
    if kind == "repeated":  # an inverse by powers of the matrix is off by more than 1e9 here
        k = 1 + 1e-3 * k
        beta[:] = 0.95
        log_decay *= 1e-3
    if kind == "forgetting":
        log_decay *= 1e-2
        for much in (-50, -1e4):
            log_decay[rng.uniform(size=log_decay.shape) < 0.2] = much
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    if kind == "edges":
        beta = beta.round()
        k[:, ::3] = 0
    memory = rng.normal(size=(rows, VALUE_HEADS, KEYS, VALUES))
    return [np.float32(x) for x in (q / np.sqrt(KEYS), k, v, log_decay, beta, memory)]


def lay_out(rng, length):
    """Return the ids of a row of sequences of random lengths, with padding anywhere between."""
    row, at, number = np.zeros(length, np.int32), int(rng.integers(0, 5)), 1
    while at < length:
        end = at + int(rng.integers(1, 90))
        row[at:end] = number
        at, number = end + int(rng.integers(0, 3)), number + 1
    return row


def spans(row):
    """List the places of each sequence of a row."""
    return [np.flatnonzero(row == number) for number in np.unique(row[row != 0])]


def one_by_one(arrays, segment_ids):
    """Give each sequence to transformers; the first of a row goes on from the memory."""
    q, k, *rest, memory = arrays
    shared = VALUE_HEADS // KEY_HEADS
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q * KEYS**0.5, k))  # they scale
    reads, memories = torch.zeros(rest[0].shape), []
    for r, row in enumerate(segment_ids):
        state = memory[r : r + 1]
        for i, places in enumerate(map(torch.tensor, spans(row))):
            q_, k_, v, log_decay, beta = (x[r, places][None] for x in (q, k, *rest))
            before, options = state if i == 0 else None, {"output_final_state": True}
            read, state = torch_recurrent_gated_delta_rule(
                q_, k_, v, g=log_decay, beta=beta, initial_state=before, **options
            )
            reads = reads.index_put((torch.tensor(r), places), read[0])
        memories.append(state)
    return reads, torch.cat(memories)


def test_packed_equals_alone_with_gradients(monkeypatch):
    monkeypatch.setattr(delta, "GROUP", 2)
    rng = np.random.default_rng(0)
    kinds = [*KINDS, "repeated", "plain"]
    arrays = [
        np.concatenate(x) for x in zip(*(draw(k, 1, LENGTH, rng) for k in kinds), strict=True)
    ]
    ids = np.stack([lay_out(rng, LENGTH) for _ in kinds])
    ids[4:] = [[1], [0]]
    cotangents = [rng.normal(size=arrays[n].shape).astype(np.float32) for n in (2, 5)]
    cotangents[0][ids == 0] = 0

    @jax.jit
    def both(*arrays):
        got, pull = jax.vjp(lambda *x: gated_delta_rule(*x[:5], jnp.asarray(ids), x[5]), *arrays)
        return got, pull(tuple(map(jnp.asarray, cotangents)))

    got, back = jax.tree.map(np.array, both(*arrays))
    assert all(np.isfinite(x).all() for x in (*got, *back))
    assert (got[1][-1] == arrays[5][-1]).all()  # padding alone
    got[0][ids == 0] = 0
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]
    expected = one_by_one(leaves, ids)
    expected_back = torch.autograd.grad(expected, leaves, [torch.tensor(c) for c in cotangents])
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
    for name, ours, theirs in zip(NAMES, back, expected_back, strict=True):
        for row, kind in enumerate(kinds):
            atol = 5e-6 * max(1, theirs[row].abs().max().item())
            np.testing.assert_allclose(ours[row], theirs[row], atol=atol, err_msg=f"{name} {kind}")


@pytest.fixture(scope="module")
def packed():
    """Rows with what they give: mixed kinds, memory and tail, and a layout of sequences."""
    rng = np.random.default_rng(1)
    arrays = [np.concatenate(x) for x in zip(*(draw(k, 1, 70, rng) for k in KINDS), strict=True)]
    ids = np.zeros((4, 70), np.int32)
    ids[0], ids[1, 3:], ids[2, :50] = 1, 1, 1
    ids[3, 2:30], ids[3, 31:34], ids[3, 34:60] = 1, 2, 3
    x = rng.normal(size=(4, 70, *CHANNELS)).astype(np.float32)
    taps = rng.normal(size=(*CHANNELS, 4)).astype(np.float32)
    tail = rng.normal(size=(4, *CHANNELS, 3)).astype(np.float32)
    return arrays, (x, taps, tail), ids


@pytest.mark.parametrize("cut", [1, 64])
def test_rows_that_go_on_after_a_cut_equal_whole_rows(packed, cut):
    (*tokens, memory), (x, taps, tail), ids = packed
    whole = rule(*tokens, ids, memory), convolve(x, taps, ids, tail)
    parts = []
    for part in (slice(0, cut), slice(cut, 70)):
        read, memory = rule(*(a[:, part] for a in tokens), ids[:, part], memory)
        sums, tail = convolve(x[:, part], taps, ids[:, part], tail)
        parts.append((read, sums))
    real = ids != 0
    for (ours, end), state, pieces in zip(
        whole, (memory, tail), zip(*parts, strict=True), strict=True
    ):
        joined = np.concatenate(pieces, axis=1)
        np.testing.assert_allclose(joined[real], np.asarray(ours)[real], atol=2e-6)
        np.testing.assert_allclose(state, end, atol=2e-6)


def test_padding_alone_keeps_the_tail_and_no_other_sequence_has_a_gradient(packed):
    _, (x, taps, tail), ids = packed
    np.testing.assert_array_equal(convolve(x, taps, 0 * ids, tail)[1], tail)
    ids = np.array([[1, 1, 1, 2, 2, 0]])
    x, taps = np.ones((1, 6, 1), np.float32), np.ones((1, 4), np.float32)
    back = jax.grad(lambda x: convolve(x, taps, ids)[0][0, 3:5].sum())(x)
    assert back[0, :, 0].tolist() == [0, 0, 0, 2, 1, 0]
