"""Distillation in whole runs, against what transformers says of the same tokens."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.training.teachers import Teacher, TeacherError, Teachers, check_teacher_sources
from jaxrl_llm.types import Batch
from tests.e2e.comparing import distributions, exported, loaded, parameters, random_model, same
from tests.guarded import MODEL, RUN, UPDATE
from tests.listening import serving_model
from tests.refusals import refuses

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, *RUN, "jaxrl_llm/serving/", "jaxrl_llm/data/")

SUM = "algorithm.advantage=[grpo, {fn: reverse_kl, weight: 0.5}]"
REVERSE = ("algorithm.advantage=reverse_kl", "rollout.dump_every=1")


@pytest.fixture(scope="module")
def teacher(workshop):
    """A wider random model with the policy's tokens, and some that are never used."""
    size = read_spec(workshop.base).vocab_size
    root, wide = workshop.root, {"hidden_size": 48, "vocab_size": size + 8}
    return random_model(root / "teacher", workshop.base, **wide)


@pytest.fixture(scope="module")
def taught(run, teacher):
    return run(SUM, f"teacher.path={teacher}", "rollout.dump_every=1").ok()


def reverse_kl(folder, row, content=None):
    """Return what reverse KL adds to the advantages of an answer's tokens."""
    chat, answer = json.loads(row["prompt"]), row["tokens"]
    chat = chat if content is None else [{"role": "user", "content": content}]
    logprobs = distributions(folder, chat, answer)[np.arange(len(answer)), answer]
    return logprobs - np.array(row["rollout_logprobs"])


def test_advantages_are_those_of_the_task_and_of_the_teacher(taught, teacher):
    for step in (1, 2):
        rows, apart = taught.rows(step), []
        for group in np.arange(len(rows)).reshape(-1, 4):
            scores = np.array([rows[i]["score"] for i in group])
            spread = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
            for i, task in zip(group, spread, strict=True):
                apart.append(reverse_kl(teacher, rows[i]))
                expected = task + 0.5 * apart[-1]
                np.testing.assert_allclose(rows[i]["advantages"], expected, atol=1e-4)
        assert np.abs(np.concatenate(apart)).min() > 1e-3
        line, mean = taught.metrics[step], -np.concatenate(apart).mean()
        assert line["teacher/reverse_kl"] == pytest.approx(mean, abs=1e-4)
        assert line["timing_s/teacher"] > 0


def config_of(**tree):
    needed = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    return from_tree(TrainConfig, {**needed, **tree})


def teach(value, vocab_size=9):
    def infer(params, batch):
        return {"logprobs": np.where(batch["mask"], value, 0.0)}

    return Teacher(path="t", params={}, infer=infer, vocab_size=vocab_size)


def test_each_answer_has_the_teacher_of_its_source():
    mask = np.array([[False, True], [True, True], [False, False]])
    fields = {"mask": mask, "rollout_logprobs": -1.0 * mask}
    batch = Batch(np.full((3, 2), 8), np.full(3, 2), fields)
    prompts = [Prompt(0, (3,), data_source=name) for name in ("a", "b", "a")]
    answer = Completion(np.array([5]), np.zeros(1, np.float32), np.zeros(1, int), "length")
    rollouts = Rollouts(prompts, [Episode.of((3,), answer)] * 3, ["a", "b", "c"])
    teachers = Teachers({"a": teach(-2.0), "b": teach(-4.0)})
    taught, metrics = teachers.add_logprobs(batch, rollouts)
    assert taught["teacher_logprobs"].tolist() == [[0, -2], [-4, -4], [0, 0]]
    expected = {"teacher/reverse_kl/a": 1, "teacher/reverse_kl/b": 3, "teacher/reverse_kl": 7 / 3}
    assert metrics == pytest.approx(expected | {"teacher/left_out": 0})
    for wrong in (teach(0.0, vocab_size=8), teach(math.nan)):
        with pytest.raises(TeacherError):
            Teachers({"*": wrong}).add_logprobs(batch, rollouts)


def test_every_source_needs_a_teacher_and_nothing_is_said_of_teachers_that_there_are_not():
    two = {"math": "a", "code": "b"}
    check_teacher_sources(config_of(teacher={"path": two, "tokenizer": {"code": "b"}}), two)
    for teacher, sources, key in (
        ({"path": two}, ["math", "maths"], "teacher.path"),
        ({"path": two, "tokenizer": {"maths": "a"}}, two, "teacher.tokenizer"),
        ({"url": "u", "model": {"math": "a"}}, two, "teacher.model"),
    ):
        with refuses(key):
            check_teacher_sources(config_of(teacher=teacher), sources)


def both(result, teacher, workshop):
    """The distributions of policy and teacher at the first step's tokens, without padding."""
    known = max(loaded(workshop.base)[0].get_vocab().values()) + 1
    rows = [(json.loads(row["prompt"]), row["tokens"]) for row in result.rows(1)]
    for folder in (workshop.base, teacher):
        part = np.concatenate([distributions(folder, *row)[:, :known] for row in rows])
        yield part - np.log(np.exp(part).sum(-1, keepdims=True))


ALONE = ("algorithm.loss=null", "batch.prompts_per_minibatch=null", "steps=1")


@pytest.mark.slow
def test_the_whole_vocabulary_is_compared(run, teacher, workshop):
    given = (*ALONE, f"teacher.path={teacher}", "rollout.dump_every=1", "offload.teacher=true")
    result = run(*given, "algorithm.distillation=reverse_kl_divergence").ok()
    student, taught = both(result, teacher, workshop)
    line, apart = result.metrics[1], (np.exp(student) * (student - taught)).sum(-1)
    expected = {"divergence/mean": apart.mean(), "divergence/max": apart.max()}
    expected |= {"divergence/min": apart.min(), "distillation_loss": apart.mean()}
    expected |= {"loss": apart.mean()}
    expected |= {"top1_agreement": (student.argmax(-1) == taught.argmax(-1)).mean()}
    for name, value in expected.items():
        assert line[f"actor/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert apart.mean() > 0.1 and line["actor/grad_norm"] > 0.01
    assert "actor/pg_loss" not in line and "timing_s/teacher" not in line


@pytest.mark.slow
def test_supervised_training_shares_its_loss_with_a_teacher(workshop, teacher, tmp_path):
    def train(name, *words, steps=1):
        words = (f"export_to={tmp_path}/{name}", f"steps={steps}", "checkpoint.every=0", *words)
        model = (f"model.path={workshop.base}", "model.random_init=false")
        return workshop(*words, *model, main=sft_main, config="sft.yaml").ok().metrics

    (alone,) = train("alone")
    (itself,) = train("itself", f"teacher.path={workshop.base}", "teacher.share=0.75")
    assert itself["train/divergence/max"] < 1e-5 and itself["train/top1_agreement"] > 0.999
    for name in ("loss", "grad_norm"):
        expected = pytest.approx(0.25 * alone[f"train/{name}"], rel=1e-3)
        assert itself[f"train/{name}"] == expected
    lines = train("taught", f"teacher.path={teacher}", steps=12)
    assert lines[-1]["train/divergence/mean"] < 0.7 * lines[0]["train/divergence/mean"]


@pytest.mark.slow
def test_a_teacher_on_a_server_is_the_one_in_this_process(run, workshop):
    """Its log-probs, and its likeliest tokens; a server that is lost midway ends the run."""
    small = random_model(workshop.root / "remote", workshop.base, hidden_size=48)
    top = (*ALONE[::2], "algorithm.distillation=forward_kl_divergence", "teacher.top_k=5")
    with serving_model(small) as (url, gate):
        where = f"teacher.path={small}", f"teacher.url={url}"
        here, there = (run(*REVERSE, "steps=1", place).ok() for place in where)
        tops = [run(*top, place).ok().metrics[1] for place in where]
        gate.left = 2 + 40  # of the check, of the first step's 32 and some of the second's
        lost = run(*REVERSE, where[1], "teacher.retries=0", "teacher.concurrency=4")
    for one, other in zip(here.rows(1), there.rows(1), strict=True):
        assert one["tokens"] == other["tokens"]
        np.testing.assert_allclose(other["advantages"], one["advantages"], atol=1e-4)
    assert [x.metrics[1]["teacher/left_out"] for x in (here, there)] == [0, 0]
    for name in ("divergence/mean", "teacher_top_mass", "grad_norm"):
        expected = pytest.approx(tops[0][f"actor/{name}"], rel=1e-3, abs=1e-5)
        assert tops[1][f"actor/{name}"] == expected
    assert lost.status != 0 and "503" in lost.err and lost.steps == [0, 1]


SHOWN = (
    *REVERSE,
    "teacher.prompt={fn: with_demonstration, template: 'It is {demonstration}: {prompt}'}",
    "teacher.max_prompt_tokens=24",
)
KEPT = ("checkpoint.every=1", "checkpoint.keep=9", "optim.schedule.value=1e-2")


def check_shown(rows, folder):
    """Compare advantages with those by a teacher that has been shown the answer."""
    for row in rows:
        question = json.loads(row["prompt"])[0]["content"]
        content = f"It is {json.loads(row['ground_truth'])}: {question}"
        expected = reverse_kl(folder, row, content)
        np.testing.assert_allclose(row["advantages"], expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["initial", "live"])
def test_the_policy_teaches_itself_with_another_prompt(run, workshop, tmp_path, weights):
    """As it is, with an adapter; and as it was at the start, as the reference is."""
    more = "model.lora={rank: 2}" if weights == "live" else "algorithm.kl_loss=k3"
    result = run(*SHOWN, f"teacher.weights={weights}", *KEPT, more).ok()
    after = exported(result.run_dir, tmp_path / "after", "--step", "1")
    same_as, other = (after, workshop.base) if weights == "live" else (workshop.base, after)
    check_shown(result.rows(1), workshop.base)
    check_shown(result.rows(2), same_as)
    with pytest.raises(AssertionError):
        check_shown(result.rows(2), other)
    short = ("teacher.weights=initial", "teacher.max_prompt_tokens=12")
    run(*SHOWN, *short).refused("12 tokens", status=1)


@pytest.mark.slow
def test_the_average_is_that_of_the_weights_after_each_step_also_of_a_run_that_goes_on(
    run, workshop
):
    sibling = "{fn: with_successful_sibling, threshold: 0.6, template: '{prompt}{answer};'}"
    rate = np.float32(0.25)
    words = (*REVERSE, f"teacher.prompt={sibling}", "teacher.max_prompt_tokens=24", *KEPT)
    words += ("teacher.weights=ema", f"teacher.ema={rate}", "validation.every=1")
    averaged = run(*words, "steps=3").ok()
    average = {name: value.copy() for name, value in parameters(workshop.base).items()}
    for step in (1, 2, 3):
        teacher, actor = (
            workshop.arrays(averaged.run_dir, role, step=step) for role in ("teacher", "actor")
        )
        for name in average:
            average[name] += rate * (actor[f"['actor']['params']{name}"] - average[name])
            found = teacher[f"['teacher']['params']{name}"]
            np.testing.assert_allclose(found, average[name], atol=1e-6, err_msg=name)
    begun = run(*words, "steps=2").ok()
    again = run(*words, "steps=3", run_dir=begun.run_dir).ok()
    assert again.learned == averaged.learned
    same(*(workshop.arrays(result.run_dir, "teacher") for result in (again, averaged)))
