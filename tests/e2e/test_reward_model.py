"""PPO with a critic and a given reward model, against transformers' scores of the same answers."""

import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers

from jaxrl_llm import export
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import ModelScores, combine_scores
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.training.experience import with_scores
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/rewards/")

ALONE = ("reward.function=null", "steps=1")


def make_reward_model(base, directory):
    """Write a random sequence classifier over the tokens of a language model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(base)
    config.num_labels = 1
    model = transformers.Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def reward_model(workshop):
    return make_reward_model(workshop.base, workshop.root / "reward_model")


@pytest.fixture(scope="module")
def words(workshop, reward_model):
    """PPO for three steps; the critic begins with the reward model's weights."""
    return (
        "algorithm.advantage=gae_whitened",
        f"critic.path={reward_model}",
        "critic.optim.schedule.value=1e-3",
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


def dumped(result, step):
    return pyarrow.parquet.read_table(
        result.run_dir / f"rollouts/step_{step:06d}.parquet"
    ).to_pylist()


def scores_of_transformers(directory, tokenizer, rows):
    """Score each answer alone, without padding."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32
    )
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = None
    scores = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            json.loads(row["prompt"]), add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            scores.append(model.eval()(torch.tensor([[*prompt, *row["tokens"]]])).logits.item())
    return np.array(scores)


def test_the_scores_are_those_of_transformers(ppo, workshop, reward_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.base)
    for step in (1, 2, 3):
        rows = dumped(ppo, step)
        expected = scores_of_transformers(reward_model, tokenizer, rows)
        assert len(rows) == 32 and expected.std() > 1e-2
        np.testing.assert_allclose([row["score"] for row in rows], expected, atol=1e-4)
        assert ppo.metrics[step]["critic/score/mean"] == pytest.approx(expected.mean(), abs=1e-4)
        assert ppo.metrics[step]["critic/rewards/max"] == pytest.approx(expected.max(), abs=1e-4)


def test_policy_and_critic_learn_from_them(ppo, reward_model, tmp_path):
    for line in ppo.metrics[1:]:
        assert line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0
        assert np.isfinite([line["critic/vf_loss"], line["actor/loss"]]).all()
    out = tmp_path / "critic"
    assert export.main([str(ppo.run_dir), str(out), "--role", "critic", "--step", "1"]) == 0
    critic = transformers.AutoModelForTokenClassification.from_pretrained(out)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model)
    moved = (critic.score.weight - judge.score.weight).abs().max().item()
    assert 0 < moved < 0.01  # two updates of 1e-3 away from the reward model


def test_the_reward_function_reports_and_validates_beside_it(ppo):
    for step, line in enumerate(ppo.metrics):
        (name,) = [name for name in line if name.startswith("val-core/")]
        assert "/acc/" in name and 0 <= line[name] <= 1
        if step:
            extra = [json.loads(row["extra"]) for row in dumped(ppo, step)]
            for name in ("acc", "function"):
                mean = np.mean([reported[name] for reported in extra])
                assert line[f"reward/{name}/mean"] == pytest.approx(mean)
            assert line["reward/errors"] == 0


@pytest.mark.slow
def test_a_run_continues_bit_for_bit(run, ppo, words, workshop, copy_of, same):
    folder = copy_of(ppo)
    for step in ("2", "3"):
        shutil.rmtree(folder / "checkpoints" / step)
    again = run(*words, run_dir=folder).ok()
    assert again.learned == ppo.learned
    same(workshop.params(folder), workshop.params(ppo.run_dir))


@pytest.fixture(scope="module")
def link(workshop, reward_model):
    link = workshop.root / "link"
    link.symlink_to(reward_model)
    return link


@pytest.fixture(scope="module")
def alone(run, link):
    return run(
        f"reward.classifier={link}", *ALONE, "model.dtype=bfloat16", "rollout.dump_every=1"
    ).ok()


@pytest.mark.slow
def test_without_a_reward_function_the_reward_model_validates_too(alone, workshop, reward_model):
    before, step = alone.metrics
    assert [name.split("/")[2] for name in before if name.startswith("val-core/")] == ["reward"]
    counts = ("reward/errors", "reward/unscored")
    assert not [name for name in step if name.startswith("reward/") and name not in counts]
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.base)
    rows = dumped(alone, 1)
    expected = scores_of_transformers(reward_model, tokenizer, rows)  # in float32
    np.testing.assert_allclose([row["score"] for row in rows], expected, atol=0.1 * expected.std())


@pytest.mark.slow
def test_both_scores_can_be_components():
    tokens = np.array([1, 2], np.int32)
    prompt = Prompt(index=0, tokens=(3,), data_source="sums", ground_truth="")
    answer = Completion(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", 2)
    rollouts = Rollouts([prompt] * 3, [Episode.of((3,), answer)] * 3, ["a", "b", "c"])
    scored = [Score(0.25, {"acc": 1.0}, None), Score(-1.0, {}, "timeout"), Score(0.5, {}, None)]
    values = np.array([4.0, 5.0, np.inf], np.float32)
    scores = combine_scores(rollouts, ModelScores(values), scored, on_error=-1.0)
    batch = lay_out(rollouts, samples=3, max_tokens=3)
    batch = with_scores(batch, scores, components=("score", "function", "acc"))
    assert batch["scores"].tolist() == [4.0, 5.0, -1.0]
    expected = [[4.0, 0.25, 1.0], [5.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]
    assert batch["score_components"].tolist() == expected


@pytest.mark.slow
def test_an_answer_without_a_score_of_the_function_has_none_where_the_model_fails_too():
    rollouts = Rollouts([Prompt(0, (3,))] * 2, [], ["a", "b"])
    scored = [Score(np.nan, {}, "unscored: no verdict"), Score(0.5, {}, None)]
    given = ModelScores(np.zeros(2), {0: "too long", 1: "too long"})
    first, second = combine_scores(rollouts, given, scored, on_error=-1.0)
    assert first == scored[0] and second.score == -1.0


@pytest.mark.slow
def test_a_greedy_baseline_is_scored_by_it(run, reward_model):
    """ReMax's advantage is a difference of two scores of the same kind."""
    words = (f"reward.classifier={reward_model}", *ALONE)
    line = run(*words, "algorithm.advantage=remax", "validation.before=false").ok().metrics[0]
    spread = line["critic/score/max"] - line["critic/score/min"]
    assert 0 < abs(line["critic/advantages/max"]) <= 2 * spread


@pytest.mark.slow
def test_packing_and_devices_make_no_difference(run, reward_model):
    words = (f"reward.classifier={reward_model}", *ALONE)
    lines = [
        run(*words, f"batch.max_tokens_per_device={n}", devices=devices).ok().metrics[1]
        for n, devices in ((16, 1), (256, 1), (256, 4))
    ]
    for statistic in ("mean", "max", "min"):
        scores = [line[f"critic/score/{statistic}"] for line in lines]
        np.testing.assert_allclose(scores, scores[0], atol=1e-5)


# -------------------------------------------------------------------------------------- bad input


def changed(source, directory, **changes):
    """Copy a model, with other keys in its config."""
    shutil.copytree(source, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.slow
def test_scores_that_are_not_finite_are_failures(run, reward_model, tmp_path):
    broken = tmp_path / "broken"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model)
    with torch.no_grad():
        model.score.weight.fill_(torch.nan)
    model.save_pretrained(broken)
    words = (f"reward.classifier={broken}", "steps=1", "validation.before=false")
    line = run(*words, "reward.on_error=-0.5").ok().metrics[0]
    assert line["reward/errors"] == 32
    assert line["critic/score/min"] == line["critic/score/max"] == -0.5
    result = run(*words, "reward.on_error=null")
    assert result.status == 1
    assert "reward.classifier failed on row " in result.err and "gave nan" in result.err


@pytest.mark.slow
def test_models_that_can_not_score_are_refused(run, workshop, reward_model, tmp_path):
    short = changed(reward_model, tmp_path / "short", max_position_embeddings=15)
    labels = {"num_labels": 2, "id2label": {"0": "a", "1": "b"}}
    labelled = changed(reward_model, tmp_path / "labelled", **labels)
    small = changed(reward_model, tmp_path / "small", vocab_size=16)
    for path, text in {
        workshop.base: "expected a …ForSequenceClassification",
        short: "has 15 positions, but the longest sequence is",
        labelled: "with 2 labels; supported is 1",
        small: "has vocab_size=16, expected the policy's",
        tmp_path / "nowhere": "no directory",
    }.items():
        result = run(f"reward.classifier={path}")
        assert result.status == 2
        assert "reward.classifier: " in result.err and text in result.err


def test_another_tokenizer_is_refused(run, workshop, reward_model, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.base)
    other = tmp_path / "other"
    shutil.copytree(reward_model, other)
    path = other / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tree))
    result = run(f"reward.classifier={other}", "reward.render=ids")
    assert result.status == 2
    assert "has another tokenizer: " in result.err
    assert str(tokenizer.get_vocab()["1"]) in result.err


TEMPLATE = (
    "{%- for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] }}"
    "{{ '<|end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|> ' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def foreign(workshop, reward_model):
    """A reward model with the tokens of the letters moved by one, and another chat template."""
    folder = workshop.root / "foreign"
    shutil.copytree(reward_model, folder)
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    names = [name for name, number in vocabulary.items() if number < 256]
    numbers = [vocabulary[name] for name in names]
    vocabulary |= dict(zip(names, numbers[1:] + numbers[:1], strict=True))
    path.write_text(json.dumps(tree))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("render", "most"), [("auto", 13), ("answer", 12)])
def test_another_tokenizer_reads_the_text(run, foreign, caplog, render, most):
    """As transformers renders and scores it, on the last token of that."""
    words = (f"reward.classifier={foreign}", f"reward.render={render}", *ALONE)
    keys = ("rollout.dump_every=1", "validation.before=false", f"reward.max_tokens={most}")
    result = run(*words, *keys, "reward.on_error=-7").ok()
    tokenizer = transformers.AutoTokenizer.from_pretrained(foreign)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(foreign).eval()
    model.config.pad_token_id = None
    failed = 0
    for row in dumped(result, 1):
        chat, text = json.loads(row["prompt"]), row["answer"]
        if render == "auto":
            chat = [*chat, {"role": "assistant", "content": text}]
            ids = tokenizer.apply_chat_template(chat, return_dict=False)
            assert tokenizer.decode(ids).endswith("<|end|>\n")
        else:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(ids) > most:
            failed += 1
            assert row["score"] == -7
            assert f"more than its {most}: raise reward.max_tokens" in row["error"]
            continue
        with torch.no_grad():
            assert row["score"] == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-4)
    assert result.metrics[0]["reward/errors"] == failed
    assert 0 < failed < 32
    assert f"reward.render={'chat' if render == 'auto' else 'answer'}" in caplog.text


def test_contradictions_are_refused(run, reward_model):
    for words, text in {
        ("reward.function=null",): "nothing scores the answers",
        (
            "reward.function=null",
            f"reward.classifier={reward_model}",
            "reward.components=[acc]",
        ): "reward.components are what a reward function reports",
        (f"reward.classifier={reward_model}", "reward.step_rewards=true"): "scores whole answers",
        (f"reward.classifier={reward_model}", "reward.max_tokens=99"): "remove reward.max_tokens",
    }.items():
        result = run(*words)
        assert result.status == 2
        assert text in result.err


def test_another_reward_model_can_not_continue_a_run(
    run, ppo, words, copy_of, reward_model, tmp_path
):
    other = changed(reward_model, tmp_path / "other")
    result = run(*words, f"reward.classifier={other}", "steps=4", run_dir=copy_of(ppo))
    assert result.status == 2
    assert "reward.classifier: " in result.err and "can't be continued" in result.err


def test_a_reward_model_changed_in_place_can_not_continue_a_run(
    run, alone, link, copy_of, reward_model, tmp_path
):
    other = tmp_path / "other"
    shutil.copytree(reward_model, other)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model)
    with torch.no_grad():
        model.score.weight.mul_(2)
    model.save_pretrained(other)
    words = (f"reward.classifier={link}", *ALONE, "model.dtype=bfloat16", "rollout.dump_every=1")
    folder = copy_of(alone)
    assert run(*words, run_dir=folder).status == 0
    link.unlink()
    link.symlink_to(other)
    result = run(*words, "steps=9", run_dir=folder)
    link.unlink()
    link.symlink_to(reward_model)
    assert result.status == 2
    assert "reward.classifier: its contents are not those" in result.err
