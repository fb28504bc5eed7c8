"""A policy as its own teacher, against transformers on hand-made sequences and numpy's averages."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.parquet
import pytest
import torch
import transformers

from jaxrl_llm import export
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.training import roles
from jaxrl_llm.training.buffer import Buffer
from tests.guarded import MODEL, RUN, UPDATE

pytestmark = pytest.mark.guards(
    *MODEL, *UPDATE, *RUN, "jaxrl_llm/training/teachers.py", "jaxrl_llm/data/"
)

RATE = 0.25
SHOWN = (
    "algorithm.advantage=reverse_kl",
    "teacher.prompt={fn: with_demonstration, template: 'It is {demonstration}: {prompt}'}",
    "teacher.max_prompt_tokens=24",
    "rollout.dump_every=1",
)
SIBLINGS = (
    "algorithm.advantage=reverse_kl",
    "teacher.prompt={fn: with_successful_sibling, threshold: 0.6, template: '{prompt}{answer};'}",
    "teacher.max_prompt_tokens=24",
    "rollout.dump_every=1",
)
AVERAGE = (
    "teacher.weights=ema",
    f"teacher.ema={RATE}",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "validation.every=1",
    "optim.schedule.value=1e-2",
)


def dumped(result, step):
    path = result.run_dir / f"rollouts/step_{step:06d}.parquet"
    return pyarrow.parquet.read_table(path).to_pylist()


@functools.cache
def reader(folder):
    """Return a tokenizer and a model of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(folder), model.eval()


def logprobs_behind(folder, content, answer):
    """Return what transformers says of an answer's tokens behind a prompt."""
    tokenizer, model = reader(folder)
    chat = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
    return logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


def check_shown(rows, folder):
    """Compare advantages with those by a teacher that has been shown the answer; return −mean."""
    whole = []
    for row in rows:
        question = json.loads(row["prompt"])[0]["content"]
        content = f"It is {json.loads(row['ground_truth'])}: {question}"
        teacher = logprobs_behind(folder, content, row["tokens"])
        expected = teacher - np.array(row["rollout_logprobs"])
        np.testing.assert_allclose(row["advantages"], expected, atol=1e-4)
        whole.append(expected)
    return -np.concatenate(whole).mean()


def states(run_dir, step):
    return ocp.PyTreeCheckpointer().restore(run_dir / f"checkpoints/{step}/state")


@pytest.mark.slow
def test_the_policy_of_the_start_teaches_behind_another_prompt(run, workshop, monkeypatch):
    """Its weights are those of the reference."""
    copies = []
    copy = roles.initial_weights
    monkeypatch.setattr(roles, "initial_weights", lambda *a: copies.append(a) or copy(*a))
    result = run(*SHOWN, "teacher.weights=initial", "algorithm.kl_loss=k3").ok()
    assert len(copies) == 1
    for step in (1, 2):
        line = result.metrics[step]
        mean = check_shown(dumped(result, step), workshop.base)
        assert line["teacher/reverse_kl"] == pytest.approx(mean, abs=1e-4)
        left_out = line["teacher/no_prompt"], line["teacher/too_long"], line["teacher/left_out"]
        assert left_out == (0, 0, 0) and line["timing_s/teacher"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("model.lora={rank: 2}",)])
def test_the_policy_as_it_is_teaches_itself(run, workshop, more, tmp_path):
    words = "teacher.weights=live", "checkpoint.every=1", "checkpoint.keep=9", *more
    result = run(*SHOWN, *words, "optim.schedule.value=1e-2").ok()
    check_shown(dumped(result, 1), workshop.base)
    assert export.main([str(result.run_dir), str(tmp_path / "after"), "--step", "1"]) == 0
    check_shown(dumped(result, 2), tmp_path / "after")
    with pytest.raises(AssertionError):
        check_shown(dumped(result, 2), workshop.base)


@pytest.fixture(scope="module")
def averaged(run):
    return run(*SIBLINGS, *AVERAGE, "steps=3").ok()


@pytest.mark.slow
def test_answers_learn_from_a_sibling_that_succeeded(averaged, workshop, tmp_path):
    """By the average: in the first step by the base's weights, in the second no more."""
    base = load_params(workshop.base, read_spec(workshop.base))
    average = named(states(averaged.run_dir, 1)["teacher"]["params"])
    values = [average[name] for name in named(base)]
    later = jax.tree.unflatten(jax.tree.structure(base), values)
    save_params(tmp_path, later, read_spec(workshop.base), source=workshop.base, dtype=jnp.float32)
    for step, folder in ((1, workshop.base), (2, tmp_path)):
        rows = dumped(averaged, step)
        without = sum(check_sibling(rows, i, folder) for i in range(len(rows)))
        assert averaged.metrics[step]["teacher/no_prompt"] == without
        assert 0 < without < len(rows)


def check_sibling(rows, i, folder):
    """Compare an answer's advantages; return whether no other answer to its prompt succeeded."""
    first, row = i // 4 * 4, rows[i]
    others = [r for r in rows[first:i] + rows[i + 1 : first + 4] if r["score"] >= 0.6]
    if not others:
        assert not np.any(row["advantages"])
        return True
    question = json.loads(row["prompt"])[0]["content"]
    teacher = logprobs_behind(folder, f"{question}{others[0]['answer']};", row["tokens"])
    expected = teacher - np.array(row["rollout_logprobs"])
    np.testing.assert_allclose(row["advantages"], expected, atol=1e-4)
    return False


@pytest.mark.slow
def test_the_average_is_that_of_the_weights_after_each_step(averaged, workshop):
    base = load_params(workshop.base, read_spec(workshop.base))
    average = {name: value.copy() for name, value in named(base).items()}
    for step in (1, 2, 3):
        state = states(averaged.run_dir, step)
        actor, teacher = (named(state[role]["params"]) for role in ("actor", "teacher"))
        for name, value in actor.items():
            average[name] += np.float32(RATE) * (value - average[name])
            np.testing.assert_allclose(teacher[name], average[name], atol=1e-6, err_msg=name)


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_average(run, averaged, same):
    begun = run(*SIBLINGS, *AVERAGE, "steps=2").ok()
    again = run(*SIBLINGS, *AVERAGE, "steps=3", run_dir=begun.run_dir).ok()
    assert again.learned == averaged.learned
    same(*(named(states(one.run_dir, 3)) for one in (again, averaged)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "elsewhere",
    ["offload.teacher=true", "mesh.teacher={devices: 2, first_device: 1, tensor: 2, fsdp: 1}"],
)
def test_the_average_may_wait_on_the_host_or_stand_elsewhere(run, averaged, elsewhere):
    words = *SIBLINGS, *AVERAGE, elsewhere, "mesh.train.devices=1", "mesh.rollout.devices=1"
    again = run(*words, "steps=2", devices=3 if "mesh" in elsewhere else 1).ok()
    for step in (1, 2):
        expected = averaged.metrics[step]["teacher/reverse_kl"]
        assert again.metrics[step]["teacher/reverse_kl"] == pytest.approx(expected, abs=1e-5)
    before, after = (named(states(one.run_dir, 2)) for one in (averaged, again))
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_the_average_of_an_adapter_is_an_adapter(run):
    result = run(*SHOWN, *AVERAGE, "model.lora={rank: 2}").ok()
    first, second = (states(result.run_dir, step) for step in (1, 2))
    adapter, followed = (named(first[role]["params"]) for role in ("actor", "teacher"))
    assert adapter.keys() == followed.keys() and adapter
    after = named(second["actor"]["params"])
    for name, value in named(second["teacher"]["params"]).items():
        expected = followed[name] + RATE * (after[name] - followed[name])
        np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)
    zeros = [name for name, value in adapter.items() if np.abs(followed[name]).max() > 0]
    assert len(zeros) == len(adapter)


@pytest.mark.slow
def test_a_teacher_of_its_own_weights_reads_another_prompt_too(run, workshop):
    result = run(*SHOWN, f"teacher.path={workshop.base}", "steps=1").ok()
    check_shown(dumped(result, 1), workshop.base)


@pytest.mark.slow
def test_prompts_that_are_all_too_long_end_the_run(run):
    result = run(*SHOWN, "teacher.weights=initial", "teacher.max_prompt_tokens=12")
    assert result.status == 1
    assert "longer than 12 tokens, so that nothing is learned" in result.err


@pytest.mark.slow
def test_nothing_but_the_average_is_held_and_on_the_host(run, workshop, monkeypatch):
    """On the device: the policy, its two moments and the engine's weights."""
    held, take, spec = [], Buffer.take, read_spec(workshop.base)
    before = {id(array) for array in jax.live_arrays()}

    def watched(*args):
        arrays = [a for a in jax.live_arrays() if id(a) not in before]
        tables = [a for a in arrays if a.shape == (spec.vocab_size, spec.hidden_size)]
        on_host = sum(a.sharding.memory_kind == "pinned_host" for a in tables)
        held.append((on_host, len(tables) - on_host))
        return take(*args)

    monkeypatch.setattr(Buffer, "take", watched)
    run(*SIBLINGS, "teacher.weights=ema", "offload.teacher=true").ok()
    assert held == [(1, 4)] * 2
