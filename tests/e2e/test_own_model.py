"""Runs that train a model of the user's own."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.e2e.comparing import exported

pytest.importorskip("flax")  # an extra, which dev has

from tests.guarded import RUN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.guards(*RUN, "models/functional.py", "models/nnx.py", "jaxrl_llm/training"),
]

OWN = Path(__file__).parents[1] / "own_models.py"
FOUR = ("steps=4", "checkpoint.every=2", "validation.every=2", "algorithm.kl_loss=k3")
SCORE = "val-core/arithmetic/reward/mean@1"


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


def test_it_is_trained_with_a_cache_without_and_on_eight_devices(trained, run, words):
    """The engine agrees with the trainer, and recomputation gives what a cache gives."""
    kls = [line["actor/kl"] for line in trained.metrics[1:]]
    assert kls[0] == 0.0 and kls[3] > 1e-5, "the reference is what the run began with"
    for line in trained.metrics[1:]:
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_probs_diff_max"] < 1e-5
    plain = run(*words("Plain"), *FOUR).ok()
    for one, other in zip(plain.learned, trained.learned, strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=2e-4)
    mesh = ("mesh.train={data: 2, fsdp: 2, tensor: 2}", "mesh.rollout={data: 4, tensor: 2}")
    eight = run(*words("Cached"), *FOUR, *mesh, devices=8).ok()
    for name in ("actor/loss", "actor/grad_norm", "actor/kl", "critic/score/mean"):
        ours, theirs = ([line[name] for line in r.metrics[1:]] for r in (eight, trained))
        np.testing.assert_allclose(ours, theirs, err_msg=name, rtol=2e-3, atol=2e-4)


def test_a_run_that_is_continued_is_the_same_run(trained, run, words, tmp_path):
    """Bit for bit, and not with another module, or other keywords of the same one."""
    half = run(*words("Cached"), *FOUR, "steps=2").ok()
    again = run(*words("Cached"), *FOUR, run_dir=half.run_dir).ok()
    assert again.learned == trained.learned
    whole, ours = (
        arrays(exported(r.run_dir, tmp_path / n)) for r, n in ((trained, "a"), (half, "b"))
    )
    assert whole.keys() == ours.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    more = {"run_dir": half.run_dir}
    other = run(*words("Cached"), *FOUR, "steps=6", "model.function.layers=1", **more)
    other.refused("model.function.layers: None -> 1")
    run(*words("Plain"), *FOUR, "steps=6", **more).refused("model.function.fn")
