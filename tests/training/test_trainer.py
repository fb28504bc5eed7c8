"""Parts of a step: passes of models, the engine's weights, scores, and what trackers are told."""

import math
from decimal import Decimal
from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import ValidationConfig
from jaxrl_llm.data.chat import PolicyTokens
from jaxrl_llm.data.dataset import Prompt
from jaxrl_llm.monitoring.clock import Clock
from jaxrl_llm.rewards.runner import Score
from jaxrl_llm.rewards.scoring import check_reward_rows
from jaxrl_llm.rollout.engine import Completion, Engine, EngineError, Receipt
from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out
from jaxrl_llm.runs.checkpoint import Saved
from jaxrl_llm.training.bind import resolve_functions
from jaxrl_llm.training.buffer import Buffer, PolicyWeights, Sampler, Scorer
from jaxrl_llm.training.experience import with_ages
from jaxrl_llm.training.loop import OpenFiles
from jaxrl_llm.training.roles import Models, Reference, Role
from jaxrl_llm.training.teachers import TeacherPrompts, Teachers
from jaxrl_llm.training.trainer import RLTrainer, extra_metrics, step_histograms
from jaxrl_llm.training.update import Learner, TrainState
from jaxrl_llm.types import Batch
from tests.refusals import refuses

STATE = TrainState({}, (), jnp.int32(0), jnp.int32(0))
PROMPT = Prompt(0, (1, 2), "arithmetic", "3")
TOKENS = PolicyTokens(Mock(decode=lambda ids, **options: "x"), (0,))


def config_of(**tree):
    base = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}, **tree}
    return from_tree(TrainConfig, base)


def trainer_of(config, infer, *, models=()):
    """Return a trainer of which only the actor's pass and these models are real."""
    role = Role(
        name="actor",
        learner=Mock(spec=Learner, shape=None),
        infer=infer,
        learning_rate=lambda updates: 0.1,
        max_skipped=1,
    )
    absent = dict.fromkeys(("tower", "reference", "teacher", "teacher_prompts"))
    return RLTrainer(
        *(config, resolve_functions(config)),
        (Mock(spec=OpenFiles, total_steps=2), Saved(0, {"actor": STATE}, {})),
        models=Models(**{"roles": {"actor": role}, **absent, **dict(models)}),
        sampler=Mock(spec=Sampler, keeps_cache=False, tokens=TOKENS),
        scorer=Mock(spec=Scorer),
        buffer=Mock(spec=Buffer),
        validation_prompts=[],
    )


DRAWN = Completion(np.array([5]), np.zeros(1, np.float32), np.array([0]), "length")


@pytest.mark.parametrize("prompted", [False, True])
def test_servers_are_asked_before_the_other_models_are_run(prompted):
    """Those that read other prompts wait for the scores, of which these may tell."""
    zeros, calls = np.zeros((2, 4), np.float32), Mock()
    attached = {"teacher": Mock(spec=Teachers), "reference": Mock(spec=Reference)}
    for name, part in attached.items():
        calls.attach_mock(part, name)
    calls.infer.return_value = {"logprobs": zeros, "entropy": zeros}
    calls.reference.logprobs.return_value = zeros
    calls.teacher.add_logprobs.side_effect = lambda batch, rollouts: (batch, {"told": 1.0})
    prompts = Mock(spec=TeacherPrompts) if prompted else None
    models = {"teacher_prompts": prompts, **attached}
    config = config_of(batch={"prompts_per_step": 2, "prompts_per_minibatch": 1})
    trainer = trainer_of(config, calls.infer, models=models)
    answered = Rollouts([PROMPT] * 2, [Episode.of(PROMPT.tokens, DRAWN)] * 2, ["3", "4"])
    batch = with_ages(lay_out(answered, samples=2, max_tokens=4), 1)
    _, metrics = trainer.add_logprobs(batch, answered, 1, Clock())
    run = ["infer", "reference.logprobs"]
    asked = run if prompted else ["teacher.begin", *run, "teacher.add_logprobs"]
    assert [name for name, *_ in calls.mock_calls] == asked
    assert ("told" in metrics) is not prompted


def test_with_the_engines_logprobs_the_policy_runs_over_the_first_sequences_only():
    widths = []

    def infer(params, batch):
        widths.append(len(batch.sequence_lengths))
        zeros = np.zeros(batch.tokens.shape, np.float32)
        return {"logprobs": zeros + 1, "entropy": zeros + 2, "sum_pi_squared": zeros + 3}

    tokens = np.ones((4, 8), np.int32)
    fields = {"mask": tokens > 0, "rollout_logprobs": np.ones((4, 8), np.float32)}
    fields |= {name: np.zeros((4, 8), np.int32) for name in ("ages", "versions")}
    batch = Batch(tokens, np.full(4, 8, np.int32), fields)
    lengths = {"data": {"train": "t", "max_prompt_tokens": 4}, "rollout": {"max_new_tokens": 4}}
    for from_engine, expected in ((True, 2), (False, 4)):  # 17 tokens hold two sequences of 8
        algorithm = {"use_rollout_logprobs": from_engine}
        config = config_of(batch={"max_tokens_per_device": 17}, algorithm=algorithm, **lengths)
        got, metrics = trainer_of(config, infer).add_old_logprobs(batch, 1)
        np.testing.assert_array_equal(got["old_logprobs"], np.ones((4, 8)))
        assert metrics["training/rollout_logprobs_diff_mean"] == 0
        assert widths.pop() == expected
    assert got["sum_pi_squared"][0, 0] == 3 and "logprobs" not in got.fields


def sampler_of(engine, weights=None):
    rest = {"seed": 0, "folder": Path("r")}
    return Sampler(config_of().rollout, engine, TOKENS, weights or Mock(), **rest)


def test_what_the_engine_echoes_is_compared_with_what_was_sent():
    for echo, is_right in (
        (Receipt(3, 17), True),
        (Receipt(3, 18), False),
        (Receipt(2, 17), False),
        (Receipt(3, None), True),  # it has compared by itself
        (Receipt(2, None), False),
    ):
        engine = Mock(spec=Engine, **{"load.return_value": echo})
        weights = Mock(spec=PolicyWeights, merged=Mock(), checksum=Mock(return_value=17))
        sampler = sampler_of(engine, weights)
        if is_right:
            assert sampler.sync({}, 3) == {"perf/moved_gb": 0.0}
        else:
            with pytest.raises(EngineError, match="version 3"):
                sampler.sync({}, 3)
        assert weights.checksum.called == (echo.checksum is not None)


def test_the_engine_holds_its_cache_only_while_it_samples():
    names = ["wake", "sample", "sleep"]
    engine = Mock(spec=Engine, **{"sample.return_value": [DRAWN]})
    sampler_of(engine).sample_validation([PROMPT], 1, ValidationConfig())
    assert [name for name, *_ in engine.mock_calls] == names
    engine = Mock(spec=Engine, **{"sample.side_effect": RuntimeError("gone")})
    with pytest.raises(RuntimeError, match="gone"):
        sampler_of(engine).sample_canaries(Rollouts([PROMPT], [], []), 1)
    assert [name for name, *_ in engine.mock_calls] == names


# ------------------------------------------------------------------------- rewards and metrics


def function_of(name):
    return config_of(reward={"function": name}).reward.function


def reward_row(source, truth):
    return {"data_source": source, "reward_model": {"ground_truth": truth}}


TESTS = {"fn": "python_tests", "sandbox": "process"}
WRONG_TRUTHS = [
    ("by_source", "mystery", "3"),
    ("by_source", "search", {"target": []}),
    ("arithmetic", "mystery", True),
    ({"fn": "math_dapo", "turn_bonus": 0.1}, "mystery", math.inf),
    (TESTS, "mystery", 3),
]


def test_rows_that_can_not_be_scored_are_refused_before_sampling(tmp_path, subtests):
    good = {"arithmetic": 3, "reasoning_gym/aiw": "3", "calculator": Decimal(3), "grid": [1]}
    rows = [reward_row(*row) for row in good.items()]
    check_reward_rows(function_of("by_source"), rows, "data.train")
    for name, source, truth in WRONG_TRUTHS:
        given = [*(rows if name == "by_source" else []), reward_row(source, truth)]
        refused = refuses("data.train", rows=(len(given) - 1,))
        with subtests.test(f"{name} {source} {truth}"), refused:
            check_reward_rows(function_of(name), given, "data.train")
    (tmp_path / "mine.py").write_text("def score(**item):\n    return 1.0")
    for own in (function_of(f"{tmp_path}/mine.py:score"), None):  # which may read anything
        check_reward_rows(own, [reward_row("mystery", [math.nan])], "data.train")


MASK = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
ENGINE = np.array([[0, -1, -2, 0], [0, 0, -3, -4], [0, 0, 0, 0]], np.float32)


def test_histograms_have_usable_answers_and_drawn_tokens_only():
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
