"""From YAML and overrides to records: what is built, and what is said when it can't be."""

import dataclasses
import math
from pathlib import Path

import pytest

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import apply_override, find_config, from_tree, load, read_yaml
from jaxrl_llm.config.programs import TrainConfig
from tests.config.example import Group, Whole


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return to_file


def refusal(function, *args):
    """Return the message of a ConfigError, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(tree, **more):
    return refusal(from_tree, Whole, {"name": "n", **tree, **more})


# -------------------------------------------------------------------------------------------- files


def test_a_file_and_overrides_make_a_record(write):
    path = write("name: run\ngroup: {rate: 2, loss: {fn: gspo, clip_high: 4e-4}}\nfiles: one\n")
    config = load(Whole, path, ["count=5", "group.limit=1", "group.other=k3"])
    assert config == Whole(
        name="run",
        count=5,
        files=("one",),
        group=Group(
            rate=2.0,
            limit=1.0,
            loss=FunctionSpec("gspo", {"clip_high": 4e-4}),
            other=FunctionSpec("k3"),
        ),
    )
    assert type(config.group.rate) is float
    assert type(config.group.limit) is float


def test_missing_groups_and_keys_take_their_defaults():
    assert from_tree(Whole, {"name": "n"}) == Whole(name="n")
    assert from_tree(Whole, {"name": "n", "group": None}) == Whole(name="n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5E3", 5e3),
        ("+1e6", 1e6),
        ("-2.5e-3", -2.5e-3),
        (".5e1", 5.0),
        ("1.e2", 100.0),
        ("1.5", 1.5),
    ],
)
def test_exponents_are_floats_everywhere(write, text, value):
    assert read_yaml(write(f"x: {text}")) == {"x": value}
    tree = {}
    apply_override(tree, f"x={text}")
    assert tree == {"x": value}
    assert type(tree["x"]) is float


@pytest.mark.parametrize("text", ['"1e-6"', "1e", "e6", "1e-6s", "1.2.3", "-e1"])
def test_what_is_no_number_stays_a_text(write, text):
    assert isinstance(read_yaml(write(f"x: {text}"))["x"], str)


def test_unreadable_file(tmp_path):
    path = tmp_path / "no.yaml"
    assert refusal(read_yaml, path) == f"can't read {str(path)!r}: No such file or directory"
    assert "Is a directory" in refusal(read_yaml, tmp_path)


def test_a_folder_hides_no_packaged_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # such as a run's
    (tmp_path / "other").mkdir()
    assert find_config("quickstart").is_file()
    assert find_config("other") == Path("other")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [1, 2", "is not YAML"),
        (b"a: b: c", "mapping values are not allowed here"),
        (b"a:\n\t- 1", "is not YAML"),
        (b"\xff\xfe\xfa", "is not YAML"),
        (b"a: 2024-13-45", "is not YAML"),
        (b"a: 1\n---\nb: 2\n", "is not YAML"),
        (b"a: !!python/name:os.system", "is not YAML"),
        (b"", "got NoneType, expected a mapping of keys to values"),
        (b"- a\n- b\n", "got list, expected a mapping"),
        (b"just words", "got str, expected a mapping"),
    ],
)
def test_malformed_file(tmp_path, content, expected):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    message = refusal(read_yaml, path)
    assert str(path) in message
    assert expected in message


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "g:\n  a: 1\n  a: 1\n", "g: {a: 1, a: 2}"])
def test_a_key_that_comes_twice_is_refused(write, text):
    assert "the key 'a' comes twice" in refusal(read_yaml, write(text))


def test_the_same_key_in_two_groups_and_a_merge_are_fine(write):
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, a: 3}\n"
    assert read_yaml(write(text)) == {"base": {"a": 1, "b": 2}, "more": {"a": 3, "b": 2}}
    assert read_yaml(write("1: x\n'1': y\n")) == {1: "x", "1": "y"}
    assert "is not YAML" in refusal(read_yaml, write("? [1, 2]\n: 3\n"))


# ---------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "tree"),
    [
        ("a=1", {"a": 1}),
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
        ("a=", {"a": None}),
        ("a=null", {"a": None}),
        ("a=[x, 2]", {"a": ["x", 2]}),
        ("a={fn: f, k: 1e-2}", {"a": {"fn": "f", "k": 0.01}}),
        ("a=x=y", {"a": "x=y"}),
        ("a=mine.py:f", {"a": "mine.py:f"}),
        ("a=true", {"a": True}),
        ('a="1"', {"a": "1"}),
        ("a=b c", {"a": "b c"}),
    ],
)
def test_override_of_nothing(override, tree):
    built = {}
    apply_override(built, override)
    assert built == tree


def test_overrides_in_a_tree():
    tree = {"loss": "ppo_clip", "kl": None, "group": {"a": 1, "b": 2}, "list": [1]}
    for override in ("loss.clip_high=0.28", "kl.fn=k3", "group.a=5", "list=[2]", "group.c.d=6"):
        apply_override(tree, override)
    assert tree == {
        "loss": {"fn": "ppo_clip", "clip_high": 0.28},
        "kl": {"fn": "k3"},
        "group": {"a": 5, "b": 2, "c": {"d": 6}},
        "list": [2],
    }
    apply_override(tree, "loss.fn=gspo")
    assert tree["loss"] == {"fn": "gspo", "clip_high": 0.28}
    apply_override(tree, "loss=gspo")
    assert tree["loss"] == "gspo"
    apply_override(tree, "group=null")
    assert tree["group"] is None


def test_later_overrides_win(write):
    assert load(Whole, write("name: a"), ["name=b", "name=c"]).name == "c"


@pytest.mark.parametrize("override", ["seed", "=1", "", ".a=1", "a.=1", "a..b=1", "--seed"])
def test_malformed_override(override):
    message = refusal(apply_override, {}, override)
    assert message == f"override {override!r}: expected key=value, as in seed=1"


@pytest.mark.parametrize(
    "override", ["a={x: 1", "a=[", "a=b: c: d", "a=2024-13-45", "a={b: 1, b: 2}"]
)
def test_override_with_a_malformed_value(override):
    assert refusal(apply_override, {}, override) == (
        f"override {override!r}: the value is not YAML"
    )


@pytest.mark.parametrize("value", [1, True, 0, [1, 2]])
def test_override_inside_a_value(value):
    message = refusal(apply_override, {"a": value}, "a.b=1")
    assert message == "override 'a.b=1': 'a' is a value, not a group of keys"


def test_override_inside_a_text_key_is_refused_when_built(write):
    message = refusal(load, Whole, write("name: n"), ["name.x=1"])
    assert message == "name: expected a text, got {'fn': 'n', 'x': 1} (dict)"


# ------------------------------------------------------------------------------------ what is built


def test_unknown_key_with_the_nearest_real_one():
    message = refused({"cuont": 1})
    assert message.startswith("unknown key 'cuont'; did you mean 'count'? (known: count, files,")
    message = refused({"group": {"Rate": 1}})
    assert message.startswith("unknown key 'group.Rate'; did you mean 'rate'?")
    assert "unknown key '7'" in refused({7: 1})
    assert from_tree(Whole, {"name": "n", "table": {7: 1}}).table == {"7": 1}


def test_unknown_key_by_override(write):
    message = refusal(load, Whole, write("name: n"), ["group.limt=1"])
    assert message.startswith("unknown key 'group.limt'; did you mean 'limit'?")
    assert "unknown key 'grup'; did you mean 'group'?" in refusal(
        load, Whole, write("name: n"), ["grup.rate=1"]
    )


def test_missing_key():
    assert refusal(from_tree, Whole, {}) == "name is missing: a text"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("name", 3, "a text"),
        ("name", None, "a text"),
        ("name", ["a"], "a text"),
        ("name", {"a": 1}, "a text"),
        ("project", 1.5, "a text"),
        ("count", "3", "a whole number"),
        ("count", 3.0, "a whole number"),
        ("count", True, "a whole number"),
        ("count", None, "a whole number"),
        ("most", "all", "a whole number"),
        ("most", False, "a whole number"),
        ("flag", 1, "true or false"),
        ("flag", "true", "true or false"),
        ("flag", None, "true or false"),
        ("files", [1], "a text"),
        ("files", None, "a text"),
        ("files", {"a": "b"}, "a text"),
        ("files", ["a", ["b"]], "a text"),
        ("table", [1], "a mapping"),
        ("table", None, "a mapping"),
        ("group", 3, "a group of keys"),
        ("group", "x", "a group of keys"),
        ("group", [], "a group of keys"),
        ("group.rate", "fast", "a number"),
        ("group.rate", True, "a number"),
        ("group.rate", None, "a number"),
        ("group.rate", math.nan, "a number"),
        ("group.limit", "none", "a number"),
        ("group.limit", math.nan, "a number"),
        ("group.loss", 3, "a function's name or {fn: NAME, keyword: …}"),
        ("group.loss", None, "a function's name"),
        ("group.loss", {"fn": 3}, "a function's name"),
        ("group.loss", ["gspo"], "a function's name"),
        ("group.other", 3, "a function's name"),
    ],
)
def test_wrong_type(name, value, expected):
    group, _, leaf = name.rpartition(".")
    message = refused({group: {leaf: value}} if group else {leaf: value})
    assert message.startswith(f"{name}: expected {expected}")
    if not isinstance(value, list):
        assert f", got {'nothing' if value is None else repr(value)}" in message


def test_every_kind_of_value_that_is_right():
    config = from_tree(
        Whole,
        {
            "name": "n",
            "most": 4,
            "flag": True,
            "files": ["a", "b"],
            "table": {"x": [1, {"y": None}]},
            "project": "p",
            "group": {"limit": 0, "loss": "gspo", "other": {"fn": "k3"}},
        },
    )
    assert (config.most, config.flag, config.files, config.project) == (4, True, ("a", "b"), "p")
    assert config.table == {"x": [1, {"y": None}]}
    assert config.group.limit == 0.0
    assert config.group.loss == FunctionSpec("gspo"), "the default's keywords are not mixed in"
    assert config.group.other == FunctionSpec("k3")


def test_null_takes_nothing_where_nothing_is_allowed():
    config = from_tree(
        Whole, {"name": "n", "most": None, "project": None, "group": {"limit": None}}
    )
    assert (config.most, config.project, config.group.limit) == (None, None, None)


def test_records_are_frozen_and_share_no_default():
    first, second = Whole(name="a"), Whole(name="b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.count = 4  # pyright: ignore[reportAttributeAccessIssue]
    first.table["x"] = 1
    assert second.table == {}


def test_keywords_without_a_name_go_to_the_default_function():
    tree = {"run_dir": "x", "model": {"path": "m"}, "data": {"train": "t"}}
    apply_override(tree, "algorithm.loss.clip_high=0.3")
    assert from_tree(TrainConfig, tree).algorithm.loss == FunctionSpec(
        "ppo_clip", {"clip_high": 0.3}
    )
    apply_override(tree, "algorithm.kl_loss.coef=1")  # no default: a name is needed
    with pytest.raises(ConfigError, match=r"algorithm.kl_loss: expected a function's name"):
        from_tree(TrainConfig, tree)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        from_tree(Whole, {"cuont": 1, "most": "all", "group": {"rate": True, "limt": 1}})
    assert sorted(line.split(";")[0] for line in caught.value.args) == [
        "group.rate: expected a number, got True (bool)",
        "most: expected a whole number, or null, got 'all' (str)",
        "name is missing: a text",
        "unknown key 'cuont'",
        "unknown key 'group.limt'",
    ]
