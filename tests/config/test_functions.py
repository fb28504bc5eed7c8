"""Functions named by a config: how they are found, and what is said when they are not."""

import functools
import sys

import jax.numpy as jnp
import optax
import pytest

from jaxrl_llm.algorithms import advantages, losses
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.functions import (
    ADVANTAGES,
    KLS,
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    FunctionSpec,
    closest,
    load_function,
)

MINE = '''
"""A user's file."""
import functools

def scaled(scores, group_ids, *, scale: float, shift: float | None = None, name: str = "a",
           count: int = 1, flag: bool = False, anything=None):
    return scores * scale

def open_ended(scores, **settings):
    return settings

def dated(scores, *, scale: "float" = 1.0):
    return scale

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


def refusal(spec, home=ADVANTAGES, **more):
    """Return the message of a ConfigError, which must be one line that begins with the key."""
    with pytest.raises(ConfigError) as caught:
        load_function(spec, home, key="algorithm.advantage", **more)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("algorithm.advantage")
    return message


# ---------------------------------------------------------------------------------- forms of a name


def test_bare_name_comes_from_the_home_of_its_kind():
    assert load_function(FunctionSpec("grpo"), ADVANTAGES, passed=None) is advantages.grpo
    assert load_function(FunctionSpec("ppo_clip"), LOSSES, passed=None) is losses.ppo_clip


@pytest.mark.parametrize(
    "name",
    [
        "jaxrl_llm.algorithms.advantages:grpo",
        "jaxrl_llm.algorithms.advantages.grpo",
        "jaxrl_llm.algorithms.advantages:grpo",
    ],
)
def test_a_dotted_name_is_imported_whatever_the_home(name):
    assert load_function(FunctionSpec(name), LOSSES, passed=None) is advantages.grpo


def test_a_name_in_a_users_file_with_an_absolute_and_a_relative_path(mine, monkeypatch):
    spec = FunctionSpec(f"{mine}:scaled", {"scale": 3.0})
    absolute = load_function(spec, ADVANTAGES, passed=None)
    assert absolute(2.0, None) == 6.0
    monkeypatch.chdir(mine.parent)
    relative = load_function(
        FunctionSpec("./mine.py:scaled", {"scale": 3.0}), ADVANTAGES, passed=None
    )
    assert relative.func is absolute.func, "the file is run once"


def test_files_of_the_same_name_are_different_modules(tmp_path):
    functions = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"def where(): return {folder!r}\n")
        functions.append(
            load_function(FunctionSpec(f"{tmp_path / folder / 'same.py'}:where"), "math")
        )
    assert [f() for f in functions] == ["a", "b"]


def test_an_edited_file_is_read_again(mine):
    spec = FunctionSpec(f"{mine}:scaled", {"scale": 3.0})
    before = load_function(spec, ADVANTAGES, passed=None)
    mine.write_text(MINE.replace("scores * scale", "scores + scale"))
    after = load_function(spec, ADVANTAGES, passed=None)
    assert (before(2.0, None), after(2.0, None)) == (6.0, 5.0)


def test_a_partial_and_a_class_serve_too(mine):
    halved = load_function(FunctionSpec(f"{mine}:halved"), ADVANTAGES, passed=None)
    assert halved(4.0, None) == 2.0
    spec = FunctionSpec(f"{mine}:Estimator", {"scale": 2.0})
    assert load_function(spec, ADVANTAGES, passed=None)(4.0).value == 8.0


def test_without_keywords_the_function_itself_comes_back_and_with_them_a_partial():
    assert load_function(FunctionSpec("k3"), KLS, passed=None).__name__ == "k3"
    bound = load_function(FunctionSpec("ppo_clip", {"clip_high": 0.28}), LOSSES, passed=None)
    assert isinstance(bound, functools.partial)
    assert bound.keywords == {"clip_high": 0.28}


# ---------------------------------------------------------------------------------------- not found


def test_unknown_name():
    message = refusal(FunctionSpec("grop"))
    assert "no function 'grop' in jaxrl_llm.algorithms.advantages" in message
    assert "did you mean 'grpo'? (known:" in message
    assert "rloo" in message


def test_the_nearest_name_is_found_in_another_case():
    assert "did you mean 'rloo'?" in refusal(FunctionSpec("RLOO"))


def test_an_unknown_name_in_a_large_module_gets_the_nearest_name_only():
    message = refusal(FunctionSpec("adamww"), OPTIMIZERS)
    assert "did you mean 'adamw'?" in message
    assert len(message) < 200


def test_a_name_that_is_no_function(mine):
    assert "no function 'CONSTANT'" in refusal(FunctionSpec(f"{mine}:CONSTANT"))


def test_unknown_name_in_a_users_file(mine):
    message = refusal(FunctionSpec(f"{mine}:scled"))
    assert f"no function 'scled' in {mine}; did you mean 'scaled'?" in message


def test_unknown_module():
    message = refusal(FunctionSpec("jaxrl_llm.algorithms.advantagez:grpo"))
    assert "can't import 'jaxrl_llm.algorithms.advantagez'" in message
    assert "did you mean 'jaxrl_llm.algorithms.advantages'?" in message
    assert "can't import 'no_such_package.mod'" in refusal(FunctionSpec("no_such_package.mod:f"))
    assert "can't import 'math.pi'" in refusal(FunctionSpec("math.pi:f"))


def test_a_module_that_lacks_an_import_of_its_own_is_named(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(FunctionSpec("needs_more:f"))
    assert "can't import 'needs_more': No module named 'no_such_dependency'" in message


def test_unknown_file(mine):
    message = refusal(FunctionSpec(f"{mine.parent}/mien.py:scaled"))
    assert f"no file '{mine.parent}/mien.py'" in message
    assert "did you mean 'mine.py'?" in message


@pytest.mark.parametrize("name", [":f", ".mod:f", "pkg..mod:f", "my-file:f", "folder/file:f", "."])
def test_malformed_module(name):
    assert "is not a module's name; expected pkg.mod or my_file.py" in refusal(FunctionSpec(name))


@pytest.mark.parametrize("name", ["", "jaxrl_llm.algorithms.advantages:"])
def test_empty_name(name):
    assert "no function ''" in refusal(FunctionSpec(name))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nraise RuntimeError('mine\\nand more')\n", "2: RuntimeError: mine"),
        ("def f():\n    return not_there\n\nf()\n", "2: NameError: name 'not_there' is not def"),
        ("def f(:\n    pass\n", "1: SyntaxError: invalid syntax"),
        ("import no_such_dependency\n", "1: ModuleNotFoundError: No module named 'no_such_dep"),
        ("import sys\nsys.exit(0)\n", "2: SystemExit: 0"),
    ],
)
def test_an_error_inside_a_users_file_is_one_line_and_leaves_nothing_behind(
    tmp_path, text, expected
):
    """A SyntaxError used to print 40 lines."""
    path = tmp_path / "broken.py"
    path.write_text(text)
    before = set(sys.modules)
    assert f"algorithm.advantage: {path}:{expected}" in refusal(FunctionSpec(f"{path}:f"))
    assert set(sys.modules) == before
    path.write_text("def f(): return 1\n")
    assert load_function(FunctionSpec(f"{path}:f"), ADVANTAGES)() == 1


def test_an_error_inside_a_users_module_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("x = 1\nnot_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(FunctionSpec("broken_module:f"))
    assert f"can't import 'broken_module': {tmp_path}/broken_module.py:2: NameError: " in message


# ----------------------------------------------------------------------------------------- keywords


def test_unknown_keyword():
    message = refusal(FunctionSpec("ppo_clip", {"clip_hihg": 0.3}), LOSSES, passed=None)
    assert "'ppo_clip' takes no 'clip_hihg'; did you mean 'clip_high'?" in message
    assert "clip_low" in message
    assert "advantages" not in message.removeprefix("algorithm.advantage"), "not a keyword's place"


def test_unknown_keyword_of_a_function_without_keywords():
    assert "takes no 'x'; known: none" in refusal(FunctionSpec("k3", {"x": 1}), KLS, passed=None)


def test_missing_keyword(mine):
    message = refusal(FunctionSpec(f"{mine}:scaled"), passed=None)
    assert "needs a value for scale" in message
    assert "group_ids" not in message
    assert "needs a value for value" in refusal(FunctionSpec("constant_schedule"), SCHEDULES)


def test_keyword_that_the_trainer_gives(mine):
    spec = FunctionSpec("ppo_clip", {"advantages": 1.0})
    message = refusal(spec, LOSSES, passed=None)
    assert "'ppo_clip' is given 'advantages' by the trainer; remove it" in message
    spec = FunctionSpec("adamw", {"learning_rate": 1e-3})
    assert "remove it" in refusal(spec, OPTIMIZERS, passed=("learning_rate",))


def test_an_open_ended_function_takes_any_keyword_but_the_trainers(mine):
    spec = FunctionSpec(f"{mine}:open_ended", {"anything": 1})
    assert load_function(spec, ADVANTAGES, passed=None)(0.0) == {"anything": 1}
    given = FunctionSpec(f"{mine}:open_ended", {"learning_rate": 1})
    assert "remove it" in refusal(given, passed=("scores", "learning_rate"))


@pytest.mark.parametrize(
    ("keyword", "value", "expected"),
    [
        ("scale", "0.5", "a float"),
        ("scale", True, "a float"),
        ("scale", None, "a float"),
        ("scale", [1.0], "a float"),
        ("shift", "1", "a float"),
        ("shift", False, "a float"),
        ("name", 3, "a str"),
        ("count", 1.5, "a int"),
        ("count", True, "a int"),
        ("flag", 1, "a bool"),
        ("flag", "true", "a bool"),
    ],
)
def test_mistyped_keyword(mine, keyword, value, expected):
    keywords = {"scale": 1.0} | {keyword: value}
    message = refusal(FunctionSpec(f"{mine}:scaled", keywords), passed=None)
    assert message.startswith(f"algorithm.advantage.{keyword}: got {value!r} ")
    assert message.endswith(f"expected {expected}")


def test_whole_numbers_become_floats_where_floats_are_wanted(mine):
    keywords = {"scale": 2, "shift": 3, "count": 4, "anything": 5}
    bound = load_function(FunctionSpec(f"{mine}:scaled", keywords), ADVANTAGES, passed=None)
    assert {n: type(v) for n, v in bound.keywords.items()} == {
        "scale": float,
        "shift": float,
        "count": int,
        "anything": int,
    }
    assert bound.keywords == keywords
    assert keywords["scale"] == 2


def test_a_whole_number_passes_the_type_hooks_of_a_real_loss():
    loss = load_function(FunctionSpec("ppo_clip", {"dual_clip": 3}), LOSSES, passed=None)
    ones = jnp.ones((1, 2))
    assert loss(ones, ones, ones).loss.tolist() == [[-1.0, -1.0]]


def test_none_where_the_annotation_allows_it(mine):
    keywords = {"scale": 2.0, "shift": None}
    bound = load_function(FunctionSpec(f"{mine}:scaled", keywords), ADVANTAGES, passed=None)
    assert bound.keywords["shift"] is None


def test_annotations_that_are_no_plain_types_are_left_to_the_function():
    schedule = load_function(FunctionSpec("constant_schedule", {"value": 1}), SCHEDULES)
    assert schedule()(0) == 1
    assert load_function(FunctionSpec("linear_schedule"), SCHEDULES, passed=None) is (
        optax.linear_schedule
    )


def test_a_builtin_without_a_signature_is_left_to_check_itself():
    assert load_function(FunctionSpec("builtins:max", {"default": 7}), "math")([]) == 7


def test_the_config_of_a_spec_builds_it_again():
    assert FunctionSpec("gae", {"lam": 0.95}).as_config() == {"fn": "gae", "lam": 0.95}


# -------------------------------------------------------------------------------------------- hints


def test_hint():
    assert closest("lama", ["gamma", "lam"]) == "did you mean 'lam'? (known: gamma, lam)"
    assert closest("zzz", ["b", "a"]) == "known: a, b"
    assert closest("zzz", []) == "known: none"
    many = [f"name_{i:03d}" for i in range(100)]
    assert closest("Name_001", many) == "did you mean 'name_001'?"
    assert closest("zzz", many).count(",") == 99


def test_only_what_a_config_can_cause_is_blamed_on_it():
    with pytest.raises(RuntimeError, match="a bug"), config_errors_at("key"):
        raise RuntimeError("a bug")
    with pytest.raises(ConfigError, match=r"^key: TypeError$"), config_errors_at("key"):
        raise TypeError
    with pytest.raises(ConfigError, match=r"^other: text$"), config_errors_at("key"):
        raise ConfigError("other: text")
