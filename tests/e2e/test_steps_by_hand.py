"""Runs that are opened from Python: steps by hand, interrupted, read by others."""

import linecache
import operator
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.config.errors import ConfigError, RunError
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.train import train
from jaxrl_llm.training.run import open_run
from jaxrl_llm.training.run_files import read_run
from jaxrl_llm.training.trainer import RLTrainer
from tests.e2e.comparing import EVERY_SECOND, same
from tests.guarded import MODEL, NATIVE, RUN

pytestmark = pytest.mark.guards(*MODEL, *RUN, *NATIVE)


@pytest.fixture
def config(workshop, one_device):
    """(keys) -> the config of a run in a folder of its own."""

    def make(**keys):
        given = {"run_dir": str(workshop.folder())} | keys
        return load(TrainConfig, workshop.root / "train.yaml", given)

    return make


def uncompared(files):
    """Return a run's metrics without those that differ each time."""
    apart = ("timing_s/", "perf/")
    return [{n: v for n, v in x.items() if not n.startswith(apart)} for x in files.metrics]


def test_steps_by_hand_interrupted_and_continued_are_the_command_lines(
    workshop, config, finished, monkeypatch
):
    """Bit for bit, with a Ctrl-C in a step, a save, and the run closed and opened again."""
    every = {word.partition("=")[0]: 2 for word in EVERY_SECOND}
    chosen, take = config(steps=4, **every), RLTrainer.step

    def interrupted(trainer, clock):
        if trainer.number == 1:
            signal.raise_signal(signal.SIGINT)
        return take(trainer, clock)

    monkeypatch.setattr(RLTrainer, "step", interrupted)
    with open_run(chosen) as run:
        numbers = []
        with pytest.raises(KeyboardInterrupt):
            numbers += [step.number for step in run]
        assert run.last is not None and run.number == run.last.number == 2, "it came to its end"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        run.prompts.clear()
        run.validation_prompts.clear()
        step = next(iter(run))
        assert (step.number, run.save(), run.checkpoints[-1]) == (3, 3, 3)
        look_at(run)
        assert len(step.texts) == len(step.batch.tokens) == 32
        assert step.metrics["critic/score/mean"] == pytest.approx(step.batch["raw_scores"].mean())
    with pytest.raises(RunError, match="closed"):
        run.step()
    with open_run(chosen) as run:
        assert [step.number for step in run] == [4]
        with pytest.raises(RunError):
            run.step()
    same(workshop.params(run.folder), workshop.params(finished.run_dir))
    assert uncompared(run) == finished.learned


def look_at(run):
    """Sample, score and compute log-probs, which changes nothing."""
    prompts = run.validation_prompts[:3]
    rollouts = run.sample(prompts, n=2, seed=7)
    scored = run.score(rollouts)
    assert [row["answer"] for row in scored] == rollouts.texts
    assert all(row["score"] is not None and row["error"] is None for row in scored)
    assert f"<td>{scored[0]['score']:g}</td>" in scored._repr_html_()
    answer, policy = rollouts.episodes[0], run.policy
    table = policy.logprobs(answer.tokens.tolist(), prompts[0].tokens)
    np.testing.assert_allclose([value for _, value in table], answer.logprobs, atol=1e-4)
    by_text = policy.logprobs(rollouts.texts[0], prompts[0].messages[-1]["content"])
    assert by_text == table[: len(by_text)]


def test_a_run_is_read_without_a_device(finished):
    """Of a machine whose accelerator can't be used; what was written is all there."""
    program = """
import sys
from jaxrl_llm.training.run_files import read_run

run = read_run(sys.argv[1])
print(run.metrics.curve("critic/score/mean")[0], run.checkpoints, run.best_checkpoint)
print(run.config.steps, run.dumped_steps, len(run.answers(2)), "max |" in str(run.answers()))
"""
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    words = [sys.executable, "-c", program, finished.run_dir]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    files = read_run(finished.run_dir)
    scores = dict(zip(*files.metrics.curve("val-core/arithmetic/reward/mean@1"), strict=True))
    best = max((scores[step], step) for step in (2, 4))[1]
    expected = [f"[1, 2, 3, 4] {[2, 4]} {best}", "4 [1, 2, 4] 32 True"]
    assert done.stdout.splitlines() == expected
    assert "rgba" in files.answers()._repr_html_() and "entropy" in files.metrics._repr_html_()
    with pytest.raises(ConfigError, match="9"):
        files.answers(9)


NOTEBOOK = """
import jax
import jax.numpy as jnp


def digits(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(any(c.isdigit() for c in solution_str)), "long": len(solution_str)}


def capped(logprobs, old_logprobs, advantages, *, cap):
    weight = jnp.minimum(jnp.exp(logprobs - old_logprobs), cap)
    return -jax.lax.stop_gradient(weight) * advantages * logprobs
"""


@pytest.mark.slow
def test_functions_of_a_notebook_train_as_those_of_a_file_and_a_command_line_goes_on(
    workshop, config, run, tmp_path
):
    """The reward function runs in a worker, the loss on the devices."""
    cells = {"__name__": "__main__"}
    linecache.cache["<cell 1>"] = (len(NOTEBOOK), None, NOTEBOOK.splitlines(True), "<cell 1>")
    exec(compile(NOTEBOOK, "<cell 1>", "exec"), cells)
    digits, capped = operator.itemgetter("digits", "capped")(cells)
    given = train(
        config(steps=2, **{"reward.function": digits, "algorithm.loss": partial(capped, cap=1.5)})
    )
    (tmp_path / "mine.py").write_text(NOTEBOOK)
    loss = f"algorithm.loss={{fn: '{tmp_path}/mine.py:capped', cap: 1.5}}"
    named = run("steps=2", f"reward.function={tmp_path}/mine.py:digits", loss).ok()
    assert uncompared(given) == named.learned
    assert named.learned[1]["critic/score/mean"] > 0 and "reward/long/mean" in named.learned[1]
    same(workshop.params(given.folder), workshop.params(named.run_dir))

    again = {"config": str(given.folder / "config.yaml"), "run_dir": given.folder}
    run("steps=3", **again).refused("--function-from")
    run("steps=3", f"--function-from={tmp_path}/mine.py", **again).ok()
    assert given.metrics[-1]["step"] == 3


@pytest.mark.slow
@pytest.mark.guards("README.md")
def test_the_readmes_run_from_python(workshop, one_device, monkeypatch, tmp_path, capsys):
    """Its listing as it stands, but for the config and the number of steps."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    loss, listing = re.findall("```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "my_losses.py").write_text(loss)
    monkeypatch.syspath_prepend(tmp_path)
    own = {'"quickstart"': repr(str(workshop.root / "train.yaml")), '"12+34="': '"1+2="'}
    own['"steps": 20'] = f'"steps": 2, "run_dir": {str(workshop.folder())!r}'
    for old, new in own.items():
        assert old in listing
        listing = listing.replace(old, new)
    exec(listing, {})
    lines = capsys.readouterr().out.splitlines()
    printed = [line for line in lines if re.match(r"[12] [01]\.\d+ ", line)]
    assert len(printed) == 2 and len(eval(lines[-1])) == 4
