"""The keys of the algorithm."""

from dataclasses import dataclass

from jaxrl_llm.config.functions import FunctionSpec
from jaxrl_llm.config.load import key


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is optimised. Each function's keyword arguments are its keys."""

    advantage: FunctionSpec = key(FunctionSpec("grpo"), "function in algorithms.advantages")
    loss: FunctionSpec = key(FunctionSpec("ppo_clip"), "function in algorithms.losses")
    reduce: FunctionSpec = key(FunctionSpec("token_mean"), "function in algorithms.reduce")
    kl_loss: FunctionSpec | None = key(None, "KL to the reference in the loss: algorithms.kl")
    kl_reward: FunctionSpec | None = key(None, "KL to the reference in the reward: algorithms.kl")
    kl_coef: float = key(0.001, "weight of the KL term")
    kl_controller: FunctionSpec = key(
        FunctionSpec("fixed"), "how kl_coef moves from step to step: algorithms.kl"
    )
    entropy_coef: float = key(0.0, "weight of the entropy bonus")
    correction: tuple[FunctionSpec, ...] | None = key(
        None,
        "functions in algorithms.correction; their weights multiply those of the loss; null takes "
        "truncated_token where vLLM samples, and none else",
    )
    use_rollout_logprobs: bool = key(
        False, "take the engine's log-probs as the old ones, without a second pass"
    )
    high_covariance: FunctionSpec | None = key(
        None, "what marks tokens for clip_cov and kl_cov: select_clip_cov, select_kl_cov"
    )
    penalty: FunctionSpec | None = key(
        None, "function in algorithms.shaping; what it returns [B] is added to the scores"
    )
    group_filter: FunctionSpec | None = key(
        None, "which groups to train on, in algorithms.shaping; more are drawn for the others"
    )
    max_generation_batches: int = key(
        10, "batches of prompts that a step may draw to keep enough groups"
    )
