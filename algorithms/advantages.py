"""Advantage estimators, by the names that a config uses.

An estimator's positional parameters are fields of a batch, its keyword arguments are its
hyper-parameters. Estimators from one score per answer give [B] (`to_tokens` spreads them over the
tokens), those that look at tokens give [B T], and those that ask for `values` give advantages and
returns.

An answer that is to count for nothing has a group of its own and a mask that is false everywhere:
the others' advantages are then what they would be without it.
"""

from jaxrl_llm.algorithms.advantages_distillation import reverse_kl
from jaxrl_llm.algorithms.advantages_optimal_baseline import (
    optimal_token_baseline,
    optimal_token_baseline_corrected,
    optimal_token_baseline_multi_turn,
)
from jaxrl_llm.algorithms.advantages_outcome import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_pass_at_k,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from jaxrl_llm.algorithms.advantages_process import prime
from jaxrl_llm.algorithms.advantages_token import (
    gae,
    gae_whitened,
    kl_penalized_rewards,
    reinforce_plus_plus,
    remax,
    reward_to_go,
    rewards_from_scores,
    to_tokens,
    whiten,
)
from jaxrl_llm.algorithms.advantages_turns import gae_turns, grpo_turns

__all__ = [
    "dr_grpo",
    "gae",
    "gae_turns",
    "gae_whitened",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_pass_at_k",
    "grpo_turns",
    "kl_penalized_rewards",
    "opo",
    "optimal_token_baseline",
    "optimal_token_baseline_corrected",
    "optimal_token_baseline_multi_turn",
    "prime",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "reverse_kl",
    "reward_to_go",
    "rewards_from_scores",
    "rloo",
    "to_tokens",
    "whiten",
]
