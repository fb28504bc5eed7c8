"""An update is the same for every packing, split, order, padding and mesh.

The reference runs the model over one whole sequence at a time, without packing, padding,
micro-batches or a mesh, and writes out loss, KL, entropy and weights by hand.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import correction, losses
from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.algorithms.reduce import sequence_mean_token_mean, token_mean
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.training.forward import ForwardConfig, logprob_pass
from jaxrl_llm.training.update import PolicyObjective
from jaxrl_llm.types import Batch
from tests.algorithms.fields import named
from tests.decoders import forward, logits
from tests.guarded import MODEL, UPDATE
from tests.specs import DENSE as SPEC
from tests.specs import draw
from tests.updates import assert_same, learn, mesh_of, place, updated

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

TEMPERATURE = 0.8
COEFS = {"kl_coef": 0.3, "entropy_coef": 0.05}
SIZES = (16, 5, 5, 5, 16, 5, 5, 5)
OBJECTIVE = PolicyObjective(loss=ppo_clip, kl=k3, entropy=True)


@pytest.fixture(scope="module")
def params():
    return draw(SPEC, scale=0.3)


def make_batch(sizes=SIZES, length=16):
    """Up to 16 tokens each, garbage in the padding, and masks with holes as a tool leaves them."""
    rng = np.random.default_rng(1)
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


def episode_weights(mask):
    """Return sequence_mean_token_mean's weights of sequences that are the chains of EPISODES."""
    weights = np.zeros(mask.shape, np.float32)
    for chains in EPISODES:
        drawn = sum(mask[chain].sum() for chain in chains)
        for chain in chains:
            weights[chain, mask[chain]] = 1 / (len(EPISODES) * drawn)
    return weights


def build(params, *, tokens, length=16, objective=OBJECTIVE, **settings):
    """Return a function from a batch to gradient, metrics and new parameters."""
    placed = place(params, SPEC, mesh_of())
    shape = row_shape(tokens, length, sequences=len(SIZES))
    settings = {"reduce": sequence_mean_token_mean, "temperature": TEMPERATURE} | settings
    learner = learn(SPEC, placed, objective, shape, **settings)
    return lambda batch: updated(learner, placed, batch, COEFS)


def check(params, got, expected):
    """Compare gradients, metrics and new parameters with the reference's."""
    (gradient, metrics, after), (wanted, parts) = got, expected
    for name, value in parts.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)
    assert_same(gradient, wanted, atol=3e-6)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, params, wanted)
    chex.assert_trees_all_close(after, moved, rtol=1e-4, atol=3e-6 * scale)
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert metrics["skipped"] == 0


@pytest.fixture(scope="module")
def expected(params):
    return reference(params, make_batch(), sequence_mean_token_mean)


@pytest.fixture(scope="module")
def in_pairs(params):
    """An update in micro-batches of two rows, for tests that vary the batch."""
    return build(params, tokens=32, remat="full")


def test_one_row_at_a_time(params, expected):
    check(params, build(params, tokens=16)(make_batch()), expected)


def test_longer_rows_chunks_and_other_weights(params):
    run = build(params, tokens=75, length=24, reduce=token_mean, logprob_chunk=7, remat="dots")
    check(params, run(make_batch()), reference(params, make_batch(), token_mean))


def test_neither_order_nor_padding_nor_company_changes_anything(params, in_pairs, expected):
    check(params, in_pairs(make_batch()), expected)
    order = np.random.default_rng(5).permutation(len(SIZES))
    check(params, in_pairs(make_batch().take(order)), expected)
    short = (5,) * len(SIZES)
    narrow = make_batch(short, 9)
    of_short = reference(params, narrow, sequence_mean_token_mean)
    check(params, in_pairs(narrow), of_short)
    check(params, in_pairs(make_batch(short)), of_short)
    one = make_batch().take([2])
    check(params, in_pairs(one), reference(params, one, sequence_mean_token_mean))


def test_logprob_pass_gives_what_one_sequence_at_a_time_gives(params):
    """Also where sequences are chains of episodes, whose tokens lie in any order."""
    batch, episodes = make_batch(), as_episodes(make_batch())
    model = ForwardConfig(model=Decoder(SPEC), temperature=TEMPERATURE)
    infer = logprob_pass(model, row_shape(16 * 4, 16, sequences=len(SIZES)), mesh_of())
    fields, joined = (infer(params, each) for each in (batch, episodes))
    for i, n in enumerate(batch.sequence_lengths):
        logpi = np.asarray(log_policy(params, jnp.asarray(batch.tokens[i, :n])))
        for t in range(16):
            inside = 0 < t < n and batch["mask"][i, t]
            logprob = logpi[t - 1, batch.tokens[i, t]] if inside else 0.0
            entropy = -(np.exp(logpi[t - 1]) * logpi[t - 1]).sum() if inside else 0.0
            np.testing.assert_allclose(fields["logprobs"][i, t], logprob, atol=2e-5)
            np.testing.assert_allclose(fields["entropy"][i, t], entropy, atol=2e-5)
    for episode, chains in enumerate(EPISODES):
        for number, chain in enumerate(chains):
            places = episodes["chain_ids"][episode] == number
            wanted = fields["logprobs"][chain, : places.sum()]
            np.testing.assert_allclose(joined["logprobs"][episode, places], wanted, atol=1e-5)
    assert not joined["logprobs"][episodes["chain_ids"] < 0].any()


POLICY_LOSSES = {k: f for k, f in named(losses).items() if not k.startswith("select_")}


@pytest.mark.parametrize(
    "name",
    ["gmpo", *(pytest.param(x, marks=pytest.mark.slow) for x in POLICY_LOSSES if x != "gmpo")],
)
def test_micro_batches_change_no_corrected_update(params, name):
    """Through the learner: all rows at once, and one at a time."""
    batch = make_batch()
    rng = np.random.default_rng(3)
    mask, old = batch["mask"], batch["old_logprobs"]
    rollout = old + rng.normal(scale=0.1, size=old.shape).astype(np.float32)
    weights = correction.truncated_token(*map(jnp.asarray, (old, rollout, mask)), cap=1.1)
    marked = mask & (rng.uniform(size=mask.shape) < 0.2)
    ages = rng.integers(0, 3, old.shape).astype(np.int32)
    batch = batch.add(correction=np.asarray(weights), high_covariance=marked)
    batch = batch.add(rollout_logprobs=rollout, ages=ages)
    objective = PolicyObjective(loss=POLICY_LOSSES[name], corrected=True)
    runs = [
        build(params, tokens=tokens, reduce=token_mean, objective=objective)
        for tokens in (16, 16 * len(SIZES))
    ]
    (gradient, metrics, _), (expected, wanted_metrics, _) = (run(batch) for run in runs)
    assert_same(gradient, expected, atol=3e-6)
    for name, value in wanted_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_chains_are_read_by_themselves_and_weighed_as_one_episode(params, in_pairs):
    batch = make_batch()
    weights = episode_weights(batch["mask"])
    wanted = reference(params, batch, sequence_mean_token_mean, weights)
    check(params, in_pairs(as_episodes(batch)), wanted)
    (chain,) = EPISODES[2]  # alone, and wider than a row
    alone = as_episodes(batch).take([2])
    assert alone.tokens.shape[1] > 16
    one = batch.take([chain])
    check(params, in_pairs(alone), reference(params, one, sequence_mean_token_mean))
