import dataclasses

import hypothesis.strategies as st
import yaml
from hypothesis import given

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import as_tree, changes, describe, from_tree, load, to_yaml
from tests.config.example import Group, Whole

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


@given(
    name=TEXTS,
    rate=st.floats(allow_nan=False),
    limit=st.none() | st.floats(allow_nan=False),
    files=st.lists(TEXTS, max_size=3),
    table=st.dictionaries(TEXTS, PLAIN, max_size=3),
    loss=SPECS,
    other=st.none() | SPECS,
)
def test_yaml_of_a_config_builds_the_same_config(
    tmp_path_factory, name, rate, limit, files, table, loss, other
):
    config = Whole(
        name=name,
        files=tuple(files),
        table=table,
        group=Group(rate=rate, limit=limit, loss=loss, other=other),
    )
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(Whole, path) == config
    assert from_tree(Whole, as_tree(config)) == config


def test_yaml_keeps_the_order_of_the_keys_and_is_plain():
    text = to_yaml(Whole(name="ä", files=("a",)))
    assert list(yaml.safe_load(text)) == [f.name for f in dataclasses.fields(Whole)]
    assert "ä" in text
    assert "!!" not in text


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


def test_description():
    assert describe(Whole) == [
        ("name", "(required)", "a text"),
        ("count", "3", "a whole number"),
        ("most", "null", "a whole number or nothing"),
        ("flag", "false", "yes or no"),
        ("files", "[]", "texts"),
        ("table", "{}", "a mapping"),
        ("project", "null", "a text or nothing"),
        ("group.rate", "0.001", "a number"),
        ("group.limit", "null", "a number or nothing"),
        ("group.loss", "{fn: ppo_clip, clip_low: 0.1}", "a function"),
        ("group.other", "null", "a function or nothing"),
    ]
