"""Runs that train a model of the user's own."""

import contextlib
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm import export
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.sft import main as sft_main
from jaxrl_llm.sharding.layout import Layout, make_mesh
from jaxrl_llm.train import train
from jaxrl_llm.training.policy import load_policy

pytest.importorskip("flax")  # an extra, which dev has

from tests.guarded import RUN
from tests.own_models import Plain

OWN = Path(__file__).parents[1] / "own_models.py"
ROUNDING = {"rtol": 2e-3, "atol": 2e-4}
FOUR = ("steps=4", "checkpoint.every=2", "validation.every=2", "algorithm.kl_loss=k3")


@pytest.fixture(scope="module")
def words(workshop):
    """The overrides of a run with a model of `tests/own_models.py`, from random weights."""

    def of(name, *, path="random", random_init=True):
        return (
            f"model.path={workshop.root / path}",
            f"model.function={OWN}:{name}",
            f"model.random_init={json.dumps(random_init)}",
            "mesh.rules={mine: tensor}" if name != "bigram" else "mesh.rules={}",
        )

    return of


@pytest.fixture(scope="module")
def trained(run, words):
    return run(*words("Cached"), *FOUR).ok()


def arrays(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def exported(run_dir, out, *more):
    assert export.main([str(run_dir), str(out), *more]) == 0
    return arrays(out)


def test_it_is_trained_and_the_engine_agrees_with_the_trainer(trained):
    kls = [line["actor/kl"] for line in trained.metrics[1:]]
    assert kls[0] == 0.0, "the reference is what the run began with"
    assert kls[3] > 1e-5
    for line in trained.metrics[1:]:
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.slow
@pytest.mark.guards(*RUN, "models/functional.py", "models/nnx.py")
def test_recomputation_gives_what_a_cache_gives(trained, run, words):
    plain = run(*words("Plain"), *FOUR).ok()
    assert len(plain.learned) == len(trained.learned) == 5
    for one, other in zip(plain.learned, trained.learned, strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=2e-4)


@pytest.mark.slow
@pytest.mark.guards("models/functional.py", "jaxrl_llm/training")
def test_eight_devices_train_as_one_does(trained, run, words):
    mesh = ("mesh.train={data: 2, fsdp: 2, tensor: 2}", "mesh.rollout={data: 4, tensor: 2}")
    eight = run(*words("Cached"), *FOUR, *mesh, devices=8).ok()
    for name in ("actor/loss", "actor/grad_norm", "actor/kl", "critic/score/mean"):
        ours, theirs = ([line[name] for line in r.metrics[1:]] for r in (eight, trained))
        np.testing.assert_allclose(ours, theirs, err_msg=name, **ROUNDING)


@pytest.mark.slow
@pytest.mark.guards("models/functional.py", "jaxrl_llm/training")
def test_a_run_that_is_continued_is_the_same_run(trained, run, words, tmp_path):
    """Bit for bit, and not with another module, or other keywords of the same one."""
    half = run(*words("Cached"), *FOUR, "steps=2").ok()
    again = run(*words("Cached"), *FOUR, run_dir=half.run_dir).ok()
    assert again.learned == trained.learned
    whole, ours = exported(trained.run_dir, tmp_path / "a"), exported(half.run_dir, tmp_path / "b")
    assert whole.keys() == ours.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    other = run(*words("Cached"), *FOUR, "steps=6", "model.function.layers=1", run_dir=half.run_dir)
    assert other.status == 2
    assert "model.function.layers: None -> 1" in other.err
    with_source = run(*words("Plain"), *FOUR, "steps=6", run_dir=half.run_dir)
    assert with_source.status == 2
    assert "model.function.fn" in with_source.err


@pytest.mark.slow
@pytest.mark.guards("models/functional.py", "jaxrl_llm/training")
def test_an_export_is_a_place_to_start_from(trained, run, words, tmp_path):
    saved = exported(trained.run_dir, tmp_path / "out")
    assert saved["blocks.0.qkv.kernel"].shape == (32, 96)
    assert not (tmp_path / "out" / "config.json").exists()
    again = run(
        *words("Cached", path=tmp_path / "out", random_init=False), "validation.every=1", "steps=1"
    ).ok()
    score = "val-core/arithmetic/reward/mean@1"
    assert again.metrics[0][score] == trained.metrics[-1][score]
    first = exported(again.run_dir, tmp_path / "more")
    assert all(np.abs(first[name] - saved[name]).max() < 0.01 for name in saved)
    wrong = run(*words("bigram", path=tmp_path / "out", random_init=False))
    assert wrong.status == 2
    assert "model.path" in wrong.err
    assert "does not fit" in wrong.err


@pytest.fixture
def one_device(monkeypatch):
    some = jax.devices()[:1]
    monkeypatch.setattr("jax.devices", lambda: some)


def evaluated(run_dir, workshop, out, *more):
    words = ["--model", str(run_dir), "--data", str(workshop.data / "validation.parquet")]
    words += [f"out={out}", "max_new_tokens=4", "max_running_sequences=32", "reward.workers=1"]
    words += [f"reward.function={workshop.mine('digit_sum')}", *more]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = evaluate_main(words)
    return status, errors.getvalue()


@pytest.mark.slow
@pytest.mark.guards("models/functional.py", "jaxrl_llm/training")
@pytest.mark.usefixtures("one_device")
def test_a_run_is_evaluated_and_its_policy_looked_at(trained, workshop, tmp_path):
    status, error = evaluated(trained.run_dir, workshop, tmp_path / "e")
    assert status == 0, error
    report = json.loads((tmp_path / "e" / "metrics.json").read_text())
    score = report["all"]["metrics"]["mean@1"]["value"]
    assert score == pytest.approx(trained.metrics[-1]["val-core/arithmetic/reward/mean@1"])
    policy = load_policy(trained.run_dir, Layout(make_mesh({}, jax.devices())))
    assert policy.model.max_positions == 64
    assert len(policy.logprobs([5, 6, 7, 8])) == 3


@pytest.mark.slow
@pytest.mark.guards("models/functional.py", "jaxrl_llm/training")
@pytest.mark.usefixtures("one_device")
def test_functions_of_a_notebook_are_found_by_the_command_line(workshop, words, tmp_path):
    given = {"model.function": Plain, "run_dir": str(tmp_path / "run"), "steps": 1}
    rest = dict(word.split("=", 1) for word in words("Plain") if "function" not in word)
    tree = {name: json.loads(v) if v in ("true", "false") else v for name, v in rest.items()}
    Plain.__module__ = "__main__"  # as that of a notebook
    try:
        config = load(
            TrainConfig,
            workshop.root / "train.yaml",
            tree | given | {"mesh.rules": {"mine": "tensor"}, "validation.every": 0},
        )
    finally:
        Plain.__module__ = "tests.own_models"
    assert config.model.function.fn == "__main__:Plain"
    train(config)
    status, error = evaluated(tmp_path / "run", workshop, tmp_path / "e")
    assert status == 2
    assert "as in --function-from" in error
    status, error = evaluated(tmp_path / "run", workshop, tmp_path / "e", f"--function-from={OWN}")
    assert status == 0, error
    found = exported(tmp_path / "run", tmp_path / "out", "--function-from", str(OWN))
    assert "blocks.1.down.bias" in found


@pytest.mark.slow
@pytest.mark.guards(*RUN, "models/functional.py", "models/nnx.py")
def test_a_pair_of_functions_is_pretrained_and_then_trained(run, words, workshop, tmp_path):
    out = tmp_path / "base"
    own = [f"export_to={out}", "steps=20", *words("bigram")]
    losses = [
        line["train/loss"] for line in run(*own, main=sft_main, config="sft.yaml").ok().metrics
    ]
    assert losses[-1] < losses[0] - 0.1
    result = run(*words("bigram", path=out, random_init=False), "validation.every=1").ok()
    assert all(line["actor/grad_norm"] > 0 for line in result.metrics[1:])


@pytest.mark.slow
@pytest.mark.guards(*RUN, "models/functional.py", "models/nnx.py")
def test_a_warm_start_pretrains_the_own_model(run, words, workshop, tmp_path):
    base = tmp_path / "base"
    own = words("bigram", path=base, random_init=False)
    result = run(*own, f"model.warm_start={workshop.root}/sft.yaml", "steps=1").ok()
    assert set(arrays(base)) == {"table"}
    assert "model.path" not in result.err


REFUSED = {
    "model.lora={rank: 4}": "model.lora=LoraConfig",
    "model.attention=cudnn": "model.attention='cudnn' is for models of a Hugging Face directory",
    "model.router_loss_coef=0.1": "model.router_loss_coef=0.1",
    "model.remat=full": "model.remat=full: the layers of model.function are not known",
    "mesh.train={stage: 2}": "mesh.train.stage=2",
    "rollout.engine=vllm": "rollout.engine='vllm'",
    "rollout.quantization=fp8": "rollout.quantization='fp8'",
    "rollout.kv_cache_dtype=int8": "rollout.kv_cache_dtype='int8'",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_an_own_model_can_not_do_is_refused(run, words, override):
    result = run(*words("Plain"), override)
    assert result.status == 2
    assert REFUSED[override] in result.err


def test_a_critic_needs_a_model_of_its_own(run, words):
    result = run(*words("bigram"), "algorithm.advantage=gae")
    assert result.status == 2
    assert "critic.path: a value is asked for" in result.err
