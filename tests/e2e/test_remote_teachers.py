"""Distillation from a teacher on a server, and from one with another tokenizer."""

import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.training.bind import resolve_functions
from tests.guarded import UPDATE
from tests.listening import serving_model
from tests.training.tokenizers import byte_level

pytestmark = pytest.mark.guards(*UPDATE, "jaxrl_llm/serving/")

END = 257  # that the policy's turns end in
DISTILL = ("algorithm.advantage=reverse_kl", "rollout.dump_every=1")


def random_model(folder, like, **changes):
    torch.manual_seed(2)
    config = transformers.AutoConfig.from_pretrained(like)
    for name, value in changes.items():
        setattr(config, name, value)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(workshop):
    """A random model with the policy's tokens."""
    folder = random_model(workshop.root / "remote", workshop.base, hidden_size=48)
    for path in workshop.base.iterdir():
        if "token" in path.name or path.suffix == ".jinja":
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def foreigner(workshop):
    """A random model with another tokenizer and template, which joins digits."""
    tokenizer = byte_level(300)
    changes = {"vocab_size": 304, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    folder = random_model(workshop.root / "foreigner", workshop.base, **changes)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(teacher):
    with serving_model(teacher) as (url, gate):
        yield url, gate


def dumped(result):
    path = result.run_dir / "rollouts/step_000001.parquet"
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.slow
def test_a_teacher_on_a_server_is_the_one_in_this_process(run, server, teacher):
    here = run(*DISTILL, "steps=1", f"teacher.path={teacher}").ok()
    there = run(*DISTILL, "steps=1", f"teacher.url={server[0]}").ok()
    lines = [result.metrics[1] for result in (here, there)]
    apart = [line["teacher/reverse_kl"] for line in lines]
    assert apart[1] == pytest.approx(apart[0], abs=1e-4) and abs(apart[0]) > 0.1
    assert [line["teacher/left_out"] for line in lines] == [0, 0]
    for one, other in zip(dumped(here), dumped(there), strict=True):
        assert one["tokens"] == other["tokens"]
        np.testing.assert_allclose(other["advantages"], one["advantages"], atol=1e-4)


@pytest.mark.slow
def test_a_servers_likeliest_tokens_are_those_of_the_teacher_in_this_process(run, server, teacher):
    words = ("algorithm.loss=null", "algorithm.distillation=forward_kl_divergence", "steps=1")
    words += ("teacher.top_k=5",)
    here = run(*words, f"teacher.path={teacher}").ok().metrics[1]
    there = run(*words, f"teacher.url={server[0]}").ok().metrics[1]
    for name in ("divergence/mean", "teacher_top_mass", "top1_agreement", "grad_norm"):
        assert there[f"actor/{name}"] == pytest.approx(here[f"actor/{name}"], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_server_that_is_lost_midway_ends_the_run(run, server):
    url, gate = server
    gate.left = 2 + 40  # of the check, of the first step's 32 and some of the second's
    result = run(*DISTILL, f"teacher.url={url}", "teacher.retries=0", "teacher.concurrency=4")
    gate.left = 10**6
    assert result.status != 0
    assert "has not answered in 1 tries; the last: status 503: lost" in result.err
    assert len(result.metrics) == 2  # the first step is there


def own_logprobs(model, tokenizer, row):
    """Return what transformers says of an answer's tokens in the teacher's own."""
    prompt = tokenizer.apply_chat_template(
        json.loads(row["prompt"]), add_generation_prompt=True, return_dict=False
    )
    answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
    ends = [tokenizer.eos_token_id] if row["tokens"][-1] == END else []
    ids = torch.tensor([[*prompt, *answer, *ends]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
    return logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_is_compared_over_texts(run, foreigner):
    words = (*DISTILL, f"teacher.tokenizer={foreigner}", "steps=1")
    here = run(*words, f"teacher.path={foreigner}").ok()
    tokenizer = transformers.AutoTokenizer.from_pretrained(foreigner)
    model = transformers.AutoModelForCausalLM.from_pretrained(foreigner, dtype=torch.float32)
    rows = dumped(here)
    for row in rows:
        total = own_logprobs(model.eval(), tokenizer, row).sum() - sum(row["rollout_logprobs"])
        assert sum(row["advantages"]) == pytest.approx(total, abs=1e-3)
    assert any(len(set(np.round(row["advantages"], 4))) > 1 for row in rows)
    assert here.metrics[1]["teacher/left_out"] == 0
    with serving_model(foreigner) as (url, _):
        there = run(*words, f"teacher.url={url}").ok()
    for one, other in zip(rows, dumped(there), strict=True):
        assert one["tokens"] == other["tokens"]
        np.testing.assert_allclose(other["advantages"], one["advantages"], atol=1e-4)


def test_other_tokens_are_found_before_the_first_step(run, foreigner):
    with serving_model(foreigner) as (url, _):
        result = run(*DISTILL, f"teacher.url={url}")
    assert result.status != 0
    assert "other tokens than these ids" in result.err and "teacher.tokenizer" in result.err


def test_a_server_that_is_not_there_is_said(run):
    result = run(*DISTILL, "teacher.url=http://127.0.0.1:9/v1", "teacher.retries=0")
    assert result.status != 0
    assert "http://127.0.0.1:9/v1/models has not answered in 1 tries" in result.err


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"path": "t", "url": "u"}, r"teacher\.path and teacher\.url are both set"),
        ({"path": "t", "model": "m"}, r"teacher\.model is set, but teacher\.url is not"),
        ({"url": "u", "max_tokens": 9}, r"teacher\.max_tokens is set, but teacher\.tokenizer is"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tree, message):
    run = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, "teacher": tree}
    config = from_tree(TrainConfig, run | {"algorithm": {"advantage": "reverse_kl"}})
    with pytest.raises(ConfigError, match=message):
        resolve_functions(config)


def test_episodes_keep_to_a_teacher_of_their_own_tokens():
    config = from_tree(
        TrainConfig,
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
        | {"teacher": {"path": "t", "tokenizer": "t"}, "rollout": {"tools": ["calculator"]}}
        | {"algorithm": {"advantage": "reverse_kl"}},
    )
    with pytest.raises(ConfigError, match="only plain answers can be written"):
        resolve_functions(config)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"url": "u", "tokenizer": "t", "top_k": 4}, "are both set: the likeliest tokens"),
        ({"url": "u"}, r"teacher\.url is set, but over the whole vocabulary .* set teacher\.top_k"),
        ({"path": "u", "tokenizer": "t"}, r"teacher\.tokenizer is set, but over the whole vocab"),
    ],
)
def test_what_the_update_cannot_compare_is_refused(tree, message):
    config = from_tree(
        TrainConfig,
        {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, "teacher": tree}
        | {"algorithm": {"distillation": "forward_kl_divergence"}},
    )
    with pytest.raises(ConfigError, match=message):
        resolve_functions(config)
