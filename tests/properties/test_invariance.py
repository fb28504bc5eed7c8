"""An update is the same for every packing, split, order, padding and mesh.

The reference runs the model over one whole sequence at a time, without packing, padding,
micro-batches or a mesh, and writes out loss, KL, entropy and weights by hand.
"""

import inspect
from functools import partial
from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms import correction, losses, reduce, values
from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean, token_mean
from jaxrl_llm.config.functions import public_functions
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import batch_shards, make_mesh, shardings
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch
from tests.decoders import forward, logits
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied_embeddings=True,
    max_positions=64,
)
TEMPERATURE = 0.8
COEFS = {"kl_coef": 0.3, "entropy_coef": 0.05}
SIZES = (16, 5, 5, 5, 16, 5, 5, 5)
OBJECTIVE = PolicyObjective(loss=ppo_clip, kl=k3, entropy=True)
KEEP_GRADIENT = optax.chain(optax.trace(decay=0.0), optax.sgd(0.5))  # trace: the last gradient


@pytest.fixture(scope="module")
def params():
    """Parameters under which attention is far from uniform."""
    rng = np.random.default_rng(0)

    def draw(decl):
        values = 0.3 * rng.normal(size=decl.shape) + (decl.axes[-1] in ("norm", "head_dim"))
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(draw, declare(SPEC))


def make_batch(sizes, length, *, seed=1):
    """Up to 16 tokens each, garbage in the padding, and masks with holes as a tool leaves them."""
    rng = np.random.default_rng(seed)
    shape, place = (len(sizes), 16), np.arange(16)
    starts = np.array([max(1, size // 3) for size in sizes])
    mask = (place >= starts[:, None]) & (place < np.array(sizes)[:, None])
    mask[:, [3, 8]] = False
    old = rng.normal(-3.4, 1.0, shape).astype(np.float32)
    fields = {
        "mask": mask,
        "old_logprobs": old,
        "ref_logprobs": old + rng.normal(scale=0.3, size=shape).astype(np.float32),
        "advantages": rng.normal(size=shape).astype(np.float32),
    }
    tokens = rng.integers(0, SPEC.vocab_size, shape).astype(np.int32)
    cut = {name: values[:, :length] for name, values in fields.items()}
    return Batch(tokens[:, :length], np.array(sizes, np.int32), cut)


@jax.jit
def log_policy(params, tokens):
    """log π of the next token after each but the last of one sequence [n]."""
    n = tokens.shape[0]
    hidden = forward(params, SPEC, tokens[None], jnp.arange(n)[None], jnp.ones((1, n), int))[0]
    scores = logits(params, SPEC, hidden)[:-1] / TEMPERATURE
    return scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def sequence_loss(params, tokens, mask, weights, old, ref, advantages):
    """The loss of one sequence [n] and its parts, straight from the equations."""
    logpi = log_policy(params, tokens)
    logp = jnp.where(mask[1:], logpi[jnp.arange(len(logpi)), tokens[1:]], 0.0)
    old, ref, advantages = (x[1:] for x in (old, ref, advantages))
    ratio = jnp.exp(logp - old)
    worst = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 0.8, 1.2))
    policy = jnp.where(advantages < 0, jnp.minimum(worst, -3.0 * advantages), worst)
    kl = jnp.minimum(jnp.exp(ref - logp) - (ref - logp) - 1, 10.0)
    entropy = -jnp.sum(jnp.exp(logpi) * logpi, axis=-1)
    weights = jnp.where(mask[1:], weights[1:], 0.0)
    parts = {
        "pg_loss": jnp.sum(weights * policy),
        "kl_loss": jnp.sum(weights * kl),
        "entropy_loss": jnp.sum(weights * entropy),
    }
    loss = parts["pg_loss"] + 0.3 * parts["kl_loss"] - 0.05 * parts["entropy_loss"]
    return loss, parts | {"loss": loss}


one_sequence = jax.jit(jax.grad(sequence_loss, has_aux=True))


def loop_weights(mask, kind):
    """Weights of a reduction, token by token."""
    weights = np.zeros(mask.shape, np.float32)
    for i, j in np.argwhere(mask):
        per_sequence = len(mask) * mask[i].sum()
        weights[i, j] = 1 / mask.sum() if kind is token_mean else 1 / per_sequence
    return weights


def reference(params, batch, reduce, weights=None):
    """Loop over the sequences; return gradient and metrics of the whole mini-batch."""
    weights = loop_weights(batch["mask"], reduce) if weights is None else weights
    gradient, metrics = jax.tree.map(np.zeros_like, params), {}
    for i, n in enumerate(batch.sequence_lengths):
        names = ("mask", "old_logprobs", "ref_logprobs", "advantages")
        mask, *fields = (jnp.asarray(batch[name][i, :n]) for name in names)
        grads, parts = one_sequence(params, batch.tokens[i, :n], mask, weights[i, :n], *fields)
        gradient = jax.tree.map(np.add, gradient, grads)
        metrics = {k: metrics.get(k, 0.0) + float(v) for k, v in parts.items()}
    return gradient, metrics


EPISODES = ((0, 1), (2, 3, 4), (5,), (6, 7))
"""Which of a batch's sequences are chains of one episode."""


def as_episodes(batch, width=40, seed=0):
    """Return a batch's sequences as the chains of EPISODES, their tokens in any order."""
    rng, count = np.random.default_rng(seed), len(EPISODES)
    names = ("tokens", "mask", "old_logprobs", "ref_logprobs", "advantages")
    joined = {
        name: rng.integers(0, 2, (count, width)).astype(of(batch, name).dtype) for name in names
    }
    chain_ids = np.full((count, width), -1, np.int32)
    for episode, chains in enumerate(EPISODES):
        numbers = np.repeat(np.arange(len(chains)), batch.sequence_lengths[list(chains)])
        rng.shuffle(numbers)
        chain_ids[episode, : len(numbers)] = numbers
        joined["mask"][episode, len(numbers) :] = False
        for number, chain in enumerate(chains):
            places = np.flatnonzero(chain_ids[episode] == number)
            for name in names:
                joined[name][episode, places] = of(batch, name)[chain, : len(places)]
    sizes = (chain_ids >= 0).sum(1).astype(np.int32)
    return Batch(joined.pop("tokens"), sizes, joined | {"chain_ids": chain_ids})


def of(batch, name):
    """Return an array of a batch."""
    return batch.tokens if name == "tokens" else batch[name]


def episode_weights(batch, kind):
    """Return the weights of a batch's sequences as the chains of EPISODES, token by token."""
    mask, weights = batch["mask"], np.zeros(batch["mask"].shape, np.float32)
    for chains in EPISODES:
        drawn = sum(mask[chain].sum() for chain in chains)
        each = 1 / mask.sum() if kind is token_mean else 1 / (len(EPISODES) * drawn)
        for chain in chains:
            weights[chain, mask[chain]] = each
    return weights


def place(params, mesh):
    """Lay parameters out as training does."""
    return jax.device_put(params, shardings(declare(SPEC), mesh))


def build(
    params,
    mesh,
    *,
    tokens,
    length=16,
    reduce=sequence_mean_token_mean,
    objective=OBJECTIVE,
    **model,
):
    """Return a function from a batch to gradient, metrics and new parameters."""
    placed = place(params, mesh)
    learner = Learner(
        objective,
        ForwardConfig(model=Decoder(SPEC), temperature=TEMPERATURE, **model),
        KEEP_GRADIENT,
        reduce=reduce,
        shape=row_shape(tokens, length, sequences=len(SIZES), multiple_of=batch_shards(mesh)),
        mesh=mesh,
        params_like=placed,
    )

    def run(batch):
        state, metrics = learner.update(learner.init(placed), batch, COEFS)
        for moment, parameter in zip(
            jax.tree.leaves(state.opt_state[0].trace), jax.tree.leaves(placed), strict=True
        ):
            assert moment.sharding.is_equivalent_to(parameter.sharding, moment.ndim)
        gradient = jax.device_get(state.opt_state[0].trace)
        return gradient, jax.device_get(metrics), jax.device_get(state.params)

    return run


def assert_same(params, got, expected):
    """Compare gradients, metrics and new parameters with the reference's."""
    (gradient, metrics, updated), (wanted_gradient, wanted_metrics) = got, expected
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted_gradient))
    assert scale > 0.1, "the comparison needs a gradient that is not tiny"
    for name, value in wanted_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)

    moved = jax.tree.map(lambda p, g: p - 0.5 * g, params, wanted_gradient)
    chex.assert_trees_all_close(gradient, wanted_gradient, rtol=1e-4, atol=3e-6 * scale)
    chex.assert_trees_all_close(updated, moved, rtol=1e-4, atol=3e-6 * scale)
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert metrics["skipped"] == 0


ONE = {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.fixture(scope="module")
def one_device():
    return make_mesh(ONE, jax.devices()[:1])


@pytest.fixture(scope="module")
def expected(params):
    return reference(params, make_batch(SIZES, 16), sequence_mean_token_mean)


@pytest.fixture(scope="module")
def in_pairs(params, one_device):
    """An update in micro-batches of two rows, for tests that vary the batch."""
    return build(params, one_device, tokens=32, remat="full")


def test_one_row_at_a_time(params, one_device, expected):
    run = build(params, one_device, tokens=16)
    assert_same(params, run(make_batch(SIZES, 16)), expected)


def test_longer_rows_chunks_and_other_weights(params, one_device):
    batch = make_batch(SIZES, 16)
    run = build(params, one_device, tokens=75, length=24, reduce=token_mean, logprob_chunk=7)
    assert_same(params, run(batch), reference(params, batch, token_mean))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 2, 4), (2, 2, 2)])
def test_meshes_change_nothing(params, expected, sizes):
    mesh = make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    run = build(params, mesh, tokens=16 * batch_shards(mesh))
    assert_same(params, run(make_batch(SIZES, 16)), expected)


def test_two_rows_at_a_time(params, in_pairs, expected):
    assert_same(params, in_pairs(make_batch(SIZES, 16)), expected)


@settings(max_examples=6)
@given(order=st.permutations(range(len(SIZES))))
def test_the_order_of_sequences_changes_nothing(params, in_pairs, expected, order):
    assert_same(params, in_pairs(make_batch(SIZES, 16).take(np.array(order))), expected)


def test_padding_changes_nothing(params, one_device, in_pairs):
    sizes = (5,) * len(SIZES)
    narrow, wide = make_batch(sizes, 9), make_batch(sizes, 16)
    expected = reference(params, narrow, sequence_mean_token_mean)
    assert_same(params, in_pairs(narrow), expected)
    assert_same(params, in_pairs(wide), expected)


def test_one_sequence_is_a_batch(params, in_pairs):
    batch = make_batch(SIZES, 16).take([2])
    assert_same(params, in_pairs(batch), reference(params, batch, sequence_mean_token_mean))


@pytest.mark.parametrize("sizes", [ONE, {"fsdp": 4, "tensor": 2}])
def test_logprob_pass_gives_what_one_sequence_at_a_time_gives(params, sizes):
    mesh = make_mesh(sizes, jax.devices()[: 1 if sizes is ONE else 8])
    shape = row_shape(16 * 4, 16, sequences=len(SIZES), multiple_of=batch_shards(mesh))
    model = ForwardConfig(model=Decoder(SPEC), temperature=TEMPERATURE)
    batch = make_batch(SIZES, 16)
    fields = logprob_pass(model, shape, mesh)(place(params, mesh), batch)
    for i, n in enumerate(batch.sequence_lengths):
        logpi = np.asarray(log_policy(params, jnp.asarray(batch.tokens[i, :n])))
        for t in range(16):
            inside = 0 < t < n and batch["mask"][i, t]
            logprob = logpi[t - 1, batch.tokens[i, t]] if inside else 0.0
            entropy = -(np.exp(logpi[t - 1]) * logpi[t - 1]).sum() if inside else 0.0
            np.testing.assert_allclose(fields["logprobs"][i, t], logprob, atol=2e-5)
            np.testing.assert_allclose(fields["entropy"][i, t], entropy, atol=2e-5)


LOSSES = {
    losses.ppo_clip: {},
    losses.reinforce: {},
    losses.negative_log_likelihood: {},
    losses.cispo: {},
    losses.sapo: {},
    losses.dppo_tv: {},
    losses.dppo_kl: {},
    losses.dro: {"beta": 0.5},
    losses.gspo: {"clip_low": 0.05, "clip_high": 0.05},
    losses.gmpo: {},
    losses.clip_cov: {},
    losses.kl_cov: {},
    losses.a3po: {},
    values.squared_value_loss: {},
    values.clipped_value_loss: {},
    values.implicit_reward_loss: {"beta": 0.5},
}
REDUCTIONS = [
    reduce.token_mean,
    reduce.token_sum,
    reduce.sequence_mean_token_sum,
    reduce.sequence_mean_token_mean,
    partial(reduce.sequence_mean_token_sum_norm, horizon=16.0),
]
CORRECTIONS = [
    partial(correction.truncated_token, cap=1.1),
    partial(correction.truncated_sequence, cap=1.2),
    partial(correction.truncated_token_normalized, cap=1.1),
    partial(correction.truncated_sequence_normalized, cap=1.2),
    partial(correction.icepop, low=0.9, high=1.15),
    partial(correction.reject_sequence, low=0.8, high=1.2),
    partial(correction.reject_sequence_geometric, low=0.95, high=1.05),
    partial(correction.reject_sequence_k3, cap=0.005),
]
SEQUENCES, WIDTH = 6, 9


def test_no_loss_reduction_or_correction_is_left_out():
    def own(module, *asks):
        functions = inspect.getmembers(module, inspect.isfunction)
        public = [f for n, f in functions if not n.startswith("_") and f.__module__ in OWNERS]
        return {f for f in public if [*inspect.signature(f).parameters][: len(asks)] == [*asks]}

    unwrapped = [getattr(f, "func", f) for f in (*REDUCTIONS, *CORRECTIONS)]
    policy = {vars(losses)[n] for n in public_functions(losses) if not n.startswith("select_")}
    assert policy | {vars(values)[n] for n in public_functions(values)} == LOSSES.keys()
    assert own(reduce, "mask") == {*unwrapped[: len(REDUCTIONS)]}
    corrections = own(correction, "old_logprobs", "rollout_logprobs", "mask")
    of_a_batch = {correction.mismatch_metrics, correction.second_moment_mask}
    assert corrections - of_a_batch == {*unwrapped[len(REDUCTIONS) :]}


OWNERS = {reduce.__name__, correction.__name__}


def mini_batch(function):
    """Fields of six answers, and the weights of every reduction with every correction."""
    rng = np.random.default_rng(7)
    shape, place = (SEQUENCES, WIDTH), np.arange(WIDTH)
    mask = (place >= 1) & (place < np.array([[9], [4], [7], [2], [9], [5]]))
    mask[:, 3] = False
    old = -rng.exponential(1.0, shape)
    token = {
        "old_logprobs": old,
        "logprobs": np.minimum(old + 0.3 * rng.normal(size=shape), -0.01),
        "ref_logprobs": np.minimum(old + 0.3 * rng.normal(size=shape), -0.01),
        "rollout_logprobs": np.minimum(old + 0.1 * rng.normal(size=shape), -0.01),
        "advantages": rng.normal(size=shape),
        "returns": rng.normal(size=shape),
        "old_values": rng.normal(size=shape),
        "values": rng.normal(size=shape),
        "raw_scores": rng.uniform(size=SEQUENCES),
    }
    fields = {k: jnp.asarray(v, jnp.float32) for k, v in token.items()}
    fields["mask"] = jnp.asarray(mask)
    fields["ages"] = jnp.asarray(rng.integers(0, 3, shape))
    about = fields["logprobs"], fields["advantages"], fields["mask"]
    if function is losses.clip_cov:
        drawn = {"key": jax.random.key(0), "ratio": 0.2, "low": -0.5, "high": 5.0}
        fields["high_covariance"] = losses.select_clip_cov(*about, **drawn)
    else:
        fields["high_covariance"] = losses.select_kl_cov(*about, ratio=0.2)
    pair = fields["old_logprobs"], fields["rollout_logprobs"], fields["mask"]
    single = [weigh(*pair) for weigh in CORRECTIONS]
    for weights in single:  # no correction keeps everything, or nothing
        assert weights.any()
        assert (weights != 1)[fields["mask"]].any()
    corrections = [jnp.ones(shape), *single, single[0] * single[6]]
    kinds = [kind(fields["mask"]) for kind in REDUCTIONS]
    return fields, jnp.stack([kind * weights for kind in kinds for weights in corrections])


splits = st.tuples(
    st.permutations(range(SEQUENCES)), st.sets(st.integers(1, SEQUENCES - 1), max_size=5)
)


@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_no_split_changes_any_loss_under_any_reduction_and_correction(function):
    """sum(weights · loss) and its gradient: added up over parts, each filled up with empty rows."""
    asked = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    learned = "values" if "values" in asked else "logprobs"
    fields, weights = mini_batch(function)

    @jax.jit
    def contribution(part, weights):
        def loss(x):
            result = function(*({**part, learned: x}[name] for name in asked), **LOSSES[function])
            return jnp.where(part["mask"], result.loss, 0.0)

        per_token, back = jax.vjp(loss, part[learned])
        gradients = jax.vmap(lambda w: back(w)[0])(weights)
        return jnp.einsum("wbt,bt->w", weights, per_token), gradients

    def filled(x, rows):
        return np.concatenate([x[rows], np.zeros_like(x[len(rows) :])])

    fields, weights = jax.device_get((fields, weights))
    value, gradient = jax.device_get(contribution(fields, weights))
    scale = np.abs(gradient).max(axis=(1, 2), keepdims=True)
    assert (scale > 1e-3).all(), "the comparison needs gradients that are not tiny"

    @settings(max_examples=12)
    @given(splits)
    def same(split):
        order, cuts = split
        edges = [0, *sorted(cuts), SEQUENCES]
        total, gradients = np.zeros_like(value), np.zeros_like(gradient)
        for start, stop in pairwise(edges):
            rows = order[start:stop]
            part = {name: filled(x, rows) for name, x in fields.items()}
            shares = filled(weights.swapaxes(0, 1), rows).swapaxes(0, 1)
            share, grads = jax.device_get(contribution(part, shares))
            total += share
            gradients[:, rows] = grads[:, : len(rows)]
            assert not grads[:, len(rows) :].any()
        np.testing.assert_allclose(total, value, rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(gradients / scale, gradient / scale, rtol=1e-5, atol=1e-6)

    same()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(f, marks=() if f is losses.gmpo else pytest.mark.slow, id=f.__name__)
        for f in [*LOSSES][:-3]  # those of a policy
    ],
)
def test_micro_batches_change_no_corrected_update(params, one_device, function):
    """Through the learner: all rows at once, and one at a time."""
    batch = make_batch(SIZES, 16)
    rng = np.random.default_rng(3)
    mask, old = batch["mask"], batch["old_logprobs"]
    rollout = old + rng.normal(scale=0.1, size=old.shape).astype(np.float32)
    weights = correction.truncated_token(*map(jnp.asarray, (old, rollout, mask)), cap=1.1)
    marked = mask & (rng.uniform(size=mask.shape) < 0.2)
    ages = rng.integers(0, 3, old.shape).astype(np.int32)
    batch = batch.add(correction=np.asarray(weights), high_covariance=marked)
    batch = batch.add(rollout_logprobs=rollout, ages=ages)
    objective = PolicyObjective(loss=partial(function, **LOSSES[function]), corrected=True)
    runs = [
        build(params, one_device, tokens=tokens, reduce=token_mean, objective=objective)
        for tokens in (16, 16 * len(SIZES))
    ]
    (gradient, metrics, _), (expected, wanted_metrics, _) = (run(batch) for run in runs)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert scale > 1e-3
    chex.assert_trees_all_close(gradient, expected, rtol=1e-4, atol=3e-6 * scale)
    for name, value in wanted_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


# ---------------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("kind", [sequence_mean_token_mean, token_mean])
def test_chains_are_read_by_themselves_and_weighed_as_one_episode(params, one_device, kind):
    batch = make_batch(SIZES, 16)
    wanted = reference(params, batch, kind, episode_weights(batch, kind))
    run = build(params, one_device, tokens=32, reduce=kind)
    assert_same(params, run(as_episodes(batch)), wanted)


def test_an_episode_of_one_chain_beside_longer_ones(params, in_pairs):
    (chain,) = EPISODES[2]
    alone = as_episodes(make_batch(SIZES, 16)).take([2])
    assert alone.tokens.shape[1] > 16
    batch = make_batch(SIZES, 16).take([chain])
    assert_same(params, in_pairs(alone), reference(params, batch, sequence_mean_token_mean))


def test_what_a_model_says_of_chains_lies_where_their_tokens_do(params, one_device):
    batch = make_batch(SIZES, 16)
    shape = row_shape(32, 16, sequences=len(SIZES))
    infer = logprob_pass(
        ForwardConfig(model=Decoder(SPEC), temperature=TEMPERATURE), shape, one_device
    )
    apart = infer(params, batch)["logprobs"]
    episodes = as_episodes(batch)
    joined = infer(params, episodes)["logprobs"]
    for episode, chains in enumerate(EPISODES):
        for number, chain in enumerate(chains):
            places = episodes["chain_ids"][episode] == number
            np.testing.assert_allclose(
                joined[episode, places], apart[chain, : places.sum()], rtol=1e-5, atol=1e-5
            )
    assert not joined[episodes["chain_ids"] < 0].any()
