import math

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import (
    apply_override,
    as_tree,
    changes,
    from_tree,
    load,
    read_yaml,
    to_yaml,
)
from tests.config.example import Group, Whole
from tests.refusals import refuses


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return to_file


def test_a_file_and_overrides_make_a_record(write):
    path = write("name: run\ngroup: {rate: 2, loss: {fn: gspo, clip_high: 4e-4}}\nfiles: one\n")
    config = load(Whole, path, ["count=5", "count=6", "group.limit=1", "group.other=k3"])
    loss = FunctionSpec("gspo", {"clip_high": 4e-4})
    group = Group(rate=2.0, limit=1.0, loss=loss, other=FunctionSpec("k3"))
    assert config == Whole(name="run", count=6, files=("one",), group=group)
    assert type(config.group.rate) is type(config.group.limit) is float


def test_exponents_are_floats_everywhere(write):
    numbers = {"1e-6": 1e-6, "5E3": 5e3, "+1e6": 1e6, "-2.5e-3": -2.5e-3, ".5e1": 5.0, "1.e2": 1e2}
    for text, value in numbers.items():
        assert read_yaml(write(f"x: {text}")) == {"x": value}
        tree = {}
        apply_override(tree, f"x={text}")
        assert tree == {"x": value} and type(tree["x"]) is float
    for text in ('"1e-6"', "1e", "e6", "1e-6s", "1.2.3", "-e1"):
        assert isinstance(read_yaml(write(f"x: {text}"))["x"], str), text


def test_files_that_can_not_be_read_are_named(tmp_path, subtests):
    path = tmp_path / "bad.yaml"
    for content in [
        *(b"a: [1, 2", b"a: b: c", b"a:\n\t- 1", b"\xff\xfe\xfa", b"a: 2024-13-45"),
        *(b"a: 1\n---\nb: 2\n", b"a: !!python/name:os.system", b"? [1, 2]\n: 3\n"),
        *(b"", b"- a\n- b\n", b"just words"),
        *(b"a: 1\nb: 2\na: 3\n", b"g:\n  a: 1\n  a: 1\n", b"g: {a: 1, a: 2}"),  # a key twice
    ]:
        path.write_bytes(content)
        with subtests.test(str(content)), pytest.raises(ConfigError, match=r"bad.yaml") as caught:
            read_yaml(path)
        assert "\n" not in str(caught.value)
    for other in (tmp_path / "no.yaml", tmp_path):
        with pytest.raises(ConfigError, match=other.name):
            read_yaml(other)


def test_the_same_key_in_two_groups_and_a_merge_are_fine(write):
    text = "base: &base {a: 1, b: 2}\nmore: {<<: *base, a: 3}\n"
    assert read_yaml(write(text)) == {"base": {"a": 1, "b": 2}, "more": {"a": 3, "b": 2}}
    assert read_yaml(write("1: x\n'1': y\n")) == {1: "x", "1": "y"}


def test_overrides():
    for override, tree in {
        **{"a=1": {"a": 1}, "a.b.c=1": {"a": {"b": {"c": 1}}}, "a=": {"a": None}},
        **{"a=null": {"a": None}, "a=[x, 2]": {"a": ["x", 2]}, "a=x=y": {"a": "x=y"}},
        **{"a={fn: f, k: 1e-2}": {"a": {"fn": "f", "k": 0.01}}, "a=mine.py:f": {"a": "mine.py:f"}},
        **{"a=true": {"a": True}, 'a="1"': {"a": "1"}, "a=b c": {"a": "b c"}},
    }.items():
        built = {}
        apply_override(built, override)
        assert built == tree, override
    tree = {"loss": "ppo_clip", "other": "k1", "kl": None, "group": {"a": 1, "b": 2}, "gone": {}}
    for override in ("loss.clip_high=0.28", "loss.fn=gspo", "kl.fn=k3", "group.a=5", "gone=null"):
        apply_override(tree, override)
    apply_override(tree, "group.c.d=6")
    assert tree == {
        "loss": {"fn": "gspo", "clip_high": 0.28},
        "other": "k1",
        "kl": {"fn": "k3"},
        "group": {"a": 5, "b": 2, "c": {"d": 6}},
        "gone": None,
    }


def test_malformed_overrides(write, subtests):
    for override in [
        *("seed", "=1", "", ".a=1", "a.=1", "a..b=1", "--seed"),
        *("a={x: 1", "a=[", "a=b: c: d", "a=2024-13-45", "a={b: 1, b: 2}"),
    ]:
        with subtests.test(override), pytest.raises(ConfigError, match=r"^override") as caught:
            apply_override({}, override)
        assert repr(override) in str(caught.value)
    for value in (1, True, 0, [1, 2]):
        with pytest.raises(ConfigError, match=r"'a\.b=1'"):  # inside a value
            apply_override({"a": value}, "a.b=1")
    with refuses("name"):
        load(Whole, write("name: n"), ["name.x=1"])


def test_unknown_keys_have_the_nearest_real_one(write):
    for tree, key, nearest in [
        *(({"cuont": 1}, "cuont", "count"), ({"group": {"Rate": 1}}, "group.Rate", "rate")),
        ({"grup": {"rate": 1}}, "grup", "group"),
    ]:
        with pytest.raises(ConfigError, match=f"'{nearest}'") as caught:
            from_tree(Whole, {"name": "n", **tree})
        assert caught.value.keys == (key,)
    for override in ("group.limt=1", "grup.rate=1"):
        with pytest.raises(ConfigError, match="unknown"):
            load(Whole, write("name: n"), [override])
    with refuses("7"):
        from_tree(Whole, {"name": "n", 7: 1})
    assert from_tree(Whole, {"name": "n", "table": {7: 1}}).table == {"7": 1}


WRONG_TYPES = {
    **{"name": [3, None, ["a"], {"a": 1}], "project": [1.5], "count": ["3", 3.0, True, None]},
    **{"most": ["all", False], "flag": [1, "true", None]},
    **{"files": [[1], None, {"a": "b"}, ["a", ["b"]]], "table": [[1], None]},
    **{"group": [3, "x", []], "group.rate": ["fast", True, None, math.nan]},
    **{"group.limit": ["none", math.nan], "group.other": [3]},
    "group.loss": [3, None, {"fn": 3}, ["gspo"]],
}


def test_wrong_types_are_named(subtests):
    for name, value in ((name, value) for name, some in WRONG_TYPES.items() for value in some):
        group, _, leaf = name.rpartition(".")
        tree = {group: {leaf: value}} if group else {leaf: value}
        with subtests.test(f"{name}={value}"), refuses(name):
            from_tree(Whole, {"name": "n", **tree})


def test_every_kind_of_value_that_is_right():
    group = {"limit": 0, "loss": "gspo", "other": {"fn": "k3"}}
    config = from_tree(Whole, {"name": "n", "most": 4, "flag": True, "group": group})
    assert (config.most, config.flag, config.group.limit) == (4, True, 0.0)
    assert config.group.loss == FunctionSpec("gspo"), "the default's keywords are not mixed in"
    nothing = {"most": None, "project": None, "group": {"limit": None}}
    for tree in ({}, {"group": None}, nothing):
        assert from_tree(Whole, {"name": "n", **tree}) == Whole(name="n")


def test_all_that_is_wrong_is_said_at_once():
    with refuses("group.rate", "most", "name", "cuont", "group.limt"):
        from_tree(Whole, {"cuont": 1, "most": "all", "group": {"rate": True, "limt": 1}})


# ---------------------------------------------------------------------------------------- printed

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["1e-6", "12e4567", "+1E5", ".5e1", "null", "~", "yes", "0x1F", "2024-01-01", "1:30", "a: b #c"]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SPECS = st.builds(
    FunctionSpec, TEXTS, st.dictionaries(TEXTS.filter(lambda t: t != "fn"), PLAIN, max_size=3)
)


FLOATS = st.floats(allow_nan=False)
GROUPS = st.builds(
    Group, rate=FLOATS, limit=st.none() | FLOATS, loss=SPECS, other=st.none() | SPECS
)
FILES, TABLES = st.lists(TEXTS, max_size=3), st.dictionaries(TEXTS, PLAIN, max_size=3)


@given(st.builds(Whole, name=TEXTS, files=FILES.map(tuple), table=TABLES, group=GROUPS))
def test_yaml_of_a_config_builds_the_same_config(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(Whole, path) == config
    assert from_tree(Whole, as_tree(config)) == config


def test_yaml_keeps_the_order_of_the_keys_and_is_plain():
    text = to_yaml(Whole(name="ä", files=("a",)))
    assert [*yaml.safe_load(text)][:3] == ["name", "count", "most"]
    assert "ä" in text and "!!" not in text


def test_changes():
    before = {"a": 1, "g": {"x": 1, "y": [1], "f": {"fn": "k1"}}, "gone": 2, "z": None}
    after = {"a": 1, "g": {"x": 2, "y": [1, 2], "f": {"fn": "k1", "c": 3}}, "new": {"n": 0}, "z": 4}
    assert changes(before, after) == [
        "g.x: 1 -> 2",
        "g.y: [1] -> [1, 2]",
        "g.f.c: None -> 3",
        "gone: 2 -> None",
        "z: None -> 4",
        "new: None -> {'n': 0}",
    ]
    assert changes(before, before) == []
