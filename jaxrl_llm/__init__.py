"""Reinforcement learning for large language models as pure JAX functions over a named mesh."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach
from jaxrl_llm.version import __version__

if TYPE_CHECKING:
    from jaxrl_llm.config.errors import ConfigError, RunError
    from jaxrl_llm.config.programs import (
        EvaluateConfig,
        PreferConfig,
        ServeConfig,
        SftConfig,
        TrainConfig,
        load_config,
    )
    from jaxrl_llm.evaluate import evaluate
    from jaxrl_llm.prefer import prefer
    from jaxrl_llm.reporting.page import write_report
    from jaxrl_llm.runs.compile_cache import use_compilation_cache
    from jaxrl_llm.serve import serve
    from jaxrl_llm.sft import sft
    from jaxrl_llm.train import train
    from jaxrl_llm.training.export import export_model, push_model
    from jaxrl_llm.training.policy import Policy, load_policy
    from jaxrl_llm.training.run import Run, open_run
    from jaxrl_llm.training.run_files import RunFiles, read_run
    from jaxrl_llm.types import Batch, Rows

attach(__name__)
