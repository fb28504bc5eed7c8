"""A model that a run trained: read from its checkpoint, and written as a Hugging Face directory."""

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxrl_llm.config.errors import RELATIVE, ConfigError
from jaxrl_llm.config.fields import asks_for
from jaxrl_llm.config.functions import (
    NOT_IMPORTABLE,
    PREFERENCES,
    FunctionSpec,
    load_function,
    renamed_functions,
    split_name,
)
from jaxrl_llm.config.load import from_tree, read_yaml
from jaxrl_llm.config.programs import PreferConfig, program_of
from jaxrl_llm.config.sections import LoraConfig
from jaxrl_llm.data.files import write_text
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.adapter import save_adapter
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.files import check_new_directory, whole_directory
from jaxrl_llm.models.hf.load import load_arrays
from jaxrl_llm.models.hf.save import save_arrays, save_params
from jaxrl_llm.models.lora import split_adapter
from jaxrl_llm.models.model import Model, base_model, decoder_spec, is_adapted, model_of
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.runs.checkpoint import CheckpointError, Checkpoints
from jaxrl_llm.runs.model_card import Exported, make_card
from jaxrl_llm.runs.user_functions import UserFunction, source_of
from jaxrl_llm.sharding import distributed
from jaxrl_llm.training.load_model import KEY, adapted_spec, make_model, merged_into_base
from jaxrl_llm.training.objectives import LOGITS, SCORES

log = logging.getLogger(__name__)

ROLES = ("actor", "critic", "implicit_reward_model")


class TrainedModel(NamedTuple):
    """One model of a run's checkpoint.

    Attributes:
        params: on the host; of an adapter only what was trained.
        model: with the adapter, if there is one.
        source: Hugging Face directory that the model began as, or of its tokenizer.
        step: of the checkpoint.
        scoring: of a reward model, how it reads answers; see `scoring_of`.
    """

    params: Any
    model: Model
    source: str
    step: int
    scoring: dict[str, Any] | None = None


@activity("reading the checkpoint")
def restore_model(
    run_dir: str | Path,
    *,
    step: int | None,
    role: str = "actor",
    function_from: str | None = None,
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
    return TrainedModel(params, model, source, saved.step, scoring)


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
        return model_of(dataclasses.replace(spec, **heads))
    lora, adapter = adapter_keys(of_policy)
    if role == "actor":
        spec = adapted_spec(spec, lora, adapter)
    # an adapter is merged into a base that has its tower
    return model_of(
        dataclasses.replace(spec, vision_apart=vision == "frozen" and spec.lora is None)
    )


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
    if kept and source and UserFunction(function.fn, source).digest != kept["sha256"]:
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
    params, model, source, saved_step, _ = trained
    if adapter and not is_adapted(model):
        raise ConfigError(f"the {role} of {str(run_dir)!r} has no adapter: leave --adapter out")
    has_config = is_adapted(model) or isinstance(model, Decoder)
    name = Path(out).resolve().name
    head = head_of(model)
    exported = Exported(name, source, saved_step, role, adapter, has_config, license, head)
    try:
        card = make_card(run_dir, exported)
        check_new_directory(Path(out), dtype)
        with whole_directory(Path(out)) as place:
            if adapter:
                kind = jax.numpy.dtype(dtype)
                save_adapter(place, params, decoder_spec(model), base=source, dtype=kind)
            else:
                if is_adapted(model):
                    params, spec = merged_into_base(params, decoder_spec(model), source)
                    model = model_of(spec)
                save_model(
                    place, params, model, source=source, dtype=dtype, scoring=trained.scoring
                )
            for name, text in card.items():
                write_text(place / name, text)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return saved_step


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


def export_trained(
    path: str,
    params: Any,
    model: Model,
    base: Any,
    *,
    source: str,
    scoring: dict[str, Any] | None = None,
) -> None:
    """Write a model that was trained, with its adapter merged into it.

    Args:
        path: of the Hugging Face directory.
        params: that were trained.
        model: of them.
        base: layout of an adapter's base; None without an adapter.
        source: directory that the model began as.
        scoring: of a reward model, how it reads answers.
    """
    if base is not None:
        params, spec = merged_into_base(params, decoder_spec(model), source, base)
        model = model_of(spec)
    save_model(path, params, model, source=source, dtype="float32", scoring=scoring)


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


def adapter_keys(model: Mapping[str, Any]) -> tuple[LoraConfig | None, str | None]:
    """Return the keys of a run's model that say which adapter it trained."""
    lora = model.get("lora")  # runs of earlier versions have no such key
    return lora and from_tree(LoraConfig, lora, "model.lora."), model.get("adapter")
