"""The keys of how data are cut."""

from dataclasses import dataclass

from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a step's data are cut."""

    prompts_per_step: int = key(64, "P: prompts sampled in a step")
    prompts_per_minibatch: int | None = key(None, "prompts in one update; null takes all of them")
    epochs_per_step: int = key(1, "passes over a step's data")
    max_tokens_per_device: int = key(
        16384, "tokens in one forward and backward pass: a limit of memory, never exceeded"
    )


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig:
    """How the examples are cut."""

    examples_per_step: int = key(64, "examples in one update")
    max_tokens_per_device: int = key(
        16384, "tokens in one forward and backward pass: a limit of memory, never exceeded"
    )
