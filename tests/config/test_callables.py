import functools
import pickle
import subprocess
import sys

import pytest

from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import LOSSES, FunctionSpec, load_function, renamed_functions
from jaxrl_llm.config.load import as_tree, from_tree, load, read_yaml, to_yaml
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.runs.directory import source_of, user_functions
from tests.refusals import refuses

NOTEBOOK = """
import functools
import math

LIMIT = 3
UNUSED = 4


def bounded(x):
    return min(x, LIMIT)


def capped(logprobs, old_logprobs, advantages, *, cap):
    # a comment, which does not count
    return bounded(
        cap * math.exp(logprobs)
    )
"""


def notebook(text=NOTEBOOK):
    """Return what a notebook's cells define, with sources as IPython keeps them."""
    import linecache

    name = f"<cell {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    cells = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), cells)
    return cells


@pytest.fixture
def capped(monkeypatch):
    cells = notebook()
    monkeypatch.setattr(sys.modules["__main__"], "capped", cells["capped"], raising=False)
    return cells["capped"]


def test_a_function_stands_where_a_config_names_one(capped):
    keys = {"steps": 20, "algorithm.loss": functools.partial(capped, cap=1.5)}
    config = load(
        TrainConfig, "quickstart", keys | {"algorithm": {"correction": [capped, "icepop"]}}
    )
    assert config.steps == 20
    assert config.algorithm.loss == FunctionSpec("__main__:capped", {"cap": 1.5}, capped)
    assert config.algorithm.correction[0].given is capped
    assert list(user_functions(config)) == ["algorithm.loss", "algorithm.correction.0"]
    bound = load_function(config.algorithm.loss, LOSSES, passed=None)
    assert bound(0.0, 0.0, 0.0) == 1.5
    assert load_function(config.algorithm.loss, "math", passed=None).func is capped
    for keys in (  # keywords come on top
        {"algorithm.loss": capped, "algorithm.loss.cap": 2.0},
        {"algorithm.loss": {"fn": capped, "cap": 2.0}},
    ):
        assert load(TrainConfig, "quickstart", keys).algorithm.loss.kwargs == {"cap": 2.0}
    with refuses("algorithm.loss"):
        load(TrainConfig, "quickstart", {"algorithm.loss": 3})


def test_a_function_that_can_be_imported_is_named(capped):
    """And so is every function in the file of a config."""
    spec = FunctionSpec.of(functools.partial(ppo_clip, clip_high=0.3))
    assert spec == FunctionSpec("jaxrl_llm.algorithms.losses:ppo_clip", {"clip_high": 0.3})
    assert load_function(spec, "math", passed=None).func is ppo_clip
    assert FunctionSpec.of(lambda x: x).given is not None
    table = {"cap": 1.5, "by": len, "of": (1, [2.0])}
    config = load(TrainConfig, "quickstart", {"algorithm.loss": functools.partial(capped, **table)})
    written = {"fn": "__main__:capped", "cap": 1.5, "by": "builtins:len", "of": [1, [2.0]]}
    assert as_tree(config)["algorithm"]["loss"] == written


def test_a_command_line_has_no_functions_of_a_notebook(capped, tmp_path):
    (tmp_path / "config.yaml").write_text(
        to_yaml(load(TrainConfig, "quickstart", {"algorithm.loss": {"fn": capped, "cap": 1.25}}))
    )
    tree = read_yaml(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="--function-from"):
        load_function(from_tree(TrainConfig, tree).algorithm.loss, LOSSES, key="algorithm.loss")
    (tmp_path / "mine.py").write_text(NOTEBOOK)
    tree = renamed_functions(tree, str(tmp_path / "mine.py"))
    loss = load_function(from_tree(TrainConfig, tree).algorithm.loss, LOSSES, passed=None)
    assert loss(0.0, 0.0, 0.0) == 1.25


def test_another_process_gets_the_function_by_value(capped, tmp_path):
    (tmp_path / "spec").write_bytes(pickle.dumps(FunctionSpec.of(functools.partial(capped, cap=2))))
    program = (
        "import pickle, sys; from jaxrl_llm.config.functions import load_function; "
        "spec = pickle.load(open(sys.argv[1], 'rb')); "
        "print(load_function(spec, 'math', passed=None)(0, 0, 0))"
    )
    words = [sys.executable, "-c", program, tmp_path / "spec"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.stdout == "2.0\n", done.stderr


def test_a_source_is_another_one_only_if_something_that_counts_has_changed(tmp_path):
    for old, new, same in [
        *(("LIMIT = 3", "LIMIT = 4", False), ("min(x", "max(x", False)),
        *(("cap * math", "-cap * math", False), ("UNUSED = 4", "UNUSED = 5", True)),
        *(("# a comment", "# another comment", True), ("        cap *", "      cap *", True)),
    ]:
        assert old in NOTEBOOK
        (tmp_path / "mine.py").write_text(NOTEBOOK)
        spec = FunctionSpec(f"{tmp_path}/mine.py:capped")
        before = source_of(spec)
        assert "UNUSED" not in before and source_of(FunctionSpec.of(notebook()["capped"])) == before
        (tmp_path / "mine.py").write_text(NOTEBOOK.replace(old, new))
        assert (source_of(spec) == before) == same, new
        given = source_of(FunctionSpec.of(notebook(NOTEBOOK.replace(old, new))["capped"]))
        assert (given == before) == same, new


def test_a_file_that_is_no_text_has_a_source_that_tells_it_from_others(tmp_path):
    """As an extension module, or one in another encoding."""
    path, sources = tmp_path / "mine.py", []
    for text in ("é = 1", "é = 2"):
        path.write_text(f"# -*- coding: latin-1 -*-\n{text}\n", encoding="latin-1")
        sources.append(source_of(FunctionSpec(f"{path}:capped")))
    assert sources[0] != sources[1] and all(s.startswith("# no source") for s in sources)


MODULE = """
WIDTH = 3


class Block:
    def __call__(self, x):
        return x * WIDTH


class Whole(Block):
    UNUSED = 1

    def __init__(self):
        self.block = Block()
"""


def test_a_class_of_a_notebook_has_a_source_and_so_has_what_it_uses():
    source = source_of(FunctionSpec.of(notebook(MODULE)["Whole"]))
    assert all(part in source for part in ("class Block:", "WIDTH = 3", "class Whole(Block):"))
    for old, new in {"WIDTH = 3": "WIDTH = 4", "x * W": "x + W", "Block()": "Block(), 1"}.items():
        other = notebook(MODULE.replace(old, new))["Whole"]
        assert source_of(FunctionSpec.of(other)) != source, new


def test_lambdas_partials_and_imported_names_have_sources_too(tmp_path):
    def lambda_of(value):
        return lambda scores: [s * value for s in scores] + [1.5]

    one, other = (lambda scores: scores * 2), (lambda scores: scores * 3)
    assert source_of(FunctionSpec.of(one)) != source_of(FunctionSpec.of(other))
    assert source_of(FunctionSpec.of(lambda_of(1))) != source_of(FunctionSpec.of(one))
    (tmp_path / "mine.py").write_text("from math import sqrt\nhalved = sqrt\n")
    text = source_of(FunctionSpec(f"{tmp_path}/mine.py:sqrt"))
    assert text == "from math import sqrt\nhalved = sqrt\n", "the whole file"
    for name in ("optax:adamw", "no.such:f"):  # of packages
        assert source_of(FunctionSpec(name)) is None
