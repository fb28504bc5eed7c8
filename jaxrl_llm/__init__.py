"""Reinforcement learning for large language models as pure JAX functions over a named mesh."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.config.errors import ConfigError as ConfigError
    from jaxrl_llm.config.errors import RunError as RunError
    from jaxrl_llm.config.evaluate import EvaluateConfig as EvaluateConfig
    from jaxrl_llm.config.serve import ServeConfig as ServeConfig
    from jaxrl_llm.config.sft import SftConfig as SftConfig
    from jaxrl_llm.config.train import TrainConfig as TrainConfig
    from jaxrl_llm.config.train import load_config as load_config
    from jaxrl_llm.evaluate import evaluate as evaluate
    from jaxrl_llm.runs.export import export_model as export_model
    from jaxrl_llm.serve import serve as serve
    from jaxrl_llm.sft import sft as sft
    from jaxrl_llm.train import train as train

attach(
    __name__,
    {
        "config.errors": ["ConfigError", "RunError"],
        "config.evaluate": ["EvaluateConfig"],
        "config.serve": ["ServeConfig"],
        "config.sft": ["SftConfig"],
        "config.train": ["TrainConfig", "load_config"],
        "evaluate": ["evaluate"],
        "runs.export": ["export_model"],
        "serve": ["serve"],
        "sft": ["sft"],
        "train": ["train"],
    },
)
