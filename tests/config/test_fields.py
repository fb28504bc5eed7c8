import functools

import pytest

from jaxrl_llm.algorithms import advantages, kl, losses
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import (
    FIELDS,
    LOSSES,
    FunctionSpec,
    Stage,
    asks_for,
    call,
    check_fields,
    fields_at,
    fields_of_model,
    load_function,
)
from jaxrl_llm.config.sections import texts_below_keys
from jaxrl_llm.training.bind import abstract_fields
from tests.refusals import refuses


def test_only_positional_parameters_without_a_default_are_fields():
    def loss(logprobs, mask, scale=1.0, *, needed, clip=0.2, **more): ...

    def advantage(scores, group_ids): ...

    class Shifted:
        def __init__(self, scores): ...

        def apply(self, rewards, mask): ...

        def __call__(self, response_lengths): ...

    bound = load_function(FunctionSpec("ppo_clip", {"clip_high": 0.3}), LOSSES, passed=None)
    for function, fields in [
        (advantages.grpo, ("scores", "group_ids")),
        *(
            (of_loss, ("logprobs", "old_logprobs", "advantages"))
            for of_loss in (losses.ppo_clip, bound)
        ),
        *((kl.k3, ("logprobs", "ref_logprobs")), (loss, ("logprobs", "mask")), (lambda: None, ())),
        (functools.partial(advantage, group_ids=0), ("scores",)),
        *((Shifted, ("scores",)), (Shifted(0).apply, ("rewards", "mask"))),
        (Shifted(0), ("response_lengths",)),
    ]:
        assert asks_for(function) == fields


def test_call_passes_only_what_is_asked_for():
    fields = {"scores": 3, "mask": 5, "response_lengths": 7}
    assert call(lambda response_lengths, scores: (response_lengths, scores), fields) == (7, 3)
    assert call(lambda scores, /, mask: (scores, mask), fields) == (3, 5)
    assert call(functools.partial(lambda mask, *, by: mask * by, by=2), fields) == 10
    assert call(lambda: 1, fields) == 1


def test_every_field_is_known_and_nothing_else():
    for name in FIELDS:
        namespace = {}
        exec(f"def f({name}): ...", namespace)
        check_fields(namespace["f"], "algorithm.loss", available=FIELDS)

    def wrong(scores, old_logprob): ...

    with pytest.raises(ConfigError, match=r"^algorithm.loss: wrong.*'old_logprobs'"):
        check_fields(wrong, "algorithm.loss", available=FIELDS)
    available = fields_at(Stage.INFERRED)  # others exist only later
    with refuses("algorithm.advantage"):
        check_fields(losses.ppo_clip, "algorithm.advantage", available=available)
    check_fields(advantages.grpo, "algorithm.advantage", available=available)


def test_each_field_has_a_meaning_and_a_stage():
    assert list(texts_below_keys("jaxrl_llm.config.functions")["BatchFields"]) == list(FIELDS)
    assert all(fields_at(stage) for stage in Stage)
    assert fields_at(Stage.SELECTED) == set(FIELDS)
    assert fields_of_model("actor") == {"old_logprobs", "entropy", "sum_pi_squared"}
    assert fields_of_model("critic") == {"values", "old_values", "returns"}
    assert fields_of_model("implicit_reward_model") == {"reward_logprobs"}


def test_shapes_of_fields_are_those_of_the_table():
    shapes = abstract_fields(3, 5, 2, 4)
    assert (shapes["scores"].shape, shapes["scores"].dtype) == ((3,), "float32")
    assert (shapes["mask"].shape, shapes["mask"].dtype) == ((3, 5), "bool")
    assert (shapes["score_components"].shape, shapes["group_ids"].dtype) == ((3, 2), "int32")
    assert (shapes["teacher_ids"].shape, shapes["teacher_ids"].dtype) == ((3, 5, 4), "int32")
    assert list(shapes) == list(FIELDS)
