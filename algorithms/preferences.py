"""Losses of preferences: of pairs of answers, of answers with a label, and of labelled steps.

Of a pair there are `chosen_logps` and `rejected_logps`, their lengths, and the same under a
reference; of an answer with a label `logps` and `labels`; of steps `step_logits` and `step_labels`.
A function's parameters say which of these it needs.
"""

from jaxrl_llm.algorithms.losses_labelled import apo_zero_labelled, kto
from jaxrl_llm.algorithms.losses_pair import (
    PairLoss,
    apo_down,
    apo_zero,
    dpo,
    dpo_length_normalized,
    ipo,
    nca,
    robust_dpo,
    rpo,
    slic,
)
from jaxrl_llm.algorithms.losses_pair_without_reference import (
    bradley_terry,
    bradley_terry_margin,
    cpo,
    orpo,
    simpo,
)
from jaxrl_llm.algorithms.losses_steps import step_cross_entropy

__all__ = [
    "PairLoss",
    "apo_down",
    "apo_zero",
    "apo_zero_labelled",
    "bradley_terry",
    "bradley_terry_margin",
    "cpo",
    "dpo",
    "dpo_length_normalized",
    "ipo",
    "kto",
    "nca",
    "orpo",
    "robust_dpo",
    "rpo",
    "simpo",
    "slic",
    "step_cross_entropy",
]
