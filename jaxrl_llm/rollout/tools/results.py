"""What comes of a call of a tool, or of a step of an environment."""

from typing import NamedTuple

from jaxrl_llm.config.errors import RunError


class ToolError(RunError):
    """Tools can't be run at all: no worker starts, the pool is closed, a journal is wrong."""


class ToolResult(NamedTuple):
    """What came of one call, or of one step of an environment.

    Attributes:
        name: of the tool; `environment` for a step.
        text: told to the model.
        reward: added to the reward of the turn that is answered.
        end: whether the episode ends here.
        failure: None; `failed`, `timeout` or `died`, of which the model is told; `broken` where the
            infrastructure failed, after all retries.
        score: what an environment returned at its end.
        seconds: that it took.
    """

    name: str
    text: str
    reward: float = 0.0
    end: bool = False
    failure: str | None = None
    score: float | None = None
    seconds: float = 0.0
