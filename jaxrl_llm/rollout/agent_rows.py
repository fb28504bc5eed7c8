"""verl's column `agent_name`: rows that ask for another agent than the config's are refused."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, split_name
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.data.row_fields import row_name

VERL_AGENTS = {"one_answer": "single_turn_agent", "with_tools": "tool_agent"}
"""Our agents by the names of verl's that do the same."""


def check_agent_rows(config: AgentConfig, rows: Iterable[Mapping[str, Any]], key: str) -> None:
    """Refuse rows whose `agent_name` is not that of the agent that leads their episodes.

    Args:
        config: of episodes.
        rows: of the data.
        key: of the config that names the files, for messages.

    Raises:
        ConfigError: a row asks for another agent.

    >>> check_agent_rows(AgentConfig(), [{}, {"agent_name": "single_turn_agent"}], "data")
    >>> check_agent_rows(AgentConfig(), [{"agent_name": "tool_agent"}], "data")
    Traceback (most recent call last):
    jaxrl_llm.config.errors.ConfigError: data: dataset row 0: got agent_name 'tool_agent', \
which is verl's name for with_tools; expected one_answer or single_turn_agent, as rollout.agent is
    """
    names = agent_names(config)
    for number, row in enumerate(rows):
        name = row.get("agent_name")
        if name is not None and name not in names:
            ours = {theirs: ours for ours, theirs in VERL_AGENTS.items()}.get(name)
            hint = f", which is verl's name for {ours}" if ours else ""
            raise ConfigError(
                f"{key}: {row_name(number, row)}: got agent_name {name!r}{hint}; expected "
                f"{' or '.join(names)}, as rollout.agent is"
            )


def agent_names(config: AgentConfig) -> list[str]:
    """Return the names by which rows may name the agent of a config.

    >>> agent_names(AgentConfig(tools=["calculator"]))
    ['with_tools', 'tool_agent']
    """
    default = "with_environment" if config.environment else "with_tools"
    spec = config.agent or FunctionSpec(default if config.has_episodes else "one_answer")
    name = split_name(spec.fn)[1]
    names = [name, VERL_AGENTS.get(name)]
    if name == "verl_agent_loop":
        names += [spec.kwargs.get("agent_name"), split_name(spec.kwargs.get("loop", ""))[1]]
    return [name for name in names if name]
