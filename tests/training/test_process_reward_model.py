"""Process reward models: updates as torch makes them, steps and scores, and what they read."""

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from numpy.testing import assert_allclose

from jaxrl_llm.algorithms.advantages import reward_to_go
from jaxrl_llm.algorithms.preferences import step_cross_entropy
from jaxrl_llm.config.sections import RewardConfig
from jaxrl_llm.data.chat import ChatTemplate, load_tokenizer
from jaxrl_llm.data.dataset import (
    Preference,
    Prompt,
    last_tokens,
    preference_batch,
    split_steps,
    tokenize_preferences,
)
from jaxrl_llm.data.packing import row_shape
from jaxrl_llm.data.rows import normalize_preference_row
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.rewards.scoring import ModelScores, combine_scores
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.sharding.layout import batch_shards
from jaxrl_llm.training.experience import with_scores
from jaxrl_llm.training.reward_model import (
    Unreadable,
    answer_input,
    chat_input,
    policy_tokens,
    scorer_batch,
    step_scores,
    steps_input,
)
from jaxrl_llm.training.update import StepObjective
from tests.data.real_templates import build
from tests.training.test_preference import VOCABULARY, torch_model
from tests.updates import assert_same, learn, mesh_of, place, updated

WIDTH, ROWS = 20, 6


def make_items():
    """Ragged answers of one to four steps, with soft labels among the others."""
    rng = np.random.default_rng(3)
    items = []
    for i in range(ROWS):
        sizes = rng.integers(1, 4, rng.integers(1, 5))
        tokens = tuple(rng.integers(1, VOCABULARY, sizes.sum()).tolist())
        ends = tuple((np.cumsum(sizes) - 1).tolist())
        labels = tuple(rng.choice([0.0, 0.3, 1.0], len(sizes)).tolist())
        prompt = tuple(rng.integers(1, VOCABULARY, 2 + i % 3).tolist())
        items.append(Preference(prompt, (tokens,), {}, ends, labels))
    return items


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process") / "model"
    theirs = torch_model(folder, transformers.Qwen3ForTokenClassification, 4)
    spec = read_spec(folder)
    return SimpleNamespace(torch=theirs, spec=spec, params=load_params(folder, spec))


def update(model, items, *, tokens=4 * WIDTH, **sizes):
    """Return the gradient and metrics of an update."""
    mesh = mesh_of(**sizes)
    placed, ranks = place(model.params, model.spec, mesh), batch_shards(mesh)
    shape = row_shape(tokens, WIDTH, sequences=ROWS, multiple_of=ranks)
    objective = StepObjective(loss=step_cross_entropy)
    learner = learn(model.spec, placed, objective, shape, mesh=mesh)
    share = np.full(len(items), 1 / len(items), np.float32)
    return updated(learner, placed, preference_batch(items, WIDTH).add(answer_share=share))[:2]


def test_loss_and_gradient_are_those_of_torch_and_the_same_on_a_mesh(model):
    """Each answer alone and unpadded; the mean is over all steps."""
    gradient, metrics = update(model, make_items())
    items, theirs = make_items(), model.torch
    theirs.zero_grad()
    logits, labels, answers = [], [], []
    for item in items:
        out = theirs(torch.tensor([item.tokens])).logits[0, :, 0]
        z = out[[len(item.prompt) + end for end in item.step_ends]]
        logits.append(z)
        labels.append(torch.tensor(item.step_labels))
        judged, true = (z > 0).tolist(), [label > 0.5 for label in item.step_labels]
        answers.append([*judged, False].index(False) == [*true, False].index(False))
    z, y = torch.cat(logits), torch.cat(labels)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y)
    loss.backward()
    assert 0 < np.mean(answers) < 1
    assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
    assert_allclose(metrics["rewards/steps"], torch.sigmoid(z).mean().item(), rtol=1e-5)
    assert_allclose(metrics["accuracy/steps"], ((z > 0) == (y > 0.5)).float().mean(), rtol=1e-6)
    assert_allclose(metrics["accuracy/answers"], np.mean(answers), rtol=1e-6)
    body = theirs.model
    arrays = {"embed": body.embed_tokens.weight, "final_norm": body.norm.weight}
    arrays |= {"score_bias": theirs.score.bias}
    for name, weight in arrays.items():
        value = weight.grad.numpy()
        assert_allclose(gradient[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max())
    assert_allclose(gradient["score"], theirs.score.weight.grad.numpy().T, rtol=1e-4, atol=1e-6)
    on = {"fsdp": 2, "context": 2, "tensor": 2}
    again, more = update(model, make_items()[::-1], tokens=2 * WIDTH, **on)
    assert_same(again, gradient)
    for name in ("loss", "accuracy/steps", "accuracy/answers", "rewards/steps"):
        assert_allclose(more[name], metrics[name], rtol=2e-5)


TOKENIZER = load_tokenizer("configs/quickstart")


def tokenize(row, **keywords):
    rows = [normalize_preference_row(row)]
    return tokenize_preferences(rows, TOKENIZER, max_tokens=30, **keywords)[0][0]


def test_a_step_is_scored_on_its_separators_last_token():
    row = {"prompt": "q", "completions": ["ab", "c"], "labels": [True, 0.25]}
    item = tokenize(row, step_separator="\n\n")
    assert TOKENIZER.decode(item.tokens) == "<|user|>q<|end|><|assistant|>ab\n\nc\n\n"
    batch = preference_batch([item], 12)
    assert np.flatnonzero(batch["mask"][0]).tolist() == [7, 10]
    assert batch["step_labels"][0, [7, 10]].tolist() == [1.0, 0.25]
    assert batch["step_labels"].sum() == 1.25


def test_a_wrong_row_is_refused():
    good = {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}
    for change, named in (
        ({"completions": []}, "completions"),
        ({"completions": ["a", " "]}, r"completions\[1\]"),
        ({"labels": [True]}, "labels"),
        ({"labels": None}, "labels"),
        ({"labels": [1, 1.5]}, r"labels\[1\]"),
        ({"labels": [1, "x"]}, r"labels\[1\]"),
        ({"prompt": ""}, "prompt"),
        ({"completions": ["a", "b\nc"]}, "data.step_separator"),
    ):
        with pytest.raises(ValueError, match=named):
            tokenize(good | change)
    mixed = [good, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    with pytest.raises(ValueError, match="row 1"):
        tokenize_preferences([*map(normalize_preference_row, mixed)], TOKENIZER, max_tokens=30)


def test_steps_end_at_the_tokens_that_were_drawn():
    for pieces, places in (
        (["1+1", "=2\n\n", "2*2", "=4"], [1, 3]),  # the last token also where nothing ends it
        (["a", "\n", "\nb\n\n", "c", "\n\n"], [2, 2, 4]),  # two steps end in one token
        (["a\n\n", "b", "\n\n\n", ""], [0, 3]),  # a stop token, which is no text
        (["\n\n", "a"], [1]),
        ([""], [0]),
    ):

        def decode(ids, pieces=pieces):
            return "".join(pieces[i] for i in ids)

        ends = [end for _, end in split_steps("".join(pieces), "\n\n")]
        assert last_tokens(decode, range(len(pieces)), ends) == places


def rollouts_of(count, drawn):
    prompt = Prompt(index=0, tokens=(3,))
    zeros = np.zeros(drawn)
    answer = Completion(np.arange(drawn), zeros.astype(np.float32), zeros.astype(int), "stop", 2)
    return Rollouts([prompt] * count, [Episode.of((3,), answer)] * count, ["a"] * count)


def test_rewards_of_steps_lie_on_their_last_tokens():
    rollouts = rollouts_of(3, 4)
    steps = [((1, 0.5), (3, 0.25)), ((3, 0.75),), ()]
    given = ModelScores(np.array([0.25, 0.75, 9.0]), {2: "too long"}, steps, rewards_steps=True)
    scores = combine_scores(rollouts, given, None, on_error=-1.0)
    assert scores[2].error == "invalid: too long" and scores[0].extra["steps"] == 2
    batch = with_scores(lay_out(rollouts, samples=3, max_tokens=6), scores)
    assert batch["rewards"].tolist() == [
        [0, 0, 0.5, 0, 0.25, 0],
        [0, 0, 0, 0, 0.75, 0],
        [0, 0, 0, 0, -1, 0],
    ]
    assert batch["scores"].tolist() == [0.75, 0.75, -1.0]
    assert batch["raw_scores"].tolist() == [0.25, 0.75, -1.0]
    returns = reward_to_go(*(jnp.asarray(batch[n]) for n in ("rewards", "mask")), gamma=1.0)
    assert returns[0].tolist() == [0, 0.75, 0.75, 0.25, 0.25, 0]
    whole = combine_scores(rollouts, given._replace(rewards_steps=False), None, on_error=-1.0)
    batch = with_scores(lay_out(rollouts, samples=3, max_tokens=6), whole)
    assert batch["rewards"][0].tolist() == [0, 0, 0, 0, 0.25, 0]


def test_a_score_of_an_answer_from_those_of_its_steps():
    shares = np.array([1 - 1e-9, 0.2, 0.4])
    logits = np.log(shares / (1 - shares)).astype(np.float32)
    for name, value in {"min": 0.2, "product": 0.08, "last": 0.4, "mean": 1.6 / 3}.items():
        reward = RewardConfig(classifier="some", aggregate=name)
        scores = step_scores([logits], [(0, 1, 2)], {}, reward)
        assert_allclose(scores.values, [value], rtol=1e-6)


# ---------------------------------------------------------- what a reward model is given to read

TEMPLATE = ChatTemplate(TOKENIZER)
USER = {"role": "user", "content": "q"}
TOOL = {"role": "tool", "content": "7"}


def said(text):
    return {"role": "assistant", "content": text}


def chat_of(messages=(), *, prompt=(USER,), tools=()):
    tokens = np.array([5, 6], np.int32)
    piece = Completion(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "")
    episode = Episode((1, 2), (piece,), "stop", 6, messages=tuple(messages))
    given = Prompt(index=0, tokens=(1, 2), messages=list(prompt), tools=list(tools))
    return Rollouts([given], [episode], ["an answer"])


def test_a_plain_answer_is_the_assistants_message():
    rollouts = chat_of()
    read = answer_input(TEMPLATE, rollouts, 0)
    assert TOKENIZER.decode(read.tokens) == "<|user|>q<|end|><|assistant|>an answer<|end|>"
    assert policy_tokens(rollouts, 0).tokens == (1, 2, 5, 6)


def test_an_episode_is_the_chat_that_it_was():
    """What an agent gave as tokens is read as text."""
    chat = [USER | {"as_tokens": True}, said("call"), TOOL, said("end")]
    read = answer_input(TEMPLATE, chat_of(chat), 0)
    written = "<|user|>q<|end|><|assistant|>call<|end|><|tool|>7<|end|><|assistant|>end<|end|>"
    assert TOKENIZER.decode(read.tokens) == written


def test_the_tools_of_a_row_are_read_or_the_answer_is_not():
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    rollouts = chat_of(tools=[tool])
    shows, _ = build("mistral")
    steps = partial(steps_input, separator="\n", splits_at="\n", decode=shows.decode)
    for encode in (answer_input, chat_input, steps):
        assert "look_up" in shows.decode(encode(ChatTemplate(shows), rollouts, 0).tokens)
    with pytest.raises(Unreadable, match="tools"):
        answer_input(TEMPLATE, rollouts, 0)


def test_reasoning_that_a_reward_models_template_has_no_place_for_stands_in_the_text():
    chat = [USER, said("4") | {"reasoning_content": "2+2"}]
    for encode in (answer_input, chat_input):
        text = TOKENIZER.decode(encode(TEMPLATE, chat_of(chat), 0).tokens)
        assert text.endswith("<|assistant|><think>\n2+2\n</think>\n\n4<|end|>")


def test_what_can_not_be_read_is_a_failure():
    """A chat that ends with a tool's message, and a prompt that has tokens alone."""
    for rollouts in (chat_of([USER, said("call"), TOOL]), chat_of(prompt=())):
        with pytest.raises(Unreadable):
            answer_input(TEMPLATE, rollouts, 0)
        batch, inputs, failures = scorer_batch(rollouts, partial(answer_input, TEMPLATE), width=20)
        assert list(failures) == [0] and inputs == [None]
        assert batch.sequence_lengths.tolist() == [1]


def test_what_is_too_long_is_a_failure_and_not_cut():
    encode = partial(answer_input, TEMPLATE)
    assert scorer_batch(chat_of(), encode, width=14)[-1] == {}
    (told,) = scorer_batch(chat_of(), encode, width=13)[-1].values()
    assert "reward.max_tokens" in told
