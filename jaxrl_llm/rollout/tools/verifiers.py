"""What the policy is told of the tools of an environment of `verifiers`, which runs them itself."""

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any

from jaxrl_llm.data.verifiers_rows import load_verifiers
from jaxrl_llm.rollout.tools.loading import ToolsetTool, toolset


@toolset
def verifiers_tools(*, id: str, args: Mapping[str, Any] | None = None) -> list[ToolsetTool]:
    """Give the schemas of the tools of an environment, for the agent `verifiers_environment`.

    Args:
        id: of the environment.
        args: keywords of its `load_environment`.

    Returns:
        Its tools, which only the environment can run.

    Raises:
        ConfigError: there is no such environment.
    """
    env = load_verifiers(id, json.dumps(args or {}, sort_keys=True))
    return [
        ToolsetTool({"type": "function", "function": _schema(tool)}, _run_elsewhere)
        for tool in env.tool_defs or []
    ]


def _schema(tool: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} | tool.parameters
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def _run_elsewhere() -> Generator[Callable[..., Any], None, None]:
    raise RuntimeError("expected rollout.agent: verifiers_environment, which runs these tools")
    yield
