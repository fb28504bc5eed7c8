"""A trained policy to sample from: a Hugging Face directory or a run's checkpoint, in an engine."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.lora import without_adapter
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.runs.export import restore_model
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.offload import HOST
from jaxrl_llm.training.load_model import merged_into_base


class Policy(NamedTuple):
    """A model with what it takes to talk to it.

    Attributes:
        spec: the architecture, an adapter merged into it.
        params: its weights in float32; those of a directory in the host's memory.
        tokenizer: of transformers.
        stops: tokens that end an answer, as in training.
        step: of the checkpoint, None for a directory.
    """

    spec: ModelSpec
    params: Any
    tokenizer: Any
    stops: tuple[int, ...]
    step: int | None


def read_policy(path: str, layout: Layout, *, step: int | None = None) -> Policy:
    """Read the policy of a Hugging Face directory, or of a run.

    Args:
        path: a directory or repository as `load_params` takes it, or the folder of a run.
        layout: where the weights go.
        step: which checkpoint of a run; None takes the newest.

    Raises:
        ConfigError: nothing there can be read, it is no language model, or a directory has steps.
    """
    if (Path(path) / "checkpoints").is_dir():
        params, spec, source, step = restore_model(path, step=step)
        alone = without_adapter(spec)
        homes = layout.of(declare(alone))
        if spec.lora:
            params, spec = merged_into_base(params, spec, source, homes)
        else:
            params = distributed.put(params, homes)
    else:
        if step is not None:
            raise ConfigError(f"step={step}, but {path!r} is not a run: it has no checkpoints")
        source = path
        with config_errors_at("model"):
            spec = read_spec(path)
            if spec.value_head or spec.reward_head:
                raise ValueError(f"{path} ends in a value head, expected a language model")
            on_host = jax.tree.map(lambda s: s.with_memory_kind(HOST), layout.of(declare(spec)))
            params = load_params(path, spec, shardings=on_host)
    with config_errors_at("model"):
        tokenizer = load_tokenizer(source)
        return Policy(spec, params, tokenizer, stop_ids(tokenizer, source), step)
