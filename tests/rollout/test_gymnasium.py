import pytest

from jaxrl_llm.config.functions import FunctionSpec
from tests.episodes import Scripted, picture, play, prompt, same

gymnasium = pytest.importorskip("gymnasium")

LAKE = {"id": "FrozenLake-v1", "is_slippery": False}
NAMES = ["left", "down", "right", "up"]
CLOSED = []


def observe(observation):
    return f"at {observation}"


def act(text):
    return "LDRU".index(text)


class Countdown(gymnasium.Env):
    """Ends at once at 0, with reward 3; else each step earns 1, and the third is the last."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return int(self.np_random.integers(1000)), {}

    def step(self, action):
        self.steps += 1
        return self.steps, 3.0 if action == 0 else 1.0, action == 0, self.steps == 3, {}

    def close(self):
        CLOSED.append(True)


def played(turns, *, samples=1, seed=(0, 1), workers=0, **keywords):
    """Return episodes in which the turns are these texts, one after the other."""
    engine = Scripted(lambda text, seed: turns[text.count("<|assistant|>") - 1])
    keys = {"environment": FunctionSpec("gymnasium", keywords), "limits": {"turns": len(turns)}}
    keys |= {"tokens": 400, "workers": workers}
    return play(engine, [prompt("x")], samples=samples, seed=seed, **keys)


def told(episode):
    """Return what the environment says after the first turn, without the marks around it."""
    parts = [part for part in picture(episode) if part.startswith("<<|user|>")]
    return [part.removeprefix("<<|user|>").split("<|end|>")[0] for part in parts]


def test_a_path_leads_over_the_lake():
    names = ["down", "down", "right", "down", "right", "right"]
    for path, keywords in (
        *((names, {"actions": NAMES}), ("DDRDRR", {"act": f"{__file__}:act"})),
        ("112122", {"workers": 1}),
    ):
        (episode,) = played(path, **LAKE, **keywords).episodes
        assert told(episode) == ["4", "8", "9", "13", "14"]
        assert (episode.score, episode.finish, sum(episode.rewards)) == (1.0, "end", 0.0)


def test_a_text_that_is_no_action_costs_a_turn():
    for turns, errors, keywords, end in (
        (["up!", "9", "down", "x", "right"], 3, {"actions": [*NAMES, "9"]}, (0.0, "end")),  # a hole
        (["down ", "-1", "1.5"], 2, {}, (None, "turns")),
    ):
        (episode,) = played(turns, **LAKE, **keywords).episodes
        assert sum(text.startswith("error: ") for text in told(episode)) == errors
        assert (episode.score, episode.finish) == end


def test_rewards_add_up_to_the_return_of_the_environment():
    gymnasium.register("Countdown-v0", entry_point=Countdown, order_enforce=False)
    keywords = {"id": "Countdown-v0", "observe": f"{__file__}:observe", "disable_env_checker": True}
    try:
        for answers, rewards, score in (
            *(("0", (0.0,), 3.0), ("10", (1.0, 0.0), 3.0), ("111", (1.0, 1.0, 0.0), 1.0)),
        ):
            CLOSED.clear()
            (episode,) = played(answers, **keywords).episodes
            assert (episode.rewards, episode.score, episode.finish) == (rewards, score, "end")
            assert told(episode) == [f"at {step + 1}" for step in range(len(answers) - 1)]
            assert CLOSED == [True]
    finally:
        gymnasium.registry.pop("Countdown-v0")


def test_the_seed_of_an_episode_is_the_environments():
    path, lake = "1" * 8, LAKE | {"is_slippery": True}
    first, again, other = (played(path, samples=4, seed=(0, s), **lake) for s in (1, 1, 2))
    assert same(first, again) and first.texts != other.texts
    assert len({tuple(told(episode)) for episode in first.episodes}) > 1
