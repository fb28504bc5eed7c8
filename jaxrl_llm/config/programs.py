"""Which program a run's config is of, and by which functions its policy learns."""

from collections.abc import Mapping
from typing import Any, Literal


def program_of(config: Mapping[str, Any]) -> Literal["train", "sft", "prefer"]:
    """Return the program whose run has a resolved config, by a key that it alone has.

    >>> program_of({"run_dir": "runs/a", "reference": None})
    'prefer'
    """
    if "rollout" in config:
        return "train"
    return "prefer" if "reference" in config else "sft"


def learned_by(algorithm: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the functions that a policy learns by, by key of the algorithm.

    A list of functions is their sum. What a run of an earlier version lacks is left out.

    >>> learned_by({"advantage": ["grpo", {"fn": "reverse_kl"}], "loss": {"fn": "ppo_clip"}})
    {'advantage': 'grpo + reverse_kl', 'loss': 'ppo_clip'}
    >>> learned_by({"advantage": "grpo", "loss": None, "distillation": "generalized_jsd"})
    {'distillation': 'generalized_jsd'}
    >>> learned_by({"advantage": "grpo", "pairs": "all_pairs", "pair_loss": {"fn": "dpo"}})
    {'pairs': 'all_pairs', 'pair_loss': 'dpo'}
    """
    keys = ("advantage", "loss", "distillation")
    if algorithm.get("pairs"):
        keys = ("pairs", "pair_loss")
    elif algorithm.get("distillation") and not algorithm.get("loss"):
        keys = ("distillation",)
    given = {key: algorithm.get(key) for key in keys}
    return {key: function_name(value) for key, value in given.items() if value}


def function_name(named: Any) -> str:
    """Return the name of a function of a resolved config, or of the sum of a list of them.

    >>> function_name({"fn": "dpo", "beta": 0.1})
    'dpo'
    """
    if isinstance(named, list):
        return " + ".join(map(function_name, named))
    return named["fn"] if isinstance(named, Mapping) else str(named)
