"""Engines that sample from the policy."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.rollout.chat import Answer, Chat
    from jaxrl_llm.rollout.engine import Engine, EngineError, EngineSettings
    from jaxrl_llm.rollout.episode import Episode
    from jaxrl_llm.rollout.native.engine import NativeEngine
    from jaxrl_llm.rollout.observation import BrokenTool, EpisodeRow, Observation
    from jaxrl_llm.rollout.sampling import Rollouts, lay_out, sample
    from jaxrl_llm.rollout.types import Completion, Receipt, Request, SamplingParams

attach(__name__)
