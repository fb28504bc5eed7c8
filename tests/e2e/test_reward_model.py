"""PPO with a critic and a given reward model, against transformers' scores of the same answers."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.comparing import encoded, exported, loaded, parameters, random_model, same
from tests.guarded import MODEL, UPDATE
from tests.training.tokenizers import byte_level

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/rewards/")

ALONE = ("reward.function=null", "steps=1", "rollout.dump_every=1")


@pytest.fixture(scope="module")
def reward_model(workshop):
    """A random sequence classifier over the policy's tokens."""
    folder, kind = workshop.root / "reward_model", "Qwen3ForSequenceClassification"
    return random_model(folder, workshop.base, kind=kind, num_labels=1, initializer_range=0.1)


@pytest.fixture(scope="module")
def words(workshop, reward_model):
    """PPO for three steps; the critic begins with the reward model's weights."""
    return (
        "algorithm.advantage=gae_whitened",
        f"critic.path={reward_model}",
        "critic.optim.schedule.value=1e-3",
        "critic.warmup_steps=1",
        f"reward.classifier={reward_model}",
        f"reward.function={workshop.mine('reward_with_more')}",
        "rollout.dump_every=1",
        "validation.every=1",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "steps=3",
    )


@pytest.fixture(scope="module")
def ppo(run, words):
    return run(*words).ok()


def scores_of_transformers(directory, rows):
    """Score each answer alone, without padding."""
    kind, scores = "SequenceClassification", []
    for row in rows:
        ids = [*encoded(directory, json.loads(row["prompt"]), kind=kind), *row["tokens"]]
        with torch.no_grad():
            scores.append(loaded(directory, kind)[1](torch.tensor([ids])).logits.item())
    return np.array(scores)


def test_the_scores_are_those_of_transformers(ppo, reward_model):
    for step in (1, 3):
        rows, line = ppo.rows(step), ppo.metrics[step]
        expected = scores_of_transformers(reward_model, rows)
        assert len(rows) == 32 and expected.std() > 1e-2
        np.testing.assert_allclose([row["score"] for row in rows], expected, atol=1e-4)
        assert line["critic/score/mean"] == pytest.approx(expected.mean(), abs=1e-4)
        assert line["critic/rewards/max"] == pytest.approx(expected.max(), abs=1e-4)


def test_the_critic_warms_up_before_the_policy_learns(ppo, workshop, reward_model, tmp_path):
    _, first, *rest = ppo.metrics
    assert first["critic/grad_norm"] > 0 and "actor/grad_norm" not in first
    same(workshop.params(ppo.run_dir, 1), parameters(workshop.base))
    for line in rest:
        assert line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0
        assert np.isfinite([line["critic/vf_loss"], line["actor/loss"]]).all()
    out = exported(ppo.run_dir, tmp_path / "critic", "--role", "critic", "--step", "1")
    critic = transformers.AutoModelForTokenClassification.from_pretrained(out)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model)
    moved = (critic.score.weight - judge.score.weight).abs().max().item()
    assert 0 < moved < 0.01  # two updates of 1e-3 away from the reward model


def test_the_reward_function_reports_and_validates_beside_it(ppo):
    for step, line in enumerate(ppo.metrics):
        (name,) = [name for name in line if name.startswith("val-core/")]
        assert "/acc/" in name and 0 <= line[name] <= 1
        if step:
            mean = np.mean([json.loads(row["extra"])["acc"] for row in ppo.rows(step)])
            assert line["reward/acc/mean"] == pytest.approx(mean)


@pytest.mark.slow
def test_a_run_continues_bit_for_bit(run, ppo, words, workshop, copy_of):
    folder = copy_of(ppo)
    for step in ("2", "3"):
        shutil.rmtree(folder / "checkpoints" / step)
    again = run(*words, run_dir=folder).ok()
    assert again.learned == ppo.learned
    for changes in ({}, {"role": "critic", "value_head": True}):
        same(*(workshop.params(x, 3, **changes) for x in (folder, ppo.run_dir)))


@pytest.mark.slow
@pytest.mark.parametrize(("render", "most"), [("auto", 25), ("answer", 24)])
def test_another_tokenizer_reads_the_text(run, workshop, render, most):
    """As transformers renders and scores it, on the last token of that."""
    foreign, kind = workshop.root / f"foreign_{render}", "SequenceClassification"
    sizes = {"num_labels": 1, "initializer_range": 0.1, "vocab_size": 304}
    random_model(foreign, workshop.base, kind=f"Qwen3For{kind}", **sizes)
    byte_level(300).save_pretrained(foreign)
    words = (f"reward.classifier={foreign}", f"reward.render={render}", *ALONE)
    keys = ("validation.before=false", f"reward.max_tokens={most}", "reward.on_error=-7")
    result, failed = run(*words, *keys).ok(), 0
    tokenizer, model = loaded(foreign, kind)
    for row in result.rows(1):
        chat, text = json.loads(row["prompt"]), row["answer"]
        if render == "auto":
            chat = [*chat, {"role": "assistant", "content": text}]
            ids = tokenizer.apply_chat_template(chat, return_dict=False)
        else:
            ids = encoded(foreign, chat, kind=kind)
            ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(ids) > most:
            failed += 1
            assert row["score"] == -7 and "reward.max_tokens" in row["error"]
            continue
        with torch.no_grad():
            assert row["score"] == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-4)
    assert 0 < failed == result.metrics[0]["reward/errors"] < 32


@pytest.mark.slow
def test_scores_of_steps_are_rewards(run, workshop):
    """Of a process reward model, at the last token of each step, as transformers says."""
    kind, base = "TokenClassification", workshop.base
    random = {"kind": f"Qwen3For{kind}", "num_labels": 1, "initializer_range": 0.1}
    folder = random_model(workshop.root / "process_reward_model", base, **random)
    result = run(
        *(f"reward.classifier={folder}", "reward.function=null", "rollout.dump_every=1"),
        *("reward.step_separator='1'", "reward.aggregate=product", "reward.step_rewards=true"),
        *("rollout.temperature=3.0", "reward.max_tokens=40"),  # answers with several digits 1
        *("algorithm.advantage=reinforce_plus_plus", "steps=2"),
    ).ok()
    tokenizer, model = loaded(folder, kind)
    counts = []
    for line in result.metrics[1:]:
        rows = result.rows(line["step"])
        for row in rows:
            ids, ends = encoded(folder, json.loads(row["prompt"]), kind=kind), []
            for step in [part for part in row["answer"].split("1") if part.strip()] or [""]:
                ids += tokenizer(f"{step}1", add_special_tokens=False)["input_ids"]
                ends.append(len(ids) - 1)
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0, ends, 0].sigmoid().numpy()
            np.testing.assert_allclose(json.loads(row["extra"])["step_scores"], scores, atol=2e-4)
            assert row["score"] == pytest.approx(np.prod(scores), abs=1e-4)
            counts.append(len(ends))
        sums = [sum(json.loads(row["extra"])["step_scores"]) for row in rows]
        assert line["critic/rewards/mean"] == pytest.approx(np.mean(sums), abs=1e-3)
        assert line["reward/steps/mean"] == pytest.approx(np.mean(counts[-len(rows) :]))
        assert line["reward/errors"] == 0 and line["actor/grad_norm"] > 0
    assert {1, 2} <= {*counts}, counts
