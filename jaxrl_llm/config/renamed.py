"""Keys that have other names now: an old one is refused with the new one named."""

RENAMED = {
    "algorithm.bypass": "algorithm.use_rollout_logprobs",
    "algorithm.keep": "algorithm.group_filter",
    "algorithm.max_draws": "algorithm.max_generation_batches",
    "cache_gb": "kv_cache_gb",
    "data.template": "data.chat_template_kwargs",
    "log.tensorboard": "log.trackers",
    "log.wandb": "log.trackers",
    "reward.model": "reward.classifier",
    "reward.scorer": "reward.function",
    "reward_model": "implicit_reward_model",
    "rollout.cache_gb": "rollout.kv_cache_gb",
    "rollout.slots": "rollout.max_running_sequences",
    "rollout.vllm.options": "rollout.vllm.engine_args",
    "slots": "max_running_sequences",
    "template": "chat_template_kwargs",
}
"""New names by old ones."""


def renamed(name: str) -> str | None:
    """Return how an old key is refused, or None for a key that was never one.

    >>> renamed("reward.scorer")
    'reward.scorer was renamed to reward.function'
    """
    return f"{name} was renamed to {RENAMED[name]}" if name in RENAMED else None
