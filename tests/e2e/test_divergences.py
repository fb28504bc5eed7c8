"""Distillation over distributions in whole runs, against transformers' of the same tokens."""

import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.training.bind import resolve_functions
from tests.guarded import MODEL, UPDATE

pytestmark = pytest.mark.guards(*MODEL, *UPDATE)

ALONE = ["algorithm.loss=null", "batch.prompts_per_minibatch=null", "steps=1"]
DUMPED = "rollout.dump_every=1"


@pytest.fixture(scope="module")
def teacher(workshop):
    """A wider random model with the policy's tokens, and some that are never used."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(workshop.base)
    config.hidden_size, config.vocab_size = 48, config.vocab_size + 8
    folder = workshop.root / "wide_teacher"
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(workshop.base / name, folder / name)
    return folder


def distributions(folder, tokenizer, rows):
    """What transformers says of the places of all drawn tokens [N V]; padding is cut."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known, parts = max(tokenizer.get_vocab().values()) + 1, []
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            json.loads(row["prompt"]), add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row["tokens"]]])).logits[0]
        parts.append(logits[len(prompt) - 1 : -1, :known].double().log_softmax(-1).numpy())
    return np.concatenate(parts)


def both(result, teacher, workshop):
    """The distributions of policy and teacher at the first step's tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop.base)
    path = result.run_dir / "rollouts/step_000001.parquet"
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return [distributions(folder, tokenizer, rows) for folder in (workshop.base, teacher)]


def kl(p, q):
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.slow
def test_the_whole_vocabulary_is_compared(run, teacher, workshop):
    words = [*ALONE, "algorithm.distillation=reverse_kl_divergence", f"teacher.path={teacher}"]
    result = run(*words, DUMPED, "offload.teacher=true").ok()
    student, given = both(result, teacher, workshop)
    line, expected = result.metrics[1], kl(student, given)
    assert expected.mean() > 0.1
    for name, value in {
        "divergence/mean": expected.mean(),
        "divergence/max": expected.max(),
        "divergence/min": expected.min(),
        "distillation_loss": expected.mean(),
        "loss": expected.mean(),
        "top1_agreement": (student.argmax(-1) == given.argmax(-1)).mean(),
    }.items():
        assert line[f"actor/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert "actor/pg_loss" not in line and "timing_s/teacher" not in line
    assert line["actor/grad_norm"] > 0.01 and "critic/score/mean" in line


@pytest.mark.slow
def test_the_likeliest_tokens_are_compared_and_the_rest_as_one(run, teacher, workshop):
    words = [*ALONE, "algorithm.distillation=forward_kl_divergence", "teacher.top_k=3", DUMPED]
    result = run(*words, f"teacher.path={teacher}").ok()
    student, given = both(result, teacher, workshop)
    ids = np.argsort(-given, axis=-1)[:, :3]
    tops = [np.exp(np.take_along_axis(x, ids, -1)) for x in (student, given)]
    masses = [top.sum(-1) for top in tops]
    s, t = (np.log(np.c_[top, 1 - m]) for top, m in zip(tops, masses, strict=True))
    line = result.metrics[1]
    for name, value in {
        "divergence/mean": kl(t, s).mean(),
        "divergence/max": kl(t, s).max(),
        "student_top_mass": masses[0].mean(),
        "teacher_top_mass": masses[1].mean(),
    }.items():
        assert line[f"actor/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert line["timing_s/teacher"] > 0 and "teacher/reverse_kl" in line


@pytest.mark.slow
def test_supervised_training_shares_its_loss_with_a_teacher(workshop, teacher, tmp_path):
    def train(name, *words, steps=1):
        result = workshop(
            f"export_to={tmp_path}/{name}",
            f"model.path={workshop.base}",
            "model.random_init=false",
            f"steps={steps}",
            "checkpoint.every=0",
            *words,
            main=sft_main,
            config="sft.yaml",
        )
        return result.ok().metrics

    (alone,) = train("alone")
    (itself,) = train("itself", f"teacher.path={workshop.base}", "teacher.share=0.75")
    assert itself["train/divergence/max"] < 1e-5 and itself["train/top1_agreement"] > 0.999
    assert itself["train/nll"] == pytest.approx(alone["train/loss"], rel=1e-5)
    assert itself["train/loss"] == pytest.approx(0.25 * alone["train/loss"], rel=1e-4)
    assert itself["train/grad_norm"] == pytest.approx(0.25 * alone["train/grad_norm"], rel=1e-3)
    lines = train("taught", f"teacher.path={teacher}", steps=12)
    assert all(line["train/loss"] == line["train/divergence/mean"] for line in lines)
    assert lines[-1]["train/loss"] < 0.7 * lines[0]["train/loss"]


def config_of(tree):
    needed = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    return from_tree(TrainConfig, {**needed, **tree})


FORWARD = {"distillation": "forward_kl_divergence"}
SOFT = {"fn": "forward_kl_divergence", "temperature": 2.0}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"algorithm": FORWARD}, r"teacher\.path is not set, but algorithm\.distillation needs a"),
        ({"algorithm": {"loss": None}}, r"algorithm\.loss is null, and so is algorithm\.distill"),
        ({"algorithm": {"distillation_coef": 2.0}}, r"but algorithm\.distillation is null"),
        (
            {"algorithm": {"advantage": "reverse_kl"}, "teacher": {"path": "t", "top_k": 4}},
            r"teacher\.top_k is set, but no function asks for teacher_ids or teacher_top_logprobs",
        ),
        (
            {"algorithm": {**FORWARD, "loss": None, "advantage": "rloo"}, "teacher": {"path": "t"}},
            r"nothing is learned by algorithm\.advantage: remove it",
        ),
        (
            {"algorithm": {"distillation": SOFT}, "teacher": {"path": "t", "top_k": 4}},
            r"algorithm\.distillation\.temperature=2\.0, but of the tokens beyond",
        ),
        (
            {"algorithm": FORWARD, "teacher": {"path": {"a": "t"}}},
            r"teacher\.path has several, but over the whole vocabulary",
        ),
        (
            {"algorithm": FORWARD, "teacher": {"path": "t"}, "mesh": {"teacher": {"devices": 1}}},
            r"mesh\.teacher is set, but over the whole vocabulary",
        ),
        (
            {"algorithm": {"distillation": "k3"}, "teacher": {"path": "t"}},
            r"algorithm\.distillation: no function 'k3'.* forward_kl_divergence, generalized_jsd",
        ),
        (
            {"algorithm": {"distillation": "math:fsum"}, "teacher": {"path": "t"}},
            r"algorithm\.distillation: fsum takes .*, expected \(student_logprobs, teacher_log",
        ),
        (
            {
                "algorithm": {"distillation": {"fn": "generalized_jsd", "beta": 2.0}},
                "teacher": {"path": "t"},
            },
            r"generalized_jsd: got beta 2\.0, expected a number from 0 to 1",
        ),
    ],
)
def test_what_is_refused(tree, message):
    with pytest.raises(ConfigError, match=message):
        resolve_functions(config_of(tree))


def test_supervised_training_needs_a_teacher_for_its_keys():
    tree = {"run_dir": "r", "export_to": "e", "model": {"path": "m"}, "data": {"train": "t"}}
    with pytest.raises(ConfigError, match=r"teacher is set, but there is no teacher\.path"):
        from_tree(SftConfig, tree | {"teacher": {"share": 0.5}})


def test_a_teacher_with_other_padding_needs_a_tokenizer(workshop, teacher, tmp_path):
    bare = workshop.root / "bare_teacher"
    shutil.copytree(teacher, bare)
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    words = [f"export_to={tmp_path}/out", f"teacher.path={bare}"]
    result = workshop(*words, main=sft_main, config="sft.yaml")
    assert result.status == 2
    assert "bare_teacher has no tokenizer and vocab_size=" in result.err


def test_a_teacher_has_only_so_many_tokens(run, teacher):
    words = [*ALONE, "algorithm.distillation=forward_kl_divergence", "teacher.top_k=9999"]
    result = run(*words, f"teacher.path={teacher}")
    assert result.status == 2
    assert "teacher.top_k=9999, but" in result.err and "tokens: lower it" in result.err
