"""Loss, gradient, update and log-probs are the same on every mesh.

The reference runs the model over one sequence per row on one device, without a layout, packing or
chunks of the vocabulary, and writes the loss out.
"""

import dataclasses
import functools
import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.moe.mixture import mixture
from jaxrl_llm.models.moe.spec import ClippedSwiglu, MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import BATCH, Layout, batch_shards, make_mesh, shardings
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass, pack_microbatches, token_fields
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch
from tests.decoders import forward, forward_with_router, logits
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

DENSE = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=64,
)
MOE = dataclasses.replace(DENSE, moe=MoeSpec(experts=8, experts_per_token=2, ff_width=16))
DELTA = dataclasses.replace(
    MOE,
    moe=dataclasses.replace(MOE.moe, shared_ff_width=16, shared_gate=True),
    gated_attention=True,
    delta=DeltaSpec(key_heads=8, value_heads=16, key_width=4, value_width=3),
    delta_layers=(True, False) * 2,
)
GPT_OSS = dataclasses.replace(
    DENSE,
    qk_norm=False,
    qkv_bias=True,
    output_bias=True,
    window=3,
    windowed_layers=(True, False) * 2,
    attention_sinks=True,
    moe=dataclasses.replace(MOE.moe, biases=True, swiglu=ClippedSwiglu(alpha=1.702, limit=1.0)),
)
SPECS = {"dense": DENSE, "moe": MOE, "gpt-oss": GPT_OSS, "delta": DELTA}
PACKED = (16, 5, 5, 5, 16, 5, 5, 5, 7, 3, 6, 2)
PADDED = (9, 16, 11, 10, 9, 12, 15, 9, 13, 9, 14, 10)  # no two fit into a row
LENGTH = 16
BALANCE = 0.1
RATE, LARGEST = 0.5, 0.7


def draw(spec):
    """Parameters under which attention and routing are far from uniform."""
    rng = np.random.default_rng(0)

    def one(decl):
        values = 0.3 * rng.normal(size=decl.shape) + (decl.axes[-1] in ("norm", "head_dim"))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(one, declare(spec))


def make_batch(sizes):
    rng = np.random.default_rng(1)
    shape, place, sizes = (len(sizes), LENGTH), np.arange(LENGTH), np.array(sizes, np.int32)
    mask = (place >= 1 + sizes[:, None] // 3) & (place < sizes[:, None])
    advantages = 3 * rng.normal(size=shape).astype(np.float32)
    fields = {"mask": mask, "advantages": advantages}
    return Batch(rng.integers(0, 32, shape).astype(np.int32), sizes, fields)


def plain(logprobs, advantages):
    return -logprobs * advantages


def loss_by_hand(params, spec, batch):
    """The loss of all sequences, one in each row; its log-probs [B T]."""
    real = np.arange(LENGTH) < batch.sequence_lengths[:, None]
    positions = np.broadcast_to(np.arange(LENGTH), real.shape)
    rows = map(jnp.asarray, (batch.tokens, positions, real.astype(np.int32)))
    hidden, router = forward_with_router(params, spec, *rows)
    policy = jax.nn.log_softmax(logits(params, spec, hidden))[:, :-1]
    chosen = jnp.take_along_axis(policy, batch.tokens[:, 1:, None], axis=-1)[:, :, 0]
    logprobs = jnp.where(real, jnp.pad(chosen, [(0, 0), (1, 0)]), 0.0)
    mask = batch["mask"]
    loss = jnp.sum(jnp.where(mask, plain(logprobs, batch["advantages"]), 0)) / mask.sum()
    if router:
        tokens = spec.layers * batch.sequence_lengths.sum()
        often = jax.lax.stop_gradient(router["choices"]).sum(0) / tokens
        likely = router["probabilities"].sum(0) / tokens
        loss += BALANCE * spec.moe.experts * jnp.sum(often * likely)
    return loss, logprobs


@functools.cache
def expected(name):
    """Loss, log-probs and gradient of both batches."""
    run = jax.value_and_grad(loss_by_hand, has_aux=True)
    params, batches = draw(SPECS[name]), [make_batch(sizes) for sizes in (PACKED, PADDED)]
    every = jax.jit(lambda params: [run(params, SPECS[name], batch) for batch in batches])
    return jax.device_get(every(params))


CONTEXTS = {"context by heads", "context by keys", "context by ring"}
AXES = ("data", "fsdp", "tensor", "stage", *sorted(CONTEXTS), "expert")
ALONE = [  # the most devices that an axis can have, each axis once
    *(("dense", {axis: 8}) for axis in ("data", "tensor", "context by heads")),
    *(("moe", {axis: 8}) for axis in ("fsdp", "context by keys", "expert")),
    ("dense", {"stage": 4, "data": 2}),
    ("dense", {"context by ring": 8}),
]
OWN_ARRAYS = [  # sinks by heads, biases of experts by experts and by their width
    ("gpt-oss", {"tensor": 2, "expert": 2, "fsdp": 2}),
    ("gpt-oss", {"tensor": 2, "context by heads": 2, "data": 2}),
    ("gpt-oss", {"stage": 2, "context by keys": 2, "expert": 2}),
    ("gpt-oss", {"data": 2, "context by ring": 2, "tensor": 2}),
    ("delta", {"context by heads": 4, "tensor": 2}),
    ("delta", {"context by keys": 2, "fsdp": 2, "expert": 2}),
    ("delta", {"stage": 2, "tensor": 2, "data": 2}),
]


def pairwise():
    """Choose meshes of three axes, so that any two axes, and any axis and model, meet in one.

    Greedily, the case next that has most new pairs: 10 of the 62 that there are.
    """
    triples = [axes for axes in itertools.combinations(AXES, 3) if len(CONTEXTS & {*axes}) < 2]
    cases = [(m, t) for m in ("moe", "dense") for t in triples if m == "moe" or "expert" not in t]
    missing = {pair for case in cases for pair in pairs(case)}
    while missing:
        best = max(cases, key=lambda case: len(missing & pairs(case)))
        missing -= pairs(best)
        yield best[0], dict.fromkeys(best[1], 2)


def pairs(case):
    return {*itertools.combinations((case[0], *case[1]), 2)}


PAIRWISE = list(pairwise())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            *case,
            marks=() if case in PAIRWISE[:3] else pytest.mark.slow,
            id=" ".join([case[0], *(f"{axis}={n}" for axis, n in case[1].items())]),
        )
        for case in [*ALONE, *OWN_ARRAYS, *PAIRWISE]
    ],
)
def test_the_mesh_changes_nothing(name, sizes):
    """Loss, gradient, clipped update and log-probs of packed and of padded rows."""
    spec, params = SPECS[name], draw(SPECS[name])
    mesh = make_mesh({axis.partition(" ")[0]: size for axis, size in sizes.items()})
    placed = jax.device_put(params, shardings(declare(spec), mesh))
    shape = row_shape(
        2 * LENGTH * batch_shards(mesh), LENGTH, sequences=12, multiple_of=batch_shards(mesh)
    )
    coef = BALANCE if spec.moe else 0.0
    model = ForwardConfig(
        model=Decoder(spec),
        context=next((a.split()[-1] for a in sizes if a in CONTEXTS), "heads"),
        router_loss_coef=coef,
        logprob_chunk=24,
    )
    learner = Learner(
        PolicyObjective(loss=plain),
        model,
        optax.chain(
            optax.trace(decay=0.0), optax.clip_by_global_norm(LARGEST), optax.sgd(RATE, 0.9)
        ),
        reduce=token_mean,
        shape=shape,
        mesh=mesh,
        params_like=placed,
    )
    infer = logprob_pass(model, shape, mesh)
    for lengths, ((loss, logprobs), gradient) in zip((PACKED, PADDED), expected(name), strict=True):
        batch = make_batch(lengths)
        state, metrics = learner.update(learner.init(placed), batch, {})
        scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
        assert norm > LARGEST, "else nothing is clipped"
        step = RATE * LARGEST / norm
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
        # rounding alone is 1e-4 of the scale, by processor and compiler; a lost token is 1e-2
        close = partial(chex.assert_trees_all_close, rtol=1e-3, atol=2e-4 * scale)
        close(jax.device_get(state.opt_state[0].trace), gradient)
        moved = jax.tree.map(lambda p, g, by=step: p - by * g, params, gradient)
        close(jax.device_get(state.params), jax.device_get(moved))
        inferred = infer(placed, batch)["logprobs"]
        np.testing.assert_allclose(inferred, np.where(batch["mask"], logprobs, 0.0), atol=1e-4)


# ------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("sizes", [{"expert": 4, "tensor": 2}, {"expert": 8}])
@pytest.mark.parametrize("favoured", [(0, 1), (6, 7)], ids=["first device", "last device"])
def test_no_token_is_dropped_when_all_choose_the_same_experts(sizes, favoured):
    """The exchange has room for a balanced load and a quarter; the rest goes in more rounds."""
    spec = MOE.moe
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

    mesh = make_mesh(sizes)
    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    alone = jax.jit(run)(weights, x)
    assert alone[0][1][1].tolist() == [256.0 * (e in favoured) for e in range(8)]
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P(BATCH)))
    together = jax.jit(partial(run, layout=Layout(mesh)))(weights, split)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * float(np.abs(b).max()))


# ----------------------------------------------------------------------------------- DeltaNets


@pytest.mark.parametrize("by", ["heads", pytest.param("ring", marks=pytest.mark.slow)])
def test_devices_that_share_rows_share_the_key_heads_of_deltanets(by):
    """Packed rows whose sequences lie across the devices, in layers that are computed again."""
    spec = dataclasses.replace(DELTA, moe=None, layers=2, delta_layers=(True, False))
    params, mesh = draw(spec), make_mesh({"context": 2, "tensor": 2, "fsdp": 2})
    rng = np.random.default_rng(4)
    segments = np.array([[1] * 5 + [2] * 6 + [3] * 4 + [0], [1] * 13 + [2] * 3])
    positions = np.concatenate(
        [[*range(5), *range(6), *range(4), 0], [*range(13), *range(3)]]
    ).reshape(2, 16)
    rows = tuple(
        jnp.asarray(x, jnp.int32) for x in (rng.integers(1, 32, (2, 16)), positions, segments)
    )
    weights = jnp.asarray(rng.normal(size=(2, 16)) * (segments > 0))

    def loss(params, layout=None):
        cut = layout.split_context if layout else lambda x: x
        run = partial(forward, params, spec, *map(cut, rows), layout=layout, remat="dots")
        return (run() ** 2 * cut(weights)[..., None]).sum()

    value, expected = jax.jit(jax.value_and_grad(loss))(params)
    layout = Layout(mesh, by)
    placed = jax.device_put(params, layout.of(declare(spec)))
    run = jax.jit(jax.value_and_grad(partial(loss, layout=layout)))
    again, gradient = run(placed)
    np.testing.assert_allclose(again, value, rtol=1e-4)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(
        jax.device_get(gradient), jax.device_get(expected), rtol=1e-3, atol=2e-4 * scale
    )


# ------------------------------------------------------------------------- what does not divide


def traced(spec, sizes, by="heads"):
    mesh = make_mesh(sizes)
    rows = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    params = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), declare(spec))

    def run(params, tokens, positions, segments):
        layout = Layout(mesh, by)
        return forward(
            params, spec, *map(layout.split_context, (tokens, positions, segments)), layout=layout
        )

    return jax.eval_shape(run, params, rows, rows, rows)


def changed(**fields):
    return dataclasses.replace(DENSE, **fields)


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (
            changed(heads=6),
            {"context": 4, "data": 2},
            r"6 heads can't be split over tensor=1 times context=4 devices; "
            "expected a divisor of 6 as their product, or context by keys",
        ),
        (
            changed(layers=6),
            {"stage": 4, "data": 2},
            r"stage=4 can't share 6 layers; expected one of \[1, 2, 3, 6\]",
        ),
        (
            changed(moe=MoeSpec(experts=6, experts_per_token=2, ff_width=16)),
            {"expert": 4, "data": 2},
            r"expert=4 can't share 6 experts; expected one of \[1, 2, 3, 6\]",
        ),
        (
            dataclasses.replace(DELTA, delta=dataclasses.replace(DELTA.delta, key_heads=2)),
            {"context": 4, "data": 2},
            r"2 key heads of a DeltaNet can't be split over tensor=1 times context=4 devices; "
            "expected a divisor of 2 as their product",
        ),
        (
            dataclasses.replace(DELTA, delta_layers=(True, True, False, False)),
            {"stage": 2, "data": 4},
            r"stage=2 can't share layers that repeat a pattern of 4 1 times; expected one of \[1\]",
        ),
    ],
)
def test_what_devices_can_not_share_is_refused_with_the_divisors(spec, sizes, message):
    with pytest.raises(ValueError, match=message):
        traced(spec, sizes)


def test_keys_take_any_number_of_heads():
    assert traced(changed(heads=6), {"context": 4, "data": 2}, "keys").shape == (32, 4, 16)


# ------------------------------------------------------------------------------------ memory


def bytes_on_a_device(tree, layout):
    def one(leaf, split):
        return np.prod(split.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(one, tree, layout)))


def test_fsdp_divides_the_optimizer_s_state():
    """Norms are whole on every device; all else of Adam's moments is an eighth."""

    def held(sizes, devices):
        mesh = make_mesh(sizes, jax.devices()[:devices])
        like = jax.tree.map(
            lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s),
            declare(DENSE),
            shardings(declare(DENSE), mesh),
        )
        learner = Learner(
            PolicyObjective(loss=plain),
            ForwardConfig(model=Decoder(DENSE)),
            optax.adamw(1e-3),
            reduce=token_mean,
            shape=row_shape(128, 16, sequences=8, multiple_of=8),
            mesh=mesh,
            params_like=like,
        )
        state = jax.eval_shape(learner.init, like)
        return bytes_on_a_device(state.opt_state, learner.state_shardings.opt_state)

    norms = sum(
        4 * np.prod(d.shape) for d in jax.tree.leaves(declare(DENSE)) if "embed" not in d.axes
    )
    one, eight, replicated = held({}, 1), held({"fsdp": 8}, 8), held({"data": 8}, 8)
    count = 4
    assert one == replicated
    assert eight == (one - 2 * norms - count) / 8 + 2 * norms + count
    assert eight < one / 6


@pytest.mark.parametrize(
    "remat",
    ["none", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("dots", "full"))],
)
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_no_device_ever_holds_all_layers(name, remat):
    """The backward pass gathers weights again, whatever else of a layer is stored."""
    spec = dataclasses.replace(SPECS[name], hidden_size=256, ff_width=512, layers=8)
    if spec.moe:
        spec = dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, ff_width=64))
    mesh = make_mesh({"fsdp": 8})
    layout = Layout(mesh)
    params = jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s),
        declare(spec),
        layout.of(declare(spec)),
    )
    row = jax.ShapeDtypeStruct((8, 8), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P(BATCH)))

    def total(params, *rows):
        return forward(params, spec, *rows, layout=layout, remat=remat).sum()

    step = jax.jit(jax.grad(total), out_shardings=layout.of(declare(spec)))
    needed = step.lower(params, row, row, row).compile().memory_analysis().temp_size_in_bytes
    assert needed < sum(4 * leaf.size for leaf in jax.tree.leaves(params)) / 2


def test_gradients_in_bfloat16_are_summed_over_devices_in_float32():
    """Sums of bfloat16 parts would differ in the third digit."""
    spec, params = DENSE, draw(DENSE)
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


@pytest.mark.parametrize("by", ["heads", "keys", "ring"])
def test_context_divides_the_memory_of_activations(by):
    """Temporary bytes of a long row's gradient, per device, as the compiler reports them."""

    def memory(sizes, devices):
        mesh = make_mesh(sizes, jax.devices()[:devices])
        layout = Layout(mesh, by)
        row = jax.ShapeDtypeStruct(
            (1, 1024), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P(BATCH))
        )
        params = jax.tree.map(
            lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s),
            declare(DENSE),
            shardings(declare(DENSE), mesh),
        )

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
    params = jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s),
        declare(spec),
        shardings(declare(spec), mesh),
    )
    batch = Batch(np.zeros((8, 16), np.int32), np.full(8, 16, np.int32), {})
    shape = row_shape(128, 16, sequences=8)
    (_, micro) = next(iter(pack_microbatches(batch, set(), shape, mesh)))

    def total(params, rows):
        return token_fields(params, rows, model, mesh).logprobs.sum()

    text = jax.jit(jax.grad(total)).lower(params, micro.rows).compile().as_text()
    assert "f32[64,12]" in text, "a chunk of tokens by an eighth of the words"
    assert "f32[64,96]" not in text
