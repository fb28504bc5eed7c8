"""A policy for loops of one's own: what it says of tokens, what it samples, and a step by hand."""

import dataclasses
import functools
import gc
import json
import re
import shutil
import weakref
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxrl_llm.algorithms.kl import k3
from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.rollout.rollouts import lay_out
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training.load_model import like_of
from jaxrl_llm.training.policy import _token_logprobs, load_policy
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch
from tests.guarded import MODEL, NATIVE

ROOT = Path(__file__).resolve().parents[2]
LISTING, IN_PARTS = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs/by_hand.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Hugging Face directory with random weights."""
    folder = tmp_path_factory.mktemp("policy")
    shutil.copytree(ROOT / "configs/quickstart", folder / "source")
    path = folder / "source/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SMALL))
    spec, rng = read_spec(folder / "source"), np.random.default_rng(0)
    weights = jax.tree.map(
        lambda decl: jnp.asarray(rng.normal(scale=0.3, size=decl.shape), jnp.float32), declare(spec)
    )
    save_params(folder / "model", weights, spec, source=folder / "source", dtype=jnp.float32)
    return str(folder / "model")


@pytest.fixture(scope="module")
def one_device():
    some = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.devices", lambda: some)
        yield


@pytest.fixture(scope="module")
def policy(directory, one_device):
    return load_policy(directory)


@pytest.fixture(scope="module")
def engine(policy):
    engine = policy.open_engine(max_tokens=16, max_running_sequences=16)
    yield engine
    engine.close()


def run_listing(model, optimizer):
    """Return the names that the page's loop leaves after one step."""
    names = {
        "model": model,
        "optimizer": optimizer,
        "seed": 3,
        "prompt_batches": [[f"{a}+{b}=" for a in range(8) for b in range(8)]],
        "score": lambda prompt, text: float(len(text)) + 0.1 * prompt.tokens[0],
    }
    exec(compile(LISTING, "docs/by_hand.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def stepped(directory, one_device):
    names = run_listing(directory, optax.sgd(1.0))
    yield names | {"reference": names["policy"].params}
    names["engine"].close()


# ---------------------------------------------------------------------------------------- a step


def test_a_step_by_hand_is_the_trainers(stepped):
    """Loss and parameters, and so the gradients: the optimizer subtracts them."""
    policy, batch = stepped["policy"], stepped["batch"]
    batch = batch.add(old_logprobs=batch["rollout_logprobs"])
    learner = Learner(
        PolicyObjective(loss=ppo_clip),
        policy.forward,
        stepped["optimizer"],
        reduce=token_mean,
        shape=row_shape(512, 16, sequences=256),  # several micro-batches for each update
        mesh=policy.layout.mesh,
        params_like=like_of(policy.params, policy.layout.of(policy.model.declare())),
    )
    state = learner.init(policy.params)
    for first in (0, 256):
        part = batch.take(slice(first, first + 256))
        state, metrics = learner.update(state, part, {"kl_coef": 0.0, "entropy_coef": 0.0})
    assert int(state.updates) == 2
    np.testing.assert_allclose(stepped["value"], metrics["loss"], rtol=1e-5)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params, policy.params)
    assert max(jax.tree.leaves(moved)) > 1e-3
    chex.assert_trees_all_close(stepped["params"], state.params, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.guards(*MODEL, *NATIVE, "jaxrl_llm/training/policy.py", "docs/by_hand.md")
def test_eight_devices_split_weights_and_moments_and_give_the_same(stepped, directory, monkeypatch):
    eight = jax.local_devices()
    monkeypatch.setattr("jax.devices", lambda: eight)
    split = run_listing(directory, optax.sgd(1.0, momentum=0.0))
    split["engine"].close()
    for tree in (split["params"], split["opt_state"][0].trace):
        assert tree["embed"].sharding.spec == PartitionSpec(None, "fsdp")
    chex.assert_trees_all_close(
        jax.device_get(split["params"]), jax.device_get(stepped["params"]), rtol=1e-4, atol=1e-6
    )


def test_the_engine_holds_the_new_weights(stepped):
    """Its next log-probs are those that the new parameters give."""
    policy, engine = stepped["policy"], stepped["engine"]
    answers = policy.sample(engine, ["1+2=", "3+4="], n=2, max_new_tokens=5, seed=9)
    assert {int(v) for c in answers.episodes for v in c.versions} == {1}
    batch = lay_out(answers, samples=2, max_tokens=16)
    new, old = (
        policy.token_stats(params, policy.pack(batch)).logprobs[batch["mask"]]
        for params in (stepped["params"], policy.params)
    )
    sampled = batch["rollout_logprobs"][batch["mask"]]
    np.testing.assert_allclose(sampled, new, atol=1e-5)
    assert np.abs(sampled - old).max() > 1e-3


def test_the_loop_has_thirty_lines_and_is_the_notebooks():
    assert sum(bool(line.strip()) for line in LISTING.splitlines()) <= 30
    notebook = json.loads((ROOT / "notebooks/04_grpo_by_hand.ipynb").read_text(encoding="utf-8"))
    assert LISTING.strip() in ["".join(cell["source"]) for cell in notebook["cells"]]


@pytest.mark.parametrize("remat", [False, True])
def test_a_gradient_in_parts_is_that_of_the_whole(stepped, remat):
    policy, batch = stepped["policy"], stepped["batch"]
    run = jax.checkpoint(policy.token_stats) if remat else policy.token_stats

    @jax.jit
    @jax.grad
    def gradient(params, rows, fields):
        tokens = ppo_clip(
            run(params, rows).logprobs, fields["rollout_logprobs"], fields["advantages"]
        )
        weights = fields.get("weights", token_mean(fields["mask"]))
        return jnp.sum(weights * tokens.loss)

    names = {**stepped, "params": policy.params, "gradient": gradient}
    exec(compile(IN_PARTS, "docs/by_hand.md", "exec"), names)
    whole = gradient(policy.params, policy.pack(batch), batch.fields)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(whole)) > 1e-3
    chex.assert_trees_all_close(names["total"], whole, rtol=1e-4, atol=1e-6)


def test_the_pages_kl_term_has_a_gradient_of_zero_at_the_reference(stepped):
    policy, batch = stepped["policy"], stepped["batch"]
    rows = policy.pack(batch)
    batch = batch.add(ref_logprobs=policy.token_stats(policy.params, rows).logprobs)

    @jax.jit
    @jax.value_and_grad
    def kl(params, batch):
        logprobs = policy.token_stats(params, rows).logprobs
        return jnp.sum(token_mean(batch["mask"]) * k3(logprobs, batch["ref_logprobs"]))

    (value, slope), (moved, _) = (kl(stepped[n], batch.fields) for n in ("reference", "params"))
    assert abs(float(value)) < 1e-6 < 1e-3 < float(moved)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(slope)) < 1e-5


# ------------------------------------------------------------------------------------- token_stats


def some_batch(sizes, width, vocabulary):
    tokens = np.random.default_rng(1).integers(0, vocabulary, (len(sizes), width)).astype(np.int32)
    return Batch(tokens, np.array(sizes, np.int32), {})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(policy, directory, temperature):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch = some_batch([8, 3, 5, 1, 4], 8, policy.model.vocab_size)
    run = jax.jit(functools.partial(policy.token_stats, temperature=temperature))
    ours = run(policy.params, policy.pack(batch))
    assert ours.logprobs.shape == (5, 8)
    for i, size in enumerate(batch.sequence_lengths):
        tokens = torch.tensor(batch.tokens[i : i + 1, :size], dtype=torch.long)
        with torch.no_grad():
            logprobs = torch.log_softmax(theirs(tokens).logits[0] / temperature, dim=-1)
        picked = logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
        entropy = -(logprobs.exp() * logprobs).sum(-1)[:-1].numpy()
        np.testing.assert_allclose(ours.logprobs[i, 1:size], picked, atol=2e-5)
        np.testing.assert_allclose(ours.entropy[i, 1:size], entropy, atol=2e-5)
        assert not np.any(ours.logprobs[i, 0]) and not np.any(ours.logprobs[i, size:])


def test_log_probs_of_new_weights_are_not_traced_again_and_keep_none(policy):
    other = dataclasses.replace(policy, params=jax.tree.map(jnp.copy, policy.params))
    expected, programs = policy.logprobs("12+34="), _token_logprobs._cache_size()
    assert other.logprobs("12+34=") == expected
    assert _token_logprobs._cache_size() == programs
    leaf = weakref.ref(jax.tree.leaves(other.params)[0])
    del other
    gc.collect()
    assert leaf() is None


def test_rows_are_shared_and_split_over_devices(directory, policy):
    """Seven sequences on three devices give what one device gives, in the same order."""
    layout = Layout(make_mesh({"fsdp": 3}, jax.local_devices()[:3]))
    split = load_policy(directory, layout)
    batch = some_batch([2, 9, 3, 4, 8, 1, 5], 9, policy.model.vocab_size)
    rows = split.pack(batch)
    assert int((np.asarray(rows.segment_ids) > 0).sum()) == 32
    assert len(set(np.asarray(rows.row).tolist())) < 7
    assert len(jnp.asarray(rows.tokens).sharding.device_set) == 3
    many = jax.jit(split.token_stats)(split.params, rows)
    one = jax.jit(policy.token_stats)(policy.params, policy.pack(batch))
    chex.assert_trees_all_close(jax.device_get(many), jax.device_get(one), atol=1e-5)


def test_a_batch_that_rows_can_not_be_cut_from_is_refused(directory):
    shared = load_policy(directory, Layout(make_mesh({"context": 2}, jax.local_devices()[:2])))
    with pytest.raises(ValueError, match="got a batch of 5 columns, expected a multiple of 2"):
        shared.pack(some_batch([5], 5, 8))


def test_parameters_can_be_computed_with(policy, directory):
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(policy.params))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(policy.params)}
    waiting = load_policy(directory, policy.layout, on_host=True)
    hosts = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(waiting.params)}
    assert hosts == {"pinned_host"}
    assert hosts != kinds


def test_longrope_of_a_policy_is_chosen_by_its_longest_sequence(directory, tmp_path, one_device):
    """As in a run of that length; sequences that want the other factors are refused."""
    stretched = shutil.copytree(directory, tmp_path / "stretched")
    config = json.loads((stretched / "config.json").read_text())
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [9.0] * 4, "original_max_position_embeddings": 8, "factor": 1.0}
    (stretched / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    short, long = load_policy(stretched), load_policy(stretched, max_tokens=9)
    assert not short.model.spec.rope_scaling.long
    assert long.model.spec.rope_scaling.long
    assert len(long.logprobs(range(9))) == 8
    near, far = (np.array(policy.logprobs(range(8)))[:, 1] for policy in (short, long))
    assert near.tolist() != far.tolist()
    for use in (
        lambda: short.logprobs(range(9)),
        lambda: short.open_engine(9),
        lambda: short.pack(some_batch([9], 9, 8)),
    ):
        with pytest.raises(ValueError, match=r"up to 9 tokens.* at most 8.*max_tokens=9"):
            use()


# ------------------------------------------------------------------------------------------ sample


def test_prompts_may_be_texts_chats_token_ids_or_prompts(policy, engine):
    chat = [{"role": "user", "content": "1+2="}]
    ids = encode_prompt(policy.tokenizer, chat)
    forms = ["1+2=", chat, ids, tuple(ids), Prompt(7, tuple(ids), ground_truth="3")]
    drawn = [policy.sample(engine, [form], n=3, max_new_tokens=5, seed=2) for form in forms]
    assert len(set(drawn[0].texts)) > 1
    assert all(answers.texts == drawn[0].texts for answers in drawn)
    assert [a.prompts[0].messages for a in drawn] == [chat, chat, [], [], []]
    assert drawn[-1].prompts[2].ground_truth == "3"
    with pytest.raises(ValueError, match="prompt 1: expected a text, messages or tok"):
        policy.sample(engine, ["1+2=", []], max_new_tokens=5)


def test_the_same_seed_gives_the_same_answers(policy, engine):
    def texts(**how):
        return policy.sample(engine, ["1+2=", "5+5="], max_new_tokens=5, **how).texts

    assert texts(n=4, seed=1) == texts(n=4, seed=(1,)) != texts(n=4, seed=(1, 2))
    greedy = texts(n=2, temperature=0.0)
    assert greedy[0] == greedy[1] == texts(n=1, top_k=1)[0]


def test_answers_end_in_a_stop_token_that_their_text_leaves_out(policy, engine):
    answers = policy.sample(engine, ["1+2="], n=32, max_new_tokens=8, temperature=2.0)
    stopped = [i for i, c in enumerate(answers.episodes) if c.finish == "stop"]
    assert stopped
    for i in stopped:
        *tokens, last = answers.episodes[i].tokens.tolist()
        assert last in policy.stops
        assert answers.texts[i] == policy.tokenizer.decode(tokens, skip_special_tokens=True)
