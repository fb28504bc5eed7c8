"""Evaluation and validation: sampling, scores, estimators."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import attach

if TYPE_CHECKING:
    from jaxrl_llm.training.validation import best_at, interval, majority_at

attach(__name__)
