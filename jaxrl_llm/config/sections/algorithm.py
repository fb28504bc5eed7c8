"""The keys of the algorithm."""

from pydantic import Field
from pydantic.dataclasses import dataclass

from jaxrl_llm.config import kinds
from jaxrl_llm.config.keys import (
    STRICT,
    Function,
    Number,
    OneOrMore,
    Section,
    Several,
    function_key,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmConfig(Section):
    """What is optimised. Each function's keyword arguments are its keys."""

    advantage: OneOrMore = function_key(
        kinds.ADVANTAGES,
        "grpo",
        "function in algorithms.advantages; of a list the sum, each times its keyword `weight` (1)",
        several=True,
    )
    loss: Function | None = function_key(
        kinds.LOSSES,
        "ppo_clip",
        "function in algorithms.losses; null, where distillation is all that is learned",
    )
    reduce: Function = function_key(kinds.REDUCTIONS, "token_mean", "function in algorithms.reduce")
    kl_loss: Function | None = function_key(
        kinds.KLS, None, "KL to the reference in the loss: algorithms.kl"
    )
    kl_reward: Function | None = function_key(
        kinds.KLS, None, "KL to the reference in the reward: algorithms.kl"
    )
    kl_coef: Number = Field(default=0.001, ge=0, description="weight of the KL term")
    kl_controller: Function = function_key(
        kinds.KLS, "fixed", "how kl_coef changes from step to step: algorithms.kl"
    )
    distillation: Function | None = function_key(
        kinds.DIVERGENCES,
        None,
        "divergence from the teacher in the loss, over the whole vocabulary or the tokens of "
        "teacher.top_k: algorithms.divergences",
    )
    distillation_coef: Number = Field(
        default=1.0, ge=0, description="weight of the divergence from the teacher"
    )
    entropy_coef: Number = Field(default=0.0, description="weight of the entropy bonus")
    correction: Several[Function] | None = function_key(
        kinds.CORRECTIONS,
        None,
        "functions in algorithms.correction, whose importance weights multiply "
        "the loss; null: truncated_token with vLLM and with an engine in low precision, else none",
    )
    use_rollout_logprobs: bool = Field(
        default=False,
        description="use the engine's log-probs as old log-probs, without a forward pass "
        "of the trainer",
    )
    high_covariance: Function | None = function_key(
        kinds.LOSSES,
        None,
        "function that selects tokens for clip_cov and kl_cov: select_clip_cov, select_kl_cov",
    )
    penalty: Function | None = function_key(
        kinds.SHAPING,
        None,
        "function in algorithms.shaping; its result [B] is added to the scores",
    )
    group_filter: Function | None = function_key(
        kinds.SHAPING,
        None,
        "function in algorithms.shaping that keeps groups to train on; more "
        "prompts are sampled in place of dropped ones",
    )
    max_generation_batches: int = Field(
        default=10,
        ge=1,
        description="batches of prompts that a step may take from at most: it stops when the "
        "group filter has refused more groups than all but one of them hold",
    )
