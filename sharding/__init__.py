"""Meshes, rules from logical to mesh axes, and moves between layouts."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.sharding.layout import AXES, DEFAULT_RULES, ROLLOUT_RULES, Layout, make_mesh
    from jaxrl_llm.sharding.reshard import reshard, to_device, to_host

attach(__name__)
