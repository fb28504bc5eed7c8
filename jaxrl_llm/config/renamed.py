"""Keys that have other names now: an old one is refused with the new one named.

Only what an earlier version has written, as a run's `config.yaml`, is read with them.
"""

from typing import Any

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


def with_new_names(tree: Any) -> Any:
    """Return a nested mapping in which keys that were renamed have their new names.

    >>> with_new_names({"seed": 1, "reward": {"scorer": "gsm8k"}})
    {'seed': 1, 'reward': {'function': 'gsm8k'}}
    """
    return _with_new_names(tree, "")


def _with_new_names(tree: Any, prefix: str) -> Any:
    if not isinstance(tree, dict):
        return tree
    renewed = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        new = RENAMED[key].rpartition(".")[2] if key in RENAMED else name
        renewed[new] = _with_new_names(value, f"{key}.")
    return renewed
