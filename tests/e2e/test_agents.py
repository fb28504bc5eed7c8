"""Runs whose episodes have turns, from the command line to the checkpoint."""

import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from jaxrl_llm.evaluate import main as evaluate_main
from jaxrl_llm.reporting.health import check_run
from jaxrl_llm.training.run_files import read_run
from tests.e2e.comparing import same
from tests.guarded import RUN

MODEL = Path(__file__).parents[2] / "configs" / "agents" / "model"
EPISODES = pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
FUNCTIONS = '''
import random
import time

from jaxrl_llm.rollout import BrokenTool, Observation


def rewards_digits(rng, row, *, pause=0.0, broken=0.0, secret=False):
    """Tell a letter after each turn, and reward digits."""
    dice = random.SystemRandom() if secret else rng
    answer = yield ""
    for _ in range(2):
        time.sleep(pause * random.SystemRandom().random())
        if rng.random() < broken:
            raise BrokenTool("no server")
        digits = sum(c.isdigit() for c in answer)
        told = dice.choice("abcdefgh")
        answer = yield Observation(told, reward=0.25 * digits)
    return float(len(answer))


def environment_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": extra_info["environment_score"] or 0.0, "turns": extra_info["turns"]}
'''


@pytest.fixture(scope="module")
def agents(workshop):
    """(overrides) -> a run with an environment, in this process."""
    folder = Path(shutil.copytree(MODEL, workshop.root / "agent_model"))
    workshop.shrink(folder)
    functions = workshop.root / "agents.py"
    functions.write_text(FUNCTIONS)
    tree = {
        "base": "train.yaml",
        "model": {"path": str(folder), "random_init": True},
        "rollout": {
            "environment": {"fn": f"{functions}:rewards_digits"},
            "limits": {"turn_tokens": 5, "turns": 4},
            "max_new_tokens": 32,
            "tool_process": {"workers": 2},
        },
        "reward": {"function": f"{functions}:environment_score"},
        "algorithm": {"advantage": "grpo_turns"},
    }
    workshop.write("agents.yaml", tree)

    def run(*overrides, **keys):
        return workshop(*overrides, config="agents.yaml", **keys)

    run.workshop, run.functions = workshop, functions
    run.trained = lambda result: workshop.params(result.run_dir, model=folder)
    return run


@pytest.fixture(scope="module")
def plain(agents):
    """Two steps with validation and dumps that nothing disturbs."""
    return agents("rollout.dump_every=1", "validation.every=2").ok()


def test_turns_and_their_rewards_reach_the_update(plain):
    line = plain.metrics[-1]
    assert line["num_turns/mean"] == 6.0 and line["episode/broken"] == 0
    assert line["tools/environment/calls"] == 32 * 4
    assert line["episode/finish/end"] == 1.0 and line["reward/turns/mean"] == 3.0
    assert line["critic/rewards/mean"] > line["critic/score/mean"], "turns have rewards besides"
    assert line["actor/grad_norm"] > 0 and "episode/chains/mean" not in line
    assert line["training/rollout_logprobs_diff_mean"] < 1e-4
    assert 0 <= line["rollout/template_drift"] < 1  # random weights draw special tokens
    assert "val-core/arithmetic/reward/mean@1" in line
    rows = plain.rows(2)
    for row in rows:
        drawn = [turn for turn in row["turn_ids"] if turn >= 0]
        assert len(row["tokens"]) == len(row["turn_ids"]) > len(drawn)
        np.testing.assert_allclose(row["logprobs"], row["rollout_logprobs"], atol=1e-4)
        assert len(row["logprobs"]) == len(row["advantages"]) == len(drawn)
        assert sorted(set(drawn)) == [0, 1, 2] and len(row["turn_rewards"]) == 3
    assert any(reward for row in rows for reward in row["turn_rewards"])


@pytest.mark.slow
@EPISODES
def test_the_run_is_the_same_whatever_time_tools_take(agents, plain):
    """Also where episodes that a push finds between two turns, or within one, are gone on with."""
    slow = (f"rollout.environment.fn={agents.functions}:rewards_digits",)
    slow += ("rollout.environment.pause=0.02", "rollout.tool_process.workers=1")
    again = agents("rollout.dump_every=1", "validation.every=2", *slow).ok()
    words = ("rollout.staleness=2", "steps=4", "rollout.max_running_sequences=12")
    words += ("validation.before=false", "data.validation=[]", "checkpoint.every=2")
    first = agents(*words).ok()
    seconds = ("episode/seconds", "tools/environment/seconds")
    # how many run at once decides in which order the engine adds up, in the last digits
    for one, other, apart in (
        (again, plain, (*seconds, "training/rollout", "rollout_corr/")),
        (agents(*words, *slow).ok(), first, seconds),
    ):
        for line, expected in zip(one.learned, other.learned, strict=True):
            assert line.keys() == expected.keys()
            names = [name for name in line if not name.startswith(apart)]
            assert [line[name] for name in names] == [expected[name] for name in names]
        same(*map(agents.trained, (one, other)))
    assert max(line.get("async/age/max", 0) for line in first.metrics) >= 1
    assert max(line.get("async/policies_per_answer/mean", 0) for line in first.metrics) > 1
    assert all(line["tools/environment/calls"] == 32 * 4 for line in first.metrics)


@pytest.mark.slow
@EPISODES
def test_broken_episodes_are_counted_and_left_out(agents):
    result = agents("rollout.environment.broken=0.2", "data.validation=[]").ok()
    assert [0 < line["episode/broken"] < 17 for line in result.metrics] == [True] * 2
    found = {finding.name for finding in check_run(read_run(result.run_dir))}
    assert {"episodes_broken", "tools_fail"} <= found
    assert all(np.isfinite(value).all() for value in agents.trained(result).values())
    stopped = agents("rollout.environment.broken=1.0", "data.validation=[]")
    stopped.refused("32 of 32 episodes", status=1)


def test_an_evaluation_plays_the_same_episodes(agents, plain, tmp_path):
    data = f"{agents.workshop.data}/validation.parquet"
    words = ["--model", str(plain.run_dir), "--data", data, f"out={tmp_path / 'out'}"]
    words += ["max_new_tokens=32", "limits.turn_tokens=5", "temperature=0"]
    words += [f"environment={agents.functions}:rewards_digits", "tool_process.workers=1"]
    words += [f"reward.function={agents.functions}:environment_score", "reward.workers=1"]
    assert evaluate_main(words) == 0
    report = json.loads((tmp_path / "out/metrics.json").read_text())
    rows = pyarrow.parquet.read_table(tmp_path / "out/samples.parquet").to_pylist()
    mean = np.mean([row["score"] for row in rows])
    assert report["all"]["metrics"]["mean@1"]["value"] == mean > 1
    assert all(max(row["turn_ids"]) == 2 for row in rows)


@pytest.mark.slow
@pytest.mark.guards(*RUN, "jaxrl_llm/rollout/")
@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_with_a_tool_that_answers_at_random_it_draws_the_same_again(
    agents, until, staleness
):
    """The journals of the run that was killed, given to one that nobody kills, make the same."""
    workshop, dice = agents.workshop, random.Random(0)
    keys = ("steps=6", "rollout.environment.secret=true", "checkpoint.every=0")
    keys += (f"rollout.staleness={staleness}", "rollout.max_running_sequences=24")
    keys += ("validation.before=false", "data.validation=[]")
    run_dir = workshop.folder()

    def start(folder):
        return workshop.start(*keys, config="agents.yaml", run_dir=folder)

    for step in (1, 2, 4):
        process = start(run_dir)
        journal = run_dir / "tools" / f"step_{step:06d}_0_0.jsonl"
        assert until(journal.exists, process)
        time.sleep(dice.uniform(0, 0.3))
        process.kill()
        process.communicate()
    killed = workshop.finish(start(run_dir), run_dir).ok()
    calm, other = workshop.folder(), workshop.folder()
    shutil.copytree(run_dir / "tools", calm / "tools")
    undisturbed, another = (workshop.finish(start(folder), folder).ok() for folder in (calm, other))
    expected = agents.trained(killed)
    same(agents.trained(undisturbed), expected)
    values = agents.trained(another)
    assert any(not np.array_equal(values[name], v) for name, v in expected.items())
