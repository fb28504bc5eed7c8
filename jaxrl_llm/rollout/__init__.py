"""Engines that sample from the policy."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.rollout.agents.chat import Answer, Chat
    from jaxrl_llm.rollout.engine import (
        Completion,
        Engine,
        EngineError,
        EngineSettings,
        Receipt,
        Request,
        SamplingParams,
    )
    from jaxrl_llm.rollout.native.engine import NativeEngine
    from jaxrl_llm.rollout.observation import BrokenTool, EpisodeRow, Observation
    from jaxrl_llm.rollout.rollouts import Episode, Rollouts, lay_out, sample

attach(__name__)
