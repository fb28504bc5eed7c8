"""Distillation on the policy's own answers, against transformers' log-probs of the same tokens."""

import json
import math
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rollout.engine import Completion
from jaxrl_llm.rollout.rollouts import Episode, Rollouts
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.teachers import Teacher, TeacherError, Teachers, check_teacher_sources
from jaxrl_llm.types import Batch
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE, "jaxrl_llm/training/teachers.py")

SUM = "algorithm.advantage=[grpo, {fn: reverse_kl, weight: 0.5}]"


@pytest.fixture(scope="module")
def teacher(workshop):
    """A wider random model with the policy's tokens, and some that are never used."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(workshop.base)
    config.hidden_size, config.vocab_size = 48, config.vocab_size + 8
    folder = workshop.root / "teacher"
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(workshop.base / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def taught(run, teacher):
    return run(SUM, f"teacher.path={teacher}", "rollout.dump_every=1").ok()


def dumped(result, step):
    path = result.run_dir / f"rollouts/step_{step:06d}.parquet"
    return pyarrow.parquet.read_table(path).to_pylist()


def teacher_logprobs(folder, tokenizer, row):
    """Return what transformers says of an answer's tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        json.loads(row["prompt"]), add_generation_prompt=True, return_dict=False
    )
    ids = torch.tensor([[*prompt, *row["tokens"]]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
    return logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


def test_advantages_are_those_of_the_task_and_of_the_teacher(taught, teacher, workshop):
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.base)
    for step in (1, 2):
        rows = dumped(taught, step)
        apart = []
        for group in np.arange(len(rows)).reshape(-1, 4):
            scores = np.array([rows[i]["score"] for i in group])
            spread = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
            for i, task in zip(group, spread, strict=True):
                drawn = np.array(rows[i]["rollout_logprobs"])
                d = drawn - teacher_logprobs(teacher, tokenizer, rows[i])
                np.testing.assert_allclose(rows[i]["advantages"], task - 0.5 * d, atol=1e-4)
                apart.append(d)
        assert np.abs(np.concatenate(apart)).min() > 1e-3
        line = taught.metrics[step]
        mean = np.concatenate(apart).mean()
        assert line["teacher/reverse_kl"] == pytest.approx(mean, abs=1e-4)
        assert line["timing_s/teacher"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "elsewhere",
    ["offload.teacher=true", "mesh.teacher={devices: 2, first_device: 1, tensor: 2, fsdp: 1}"],
)
def test_it_may_wait_on_the_host_or_stand_elsewhere(run, taught, teacher, elsewhere):
    devices = 3 if "mesh" in elsewhere else 1
    words = [SUM, f"teacher.path={teacher}", elsewhere, "mesh.train.devices=1"]
    again = run(*words, "mesh.rollout.devices=1", "steps=1", devices=devices).ok()
    expected = taught.metrics[1]["teacher/reverse_kl"]
    assert again.metrics[1]["teacher/reverse_kl"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_policy_itself_as_a_teacher_teaches_nothing(run, workshop):
    words = ["algorithm.advantage=reverse_kl", f"teacher.path={workshop.base}", "steps=1"]
    line = run(*words, "batch.prompts_per_minibatch=null").ok().metrics[1]
    assert abs(line["teacher/reverse_kl"]) < 1e-6 and line["actor/grad_norm"] < 1e-5


def config_of(**tree):
    return from_tree(
        TrainConfig, {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, **tree}
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"algorithm": {"advantage": "reverse_kl"}}, r"teacher\.path is not set, but a function"),
        ({"teacher": {"path": "t"}}, "teacher is set, but no function asks for teacher_logprobs"),
        (
            {
                "algorithm": {"advantage": "reverse_kl"},
                "teacher": {"path": "t"},
                "rollout": {"temperature": 0.9, "top_k": 5},
            },
            r"rollout\.temperature=0\.9 and rollout\.top_k=5, but a teacher's log-probs",
        ),
        (
            {"algorithm": {"advantage": [{"fn": "grpo", "weight": "much"}]}},
            r"algorithm\.advantage\.weight: got 'much', expected a finite number",
        ),
        (
            {"teacher": {"path": {"a": 1}}},
            "expected a text, or a mapping from data_source to texts",
        ),
        ({"algorithm": {"advantage": []}}, "expected a function's name, .* or a list of such"),
        ({"algorithm": {"advantage": ["grpo", "gropo"]}}, "did you mean 'grpo'"),
    ],
)
def test_what_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        resolve_functions(config_of(**tree))


def test_a_teacher_with_other_tokens_is_refused(run, teacher, workshop):
    other = workshop.root / "other_tokens"
    shutil.copytree(teacher, other)
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(text))
    result = run("algorithm.advantage=reverse_kl", f"teacher.path={other}")
    assert result.status == 2 and "other_tokens has another tokenizer" in result.err


def teach(value, vocab_size=9):
    def infer(params, batch):
        return {"logprobs": np.where(batch["mask"], value, 0.0)}

    return Teacher(path="t", params={}, infer=infer, vocab_size=vocab_size)


def test_each_answer_has_the_teacher_of_its_source():
    mask = np.array([[False, True], [True, True], [False, False]])
    batch = Batch(
        np.full((3, 2), 8), np.full(3, 2), {"mask": mask, "rollout_logprobs": -1.0 * mask}
    )
    prompts = [Prompt(0, (3,), data_source=name) for name in ("a", "b", "a")]
    answer = Completion(np.array([5]), np.zeros(1, np.float32), np.zeros(1, int), "length")
    rollouts = Rollouts(prompts, [Episode.of((3,), answer)] * 3, ["a", "b", "c"])
    teachers = Teachers({"a": teach(-2.0), "b": teach(-4.0)})
    batch, metrics = teachers.add_logprobs(batch, rollouts)
    assert batch["teacher_logprobs"].tolist() == [[0, -2], [-4, -4], [0, 0]]
    assert metrics == pytest.approx(
        {"teacher/reverse_kl/a": 1, "teacher/reverse_kl/b": 3, "teacher/reverse_kl": 7 / 3}
        | {"teacher/left_out": 0}
    )
    with pytest.raises(TeacherError, match="an answer has token 8, but t knows 8 tokens"):
        Teachers({"*": teach(0.0, vocab_size=8)}).add_logprobs(batch, rollouts)
    with pytest.raises(TeacherError, match="t gave NaN as the log-probs of 3 of 3 tokens"):
        Teachers({"*": teach(math.nan)}).add_logprobs(batch, rollouts)


def test_every_source_needs_a_teacher():
    config = config_of(teacher={"path": {"math": "a", "code": "b"}})
    check_teacher_sources(config, ["math", "code"])
    with pytest.raises(ConfigError, match=r"no teacher for data_source 'maths' of .* mean 'math'"):
        check_teacher_sources(config, ["math", "maths"])


def test_nothing_is_said_of_teachers_that_there_are_not():
    two = {"math": "a", "code": "b"}
    check_teacher_sources(config_of(teacher={"path": two, "tokenizer": {"code": "b"}}), two)
    config = config_of(teacher={"path": two, "tokenizer": {"maths": "a"}})
    with pytest.raises(
        ConfigError, match=r"teacher\.path has no data_source 'maths'; did you mean"
    ):
        check_teacher_sources(config, two)
    config = config_of(teacher={"url": "u", "model": {"math": "a"}})
    with pytest.raises(ConfigError, match=r"teacher\.model names .* teacher\.url is one teacher"):
        check_teacher_sources(config, two)
