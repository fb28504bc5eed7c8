"""Users' functions, tried on shapes before a model is loaded."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms import advantages, correction, kl, losses, reduce
from jaxrl_llm.algorithms.losses import TokenLoss
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import public_functions
from jaxrl_llm.config.load import load
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.training.bind import check_schedules, resolve_functions
from tests.refusals import refuses


def resolved(keys):
    return resolve_functions(load(TrainConfig, "quickstart", keys))


def undefined_name(logprobs):
    return logprobs * not_there  # noqa: F821


def looped(logprobs):
    return jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x + 1, logprobs)


def branching(scores):
    return scores if scores.sum() > 0 else -scores


def with_numpy(logprobs, ref_logprobs):
    return np.asarray(logprobs) - np.asarray(ref_logprobs)


CAN_NOT_WORK = [
    ("loss", lambda logprobs, advantages: -(logprobs * advantages).mean()),
    ("loss", lambda logprobs: logprobs.sum(1)),
    ("loss", lambda logprobs: (logprobs, {})),
    ("loss", lambda logprobs: (logprobs > 0).astype(jnp.int32)),
    ("loss", lambda logprobs: TokenLoss(logprobs, {"fine": logprobs, "clipfrac": logprobs > 0})),
    ("loss", undefined_name),
    ("loss", looped),
    ("loss", lambda logprobs, scores: logprobs * scores),
    ("loss", lambda logprobs, sees: logprobs),
    ("advantage", branching),
    ("advantage", lambda scores: 3),
    ("advantage", lambda scores: scores[:2]),
    ("advantage", lambda scores, values: scores),  # without returns
    ("reduce", lambda mask: mask.sum()),
    ("reduce", "jaxrl_llm.algorithms.kl:k3"),  # a function of another kind
    ("kl_loss", with_numpy),
    ("kl_reward", lambda logprobs: logprobs.mean()),
    ("penalty", lambda scores: scores.sum()),
    ("group_filter", lambda scores: scores),
    ("high_covariance", lambda mask: mask[:, 0]),
    ("correction", [lambda mask: mask[:, 0]]),
    ("distillation", lambda student_logprobs, teacher_logprobs: jnp.sum(student_logprobs)),
]
BESIDE = {
    "high_covariance": {"algorithm.loss": "clip_cov"},
    "distillation": {"teacher.path": "teacher"},
}


def test_a_function_that_can_not_work_is_named_with_its_key(subtests):
    for number, (key, function) in enumerate(CAN_NOT_WORK):
        with subtests.test(f"{number}: {key}"), refuses(f"algorithm.{key}"):
            resolved({f"algorithm.{key}": function, **BESIDE.get(key, {})})


def test_a_controller_is_tried_with_numbers_where_there_is_a_kl():
    keys = {"algorithm.kl_controller": lambda coef, observed_kl, batch_size: -coef}
    with refuses("algorithm.kl_controller"):
        resolved(keys | {"algorithm.kl_loss": "k3"})
    resolved(keys)
    resolved({"algorithm.kl_loss": "k3", "algorithm.kl_controller.fn": "adaptive"})
    resolved({"algorithm.kl_reward": with_numpy})  # outside of any program


def test_losses_of_other_models_are_tried_too():
    for section, advantage in (("critic", "gae"), ("implicit_reward_model", "prime")):
        with refuses(f"{section}.loss"):
            resolved({"algorithm.advantage": advantage, f"{section}.loss": lambda mask: mask.sum()})


def test_an_optimizer_or_a_schedule_itself_is_refused_and_a_function_of_it_taken():
    schedule = optax.cosine_decay_schedule(1e-3, 100)
    for key, itself in (("optim.optimizer", optax.adamw(1e-3)), ("optim.schedule", schedule)):
        with refuses(key):
            resolved({key: itself})
    resolved({"optim.optimizer": lambda learning_rate: optax.adamw(learning_rate, b1=0.8)})
    resolved({"optim.schedule": lambda: schedule})


@pytest.mark.parametrize("key", ["optim", "critic.optim"])
def test_negative_learning_rates_are_refused(key):
    keys = {"algorithm.advantage": "gae", "critic.optim.schedule.value": 1e-3}
    linear = {"fn": "linear_schedule", "init_value": 1.0, "end_value": -1.0}
    # 150 steps of two updates: the last is number 299
    resolved(keys | {f"{key}.schedule": linear | {"transition_steps": 598}})
    for schedule in (
        {"fn": "constant_schedule", "value": -1e-3},
        linear | {"transition_steps": 590},  # below 0 for update 296
        lambda: lambda count: jnp.log(count - 10.0),
    ):
        with refuses(f"{key}.schedule"):
            resolved(keys | {f"{key}.schedule": schedule})


def test_where_epochs_decide_schedules_are_checked_once_the_steps_are_known():
    falling = {"fn": "linear_schedule", "init_value": 1, "end_value": -1, "transition_steps": 90}
    config = load(TrainConfig, "quickstart", {"steps": None, "optim.schedule": falling})
    functions = resolve_functions(config)
    check_schedules(config, functions, 23)
    with refuses("optim.schedule"):
        check_schedules(config, functions, 24)


OF_ANOTHER_KIND = {
    *("kl_penalized_rewards", "to_tokens", "whiten", "select_clip_cov", "select_kl_cov"),
    *("normalized", "mismatch_metrics", "fixed", "adaptive"),
}
NEED_A_NUMBER = {"dro", "sequence_mean_token_sum_norm"}
ASK_FOR_KEYS = {"gdpo": {"reward.components": ["score"]}, "reverse_kl": {"teacher.path": "teacher"}}


def test_no_function_of_the_library_is_refused():
    kinds = {"advantage": advantages, "loss": losses, "correction": correction, "reduce": reduce}
    more = {
        "clip_cov": {"algorithm.high_covariance": "select_clip_cov"},
        "kl_cov": {"algorithm.high_covariance": "select_kl_cov"},
        **ASK_FOR_KEYS,
    }
    refused = set()
    for key, module in (kinds | {"kl_loss": kl}).items():
        for name in public_functions(module):
            try:
                resolved(more.get(name, {}) | {f"algorithm.{key}": name})
            except ConfigError:
                refused.add(name)
    assert refused == OF_ANOTHER_KIND | NEED_A_NUMBER


def test_what_changes_scores_is_refused_just_where_it_changes_nothing(monkeypatch, subtests):
    """Where neither the advantage nor a filter of answers reads the scores."""
    monkeypatch.setattr("jaxrl_llm.training.bind.check_functions", lambda *_: None)  # slow
    changes = {
        "algorithm.penalty": lambda response_lengths: -1.0 * response_lengths,
        "algorithm.kl_reward": lambda logprobs, ref_logprobs: logprobs - ref_logprobs,
    }
    reads = {"grpo": True, "gae": True, "gdpo": False, "reverse_kl": False}
    for name, reader in [*((name, name) for name in reads), ("own", lambda raw_scores: raw_scores)]:
        for of_groups, filter_, is_read in (
            (None, None, reads.get(name, False)),
            ("with_spread", None, reads.get(name, False)),
            (None, lambda response_lengths: response_lengths > 2, reads.get(name, False)),
            ("with_spread", "best_of_group", True),
        ):
            keys = ASK_FOR_KEYS.get(name, {}) | {"algorithm.advantage": reader}
            keys |= {"algorithm.group_filter": of_groups, "algorithm.answer_filter": filter_}
            for key, change in changes.items():
                expected = contextlib.nullcontext() if is_read else refuses(key)
                with subtests.test(f"{name} {of_groups} {filter_} {key}"), expected:
                    resolved(keys | {key: change})
