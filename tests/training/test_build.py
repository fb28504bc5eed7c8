"""What a run refuses before anything runs, and what its batches tell trackers."""

import math
from decimal import Decimal

import numpy as np

from jaxrl_llm.config.errors import RowError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import check_reward_rows
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.run import warm_start
from jaxrl_llm.training.trainer import extra_metrics, step_histograms
from jaxrl_llm.types import Batch
from tests.refusals import refuses


def config_of(**tree):
    base = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    return from_tree(TrainConfig, base | tree)


def reward_row(source, truth):
    return {"data_source": source, "reward_model": {"ground_truth": truth}}


TESTS = {"fn": "python_tests", "sandbox": "process"}
WRONG_TRUTHS = [
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
    (TESTS, "mystery", 3),
    (TESTS, "mystery", {"inputs": 1, "outputs": 1}),
    (TESTS, "mystery", '{"inputs": [1]}'),
]


def test_rows_that_can_not_be_scored_are_refused_before_sampling():
    good = {"arithmetic": 3, "reasoning_gym/aiw": "3", "calculator": Decimal(3), "grid": [1]}
    rows, taken = [reward_row(*row) for row in good.items()], []
    check_reward_rows(
        config_of(reward={"function": "by_source"}).reward.function, rows, "data.train"
    )
    for function, source, truth in WRONG_TRUTHS:
        chosen = config_of(reward={"function": function}).reward.function
        before = rows if function == "by_source" else []
        try:
            check_reward_rows(chosen, [*before, reward_row(source, truth)], "data.train")
            taken.append((function, source, truth))
        except RowError as error:
            assert error.keys == ("data.train",) and error.rows == (len(before),)
    assert not taken


def test_rows_for_a_reward_function_of_ones_own_may_have_anything(tmp_path):
    (tmp_path / "mine.py").write_text("def score(**item):\n    return 1.0")
    own = config_of(reward={"function": f"{tmp_path}/mine.py:score"}).reward.function
    for chosen in (own, None):
        check_reward_rows(chosen, [reward_row("mystery", [math.nan])], "data.train")


def test_what_a_config_can_not_mean_names_its_key():
    k3 = FunctionSpec("jaxrl_llm.algorithms.kl:k3").fn
    for key in ("reduce", "kl_controller"):  # a function of another kind
        with refuses(f"algorithm.{key}"):
            resolve_functions(config_of(algorithm={key: k3}))
    with refuses("model.warm_start"):
        warm_start(config_of(model={"path": "m", "warm_start": "not_there.yaml"}))
    with refuses("validation.samples"):
        config_of(validation={"samples": 4})
    with refuses("seed"):
        config_of(seed=2**32)


MASK = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
ENGINE = np.array([[0, -1, -2, 0], [0, 0, -3, -4], [0, 0, 0, 0]], np.float32)


def test_histograms_have_usable_answers_and_drawn_tokens_only():
    """Where no pass computes log-probs, there is no difference to show."""
    fields = {
        "mask": MASK,
        "usable": np.array([True, True, False]),
        "response_lengths": np.array([2, 2, 0], np.int32),
        "advantages": np.array([[9, 1, 2, 9], [9, 9, -1, -2], [9, 9, 9, 9]], np.float32),
        "rollout_logprobs": ENGINE,
    }
    batch = Batch(np.zeros((3, 4), np.int32), np.array([3, 4, 2], np.int32), fields)
    scores = [Score(1.0, {}, None), Score(0.25, {}, None), Score(9.0, {}, "failed")]
    expected = {
        "score": [1.0, 0.25],
        "response_length": [2, 2],
        "advantages": [1.0, 2.0, -1.0, -2.0],
        "logprob_diff": [0.5] * 4,
    }
    values = step_histograms(batch.add(old_logprobs=ENGINE + 0.5 * MASK), scores)
    assert {name: array.tolist() for name, array in values.items()} == expected
    for without in (batch, batch.add(old_logprobs=ENGINE)):
        assert "logprob_diff" not in step_histograms(without, scores)


def test_numbers_that_a_reward_function_reports_are_averaged_over_the_answers_that_have_them():
    """A model's digits may be an int that no float can hold, and a ratio of nothing is NaN."""
    given = [1.0, True, 4, math.nan, -math.inf, None, 10**400, 1e39, "5", [6.0]]
    scores = [Score(0.0, {"form": value, "no": math.nan}, None) for value in given]
    scores += [Score(1.0, {"acc": 1.0, "text": "4"}, None), Score(0.0, {"acc": 0}, "exception")]
    assert extra_metrics(scores) == {"reward/form/mean": 2.0, "reward/acc/mean": 0.5}
