"""A trained model, read from its checkpoint and written as a Hugging Face directory.

Its model card, and its upload to the hub.
"""

import dataclasses
import json
import logging
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxrl_llm.config.errors import RELATIVE, ConfigError, RunError
from jaxrl_llm.config.functions import (
    NOT_IMPORTABLE,
    PREFERENCES,
    FunctionSpec,
    asks_for,
    load_function,
    renamed_functions,
    split_name,
)
from jaxrl_llm.config.load import from_tree, read_yaml, to_yaml, without_secrets
from jaxrl_llm.config.programs import PreferConfig, function_name, learned_by, program_of
from jaxrl_llm.config.sections import LoraConfig
from jaxrl_llm.data.rows import read_rows
from jaxrl_llm.files import write_text
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.adapter import save_adapter
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.files import check_new_directory, whole_directory
from jaxrl_llm.models.hf.hub import HUB_ID, repository
from jaxrl_llm.models.hf.load import load_arrays
from jaxrl_llm.models.hf.save import save_arrays, save_params
from jaxrl_llm.models.lora import split_adapter
from jaxrl_llm.models.model import Model, base_model, decoder_spec, is_adapted
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.tables import BEFORE_AND_AFTER, MetricsTable
from jaxrl_llm.runs.checkpoint import CheckpointError, Checkpoints
from jaxrl_llm.runs.directory import digest, source_of
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training.load_model import KEY, adapted_spec, make_model, merged_into_base
from jaxrl_llm.training.update import LOGITS, SCORES
from jaxrl_llm.workers.values import shorten

WAITS_S = (1.0, 4.0, 16.0)
"""Seconds before each new attempt, where the hub does not answer or fails."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
"""Files of the repository that must not outlive the model that they were pushed with."""

log = logging.getLogger(__name__)


class PushError(RunError):
    """The hub did not take a model; it is still where it was exported to."""


def check_push(repo_id: str) -> None:
    """Check all that can be known before there is anything to push.

    Args:
        repo_id: `ORG/NAME` on the hub.

    Raises:
        ConfigError: it is no such name, there is no token, or `HF_HUB_OFFLINE` is set.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} is no repository's name: {error}") from error
    if repo_id.count("/") != 1:
        raise ConfigError(f"expected a repository's name as ORG/NAME, got {repo_id!r}")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be pushed: unset it")
    if not get_token():
        raise ConfigError(
            "no token of the Hugging Face hub: run `hf auth login`, or set HF_TOKEN to one that "
            "may write (https://huggingface.co/settings/tokens)"
        )


def push_model(folder: str | Path, repo_id: str, *, private: bool = False) -> str:
    """Push a directory to a repository of the Hugging Face hub, which is made if need be.

    In a repository that exists, files of the same name are replaced and other weights removed, by
    one commit; the versions before stay in its history. What fails on the way is tried again.

    Args:
        folder: the directory.
        repo_id: `ORG/NAME`.
        private: only you and your organization can see the repository.

    Returns:
        The repository's address.

    Raises:
        ConfigError: as for `check_push`, or there is no such directory.
        PushError: the hub refuses it or can't be reached. The directory stays as it is.
    """
    check_push(repo_id)
    if not Path(folder).is_dir():
        raise ConfigError(f"no directory {str(folder)!r} to push")
    from huggingface_hub import HfApi

    api, waits = HfApi(), iter(WAITS_S)
    while True:  # each attempt goes on where the one before has ended
        try:
            address = api.create_repo(repo_id, private=private or None, exist_ok=True)
            if private and not api.model_info(repo_id).private:
                raise PushError(
                    f"{repo_id} exists, and everybody can see it: make it private in its settings, "
                    "or leave --private out"
                )
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message="Push a model of jaxrl_llm",
                delete_patterns=[*WEIGHTS],
            )
            return str(address)
        except PushError:
            raise
        except Exception as error:  # what the hub's client raises differs by its version
            status, wait = _status(error), next(waits, None)
            is_refused = status is not None and status != 429 and status < 500
            if is_refused or wait is None:
                command = shlex.join(["hf", "upload", repo_id, os.fspath(folder)])
                raise PushError(
                    f"{_reason(error, repo_id)}. The model is in {os.fspath(folder)}; `{command}` "
                    "pushes it later"
                ) from error
            log.warning("the hub: %s; again in %g s", _error_text(error), wait)
            time.sleep(wait)


def _status(error: BaseException | None) -> int | None:
    """Return the hub's HTTP status behind an error; None where it has not answered."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return response.status_code
        error = error.__cause__
    return None


def _reason(error: Exception, repo_id: str) -> str:
    """Return why the hub has not taken a model."""
    status = _status(error)
    if status is None:
        from huggingface_hub import constants

        return f"the push to {constants.ENDPOINT}/{repo_id} broke off: {_error_text(error)}"
    reasons = {
        401: "the hub does not know your token: run `hf auth login` again, or set HF_TOKEN",
        403: f"your token may not write to {repo_id}: it needs the permission, and you the right",
        404: f"the hub has no {repo_id}, or does not let you see it",
    }
    return f"{reasons.get(status, f'the hub has not taken {repo_id}')} ({_error_text(error)})"


def _error_text(error: BaseException | None) -> str:
    """Return what an error and those behind it say, on one line; of the hub's answer its status."""
    texts = []
    while error is not None:
        response = getattr(error, "response", None)
        text = getattr(error, "server_message", None) if response is not None else str(error)
        text = shorten(" ".join((text or type(error).__name__).split()), 200).rstrip(".")
        texts.append(text if response is None else f"{response.status_code}: {text}")
        error = error.__cause__ if response is None else None
    return ": ".join(dict.fromkeys(texts))


CARD, CONFIG = "README.md", "training.yaml"
"""The files that `make_card` adds to a model's directory."""

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


ROLES = ("actor", "critic", "implicit_reward_model")


class TrainedModel(NamedTuple):
    """One model of a run's checkpoint.

    Attributes:
        params: on the host; of an adapter only what was trained.
        model: with the adapter, if there is one.
        source: Hugging Face directory that the model began as, or of its tokenizer.
        step: of the checkpoint.
        role: which of the run's models.
        scoring: of a reward model, how it reads answers; see `scoring_of`.
    """

    params: Any
    model: Model
    source: str
    step: int
    role: str = "actor"
    scoring: dict[str, Any] | None = None


def make_card(
    run_dir: str | Path,
    name: str,
    trained: TrainedModel,
    *,
    adapter: bool = False,
    license: str | None = None,
) -> dict[str, str]:
    """Return a model's page and the run's config, by the names of their files.

    Secrets are left out, and the home directory's name is `~`: a page is for everybody.

    Args:
        run_dir: of the run that trained it.
        name: what to call the model.
        trained: the model.
        adapter: whether its adapter alone is exported.
        license: the hub's name of the weights' license; None: the card says nothing.
    """
    from huggingface_hub import ModelCard  # which only those who export need

    folder = Path(run_dir)
    config = without_secrets(read_yaml(folder / "config.yaml"))
    metrics = MetricsTable.read(folder / "metrics.jsonl")
    until = MetricsTable(line for line in metrics if line["step"] <= trained.step)
    files = _data_files(config)
    public = _without_home(to_yaml(config))
    parts = [
        f"# {name}",
        _summary(config, trained, adapter=adapter),
        *_use(config, trained, adapter=adapter),
        *_results(until),
        *_training(folder, config, public),
        *_data(files),
    ]
    body = _without_home("\n\n".join(parts))
    sources = [str(name) for _, counts in files for name in counts or () if name is not None]
    front = _front_matter(config, trained, sources, adapter=adapter, license=license)
    card = ModelCard(f"---\n{front}\n---\n\n{body}\n")
    return {CARD: str(card), CONFIG: public}


def _without_home(text: str) -> str:
    """Return the text with the home directory of this user as `~`."""
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)


def _library(model: Model, *, adapter: bool) -> str | None:
    """Return the library that loads a model, by the hub's name; None for a model of one's own."""
    own = "transformers" if isinstance(model, Decoder) else None
    return "peft" if adapter else own


def _front_matter(
    config: Mapping[str, Any],
    trained: TrainedModel,
    sources: Iterable[str],
    *,
    adapter: bool,
    license: str | None,
) -> str:
    """Return what the hub reads of a card, as YAML."""
    from huggingface_hub import ModelCardData

    base = None if config["model"].get("random_init") else repository(trained.source)
    program = program_of(config)
    kinds = ["reinforcement-learning"] if program == "train" else []
    method = program  # the name of the function that a training is about
    if program == "train":
        names = learned_by(config["algorithm"])
        method = names.get("pair_loss") or next(iter(names.values()))
    elif program == "prefer":
        method = function_name(config["loss"])
    tags = ["jaxrl_llm", *kinds, method]
    generates = trained.role == "actor" and head_of(trained.model) is None
    data = ModelCardData(
        base_model=base[0] if base else None,
        datasets=[*dict.fromkeys(s for s in sources if HUB_ID.fullmatch(s))] or None,
        library_name=_library(trained.model, adapter=adapter),
        license=license,
        pipeline_tag="text-generation" if generates else None,
        tags=[tag for tag in tags if re.fullmatch(r"[\w-]+", tag)],
    )
    if base:
        data["base_model_relation"] = "adapter" if adapter else "finetune"
    return data.to_yaml()


def _summary(config: Mapping[str, Any], trained: TrainedModel, *, adapter: bool) -> str:
    of = {
        "actor": "The policy",
        "critic": "The critic",
        "implicit_reward_model": "The reward model",
    }
    program = program_of(config)
    what = "The model" if program != "train" else of[trained.role]
    what += "'s adapter (LoRA)" if adapter else ""
    how = "supervised training"
    if program == "prefer":
        how = f"training on preferences with the loss `{function_name(config['loss'])}`"
    if program == "train":
        names = learned_by(config["algorithm"])
        parts = [f"the {key.replace('_', ' ')} `{name}`" for key, name in names.items()]
        kind = "reinforcement learning with " if len(parts) > 1 else ""
        how = kind + " and ".join(parts)
    base = repository(trained.source)
    began = f"[{base[0]}](https://huggingface.co/{base[0]})" if base else f"`{trained.source}`"
    if config["model"].get("random_init"):
        began = f"random weights of the shape of {began}"
    return f"{what} after step {trained.step} of {how} by jaxrl_llm, which began from {began}."


def _use(config: Mapping[str, Any], trained: TrainedModel, *, adapter: bool) -> Iterator[str]:
    """Yield the section that says how to load the model."""
    yield "## Use"
    library, head = _library(trained.model, adapter=adapter), head_of(trained.model)
    if library is None:
        function = config["model"]["function"]
        yield "The run's own function makes this model; in a config of jaxrl_llm:"
        yield f"```yaml\n{to_yaml({'model': {'path': '.', 'function': function}})}```"
        return
    code = USE[library]
    if head is not None:
        kinds = {"reward": "ForSequenceClassification", "value": "ForTokenClassification"}
        code = code.replace("ForCausalLM", kinds[head])
    yield f"```python\n{code}\n```"


def _results(metrics: MetricsTable) -> Iterator[str]:
    """Yield the section of results, if there are any."""
    rows = metrics.before_and_after()
    if rows:
        yield "## Results"
        yield _table(BEFORE_AND_AFTER, [[f"`{row[0]}`", *row[1:]] for row in rows])


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


def _data_files(config: Mapping[str, Any]) -> list[tuple[str, Counter[str | None] | None]]:
    """Return the data files of a run's config, and how many rows each has of a source."""
    data = config.get("data", {})
    paths = [path for key in ("train", "validation") for path in data.get(key) or ()]
    return [(path, _rows_by_source(Path(path))) for path in paths]


def _named(source: Any) -> str | None:
    return None if source is None else str(source)


def _rows_by_source(path: Path) -> Counter[str | None] | None:
    """Return the number of rows of each `data_source`; None where the file can't be read."""
    try:
        if path.suffix != ".parquet":
            return Counter(map(_named, (row.get("data_source") for row in read_rows(path))))
        import pyarrow.parquet  # slow, and not every file needs it

        with pyarrow.parquet.ParquetFile(str(path)) as file:
            if "data_source" not in file.schema_arrow.names:
                return Counter({None: file.metadata.num_rows})
            column = file.read(columns=["data_source"])["data_source"]
            return Counter(map(_named, column.to_pylist()))
    except (OSError, ValueError):  # moved, or a custom data set's own kind of file
        return None


def _data(files: Sequence[tuple[str, Counter[str | None] | None]]) -> Iterator[str]:
    """Yield the section of the data files, if there are any."""
    if not files:
        return
    rows = []
    for path, counts in files:
        known = counts or Counter()
        named = ", ".join(f"{name} ({n})" for name, n in known.items() if name is not None)
        total = "not there any more" if counts is None else str(counts.total())
        rows.append([f"`{path}`", total, named])
    yield "## Data"
    yield _table(["file", "rows", "sources"], rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


@activity("reading the checkpoint")
def restore_model(
    run_dir: str | Path, *, step: int | None, role: str = "actor", function_from: str | None = None
) -> TrainedModel:
    """Read the parameters of a run's checkpoint.

    Args:
        run_dir: of `train` or `sft`.
        step: of the checkpoint, or None for the newest.
        role: which of the models that the run trains.
        function_from: module or file that has the function which a notebook gave as
            `model.function`.

    Raises:
        ConfigError: no run, no such checkpoint, or the run trains no such model.
    """
    folder = Path(run_dir)
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"{str(run_dir)!r} is not a run: it has no checkpoints")
    config = read_yaml(folder / "config.yaml")
    source = config.get(role, {}).get("path") or config["model"]["path"]
    try:
        model = _model_of_role(folder, role, source, function_from)
        checkpoints = Checkpoints(folder / "checkpoints", keep=None, read_only=True)
        like = jax.eval_shape(lambda: model.init_params(jax.random.key(0)))
        like = split_adapter(like)[0] if is_adapted(model) else like
        digests = checkpoints.extra(step)["origin"]
        trained = [name for name in ROLES if name in digests]
        if role not in trained:
            raise ConfigError(f"{str(run_dir)!r} trains no {role}, only {', '.join(trained)}")
        saved = checkpoints.restore_params(like, step, role=role)
    except (CheckpointError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    params = saved.state  # numpy arrays, as `like` has no layout
    params, model = with_tower(params, model, source)
    preferences = preference_config(config)
    scoring = scoring_of(preferences) if preferences else None
    return TrainedModel(params, model, source, saved.step, role, scoring)


def _model_of_role(folder: Path, role: str, source: str, function_from: str | None) -> Model:
    """Return the model that a role of a run trains, with its adapter or value head."""
    config = read_yaml(folder / "config.yaml")
    of_policy = config["model"]
    own = of_policy.get("function")  # runs of earlier versions have no such key
    if own and not config.get(role, {}).get("path"):
        function = _function_of(own, function_from)
        _warn_of_another_source(folder, function)
        return make_model(function, source, seed=config["seed"])
    vision = of_policy.get("vision", "none")
    try:
        spec = read_spec(source, vision=vision != "none")
    except FileNotFoundError as error:
        hint = "" if Path(source).is_absolute() else f" ({RELATIVE})"
        raise ConfigError(f"model.path: {error}{hint}") from error
    if role == "critic":
        spec = dataclasses.replace(spec, value_head=True, reward_head=False)
    preferences = preference_config(config)
    head = scorer_head(preferences) if preferences and role == "actor" else None
    if head is not None:
        heads = {"value_head": head == "value", "reward_head": head == "reward"}
        return Decoder(dataclasses.replace(spec, **heads))
    if role == "actor":
        lora = of_policy.get("lora")  # runs of earlier versions have no such key
        lora = lora and from_tree(LoraConfig, lora, "model.lora.")
        spec = adapted_spec(spec, lora, of_policy.get("adapter"))
    # an adapter is merged into a base that has its tower
    return Decoder(dataclasses.replace(spec, vision_apart=vision == "frozen" and spec.lora is None))


def _function_of(tree: Mapping[str, Any], function_from: str | None) -> FunctionSpec:
    """Return the function of a run's config; a notebook's own is found in the notebook."""
    if function_from is not None:
        tree = renamed_functions(tree, function_from)
    keywords = {name: value for name, value in tree.items() if name != "fn"}
    where, name = split_name(tree["fn"])
    given = getattr(sys.modules[where], name, None) if where == NOT_IMPORTABLE else None
    return FunctionSpec(tree["fn"], keywords, given)


def _warn_of_another_source(folder: Path, function: FunctionSpec) -> None:
    path, source = folder / "functions.json", source_of(function)
    kept = json.loads(path.read_text()).get(KEY) if path.exists() else None
    if kept and source and digest(source) != kept["sha256"]:
        log.warning("%s: the source of %s is another than the run's", KEY, function.fn)


def export_model(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    role: str = "actor",
    adapter: bool = False,
    function_from: str | None = None,
    license: str | None = None,
) -> int:
    """Write the parameters of a run's checkpoint as a Hugging Face directory, with a model card.

    A run that trained an adapter gives the model with the adapter merged into it. A model of one's
    own (`model.function`) has no `config.json`; it is loaded by the function again. `push_model`
    takes the directory to the hub.

    Args:
        run_dir: of `train` or `sft`.
        out: directory to write; it must not exist.
        step: of the checkpoint, or None for the newest.
        dtype: of the saved arrays.
        role: which of the models that the run trains.
        adapter: write the adapter alone, in PEFT's format.
        function_from: as for `restore_model`.
        license: of the weights, by the hub's name, such as apache-2.0; None: the card says nothing.

    Returns:
        The checkpoint's step.

    Raises:
        ConfigError: no run, no such checkpoint, no adapter, or `out` exists.
    """
    trained = restore_model(run_dir, step=step, role=role, function_from=function_from)
    params, model, source = trained.params, trained.model, trained.source
    if adapter and not is_adapted(model):
        raise ConfigError(f"the {role} of {str(run_dir)!r} has no adapter: leave --adapter out")
    try:
        name = Path(out).resolve().name
        card = make_card(run_dir, name, trained, adapter=adapter, license=license)
        check_new_directory(Path(out), dtype)
        with whole_directory(Path(out)) as place:
            if adapter:
                kind = jax.numpy.dtype(dtype)
                save_adapter(place, params, decoder_spec(model), base=source, dtype=kind)
            else:
                if is_adapted(model):
                    params, model = merged_into_base(params, model, source)
                save_model(
                    place, params, model, source=source, dtype=dtype, scoring=trained.scoring
                )
            for name, text in card.items():
                write_text(place / name, text)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return trained.step


@activity("exporting")
def save_model(
    out: str | Path,
    params: Any,
    model: Model,
    *,
    source: str,
    dtype: str,
    scoring: dict[str, Any] | None = None,
) -> None:
    """Write a directory of safetensors and tokenizer; with `config.json` where there can be one.

    Args:
        out: to write.
        params: of the model.
        model: without an adapter.
        source: directory that it began as, or of its tokenizer.
        dtype: of the saved arrays.
        scoring: of a reward model, how it reads answers; see `scoring_of`.
    """
    kind = jax.numpy.dtype(dtype)
    params, model = with_tower(params, model, source)
    if isinstance(model, Decoder):
        save_params(out, params, model.spec, source=source, dtype=kind, scoring=scoring)
    else:
        save_arrays(out, params, model.declare(), config=None, source=source, dtype=kind)


def check_export(path: str) -> None:
    """Raise ConfigError if what a run exports would be written over something."""
    if distributed.run_on_first(Path(path).exists):
        raise ConfigError(f"export_to: {path!r} exists; remove it or name another one")


def with_tower(params: Any, model: Model, source: str) -> tuple[Any, Model]:
    """Return a model with the vision tower of its directory, if its own is apart and frozen."""
    if not isinstance(model, Decoder) or not model.spec.vision_apart:
        return params, model
    whole = base_model(model)
    declared = {"vision": whole.declare()["vision"]}
    tower = load_arrays(source, declared, is_ignored=lambda name: True)
    return {**params, **tower}, whole


def head_of(model: Model) -> Literal["reward", "value"] | None:
    """Return what a model ends in, in place of logits."""
    if not isinstance(model, Decoder):
        return None
    return "reward" if model.spec.reward_head else "value" if model.spec.value_head else None


def preference_config(config: Mapping[str, Any]) -> PreferConfig | None:
    """Return a run's config if it is one of `prefer`."""
    return from_tree(PreferConfig, config) if program_of(config) == "prefer" else None


def scorer_head(config: PreferConfig) -> Literal["reward", "value"] | None:
    """Return the head of the reward model that a run trains; None of one that trains a policy."""
    names = set(asks_for(load_function(config.loss, PREFERENCES, passed=None)))
    return "reward" if names & SCORES else "value" if LOGITS in names else None


def scoring_of(config: PreferConfig) -> dict[str, Any] | None:
    """Return what is written beside a reward model: how its run let it read answers."""
    head = scorer_head(config)
    if head == "value":
        return {"step_separator": config.data.step_separator}
    return None if head is None else {"render": "answer"}
