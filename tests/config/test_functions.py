import functools
import sys

import jax.numpy as jnp
import optax
import pytest

from jaxrl_llm.algorithms import advantages, losses
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import (
    ADVANTAGES,
    FIELDS,
    KLS,
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    FunctionSpec,
    Stage,
    asks_for,
    call,
    check_fields,
    fields_at,
    fields_of_model,
    load_function,
)
from tests.refusals import refuses

MINE = '''
"""A user's file."""
import functools

def scaled(scores, group_ids, *, scale: float, shift: float | None = None, name: str = "a",
           count: int = 1, flag: bool = False, anything=None):
    return scores * scale

def open_ended(scores, **settings):
    return settings

class Estimator:
    def __init__(self, scores, *, scale=1.0):
        self.value = scores * scale

halved = functools.partial(scaled, scale=0.5)
CONSTANT = 3
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def refused(spec, home=ADVANTAGES, **more):
    """Return the message of a ConfigError, which must be one line that begins with the key."""
    with pytest.raises(ConfigError) as caught:
        load_function(spec, home, key="algorithm.advantage", **more)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("algorithm.advantage")
    return message


def loaded(name, home=ADVANTAGES, **keywords):
    return load_function(FunctionSpec(name, keywords), home, passed=None)


def test_bare_names_have_a_home_and_dotted_ones_are_imported():
    assert loaded("grpo") is advantages.grpo
    assert loaded("ppo_clip", LOSSES) is losses.ppo_clip
    for name in ("jaxrl_llm.algorithms.advantages:grpo", "jaxrl_llm.algorithms.advantages.grpo"):
        assert loaded(name, LOSSES) is advantages.grpo


def test_a_name_in_a_users_file(mine, monkeypatch):
    absolute = loaded(f"{mine}:scaled", scale=3.0)
    assert absolute(2.0, None) == 6.0
    assert loaded(f"{mine}:halved")(4.0, None) == 2.0
    assert loaded(f"{mine}:Estimator", scale=2.0)(4.0).value == 8.0
    monkeypatch.chdir(mine.parent)
    relative = loaded("./mine.py:scaled", scale=3.0)
    assert relative.func is absolute.func, "the file is run once"
    mine.write_text(MINE.replace("scores * scale", "scores + scale"))
    edited = loaded(f"{mine}:scaled", scale=3.0)
    assert (absolute(2.0, None), edited(2.0, None)) == (6.0, 5.0)
    (mine.parent / "other").mkdir()
    (mine.parent / "other/mine.py").write_text("def scaled(): return 7")
    assert (loaded(f"{mine.parent}/other/mine.py:scaled")(), edited(2.0, None)) == (7, 5.0)


def test_names_that_are_not_found_get_the_nearest(mine, tmp_path, monkeypatch, subtests):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    (tmp_path / "broken_module.py").write_text("x = 1\nnot_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, part in [
        ("grop", "'grpo'"),
        ("RLOO", "'rloo'"),
        (f"{mine}:CONSTANT", "'CONSTANT'"),
        (f"{mine}:scled", "'scaled'"),
        (f"{tmp_path}/mien.py:scaled", "'mine.py'"),
        ("jaxrl_llm.algorithms.advantagez:grpo", "'jaxrl_llm.algorithms.advantages'"),
        *((f"{name}:f", f"'{name}'") for name in ("no_such_package.mod", "math.pi")),
        ("needs_more:f", "'no_such_dependency'"),
        ("broken_module:f", f"{tmp_path}/broken_module.py:2: NameError"),
        *((name, "pkg.mod") for name in (":f", ".mod:f", "pkg..mod:f", ".")),
        *((name, "pkg.mod") for name in ("my-file:f", "folder/file:f")),
        *((name, "''") for name in ("", "jaxrl_llm.algorithms.advantages:")),
    ]:
        with subtests.test(name):
            assert part in refused(FunctionSpec(name))
    message = refused(FunctionSpec("adamww"), OPTIMIZERS)
    assert "'adamw'" in message and len(message) < 200, "of a large module, not all"


def test_an_error_inside_a_users_file_is_one_line_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "broken.py"
    for text, expected in [
        ("x = 1\nraise RuntimeError('mine\\nand more')\n", "2: RuntimeError: mine"),
        ("def f(:\n    pass\n", "1: SyntaxError"),
        ("import sys\nsys.exit(0)\n", "2: SystemExit"),
    ]:
        path.write_text(text)
        before = set(sys.modules)
        assert f"algorithm.advantage: {path}:{expected}" in refused(FunctionSpec(f"{path}:f"))
        assert set(sys.modules) == before
    path.write_text("def f(): return 1\n")
    assert load_function(FunctionSpec(f"{path}:f"), ADVANTAGES)() == 1


def test_keywords_that_do_not_fit_are_named(mine, subtests):
    for name, home, keywords, parts in [
        ("ppo_clip", LOSSES, {"clip_hihg": 0.3}, ("'clip_hihg'", "'clip_high'", "clip_low")),
        ("k3", KLS, {"x": 1}, ("'x'", "none")),
        (f"{mine}:scaled", ADVANTAGES, {}, ("scale",)),
        ("ppo_clip", LOSSES, {"advantages": 1.0}, ("'advantages'", "remove")),
    ]:
        message = refused(FunctionSpec(name, keywords), home, passed=None)
        with subtests.test(f"{name} {keywords}"):
            assert all(part in message for part in parts), message
            assert "group_ids" not in message
    assert "value" in refused(FunctionSpec("constant_schedule"), SCHEDULES)
    spec = FunctionSpec("adamw", {"learning_rate": 1e-3})
    assert "remove" in refused(spec, OPTIMIZERS, passed=("learning_rate",))
    assert loaded(f"{mine}:open_ended", anything=1)(0.0) == {"anything": 1}
    given = FunctionSpec(f"{mine}:open_ended", {"learning_rate": 1})
    assert "remove" in refused(given, passed=("scores", "learning_rate"))


def test_mistyped_keywords(mine, subtests):
    for keyword, values in {
        "scale": ("0.5", True, None, [1.0]),
        **{"shift": ("1", False), "name": (3,), "count": (1.5, True), "flag": (1, "true")},
    }.items():
        for value in values:
            spec = FunctionSpec(f"{mine}:scaled", {"scale": 1.0} | {keyword: value})
            with subtests.test(f"{keyword}={value}"), refuses(f"algorithm.advantage.{keyword}"):
                load_function(spec, ADVANTAGES, key="algorithm.advantage", passed=None)


def test_whole_numbers_become_floats_where_floats_are_wanted(mine):
    keywords = {"scale": 2, "shift": 3, "count": 4, "anything": 5}
    bound = loaded(f"{mine}:scaled", **keywords)
    assert [*map(type, bound.keywords.values())] == [float, float, int, int]
    assert bound.keywords == keywords and type(keywords["scale"]) is int
    ones = jnp.ones((1, 2))  # a real loss has hooks of types
    assert loaded("ppo_clip", LOSSES, dual_clip=3)(ones, ones, ones).loss.tolist() == [[-1.0, -1.0]]
    assert loaded(f"{mine}:scaled", scale=2.0, shift=None).keywords["shift"] is None


def test_what_has_no_plain_types_or_no_signature_is_left_to_check_itself():
    schedule = load_function(FunctionSpec("constant_schedule", {"value": 1}), SCHEDULES)
    assert schedule()(0) == 1
    assert loaded("linear_schedule", SCHEDULES) is optax.linear_schedule
    assert load_function(FunctionSpec("builtins:max", {"default": 7}), "math")([]) == 7
    assert FunctionSpec("gae", {"lam": 0.95}).as_config() == {"fn": "gae", "lam": 0.95}


def test_only_what_a_config_can_cause_is_blamed_on_it():
    with pytest.raises(RuntimeError), config_errors_at("key"):
        raise RuntimeError("a bug")
    with pytest.raises(ConfigError, match=r"^key: TypeError$"), config_errors_at("key"):
        raise TypeError
    with pytest.raises(ConfigError, match=r"^other: text$"), config_errors_at("key"):
        raise ConfigError("other: text")


# ----------------------------------------------------------------------------------------- fields


def test_only_positional_parameters_without_a_default_are_fields():
    def loss(logprobs, mask, scale=1.0, *, needed, clip=0.2, **more): ...

    class Shifted:
        def __init__(self, scores): ...

        def apply(self, rewards, mask): ...

        def __call__(self, response_lengths): ...

    bound = loaded("ppo_clip", LOSSES, clip_high=0.3)
    for function, fields in [
        (bound, ("logprobs", "old_logprobs", "advantages")),
        (loss, ("logprobs", "mask")),
        (lambda: None, ()),
        (functools.partial(loss, mask=0), ("logprobs",)),
        (Shifted, ("scores",)),
        (Shifted(0).apply, ("rewards", "mask")),
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
    def wrong(scores, old_logprob): ...

    with pytest.raises(ConfigError, match=r"^algorithm.loss: wrong.*'old_logprobs'"):
        check_fields(wrong, "algorithm.loss", available=FIELDS)
    available = fields_at(Stage.INFERRED)  # others exist only later
    with refuses("algorithm.advantage"):
        check_fields(losses.ppo_clip, "algorithm.advantage", available=available)
    check_fields(advantages.grpo, "algorithm.advantage", available=available)


def test_fields_have_stages_and_models():
    assert all(fields_at(stage) for stage in Stage)
    assert fields_at(Stage.SELECTED) == set(FIELDS)
    assert fields_of_model("actor") == {"old_logprobs", "entropy", "sum_pi_squared"}
    assert fields_of_model("critic") == {"values", "old_values", "returns"}
    assert fields_of_model("implicit_reward_model") == {"reward_logprobs"}
