"""The pages agree with the code: keys, metrics, functions, listings and links."""

import inspect
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import loop
from jaxrl_llm.algorithms import advantages, correction, kl, logprobs, losses, reduce, values
from jaxrl_llm.config import describe, load
from jaxrl_llm.dataflow import asks_for
from jaxrl_llm.functions import ConfigError
from jaxrl_llm.job import Functions, run_job
from jaxrl_llm.keys import TrainConfig
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.step import as_token_loss
from jaxrl_llm.types import FIELDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GSM8K = ROOT / "configs/gsm8k_qwen3_1.7b_grpo.yaml"
COMMANDS = """\
python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python -m jaxrl_llm.train --config configs/quickstart.yaml
python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/pytest
"""  # noqa: E501
KINDS = {
    "Advantages": advantages,
    "Losses": losses,
    "Reductions": reduce,
    "KL": kl,
    "Off-policy corrections": correction,
    "Value losses": values,
    "Log-probs": logprobs,
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


# ------------------------------------------------------------------------------------------- README


def test_the_readme_is_short_and_opens_with_the_two_commands():
    assert len(read("README.md").splitlines()) <= 150
    assert blocks("README.md", r"\w*")[0] == COMMANDS


def test_the_readmes_loop_is_the_loop():
    (_, listing) = blocks("README.md", "python")
    real = [line.strip() for line in inspect.getsource(loop.run).splitlines()]
    at = 0
    for line in listing.splitlines():
        at = real.index(line.strip(), at) + 1  # in this order
    assert listing.count("\n") > 8


def test_the_readmes_loss_runs_from_the_readmes_config(tmp_path, monkeypatch):
    (source, _), (line,) = blocks("README.md", "python"), blocks("README.md", "yaml")
    (tmp_path / "my_losses.py").write_text(source)
    (tmp_path / "config.yaml").write_text("run_dir: r\nmodel: {path: m}\ndata: {train: t}\n" + line)
    monkeypatch.chdir(tmp_path)
    loss = Functions(load(TrainConfig, "config.yaml")).loss
    rng = np.random.default_rng(0)
    fields = {name: -rng.random((2, 3), np.float32) for name in asks_for(loss)}
    fields["mask"] = np.array([[True, True, False], [True, True, True]])
    result = loss(*(jnp.asarray(fields[name]) for name in asks_for(loss)))
    found = as_token_loss(result, loss, (2, 3))
    weights = np.minimum(np.exp(fields["old_logprobs"] - fields["rollout_logprobs"]), 3.0)
    np.testing.assert_allclose(
        found.diagnostics["correction"], np.where(fields["mask"], weights, 0), rtol=1e-6
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_text_exist(page):
    named = re.findall(r"`((?:tests|configs|docs|algorithms)/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


# --------------------------------------------------------------------------------- coming from verl


def twins():
    """List what stands in the column of our keys: (cell, key, value or None)."""
    found = []
    for row in rows("docs/coming_from_verl.md"):
        cell = row[1]
        if cell.startswith(("no twin yet", "not needed")):
            continue
        quoted = re.match(r"`([a-z_.]+)(?:: (.*?))?`", cell)
        assert quoted, cell
        found.append((cell, quoted[1], quoted[2]))
    return found


def known_keys():
    """Return every key, and the keywords of the default loss, which the page uses as keys too."""
    keywords = inspect.signature(losses.ppo_clip).parameters.values()
    return {name for name, _, _ in describe(TrainConfig)} | {
        f"algorithm.loss.{p.name}" for p in keywords if p.kind is p.KEYWORD_ONLY
    }


def find_functions(*overrides):
    """Find all functions of a config with these overrides; ConfigError where one is wrong."""
    return Functions(load(TrainConfig, GSM8K, ["algorithm.kl_loss=null", *overrides]))


def test_the_table_of_keys_is_read():
    assert len(twins()) > 60
    assert {"seed", "batch.prompts_per_minibatch", "algorithm.loss.clip_high"} <= {
        key for _, key, _ in twins()
    }


@pytest.mark.parametrize(("cell", "key", "value"), twins())
def test_our_keys_exist_and_take_the_values_shown(cell, key, value):
    assert key in known_keys(), cell
    if value is not None:
        find_functions(f"{key}={value}")


def test_every_key_that_the_text_names_exists():
    names = known_keys()
    groups = {name.partition(".")[0] for name in names if "." in name}
    text = read("docs/coming_from_verl.md")
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    ours = [
        name
        for name in re.findall(
            r"`([a-z_]+\.[a-z_.]+)(?:: [^`]*)?`", prose + read("docs/metrics.md")
        )
        if name.partition(".")[0] in groups and not name.endswith((".py", ".jsonl", ".md"))
    ]
    assert len(ours) > 5
    assert [name for name in ours if name not in names] == []


def test_the_tutorials_lines_are_those_of_the_config():
    page = read("docs/coming_from_verl.md")
    (_, table) = re.split(r"^## The tutorial's command$", page, flags=re.MULTILINE)
    pairs = re.findall(r"\| `([a-z_.]+): (.*?)`", table.partition("\n## ")[0])
    config = load(TrainConfig, GSM8K)
    assert len(pairs) > 20
    for key, value in pairs:
        assert load(TrainConfig, GSM8K, [f"{key}={value}"]) == config, key


# --------------------------------------------------------------------------------------- algorithms


def sections():
    """Return {(kind, function): text} of the page on algorithms."""
    found = {}
    for kind in re.split(r"^## ", read("docs/algorithms.md"), flags=re.MULTILINE)[1:]:
        title = kind.partition("\n")[0]
        for section in re.split(r"^### ", kind, flags=re.MULTILINE)[1:]:
            name, _, text = section.partition("\n")
            found[title, name] = text
    return found


def public_functions(module):
    names = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__
    ]
    return [n for n in names if not n.startswith("_") and inspect.isfunction(getattr(module, n))]


def test_every_algorithm_has_its_section():
    wanted = {(kind, name) for kind, module in KINDS.items() for name in public_functions(module)}
    assert len(wanted) > 60
    assert set(sections()) == wanted


@pytest.mark.parametrize(("kind", "name"), sections())
def test_a_section_says_truly_whether_the_trainer_can_run_the_function(kind, name):
    text = " ".join(sections()[kind, name].split())
    config = re.search(
        r"Config: `(\w+): (.*?)`\. (Runs today|Library function: asks for `(\w+)`)", text
    )
    if config is None:
        assert "A part" in text
        return
    key, value, _, lacking = config.groups()
    assert re.search(rf"\b{name}\b", value)
    if lacking is None:
        find_functions(f"algorithm.{key}={value}")
    else:
        assert lacking not in FIELDS
        with pytest.raises(ConfigError, match=f"asks for '{lacking}', which nothing produces"):
            find_functions(f"algorithm.{key}={value}")


def test_every_function_that_the_trainer_can_run_is_marked_so():
    said = {name for (_, name), text in sections().items() if "Runs today" in text}
    runs = set()
    for kind, key in (("Advantages", "advantage"), ("Losses", "loss")):
        for name in public_functions(KINDS[kind]):
            needs = {"dro": "{fn: dro, beta: 1.0}"}.get(name, name)
            try:
                find_functions(f"algorithm.{key}={needs}")
            except ConfigError:
                continue
            runs.add(name)
    parts = {"rewards_from_scores", "select_kl_cov"}  # ask for fields, but give something else
    assert runs - parts == said & (
        set(public_functions(advantages)) | set(public_functions(losses))
    )


def test_the_fields_in_the_architecture_are_the_fields():
    found = {}
    for row in rows("docs/architecture.md"):
        if re.fullmatch(r"`\[.*\]`", row[1]):
            found[row[0].strip("`")] = row[1].strip("`")
    assert found == {name: text.split("]")[0] + "]" for name, text in FIELDS.items()}


# ------------------------------------------------------------------------------------------ metrics


def documented():
    """Return a pattern for each metric of the page."""
    patterns = {}
    for row in rows("docs/metrics.md"):
        name = row[0].strip("`")
        pattern = re.sub(r"\{([^}]*)\}", lambda m: f"({m[1].replace(',', '|')})", name)
        pattern = pattern.replace("<source>", ".+").replace("<k>", "[0-9]+").replace("<key>", ".+")
        patterns[name] = re.compile(pattern)
    return patterns


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The metrics of a run of one step, with everything on that writes metrics."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(ROOT / "configs/quickstart", folder / "model")
    path = folder / "model/config.json"
    small = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))
    overrides = f"""
        run_dir={folder}/run steps=1 model.path={folder}/model model.random_init=true
        model.warm_start=null data.train={folder}/train.parquet log.tensorboard=false
        data.validation={folder}/validation.parquet data.prepare.out={folder}
        data.prepare.train_rows=8 data.prepare.validation_rows=2 data.prepare.sft_rows=0
        batch.prompts_per_step=2 batch.prompts_per_minibatch=2 batch.tokens_per_microbatch=128
        rollout.samples_per_prompt=4 rollout.slots=8 rollout.dump_every=0 reward.workers=0
        algorithm.kl_loss=k3 algorithm.entropy_coef=0.01 validation.samples=2 validation.every=0
        validation.temperature=1 checkpoint.every=0
    """
    with pytest.MonkeyPatch.context() as patch:  # one device compiles sooner than eight
        patch.setattr(
            "jaxrl_llm.setup.make_mesh", lambda sizes: make_mesh(sizes, jax.devices()[:1])
        )
        run_job(load(TrainConfig, ROOT / "configs/quickstart.yaml", overrides.split()))
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
        marks = {"mask": ones > 0, "high_covariance": ones > 0}
        more = {"beta": 1.0} if name == "dro" else {}
        found = function(*(marks.get(field, ones) for field in asks_for(function)), **more)
        names |= {f"actor/{diagnostic}" for diagnostic in found.diagnostics}
    return names


def test_every_metric_is_documented(written):
    assert len(written) > 50
    patterns = documented().values()
    everything = written | diagnostics()
    assert [name for name in everything if not any(p.fullmatch(name) for p in patterns)] == []


def test_every_documented_metric_exists(written):
    everything = written | diagnostics()
    nowhere = [n for n, p in documented().items() if not any(p.fullmatch(m) for m in everything)]
    source = "".join(read(f"jaxrl_llm/{name}.py") for name in ("metrics", "supervised"))
    assert [name for name in nowhere if f'"{name}"' not in source] == []
    assert {n for n in nowhere if not n.startswith("train/")} == {"perf/max_memory_allocated_gb"}
