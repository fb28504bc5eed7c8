"""A policy for loops of one's own: what it says of tokens, what it samples, and a step by hand."""

import functools
import json
import re
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.rollout.rollouts import lay_out
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.training.load_model import like_of
from jaxrl_llm.training.policy import load_policy
from jaxrl_llm.training.update import Learner, PolicyObjective
from tests.specs import draw, make_batch

ROOT = Path(__file__).resolve().parents[2]
LISTING, IN_PARTS = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs/by_hand.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A Hugging Face directory with random weights."""
    folder = tmp_path_factory.mktemp("policy")
    source = Path(shutil.copytree(ROOT / "configs/quickstart", folder / "source"))
    shape = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(shape | SMALL))
    spec = read_spec(source)
    save_params(folder / "model", draw(spec, scale=0.3), spec, source=source, dtype=jnp.float32)
    return str(folder / "model")


@pytest.fixture(scope="module")
def policy(directory, one_device):
    return load_policy(directory)


@pytest.fixture(scope="module")
def engine(policy):
    engine = policy.open_engine(max_tokens=16, max_running_sequences=16)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def stepped(directory, one_device):
    """The names that the page's loop leaves after one step."""
    names = {
        "model": directory,
        "optimizer": optax.sgd(1.0),
        "seed": 3,
        "prompt_batches": [[f"{a}+{b}=" for a in range(8) for b in range(8)]],
        "score": lambda prompt, text: float(len(text)) + 0.1 * prompt.tokens[0],
    }
    exec(compile(LISTING, "docs/by_hand.md", "exec"), names)
    yield names
    names["engine"].close()


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


def test_the_engine_holds_the_new_weights(stepped):
    """Its next log-probs are those that the new parameters give."""
    policy, engine = stepped["policy"], stepped["engine"]
    answers = policy.sample(engine, ["1+2=", "3+4="], n=2, max_new_tokens=5, seed=9)
    assert {int(v) for c in answers.episodes for v in c.versions} == {1}
    batch, run = lay_out(answers, samples=2, max_tokens=16), jax.jit(policy.token_stats)
    new, old = (
        np.asarray(run(params, policy.pack(batch)).logprobs)[batch["mask"]]
        for params in (stepped["params"], policy.params)
    )
    sampled = batch["rollout_logprobs"][batch["mask"]]
    np.testing.assert_allclose(sampled, new, atol=1e-5)
    assert np.abs(sampled - old).max() > 1e-3


def test_a_gradient_in_parts_is_that_of_the_whole(stepped):
    """With rematerialisation, too: the whole's is the page's update, without."""
    policy, batch = stepped["policy"], stepped["batch"]

    def gradient(run):
        @jax.jit
        @jax.grad
        def of(params, rows, fields):
            logprobs = run(params, rows).logprobs
            tokens = ppo_clip(logprobs, fields["rollout_logprobs"], fields["advantages"])
            return jnp.sum(fields["weights"] * tokens.loss)

        return of

    recomputed = gradient(jax.checkpoint(policy.token_stats))
    names = {**stepped, "params": policy.params, "gradient": recomputed}
    exec(compile(IN_PARTS, "docs/by_hand.md", "exec"), names)
    whole = batch.add(weights=token_mean(jnp.asarray(batch["mask"])))
    expected = gradient(policy.token_stats)(policy.params, policy.pack(whole), whole.fields)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-3
    chex.assert_trees_all_close(names["total"], expected, rtol=1e-4, atol=1e-6)


def test_log_probs_are_those_of_transformers(policy, directory):
    temperature = 0.7
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch = make_batch([8, 3, 5, 1, 4], 8, policy.model.vocab_size)
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


def test_rows_are_shared_and_split_over_devices(directory, policy):
    """Seven sequences on three devices give what one device gives, in the same order."""
    split = load_policy(directory, Layout(make_mesh({"fsdp": 3}, jax.local_devices()[:3])))
    batch = make_batch([2, 9, 3, 4, 8, 1, 5], 9, policy.model.vocab_size)
    rows = split.pack(batch)
    assert len(set(np.asarray(rows.row).tolist())) < 7
    assert len(jnp.asarray(rows.tokens).sharding.device_set) == 3
    many = jax.jit(split.token_stats)(split.params, rows)
    one = jax.jit(policy.token_stats)(policy.params, policy.pack(batch))
    chex.assert_trees_all_close(jax.device_get(many), jax.device_get(one), atol=1e-5)
    shared = load_policy(directory, Layout(make_mesh({"context": 2}, jax.local_devices()[:2])))
    with pytest.raises(ValueError, match="columns"):
        shared.pack(make_batch([5], 5, 8))


def test_prompts_may_be_texts_chats_token_ids_or_prompts(policy, engine):
    chat = [{"role": "user", "content": "1+2="}]
    ids = encode_prompt(policy.tokenizer, chat)
    forms = ["1+2=", chat, ids, Prompt(7, tuple(ids), ground_truth="3")]
    drawn = [policy.sample(engine, [form], n=3, max_new_tokens=5, seed=2) for form in forms]
    assert len(set(drawn[0].texts)) > 1
    assert all(answers.texts == drawn[0].texts for answers in drawn)
    assert [a.prompts[0].messages for a in drawn] == [chat, chat, [], []]
    assert drawn[-1].prompts[2].ground_truth == "3"
    with pytest.raises(ValueError, match="1"):
        policy.sample(engine, ["1+2=", []], max_new_tokens=5)


def test_seeds_decide_and_answers_end_in_a_stop_token_that_their_text_leaves_out(policy, engine):
    def texts(**how):
        return policy.sample(engine, ["1+2=", "5+5="], max_new_tokens=5, **how).texts

    assert texts(n=4, seed=1) == texts(n=4, seed=(1,)) != texts(n=4, seed=(1, 2))
    assert texts(n=1, temperature=0.0) == texts(n=1, top_k=1)
    answers = policy.sample(engine, ["1+2="], n=128, max_new_tokens=5, temperature=10.0)
    stopped = [i for i, c in enumerate(answers.episodes) if c.finish == "stop"]
    assert stopped
    for i in stopped:
        *tokens, last = answers.episodes[i].tokens.tolist()
        assert last in policy.stops
        assert answers.texts[i] == policy.tokenizer.decode(tokens, skip_special_tokens=True)
