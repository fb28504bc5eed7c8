"""Environments of gymnasium: what is told and earned, seeds, and texts that are no action."""

from random import Random
from typing import ClassVar

import numpy as np
import pytest

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.rollout.agents import environments
from tests.episodes import Scripted, picture, play, prompt, same

gymnasium = pytest.importorskip("gymnasium")

LAKE = {"id": "FrozenLake-v1", "is_slippery": False}
NAMES = ["left", "down", "right", "up"]
MINE = '''
import gymnasium


def observe(observation):
    return f"at {observation}"


def act(text):
    return "LDRU".index(text)


class Countdown(gymnasium.Env):
    """Ends at once at 0, with reward 3; else each step earns 1, and the third is the last."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(2)
    closed = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return int(self.np_random.integers(1000)), {}

    def step(self, action):
        self.steps += 1
        return self.steps, 3.0 if action == 0 else 1.0, action == 0, self.steps == 3, {}

    def close(self):
        self.closed.append(True)
'''


def played(turns, *, samples=1, seed=(0, 1), **keywords):
    """Return episodes in which the turns are these texts, one after the other."""

    def respond(text, seed):
        return turns[text.count("<|assistant|>") - 1]

    environment = FunctionSpec("gymnasium", keywords)
    keys = {"environment": environment, "limits": {"turns": len(turns)}, "tokens": 400}
    return play(Scripted(respond), [prompt("x")], samples=samples, seed=seed, **keys)


def told(episode):
    """Return what the environment says after the first turn, without the marks around it."""
    parts = [part for part in picture(episode) if part.startswith("<<|user|>")]
    return [part.removeprefix("<<|user|>").split("<|end|>")[0] for part in parts]


@pytest.mark.parametrize(
    ("path", "keywords"),
    [
        ("112122", {}),
        (["down", "down", "right", "down", "right", "right"], {"actions": NAMES}),
        ("DDRDRR", {"act": "FILE:act"}),
    ],
)
def test_a_path_leads_over_the_lake(tmp_path, path, keywords):
    (tmp_path / "mine.py").write_text(MINE)
    file = str(tmp_path / "mine.py")
    keywords = {n: v.replace("FILE", file) if n == "act" else v for n, v in keywords.items()}
    (episode,) = played(path, **LAKE, **keywords).episodes
    assert told(episode) == ["4", "8", "9", "13", "14"]
    assert (episode.score, episode.finish, sum(episode.rewards)) == (1.0, "end", 0.0)


def test_a_text_that_is_no_action_costs_a_turn():
    (episode,) = played(["up!", "9", "down", "x", "right"], **LAKE, actions=[*NAMES, "9"]).episodes
    assert told(episode) == [
        "error: expected one of left, down, right, up, 9, got 'up!'",
        "error: 4 is not in Discrete(4)",
        "4",
        "error: expected one of left, down, right, up, 9, got 'x'",
    ]
    assert (episode.score, episode.finish) == (0.0, "end"), "it fell into the hole"
    (episode,) = played(["down ", "-1", "1.5"], **LAKE).episodes
    assert told(episode)[0] == "error: expected a whole number, got 'down'"
    assert told(episode)[1] == "error: -1 is not in Discrete(4)"
    assert (episode.score, episode.finish) == (None, "turns")


@pytest.mark.parametrize(
    ("answers", "rewards", "score"),
    [("0", (0.0,), 3.0), ("10", (1.0, 0.0), 3.0), ("111", (1.0, 1.0, 0.0), 1.0)],
)
def test_rewards_add_up_to_the_return_of_the_environment(tmp_path, answers, rewards, score):
    (tmp_path / "mine.py").write_text(MINE)
    file = str(tmp_path / "mine.py")
    gymnasium.register("Countdown-v0", entry_point=countdown(file), order_enforce=False)
    try:
        keywords = {"id": "Countdown-v0", "observe": f"{file}:observe", "disable_env_checker": True}
        (episode,) = played(answers, **keywords).episodes
        assert (episode.rewards, episode.score, episode.finish) == (rewards, score, "end")
        assert told(episode) == [f"at {step + 1}" for step in range(len(answers) - 1)]
        assert countdown(file).closed == [True]
    finally:
        gymnasium.registry.pop("Countdown-v0")


def countdown(file):
    """Return the class of a user's file."""
    from jaxrl_llm.config.functions import find_function

    return find_function(FunctionSpec(f"{file}:Countdown"), "")


def test_the_seed_of_an_episode_is_the_environments():
    path, lake = "1" * 8, {"id": "FrozenLake-v1", "is_slippery": True}
    first, again, other = (played(path, samples=4, seed=(0, s), **lake) for s in (1, 1, 2))
    assert same(first, again) and first.texts != other.texts
    assert len({tuple(told(episode)) for episode in first.episodes}) > 1


def test_it_runs_in_a_process_of_its_own():
    environment = FunctionSpec("gymnasium", LAKE)
    engine = Scripted(lambda text, seed: "112122"[text.count("<|assistant|>") - 1])
    (episode,) = play(
        engine, [prompt("x")], environment=environment, workers=1, tokens=400
    ).episodes
    assert (episode.score, episode.turns) == (1.0, 6)


class Drawn(gymnasium.Env):
    """Draws how often it has stepped."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 1}
    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.steps += 1
        return self.steps, 1.0, self.steps == 2, False, {}

    def render(self):
        return np.full((4, 4, 3), self.steps, np.uint8)


def test_what_an_environment_draws_is_told_before_its_text():
    gymnasium.register("Drawn-v0", entry_point=Drawn)
    game = environments.gymnasium(Random(0), id="Drawn-v0", render_mode="rgb_array")
    for steps, answer in enumerate((None, "1")):
        told = game.send(answer)
        frame, text = told.text
        assert (frame.max(), text, told.reward) == (steps, str(steps), float(steps > 0))
    plain = environments.gymnasium(Random(0), id="Drawn-v0")
    assert next(plain).text == "0"
