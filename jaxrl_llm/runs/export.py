"""A model that a run trained: read from its checkpoint, and written as a Hugging Face directory."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree, read_yaml
from jaxrl_llm.config.sections.model import LoraConfig
from jaxrl_llm.models.hf.adapter import save_adapter
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.lora import split_adapter
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.runs.checkpoint import CheckpointError, Checkpoints
from jaxrl_llm.training.load_model import adapted_spec, merged_into_base

ROLES = ("actor", "critic", "implicit_reward_model")


class TrainedModel(NamedTuple):
    """One model of a run's checkpoint.

    Attributes:
        params: on the host; of an adapter only what was trained.
        spec: with the adapter, if there is one.
        source: Hugging Face directory that the model began as.
        step: of the checkpoint.
    """

    params: Any
    spec: ModelSpec
    source: str
    step: int


def restore_model(run_dir: str | Path, *, step: int | None, role: str = "actor") -> TrainedModel:
    """Read the parameters of a run's checkpoint.

    Args:
        run_dir: of `train` or `sft`.
        step: of the checkpoint, or None for the newest.
        role: which of the models that the run trains.

    Raises:
        ConfigError: no run, no such checkpoint, or the run trains no such model.
    """
    folder = Path(run_dir)
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"{str(run_dir)!r} is not a run: it has no checkpoints")
    config = read_yaml(folder / "config.yaml")
    source = config.get(role, {}).get("path") or config["model"]["path"]
    try:
        spec = read_spec(source)
        if role == "critic":
            spec = dataclasses.replace(spec, value_head=True, reward_head=False)
        if role == "actor":
            spec = adapted_spec(spec, *adapter_keys(config["model"]))
        checkpoints = Checkpoints(folder / "checkpoints", keep=None, read_only=True)
        like = jax.eval_shape(lambda: init_params(spec, key=jax.random.key(0)))
        like = split_adapter(like)[0] if spec.lora else like
        digests = checkpoints.extra(step)["origin"]
        trained = [name for name in ROLES if name in digests]
        if role not in trained:
            raise ConfigError(f"{str(run_dir)!r} trains no {role}, only {', '.join(trained)}")
        saved = checkpoints.restore_params(like, step, role=role)
    except (CheckpointError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    params = saved.state  # numpy arrays, as `like` has no layout
    return TrainedModel(params, spec, source, saved.step)


def export_model(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    role: str = "actor",
    adapter: bool = False,
) -> int:
    """Write the parameters of a run's checkpoint as a Hugging Face directory.

    A run that trained an adapter gives the model with the adapter merged into it.

    Args:
        run_dir: of `train` or `sft`.
        out: directory to write; it must not exist.
        step: of the checkpoint, or None for the newest.
        dtype: of the saved arrays.
        role: which of the models that the run trains.
        adapter: write the adapter alone, in PEFT's format.

    Returns:
        The checkpoint's step.

    Raises:
        ConfigError: no run, no such checkpoint, no adapter, or `out` exists.
    """
    params, spec, source, saved_step = restore_model(run_dir, step=step, role=role)
    if adapter and spec.lora is None:
        raise ConfigError(f"the {role} of {str(run_dir)!r} has no adapter: leave --adapter out")
    try:
        if adapter:
            save_adapter(out, params, spec, base=source, dtype=jax.numpy.dtype(dtype))
            return saved_step
        if spec.lora:
            params, spec = merged_into_base(params, spec, source)
        save_params(out, params, spec, source=source, dtype=jax.numpy.dtype(dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return saved_step


def adapter_keys(model: Mapping[str, Any]) -> tuple[LoraConfig | None, str | None]:
    """Return the keys of a run's model that say which adapter it trained."""
    lora = model.get("lora")  # runs of earlier versions have no such key
    return lora and from_tree(LoraConfig, lora, "model.lora."), model.get("adapter")
