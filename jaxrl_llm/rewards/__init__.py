"""Reward functions and how they are run."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.rewards.functions import arithmetic, by_source, gsm8k, last_boxed, math
    from jaxrl_llm.rewards.remote import classify, judge
    from jaxrl_llm.rewards.worker import Unscored

attach(__name__)
