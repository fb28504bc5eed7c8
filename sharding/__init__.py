"""Meshes, rules from logical to mesh axes, and moves between layouts."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.sharding.layout import Layout
    from jaxrl_llm.sharding.mesh import AXES, make_mesh
    from jaxrl_llm.sharding.offload import to_device, to_host
    from jaxrl_llm.sharding.reshard import reshard
    from jaxrl_llm.sharding.rules import DEFAULT_RULES, ROLLOUT_RULES

attach(__name__)
