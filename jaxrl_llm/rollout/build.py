"""From a config to the engine that it names."""

from pathlib import Path

from jaxrl_llm.cluster import context
from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.functions import ConfigError
from jaxrl_llm.config.train import TrainConfig
from jaxrl_llm.models.lora import without_adapter
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout


def make_engine(config: TrainConfig, spec: ModelSpec, layout: Layout, folder: Path) -> Engine:
    """Build the engine that the config names, here or on nodes of its own."""
    job = context.current()
    if job is not None and job.engine_hosts:
        from jaxrl_llm.rollout.remote import RemoteEngine

        return RemoteEngine(
            job,
            without_adapter(spec),
            dtype=config.model.dtype,
            max_tokens=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        )
    return local_engine(config, spec, layout, folder)


def local_engine(config: TrainConfig, spec: ModelSpec, layout: Layout, folder: Path) -> Engine:
    """Build the engine on this process's devices; vLLM's begins to start, and writes to the folder.

    Raises:
        ConfigError: there can be no such engine here.
    """
    if config.rollout.engine == "native":
        return native_engine(config, spec, layout)
    if distributed.count() > 1:
        raise ConfigError(
            f"rollout.engine is vllm, but the run has {distributed.count()} training processes: "
            "give vLLM nodes of its own (rollout.nodes), or train by one process"
        )
    from jaxrl_llm.rollout.vllm.engine import VllmEngine

    rollout = config.rollout
    with config_errors_at("rollout"):
        return VllmEngine(
            without_adapter(spec),
            source=config.model.path,
            config=rollout.vllm,
            slots=rollout.slots,
            max_tokens=config.data.max_prompt_tokens + rollout.max_new_tokens,
            cache_gb=rollout.cache_gb,
            dtype=config.model.dtype,
            folder=folder / "vllm",
        )


def native_engine(config: TrainConfig, spec: ModelSpec, layout: Layout) -> NativeEngine:
    """Build the native engine for the longest prompt and answer of a run."""
    rollout = config.rollout
    with config_errors_at("rollout"):
        return NativeEngine(
            without_adapter(spec),
            layout=layout,
            slots=rollout.slots,
            max_tokens=config.data.max_prompt_tokens + rollout.max_new_tokens,
            cache_gb=rollout.cache_gb,
            dtype=config.model.dtype,
        )
