"""The keys of what a run logs."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.keys import STRICT, Function, Section, Several, function_key


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig(Section):
    """What a run says of itself, besides run_dir/metrics.jsonl."""

    trackers: Several[Function] = function_key(
        kinds.TRACKERS,
        (FunctionSpec("tensorboard"),),
        "list of functions in monitoring.trackers.functions, where each step goes besides; [] has "
        "none",
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
