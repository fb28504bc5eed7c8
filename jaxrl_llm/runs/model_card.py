"""The page of an exported model: what it is, what came of its training, and how to repeat it."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_llm.config.load import read_yaml, to_yaml, without_secrets
from jaxrl_llm.config.programs import function_name, learned_by, program_of
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.models.hf.hub import HUB_ID, repository
from jaxrl_llm.monitoring.curve_image import draw_curves
from jaxrl_llm.monitoring.tables import BEFORE_AND_AFTER, MetricsTable

CARD, CURVE, CONFIG = "README.md", "learning_curve.svg", "training.yaml"
"""The files that `make_card` adds to a model's directory."""

CURVES = 4  # that one image shows at most
USE = {
    "transformers": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "."  # this repository's name, or a folder with its files
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)""",
    "peft": """\
from peft import AutoPeftModelForCausalLM

name = "."  # this repository's name, or a folder with its files
model = AutoPeftModelForCausalLM.from_pretrained(name)  # with the base model""",
}


class Exported(NamedTuple):
    """What was exported of a run.

    Attributes:
        name: what to call it.
        source: the model that it began as: a directory, or a name on the Hugging Face hub.
        step: of the checkpoint.
        role: which of the run's models.
        adapter: whether it is an adapter alone.
        has_config: whether there is a `config.json`, as of all but models of one's own.
        license: the hub's name of the weights' license, if it was given.
        head: what it ends in, in place of logits.
    """

    name: str
    source: str
    step: int
    role: str = "actor"
    adapter: bool = False
    has_config: bool = True
    license: str | None = None
    head: Literal["reward", "value"] | None = None

    @property
    def library(self) -> str:
        """The library that loads it, by the hub's name; none for a model of one's own."""
        return "peft" if self.adapter else "transformers" if self.has_config else ""


def make_card(run_dir: str | Path, exported: Exported) -> dict[str, str]:
    """Return a model's page, its learning curve and the run's config, by the names of their files.

    Secrets are left out, and the home directory's name is `~`: a page is for everybody.

    Args:
        run_dir: of the run that trained it.
        exported: what was.
    """
    from huggingface_hub import ModelCard  # which only those who export need

    folder = Path(run_dir)
    config = without_secrets(read_yaml(folder / "config.yaml"))
    metrics = MetricsTable.read(folder / "metrics.jsonl")
    until = MetricsTable(line for line in metrics if line["step"] <= exported.step)
    curves, files = _curves(until), _files(config)
    public = _without_home(to_yaml(config))
    parts = [
        f"# {exported.name}",
        _summary(config, exported),
        *_use(config, exported),
        *_results(until, with_image=bool(curves)),
        *_training(folder, config, public),
        *_data(files),
    ]
    body = _without_home("\n\n".join(parts))
    card = ModelCard(f"---\n{_front_matter(config, exported, files)}\n---\n\n{body}\n")
    image = {CURVE: draw_curves(curves)} if curves else {}
    return {CARD: str(card), CONFIG: public, **image}


def _without_home(text: str) -> str:
    """Return the text with the home directory of this user as `~`."""
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)


def _method(config: Mapping[str, Any]) -> str:
    """Return the name of the function that a training is about."""
    program = program_of(config)
    if program == "train":
        names = learned_by(config["algorithm"])
        return names.get("pair_loss") or next(iter(names.values()))
    return function_name(config["loss"]) if program == "prefer" else program


def _front_matter(config: Mapping[str, Any], exported: Exported, files: Sequence["_File"]) -> str:
    """Return what the hub reads of a card, as YAML."""
    from huggingface_hub import ModelCardData

    base = None if config["model"].get("random_init") else repository(exported.source)
    kinds = ["reinforcement-learning"] if program_of(config) == "train" else []
    tags = ["jaxrl_llm", *kinds, _method(config)]
    generates = exported.role == "actor" and exported.head is None
    sources = [name for file in files for name in file.sources]
    data = ModelCardData(
        base_model=base[0] if base else None,
        datasets=[*dict.fromkeys(s for s in sources if HUB_ID.fullmatch(s))] or None,
        library_name=exported.library or None,
        license=exported.license,
        pipeline_tag="text-generation" if generates else None,
        tags=[tag for tag in tags if re.fullmatch(r"[\w-]+", tag)],
    )
    if base:
        data["base_model_relation"] = "adapter" if exported.adapter else "finetune"
    return data.to_yaml()


def _summary(config: Mapping[str, Any], exported: Exported) -> str:
    of = {
        "actor": "The policy",
        "critic": "The critic",
        "implicit_reward_model": "The reward model",
    }
    program = program_of(config)
    what = "The model" if program != "train" else of[exported.role]
    what += "'s adapter (LoRA)" if exported.adapter else ""
    how = "supervised training"
    if program == "prefer":
        how = f"training on preferences with the loss `{function_name(config['loss'])}`"
    if program == "train":
        names = learned_by(config["algorithm"])
        parts = [f"the {key.replace('_', ' ')} `{name}`" for key, name in names.items()]
        kind = "reinforcement learning with " if len(parts) > 1 else ""
        how = kind + " and ".join(parts)
    base = repository(exported.source)
    began = f"[{base[0]}](https://huggingface.co/{base[0]})" if base else f"`{exported.source}`"
    if config["model"].get("random_init"):
        began = f"random weights of the shape of {began}"
    return f"{what} after step {exported.step} of {how} by jaxrl_llm, which began from {began}."


def _use(config: Mapping[str, Any], exported: Exported) -> Iterator[str]:
    """Yield the section that says how to load the model."""
    yield "## Use"
    if not exported.library:
        function = config["model"]["function"]
        yield "The run's own function makes this model; in a config of jaxrl_llm:"
        yield f"```yaml\n{to_yaml({'model': {'path': '.', 'function': function}})}```"
        return
    code = USE[exported.library]
    if exported.head is not None:
        kinds = {"reward": "ForSequenceClassification", "value": "ForTokenClassification"}
        code = code.replace("ForCausalLM", kinds[exported.head])
    yield f"```python\n{code}\n```"


def _results(metrics: MetricsTable, *, with_image: bool) -> Iterator[str]:
    """Yield the section of results, if there are any."""
    rows = metrics.before_and_after()
    if rows:
        yield "## Results"
        yield _table(BEFORE_AND_AFTER, [[f"`{row[0]}`", *row[1:]] for row in rows])
    if with_image:
        yield f"![Learning curve]({CURVE})"


def _curves(metrics: MetricsTable) -> dict[str, tuple[list[int], list[float]]]:
    """Return the curves of the scores; where there are none, that of the loss."""
    names = [row[0] for row in metrics.before_and_after()]
    scores = [name for name in names if name != "train/loss"]
    return {name: metrics.curve(name) for name in (scores or names)[:CURVES]}


def _training(folder: Path, config: Mapping[str, Any], public: str) -> Iterator[str]:
    """Yield the sections that say how to repeat the training."""
    program = program_of(config)
    path = folder / "versions.json"
    versions = json.loads(path.read_text()) if path.exists() else {}
    yield "## Training"
    yield f"```sh\npython -m jaxrl_llm.{program} --config {CONFIG} run_dir=runs/again\n```"
    yield (
        f"The seed is {config['seed']}. `{CONFIG}` is the whole config, with the paths of the "
        "machine that trained:"
    )
    yield f"<details>\n<summary>{CONFIG}</summary>\n\n```yaml\n{public}```\n\n</details>"
    functions = folder / "functions.json"
    if functions.exists():
        yield "Functions that are not the library's, with the SHA-256 of their source:"
        kept = json.loads(functions.read_text())
        rows = [[f"`{key}`", f"`{f['name']}`", f"`{f['sha256']}`"] for key, f in kept.items()]
        yield _table(["key", "function", "SHA-256"], rows)
    if versions:
        yield "## Versions"
        yield _table(["", ""], _version_rows(versions))


def _version_rows(versions: Mapping[str, Any]) -> list[list[str]]:
    """Return the lines of `versions.json` that are about packages and devices."""
    left_out = ("compiler_options", "seed", "git_changed_files", "devices", "git_commit")
    rows = [[n, str(value)] for n, value in versions.items() if n not in left_out and value != ""]
    if versions.get("git_commit"):
        changed = versions.get("git_changed_files")
        rows.append(
            ["commit", versions["git_commit"] + (", with changed files" if changed else "")]
        )
    counts = Counter(versions.get("devices", []))
    return [*rows, ["devices", ", ".join(f"{n} x {kind}" for kind, n in counts.items())]]


class _File(NamedTuple):
    """A data file: its rows by source; None where it can't be read any more."""

    path: str
    rows: int | None
    sources: Mapping[str, int]

    def cells(self) -> list[str]:
        """Return its line in the table."""
        named = ", ".join(f"{name} ({rows})" for name, rows in self.sources.items())
        return [
            f"`{self.path}`",
            "not there any more" if self.rows is None else str(self.rows),
            named,
        ]


def _files(config: Mapping[str, Any]) -> list[_File]:
    """Return the data files of a run's config."""
    data = config.get("data", {})
    return [_count(path) for key in ("train", "validation") for path in data.get(key) or ()]


def _data(files: Sequence[_File]) -> Iterator[str]:
    """Yield the section of the data files, if there are any."""
    if files:
        yield "## Data"
        yield _table(["file", "rows", "sources"], [file.cells() for file in files])


def _count(path: str) -> _File:
    try:
        found = _sources(Path(path))
    except (OSError, ValueError):  # moved, or a custom data set's own kind of file
        return _File(path, None, {})
    return _File(path, len(found), Counter(str(s) for s in found if s is not None))


def _sources(path: Path) -> Sequence[Any]:
    """Return the source of each row, None where it has none."""
    if path.suffix != ".parquet":
        return [row.get("data_source") for row in read_rows(path)]
    import pyarrow.parquet  # slow, and not every file needs it

    with pyarrow.parquet.ParquetFile(str(path)) as file:
        if "data_source" not in file.schema_arrow.names:
            return [None] * file.metadata.num_rows
        return file.read(columns=["data_source"])["data_source"].to_pylist()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )
