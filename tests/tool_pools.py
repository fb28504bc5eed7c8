"""Tools and environments of tests, as a config names them."""

from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.rollout.tools.session import SessionPool


def open_tools(tools, environment=None, **process):
    """Return what runs tools; `process` are keys of `rollout.tool_process`."""
    config = AgentConfig(tools=tuple(tools), environment=environment, tool_process=process)
    return SessionPool(config)
