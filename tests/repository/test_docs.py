"""The pages agree with the code: keys, metrics, functions, listings and links."""

import ast
import inspect
import json
import math
import re
import shutil
import tomllib
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxrl_llm.algorithms import losses, preferences
from jaxrl_llm.config import functions, programs
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FIELDS, asks_for, load_function
from jaxrl_llm.config.load import describe, from_tree, load, read_config
from jaxrl_llm.config.programs import SftConfig, TrainConfig
from jaxrl_llm.config.sections import LogConfig, texts_below_keys
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.monitoring import trackers
from jaxrl_llm.reporting.page import metric_pattern
from jaxrl_llm.rollout.gateway.server import GATEWAY_METRICS
from jaxrl_llm.serving.app import COUNTERS, GAUGES
from jaxrl_llm.sharding.layout import AXES, CONTEXTS, DEFAULT_RULES
from jaxrl_llm.training.bind import PAIR_FIELDS, abstract_pairs, resolve_functions
from jaxrl_llm.training.load_model import own_rules
from jaxrl_llm.training.run import run_training
from jaxrl_llm.training.update import PolicyObjective, as_token_loss

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GSM8K = ROOT / "configs/gsm8k_qwen3_1.7b_grpo.yaml"
RECIPES = {path.stem: path for path in sorted((ROOT / "configs/recipes").glob("*.yaml"))}
COMMANDS = """\
python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python -m jaxrl_llm.train --config configs/quickstart.yaml
python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/pytest
"""  # noqa: E501
KINDS = {
    **{"Advantages": "advantages", "Losses": "losses", "Reductions": "reduce", "KL": "kl"},
    **{"Divergences": "divergences", "Penalties and filters": "shaping", "Pairs": "pairs"},
    **{"Off-policy corrections": "correction", "Value and reward-model losses": "values"},
    **{"Losses of preferences": "preferences", "Log-probs": "logprobs"},
}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name, language):
    """List the fenced code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(name), re.DOTALL | re.MULTILINE)


def rows(name):
    """List the table rows of a page, each a list of cells, without heads and rules."""
    lines = read(name).splitlines()
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("| ") and not following.startswith("|---")
    ]


def test_the_readme_is_short_and_opens_with_the_two_commands():
    assert len(read("README.md").splitlines()) <= 150
    assert blocks("README.md", r"\w*")[0] == COMMANDS


def test_the_readmes_loss_runs_from_the_readmes_config(tmp_path, monkeypatch):
    (source, _), (line,) = blocks("README.md", "python"), blocks("README.md", "yaml")
    (tmp_path / "my_losses.py").write_text(source)
    (tmp_path / "config.yaml").write_text("run_dir: r\nmodel: {path: m}\ndata: {train: t}\n" + line)
    monkeypatch.chdir(tmp_path)
    objective = resolve_functions(load(TrainConfig, "config.yaml")).updates["actor"].objective
    assert isinstance(objective, PolicyObjective)
    loss = objective.loss
    fields = {name: -jnp.ones((2, 3)) for name in asks_for(loss)} | {"mask": jnp.ones((2, 3), bool)}
    fields["rollout_logprobs"] *= 3
    token_loss = as_token_loss(loss(*(fields[n] for n in asks_for(loss))), loss, (2, 3))
    assert (token_loss.diagnostics["correction"] == 3.0).all(), "e^2 is cut to 3"


def test_links_and_paths_lead_somewhere():
    folders = "tests|configs|docs|algorithms|models|sharding|benchmarks|notebooks|jaxrl_llm"
    missing = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        paths = [page.parent / link.partition("#")[0] for link in links]
        named = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text())
        paths += [ROOT / path for path in named]
        missing += [f"{page.name}: {path}" for path in paths if not path.exists()]
    assert missing == []


def test_each_promise_is_held_by_tests():
    table = sections(2, read("docs/architecture.md"))["Promises, and what holds them"]
    promises = re.findall(r"^\| (.+?) \| (.*`.*) \|$", table, re.MULTILINE)
    assert len(promises) > 70
    for promise, holders in promises:
        paths = [ROOT / path for path in re.findall(r"`(tests/[\w./]+)`", holders)]
        assert paths, promise
        for path in paths:
            files = [*path.rglob("test_*.py")] if path.is_dir() else [path]
            assert any("def test_" in file.read_text() for file in files), f"{promise}: {path}"


def test_every_recipe_is_in_the_readmes_table_and_has_its_card_in_the_gallery():
    (table,) = re.findall(
        r"^\| algorithm \| recipes \|\n(.*?)\n\n", read("README.md"), re.DOTALL | re.M
    )
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(RECIPES)
    cards = re.findall(r"^  `--config recipes/(\w+)`", read("docs/gallery.md"), re.MULTILINE)
    assert sorted(cards) == sorted(RECIPES)


def twins(name):
    """List what stands in the column of our keys of a page: (cell, [(key, value or None)])."""
    cells = []
    for row in rows(f"docs/coming_from_{name}.md"):
        cell = row[1]
        if cell.startswith(("not supported yet", "not needed")) or re.match(r"`[a-z_]+/", cell):
            continue  # the latter is a metric
        quoted = re.findall(r"`([a-z_.]+)(?:: (.*?))?`", cell)
        assert quoted, cell
        cells.append((cell, [(key, value or None) for key, value in quoted]))
    return cells


def known_keys():
    """Return every key, and the keywords of the default loss, which the page uses as keys too."""
    keywords = inspect.signature(losses.ppo_clip).parameters.values()
    configs = (TrainConfig, SftConfig, programs.PreferConfig)
    return {name for cls in configs for name, _, _ in describe(cls, optional=True)} | {
        f"algorithm.loss.{p.name}" for p in keywords if p.kind is p.KEYWORD_ONLY
    }


PRODUCERS = {  # what a function needs besides its name, by the field that it asks for
    "high_covariance": "algorithm.high_covariance=select_kl_cov",
    "score_components": "reward.components=[a]",
    "teacher_logprobs": "teacher.path=t",
    "teacher_mask": "teacher.path=t",
    "teacher_ids": "teacher={path: t, top_k: 4}",
    "teacher_top_logprobs": "teacher={path: t, top_k: 4}",
}
READERS = {  # what makes a run read a section
    "critic": "algorithm.advantage=gae_whitened",
    "implicit_reward_model": "algorithm.advantage=prime",
    "reward.components": "algorithm.advantage=gdpo",
    "teacher": "algorithm.advantage=reverse_kl",
    "teacher.top_k": "algorithm.distillation=forward_kl_divergence",
    "algorithm.distillation": "teacher.path=t",
    "algorithm.high_covariance": "algorithm.loss=kl_cov",
    "reference": "algorithm.kl_loss=k3",
}
ON_PAIRS = (  # in place of what that config says of advantages
    *("algorithm.loss=ppo_clip", "algorithm.reduce=token_mean", "algorithm.kl_coef=0.001"),
    *("algorithm.kl_loss=null", "algorithm.pairs=best_and_worst", "algorithm.pair_loss=dpo"),
)


def find_functions(*overrides):
    """Find all functions of a config with these overrides; ConfigError where one is wrong."""
    read_by = [
        reader
        for section, reader in READERS.items()
        if any(o.startswith((f"{section}.", f"{section}=")) for o in overrides)
    ]
    makes_pairs = any(o.startswith("algorithm.pair") for o in overrides)
    words = ["algorithm.kl_loss=null", "steps=1", *read_by, *(ON_PAIRS if makes_pairs else ())]
    words += overrides
    try:
        return resolve_functions(load(TrainConfig, GSM8K, words))
    except ConfigError as error:
        lacking = re.search(r"is not set, but a function asks for '(\w+)'", str(error))
        if not lacking:
            raise
        return resolve_functions(load(TrainConfig, GSM8K, [*words, PRODUCERS[lacking[1]]]))


def test_the_keys_of_an_evaluation_are_those_of_its_page():
    page = read("docs/evaluate.md").partition("\n## Keys\n")[2]
    shown = re.findall(r"^\| `(.*?)` \| (?:`(.*?)`)? ?\| (.*) \|$", page, re.MULTILINE)
    assert shown == [
        (key, "" if default == "(required)" else default, meaning)
        for key, default, meaning in describe(programs.EvaluateConfig)
    ]


LIBRARIES = {"verl": 120, "trl": 60, "tunix": 55}
"""Those that readers come from, and how many rows of our keys their page has at least."""


@pytest.mark.parametrize("library", LIBRARIES)
def test_our_keys_exist_and_take_the_values_shown(library, subtests):
    table, known = twins(library), known_keys()
    assert len(table) > LIBRARIES[library]
    for cell, shown_keys in table:
        with subtests.test(cell):
            assert {key for key, _ in shown_keys} <= known
            shown = [f"{key}={value}" for key, value in shown_keys if value is not None]
            if shown:
                find_functions(*shown)


def test_verls_estimators_losses_and_aggregations_all_have_a_row():
    verl = """gae grpo grpo_vectorized gdpo grpo_passk reinforce_plus_plus rloo rloo_vectorized opo
        reinforce_plus_plus_baseline remax gpg optimal_token_baseline tir_optimal_token_baseline
        vanilla dppo_tv dppo_kl gspo sapo clip_cov kl_cov geo_mean dro cispo bypass_mode
        token-mean token-sum seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm"""
    theirs = " ".join(row[0] for row in rows("docs/coming_from_verl.md"))
    assert [name for name in verl.split() if f"`{name}`" not in theirs] == []


def test_every_key_that_the_text_names_exists():
    names = known_keys()
    groups = {name.partition(".")[0] for name in names if "." in name}
    text = "\n".join(read(f"docs/coming_from_{library}.md") for library in LIBRARIES)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    for page in ("metrics.md", "troubleshooting.md", "glossary.md", "tutorial/*.md"):
        prose += "".join(path.read_text() for path in (ROOT / "docs").glob(page))
    ours = [
        name
        for name in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:[:=] ?[^`]*)?`", prose)
        if name.partition(".")[0] in groups and not name.endswith((".py", ".jsonl", ".md"))
    ]
    assert len(ours) > 80
    sections = {name.rpartition(".")[0] for name in names}
    assert [name for name in ours if name not in names | sections] == []


def test_trls_arguments_exist():
    """Those of the page are words of TRL's source, where its version is the page's."""
    if find_spec("trl") is None or version("trl") not in read("docs/coming_from_trl.md"):
        pytest.skip("the page's version of trl is not installed")
    trl, transformers = (
        Path(find_spec(name).submodule_search_locations[0]) for name in ("trl", "transformers")
    )
    files = [*(trl / "trainer").glob("*.py"), *(trl / "experimental").rglob("*.py")]
    files.append(transformers / "training_args.py")
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    theirs = [
        name for row in rows("docs/coming_from_trl.md") for name in re.findall(r"`(\w+)", row[0])
    ]
    assert len(theirs) > 80
    assert [name for name in theirs if name not in words] == []


def test_the_tutorials_lines_are_those_of_the_config():
    page = read("docs/coming_from_verl.md")
    (_, table) = re.split(r"^## The tutorial's command$", page, flags=re.MULTILINE)
    pairs = re.findall(r"\| `([a-z_.]+): (.*?)`", table.partition("\n## ")[0])
    config = load(TrainConfig, GSM8K)
    assert len(pairs) > 20
    for key, value in pairs:
        assert load(TrainConfig, GSM8K, [f"{key}={value}"]) == config, key


def devices_of(sizes):
    """Return how many devices a mesh has; None where an axis of -1 takes what there is."""
    along = [sizes.get(axis, 1) for axis in AXES]
    return None if -1 in along else math.prod(along)


def test_the_meshes_of_the_page_are_of_as_many_devices_as_it_says():
    parts = re.split(r"^\*\*(\d+) GPUs?\*\*", read("docs/parallelism.md"), flags=re.MULTILINE)
    assert parts[1::2] == ["1", "8", "32"]
    for count, text in zip([8, 1, 8, 32], parts[::2], strict=True):
        shown = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert shown
        for block in map(yaml.safe_load, shown):
            load(TrainConfig, GSM8K, [f"{key}={json.dumps(value)}" for key, value in block.items()])
            meshes = [v for v in block["mesh"].values() if v and not v.keys() - {*AXES}]
            assert {devices_of(sizes) for sizes in meshes} <= {count}, block
            own_rules(block["mesh"].get("rules", {}))


def test_the_page_has_a_row_for_every_axis_and_names_every_dimension():
    text = read("docs/parallelism.md")
    named = [row[0].strip("`") for row in rows("docs/parallelism.md") if row[0][0] == "`"]
    axes = "data fsdp tensor expert context stage"
    assert [name for name in named if name not in CONTEXTS] == axes.split()
    assert [axis for axis in DEFAULT_RULES if f"`{axis}`" not in text] == []


def sections(level, text):
    """Return {title: text} of a text's sections of one level."""
    parts = re.split(rf"^{'#' * level} ", text, flags=re.MULTILINE)[1:]
    return {title: rest for title, _, rest in (part.partition("\n") for part in parts)}


def lines_of_functions():
    """Return {(kind, function): what a config says, or None for a part} of the last section."""
    settings = {}
    for kind, text in sections(3, sections(2, read("docs/algorithms.md"))["Functions"]).items():
        for quoted in re.findall(r"^- `(.*?)`:", text, flags=re.MULTILINE):
            key, _, value = quoted.partition(": ")
            name = re.search(r"\w+", re.sub(r"^\[?\{fn: |^\[", "", value or key))
            assert name, quoted
            assert (kind, name[0]) not in settings, quoted
            settings[kind, name[0]] = (key, value) if value else None
    return settings


def public_functions(module):
    names = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__
    ]
    return [n for n in names if not n.startswith("_") and inspect.isfunction(getattr(module, n))]


def test_every_function_has_its_line():
    modules = {k: import_module(f"jaxrl_llm.algorithms.{name}") for k, name in KINDS.items()}
    expected = {(k, name) for k, module in modules.items() for name in public_functions(module)}
    assert len(expected) > 60
    assert set(lines_of_functions()) == expected


def test_what_a_line_says_can_be_configured(subtests):
    for (_, name), setting in lines_of_functions().items():
        if setting:
            with subtests.test(name):
                key, value = setting
                find_functions(f"{key if '.' in key else f'algorithm.{key}'}={value}")


def within(part, whole):
    """Tell whether a tree of mappings lies in another."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and within(part[name], whole[name]) for name in part)
    return part == whole


def test_recipes_resolve_and_the_page_shows_their_lines(subtests):
    told = sections(3, sections(2, read("docs/algorithms.md"))["Recipes"])
    for name, path in RECIPES.items():
        with subtests.test(name):
            resolve_functions(load(TrainConfig, path))
            (text,) = (
                text for text in told.values() if f"(../configs/recipes/{name}.yaml)" in text
            )
            (shown,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
            recipe = read_config(path)
            assert within(yaml.safe_load(shown), recipe)
            assert yaml.safe_load(shown)["algorithm"] == recipe["algorithm"]


def test_algorithms_without_a_recipe_resolve_too():
    text = sections(2, read("docs/algorithms.md"))["Algorithms without a recipe"]
    shown = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(shown) > 3
    for block in shown:
        tree = yaml.safe_load(block)
        find_functions(*(f"{a}.{b}={json.dumps(v)}" for a in tree for b, v in tree[a].items()))


def test_the_fields_in_the_contracts_are_the_fields():
    listed = [row for row in rows("docs/contracts.md") if re.fullmatch(r"`\[.*\]`", row[1])]
    meanings = texts_below_keys("jaxrl_llm.config.functions")["BatchFields"]
    assert [[cell.replace("`", "") for cell in row] for row in listed] == [
        [name, f"[{field.axes}]", field.dtype, field.stage.name.lower(), meanings[name]]
        for name, field in FIELDS.items()
    ]


def test_what_sees_which_fields_in_the_contracts(tmp_path):
    """Try each field at each key: those that the table excepts are refused, the others are not."""
    path = tmp_path / "asking.py"
    path.write_text("\n".join(f"def ask_{field}({field}): ..." for field in FIELDS))
    table = {row[1]: row[2] for row in rows("docs/contracts.md") if row[1].startswith("`algor")}
    told = {key: text for keys, text in table.items() for key in re.findall(r"`([\w.]+)`", keys)}
    assert len(told) == 8
    for key, text in told.items():
        named = set(re.findall(r"`(\w+)`", text.partition(";")[0]))
        seen = named if text.startswith("what") else set(FIELDS) - named
        for field in FIELDS:
            value = f"{path}:ask_{field}"
            try:
                find_functions(f"{key}={f'[{value}]' if key.endswith('correction') else value}")
                is_seen = True
            except ConfigError as error:
                is_seen = "returned" in str(error)  # it was called, and has returned nothing
            assert (field in seen) == is_seen, (key, field)


def documented():
    """Return a pattern for each metric of the page; the table of trackers has other rows."""
    names = [row[0].strip("`") for row in rows("docs/metrics.md") if row[0].startswith("`")]
    return {name: metric_pattern(name) for name in names}


ASKING = """\
from jaxrl_llm.algorithms.advantages import gae


def everything(
    rewards, values, reward_logprobs, ref_logprobs, teacher_logprobs, greedy_scores, mask
):
    advantages, returns = gae(rewards, values, mask)
    apart = reward_logprobs - ref_logprobs - teacher_logprobs
    return advantages + apart - greedy_scores[:, None], returns


def all_groups(scores):
    return scores == scores
"""
PLAYING = '''\
import os
import time

from jaxrl_llm.data.call_formats import ToolCall
from jaxrl_llm.rollout import BrokenTool

HOW = iter(["failed", "timeout", "died", "broken"])


async def play(chat, tools, environment):
    await environment.begin()
    await chat.generate(max_tokens=2)
    chat.append(await tools.run([ToolCall("go_wrong", {"how": next(HOW, "not")})]))
    answer = await chat.generate(max_tokens=2)
    await environment.step(answer.text)


def go_wrong(how: str):
    """Go wrong.

    Args:
        how: in which way.
    """
    if how == "failed":
        raise ValueError
    if how == "timeout":
        time.sleep(60)
    if how == "died":
        os._exit(1)
    if how == "broken":
        raise BrokenTool
    return how


def listen():
    yield ""
'''


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The metrics of one step with experts, a critic, an agent and all else that writes."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(ROOT / "configs/agents/model", folder / "tokenizer")
    path = folder / "tokenizer/config.json"
    small = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "hidden_size": 16}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    small |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    small |= {"intermediate_size": 16}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))
    spec = read_spec(folder / "tokenizer")
    rng = np.random.default_rng(0)  # to compile `init_params` takes longer
    weights = jax.tree.map(
        lambda decl: jnp.asarray(0.05 * rng.normal(size=decl.shape), jnp.float32), declare(spec)
    )
    save_params(folder / "model", weights, spec, source=folder / "tokenizer", dtype=jnp.float32)
    (folder / "asking.py").write_text(ASKING)
    (folder / "playing.py").write_text(PLAYING)
    overrides = f"""
        run_dir={folder}/run steps=1 model.path={folder}/model
        model.warm_start=null data.train={folder}/train.parquet log.trackers=[]
        data.validation={folder}/validation.parquet data.prepare.out={folder}
        data.prepare.train_rows=8 data.prepare.validation_rows=2 data.prepare.sft_rows=0
        batch.prompts_per_step=2 batch.prompts_per_minibatch=2 batch.max_tokens_per_device=128
        rollout.samples_per_prompt=4 rollout.max_running_sequences=8 rollout.dump_every=0
        rollout.agent={folder}/playing.py:play rollout.tools=[{folder}/playing.py:go_wrong]
        rollout.environment={folder}/playing.py:listen rollout.max_new_tokens=64
        rollout.tool_process.timeout_s=1 rollout.tool_process.retries=0
        reward.workers=0 teacher.path.arithmetic={folder}/model teacher.top_k=2
        algorithm.distillation=generalized_jsd
        algorithm.advantage={folder}/asking.py:everything algorithm.correction=[truncated_token]
        algorithm.group_filter={folder}/asking.py:all_groups
        algorithm.kl_loss=k3 algorithm.entropy_coef=0.01 validation.samples=2 validation.every=1
        model.router_replay=rollout
        validation.before=false validation.temperature=1 checkpoint.every=0
    """
    with pytest.MonkeyPatch.context() as patch:  # one device compiles sooner than eight
        one = jax.devices()[:1]
        patch.setattr("jax.devices", lambda: one)
        run_training(load(TrainConfig, ROOT / "configs/quickstart.yaml", overrides.split()))
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return {name for line in lines for name in line} - {"step"}


def diagnostics():
    """Return the names that the losses log, each called on fields of ones."""
    ones = jnp.ones((2, 3))
    names = set()
    for name in public_functions(losses):
        if name.startswith("select_"):
            continue
        function = getattr(losses, name)
        marks = {"mask": ones > 0, "high_covariance": ones > 0, "ages": ones.astype(int)}
        more = {"beta": 1.0} if name == "dro" else {}
        result = function(*(marks.get(field, ones) for field in asks_for(function)), **more)
        names |= {f"actor/{diagnostic}" for diagnostic in result.diagnostics}
    for name in public_functions(preferences):
        function = getattr(preferences, name)
        if PAIR_FIELDS.issuperset(asks_for(function)):
            given = {name: like.dtype for name, like in abstract_pairs(3).items()}
            result = function(*(jnp.ones(3, given[field]) for field in asks_for(function)))
            names |= {f"actor/{diagnostic}" for diagnostic in result.diagnostics}
    return names


def test_every_metric_is_documented(written):
    assert len(written) > 80
    patterns = documented().values()
    everything = written | diagnostics() | set(GATEWAY_METRICS)
    assert [name for name in everything if not any(p.fullmatch(name) for p in patterns)] == []


def test_the_table_of_trackers_is_that_of_the_functions():
    table = {}
    for row in rows("docs/metrics.md"):
        if len(row) == 5 and row[1].strip("`") in trackers.__all__:
            table[row[1].strip("`")] = re.findall(r"`(\w+)`", row[3])
    settings = {
        name: list(inspect.signature(getattr(trackers, name)).parameters)[1:]
        for name in trackers.__all__
    }
    assert table == settings
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert settings.keys() - extras.keys() == {"tensorboard"}


@pytest.mark.parametrize("page", ["docs/metrics.md", "docs/your_functions.md"])
def test_the_trackers_in_yaml_can_be_loaded(page, monkeypatch, tmp_path):
    pages = "\n".join(b for b in blocks("docs/your_functions.md", "python") if "csv" in b)
    (tmp_path / "mine.py").write_text(pages)
    monkeypatch.chdir(tmp_path)
    given = [yaml.safe_load(block)["log"] for block in blocks(page, "yaml") if "trackers" in block]
    assert given
    for log in given:
        for spec in from_tree(LogConfig, log).trackers:
            load_function(spec, functions.TRACKERS, passed=None)


def test_every_documented_metric_exists(written):
    """One that the run has not written is named in the code of the library."""
    everything = written | diagnostics() | set(GATEWAY_METRICS)
    nowhere = [n for n, p in documented().items() if not any(p.fullmatch(m) for m in everything)]
    source = "".join(path.read_text() for path in (ROOT / "jaxrl_llm").glob("*/*.py"))
    stems = {name: re.split("/?[{<]", name)[0].removeprefix("timing_s/") for name in nowhere}
    assert [name for name, stem in stems.items() if f'"{stem}' not in source] == []


def test_the_page_of_serving_names_every_key_field_metric_and_status():
    page = read("docs/serving.md")
    files = "rollout/openai_api/requests.py", "serving/app.py"
    sources = [read(f"jaxrl_llm/{file}") for file in files]
    fields = re.findall(r'(?:fields|streaming)\.(?:take|between|any_of)\(\s*"(\w+)"', sources[0])
    assert len(set(fields)) > 20
    statuses = re.findall(r"status=(\d+)", "".join(sources))
    keys = [
        key for key, _, _ in describe(programs.ServeConfig) if not key.startswith("mesh.rollout.")
    ]
    assert [name for name in [*fields, *keys] if f"`{name}`" not in page] == []
    assert [status for status in statuses if f"| {status} |" not in page] == []
    assert [name for name in [*GAUGES, *COUNTERS] if name not in page] == []


def test_the_loop_by_hand_has_thirty_lines_and_is_the_notebooks():
    listing = blocks("docs/by_hand.md", "python")[0]
    assert sum(bool(line.strip()) for line in listing.splitlines()) <= 30
    notebook = json.loads(read("notebooks/04_grpo_by_hand.ipynb"))
    assert listing.strip() in ["".join(cell["source"]) for cell in notebook["cells"]]


def texts_of_the_library():
    """Every text in the code, with … for what a run puts into it."""
    texts = set()
    folders = ("jaxrl_llm", "algorithms", "models", "sharding")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(re.sub(r"%[\d.]*[a-z]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "…") for part in node.values)
                texts.add("".join(p if isinstance(p, str) else "…" for p in parts))
    return texts


def test_the_messages_of_troubleshooting_are_those_of_the_library_and_have_their_fix():
    page, texts = read("docs/troubleshooting.md"), texts_of_the_library()
    quoted = [" ".join(text.split()) for text in blocks("docs/troubleshooting.md", "text")]
    assert len(quoted) > 25 and min(map(len, quoted)) >= 10
    assert [message for message in quoted if not any(message in text for text in texts)] == []
    for part in re.split(r"^##+ ", page, flags=re.MULTILINE):
        assert "```text" not in part or "**Fix.**" in part, part.partition("\n")[0]
