"""Users' functions, tried on shapes before a model is loaded.

A scalar loss used to be refused only after validation and sampling, and a negative learning rate
trained backwards.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.algorithms import advantages, correction, kl, losses, reduce
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.files import PACKAGED, load
from jaxrl_llm.config.functions import public_functions
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.training.check_functions import check_schedules
from jaxrl_llm.training.resolve import resolve_functions


def resolved(keys, config="quickstart"):
    return resolve_functions(load(TrainConfig, config, keys))


def refusal(keys):
    with pytest.raises(ConfigError) as caught:
        resolved(keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -------------------------------------------------------------------------------- that are refused


def scalar(logprobs, advantages):
    return -(logprobs * advantages).mean()


def of_answers(logprobs):
    return logprobs.sum(1)


def undefined_name(logprobs):
    return logprobs * not_there  # noqa: F821


def looped(logprobs):
    return jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x + 1, logprobs)


def branching(scores):
    return scores if scores.sum() > 0 else -scores


def with_numpy(logprobs, ref_logprobs):
    return np.asarray(logprobs) - np.asarray(ref_logprobs)


def here(function):
    """Return `file:line` of a function's first statement."""
    return f"{__file__}:{inspect.getsourcelines(function)[1] + 1}"


BROADCAST = r"Incompatible shapes for broadcasting"


@pytest.mark.parametrize(
    ("key", "function", "expected"),
    [
        ("loss", scalar, "loss 'scalar' returned float32[] as 'loss'; expected a floating-point"),
        ("loss", of_answers, "returned float32[512] as 'loss'; expected a floating-point array [B"),
        ("loss", undefined_name, f"undefined_name: {here(undefined_name)}: NameError: name 'not_t"),
        ("loss", looped, "looped: ValueError: Reverse-mode differentiation does not work for lax"),
        ("loss", lambda logprobs, scores: logprobs * scores, BROADCAST),
        ("loss", lambda logprobs, sees: logprobs, "<lambda> asks for 'sees', which nothing prod"),
        ("advantage", branching, f"branching: {here(branching)}: TracerBoolConversionError: "),
        ("advantage", branching, "jnp.where for if"),
        ("advantage", lambda scores: 3, "returned <class 'int'> as advantages; expected an array"),
        ("advantage", lambda scores: scores[:2], "returned shape [2] as advantages; expected an"),
        ("advantage", lambda scores, values: scores, "expected a pair (advantages, returns)"),
        ("reduce", lambda mask: mask.sum(), "reduce '<lambda>' returned int32[]; expected a fl"),
        ("reduce", lambda mask: 1 / 0, "ZeroDivisionError: division by zero"),
        ("kl_loss", with_numpy, f"with_numpy: {here(with_numpy)}: TracerArrayConversionError"),
        ("kl_loss", lambda logprobs, ref_logprobs: logprobs.mean(), "kl '<lambda>' returned float"),
        ("kl_reward", lambda logprobs: logprobs.mean(), "kl '<lambda>' returned float32[]; expec"),
        ("penalty", lambda scores: scores.sum(), "'<lambda>' returned float32[]; expected one num"),
        ("penalty", lambda mask: mask[:, 0], "'<lambda>' returned bool[512]; expected one number"),
        ("group_filter", lambda scores: scores, "expected one true or false for each answer [B]"),
        ("high_covariance", lambda mask: mask[:, 0], "'<lambda>' returned bool[512]; expected tr"),
        ("correction", [lambda mask: mask[:, 0]], "'<lambda>' returned bool[512]; expected one w"),
    ],
)
def test_a_function_that_can_not_work_is_named_with_its_key(key, function, expected):
    more = {"algorithm.loss": "clip_cov"} if key == "high_covariance" else {}
    message = refusal({f"algorithm.{key}": function, **more})
    assert message.startswith(f"algorithm.{key}")
    assert expected in message


def test_a_controller_is_tried_with_numbers_where_there_is_a_kl():
    keys = {"algorithm.kl_controller": lambda coef, observed_kl, batch_size: -coef}
    message = refusal(keys | {"algorithm.kl_loss": "k3"})
    assert message == (
        "algorithm.kl_controller: '<lambda>' returned -0.001 for coef=0.001 and observed_kl=0.01; "
        "expected a number of 0 or more"
    )
    resolved(keys)
    resolved({"algorithm.kl_loss": "k3", "algorithm.kl_controller.fn": "adaptive"})


@pytest.mark.parametrize("section", ["critic", "implicit_reward_model"])
def test_losses_of_other_models_are_tried_too(section):
    advantage = "gae" if section == "critic" else "prime"
    keys = {"algorithm.advantage": advantage, f"{section}.loss": lambda mask: mask.sum()}
    message = refusal(keys)
    assert message.startswith(f"{section}.loss: loss '<lambda>' returned int32[] as 'loss'; expec")


# ------------------------------------------------------------------------ optimizers and schedules


def test_an_optimizer_itself_is_refused_with_a_function_to_give():
    message = refusal({"optim.optimizer": optax.adamw(1e-3)})
    assert message == (
        "optim.optimizer: expected a function of the learning rate, as in lambda learning_rate: "
        "optax.adamw(learning_rate), got a GradientTransformationExtraArgs"
    )
    resolved({"optim.optimizer": lambda learning_rate: optax.adamw(learning_rate, b1=0.8)})


def test_a_schedule_itself_is_refused_with_a_function_to_give():
    schedule = optax.cosine_decay_schedule(1e-3, 100)
    assert "give one itself as `lambda: schedule`" in refusal({"optim.schedule": schedule})
    resolved({"optim.schedule": lambda: schedule})


@pytest.mark.parametrize("key", ["optim", "critic.optim"])
def test_negative_learning_rates_are_refused(key):
    keys = {"algorithm.advantage": "gae", "critic.optim.schedule.value": 1e-3}
    message = refusal(keys | {f"{key}.schedule": {"fn": "constant_schedule", "value": -1e-3}})
    assert message.startswith(f"{key}.schedule: 'constant_schedule' gives the learning rate -0.001")
    linear = {"fn": "linear_schedule", "init_value": 1.0, "end_value": -1.0}
    # 150 steps of two updates: the last is number 299
    resolved(keys | {f"{key}.schedule": linear | {"transition_steps": 598}})
    message = refusal(keys | {f"{key}.schedule": linear | {"transition_steps": 590}})
    assert "for update 296 of 300, counted from 0; expected a finite number, 0 or more" in message
    nan = refusal(keys | {f"{key}.schedule": lambda: lambda count: jnp.log(count - 10.0)})
    assert "gives the learning rate nan for update 0" in nan


def test_where_epochs_decide_schedules_are_checked_once_the_steps_are_known():
    falling = {"fn": "linear_schedule", "init_value": 1, "end_value": -1, "transition_steps": 90}
    config = load(TrainConfig, "quickstart", {"steps": None, "optim.schedule": falling})
    functions = resolve_functions(config)
    check_schedules(config, functions, 23)
    with pytest.raises(ConfigError, match=r"gives the learning rate -0\.0222"):
        check_schedules(config, functions, 24)


@pytest.mark.parametrize(
    ("key", "function"),
    [
        ("schedule", lambda: lambda count: not_there),  # noqa: F821
        ("optimizer", lambda learning_rate: not_there),  # noqa: F821
    ],
)
def test_what_an_optimizer_or_a_schedule_raises_is_named(key, function):
    message = refusal({f"optim.{key}": function})
    assert message.startswith(f"optim.{key}: ")
    assert re.search(rf"does not work: {__file__}:\d+: NameError: name 'not_there'", message)


# ---------------------------------------------------------------------------------- that are taken


def test_a_kl_in_the_reward_may_compute_with_numpy():
    resolved({"algorithm.kl_reward": with_numpy})


CONFIGS = [path.relative_to(PACKAGED).as_posix() for path in PACKAGED.glob("recipes/*.yaml")]
CONFIGS += [f"quickstart{name}.yaml" for name in ("", "_online_dpo", "_raft")]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_no_recipe_is_refused(name):
    resolved({}, name)


OF_ANOTHER_KIND = {
    *("kl_penalized_rewards", "to_tokens", "whiten", "select_clip_cov", "select_kl_cov"),
    *("normalized", "mismatch_metrics", "fixed", "adaptive"),
}
NEED_A_NUMBER = {"dro", "sequence_mean_token_sum_norm"}


def test_no_function_of_the_library_is_refused():
    kinds = {"advantage": advantages, "loss": losses, "correction": correction, "reduce": reduce}
    more = {
        "clip_cov": {"algorithm.high_covariance": "select_clip_cov"},
        "kl_cov": {"algorithm.high_covariance": "select_kl_cov"},
        "gdpo": {"reward.components": ["score"]},
        "reverse_kl": {"teacher.path": "teacher"},
    }
    refused = set()
    for key, module in (kinds | {"kl_loss": kl}).items():
        for name in public_functions(module):
            try:
                resolved(more.get(name, {}) | {f"algorithm.{key}": name})
            except ConfigError:
                refused.add(name)
    assert refused == OF_ANOTHER_KIND | NEED_A_NUMBER
