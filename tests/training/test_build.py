"""What a run is built of, and what it refuses before anything runs."""

import math
from decimal import Decimal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from jaxrl_llm.config.errors import ConfigError, RowError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ValidationConfig
from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import check_reward_rows
from jaxrl_llm.rollout import engine as engines
from jaxrl_llm.rollout.engine import Completion, Receipt
from jaxrl_llm.rollout.rollouts import Rollouts
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.buffer import Sampler
from jaxrl_llm.training.run import warm_start
from jaxrl_llm.training.trainer import extra_metrics


def config_of(**tree):
    return from_tree(
        TrainConfig, {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, **tree}
    )


class Engine(engines.Engine):
    """An engine that writes down what it is asked."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    async def generate(self, request):
        raise AssertionError("not used")

    def stream(self, request):
        raise AssertionError("not used")

    def sample(self, requests):
        self.calls.append("sample")
        if self.error:
            raise self.error
        answer = Completion(np.array([5]), np.zeros(1, np.float32), np.zeros(1, int), "length")
        return [answer for _ in requests]

    def load(self, params, version):
        return Receipt(version, 0)

    def pause(self):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")

    def close(self):
        self.calls.append("close")


PROMPT = Prompt(0, (1, 2), "arithmetic", "3", {}, [])


def sampler_of(engine, **keys):
    tokens = PolicyTokens(Mock(decode=lambda ids, **options: "x"), (0,))
    config = config_of(**keys)
    return Sampler(
        *(config.rollout, engine, tokens, Mock()), seed=config.seed, folder=Path(config.run_dir)
    )


def test_the_engine_holds_its_cache_only_while_it_samples():
    engine = Engine()
    sampler_of(engine).sample_validation([PROMPT], 1, ValidationConfig())
    assert engine.calls == ["wake", "sample", "sleep"]
    engine = Engine(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        sampler_of(engine).sample_canaries(Rollouts([PROMPT], [], []), 1)
    assert engine.calls == ["wake", "sample", "sleep"]


@pytest.mark.parametrize(
    ("function", "source", "truth"),
    [
        ("by_source", "mystery", "3"),
        ("by_source", "openai/gsm8k", [3]),
        ("by_source", "MATH", float("nan")),
        ("by_source", "MATH", " "),
        ("by_source", "math_dapo", True),
        ("by_source", "hiyouga/geometry3k", {"answer": "3"}),
        ("by_source", "code", None),
        ("by_source", "search", {"target": []}),
        ("by_source", "search", ["Rome", None]),
        ("by_source", "arithmetic", 3.5),
        ("arithmetic", "mystery", True),
        ({"fn": "math_dapo", "turn_bonus": 0.1}, "mystery", math.inf),
        ({"fn": "gsm8k", "flexible": True}, "mystery", "many"),
        ({"fn": "python_tests", "sandbox": "process"}, "mystery", 3),
        ({"fn": "python_tests", "sandbox": "process"}, "mystery", {"inputs": 1, "outputs": 1}),
        ({"fn": "python_tests", "sandbox": "process"}, "mystery", '{"inputs": [1]}'),
    ],
)
def test_rows_that_can_not_be_scored_are_refused_before_sampling(function, source, truth):
    chosen = config_of(reward={"function": function}).reward.function
    good = {"arithmetic": 3, "reasoning_gym/aiw": "3", "calculator": Decimal(3), "grid": [1]}
    if function == "by_source":
        rows = [reward_row(*row) for row in good.items()]
        check_reward_rows(chosen, rows, "data.train")
    else:
        rows = []
    with pytest.raises(RowError, match=r"^data\.train: dataset row ") as caught:
        check_reward_rows(chosen, [*rows, reward_row(source, truth)], "data.train")
    assert caught.value.rows == (len(rows),)


def reward_row(source, truth):
    return {"data_source": source, "reward_model": {"ground_truth": truth}}


def test_rows_for_a_reward_function_of_ones_own_may_have_anything(tmp_path):
    (tmp_path / "mine.py").write_text("def score(**item):\n    return 1.0")
    own = config_of(reward={"function": f"{tmp_path}/mine.py:score"}).reward.function
    for chosen in (own, None):
        check_reward_rows(chosen, [reward_row("mystery", [math.nan])], "data.train")


@pytest.mark.parametrize(
    ("key", "function", "message"),
    [
        (
            "reduce",
            "k3",
            r"algorithm.reduce: k3 takes \(logprobs, ref_logprobs\), expected \(mask\)",
        ),
        ("kl_controller", "k3", "algorithm.kl_controller: k3 takes"),
    ],
)
def test_a_function_of_another_kind_is_refused(key, function, message):
    named = FunctionSpec(f"jaxrl_llm.algorithms.kl:{function}").fn
    with pytest.raises(ConfigError, match=message):
        resolve_functions(config_of(algorithm={key: named}))


def test_a_missing_warm_start_config_names_its_key():
    config = config_of(model={"path": "m", "warm_start": "not_there.yaml"})
    with pytest.raises(ConfigError, match=r"model.warm_start: can't read 'not_there.yaml'"):
        warm_start(config)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"validation": {"samples": 4}}, "validation.samples=4 at validation.temperature=0"),
        ({"seed": 2**32}, "seed: expected a number below 4294967296"),
    ],
)
def test_contradictions(tree, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**tree)


def test_numbers_that_a_reward_function_reports_are_averaged_over_the_answers_that_have_them():
    scores = [
        Score(1.0, {"acc": 1.0, "pred": "4", "format": True}, None),
        Score(0.0, {"acc": 0.0, "pred": None}, None),
        Score(0.0, {}, "exception"),
    ]
    assert extra_metrics(scores) == {"reward/acc/mean": 0.5, "reward/format/mean": 1.0}
