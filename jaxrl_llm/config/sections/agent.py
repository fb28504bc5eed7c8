"""The keys of episodes: agents, tools, environments, and what bounds them."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import STRICT, Function, Number, Section, Several, function_key
from jaxrl_llm.config.sections.reward import ProcessConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EpisodeLimitsConfig(Section):
    """What bounds one episode."""

    turns: int = Field(default=8, ge=1, description="turns that the policy draws at most")
    turn_tokens: int | None = Field(
        default=None, ge=1, description="tokens of one turn; null: as many as are left"
    )
    observation_tokens: int = Field(
        default=512,
        ge=4,
        description=(
            "tokens that a tool or an environment may say at once; the middle of a longer text is "
            "left out"
        ),
    )
    parallel_calls: int = Field(
        default=4, ge=1, description="calls of tools in one turn; further ones get an error"
    )
    timeout_s: Number | None = Field(
        default=None,
        gt=0,
        description="seconds for a whole episode, which then ends with what it has; null: no limit",
    )
    broken_share: Number = Field(
        default=0.5,
        ge=0,
        le=1,
        description=(
            "stop when more than this share of the episodes sampled together are broken, for no "
            "fault of the policy's; 1 never stops as long as one is not"
        ),
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ToolProcessConfig(ProcessConfig):
    """The processes in which tools and environments run."""

    workers: int = Field(
        default=2,
        ge=0,
        description="processes; 0 runs tools in this process, without a time limit",
    )
    timeout_s: Number = Field(
        default=10.0, gt=0, description="seconds for one call, or one step of an environment"
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="new attempts at a call whose infrastructure failed (BrokenTool)",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AgentConfig(Section):
    """Who leads an episode, and what the policy may use in it."""

    agent: Function | None = function_key(
        kinds.AGENTS,
        None,
        "coroutine that leads an episode; null: with_environment or with_tools where there "
        "are such, else one_answer",
    )
    tools: Several[Function] = Field(
        default=(),
        description="functions that the policy may call; their signatures tell it how",
        json_schema_extra={"function": {"home": kinds.TOOLS, "passed": None}},
    )
    environment: Function | None = function_key(
        kinds.ENVIRONMENTS, None, "generator function to which the policy's turns are told"
    )
    call_format: str | None = Field(
        default=None,
        description=(
            "how the model writes calls of tools: hermes, qwen3_coder, llama3_json, pythonic, "
            "mistral, deepseek or harmony; null: as its chat template does"
        ),
    )
    order: Literal["lockstep", "free"] = Field(
        default="lockstep",
        description=(
            "lockstep samples the turns of all episodes in rounds, with the same result bit for "
            "bit whatever time tools take; free samples each turn at once, for scale"
        ),
    )
    limits: EpisodeLimitsConfig = Field(default_factory=EpisodeLimitsConfig)
    tool_process: ToolProcessConfig = Field(default_factory=ToolProcessConfig)

    @property
    def has_episodes(self) -> bool:
        """Return whether there is anything but plain answers."""
        return bool(self.agent or self.tools or self.environment)


def episodes_have_one_process(
    config: AgentConfig, processes: int, prefix: str = ""
) -> Iterator[str]:
    """Refuse several processes that sample, of which each would run the tools."""
    if config.has_episodes and processes > 1:
        given = [name for name in ("agent", "tools", "environment") if getattr(config, name)]
        yield (
            f"{prefix}{given[0]} needs one process, got {processes}, of which each would run it: "
            "start one"
        )
