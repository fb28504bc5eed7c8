"""The keys of what a run logs."""

from dataclasses import dataclass

from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run says of itself, besides run_dir/metrics.jsonl."""

    tensorboard: bool = key(True, "write run_dir/tensorboard")
    wandb: str | None = key(None, "project at Weights & Biases; null does not log there")
    profile_steps: tuple[int, ...] = key(
        (), "steps whose trace and a summary of it go to run_dir/profile/step_<n>, as in [5]"
    )
