"""The keys of what a run logs."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config.keys import STRICT, Section, Several


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig(Section):
    """What a run says of itself, besides run_dir/metrics.jsonl."""

    tensorboard: bool = Field(default=True, description="write run_dir/tensorboard")
    wandb: str | None = Field(
        default=None, description="project at Weights & Biases; null does not log there"
    )
    profile_steps: Several[int] = Field(
        default=(),
        description=(
            "steps whose trace and a summary of it go to run_dir/profile/step_<n>, as in [5]"
        ),
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainLogConfig(LogConfig):
    """The same for a run that samples answers."""

    answers_every: int = Field(
        default=50,
        ge=0,
        description=(
            "show a few answers of every n-th step, of the first and of the last, on the screen "
            "and to trackers; 0 shows none"
        ),
    )
