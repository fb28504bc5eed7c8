"""From a config to the engine that it names."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.config.errors import config_errors_at
from jaxrl_llm.config.functions import ConfigError
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import CACHE_TOLERANCE, FP8_TOLERANCE, TOLERANCE, RolloutConfig
from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.kernel_choice import choose_cache_kernel, choose_experts
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.functional import FunctionalModel
from jaxrl_llm.models.kernels import KernelChoice
from jaxrl_llm.models.model import Model, base_model, decoder_spec
from jaxrl_llm.monitoring import job_context
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.rollout.engine import Engine, EngineSettings
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout

log = logging.getLogger(__name__)


@activity("starting the engine")
def make_engine(config: TrainConfig, model: Model, layout: Layout, folder: Path) -> Engine:
    """Build the engine that the config names, here or on nodes of its own."""
    job = job_context.current()
    if job is not None and job.engine_hosts:
        from jaxrl_llm.rollout.remote import RemoteEngine

        return RemoteEngine(
            job,
            decoder_spec(base_model(model)),
            dtype=config.model.dtype,
            max_tokens=engine_settings(config).max_tokens,
        )
    return local_engine(config, model, layout, folder)


def local_engine(config: TrainConfig, model: Model, layout: Layout, folder: Path) -> Engine:
    """Build the engine on this process's devices; vLLM's begins to start, and writes to the folder.

    Raises:
        ConfigError: there can be no such engine here.
    """
    if config.rollout.engine == "native":
        engine = native_engine(config, model, layout)
        engine.compile_ahead()
        return engine
    from jaxrl_llm.rollout.vllm.engine import VllmEngine

    with config_errors_at("rollout"):
        return VllmEngine(
            decoder_spec(base_model(model)),
            engine_settings(config),
            source=config.model.path,
            config=config.rollout.vllm,
            folder=folder / "vllm",
        )


def native_engine(
    config: TrainConfig, model: Model, layout: Layout, *, choice: KernelChoice | None = None
) -> NativeEngine:
    """Build the native engine for the longest prompt and answer of a run.

    Args:
        config: of the run.
        model: the policy.
        layout: how sequences and weights are split.
        choice: how it reads its cache; None: `choose_cache_kernel`.
    """
    tokenizer = None
    if config.rollout.has_episodes:  # loaded when a turn first has a text that stops it
        tokenizer = functools.partial(load_tokenizer, config.model.path)
    model, settings = base_model(model), engine_settings(config)
    kernels = config.model.attention, config.model.experts
    return _native_engine("rollout", model, settings, layout, kernels, tokenizer, choice)


def _native_engine(
    key: str,
    model: Model,
    settings: EngineSettings,
    layout: Layout,
    kernels: tuple[str, str],
    tokenizer: Callable[[], Any] | None,
    choice: KernelChoice | None = None,
) -> NativeEngine:
    """Build the native engine with the kernels that `model.attention` and `model.experts` name.

    Errors of the engine's begin with `key`.
    """
    attention, experts = kernels
    if isinstance(model, Decoder):
        spec, is_int8 = model.spec, settings.kv_cache_dtype == "int8"
        grouped = choose_experts(experts, spec, layout, settings.dtype)
        layout = dataclasses.replace(layout, grouped_kernels=grouped)
        if choice is None:
            choice = choose_cache_kernel(attention, spec, layout, settings.dtype, is_int8=is_int8)
    if isinstance(model, FunctionalModel) and model.cached is None:
        log.warning(
            "model.function has no cache: for each token that is drawn its whole sequence is "
            "computed again, which is slow; give it init_cache and extend"
        )
    kernel = choice.kernel if choice is not None and isinstance(model, Decoder) else None
    with config_errors_at(key):
        return NativeEngine(model, settings, layout=layout, kernel=kernel, tokenizer=tokenizer)


def engine_settings(config: TrainConfig) -> EngineSettings:
    """Return room for the longest prompt and answer of a run."""
    rollout = config.rollout
    step = config.batch.prompts_per_step * rollout.samples_per_prompt
    return EngineSettings(
        max_running_sequences=rollout.max_running_sequences,
        max_tokens=config.longest_sequence,
        cache_gb=rollout.kv_cache_gb,
        dtype=config.model.dtype,
        quantization=rollout.quantization,
        kv_cache_dtype=rollout.kv_cache_dtype,
        cached_sequences=step * (rollout.staleness + 1) if rollout.has_episodes else None,
        record_routes=config.model.router_replay == "rollout",
    )


@activity("starting the engine")
def loaded_engine(
    model: Model,
    params: Any,
    settings: EngineSettings,
    layout: Layout,
    tokenizer: Any,
    *,
    sequences: int | None = None,
) -> NativeEngine:
    """Build the native engine for a trained policy and load its weights, as version 0.

    Args:
        model: without an adapter.
        params: its weights.
        settings: room and precision.
        layout: how sequences and weights are split.
        tokenizer: of transformers; for requests with texts that stop them.
        sequences: how many are to be sampled first; None: as many as may run.

    Raises:
        ConfigError: the model has fewer positions, or the engine can't be built so.
    """
    if model.max_positions is not None and settings.max_tokens > model.max_positions:
        raise ConfigError(
            f"the longest prompt and answer have {settings.max_tokens} tokens, but the model has "
            f"{model.max_positions} positions (max_position_embeddings)"
        )
    kernels = "auto", "auto"
    engine = _native_engine("the engine", model, settings, layout, kernels, lambda: tokenizer)
    try:
        engine.compile_ahead(sequences)
        engine.load(params, version=0)
    except BaseException:
        engine.close()
        raise
    return engine


def is_low_precision(rollout: RolloutConfig) -> bool:
    """Return whether an engine holds numbers of fewer bits than the trainer."""
    return rollout.quantization != "none" or rollout.kv_cache_dtype != "auto"


def agreement_tolerance(rollout: RolloutConfig) -> int | float:
    """Return the largest mean difference of engine's and trainer's log-probs, in nats."""
    if rollout.logprob_tolerance is not None:
        return rollout.logprob_tolerance
    by_part = [
        FP8_TOLERANCE if rollout.quantization == "fp8" else TOLERANCE,
        CACHE_TOLERANCE if rollout.kv_cache_dtype != "auto" else TOLERANCE,
    ]
    return max(by_part)
