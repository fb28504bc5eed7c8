"""Loss, gradient, update and log-probs are the same on every mesh.

The reference runs the model over one sequence per row on one device, without a layout, packing or
chunks of the vocabulary, and writes the loss out.
"""

import dataclasses
import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.sharding.layout import BATCH, Layout, batch_shards, make_mesh, shardings
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass, pack_microbatches, token_fields
from jaxrl_llm.training.update import PolicyObjective
from jaxrl_llm.types import Batch
from tests.decoders import forward, forward_with_router, logits
from tests.guarded import MODEL, UPDATE
from tests.specs import MOE, SPECS, draw, make_batch
from tests.updates import chosen, learn, place, plain, updated

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

WIDE = {
    name: dataclasses.replace(SPECS[name], layers=4, heads=8, tied_embeddings=True, **more)
    for name, more in {
        **{"dense": {}, "moe": {}},
        "gpt-oss": {"windowed_layers": (True, False) * 2},
    }.items()
}
"""Which eight devices can share."""

WIDE["delta"] = dataclasses.replace(
    WIDE["moe"],
    moe=dataclasses.replace(MOE.moe, shared_ff_width=16, shared_gate=True),
    gated_attention=True,
    delta=DeltaSpec(key_heads=8, value_heads=16, key_width=4, value_width=3),
    delta_layers=(True, False) * 2,
)
DENSE = WIDE["dense"]
PACKED = (16, 5, 5, 5, 16, 5, 5, 5, 7, 3, 6, 2)
PADDED = (9, 16, 11, 10, 9, 12, 15, 9, 13, 9, 14, 10)  # no two fit into a row
LENGTH = 16
BALANCE = 0.1
RATE, LARGEST = 0.5, 0.7


@functools.partial(jax.jit, static_argnums=1)
def by_hand(params, spec, tokens, sizes, mask, advantages):
    """The loss of all sequences, one in each row, and its gradient; their log-probs [B T]."""
    real = np.arange(LENGTH) < sizes[:, None]
    positions = jnp.broadcast_to(jnp.arange(LENGTH), real.shape)

    def loss(params):
        rows = tokens, positions, real.astype(jnp.int32)
        hidden, router = forward_with_router(params, spec, *rows)
        policy = jnp.roll(jax.nn.log_softmax(logits(params, spec, hidden)), 1, axis=1)
        logprobs = chosen(policy, tokens)
        total = jnp.sum(jnp.where(mask, plain(logprobs, advantages), 0)) / mask.sum()
        if router:
            count = spec.layers * sizes.sum()
            often = jax.lax.stop_gradient(router["choices"]).sum(0) / count
            likely = router["probabilities"].sum(0) / count
            total += BALANCE * spec.moe.experts * jnp.sum(often * likely)
        return total, logprobs

    return jax.value_and_grad(loss, has_aux=True)(params)


CONTEXTS = {"context by heads", "context by keys", "context by ring"}
CASES = [
    ("moe", {"stage": 2, "context by heads": 2, "expert": 2}),
    ("dense", {"data": 2, "fsdp": 2, "tensor": 2}),
    # the most devices that an axis can have
    *(("dense", {axis: 8}) for axis in ("data", "tensor", "context by heads", "context by ring")),
    *(("moe", {axis: 8}) for axis in ("fsdp", "context by keys", "expert")),
    ("dense", {"stage": 4, "data": 2}),
    # sinks by heads, biases of experts by experts and by their width
    ("gpt-oss", {"tensor": 2, "expert": 2, "fsdp": 2}),
    ("gpt-oss", {"tensor": 2, "context by heads": 2, "data": 2}),
    ("gpt-oss", {"stage": 2, "context by keys": 2, "expert": 2}),
    ("gpt-oss", {"data": 2, "context by ring": 2, "tensor": 2}),
    ("delta", {"context by heads": 4, "tensor": 2}),
    ("delta", {"context by keys": 2, "fsdp": 2, "expert": 2}),
    ("delta", {"stage": 2, "tensor": 2, "data": 2}),
]
TRIPLES = {  # any two axes, and any axis and model, meet in one of these or in the first case
    "moe": [
        ("data", "fsdp", "tensor"),
        ("data", "context by ring", "expert"),
        ("fsdp", "context by keys", "expert"),
        ("tensor", "stage", "context by keys"),
        ("tensor", "context by ring", "expert"),
        ("data", "fsdp", "context by heads"),
    ],
    "dense": [
        ("data", "stage", "context by keys"),
        ("fsdp", "tensor", "context by heads"),
        ("fsdp", "stage", "context by ring"),
    ],
}
CASES += [(name, dict.fromkeys(axes, 2)) for name, triples in TRIPLES.items() for axes in triples]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            *case,
            marks=() if number < 2 else pytest.mark.slow,
            id=" ".join([case[0], *(f"{axis}={n}" for axis, n in case[1].items())]),
        )
        for number, case in enumerate(CASES)
    ],
)
def test_the_mesh_changes_nothing(name, sizes):
    """Loss, gradient, clipped update and log-probs of packed and of padded rows."""
    spec, params = WIDE[name], draw(WIDE[name], scale=0.3)
    mesh = make_mesh({axis.partition(" ")[0]: size for axis, size in sizes.items()})
    placed, ranks = place(params, spec, mesh), batch_shards(mesh)
    shape = row_shape(2 * LENGTH * ranks, LENGTH, sequences=12, multiple_of=ranks)
    learner = learn(
        spec,
        placed,
        PolicyObjective(loss=plain),
        shape,
        mesh=mesh,
        optimizer=optax.chain(
            optax.trace(decay=0.0), optax.clip_by_global_norm(LARGEST), optax.sgd(RATE, 0.9)
        ),
        context=next((a.split()[-1] for a in sizes if a in CONTEXTS), "heads"),
        router_loss_coef=BALANCE if spec.moe else 0.0,
        logprob_chunk=24,
        remat="dots" if spec.delta else "none",
    )
    infer = logprob_pass(learner.model, shape, mesh)
    for lengths in (PACKED, PADDED):
        batch = make_batch(lengths, LENGTH)
        batch = batch.add(advantages=3 * batch["advantages"])
        arrays = batch.tokens, batch.sequence_lengths, batch["mask"], batch["advantages"]
        (loss, logprobs), gradient = jax.device_get(by_hand(params, spec, *arrays))
        kept, metrics, after = updated(learner, placed, batch)
        scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
        assert norm > LARGEST, "else nothing is clipped"
        step = RATE * LARGEST / norm
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
        # rounding alone is 1e-4 of the scale, by processor and compiler; a lost token is 1e-2
        close = partial(chex.assert_trees_all_close, rtol=1e-3, atol=2e-4 * scale)
        close(kept, gradient)
        close(after, jax.tree.map(lambda p, g, by=step: np.asarray(p) - by * g, params, gradient))
        inferred = infer(placed, batch)["logprobs"]
        np.testing.assert_allclose(inferred, np.where(batch["mask"], logprobs, 0.0), atol=1e-4)


def test_no_token_is_dropped_when_all_choose_the_same_experts():
    """The exchange has room for a balanced load and a quarter; the rest goes in more rounds."""
    spec, favoured = MOE.moe, (0, 1)
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(16, 16, 16)), jnp.float32).at[..., 0].set(1.0)
    weights = {
        "router": jnp.zeros((16, 8)).at[0, jnp.array(favoured)].set(jnp.array([9.0, 8.0])),
        "expert_gate": jnp.asarray(rng.normal(size=(8, 16, 16)), jnp.float32),
        "expert_up": jnp.asarray(rng.normal(size=(8, 16, 16)), jnp.float32),
        "expert_down": jnp.asarray(rng.normal(size=(8, 16, 16)), jnp.float32),
    }
    real = jnp.ones((16, 16), bool)

    def loss(weights, x, layout=None):
        out, stats, _ = mixture(weights, spec, x, real, layout=layout)
        return (out**2).sum(), (out, stats.choices)

    mesh = make_mesh({"expert": 4, "tensor": 2})
    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    alone = jax.jit(run)(weights, x)
    assert alone[0][1][1].tolist() == [256.0 * (e in favoured) for e in range(8)]
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P(BATCH)))
    together = jax.jit(partial(run, layout=Layout(mesh)))(weights, split)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * float(np.abs(b).max()))


def test_what_devices_can_not_share_is_refused_with_the_divisors():
    few_keys = dataclasses.replace(WIDE["delta"].delta, key_heads=2)
    unequal, six = (True, True, False, False), dataclasses.replace(MOE.moe, experts=6)
    for name, changes, sizes, divisors in (
        ("dense", {"heads": 6}, {"context": 4, "data": 2}, "divisor of 6"),
        ("dense", {"layers": 6}, {"stage": 4, "data": 2}, r"\[1, 2, 3, 6\]"),
        ("dense", {"moe": six}, {"expert": 4, "data": 2}, r"\[1, 2, 3, 6\]"),
        ("delta", {"delta": few_keys}, {"context": 4, "data": 2}, "divisor of 2"),
        ("delta", {"delta_layers": unequal}, {"stage": 2, "data": 4}, r"\[1\]"),
    ):
        spec, layout = dataclasses.replace(WIDE[name], **changes), Layout(make_mesh(sizes))
        params = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), declare(spec))
        row = jax.ShapeDtypeStruct((8, 16), jnp.int32)

        def run(params, row, spec=spec, layout=layout):
            piece = layout.split_context(row)
            return forward(params, spec, piece, piece, piece, layout=layout)

        with pytest.raises(ValueError, match=divisors):
            jax.eval_shape(run, params, row)


def like(spec, mesh):
    """Return what stands for parameters on a mesh."""
    declared = declare(spec)
    placed = shardings(declared, mesh)
    return jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s), declared, placed
    )


def bytes_on_a_device(tree, layout):
    def one(leaf, split):
        return np.prod(split.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, tree, layout)))


def test_fsdp_divides_the_optimizer_s_state():
    """Norms are whole on every device; all else of Adam's moments is an eighth."""

    def held(sizes, devices):
        mesh = make_mesh(sizes, jax.devices()[:devices])
        params, shape = like(DENSE, mesh), row_shape(128, 16, sequences=8, multiple_of=8)
        adam, objective = optax.adamw(1e-3), PolicyObjective(loss=plain)
        learner = learn(DENSE, params, objective, shape, mesh=mesh, optimizer=adam)
        state = jax.eval_shape(learner.init, params)
        return bytes_on_a_device(state.opt_state, learner.state_shardings.opt_state)

    norms = sum(
        4 * np.prod(d.shape) for d in jax.tree.leaves(declare(DENSE)) if "embed" not in d.axes
    )
    one, eight, replicated = held({}, 1), held({"fsdp": 8}, 8), held({"data": 8}, 8)
    count = 4
    assert one == replicated
    assert eight == (one - 2 * norms - count) / 8 + 2 * norms + count
    assert eight < one / 6


def test_no_device_ever_holds_all_layers():
    """The backward pass gathers weights again, whatever else of a layer is stored."""
    wide = dataclasses.replace(WIDE["moe"], hidden_size=256, ff_width=512, layers=8)
    spec = dataclasses.replace(wide, moe=dataclasses.replace(wide.moe, ff_width=64))
    mesh = make_mesh({"fsdp": 8})
    layout = Layout(mesh)
    params = like(spec, mesh)
    row = jax.ShapeDtypeStruct((8, 8), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P(BATCH)))

    def total(params, *rows):
        return forward(params, spec, *rows, layout=layout, remat="none").sum()

    step = jax.jit(jax.grad(total), out_shardings=layout.of(declare(spec)))
    needed = step.lower(params, row, row, row).compile().memory_analysis().temp_size_in_bytes
    assert needed < sum(4 * leaf.size for leaf in jax.tree.leaves(params)) / 2


def test_gradients_in_bfloat16_are_summed_over_devices_in_float32():
    """Sums of bfloat16 parts would differ in the third digit."""
    spec, params = DENSE, draw(DENSE, scale=0.3)
    rng = np.random.default_rng(3)
    rows = rng.integers(1, 32, (8, 16)), np.tile(np.arange(16), (8, 1)), np.ones((8, 16), int)

    def gradient(mesh):
        layout = Layout(mesh)

        def loss(params):
            pieces = (jnp.asarray(x, jnp.int32) for x in rows)
            hidden = forward(params, spec, *pieces, dtype=jnp.bfloat16, layout=layout)
            return (hidden.astype(jnp.float32) * jnp.arange(16.0)).sum()

        held = jax.device_put(params, layout.of(declare(spec)))
        # or XLA leaves out roundings, not the same ones for one row as for eight
        exact = {"xla_allow_excess_precision": False}
        return jax.device_get(jax.jit(jax.grad(loss), compiler_options=exact)(held))

    one, eight = gradient(make_mesh({}, jax.devices()[:1])), gradient(make_mesh({"fsdp": 8}))
    for name in ("query", "output", "gate", "down"):
        alone, together = one["layers"][name], eight["layers"][name]
        assert np.abs(together - alone).max() < 1e-5 * np.abs(alone).max(), name


def test_context_divides_the_memory_of_activations():
    """Temporary bytes of a long row's gradient, per device, as the compiler reports them."""

    def memory(sizes, devices):
        mesh = make_mesh(sizes, jax.devices()[:devices])
        layout = Layout(mesh, "keys")
        row = jax.ShapeDtypeStruct(
            (1, 1024), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P(BATCH))
        )
        params = like(DENSE, mesh)

        def total(params, *rows):
            pieces = map(layout.split_context, rows)
            return forward(params, DENSE, *pieces, layout=layout, remat="full").sum()

        lowered = jax.jit(jax.grad(total)).lower(params, row, row, row)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert memory({"context": 8}, 8) < memory({}, 1) / 4


def test_logits_stay_split_over_the_vocabulary():
    """With a head split over `tensor`, no device ever holds the logits of all words."""
    spec = dataclasses.replace(DENSE, vocab_size=96, tied_embeddings=False)
    mesh = make_mesh({"tensor": 8})
    model = ForwardConfig(model=Decoder(spec), logprob_chunk=64)
    params = like(spec, mesh)
    batch = Batch(np.zeros((8, 16), np.int32), np.full(8, 16, np.int32), {})
    shape = row_shape(128, 16, sequences=8)
    (_, micro) = next(iter(pack_microbatches(batch, set(), shape, mesh)))

    def total(params, rows):
        return token_fields(params, rows, model, mesh).logprobs.sum()

    text = jax.jit(jax.grad(total)).lower(params, micro.rows).compile().as_text()
    assert "f32[64,12]" in text, "a chunk of tokens by an eighth of the words"
    assert "f32[64,96]" not in text
