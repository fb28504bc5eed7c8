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
from jaxrl_llm.rollout.rollouts import Episode
from jaxrl_llm.training.run_files import read_run
from tests.e2e.conftest import SHRUNK
from tests.guarded import RUN

MODEL = Path(__file__).parents[2] / "configs" / "agents" / "model"
FUNCTIONS = '''
import random

from jaxrl_llm.rollout import BrokenTool, Observation


def rewards_digits(rng, *, pause=0.0, broken=0.0, secret=False):
    """Tell a letter after each turn, and reward digits."""
    import time

    dice = random.SystemRandom() if secret else rng
    answer = yield ""
    for _ in range(2):
        time.sleep(pause * random.SystemRandom().random())
        if rng.random() < broken:
            raise BrokenTool("no server")
        digits = sum(c.isdigit() for c in answer)
        answer = yield Observation(dice.choice("abcdefgh"), reward=0.25 * digits)
    return float(len(answer))


async def rewrites(chat, environment):
    """Begin a chain after each turn, with what was said last."""
    if await environment.begin():
        raise ValueError("it says nothing first")
    while True:
        answer = await chat.generate()
        said = {"role": "user", "content": await environment.step(answer.text)}
        chat = chat.new([*chat.prompt.messages, said])


def tells_letters(rng, row, *, broken=0.0, broken_rows=1):
    """Tell a letter after each of two turns."""
    answer = yield ""
    for _ in range(2):
        if rng.random() < broken or row.index % broken_rows:
            raise BrokenTool("no server")
        answer = yield rng.choice("abcdefgh")
    return float(len(answer))


def spread_if_even(data_source, solution_str, ground_truth, extra_info):
    return 0.5 if extra_info["index"] % 2 else len(solution_str) / 100


def environment_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": extra_info["environment_score"] or 0.0, "turns": extra_info["turns"]}
'''


@pytest.fixture(scope="module")
def agents(workshop):
    """(overrides) -> a run with an environment, in this process."""
    folder = workshop.root / "agent_model"
    shutil.copytree(MODEL, folder)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | SHRUNK))
    (workshop.root / "agents.py").write_text(FUNCTIONS)
    tree = {
        "base": "train.yaml",
        "model": {"path": str(folder), "random_init": True},
        "rollout": {
            "environment": {"fn": f"{workshop.root}/agents.py:rewards_digits"},
            "limits": {"turn_tokens": 5, "turns": 4},
            "max_new_tokens": 32,
            "tool_process": {"workers": 2},
        },
        "reward": {"function": f"{workshop.root}/agents.py:environment_score"},
        "algorithm": {"advantage": "grpo_turns"},
    }
    workshop.write("agents.yaml", tree)

    def run(*overrides, **keys):
        return workshop(*overrides, config="agents.yaml", **keys)

    run.workshop, run.model = workshop, folder
    return run


def trained(agents, result):
    return agents.workshop.params(result.run_dir, model=agents.model)


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
    assert line["actor/grad_norm"] > 0
    assert line["training/rollout_logprobs_diff_mean"] < 1e-4
    assert 0 <= line["rollout/template_drift"] < 1  # random weights draw special tokens
    assert "val-core/arithmetic/reward/mean@1" in line
    rows = pyarrow.parquet.read_table(plain.run_dir / "rollouts/step_000002.parquet").to_pylist()
    for row in rows:
        drawn = [turn for turn in row["turn_ids"] if turn >= 0]
        assert len(row["tokens"]) == len(row["turn_ids"]) > len(drawn)
        assert len(row["logprobs"]) == len(row["rollout_logprobs"]) == len(drawn)
        assert sorted(set(drawn)) == [0, 1, 2] and len(row["turn_rewards"]) == 3
    assert any(reward for row in rows for reward in row["turn_rewards"])


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
def test_chains_reach_the_update(agents, plain):
    """Each is read by itself: else the trainer's log-probs would not be the engine's."""
    agent = f"rollout.agent.fn={agents.workshop.root}/agents.py:rewrites"
    result = agents(agent, "rollout.dump_every=1", "validation.every=2").ok()
    assert "episode/chains/mean" not in plain.metrics[-1]
    steps = [line for line in result.metrics if line["step"]]
    assert len(steps) == 2
    for line in steps:
        assert line["episode/chains/mean"] == 3.0
        assert line["tools/environment/calls"] == 32 * 4
        assert line["actor/grad_norm"] > 0
        assert line["training/rollout_logprobs_diff_mean"] < 1e-4
    rows, others = (
        pyarrow.parquet.read_table(run.run_dir / "rollouts/step_000001.parquet").to_pylist()
        for run in (result, plain)
    )
    for row, other in zip(rows, others, strict=True):
        assert sorted(set(row["chain_ids"])) == [0, 1, 2] and set(other["chain_ids"]) == {0}
        for turn, chain in zip(row["turn_ids"], row["chain_ids"], strict=True):
            assert turn in (-1, chain)
        first = row["turn_ids"].index(-1)
        assert row["tokens"][:first] == other["tokens"][:first]


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
@pytest.mark.parametrize(
    "words",
    [
        ("rollout.tool_process.workers=1", "rollout.environment.pause=0.02"),
        ("rollout.tool_process.workers=5", "rollout.max_running_sequences=4"),
    ],
)
def test_the_run_is_the_same_whatever_time_tools_take(agents, plain, same, words):
    environment = f"rollout.environment.fn={agents.workshop.root}/agents.py:rewards_digits"
    again = agents("rollout.dump_every=1", "validation.every=2", environment, *words).ok()
    # how many run at once decides in which order the engine adds up, in the last digits
    others = ("episode/seconds", "tools/environment/seconds", "training/rollout", "rollout_corr/")

    def learned(result):
        return [
            {name: value for name, value in line.items() if not name.startswith(others)}
            for line in result.learned
        ]

    assert learned(again) == learned(plain)
    same(trained(agents, again), trained(agents, plain))


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
def test_stale_episodes_are_the_same_whatever_time_tools_take(agents, same):
    """Episodes that a push finds between two turns, or within one, are gone on with."""
    words = ("rollout.staleness=2", "steps=4", "rollout.max_running_sequences=12")
    words += ("validation.before=false", "data.validation=[]", "checkpoint.every=2")
    first = agents(*words).ok()
    environment = f"rollout.environment.fn={agents.workshop.root}/agents.py:rewards_digits"
    slow = ("rollout.tool_process.workers=1", "rollout.environment.pause=0.02")
    again = agents(*words, environment, *slow).ok()
    assert max(line.get("async/age/max", 0) for line in first.metrics) >= 1
    assert max(line.get("async/policies_per_answer/mean", 0) for line in first.metrics) > 1
    assert all(line["tools/environment/calls"] == 32 * 4 for line in first.metrics)
    others = ("episode/seconds", "tools/environment/seconds")
    for line, expected in zip(again.learned, first.learned, strict=True):
        differing = {k for k in line | expected if line.get(k) != expected.get(k)}
        assert all(name.startswith(others) for name in differing), differing
    same(trained(agents, again), trained(agents, first))


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
def test_an_agent_of_one_turn_is_the_plain_run_bit_for_bit(run, same):
    keys = ("steps=2", "validation.before=false", "data.validation=[]")
    plain = run(*keys).ok()
    agent = run(*keys, "rollout.agent=one_answer").ok()
    names = plain.learned[-1].keys()
    assert [{name: line[name] for name in names} for line in agent.learned] == plain.learned
    same(run.params(agent.run_dir), run.params(plain.run_dir))


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
def test_broken_episodes_are_counted_and_left_out(agents):
    result = agents("rollout.environment.broken=0.2", "data.validation=[]").ok()
    assert [0 < line["episode/broken"] < 17 for line in result.metrics] == [True] * 2
    found = {finding.name for finding in check_run(read_run(result.run_dir))}
    assert {"episodes_broken", "tools_fail"} <= found
    assert all(np.isfinite(value).all() for value in trained(agents, result).values())
    stopped = agents("rollout.environment.broken=1.0", "data.validation=[]")
    assert stopped.status == 1 and "32 of 32 episodes are broken" in stopped.err
    assert "no server" in stopped.err


@pytest.fixture(scope="module")
def dynamic(agents):
    """(words) -> a run with DAPO's filter and penalty, of episodes without rewards of turns."""
    functions = f"{agents.workshop.root}/agents.py"

    def run(*words, **environment):
        settings = json.dumps({"fn": f"{functions}:tells_letters", **environment})
        return agents(
            f"rollout.environment={settings}",
            f"reward.function={functions}:spread_if_even",
            "algorithm.advantage=grpo",
            "algorithm.group_filter=with_spread",
            "algorithm.max_generation_batches=6",
            "algorithm.penalty={fn: overlong_penalty, max_tokens: 20, buffer: 10}",
            "rollout.dump_every=1",
            "data.validation=[]",
            *words,
        )

    return run


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
def test_episodes_without_spread_are_drawn_again_and_long_ones_penalized(dynamic):
    result = dynamic(broken=0.03).ok()
    for line in result.metrics[1:]:
        path = result.run_dir / f"rollouts/step_{line['step']:06d}.parquet"
        rows = pyarrow.parquet.read_table(path).to_pylist()
        assert len(rows) == 32 and line["batch/dropped_groups"] >= 2
        usable = [row for row in rows if not (row["error"] or "").startswith("broken")]
        scores = {row["prompt"]: set() for row in usable}
        for row in usable:
            scores[row["prompt"]].add(row["score"])
        assert all(len(found) > 1 for found in scores.values())
        drawn = np.array([sum(turn >= 0 for turn in row["turn_ids"]) for row in usable])
        penalty = np.clip((20 - 10 - drawn) / 10, -1, 0)
        assert -1 < penalty.mean() < 0
        charged = line["critic/rewards/mean"] - line["critic/score/mean"]
        assert charged == pytest.approx(penalty.mean(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
def test_broken_episodes_are_not_taken_for_hard_prompts(dynamic):
    """Their groups are dropped, too; still the run says what is wrong, and does not draw on."""
    stopped = dynamic(broken_rows=3, broken=0.0)
    assert stopped.status == 1 and "episodes are broken" in stopped.err, stopped.err
    assert "too easy or too hard" not in stopped.err


@pytest.mark.slow
@pytest.mark.guards("jaxrl_llm/rollout", "jaxrl_llm/training")
def test_a_wrong_mask_is_seen_at_once(agents, monkeypatch):
    """Were told tokens taken for drawn ones, the engine's log-probs would differ."""
    right = Episode.turn_ids.func
    monkeypatch.setattr(Episode, "turn_ids", property(lambda self: np.maximum(right(self), 0)))
    result = agents("data.validation=[]", "algorithm.advantage=grpo")
    assert result.status == 1 and "the engine's log-probs differ" in result.err


def test_an_evaluation_plays_the_same_episodes(agents, plain, tmp_path):
    workshop, out = agents.workshop, tmp_path / "out"
    words = ["--model", str(plain.run_dir), "--data", str(workshop.data / "validation.parquet")]
    words += [f"out={out}", "max_new_tokens=32", "limits.turn_tokens=5", "temperature=0"]
    words += [f"environment={workshop.root}/agents.py:rewards_digits", "tool_process.workers=1"]
    words += [f"reward.function={workshop.root}/agents.py:environment_score", "reward.workers=1"]
    assert evaluate_main(words) == 0
    report = json.loads((out / "metrics.json").read_text())
    rows = pyarrow.parquet.read_table(out / "samples.parquet").to_pylist()
    scores = [row["score"] for row in rows]
    assert report["all"]["metrics"]["mean@1"]["value"] == np.mean(scores) > 1
    assert all(max(row["turn_ids"]) == 2 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rollout.tools=look_upp",), "did you mean 'look_up'"),
        (("rollout.environment=guess_numbr",), "did you mean 'guess_number'"),
        (("rollout.agent=one_answer",), "does not ask for `environment`"),
    ],
)
def test_a_wrong_function_is_refused_before_the_base_model_is_made(agents, words, message):
    warm = f"model.warm_start={agents.workshop.root}/no_such_file.yaml"
    result = agents("model.random_init=false", warm, *words)
    assert result.status == 2 and message in result.err


@pytest.mark.slow
@pytest.mark.guards(*RUN, "jaxrl_llm/rollout/")
@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_with_a_tool_that_answers_at_random_it_draws_the_same_again(
    agents, same, until, staleness
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
        assert until(lambda journal=journal: journal.exists(), process)
        time.sleep(dice.uniform(0, 0.3))
        process.kill()
        process.communicate()
    killed = workshop.finish(start(run_dir), run_dir).ok()
    calm = workshop.folder()
    shutil.copytree(run_dir / "tools", calm / "tools")
    undisturbed = workshop.finish(start(calm), calm).ok()
    same(trained(agents, killed), trained(agents, undisturbed))
    other = workshop.folder()
    another = workshop.finish(start(other), other).ok()
    values = trained(agents, another)
    assert any(not np.array_equal(values[name], v) for name, v in trained(agents, killed).items())
