"""The agent that a config names, and whether it fits the tools and the environment."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.config import functions
from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.functions import FunctionSpec, closest, load_function
from jaxrl_llm.config.sections import AgentConfig
from jaxrl_llm.rollout.gateway.programs import check_program
from jaxrl_llm.rollout.gateway.server import Gateway, MakeTemplate, check_server_packages
from jaxrl_llm.rollout.tools.loading import TOOLS_KEY, check_tool, load_environment, load_tools
from jaxrl_llm.rollout.tools.signature import tool_schema
from jaxrl_llm.workers.limits import Limits

GIVEN = ("chat", "tools", "environment", "row", "rng", "gateway")
"""What an agent may ask for by parameter name."""


def load_agent(config: AgentConfig) -> Callable[..., Any]:
    """Return the agent of a config.

    Raises:
        ConfigError: there is no such coroutine function, or it asks for what there is not.
    """
    default = "with_environment" if config.environment else "with_tools"
    spec = config.agent or FunctionSpec(default)
    agent = load_function(spec, functions.AGENTS, passed=None, key="rollout.agent")
    function = agent.func if isinstance(agent, functools.partial) else agent
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"rollout.agent: {spec.fn!r} is no coroutine, expected `async def`")
    for name in asked_by(agent):
        if name not in GIVEN:
            raise ConfigError(
                f"rollout.agent: {spec.fn!r} asks for {name!r}, which no episode has; "
                + closest(name, GIVEN)
            )
    check_asked(spec, asked_by(agent), config)
    if function.__name__ == "openai_program":
        check_program(spec.kwargs)
        check_server_packages()
    return agent


def check_episode_functions(config: AgentConfig) -> None:
    """Import the agent, the tools and the environment of a config, before anything else is loaded.

    Raises:
        ConfigError: one of them is not there, does not fit, or can't be had on this machine.
    """
    load_agent(config)
    for spec in config.tools:
        for tool in load_tools(spec):
            if tool.schema is None and not tool.is_fixture:
                tool_schema(tool.definition, tool.name, hidden=spec.kwargs, key=TOOLS_KEY)
        check_tool(spec, config.tool_process.timeout_s)
    if config.environment is not None:
        load_environment(config.environment)


def check_asked(spec: FunctionSpec, asked: Sequence[str], config: AgentConfig) -> None:
    """Refuse tools or an environment that the agent does not ask for, and one without it.

    Raises:
        ConfigError: one of these.
    """
    if config.tools and "tools" not in asked:
        raise ConfigError(
            f"rollout.tools is set, but the agent {spec.fn!r} does not ask for `tools`: no tool "
            "would ever be called"
        )
    if (config.environment is not None) != ("environment" in asked):
        state = "is set" if config.environment is not None else "is null"
        does = "asks" if "environment" in asked else "does not ask"
        raise ConfigError(
            f"rollout.environment {state}, but the agent {spec.fn!r} {does} for `environment`"
        )


def asked_by(agent: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that an agent asks for."""
    return tuple(
        name
        for name, p in inspect.signature(agent).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    )


def open_gateway(
    config: AgentConfig, agent: Callable[..., Any], template: MakeTemplate
) -> Gateway | None:
    """Return what serves the policy to programs, if the agent asks for it.

    Args:
        config: of episodes.
        agent: of the config.
        template: from the tools of a request to the chat template.

    Raises:
        ConfigError: a package is missing.
    """
    if "gateway" not in asked_by(agent):
        return None
    process = config.tool_process
    limits = Limits(process.memory_gb, process.max_processes, process.pass_env)
    return Gateway(template, limits, one_at_a_time=config.order == "lockstep")
